"""Zero bubble: a backward in two halves, of which the second can wait until there is nothing better to do.

The stage before waits only for I, the gradient of the input. W, the gradients of the weights, feeds the optimizer
alone, so it may fill any gap. Both schedules here are made in two steps:

1. a *skeleton*, which is the order of F and I on each rank;
2. `fill_gaps`, which plays the skeletons with F = I = W = 1 and puts a W wherever a rank would wait, either for
   another rank or because its activations have reached the limit (what F made is freed by W, not by I).

zb1p (ZB-H1): the skeleton is 1F1B's, the limit is what 1F1B keeps on its first rank, p microbatches. From m = p on a
rank idles p-1 slots where 1F1B idles 3(p-1). p = 3, m = 4:

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

zbv (ZB-V): two chunks a rank, laid out as a V. Stage s sits on rank s going down and on rank 2p-1-s coming back, so
that the last stage is on rank 0, which can therefore start its first I as soon as its own last F is done. From
m = 2p-1 on no rank waits between its first action and its last. Limit: 2p chunks, again 1F1B's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from unisono.plan.schedules.action import Action, Kind, Lists
from unisono.plan.schedules.one_f_one_b import alternate


def zb1p(ranks: int, microbatches: int, chunks: int) -> Lists:
    skeletons = []
    for rank in range(ranks):
        forwards = [Action("F", rank, j) for j in range(microbatches)]
        inputs = [Action("I", rank, j) for j in range(microbatches)]
        skeletons.append(alternate(forwards, inputs, ahead=ranks - 1 - rank))
    return fill_gaps(skeletons, last_stage=ranks - 1, limit=ranks)


def zbv(ranks: int, microbatches: int, chunks: int) -> Lists:
    skeletons = [v_skeleton(rank, ranks, microbatches) for rank in range(ranks)]
    return fill_gaps(skeletons, last_stage=2 * ranks - 1, limit=2 * ranks)


def v_skeleton(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The order of F and I on one rank of the V; `down` is its stage before the turn and `up` the one after.

    - until the first microbatch is back from the turn, 2(p-r)-1 slots: forwards going down;
    - until the first gradient comes, 2r slots: forwards up and down in turn;
    - until the first gradient comes down too, p-r times: a forward up, its I at once;
    - then one of each; and what is left, in the same order.

    The pattern needs 2p-1 microbatches. For fewer it is made with 2p-1 of which the missing ones are left out, which
    leaves a right order, for no microbatch waits for another.
    """
    down, up = rank, 2 * ranks - 1 - rank
    whole = max(microbatches, 2 * ranks - 1)
    order: list[Action] = []
    done: dict[tuple[Kind, int], int] = {("F", down): 0, ("F", up): 0, ("I", down): 0, ("I", up): 0}

    def add(*steps: tuple[Kind, int]) -> None:
        for kind, stage in steps:
            if done[kind, stage] < whole:
                order.append(Action(kind, stage, done[kind, stage]))
                done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        add(("F", down))
    for _ in range(rank):
        add(("F", up), ("F", down))
    for _ in range(ranks - rank):
        add(("F", up), ("I", up))
    while done["I", down] < whole:
        add(("F", down), ("I", down), ("F", up), ("I", up))
    return [action for action in order if action.microbatch < microbatches]


def fill_gaps(skeletons: Sequence[Sequence[Action]], last_stage: int, limit: int) -> Lists:
    """Add the W of every I: slot by slot, a rank takes the next action of its skeleton if it can, else its oldest W."""
    ranks = range(len(skeletons))
    waiting = [deque(skeleton) for skeleton in skeletons]
    owed: list[deque[Action]] = [deque() for _ in ranks]  # the W of every I that is done
    kept = [0 for _ in ranks]
    lists: list[list[Action]] = [[] for _ in ranks]
    finished: set[tuple[str, int, int]] = set()  # before this slot
    while any(waiting) or any(owed):
        taken: list[Action] = []
        for rank in ranks:
            action = _next(waiting[rank], owed[rank], finished, last_stage, full=kept[rank] >= limit)
            if action is None:
                continue
            kept[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                owed[rank].append(Action("W", action.stage, action.microbatch))
            lists[rank].append(action)
            taken.append(action)
        if not taken:
            raise AssertionError(f"no rank can go on; the skeletons wait at {[str(w[0]) for w in waiting if w]}")
        finished.update(action[:3] for action in taken)
    return tuple(tuple(actions) for actions in lists)


def _next(
    waiting: deque[Action], owed: deque[Action], finished: set[tuple[str, int, int]], last_stage: int, full: bool
) -> Action | None:
    if waiting:
        kind, stage, microbatch, _ = waiting[0]
        if kind == "F":
            ready = not full and (stage == 0 or ("F", stage - 1, microbatch) in finished)
        else:
            ready = stage == last_stage or ("I", stage + 1, microbatch) in finished
        if ready:
            return waiting.popleft()
    return owed.popleft() if owed else None
