"""Measured links: what counts of messages that take longer now and then, and a send whose sender computes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.planner.measure.links import BRIEF, CAREFUL, Points, _rising, _usual, links


def test_messages_that_wait_for_a_turn_count() -> None:
    """One of four takes five times as long, in a step as here."""
    taken = cycle([1.0, 1.0, 1.0, 5.0])
    assert _usual(CAREFUL, {"": partial(next, taken)}) == {"": pytest.approx(2.0)}


def test_what_else_goes_on_for_a_while_does_not_count() -> None:
    """Kinds take turns, so a disturbance falls on few turns of each."""
    care = CAREFUL._replace(rounds=5, in_a_round=2)
    calls = iter(range(10**6))

    def one() -> float:
        return 100.0 if 12 <= next(calls) < 24 else 1.0

    assert _usual(care, {"a": one, "b": one, "c": one}) == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_smaller_messages_that_seem_slower_share_a_mean() -> None:
    assert _rising([(1.0, 2.0), (2.0, 4.0), (3.0, 3.0), (4.0, 9.0)]) == [(1.0, 2.0), (2.0, 3.5), (3.0, 3.5), (4.0, 9.0)]
    assert _rising([(1.0, 6.0), (2.0, 2.0), (3.0, 1.0)]) == [(1.0, 3.0), (2.0, 3.0), (3.0, 3.0)]


def _of_rank(comm: Communicator) -> dict[str, Points]:
    return links(comm, BRIEF, lambda call: 0.0, have_cores=True)


def test_ranks_time_their_links(pools: Callable[[str, int], RankPool]) -> None:
    found = pools("gloo", 2).run(_of_rank)
    for curves in found:
        assert all([size for size, _ in points] == list(BRIEF.messages) for points in curves.values())
        assert all(0 < points[0][1] <= points[-1][1] < 1 for name, points in curves.items() if name != "send")
    asked, answered = (curves["send"] for curves in found)
    assert all(0 < seconds < 1 for _, seconds in asked)  # of the way alone: both have computed for longer
    assert all(seconds == 0 for _, seconds in answered)
