"""Pictures: every action is in them, at its place."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.pipelines import every_pipeline, examples, pipelines
from unisono.plan.schedules.picture import draw_svg, draw_text, summary
from unisono.plan.schedules.schedule import Schedule, forward_only, schedule
from unisono.plan.schedules.timeline import Costs, timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_text_of_1f1b() -> None:
    picture = draw_text(timeline(schedule("1f1b", 3, 4)))
    assert picture.splitlines() == [
        "1f1b: 3 ranks, 4 microbatches, length 18, bubble 33.3%, at most 3 microbatches kept",
        "rank 0 F0 F1 F2 ············B0─── F3 B1─── ···B2─── ···B3─── ",
        "rank 1 ···F0 F1 ······B0─── F2 B1─── F3 B2─── ···B3─── ······",
        "rank 2 ······F0 B0─── F1 B1─── F2 B2─── F3 B3─── ············",
    ]


def test_text_tells_chunks_apart() -> None:
    assert draw_text(timeline(schedule("zbv", 1, 1))).splitlines()[1] == "rank 0 F0a F0b I0b I0a W0b W0a "


@pytest.mark.parametrize("made", every_pipeline(3, 5), ids=lambda made: f"{made.name}-{made.chunks}")
def test_text_has_every_action_once(made: Schedule) -> None:
    rows = draw_text(timeline(made), width=10_000).splitlines()[1:]
    for row, actions in zip(rows, made.actions, strict=True):
        found = re.findall(r"[FBIW]\d+[a-z]?", row)
        letters = dict(zip(made.stages_of(made.placement[actions[0].stage]), "abc", strict=False))
        assert found == [f"{a.kind}{a.microbatch}{letters[a.stage] if made.chunks > 1 else ''}" for a in actions]


def test_colours_change_nothing_else() -> None:
    played = timeline(schedule("zb1p", 3, 4))
    coloured = draw_text(played, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == draw_text(played)


@examples(60)
@given(pipelines(), st.integers(20, 300), st.floats(0.01, 50), st.floats(0.01, 50))
def test_rows_are_equally_wide_and_fit(made: Schedule, width: int, forward: float, backward: float) -> None:
    rows = draw_text(timeline(made, Costs(forward=forward, backward=backward)), width).splitlines()[1:]
    assert len(rows) == made.ranks
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= width + len("rank 0 ")


@examples(60)
@given(pipelines())
def test_svg_has_a_box_for_every_action_at_its_time(made: Schedule) -> None:
    played = timeline(made)
    root = ElementTree.fromstring(draw_svg(played))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    spans = [(rank, span) for rank, spans in enumerate(played.spans) for span in spans]
    assert len(boxes) == len(spans)
    scale = (1200 - 64 - 96) / played.makespan
    for box, (rank, span) in zip(boxes, spans, strict=True):
        told = box.findtext(f"{SVG}title") or ""
        assert f"stage {span.action.stage}, microbatch {span.action.microbatch}," in told
        assert float(box.attrib["x"]) == pytest.approx(64 + span.start * scale, abs=0.02)
        assert float(box.attrib["width"]) == pytest.approx((span.end - span.start) * scale, abs=0.02)
        assert float(box.attrib["y"]) == 64 + 30 * rank


def test_svg_prints_bubble_and_legend() -> None:
    text = draw_svg(timeline(schedule("zb1p", 4, 8)))
    for words in ("bubble 11.1%", "forward", "backward, input", "backward, weights", "idle"):
        assert words in text
    assert "backward, weights" not in draw_svg(timeline(schedule("1f1b", 4, 8)))


def test_summaries() -> None:
    assert summary(timeline(schedule("naive", 1, 1))) == (
        "naive: 1 rank, 1 microbatch, length 3, bubble 0.0%, at most 1 microbatch kept"
    )
    assert "bubble 5.9% (0.0% when steps follow without a barrier)" in summary(timeline(schedule("zbv", 4, 8)))
    assert "bubble 42.9%" in summary(timeline(forward_only(schedule("1f1b", 4, 4))))
