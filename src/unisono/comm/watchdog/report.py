"""The report on a hang: one sentence made of the states that all ranks report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.amounts import format_ranks, ranks_in_words
from unisono.comm.watchdog.op_log import P2P, LoggedOp, OpLog

RECENT = 8  # operations of each group in a rank's state


@dataclass(frozen=True)
class GroupState:
    """One group's operations on one rank."""

    ranks: tuple[int, ...]
    pending: int  # the operation it is blocked in; 0 for none
    entered: int
    recent: tuple[LoggedOp, ...]

    def entry(self, number: int) -> LoggedOp | None:
        return next((entry for entry in self.recent if entry.number == number), None)


@dataclass(frozen=True)
class RankState:
    """What a rank reports of itself."""

    rank: int
    location: str  # where its main thread stands in the user's code
    torch_call: str  # the torch.distributed call it stands in, if any
    groups: dict[str, GroupState] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, location: str, torch_call: str, logs: Sequence[OpLog]) -> RankState:
        groups = {}
        for log in logs:
            recent = [log.entry(number) for number in range(max(1, log.entered - RECENT + 1), log.entered + 1)]
            if log.pending and log.pending <= log.entered - RECENT:
                recent.insert(0, log.entry(log.pending))
            known = tuple(entry for entry in recent if entry is not None)
            groups[log.group] = GroupState(log.ranks, log.pending, log.entered, known)
        return cls(rank, location, torch_call, groups)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankState:
        groups = {
            name: GroupState(tuple(g["ranks"]), g["pending"], g["entered"], tuple(LoggedOp(*e) for e in g["recent"]))
            for name, g in data["groups"].items()
        }
        return cls(data["rank"], data["location"], data["torch_call"], groups)

    @property
    def waiting(self) -> tuple[str, int] | None:
        """The group and the number of the operation that it is blocked in."""
        for name, group in self.groups.items():
            if group.pending:
                return name, group.pending
        return None

    @property
    def collective(self) -> tuple[str, int] | None:
        """The same, of a collective: all ranks number those alike, but each its own point-to-point operations."""
        return self.waiting if self.waiting and not self.waiting[0].endswith(P2P) else None


Stuck = tuple[str, int, str, str]  # group, number, operation, tensor
Dispute = tuple[str, int]  # the group and the number of a collective that ranks do not agree about


def report(states: Mapping[int, RankState], absent: Mapping[int, str], dispute: Dispute | None = None) -> str:
    """One sentence: who waits where, and what the others do instead.

    `states` are those of the ranks that answered; `absent` has for each other rank what became of it.
    """
    in_order = [states[rank] for rank in sorted(states)]  # whoever noticed, the sentence is the same
    stuck = _most_common(_disputed(state, dispute) if dispute else _waits_in(state) for state in in_order)
    phrases: dict[str, list[int]] = {}
    for rank in sorted([*states, *absent]):
        phrase = _phrase(states[rank], stuck, dispute) if rank in states else absent[rank]
        phrases.setdefault(phrase, []).append(rank)
    most_first = sorted(phrases.items(), key=lambda item: (not item[0].startswith("wait"), item[1]))
    return "; ".join(f"{ranks_in_words(ranks)} {_conjugated(phrase, len(ranks))}" for phrase, ranks in most_first)


def report_difference(groups: Sequence[tuple[LoggedOp, Sequence[int]]], where: str) -> str:
    """One sentence on an operation that all have run, but not all the same; `where` names the group."""
    most_first = sorted(groups, key=lambda group: (-len(group[1]), group[1]))
    parts = (
        f"{ranks_in_words(ranks)} {_conjugated('have run', len(ranks))} {entry}{where}" for entry, ranks in most_first
    )
    return f"{'; '.join(parts)}: their results are wrong"


def _waits_in(state: RankState) -> Stuck | None:
    return None if state.waiting is None else _known(state, *state.waiting)


def _disputed(state: RankState, dispute: Dispute) -> Stuck | None:
    group = state.groups.get(dispute[0])
    return _known(state, *dispute) if group and group.entry(dispute[1]) else None


def _known(state: RankState, name: str, number: int) -> Stuck:
    entry = state.groups[name].entry(number)
    return (name, number, entry.op, entry.what) if entry else (name, number, "", "")


def _most_common(locations: Iterable[Stuck | None]) -> Stuck | None:
    counts = Counter(where for where in locations if where is not None)
    return max(counts, key=lambda where: (counts[where], -where[1])) if counts else None


def _phrase(state: RankState, stuck: Stuck | None, dispute: Dispute | None) -> str:
    """What one rank does, with verbs in the plural; see `_conjugated`."""
    where = _waits_in(state)
    if dispute is not None and (where is None or where[:2] != dispute) and _disputed(state, dispute):
        return f"have begun {_shown(state, *dispute)} and {_now(state, where)}"
    if where is None or stuck is None:
        return _idle(state, stuck)
    name, number = where[:2]
    if where == stuck:
        return f"wait in {_shown(state, name, number)}"
    if name == stuck[0] and number > stuck[1]:
        before = state.groups[name].entry(stuck[1])
        if before is not None:
            return f"are past {before} and in {_shown(state, name, number)}"
    return f"are in {_shown(state, name, number)}"


def _now(state: RankState, where: Stuck | None) -> str:
    return f"are at {state.location}" if where is None else f"are in {_shown(state, *where[:2])}"


def _shown(state: RankState, name: str, number: int) -> str:
    entry = state.groups[name].entry(number)
    return f"{entry or f'operation #{number}'}{_of_group(state, name)}"


def _idle(state: RankState, stuck: Stuck | None) -> str:
    if state.torch_call:
        return f"are in {state.torch_call}"
    group = state.groups.get(stuck[0]) if stuck else None
    if group is None:
        return f"are at {state.location}"
    if not group.entered:
        return f"have not entered any collective and are at {state.location}"
    return f"have not entered any collective since #{group.entered} and are at {state.location}"


def _of_group(state: RankState, name: str) -> str:
    """Which group it is, where that is not the world."""
    name = name.removesuffix(P2P)
    ranks = state.groups[name].ranks
    if name == "world":
        return ""
    others = (other for other in state.groups if other != "world" and not other.endswith(P2P))
    alike = [other for other in others if state.groups[other].ranks == ranks]
    which = f"group {alike.index(name) + 1}" if len(alike) > 1 else "the group"
    return f" in {which} of ranks {format_ranks(ranks)}"


def _conjugated(phrase: str, count: int) -> str:
    if count > 1:
        return phrase
    for plural, singular in (("wait in", "waits in"), ("have ", "has "), ("are ", "is "), ("do not", "does not")):
        phrase = phrase.replace(plural, singular)
    return phrase
