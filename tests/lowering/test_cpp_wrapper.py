"""The C++ wrapper calls a site's entry point, as the Python wrapper does."""

from __future__ import annotations

import os
import re
import time
from typing import Any, cast
from unittest import mock

import pytest
import torch
from inductor_jobs import HIDDEN, all_reduce, inputs
from op_support import bits
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from fx_fusion.lowering import inductor
from fx_fusion.lowering.cache import cache_folder
from fx_fusion.lowering.cpu_build import compiler
from fx_fusion.lowering.ops import all_reduce_add_rms_norm
from fx_fusion.testing import spawn

pytestmark = pytest.mark.skipif(compiler() == "", reason="there is no C++ compiler")

#: Compiled in seconds.
QUICK = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}
CALLS = 50
DISPATCHES = not torch.__version__.startswith("2.12.")


def sites(
    x: torch.Tensor,
    z: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """A site, an all_reduce that stays as it is, and two sites the pass has nothing to do with."""
    h = residual + all_reduce(x)
    norm = torch.nn.functional.rms_norm(h, (HIDDEN,), weight, 1e-6)
    plain = all_reduce(z).sin()
    other, _, reduced, rstd = all_reduce_add_rms_norm(
        z[0],
        None,
        weight,
        weight,
        1.0,
        "0",
        2,
        eps_tensor=eps,
        scale=0.5,
        norm_dtype=torch.float32,
        out_dtype=torch.bfloat16,
        weight_form="1+w",
        want_reduced=True,
        want_rstd=True,
    )
    last = all_reduce_add_rms_norm(norm, h, weight, None, 1e-5, "0", 2, want_norm=False)
    only = all_reduce_add_rms_norm(norm, h, None, None, 1e-5, "0", 2, weight_form="none")
    return norm, h, plain, other, reduced, rstd, last[0], only[0]


def given(rank: int, call: int, tokens: int) -> tuple[torch.Tensor, ...]:
    x, z, residual, weight = inputs(rank, call, tokens)
    eps = torch.tensor(1e-5 * (1 + call), dtype=torch.float64)
    return x, z[None].clone(), residual, weight * 1.5, eps


def compiled_sites(**options: Any) -> Any:
    return torch.compile(sites, backend="fx_fusion", dynamic=True, options={**QUICK, **options})


def run(rank: int, world_size: int, directory: str, is_cold: bool) -> dict[str, Any]:
    """Calls of several sizes, one of them again and again, and what was seen.

    In a process with a cold cache, the Python wrapper's results as well.
    """
    del world_size
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    calls = [given(rank, call, tokens) for call, tokens in enumerate((4, 4, 1, 7, 9, 4))]
    found: dict[str, Any] = {}
    with torch.no_grad():
        compiled = compiled_sites(cpp_wrapper=True)
        first, found["codes"] = cast(Any, run_and_get_code)(compiled, *calls[0])
        found["results"] = [first, *(compiled(*arguments) for arguments in calls[1:])]
        found["misses"] = counters["inductor"]["fxgraph_cache_miss"]
        if not is_cold:
            return found
        for _ in range(CALLS):
            again = compiled(*calls[0])
        found["kept"] = kept([*calls[0], *again])
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile:
            compiled(*calls[0])
        events = [event.key for event in profile.key_averages()]
        found["events"] = [name for name in events if "all_reduce_add" in name]
        torch._dynamo.reset()
        compiled = compiled_sites()
        found["expected"] = [compiled(*arguments) for arguments in calls]
        if DISPATCHES:
            found["dispatched"], found["dispatched_codes"] = dispatched(calls[0])
    return found


def dispatched(arguments: tuple[torch.Tensor, ...]) -> tuple[Any, list[str]]:
    """The results of a call, and the code, where sites are called through the dispatcher."""
    torch._dynamo.reset()
    without_caches = cast(Any, config).patch(force_disable_caches=True)
    with mock.patch.object(inductor, "_by_the_dispatcher", return_value=True), without_caches:
        compiled = compiled_sites(cpp_wrapper=True)
        results, codes = cast(Any, run_and_get_code)(compiled, *arguments)
    return results, codes


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """How often the tensor and its storage are held, handles of C++ included."""
    storage = tensor.untyped_storage()
    return cast(Any, tensor)._use_count(), cast(Any, torch._C)._storage_Use_Count(
        storage._cdata
    )


def kept(tensors: list[torch.Tensor], seconds: float = 10.0) -> list[int]:
    """Which of the tensors are held by more than their name; gloo's thread may take a moment."""
    alone, end = references(torch.ones(1)), time.monotonic() + seconds
    while True:
        wrong = [number for number, one in enumerate(tensors) if references(one) != alone]
        if not wrong or time.monotonic() > end:
            return wrong


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Two ranks with a cold cache, then two fresh ones with what is in it now."""
    directory = tmp_path_factory.mktemp("cache")
    # kernels of the package's own are compiled once a machine
    cache_folder().mkdir(parents=True, exist_ok=True)
    (directory / "fx_fusion").symlink_to(cache_folder())
    return [spawn(run, 2, args=(str(directory), cold), timeout=240) for cold in (True, False)]


def test_results_are_the_python_wrapper_s_bits(ranks: list[list[dict[str, Any]]]) -> None:
    for rank in range(2):
        for number, expected in enumerate(ranks[0][rank]["expected"]):
            for both in ranks:
                results = both[rank]["results"][number]
                assert [result.stride() for result in results] == [e.stride() for e in expected]
                assert (
                    list(map(torch.equal, map(bits, results), map(bits, expected)))
                    == [True] * 8
                )


def test_a_fresh_process_runs_the_code_from_the_cache(
    ranks: list[list[dict[str, Any]]],
) -> None:
    assert [rank["misses"] for rank in ranks[1]] == [0, 0]


def test_sites_are_called_without_the_dispatcher(ranks: list[list[dict[str, Any]]]) -> None:
    code = ranks[0][0]["codes"][0]
    body = code[
        code.index("void inductor_entry_impl(") : code.index("} // inductor_entry_impl")
    ]
    assert body.count("fx_fusion_call(") == 4
    assert len(re.findall(r"c10d_functional_all_reduce_?\(", body)) == 1  # the plain one
    assert "all_reduce_add_rms_norm" not in body
    assert [rank["events"] for rank in ranks[0]] == [[], []]


@pytest.mark.skipif(
    not DISPATCHES, reason="torch 2.12's C++ wrapper can't call an op that takes dtypes"
)
def test_the_dispatcher_s_way_gives_the_same_bits(
    ranks: list[list[dict[str, Any]]],
) -> None:
    for rank in ranks[0]:
        pairs = zip(rank["dispatched"], rank["expected"][0], strict=True)
        assert [torch.equal(bits(one), bits(two)) for one, two in pairs] == [True] * 8
        assert "fx_fusion_call(" not in rank["dispatched_codes"][0]
        assert "all_reduce_add_rms_norm" in rank["dispatched_codes"][0]


def test_many_calls_leave_nothing_behind(ranks: list[list[dict[str, Any]]]) -> None:
    assert [rank["kept"] for rank in ranks[0]] == [[], []]
