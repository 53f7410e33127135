"""The steps of one rank: operations on its local axes, and blocks exchanged with partners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from unisono.errors import UsageError
from unisono.quantum.circuit.channels import Channel, StrengthSuperoperator
from unisono.quantum.circuit.gates import REPETITIONS
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.circuit.operations import shared
from unisono.quantum.distributed.global_index_map import GlobalIndexMap
from unisono.quantum.kernels.runner import Runner, runner
from unisono.quantum.schedule.step import CircuitSegment, Event, Exchange, Step


@dataclass(frozen=True)
class LocalOperations:
    """Unitary operations on local axes, in order; a gphase without controls scales the full local array."""

    operations: Sequence[Operation]
    runners: dict[tuple[object, ...], Runner] = field(default_factory=dict, compare=False, repr=False)

    @property
    def has_strengths(self) -> bool:
        """Whether these are channels whose strengths are given at each run (see noise/density_gradients.py)."""
        return any(isinstance(each.gate, StrengthSuperoperator) for each in self.operations)

    def runner(self, axes: int, dtype: torch.dtype, device: torch.device, kernel: str) -> Runner:
        """The operations made ready for a kernel; made once."""
        key = (axes, dtype, device, kernel)
        if key not in self.runners:
            self.runners[key] = runner(self.operations, axes, dtype, device, kernel)
        return self.runners[key]


@dataclass(frozen=True)
class BlockExchange:
    """The block of the local array where `axes` read `block` (first axis most significant) goes to `partner`, whose own
    block replaces it."""

    partner: int
    block: int


@dataclass(frozen=True)
class LocalExchange:
    """One rank's part of an exchange: all its blocks, in rounds in which ranks pair up."""

    axes: tuple[int, ...]
    blocks: tuple[BlockExchange, ...]


@dataclass(frozen=True)
class Measure:
    """A wire is measured, into classical `bits`, or reset. The wire is `axis`, or this rank holds its `value`.
    `unfinished`: no shot may come here with the condition true."""

    axis: int | None
    value: int
    bits: tuple[int, ...]
    condition: tuple[tuple[int, int], ...]
    reset: bool
    unfinished: bool = False


@dataclass(frozen=True)
class Conditional:
    """An operation on local axes that happens when classical bits have the values of its condition."""

    operation: Operation


@dataclass(frozen=True)
class Kraus:
    """A channel on local axes: one of its Kraus operators is drawn and applied."""

    axes: tuple[int, ...]
    channel: Channel
    condition: tuple[tuple[int, int], ...]


def require_finished(step: Measure | Kraus) -> None:
    if isinstance(step, Measure) and step.unfinished:
        raise UsageError(
            f"a 'while' on measured bits has not ended after {REPETITIONS} repetitions in one of the shots: expected a "
            "loop that ends sooner"
        )


LocalStep = LocalOperations | LocalExchange | Measure | Kraus | Conditional


def local_steps(steps: Iterable[Step], rank: int, index_map: GlobalIndexMap) -> Iterator[LocalStep]:
    """A rank's part of the steps of a schedule; `index_map` is updated on the way."""
    for step in steps:
        if isinstance(step, CircuitSegment):
            if operations := index_map.restrict(step.operations, rank):
                yield LocalOperations(shared(operations, step.operations))
        elif isinstance(step, Exchange):
            yield local_exchange(step, index_map, rank)
        elif step.operation.gate.unitary:
            for operation in index_map.restrict([step.operation], rank):
                yield Conditional(operation)
        elif isinstance(step.operation.gate, Channel):
            axes = tuple(position - index_map.global_qubits for position in step.operation.targets)
            yield Kraus(axes, step.operation.gate, step.operation.condition)
        else:
            yield _measure(step, index_map, rank)


def _measure(step: Event, index_map: GlobalIndexMap, rank: int) -> Measure:
    operation = step.operation
    (position,) = operation.targets
    local = position >= index_map.global_qubits
    return Measure(
        position - index_map.global_qubits if local else None,
        0 if local else index_map.bit(rank, position),
        operation.bits,
        operation.condition,
        operation.name == "reset",
        operation.name == "unfinished",
    )


def local_exchange(exchange: Exchange, index_map: GlobalIndexMap, rank: int) -> LocalExchange:
    """Which block a rank exchanges with which partner.

    Positions are exchanged in pairs, so amplitude i and amplitude s(i) do, s being its own inverse. A rank's block v,
    the bits taken being t, goes to the rank whose bits are v, and is its block t."""
    global_qubits = index_map.global_qubits
    local = [(give, take) for give, take in zip(exchange.give, exchange.take, strict=True) if give >= global_qubits]
    index = int(index_map.table[rank])
    for give, take in zip(exchange.give, exchange.take, strict=True):
        if give < global_qubits:
            index = _swapped(index, global_qubits - 1 - give, global_qubits - 1 - take)
    rank_of = {int(other): number for number, other in enumerate(index_map.table)}
    mine = 0
    for _, take in local:
        mine = mine << 1 | (index >> (global_qubits - 1 - take) & 1)
    made = []
    for step in range(2 ** len(local)):
        block = mine ^ step
        target = index
        for number, (_, take) in enumerate(reversed(local)):
            shift = global_qubits - 1 - take
            target = (target & ~(1 << shift)) | ((block >> number & 1) << shift)
        if rank_of[target] != rank:
            made.append(BlockExchange(rank_of[target], block))
    return LocalExchange(tuple(give - global_qubits for give, _ in local), tuple(made))


def _swapped(index: int, first: int, second: int) -> int:
    if (index >> first ^ index >> second) & 1:
        index ^= 1 << first | 1 << second
    return index
