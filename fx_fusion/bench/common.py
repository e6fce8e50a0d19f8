"""What the benchmarks share: options, conditions, CSV files, tables, and how far a run is.

A benchmark is a `Bench`, and stands behind two commands that take the same options and measure
the same: `python -m fx_fusion.bench.NAME`, which needs torch alone, and `fx-fusion bench NAME`.

A CSV file holds its conditions (torch, machine, cores, date, command) as columns, the same in
every row, so that any reader of CSV files reads it and a figure never gets apart from them.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

#: The columns that tell how a row was measured; they follow the row's own.
CONDITIONS: Final = ("bench", "torch", "machine", "cores", "date", "command")
DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Table:
    """What a run shows at its end, for any printer.

    Attributes:
        title: What the figures are.
        header: The columns' names.
        lines: One tuple of texts for each line.
        note: What a reader must know to not misread it, "" for nothing.
    """

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """A benchmark.

    Attributes:
        name: Its name on the command line and in its CSV files, "cpu-step".
        module: Its module's name, "cpu_step".
        summary: One line on what it measures.
        add_options: Adds its own options to a parser; `--csv` is there already.
        cells: How many cells a run with these options measures.
        run: Measures and returns the rows, dataclasses. Its options hold `csv` and `conditions`
            too, so that it can write rows as it goes. Its second argument is a file to which
            each cell that is done adds a byte (`count_cell`), "" for none.
        table: The table of the rows.
        cannot: Why it can't run here, or with these options, "" if it can.
        machine: What it runs on; "" takes the processor's name.
    """

    name: str
    module: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    cells: Callable[[argparse.Namespace], int]
    run: Callable[[argparse.Namespace, str], list[Any]]
    table: Callable[[Sequence[Any], argparse.Namespace], Table]
    cannot: Callable[[argparse.Namespace], str] = lambda _: ""
    machine: Callable[[], str] = lambda: ""


class WholeNumbers(argparse.Action):
    """An option that takes whole numbers above 0 as `1,8,64`, as `1 8 64`, or mixed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the numbers as a tuple."""
        words = [word for value in values for word in value.split(",") if word]
        if not words or not all(word.strip().isdecimal() and int(word) for word in words):
            parser.error(
                f"argument {option_string}: {' '.join(values)!r} is not a list of whole numbers"
                " above 0; give them as 1,8,64"
            )
        setattr(namespace, self.dest, tuple(int(word) for word in words))


def add_numbers(
    parser: argparse.ArgumentParser,
    name: str,
    *older: str,
    default: Sequence[int],
    what: str,
) -> None:
    """Add an option that takes several whole numbers; `older` names go on working unlisted."""
    shown = ",".join(map(str, default))
    destination = name.removeprefix("--").replace("-", "_")
    parser.add_argument(
        name,
        nargs="+",
        action=WholeNumbers,
        default=tuple(default),
        metavar="N,N",
        help=f"{what} (default {shown})",
    )
    for other in older:
        parser.add_argument(
            other,
            nargs="+",
            action=WholeNumbers,
            dest=destination,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def add_sizes(
    parser: argparse.ArgumentParser, *, tokens: Sequence[int], hidden_sizes: Sequence[int]
) -> None:
    """Add the sizes of a benchmark of one site: `--tokens` and `--hidden-size`."""
    add_numbers(parser, "--tokens", default=tokens, what="rows of the reduced tensor")
    add_numbers(
        parser,
        "--hidden-size",
        "--hidden",
        "--hidden-sizes",
        default=hidden_sizes,
        what="hidden sizes",
    )


def add_number(
    parser: argparse.ArgumentParser, name: str, default: int, what: str, *, least: int = 1
) -> None:
    """Add an option that takes one whole number, `least` or above."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    parser.add_argument(
        name, type=number, default=default, metavar="N", help=f"{what} (default {default})"
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add `--dtype`."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help=f"(default {DTYPES[0]})"
    )


def parser_of(bench: Bench, program: str) -> argparse.ArgumentParser:
    """The benchmark's options; `program` is what the help calls it."""
    parser = argparse.ArgumentParser(prog=program, description=bench.summary)
    bench.add_options(parser)
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the rows and conditions to this file"
    )
    return parser


def problem(bench: Bench, options: argparse.Namespace) -> str:
    """Why a run can't be done as asked, found before anything is measured; "" if it can."""
    if options.csv is not None:
        folder = options.csv.absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or options.csv.is_dir():
            return (
                f"--csv {options.csv}: not a file in a folder that exists and can be written."
            )
    return bench.cannot(options)


def count_cell(progress: str) -> None:
    """Count one cell as done, from whichever process measures; nothing without a file."""
    if progress:
        with open(progress, "ab") as file:
            file.write(b".")


def conditions(bench: Bench, program: str, arguments: Sequence[str]) -> dict[str, str]:
    """The values of `CONDITIONS` for a run here and now."""
    words = list(arguments)
    for index, word in enumerate(words):
        # where the file lies is no condition, and is nobody's business
        if word == "--csv" and index + 1 < len(words):
            words[index + 1] = Path(words[index + 1]).name
        elif word.startswith("--csv="):
            words[index] = f"--csv={Path(word.removeprefix('--csv=')).name}"
    return {
        "bench": bench.name,
        "torch": str(torch.__version__),
        "machine": bench.machine() or processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "date": datetime.date.today().isoformat(),
        "command": f"{program} {shlex.join(words)}".strip(),
    }


def processor() -> str:
    """The processor's name and the instruction set torch uses, "AMD EPYC (AVX512)"."""
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def write_csv(path: Path, rows: Sequence[Any], given: Mapping[str, str]) -> None:
    """Write the rows, each with the conditions behind it."""
    records = [asdict(row) | dict(given) for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def plain(table: Table) -> str:
    """The table as text, its columns aligned to the right."""
    widths = [
        max(len(text) for text in column)
        for column in zip(table.header, *table.lines, strict=True)
    ]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in (table.header, *table.lines)
    ]
    return "\n".join([table.title, *([table.note] if table.note else []), *lines]) + "\n"


def main(bench: Bench, arguments: Sequence[str] | None = None) -> int:
    """What `python -m fx_fusion.bench.NAME` does; returns the exit status."""
    program = f"python -m fx_fusion.bench.{bench.module}"
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser_of(bench, program).parse_args(arguments)
    if cause := problem(bench, options):
        sys.stderr.write(f"{program}: {cause}\n")
        return 2
    options.conditions = conditions(bench, program, arguments)
    rows = bench.run(options, "")
    if options.csv is not None:
        write_csv(options.csv, rows, options.conditions)
    sys.stdout.write(plain(bench.table(rows, options)))
    return 0
