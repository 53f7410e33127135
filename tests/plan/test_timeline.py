"""Timelines: bubbles as the papers give them (arXiv 1811.06965, 2104.04473, 2401.10241)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.pipelines import examples, pipelines
from unisono.errors import UsageError
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.schedule import Schedule, schedule
from unisono.plan.schedules.timeline import Costs, Timeline, timeline

RANKS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 24)


@pytest.mark.parametrize("name", ["f-then-b", "1f1b"])
@pytest.mark.parametrize("backward", [1, 2, 3])
def test_bubble_of_gpipe_and_1f1b(name: str, backward: int) -> None:
    for p in RANKS:
        for m in MICROBATCHES:
            played = timeline(schedule(name, p, m), Costs(backward=backward))
            assert played.bubble_fraction() == (p - 1) / (m + p - 1)
            assert played.makespan == (m + p - 1) * (1 + backward)


def test_bubble_of_the_naive_pipeline() -> None:
    for p in RANKS:
        played = timeline(schedule("naive", p, 1))
        assert played.bubble_fraction() == (p - 1) / p  # one rank works at a time
        assert played.makespan == 3 * p


def test_bubble_of_interleaved_from_p_microbatches_on() -> None:
    for p in RANKS:
        for v in (1, 2, 3, 4):
            for m in MICROBATCHES:
                exact = (p - 1) / (v * m)
                found = timeline(schedule("interleaved", p, m, v)).bubble_over_useful()
                if m >= p:  # and p need not divide m
                    assert found == exact
                else:
                    assert found >= exact


def test_bubble_of_zb1p_is_a_third_of_1f1b_from_p_microbatches_on() -> None:
    for p in RANKS:
        for m in MICROBATCHES:
            third = (p - 1) / (3 * m)
            found = timeline(schedule("zb1p", p, m)).bubble_over_useful()
            assert found == third if m >= p else third < found <= (p - 1) / m


def test_zbv_has_no_bubble_from_2p_minus_1_microbatches_on() -> None:
    for p in RANKS:
        for m in MICROBATCHES:
            played = timeline(schedule("zbv", p, m))
            if m >= 2 * p - 1:
                assert played.period == 6 * m
                assert played.bubble_over_useful(barrier=False) == 0
                assert played.bubble_fraction(barrier=False) == 0
                assert played.makespan == 6 * m + p - 1  # ranks start, and end, one after the other
            else:
                assert played.bubble_over_useful(barrier=False) > 0


def test_only_zbv_gains_from_dropping_the_barrier() -> None:
    for name in ("f-then-b", "1f1b", "interleaved", "zb1p"):
        played = timeline(schedule(name, 4, 8))
        assert played.period == played.makespan


@examples(100)
@given(pipelines(), st.data())
def test_spans_are_as_early_as_can_be(made: Schedule, data: st.DataObject) -> None:
    per_stage = st.lists(st.integers(1, 9), min_size=made.stages, max_size=made.stages)
    costs = Costs(
        data.draw(per_stage), data.draw(per_stage), data.draw(per_stage), 2, transfer=data.draw(st.integers(0, 3))
    )
    played = timeline(made, costs)
    ends = {span.action: span.end for spans in played.spans for span in spans}
    for rank, spans in enumerate(played.spans):
        assert tuple(span.action for span in spans) == made.actions[rank]
        free = 0.0
        for action, start, end in spans:
            arrivals = [ends[n] + costs.transfer * (made.placement[n.stage] != rank) for n in made.needs(action)]
            assert start == max([free, *arrivals])
            assert end == start + costs.of(action)
            free = end
    check_sums(played)


def check_sums(played: Timeline) -> None:
    ranks = range(played.schedule.ranks)
    idle = sum(played.makespan - played.busy(rank) for rank in ranks)
    assert played.useful + idle == played.makespan * len(ranks)
    assert played.bubble_over_useful() == idle / played.useful
    mean = sum(played.bubble_fraction(rank) for rank in ranks) / len(ranks)
    assert played.bubble_fraction() == pytest.approx(mean, abs=1e-12)
    assert played.period <= played.makespan


def test_transfers_take_time_between_ranks_only() -> None:
    assert timeline(schedule("naive", 4, 1), Costs(transfer=10)).makespan == 12 + 6 * 10
    assert timeline(schedule("interleaved", 1, 4, 3), Costs(transfer=10)).makespan == 36
    turn = timeline(schedule("zbv", 2, 1), Costs(transfer=10))
    ends = {span.action: span.end for span in turn.spans[1]}
    assert ends[Action("F", 2, 0)] == ends[Action("F", 1, 0)] + 1  # both on rank 1


def test_costs_per_stage() -> None:
    played = timeline(schedule("f-then-b", 2, 3), Costs(forward=(1, 5), backward=(1, 1)))
    assert [span.start for span in played.spans[1]] == [1, 6, 11, 16, 17, 18]


def test_bad_costs_are_refused() -> None:
    made = schedule("1f1b", 2, 2)
    with pytest.raises(UsageError, match="forward has 3 costs, but the schedule has 2 stages"):
        timeline(made, Costs(forward=[1, 1, 1]))
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=f"backward costs {bad}; a cost is a time, 0 or more"):
            timeline(made, Costs(backward=bad))
    with pytest.raises(UsageError, match="forward costs 0 on every stage"):
        timeline(made, Costs(forward=(0, 0)))


def test_some_actions_may_cost_nothing() -> None:
    played = timeline(schedule("zb1p", 2, 3), Costs(forward=(0, 1), weights=0))
    assert played.makespan == 7
