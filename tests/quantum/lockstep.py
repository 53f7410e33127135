"""All ranks of a schedule in one process: programs run step by step, exchanges done by copying. No messages, so any
number of ranks and nodes is cheap; the real exchange is tested in test_state.py."""

from __future__ import annotations

from typing import Any

import torch

from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.distributed.local_steps import LocalExchange, LocalOperations
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.kernels import reference
from unisono.quantum.kernels.reference import block
from unisono.quantum.schedule.schedule import Schedule


def amplitudes(circuit: Circuit, schedule: Schedule, weights: Any = (), features: Any = ()) -> torch.Tensor:
    """What 2^held ranks make of |0...0>; the circuit's leading constant gates are run as a state does, as a product."""
    ranks = 2**schedule.global_qubits
    programs = [QuantumProgram.of(schedule, rank) for rank in range(ranks)]
    local = _begin(schedule)
    for steps in _aligned(programs):
        if isinstance(steps[0], LocalExchange):
            _exchange(local, steps)
        else:
            for part, runs in zip(local, steps, strict=True):
                for run in runs:
                    reference.run(part, run.operations, weights, features)
    full = torch.empty_like(local)
    for rank in range(ranks):
        full[int(programs[rank].index_map.table[rank])] = local[rank]
    order = [schedule.finish.index(wire) for wire in range(circuit.wires)]
    return full.reshape((2,) * circuit.wires).permute(order).reshape(-1)


def _begin(schedule: Schedule) -> torch.Tensor:
    full = torch.zeros(2**schedule.wires, dtype=torch.complex128)
    full[0] = 1
    for wire, operations in enumerate(schedule.prepare):
        reference.run(full, [operation.on({wire: schedule.start.index(wire)}) for operation in operations])
    return full.view(2**schedule.global_qubits, -1)


def _aligned(programs: list[QuantumProgram]) -> list[list[Any]]:
    """Steps between exchanges, and exchanges, of all ranks side by side: a rank may have nothing to run."""
    queues = [list(program.steps) for program in programs]
    found: list[list[Any]] = []
    while any(queues):
        runs = [[queue.pop(0)] if queue and isinstance(queue[0], LocalOperations) else [] for queue in queues]
        found.append(runs)
        if any(queues):
            found.append([queue.pop(0) for queue in queues])
    return found


def _exchange(local: torch.Tensor, steps: list[LocalExchange]) -> None:
    before = local.clone()
    for rank, step in enumerate(steps):
        for sent in step.blocks:
            other = steps[sent.partner]
            (back,) = [each for each in other.blocks if each.partner == rank]
            block(local[rank], step.axes, sent.block).copy_(block(before[sent.partner], other.axes, back.block))
