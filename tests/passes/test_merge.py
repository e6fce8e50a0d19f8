"""merge_all_reduces: two reduced values that are added are reduced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

import fx_fusion
from fx_fusion.report import Reason
from fx_fusion.testing import fake_group, graph_snapshot, spawn

HIDDEN = 64
Code = Callable[..., Any]
GROUPS: dict[str, Any] = {}


def all_reduce(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    chosen = dist.group.WORLD if group is None else group
    return cast(torch.Tensor, cast(Any, funcol).all_reduce(x, "sum", chosen))


def norm(h: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(h, (HIDDEN,), None, 1e-6)


def summed_first(x: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> Any:
    h = r + (all_reduce(x) + all_reduce(z))
    return norm(h), h


def one_after_the_other(x: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> Any:
    h = (r + all_reduce(x)) + all_reduce(z)
    return norm(h), h


def through_a_view(x: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> Any:
    routed = all_reduce(x.view(-1, HIDDEN)).view(x.shape)
    h = r + (routed + all_reduce(z))
    return norm(h), h


def three(x: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> Any:
    h = r + ((all_reduce(x) + all_reduce(z)) + all_reduce(x * 2))
    return norm(h), h


def also_returned(x: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> Any:
    y = all_reduce(x)
    h = r + (y + all_reduce(z))
    return norm(h), h, y


def two_groups(x: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> Any:
    h = r + (all_reduce(x) + all_reduce(z, GROUPS["other"]))
    return norm(h), h


MERGED: dict[Code, int] = {
    summed_first: 2,
    one_after_the_other: 2,
    through_a_view: 2,
    three: 3,
}


@pytest.fixture
def groups() -> Iterator[None]:
    with fake_group(2), torch.no_grad():
        GROUPS["other"] = dist.new_group([0, 1])
        yield
        GROUPS.clear()


def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(2, 4, HIDDEN, dtype=torch.bfloat16) for _ in range(3))


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("code", MERGED, ids=lambda code: code.__name__)
def test_all_reduces_that_are_only_added_become_one(code: Code) -> None:
    report = fx_fusion.explain(code, merge_all_reduces=True)(*inputs())
    assert (report.fused_count, report.site_count) == (MERGED[code], MERGED[code])
    assert sum("merged" in site.steps for site in report.sites) == MERGED[code] - 1
    after = graph_snapshot(code, *inputs(), merge_all_reduces=True)
    assert after.count("fx_fusion.all_reduce_add_rms_norm") == 1
    assert "_c10d_functional.all_reduce" not in after


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("code", MERGED, ids=lambda code: code.__name__)
def test_it_is_off_by_default_and_the_remedy_names_it(code: Code) -> None:
    report = fx_fusion.explain(code)(*inputs())
    refused = [site for site in report.sites if not site.fused]
    assert {site.reason for site in refused} == {Reason.SUMMED_ALL_REDUCES}
    assert "merge_all_reduces=True" in refused[0].remedy
    # the last term of (r + a) + b has all the rest as its residual, and fuses exactly
    assert report.fused_count == (1 if code is one_after_the_other else 0)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("code", [also_returned, two_groups], ids=lambda code: code.__name__)
def test_a_value_read_elsewhere_or_another_group_is_not_merged(code: Code) -> None:
    before = graph_snapshot(code, *inputs(), when="before")
    assert graph_snapshot(code, *inputs(), merge_all_reduces=True) == before


def run(rank: int, world_size: int) -> list[str]:
    """The merged graph on real ranks: within the rounding it documents, equal on all ranks."""
    del world_size
    found = []
    for code in MERGED:
        own = torch.Generator().manual_seed(rank)
        x, z = (torch.randn(2, 4, HIDDEN, generator=own) for _ in range(2))
        r = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(5))
        torch._dynamo.reset()
        compiled = torch.compile(code, backend="fx_fusion", options={"merge_all_reduces": True})
        with torch.no_grad():
            for given, expected in zip(compiled(x, z, r), code(x, z, r), strict=True):
                if not torch.allclose(given, expected, rtol=1e-5, atol=1e-5):
                    found.append(f"{code.__name__}: differs from eager")
                gathered = [torch.empty_like(given) for _ in range(2)]
                dist.all_gather(gathered, given.contiguous())
                if not torch.equal(*gathered):
                    found.append(f"{code.__name__}: ranks differ")
    return found


def test_merged_graphs_are_right_on_two_ranks() -> None:
    for found in spawn(run, 2, timeout=300):
        assert found == []
