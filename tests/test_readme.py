"""The README shows what the package does: its generated parts are what would be generated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fx_fusion.report import Reason

ROOT = Path(__file__).resolve().parents[1]


def test_the_generated_parts_of_the_readme_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci" / "readme.py")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    assert all(f"| `{reason.value}` |" in done.stdout for reason in Reason)
    current = (ROOT / "README.md").read_text(encoding="utf-8")
    assert current == done.stdout, "run: python .ci/readme.py --write"
