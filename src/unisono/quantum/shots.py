"""Readings of a circuit's classical bits.

Where nothing follows the measurements, the state is made once and sampled. Where something does (a reset, a gate on a
measured wire, a condition), shots go on from the last point that all share, and part where they read differently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.circuit.circuit import Circuit, require_circuit
from unisono.quantum.circuit.parameter import require_seed
from unisono.quantum.distributed.local_steps import Measure
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.outputs import require_shots, samples
from unisono.quantum.state import State

_AT_ONCE = 1 << 30  # bytes of states that may wait while others go on


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
    require_circuit(circuit, "measured")
    if not any(each.name == "measure" for each in circuit.operations):
        raise UsageError("the circuit measures nothing; add measure or measure_all, or sample a state's wires")
    given, shots, seed = circuit.check_values(weights, features), require_shots(shots), require_seed(seed)
    plain, wire_of_bit = final_measurements(circuit)
    state = State(circuit.wires, comm, dtype=dtype, **options)
    if plain is not None:
        wires = sorted(set(wire_of_bit.values()))
        read = samples(state.run(plain, *given), shots, seed=seed, wires=wires)
        bits = torch.zeros((shots, circuit.bits), dtype=torch.uint8)
        for bit, wire in wire_of_bit.items():
            bits[:, bit] = read[:, wires.index(wire)]
        return bits
    return _courses(circuit, state, shots, given, seed)


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


def _courses(circuit: Circuit, state: State, shots: int, given: tuple, seed: int) -> torch.Tensor:
    """Shots that have read the same so far are one state; where so many states do not fit, each shot goes alone."""
    shared, rest = _parted(circuit)
    weights, features = given
    state.run(shared, weights[: shared.weights], features[: shared.features])
    program = QuantumProgram.of(state.schedule(rest), state.rank, state.index_map)
    bits = torch.zeros((shots, circuit.bits), dtype=torch.uint8)
    draws = [np.random.default_rng([seed, shot]) for shot in range(shots)]
    measurements = sum(isinstance(step, Measure) for step in program.steps)
    together = state.local.nbytes * measurements <= _AT_ONCE
    for first in range(min(shots, 1) if together else shots):
        course = state.twin()
        _walk(course, program, 0, np.arange(shots) if together else np.array([first]), draws, bits, given)
    return bits


def _walk(
    course: State,
    program: QuantumProgram,
    first_step: int,
    shots: np.ndarray,
    draws: list,
    bits: torch.Tensor,
    given: tuple,
) -> None:
    """Run the steps from `first_step` on for shots that have read alike; at a measurement they part."""
    for number in range(first_step, len(program.steps)):
        step = program.steps[number]
        if not isinstance(step, Measure):
            course.do(step, *given)
            continue
        if not course.holds(step.condition):
            continue
        one, both = course.chance(step)
        drawn = np.array([draws[shot].random() < one / both for shot in shots], dtype=np.uint8)
        outcomes = course.agreed(drawn)
        last = int(outcomes[-1])
        if (outcomes != last).any():
            other = course.twin()
            other.collapse(step, 1 - last, both - one if last else one)
            _walk(other, program, number + 1, shots[outcomes != last], draws, bits, given)
            shots = shots[outcomes == last]
        course.collapse(step, last, one if last else both - one)
    for bit, value in course.bits.items():
        bits[torch.from_numpy(shots), bit] = value


def _parted(circuit: Circuit) -> tuple[Circuit, Circuit]:
    """What comes before the first measurement, reset or condition, and the rest."""
    operations = [each for each in circuit.operations if each.name != "barrier"]
    first = next(index for index, each in enumerate(operations) if not each.is_unitary)
    shared, rest = Circuit(circuit.wires, circuit.bits), Circuit(circuit.wires, circuit.bits)
    for index, each in enumerate(operations):
        (shared if index < first else rest).append(each)
    return shared, rest
