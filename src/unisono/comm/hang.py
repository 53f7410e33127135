"""The report on a hang: from what every rank says of itself to one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.comm.log import Entry, Log

RECENT = 8  # operations of each group that a rank tells of


@dataclass(frozen=True)
class GroupState:
    """One group's operations on one rank."""

    ranks: tuple[int, ...]
    pending: int  # the operation it is blocked in; 0 for none
    entered: int
    recent: tuple[Entry, ...]

    def entry(self, number: int) -> Entry | None:
        return next((entry for entry in self.recent if entry.number == number), None)


@dataclass(frozen=True)
class State:
    """What a rank says of itself when asked."""

    rank: int
    place: str  # where its main thread stands in the user's code
    torch_call: str  # the torch.distributed call it stands in, if any
    groups: dict[str, GroupState] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, place: str, torch_call: str, logs: Sequence[Log]) -> State:
        groups = {}
        for log in logs:
            recent = [log.entry(number) for number in range(max(1, log.count - RECENT + 1), log.count + 1)]
            if log.pending and log.pending <= log.count - RECENT:
                recent.insert(0, log.entry(log.pending))
            told = tuple(entry for entry in recent if entry is not None)
            groups[log.group] = GroupState(log.ranks, log.pending, log.count, told)
        return cls(rank, place, torch_call, groups)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> State:
        groups = {
            name: GroupState(tuple(g["ranks"]), g["pending"], g["entered"], tuple(Entry(**e) for e in g["recent"]))
            for name, g in told["groups"].items()
        }
        return cls(told["rank"], told["place"], told["torch_call"], groups)

    @property
    def waiting(self) -> tuple[str, int] | None:
        """The group and the number of the operation that it is blocked in."""
        for name, group in self.groups.items():
            if group.pending:
                return name, group.pending
        return None


def report(states: Mapping[int, State], absent: Mapping[int, str]) -> str:
    """One sentence: who waits where, and what the others do instead.

    `states` are the ranks that answered, `absent` says of each of the others what became of it.
    """
    stuck = _where_most_wait(states)
    phrases: dict[str, list[int]] = {}
    for rank in sorted([*states, *absent]):
        phrase = _phrase(states[rank], stuck) if rank in states else absent[rank]
        phrases.setdefault(phrase, []).append(rank)
    most_first = sorted(phrases.items(), key=lambda item: (not item[0].startswith("wait"), item[1]))
    return "; ".join(f"{_ranks(ranks)} {_conjugated(phrase, len(ranks))}" for phrase, ranks in most_first)


Stuck = tuple[str, int, str, str]  # group, number, operation, tensor


def _waits_in(state: State) -> Stuck | None:
    if state.waiting is None:
        return None
    name, number = state.waiting
    entry = state.groups[name].entry(number)
    return (name, number, entry.op, entry.what) if entry else (name, number, "", "")


def _where_most_wait(states: Mapping[int, State]) -> Stuck | None:
    counts: dict[Stuck, int] = {}
    for state in states.values():
        where = _waits_in(state)
        if where:
            counts[where] = counts.get(where, 0) + 1
    return max(counts, key=lambda where: (counts[where], -where[1])) if counts else None


def _phrase(state: State, stuck: Stuck | None) -> str:
    """What one rank does; verbs in the plural, `_conjugated` mends them."""
    where = _waits_in(state)
    if where is None or stuck is None:
        return _idle(state, stuck)
    name, number = where[:2]
    entry = state.groups[name].entry(number)
    shown = f"{entry}{_of_group(state, name)}" if entry else f"operation #{number}"
    if where == stuck:
        return f"wait in {shown}"
    if name == stuck[0] and number > stuck[1]:
        before = state.groups[name].entry(stuck[1])
        if before is not None:
            return f"are past {before} and in {shown}"
    return f"are in {shown}"


def _idle(state: State, stuck: Stuck | None) -> str:
    if state.torch_call:
        return f"are in {state.torch_call}"
    group = state.groups.get(stuck[0]) if stuck else None
    if group is None:
        return f"are at {state.place}"
    if not group.entered:
        return f"have not entered any collective and are at {state.place}"
    return f"have not entered any collective since #{group.entered} and are at {state.place}"


def _of_group(state: State, name: str) -> str:
    whole = state.groups.get("world")
    ranks = state.groups[name].ranks
    return "" if whole is None or ranks == whole.ranks else f" in the group of ranks {_numbers(ranks)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_numbers(ranks)}"


def _numbers(ranks: Sequence[int]) -> str:
    """0,1,2,3 up to eight ranks; beyond, runs are drawn together: 0-6,8."""
    if len(ranks) <= 8:
        return ",".join(map(str, ranks))
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def _conjugated(phrase: str, count: int) -> str:
    if count > 1:
        return phrase
    for plural, singular in (("wait in", "waits in"), ("have ", "has "), ("are ", "is "), ("do not", "does not")):
        phrase = phrase.replace(plural, singular)
    return phrase
