"""Random tensor-parallel programs: made of one seed, or of what hypothesis draws.

`generate(seed)` gives a program of one to four all_reduces with all that may stand between,
before and behind them. To look at a program, run it on two real processes and compare the
rewritten graph with the one before:

    python tests/passes/random_graphs.py --seed 17
    python tests/passes/random_graphs.py --seed 1000:2000     (prints only what is wrong)
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from random_oddities import OddityWriter
from random_programs import Program, Site


class ProgramWriter(OddityWriter):
    """Writes whole programs."""

    settings: dict[str, object]

    def program(self, *, plain: bool = False) -> Program:
        """A program; a plain one can be compiled whole and fuses at every site."""
        self._choose_kind(plain)
        self._choose_sizes(plain)
        count = self.pick({1: 3, 2: 4, 3: 1} if plain else {1: 3, 2: 4, 3: 2, 4: 1})
        for _ in range(count):
            if not plain and self.mode != "hidden" and self.chance(0.3):
                self.pick(self.oddities())()
            elif self.in_place:
                self.overwritten()
            else:
                self.site()
        if not self.in_place and self.chance(0.4):
            self.shuffle()
        disabled = not plain and self.chance(0.015)
        self._settle(disabled)
        outputs = dict.fromkeys([*self.unread(), *self.extra_outputs])
        return Program(
            inputs=tuple(self.inputs),
            lines=tuple(self.lines),
            outputs=tuple(outputs),
            sizes=self.sizes,
            mode=self.mode,
            settings=self.settings,
            disabled=disabled,
            functional=not self.in_place,
            decomposed=plain or self.chance(0.7),
            values=self._values(plain),
        )

    def _choose_kind(self, plain: bool) -> None:
        self.plain = plain
        modes = {"static": 75.0, "dynamic": 13, "marked": 4}
        if not plain:
            modes |= {"unbacked": 6, "hidden": 2}
        self.mode = self.pick(modes)
        self.in_place = not plain and self.mode == "static" and self.chance(0.03)
        self.settings = {}
        if plain or self.mode == "hidden":
            return
        option = self.pick({"none": 86, "merge": 6, "deterministic": 6, "kernel": 2})
        self.exact = option == "merge"
        if option == "merge":
            self.settings = {"merge_all_reduces": True}
        elif option == "deterministic":
            self.settings = {"deterministic": True}
        elif option == "kernel":
            self.settings = {"kernel": "aiter"}

    def _choose_sizes(self, plain: bool) -> None:
        self.dtype = self.pick({"bf16": 5, "fp32": 3, "fp16": 2})
        self.hidden_size = self.pick({64: 4, 63: 2, 96: 2, 8: 1})
        self.sizes = {"H": self.hidden_size}
        ranks = {2: 5.0, 3: 4, 4: 1}
        if self.mode == "static" and not plain:
            ranks[1] = 0.4
        rank = 2 if self.mode == "unbacked" else self.pick(ranks)
        smallest = {"static": 1, "unbacked": 4}.get(self.mode, 2)
        names = ("T", "B", "S")[: rank - 1]
        for place, name in enumerate(names):
            # All different, so that equal sizes aren't taken for one symbol.
            size = smallest + int(self.rng.random() * (7 if rank == 2 else 3))
            self.sizes[name] = size if self.mode == "static" else size + 4 * place
        static = self.mode in ("static", "hidden")
        self.tokens = tuple(self.sizes[name] if static else name for name in names)
        if self.mode == "unbacked":
            mask = self.given(self.tokens, "bool", "keep")
            kept = sum(index % 3 != 1 for index in range(mask.shape[0]))
            text = f"{mask}.nonzero().squeeze(-1)"
            self.keep = self.let(text, (kept,), "int32")

    def _settle(self, disabled: bool) -> None:
        """Bring what is expected in line with the options."""
        sites = [line.site for line in self.lines if line.site is not None]
        for site in sites:
            if disabled:
                site.allowed = {"disabled"}
            elif self.mode == "hidden":
                site.allowed = {"dynamic_hidden_size"}
            elif "kernel" in self.settings:
                site.allowed = {
                    "kernel_unavailable" if outcome == "fused" else outcome
                    for outcome in site.allowed
                }
            elif "merge_all_reduces" in self.settings and "summed_all_reduces" in site.allowed:
                site.allowed = {"fused"}

    def _values(self, plain: bool) -> str:
        if self.exact:
            return "integers"
        return self.pick({"normal": 9, "special": 0 if plain else 1})


def generate(seed: int, *, plain: bool = False) -> Program:
    """The program of this seed."""
    return ProgramWriter(random.Random(seed)).program(plain=plain)


def sites_of(programs: Sequence[Program]) -> list[Site]:
    """All sites of the programs."""
    return [site for program in programs for site in program.sites]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds on two processes; prints what is wrong. Returns the number of failures."""
    from random_batches import describe, run_on_two_ranks

    parser = argparse.ArgumentParser(description="Run random programs on two processes.")
    parser.add_argument("--seed", required=True, help="a seed, or a range such as 0:300")
    parser.add_argument("--compile", action="store_true", help="compile them, with Inductor")
    given = parser.parse_args(arguments)
    first, colon, last = given.seed.partition(":")
    seeds = range(int(first), int(last) if colon else int(first) + 1)
    if len(seeds) == 1:
        print(generate(seeds[0], plain=given.compile))
        if not given.compile:
            print(describe(seeds[0]))
    batch = run_on_two_ranks(seeds, compiled=given.compile, timeout=600)
    print("\n\n".join(batch.failures))
    print(batch.summary())
    return len(batch.failures)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
