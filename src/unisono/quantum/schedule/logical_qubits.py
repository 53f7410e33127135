"""A circuit prepared for partitioning: operations on logical qubits.

A SWAP of two wires exchanges the logical qubits they stand for, and costs nothing. Identities and barriers are removed,
an iSWAP is a phase and a renaming, and a gate that mixes more wires than a rank holds is decomposed or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unisono.errors import UsageError
from unisono.quantum.circuit.commutation import mixed_wires
from unisono.quantum.circuit.gates import Marker, diagonal
from unisono.quantum.circuit.growable import ChunkedList
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.operations import Operations, shared

_SWAPS = {"swap": (), "iswap": (1, 1j, 1j, 1), "iswapdg": (1, -1j, -1j, 1)}  # the phases that come with the renaming


@dataclass(frozen=True)
class LogicalQubits:
    """`operations` on logical qubits; wire w begins as qubit w and ends as qubit `ends[w]`; `leading[q]` are the
    constant gates on qubit q alone that come before all others, where they were asked for."""

    operations: Operations
    ends: tuple[int, ...]
    leading: tuple[tuple[Operation, ...], ...]


def to_logical_qubits(operations: Sequence[Operation], wires: int, capacity: int, *, lead: bool) -> LogicalQubits:
    qubit_of = list(range(wires))
    placed_operations: ChunkedList[Operation] = ChunkedList()
    for operation in operations:
        if operation.name in ("barrier", "id"):
            continue
        placed = operation.on(qubit_of)
        if _renames(operation):
            if phases := _SWAPS[operation.name]:
                placed_operations.append(replace(placed, gate=diagonal(phases)))
            first, second = operation.targets
            qubit_of[first], qubit_of[second] = qubit_of[second], qubit_of[first]
        else:
            placed_operations.extend(_fitting(placed, wires, capacity))
    leading: list[list[Operation]] = [[] for _ in range(wires)]
    if lead:
        placed_operations = _without_leading(placed_operations, leading)
    return LogicalQubits(shared(placed_operations, operations), tuple(qubit_of), tuple(map(tuple, leading)))


def narrowest(operations: Iterable[Operation]) -> int:
    """How many wires a rank must keep: as many as the widest operation mixes, once taken apart."""
    mixing = (each for each in operations if not isinstance(each.gate, Marker) and not _renames(each))
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


def _without_leading(operations: Iterable[Operation], leading: list[list[Operation]]) -> ChunkedList[Operation]:
    rest: ChunkedList[Operation] = ChunkedList()
    touched: set[int] = set()
    for operation in operations:
        alone = len(operation.targets) == len(operation.wires) == 1 and operation.is_unitary and operation.is_constant
        if alone and operation.targets[0] not in touched:
            leading[operation.targets[0]].append(operation)
        else:
            touched.update(operation.wires)
            rest.append(operation)
    return rest
