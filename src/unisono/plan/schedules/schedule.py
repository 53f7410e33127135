"""Pipeline schedules as pure data: for each rank, the actions it takes, in order.

    >>> s = schedule("1f1b", ranks=2, microbatches=3)
    >>> [str(action) for action in s.actions[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']

The runtime executes these lists, `timeline` computes when each action happens, `activations` what is kept in memory,
and `picture` draws it. Transfers between ranks follow from the actions; `transfers` writes them out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache

from unisono.comm.signatures.records import plain_record
from unisono.errors import UsageError
from unisono.plan.schedules.action import COMPUTE, Action, Kind, Lists
from unisono.plan.schedules.fill_drain import fill_drain
from unisono.plan.schedules.one_f_one_b import interleaved, one_f_one_b
from unisono.plan.schedules.zero_bubble import zb1p, zbv


@plain_record
@dataclass(frozen=True)
class Schedule:
    """Who does what in which order. Make one with `schedule`; check one made by hand with `check`."""

    name: str
    microbatches: int
    placement: tuple[int, ...]  # for each stage, the rank that holds it
    backward: tuple[Kind, ...]  # what a backward is made of: (B,), (I, W), or nothing when only evaluating
    actions: Lists

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(Counter(self.placement).values())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in forward order: its chunks."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must be done, on this rank or another, before an action that computes can start."""
        kind, stage, microbatch, _ = action
        if kind == "F":
            return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
        if kind == "W":
            return (Action("I", stage, microbatch),)
        own = Action("F", stage, microbatch)
        return (own, Action(kind, stage + 1, microbatch)) if stage < self.stages - 1 else (own,)


@dataclass(frozen=True)
class _Recipe:
    generate: Callable[[int, int, int], Lists]  # (ranks, microbatches, chunks)
    backward: tuple[Kind, ...] = ("B",)
    default_chunks: int = 1
    any_chunks: bool = False
    any_microbatches: bool = True
    turns: bool = False  # stages come back in the opposite order: a V


_RECIPES: dict[str, _Recipe] = {
    "naive": _Recipe(fill_drain, any_microbatches=False),
    "f-then-b": _Recipe(fill_drain),
    "1f1b": _Recipe(one_f_one_b),
    "interleaved": _Recipe(interleaved, default_chunks=2, any_chunks=True),
    "zb1p": _Recipe(zb1p, backward=("I", "W")),
    "zbv": _Recipe(zbv, backward=("I", "W"), default_chunks=2, turns=True),
}
NAMES: tuple[str, ...] = tuple(_RECIPES)
SPLIT = tuple(name for name, recipe in _RECIPES.items() if "W" in recipe.backward)  # whose backwards run in halves
_OTHER_NAMES = {
    "gpipe": "f-then-b",
    "fthenb": "f-then-b",
    "zb-h1": "zb1p",
    "zbh1": "zb1p",
    "pipedream-flush": "1f1b",
    "vpp": "interleaved",
}


def named(name: str) -> str:
    """The schedule that a name stands for, as gpipe or Paddle's F-then-B and FThenB; UsageError where it is none."""
    if name in _RECIPES:
        return name
    lower = str(name).lower()
    if lower in ("pipedream", "pipedream-2bw"):
        raise UsageError(
            f"schedule={name}: PipeDream steps after every microbatch and keeps (stashes) the weights that each one "
            "under way began with, so its gradients are of older weights and its result is not one device's; use 1f1b, "
            "the same order with one step for each batch (PipeDream-flush)"
        )
    if lower not in _RECIPES and lower not in _OTHER_NAMES:
        near = get_close_matches(lower, [*NAMES, *_OTHER_NAMES], n=1)
        hint = f"did you mean {_OTHER_NAMES.get(near[0], near[0])}? " if near else ""
        raise UsageError(f"schedule={name}: {hint}expected one of {', '.join(NAMES)}")
    return _OTHER_NAMES.get(lower, lower)


