"""Activations: how many microbatches a schedule keeps."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.plan.pipelines import examples, pipelines
from unisono.errors import UsageError
from unisono.plan.schedules.activations import Sizes, alive, alive_over_time, microbatches_alive, peak
from unisono.plan.schedules.schedule import Schedule, forward_only, schedule
from unisono.plan.schedules.timeline import timeline


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 17])
def test_microbatches_alive_on_each_stage(p: int, m: int) -> None:
    naive, gpipe, one = schedule("naive", p, 1), schedule("f-then-b", p, m), schedule("1f1b", p, m)
    for stage in range(p):
        assert microbatches_alive(naive, stage) == 1  # which is the whole batch
        assert microbatches_alive(gpipe, stage) == m
        assert microbatches_alive(one, stage) == min(p - stage, m)
    assert microbatches_alive(one, 0) == min(p, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 17])
def test_zero_bubble_keeps_what_1f1b_keeps_on_its_first_rank(p: int, m: int) -> None:
    allowed = peak(schedule("1f1b", p, m), 0)
    for rank in range(p):
        assert peak(schedule("zb1p", p, m), rank) <= allowed
        assert peak(schedule("zbv", p, m), rank) / 2 <= allowed  # a chunk is half a rank's layers


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_keeps_a_little_more(p: int, v: int) -> None:
    made = schedule("interleaved", p, 4 * p, v)
    for rank in range(p):
        assert peak(made, rank) == (v - 1) * p + 2 * (p - 1 - rank) + 1


def test_1f1b_saves_three_eighths_of_what_f_then_b_keeps() -> None:
    """The 37.5% of Paddle's guide: 4 stages, 4 microbatches, all stages together, 4+3+2+1 instead of 4*4."""
    kept = {name: sum(peak(schedule(name, 4, 4), rank) for rank in range(4)) for name in ("1f1b", "f-then-b")}
    assert kept == {"1f1b": 10, "f-then-b": 16}
    assert 1 - kept["1f1b"] / kept["f-then-b"] == 0.375


def test_a_split_backward_frees_in_two_parts() -> None:
    made = schedule("zb1p", 2, 2)
    assert [a.kind for a in made.actions[1]] == ["F", "I", "F", "I", "W", "W"]
    assert alive(made, 1) == [1, 1, 2, 2, 2, 1]
    assert alive(made, 1, Sizes(kept_for_weights=0.25)) == [1, 1, 1.25, 1.25, 0.5, 0.25]
    assert peak(made, 1, Sizes(kept_for_weights=0)) == 1
    assert peak(made, 1, Sizes(whole=[1, 10])) == 20


@examples(80)
@given(pipelines())
def test_over_time(made: Schedule) -> None:
    played = timeline(made)
    for rank in range(made.ranks):
        steps = alive_over_time(played, rank, Sizes(kept_for_weights=0.5))
        assert [time for time, _ in steps] == sorted({time for time, _ in steps})
        assert steps[-1] == (played.spans[rank][-1].end, 0)
        assert max(level for _, level in steps) == peak(made, rank, Sizes(kept_for_weights=0.5))
    first = alive_over_time(played, 0)
    assert first[0] == (0, 1)


@examples(50)
@given(pipelines())
def test_the_peak_of_a_rank_is_that_of_its_stages_where_it_has_one(made: Schedule) -> None:
    for stage, rank in enumerate(made.placement):
        assert 1 <= microbatches_alive(made, stage) <= peak(made, rank)
        if made.chunks == 1:
            assert microbatches_alive(made, stage) == peak(made, rank)


def test_evaluation_keeps_nothing_but_what_it_works_on() -> None:
    made = forward_only(schedule("interleaved", 2, 3))
    assert microbatches_alive(made, 0) == 1
    assert peak(made, 0) == 1
    assert alive_over_time(timeline(made), 0)[-1][1] == 0


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="share between 0 and 1, not 2"):
        Sizes(kept_for_weights=2)
    with pytest.raises(UsageError, match="3 sizes are given for 2 stages"):
        peak(schedule("1f1b", 2, 2), 0, Sizes(whole=[1, 2, 3]))
