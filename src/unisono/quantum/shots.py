"""Readings of a circuit's classical bits.

Where nothing follows the measurements, the state is made once and sampled. Where something does (a reset, a gate on a
measured wire, a condition), each shot is a course of its own, from the last point that all shots share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.circuit import Circuit
from unisono.quantum.outputs import samples
from unisono.quantum.program import Program
from unisono.quantum.state import State


def measured(
    circuit: Circuit,
    shots: int,
    *,
    weights: Any = (),
    features: Any = (),
    comm: Communicator | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.complex128,
    **options: Any,
) -> torch.Tensor:
    """`shots` readings of the circuit's bits, uint8, (shots, bits), the same for any number of ranks."""
    if not any(each.name == "measure" for each in circuit.operations):
        raise UsageError("the circuit measures nothing; add measure or measure_all, or sample a state's wires")
    circuit.check_values(weights, features)
    plain, wire_of_bit = final_measurements(circuit)
    state = State(circuit.wires, comm, dtype=dtype, **options)
    if plain is not None:
        wires = sorted(set(wire_of_bit.values()))
        read = samples(state.run(plain, weights, features), shots, seed=seed, wires=wires)
        bits = torch.zeros((shots, circuit.bits), dtype=torch.uint8)
        for bit, wire in wire_of_bit.items():
            bits[:, bit] = read[:, wires.index(wire)]
        return bits
    return _courses(circuit, state, shots, weights, features, seed)


def final_measurements(circuit: Circuit) -> tuple[Circuit | None, dict[int, int]]:
    """The circuit without its measurements, and the wire of each bit; None where something follows a measurement."""
    plain = Circuit(circuit.wires)
    wire_of_bit: dict[int, int] = {}
    read: set[int] = set()
    for each in circuit.operations:
        if each.name == "barrier":
            continue
        if each.name == "measure" and not each.condition:
            wire_of_bit[each.bits[0]] = each.targets[0]
            read.add(each.targets[0])
        elif not each.is_unitary or read & set(each.wires):
            return None, {}
        else:
            plain.append(each)
    return plain, wire_of_bit


def _courses(circuit: Circuit, state: State, shots: int, weights: Any, features: Any, seed: int) -> torch.Tensor:
    shared, rest = _parted(circuit)
    state.run(shared, weights, features)
    schedule = state.schedule(rest)
    program = Program.of(schedule, state.rank, state.holdings)
    bits = torch.zeros((shots, circuit.bits), dtype=torch.uint8)
    for shot in range(shots):
        course = state.like(state.local.clone())
        course.draws = np.random.default_rng([seed, shot])
        course.run(program, weights, features)
        for bit, value in course.bits.items():
            bits[shot, bit] = value
    return bits


def _parted(circuit: Circuit) -> tuple[Circuit, Circuit]:
    """What comes before the first measurement, reset or condition, and the rest."""
    operations = [each for each in circuit.operations if each.name != "barrier"]
    first = next(place for place, each in enumerate(operations) if not each.is_unitary)
    shared, rest = Circuit(circuit.wires, circuit.bits), Circuit(circuit.wires, circuit.bits)
    for place, each in enumerate(operations):
        (shared if place < first else rest).append(each)
    return shared, rest
