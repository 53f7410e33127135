"""Schedules: every microbatch passes every stage once each way, in an order that ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.pipelines import examples, pipelines
from unisono.errors import UsageError
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.one_f_one_b import split_evenly
from unisono.plan.schedules.schedule import NAMES, Schedule, check, forward_only, in_order, schedule


def runs_to_the_end(made: Schedule) -> bool:
    """The slow way, from the meaning of the actions: sweep over the ranks until nothing moves."""
    left = [[str(action) for action in actions] for actions in made.actions]
    done: set[str] = set()
    last = made.stages - 1
    moved = True
    while moved:
        moved = False
        for actions in left:
            if not actions:
                continue
            kind = next(letter for letter in actions[0] if letter.isalpha())
            stage, microbatch = map(int, actions[0].split(kind))
            required = {
                "F": [] if stage == 0 else [f"{stage - 1}F{microbatch}"],
                "B": [f"{stage}F{microbatch}"] + ([] if stage == last else [f"{stage + 1}B{microbatch}"]),
                "I": [f"{stage}F{microbatch}"] + ([] if stage == last else [f"{stage + 1}I{microbatch}"]),
                "W": [f"{stage}I{microbatch}"],
            }[kind]
            if done.issuperset(required):
                done.add(actions.pop(0))
                moved = True
    return not any(left)


@examples(150)
@given(pipelines())
def test_every_microbatch_passes_every_stage_once_each_way(made: Schedule) -> None:
    counted = Counter((a.kind, a.stage, a.microbatch) for actions in made.actions for a in actions)
    kinds = ("F", "I", "W") if made.name in ("zb1p", "zbv") else ("F", "B")
    assert counted == {
        (kind, stage, j): 1 for kind in kinds for stage in range(made.stages) for j in range(made.microbatches)
    }
    for rank, actions in enumerate(made.actions):
        assert {a.stage for a in actions} == set(made.stages_of(rank))
        assert len(made.stages_of(rank)) == made.chunks
    assert runs_to_the_end(made)
    assert runs_to_the_end(forward_only(made))
    check(forward_only(made))


@examples(150)
@given(pipelines(most_ranks=5, most_microbatches=8), st.data())
def test_a_check_agrees_with_the_slow_way_on_spoilt_orders(made: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, made.ranks - 1))
    order = data.draw(st.permutations(made.actions[rank]))
    spoilt = replace(made, actions=(*made.actions[:rank], tuple(order), *made.actions[rank + 1 :]))
    if runs_to_the_end(spoilt):
        check(spoilt)
    else:
        with pytest.raises(AssertionError, match=r"deadlocks: .*rank \d at \d+[FBIW]\d+"):
            check(spoilt)


@examples(50)
@given(pipelines(most_ranks=4, most_microbatches=6))
def test_order_respects_needs(made: Schedule) -> None:
    done: set[Action] = set()
    for _, action in in_order(made):
        assert done.issuperset(made.needs(action))
        done.add(action)
    assert len(done) == sum(map(len, made.actions))


def test_a_check_finds_what_is_wrong() -> None:
    good = schedule("1f1b", 2, 2)
    first, second = good.actions
    wrong = {
        "missing 0B1": (first[:-1], second),
        "0F0 comes twice": ((*first, first[0]), second),
        "0F0 is on rank 1, its stage on 0": (first[1:], (first[0], *second)),
        "2F0, which is no part of it": ((*first, Action("F", 2, 0)), second),
        "0SEND_F0, which is no part of it": ((*first, Action("SEND_F", 0, 0, 1)), second),
        "deadlocks: rank 0 at 0B0; rank 1 at 1F0": ((first[2], *first[:2], *first[3:]), second),
    }
    for message, actions in wrong.items():
        with pytest.raises(AssertionError, match=message):
            check(replace(good, actions=actions))


def test_known_orders() -> None:
    def text(made: Schedule, rank: int) -> str:
        return " ".join(f"{a.kind}{a.microbatch}" for a in made.actions[rank])

    assert text(schedule("naive", 3, 1), 1) == "F0 B0"
    assert text(schedule("f-then-b", 3, 3), 1) == "F0 F1 F2 B0 B1 B2"
    assert text(schedule("1f1b", 3, 4), 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(schedule("1f1b", 3, 4), 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text(schedule("zb1p", 3, 4), 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert text(schedule("zb1p", 3, 4), 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    assert " ".join(map(str, schedule("interleaved", 2, 2, 2).actions[1])) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


def test_placements() -> None:
    assert schedule("1f1b", 4, 4).placement == (0, 1, 2, 3)
    assert schedule("interleaved", 2, 4, 3).placement == (0, 1, 0, 1, 0, 1)
    assert schedule("zbv", 3, 4).placement == (0, 1, 2, 2, 1, 0)
    assert schedule("zbv", 3, 4).stages_of(1) == (1, 4)
    assert schedule("zbv", 3, 4).chunks == 2


def test_one_chunk_interleaved_is_1f1b() -> None:
    assert schedule("interleaved", 4, 7, 1).actions == schedule("1f1b", 4, 7).actions


@examples(100)
@given(st.integers(1, 60), st.integers(1, 60))
def test_split_evenly(count: int, parts: int) -> None:
    runs = split_evenly(count, parts)
    assert [number for run in runs for number in run] == list(range(count))
    assert len(runs) == parts
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("gpipe", 4, 4),
            "no pipeline schedule 'gpipe'; did you mean 'f-then-b'\\? Choose from: naive, f-then-b, 1f1b",
        ),
        (("wavefront", 4, 4), r"no pipeline schedule 'wavefront'\. Choose from: naive"),
        (("1F1B", 4, 4), "did you mean '1f1b'\\?"),
        (("1f1b", 0, 4), "whole number of ranks, at least 1, not 0"),
        (("1f1b", 4, 0), "whole number of microbatches, at least 1, not 0"),
        (("1f1b", 4, 2.5), "whole number of microbatches, at least 1, not 2.5"),
        (("1f1b", True, 2), "whole number of ranks, at least 1, not True"),
        (("interleaved", 4, 4, 0), "whole number of chunks, at least 1, not 0"),
        (("naive", 4, 8), "takes microbatches=1, not 8; for 8 microbatches use f-then-b or 1f1b"),
        (("1f1b", 4, 8, 2), r"has 1 chunk\(s\) a rank, not 2; use chunks=1, or interleaved"),
        (("zbv", 4, 8, 3), r"has 2 chunk\(s\) a rank, not 3"),
    ],
)
def test_bad_input_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule(*arguments)


def test_every_name_makes_a_schedule() -> None:
    assert {schedule(name, 3, 1).name for name in NAMES} == set(NAMES)
