"""What a check returns, and how checks are run so that none can end the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

Status = Literal["ok", "warn", "fail"]
#: From well to bad.
STATUSES: Final[tuple[Status, ...]] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: What was checked, "torch".
        status: "ok"; "warn" where something is slower or riskier than it need be; "fail" where
            fx_fusion doesn't work, or ranks would hang.
        text: What was found.
        remedy: What to do about it, "" where there is nothing to do.
        shared: What every rank should find alike, None for what may differ.
        differs: The status where ranks differ in `shared`.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    shared: str | None = None
    differs: Status = "fail"


def run_checks(checks: Iterable[Callable[[], list[Check]]]) -> list[Check]:
    """Run the checks in order; one that raises becomes a warning with the error in it."""
    found: list[Check] = []
    for check in checks:
        try:
            found += check()
        except Exception as error:  # a check must not keep the others from being seen
            name = check.__name__.replace("_", " ")
            text = f"could not be checked: {type(error).__name__}: {error}"
            found.append(Check(name, "warn", text, "Please report this with the line above."))
    return found


def worst(checks: Iterable[Check]) -> Status:
    """The worst status among the checks."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")


def numbers_of(version: str) -> tuple[int, ...]:
    """A version's numbers, to compare it by: "0.7.2.post1+cu130" gives (0, 7, 2, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def count_in_environment(name: str, default: int) -> int:
    """A whole number that torchrun or the user has set, `default` if it isn't one."""
    value = os.environ.get(name, "").strip()
    return int(value) if value.isdecimal() else default
