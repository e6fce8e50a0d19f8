"""Reports as people read them: the answer first, sites that came out the same shown once."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import expecttest
import pytest

from fx_fusion.report import REMEDIES, FusionReport, GraphReport, Reason, SiteReport
from fx_fusion.report_text import WIDTH, headline, report_as_html, report_as_text

ATTENTION = SiteReport(
    fused=True,
    source="model.py:12 in forward",
    module="layers.0.attention.o_proj",
    shape=(1, 128, 4096),
    dtype="bfloat16",
    group="tp",
    world_size=8,
    norm="w * cast(h * rsqrt(mean(h^2) + 1e-06))",
    steps=("residual",),
    outputs=("norm", "residual"),
    kernel="one_shot",
)
UNFUSED = replace(ATTENTION, kernel="unfused")
REFUSED = replace(
    ATTENTION,
    fused=False,
    reason=Reason.RESIDUAL_SHAPE,
    numbers={"reduced": "[1, 128, 4096]", "residual": "[1, 1, 4096]"},
    source="model.py:31 in forward",
    module="head.proj",
    norm="",
    steps=(),
    outputs=(),
    kernel="",
)
GRADIENT = SiteReport(fused=False, reason=Reason.GRADIENT)


def layers(site: SiteReport, count: int, part: str) -> list[SiteReport]:
    """The same site in several layers."""
    return [replace(site, module=f"layers.{index}.{part}") for index in range(count)]


def one_graph(*sites: SiteReport) -> FusionReport:
    return FusionReport((GraphReport(sites=sites),))


class TestReportText(expecttest.TestCase):
    def test_a_site_shows_its_place_and_what_became_of_it(self) -> None:
        self.assertExpectedInline(
            report_as_text(one_graph(ATTENTION, REFUSED)),
            """\
1 of 2 sites fused

1. fused: model.py:12 in forward
   module    layers.0.attention.o_proj
   reduces   bfloat16[1, 128, 4096] over 8 ranks, group 'tp'
   then      residual
   norm      w * cast(h * rsqrt(mean(h^2) + 1e-06))
   returns   norm, residual
   kernel    one_shot
2. not fused: model.py:31 in forward
   module    head.proj
   reduces   bfloat16[1, 128, 4096] over 8 ranks, group 'tp'
   reason    residual_shape (reduced=[1, 128, 4096], residual=[1, 1, 4096])
   remedy    The residual broadcasts against the reduced tensor; expand it to the same shape
             first.""",
        )

    def test_layers_that_came_out_the_same_are_shown_once(self) -> None:
        mlp = replace(UNFUSED, source="model.py:20 in forward")
        pairs = zip(layers(UNFUSED, 80, "o_proj"), layers(mlp, 80, "down_proj"), strict=True)
        sites = [site for pair in pairs for site in pair]
        self.assertExpectedInline(
            report_as_text(one_graph(*sites)),
            """\
160 of 160 sites rewritten, running the unfused path

