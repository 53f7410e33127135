"""Which wires a rank holds, segment by segment: paging, with the qubits as pages.

The wire that is needed last is given away (Belady). Tiers of global positions, a node's bits before its ranks' bits,
are served by the same rule, the outer tier first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.quantum.schedule.step import Exchange

NEVER = 1 << 60


@dataclass(frozen=True)
class Tier:
    """Global positions begin..end-1, and the sets of wires that must stand below them, one a segment, in order.

    Wires of `stay` are never global. `ahead`: an exchange also takes wires that are needed sooner than what it can give
    for them, though not yet."""

    begin: int
    end: int
    needed: tuple[frozenset[int], ...]
    stay: frozenset[int] = frozenset()
    ahead: bool = False


class Pages:
    """wires[p] is the wire at position p, now."""

    def __init__(self, wires: Sequence[int], tiers: Sequence[Tier]) -> None:
        self.wires = list(wires)
        self._tiers = tiers
        self._uses = [_uses(tier.needed) for tier in tiers]

    @classmethod
    def fresh(cls, count: int, tiers: Sequence[Tier]) -> Pages:
        """Wires placed where the first segments want them: what is needed last is outermost; else in order."""
        pages = cls(range(count), tiers)
        left = list(range(count))
        held: list[int] = []
        for level, tier in enumerate(tiers):
            left.sort(key=lambda wire: (pages._next_use(level, wire, 0), wire))
            able = [wire for wire in left if wire not in tier.stay]
            chosen = able[len(able) - (tier.end - tier.begin) :]
            held += sorted(chosen)
            left = [wire for wire in left if wire not in chosen]
        pages.wires = held + sorted(left)
        return pages

    def enter(self, segment: Sequence[int]) -> list[Exchange]:
        """Make segment[level] of each tier runnable; the exchanges that does it."""
        made = []
        for level, tier in enumerate(self._tiers):
            if exchange := self._serve(level, tier, segment[level]):
                made.append(exchange)
        return made

    def _serve(self, level: int, tier: Tier, segment: int) -> Exchange | None:
        needed = tier.needed[segment]
        take = [position for position in range(tier.begin, tier.end) if self.wires[position] in needed]
        if not take:
            return None
        idle = [p for p in range(tier.end, len(self.wires)) if self.wires[p] not in needed | tier.stay]
        idle.sort(key=lambda position: (-self._next_use(level, self.wires[position], segment), position))
        if tier.ahead:
            take += self._sooner(
                level, [p for p in range(tier.begin, tier.end) if p not in take], idle[len(take) :], segment
            )
        give, take = sorted(idle[: len(take)]), sorted(take)
        for mine, theirs in zip(give, take, strict=True):
            self.wires[mine], self.wires[theirs] = self.wires[theirs], self.wires[mine]
        return Exchange(tuple(give), tuple(take))

    def _sooner(self, level: int, held: list[int], idle: list[int], segment: int) -> list[int]:
        """Global positions whose wires are needed sooner than those at the idle ones that would replace them."""
        uses = {position: self._next_use(level, self.wires[position], segment) for position in (*held, *idle)}
        held.sort(key=lambda position: (uses[position], position))
        return [mine for mine, theirs in zip(held, idle, strict=False) if uses[mine] < uses[theirs]]

    def _next_use(self, level: int, wire: int, segment: int) -> int:
        uses = self._uses[level].get(wire, [])
        return next((use for use in uses if use >= segment), NEVER)


def _uses(needed: Sequence[frozenset[int]]) -> dict[int, list[int]]:
    uses: dict[int, list[int]] = {}
    for segment, wires in enumerate(needed):
        for wire in wires:
            uses.setdefault(wire, []).append(segment)
    return uses