@lru_cache(maxsize=64, typed=True)
def schedule(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule of that name for a pipeline of `ranks` ranks that each hold `chunks` stages.

    Without `chunks`: 2 for interleaved and zbv, else 1. Any number of microbatches will do, but for naive, which
    takes the whole batch at once.
    """
    recipe = _recipe(name, ranks, microbatches, chunks)
    chunks = recipe.default_chunks if chunks is None else chunks
    made = Schedule(
        name=name,
        microbatches=microbatches,
        placement=stage_placement(ranks, chunks, recipe.turns),
        backward=recipe.backward,
        actions=recipe.generate(ranks, microbatches, chunks),
    )
    check(made)
    return made


def forward_only(trained: Schedule) -> Schedule:
    """The same pipeline when it only evaluates: its forwards, in the same order."""
    forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in trained.actions)
    return replace(trained, name=f"{trained.name} forward only", backward=(), actions=forwards)


def _recipe(name: str, ranks: int, microbatches: int, chunks: int | None) -> _Recipe:
    if name not in _RECIPES:
        near = get_close_matches(str(name).lower(), [*NAMES, *_OTHER_NAMES], n=1)
        hint = f"; did you mean {_OTHER_NAMES.get(near[0], near[0])!r}?" if near else "."
        raise UsageError(f"there is no pipeline schedule {name!r}{hint} Choose from: {', '.join(NAMES)}")
    recipe = _RECIPES[name]
    for what, count in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if count is None and what == "chunks":
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UsageError(f"a pipeline needs a whole number of {what}, at least 1, not {count!r}")
    if not recipe.any_microbatches and microbatches != 1:
        raise UsageError(
            f"the {name} schedule sends the whole batch at once and takes microbatches=1, not {microbatches}; "
            f"for {microbatches} microbatches use f-then-b or 1f1b"
        )
    if not recipe.any_chunks and chunks not in (None, recipe.default_chunks):
        other = "interleaved" if recipe.default_chunks == 1 else "interleaved for another number"
        raise UsageError(
            f"the {name} schedule has {recipe.default_chunks} chunk(s) a rank, not {chunks}; "
            f"use chunks={recipe.default_chunks}, or {other}"
        )
    return recipe


def stage_placement(ranks: int, chunks: int, turns: bool) -> tuple[int, ...]:
    """Rank after rank, round after round; where the pipeline turns, every second round backwards."""
    rounds = []
    for chunk in range(chunks):
        one_round = range(ranks)
        rounds.append(reversed(one_round) if turns and chunk % 2 else one_round)
    return tuple(rank for one_round in rounds for rank in one_round)


def check(schedule: Schedule) -> None:
    """Raise AssertionError unless every microbatch passes every stage once each way, on its rank, without deadlock."""
    kinds: tuple[Kind, ...] = ("F", *schedule.backward)
    wanted = {
        Action(kind, stage, microbatch)
        for kind in kinds
        for stage in range(schedule.stages)
        for microbatch in range(schedule.microbatches)
    }
    found: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in COMPUTE or action not in wanted:
                raise AssertionError(f"schedule {schedule.name}: rank {rank} has {action}, which is no part of it")
            if action in found:
                raise AssertionError(f"schedule {schedule.name}: {action} comes twice")
            if schedule.placement[action.stage] != rank:
                holder = schedule.placement[action.stage]
                raise AssertionError(f"schedule {schedule.name}: {action} is on rank {rank}, its stage on {holder}")
            found.add(action)
    if missing := wanted - found:
        raise AssertionError(f"schedule {schedule.name}: missing {', '.join(sorted(map(str, missing))[:8])}")
    deque(in_order(schedule), maxlen=0)


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """All actions with their ranks, each after what it needs and after its rank's earlier ones.

    This is the pipeline itself, without time: a rank goes on until it has to wait for another, and is called again
    when that one delivers. AssertionError if ranks end up waiting for each other.
    """
    position = [0] * schedule.ranks
    callers: dict[Action, list[int]] = {}  # what is waited for -> the ranks that wait
    done: set[Action] = set()
    able = deque(range(schedule.ranks))
    while able:
        rank = able.popleft()
        actions = schedule.actions[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next((need for need in schedule.needs(action) if need not in done), None)
            if missing is not None:
                callers.setdefault(missing, []).append(rank)
                break
            done.add(action)
            position[rank] += 1
            able.extend(callers.pop(action, ()))
            yield rank, action
    stuck = {
        rank: actions[position[rank]] for rank, actions in enumerate(schedule.actions) if position[rank] < len(actions)
    }
    if stuck:
        report = "; ".join(f"rank {rank} at {action}" for rank, action in stuck.items())
        raise AssertionError(f"schedule {schedule.name} deadlocks: {report}")
