"""The main job on one machine: fuse a small tensor-parallel Llama and compare it with eager.

    python -m fx_fusion.demo
    python -m fx_fusion.demo --layers 8 --hidden-size 512 --dtype bfloat16

A real `LlamaForCausalLM` with random weights (nothing is downloaded) is made tensor-parallel by
transformers' own plan, in processes that talk through gloo, or NCCL where each has a GPU. The
demo prints the fusion report, how far the result is from eager, and the time per step. The exit
status is 0 only if every check held.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fx_fusion.demo_rank import RankResult
    from fx_fusion.report import FusionReport

#: Sequences and tokens in the demo's input.
BATCH: Final = 2
TOKENS: Final = 64


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and print what happened.

    Args:
        arguments: The command line, without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 if every check held, 1 if one failed, 2 if the demo cannot run here.
    """
    options = parse(arguments)
    missing = [name for name in ("transformers", "accelerate") if not is_installed(name)]
    if missing:
        print(
            f'The demo needs {" and ".join(missing)}: pip install "fx-fusion[hf]"',
            file=sys.stderr,
        )
        return 2

    from fx_fusion.demo_rank import Job, run_rank
    from fx_fusion.errors import SpawnError
    from fx_fusion.testing import spawn

    # Everything is made here; nothing may ask a server.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.device == "cpu":
        # transformers takes an accelerator wherever it sees one.
        os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    with tempfile.TemporaryDirectory(prefix="fx_fusion_demo_") as directory:
        print(heading(options), flush=True)
        job = Job(
            directory,
            options.layers,
            options.hidden_size,
            options.dtype,
            options.device,
            BATCH,
            TOKENS,
            options.steps,
        )
        try:
            results = spawn(
                run_rank,
                options.world_size,
                device=options.device,
                timeout=options.timeout,
                args=(job,),
            )
        except SpawnError as error:
            print(f"WRONG: {error}", file=sys.stderr)
            return 1
    print(f"\n{results[0].report}\n\n{table(results, options)}\n")
    problems = find_problems(results, options)
    for problem in problems:
        print(f"WRONG: {problem}")
    print(closing_line(results, options))
    return 1 if problems else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the options; device and dtype are filled in from what the machine has."""
    parser = argparse.ArgumentParser(
        prog="python -m fx_fusion.demo",
        description="Fuse a small tensor-parallel Llama and compare it with eager.",
    )

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, help=f"{text} ({default})")

    number("--world-size", 2, "number of processes")
    number("--layers", 4, "decoder layers")
    number("--hidden-size", 256, "hidden size")
    number("--steps", 20, "timed steps of each way to run")
    number("--timeout", 600, "seconds until the demo gives up")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="(float32 on CPU, bfloat16 on a GPU)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(cuda if there is a GPU)")
    options = parser.parse_args(arguments)

    import torch

    from fx_fusion.demo_rank import HEAD_SIZE

    if options.hidden_size % (HEAD_SIZE * options.world_size):
        parser.error(
            f"--hidden-size {options.hidden_size} must be a multiple of {HEAD_SIZE} (the head"
            f" size) times --world-size {options.world_size}: every rank gets whole heads."
        )
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.dtype is None:
        options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    return options


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def is_installed(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


def heading(options: argparse.Namespace) -> str:
    """What runs, with which versions, where."""
    import torch

    import fx_fusion

    where = f"{options.world_size} processes on {options.device}"
    if options.device == "cuda":
        gpus = torch.cuda.device_count()
        name = torch.cuda.get_device_name(0)
        shared = ", shared by the ranks" if share_gpus(options) else ""
        where = f"{options.world_size} processes on {min(gpus, options.world_size)} x {name}{shared}"
    return (
        f"fx_fusion {fx_fusion.__version__}, torch {torch.__version__},"
        f" transformers {version('transformers')}\n"
        f"LlamaForCausalLM with random weights: {options.layers} layers, hidden size"
        f" {options.hidden_size}, {options.dtype}; input {BATCH} x {TOKENS} tokens\n"
        f"{where}; compiling, which takes a while the first time ..."
    )


def share_gpus(options: argparse.Namespace) -> bool:
    """Whether there are fewer GPUs than ranks."""
    import torch

    return bool(options.device == "cuda" and torch.cuda.device_count() < options.world_size)


def on_a_kernel(report: FusionReport) -> int:
    """How many rewritten sites run on a kernel that does all of it at once."""
    return sum(site.fused and site.kernel != "unfused" for site in report.sites)


def table(results: list[RankResult], options: argparse.Namespace) -> str:
    """Times and differences, a row for each way of running the model."""
    from fx_fusion.demo_rank import EAGER, FUSED, INDUCTOR

    report = results[0].report
    label = "fx_fusion" if on_a_kernel(report) else "fx_fusion (unfused path)"
    rows = [
        (
            "",
            f"{BATCH * TOKENS} tokens",
            "decode step",
            "largest difference from eager, on each rank",
        )
    ]
    for way, name in ((EAGER, "eager"), (INDUCTOR, "Inductor alone"), (FUSED, label)):
        step = max(result.seconds.get(way, 0.0) for result in results)
        decode = max(result.decode_seconds[way] for result in results)
        differences = "  ".join(
            f"{result.differences[way]:.2e}" for result in results if way in result.differences
        )
        times = [f"{1e3 * seconds:.2f} ms" if seconds else "-" for seconds in (step, decode)]
        rows.append((name, times[0], times[1], differences or "-"))
    lines = [f"{name:25}{step:>12}{decode:>14}    {rest}" for name, step, decode, rest in rows]
    lines.append(
        f"Median of {options.steps} steps on this machine, slowest rank; the three take turns. A"
        f" decode step has one token for each of {BATCH} sequences."
        f" Compiling with fx_fusion took {max(r.compile_seconds for r in results):.1f} s."
    )
    if share_gpus(options):
        lines.append(
            "Ranks that share a GPU take turns, so these times hold for no other machine."
        )
    return "\n".join(lines)


def bound(results: list[RankResult], options: argparse.Namespace) -> float:
    """How far a compiled logit may be from eager.

    Compiled and eager may round the residual stream differently at every site, by `eps` of the
    dtype relative to its size. Independent roundings add up like a random walk, so
    sites + 1 of them (the last for the logits) come to `eps * sqrt(sites + 1)` of the largest logit.
    The factor 4 is head room for the maximum over all logits.
    """
    import torch

    eps = torch.finfo(getattr(torch, options.dtype)).eps
    largest = max(result.largest_logit for result in results)
    sites: int = results[0].report.site_count
    return float(4 * eps * largest * (sites + 1) ** 0.5)


def find_problems(results: list[RankResult], options: argparse.Namespace) -> list[str]:
    """Everything that is not as it must be, a sentence each."""
    from fx_fusion.demo_rank import FUSED

    report = results[0].report
    problems = []
    if report.site_count == 0:
        problems.append("no all_reduce was found in the compiled model.")
    elif report.fused_count == 0:
        problems.append("no site was rewritten; the report gives the reasons.")
    if any(result.report != report for result in results):
        problems.append("the ranks' reports differ.")
    if len({result.digest for result in results}) > 1:
        problems.append("the ranks' results differ in some bit.")
    limit = bound(results, options)
    for rank, result in enumerate(results):
        difference = result.differences[FUSED]
        if not difference <= limit:
            problems.append(
                f"rank {rank} is {difference:.2e} from eager, more than {limit:.2e}."
            )
    return problems


def closing_line(results: list[RankResult], options: argparse.Namespace) -> str:
    """The one line to trust: what was fused, how far from eager, whether the ranks agree."""
    from fx_fusion.demo_rank import FUSED
    from fx_fusion.report_text import headline

    report = results[0].report
    difference = max(result.differences[FUSED] for result in results)
    agree = "agree" if len({result.digest for result in results}) == 1 else "DO NOT agree"
    return (
        f"{headline(report)}; largest difference from eager {difference:.2e} (at most {bound(results, options):.2e} allowed for"
        f" {options.dtype}); the {len(results)} ranks {agree} bit for bit."
    )


if __name__ == "__main__":
    sys.exit(main())
