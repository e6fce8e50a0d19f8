"""Renew the generated parts of README.md: the sample's output and the table of reasons.

    python .ci/readme.py            print what README.md should be
    python .ci/readme.py --write    write it

The sample is the first Python block; it is run as a file named sample.py, and what it prints is
put behind it. The table comes from `fx_fusion.report`. A test compares README.md with this, so
that it cannot show what the package does not do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fx_fusion.report import REMEDIES, Reason

README = Path(__file__).resolve().parents[1] / "README.md"


def sample_output(readme: str) -> str:
    """What the first Python block prints, as a fenced block."""
    block = re.search(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    if block is None:
        raise SystemExit("README.md has no ```python block to run.")
    with tempfile.TemporaryDirectory() as directory:
        sample = Path(directory, "sample.py")
        sample.write_text(block[1], encoding="utf-8")
        done = subprocess.run(
            [sys.executable, sample.name],
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
    return f"```text\n{done.stdout.rstrip()}\n```"


def reasons_table() -> str:
    """One Markdown row a Reason: its name and its remedy, in the enum's order."""
    rows = ["| reason | what it means and what to do |", "| --- | --- |"]
    rows += [
        f"| `{reason.value}` | {REMEDIES[reason].replace('|', '/')} |" for reason in Reason
    ]
    return "\n".join(rows)


def with_part(readme: str, name: str, text: str) -> str:
    """The README with the part between its two markers replaced."""
    begin, end = f"<!-- {name}: written by .ci/readme.py -->", f"<!-- end of {name} -->"
    head, found_begin, rest = readme.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"README.md has no {begin} ... {end}; put both lines back.")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def renewed(readme: str) -> str:
    """The README with its generated parts made anew."""
    readme = with_part(readme, "reasons", reasons_table())
    return with_part(readme, "sample output", sample_output(readme))


def main() -> None:
    """Print the renewed README, or write it with --write."""
    text = renewed(README.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        README.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
