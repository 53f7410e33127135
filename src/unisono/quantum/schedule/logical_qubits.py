"""A circuit made ready to be cut: operations on tracks.

A track is a wire that SWAP does not touch: swapping two wires renames their tracks, and costs nothing. Identities and
barriers are gone, an iSWAP is a phase and a renaming, and a gate that mixes more wires than a rank holds is taken apart
or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unisono.errors import UsageError
from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.gates import diagonal
from unisono.quantum.circuit.growable import Pieces
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.operations import Operations, shared

_SWAPS = {"swap": (), "iswap": (1, 1j, 1j, 1), "iswapdg": (1, -1j, -1j, 1)}  # the phases that come with the renaming


@dataclass(frozen=True)
class Tracks:
    """`operations` on tracks; wire w begins on track w and ends on track `ends[w]`; `leading[t]` are the constant gates
    on track t alone that come before all others, where they were asked for."""

    operations: Operations
    ends: tuple[int, ...]
    leading: tuple[tuple[Operation, ...], ...]


def tracks(operations: Sequence[Operation], wires: int, capacity: int, *, lead: bool) -> Tracks:
    track_of = list(range(wires))
    on_tracks: Pieces[Operation] = Pieces()
    for operation in operations:
        if operation.name in ("barrier", "id"):
            continue
        placed = operation.on(track_of)
        if _renames(operation):
            if phases := _SWAPS[operation.name]:
                on_tracks.append(replace(placed, gate=diagonal(phases)))
            first, second = operation.targets
            track_of[first], track_of[second] = track_of[second], track_of[first]
        else:
            on_tracks.extend(_fitting(placed, wires, capacity))
    leading: list[list[Operation]] = [[] for _ in range(wires)]
    if lead:
        on_tracks = _without_leading(on_tracks, leading)
    return Tracks(shared(on_tracks, operations), tuple(track_of), tuple(map(tuple, leading)))


def narrowest(operations: Iterable[Operation]) -> int:
    """How many wires a rank must keep: as many as the widest operation mixes, once taken apart."""
    mixing = (each for each in operations if each.gate.unitary and not _renames(each))
    return max((len(mixed_wires(part)) for each in mixing for part in each.lowered()), default=1) or 1


def _renames(operation: Operation) -> bool:
    return operation.name in _SWAPS and not operation.controls and not operation.condition


def _fitting(operation: Operation, wires: int, capacity: int) -> tuple[Operation, ...]:
    if len(mixed_wires(operation)) <= capacity:
        return (operation,)
    parts = operation.lowered()
    widest = max(len(mixed_wires(part)) for part in parts)
    if widest > capacity:
        ranks = 2 ** (wires - widest)
        raise UsageError(
            f"{operation.name} mixes {widest} of {wires} wires, but a rank holds only {capacity} of them; "
            f"use at most {ranks} rank{'s' if ranks > 1 else ''}"
        )
    return parts


def _without_leading(operations: Iterable[Operation], leading: list[list[Operation]]) -> Pieces[Operation]:
    rest: Pieces[Operation] = Pieces()
    touched: set[int] = set()
    for operation in operations:
        alone = len(operation.targets) == len(operation.wires) == 1 and operation.is_unitary and operation.is_constant
        if alone and operation.targets[0] not in touched:
            leading[operation.targets[0]].append(operation)
        else:
            touched.update(operation.wires)
            rest.append(operation)
    return rest
