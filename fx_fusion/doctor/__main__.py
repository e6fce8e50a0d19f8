"""`python -m fx_fusion.doctor`: the checks as plain text, where the command line isn't installed.

It needs torch alone and looks at this process; `fx-fusion doctor` under torchrun compares ranks.
"""

from __future__ import annotations

import sys

from fx_fusion.doctor.check import worst
from fx_fusion.doctor.examination import examine


def main() -> int:
    """Print one line a check, and the remedy below it; the exit status is 1 if one fails."""
    checks = examine()
    for check in checks:
        sys.stdout.write(f"{check.status:4}  {check.name}: {check.text}\n")
        if check.remedy and check.status != "ok":
            sys.stdout.write(f"      {check.remedy}\n")
    return 1 if worst(checks) == "fail" else 0


if __name__ == "__main__":
    sys.exit(main())