1. rewritten 80 times: model.py:12 in forward
   module    layers.0.o_proj ... layers.79.o_proj
   reduces   bfloat16[1, 128, 4096] over 8 ranks, group 'tp'
   then      residual
   norm      w * cast(h * rsqrt(mean(h^2) + 1e-06))
   returns   norm, residual
   kernel    unfused (the group's own all_reduce, then add and norm)
2. rewritten 80 times: model.py:20 in forward
   module    layers.0.down_proj ... layers.79.down_proj
   reduces   bfloat16[1, 128, 4096] over 8 ranks, group 'tp'
   then      residual
   norm      w * cast(h * rsqrt(mean(h^2) + 1e-06))
   returns   norm, residual
   kernel    unfused (the group's own all_reduce, then add and norm)""",
        )

    def test_a_training_step_has_a_heading_for_each_graph_and_a_line_for_gradients(
        self,
    ) -> None:
        report = FusionReport(
            (
                GraphReport("forward", (ATTENTION,)),
                GraphReport("backward", (GRADIENT, GRADIENT)),
            )
        )
        self.assertExpectedInline(
            report_as_text(report),
            """\
1 of 1 site fused

graph 1 (forward)
1. fused: model.py:12 in forward
   module    layers.0.attention.o_proj
   reduces   bfloat16[1, 128, 4096] over 8 ranks, group 'tp'
   then      residual
   norm      w * cast(h * rsqrt(mean(h^2) + 1e-06))
   returns   norm, residual
   kernel    one_shot

backward: 2 all_reduces of gradients are left alone, as no norm follows""",
        )

    def test_notes_and_an_early_end_are_told(self) -> None:
        report = FusionReport(
            (
                GraphReport(
                    sites=(), notes=("Nothing is cached: the custom pass f has no uuid.",)
                ),
            ),
            incomplete="model.py:12 in forward: the value of a tensor is needed here",
        )
        self.assertExpectedInline(
            report_as_text(report),
            """\
no all_reduce found
incomplete: model.py:12 in forward: the value of a tensor is needed here; nothing after it was
            seen

note: Nothing is cached: the custom pass f has no uuid.""",
        )

    def test_what_is_unknown_is_said_to_be_or_left_out(self) -> None:
        site = SiteReport(fused=False, reason=Reason.COALESCED)
        self.assertExpectedInline(
            report_as_text(one_graph(site)),
            """\
0 of 1 site fused

1. not fused: somewhere in the graph
   reduces   a tensor of unknown shape over an unknown number of ranks
   reason    coalesced
   remedy    Coalesced all_reduces are left alone; reduce the tensor that feeds the norm by
             itself.""",
        )


@pytest.mark.parametrize(
    ("sites", "line"),
    [
        ([], "no all_reduce found"),
        ([GRADIENT], "no all_reduce found"),
        ([ATTENTION], "1 of 1 site fused"),
        ([REFUSED, REFUSED, GRADIENT], "0 of 2 sites fused"),
        ([UNFUSED, REFUSED], "1 of 2 sites rewritten, running the unfused path"),
        (
            [UNFUSED, ATTENTION, REFUSED],
            "2 of 3 sites fused, 1 of them running the unfused path",
        ),
    ],
)
def test_the_first_line_counts_sites_and_claims_no_kernel_that_does_not_run(
    sites: list[SiteReport], line: str
) -> None:
    report = one_graph(*sites)
    assert headline(report) == line
    assert str(report).splitlines()[0] == line


def test_names_of_nodes_do_not_keep_sites_apart() -> None:
    first = replace(REFUSED, numbers={"value": "add_1"})
    report = one_graph(first, replace(first, numbers={"value": "add_17"}))
    assert "not fused 2 times" in str(report)


def test_other_numbers_keep_sites_apart() -> None:
    first = replace(REFUSED, numbers={"size": 1})
    report = one_graph(first, replace(first, numbers={"size": 2}))
    assert "times" not in str(report)


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.value)
def test_every_reason_is_shown_with_its_remedy(reason: Reason) -> None:
    text = str(one_graph(replace(REFUSED, reason=reason)))
    flat = re.sub(r"\s+", " ", text)
    if reason is Reason.GRADIENT:
        assert "1 all_reduce of a gradient is left alone" in flat
        return
    assert reason.value in flat
    assert REMEDIES[reason] in flat
    assert max(map(len, text.splitlines())) <= WIDTH


class Tags(HTMLParser):
    """Collects what a page consists of; fails on tags that aren't closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    return tags


def test_the_page_has_a_row_for_each_group_of_sites() -> None:
    report = one_graph(*layers(ATTENTION, 4, "o_proj"), REFUSED)
    page = parsed(report_as_html(report))
    assert page.seen.count("tr") == 3
    assert "4 of 5 sites fused" in page.text
    assert "layers.0.o_proj ... layers.3.o_proj" in page.text
    assert REMEDIES[Reason.RESIDUAL_SHAPE] in page.text
    assert report._repr_html_() == report_as_html(report)


def test_the_page_shows_code_as_text_whatever_it_holds() -> None:
    hostile = "<script>alert('x')</script>&amp;"
    site = replace(
        REFUSED,
        source=hostile,
        module=hostile,
        group=hostile,
        norm=hostile,
        dtype=hostile,
        shape=(hostile,),
        steps=(hostile,),
        outputs=(hostile,),
        numbers={hostile: hostile},
    )
    report = FusionReport((GraphReport(hostile, (site,), (hostile,)),), hostile)
    page = parsed(report_as_html(report))
    assert "script" not in page.seen
    assert page.text.count(hostile) >= 11


def test_a_page_without_sites_has_no_table() -> None:
    assert "table" not in parsed(report_as_html(FusionReport())).seen


def test_a_report_reads_the_same_after_a_round_trip() -> None:
    report = one_graph(ATTENTION, REFUSED, GRADIENT)
    assert str(FusionReport.from_dict(report.to_dict())) == str(report)
