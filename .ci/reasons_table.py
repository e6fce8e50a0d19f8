"""Print the README's table of reasons, or write it into the README.

    python .ci/reasons_table.py            print it
    python .ci/reasons_table.py --write    put it between the markers in README.md

The table comes from `fx_fusion.report`, so the README cannot say anything else; a test compares
the two.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fx_fusion.report import REMEDIES, Reason

BEGIN = "<!-- reasons: written by .ci/reasons_table.py -->"
END = "<!-- end of reasons -->"
README = Path(__file__).resolve().parents[1] / "README.md"


def reasons_table() -> str:
    """One Markdown row a Reason: its name and its remedy, in the enum's order."""
    rows = ["| reason | what it means and what to do |", "| --- | --- |"]
    rows += [
        f"| `{reason.value}` | {REMEDIES[reason].replace('|', '/')} |" for reason in Reason
    ]
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """The README's text with the table between the markers renewed."""
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md has no {BEGIN} ... {END}; put both lines back.")
    return f"{head}{BEGIN}\n{reasons_table()}\n{END}{tail}"


def main() -> None:
    """Print the table, or write it with --write."""
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(reasons_table())


if __name__ == "__main__":
    main()
