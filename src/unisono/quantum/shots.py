"""Readings of a circuit's classical bits, and walks of many shots through a circuit that draws random outcomes.

Where nothing follows the measurements, and there is no noise, the state is made once and sampled. Otherwise shots go on
from the last point that all share, and part where they draw different outcomes: bits of measurements and resets, Kraus
operators of channels. Each shot has a random generator of its own, so that it draws the same whatever the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import require_comm
from unisono.quantum.circuit.channels import Channel
from unisono.quantum.circuit.circuit import Circuit, require_circuit
from unisono.quantum.circuit.parameter import is_index, require_seed
from unisono.quantum.distributed.local_steps import Kraus, Measure, require_finished
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.noise.readout import flipped, readout_errors
from unisono.quantum.outputs import require_shots, samples, samples_from
from unisono.quantum.state import State, drawn

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
    readout: Any = None,
    ranks_per_state: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Readings of the circuit's bits, uint8, (shots, bits), the same for any number of ranks.

    With channels in the circuit, each shot is a quantum trajectory of its own.

    Args:
        circuit: The circuit.
        shots: How many readings.
        weights: Values of its weights.
        features: Values of its features.
        comm: The ranks.
        seed: Of the readings.
        dtype: Of amplitudes.
        readout: The probability that a bit is read wrongly, a pair (of 0 as 1, of 1 as 0), or a mapping from bits to
            either; conditions see what was read.
        ranks_per_state: Ranks that share one state, a power of two (default: all); groups of them share the shots.
        **options: Those of State.
    """
    require_circuit(circuit, "measured")
    if not any(each.name == "measure" for each in circuit.operations):
        raise UsageError("the circuit measures nothing; add measure or measure_all, or sample a state's wires")
    given, shots, seed = circuit.check_values(weights, features), require_shots(shots), require_seed(seed)
    circuit = circuit.with_strengths(*given)
    given = given[0][: circuit.weights], given[1][: circuit.features]
    errors = readout_errors(readout, circuit.bits, "bit")
    group = ShotGroup.of(comm, shots, ranks_per_state)
    plain, wire_of_bit = final_measurements(circuit)
    bits = torch.zeros((shots, circuit.bits), dtype=torch.uint8)
    wires = sorted(set(wire_of_bit.values()))
    if plain is not None and plain.is_unitary:
        state = State(circuit.wires, comm, dtype=dtype, **options)
        read = samples(state.run(plain, *given), shots, seed=seed, wires=wires)
        for bit, wire in wire_of_bit.items():
            bits[:, bit] = read[:, wires.index(wire)]
        return flipped(bits, errors, [np.random.default_rng([seed, 1])])
    state = group.state(circuit.wires, dtype, options)

    def write(course: State, numbers: np.ndarray, draws: list[np.random.Generator]) -> None:
        rows = torch.from_numpy(numbers)
        if plain is None:
            for bit, value in course.bits.items():
                bits[rows, bit] = value
            return
        read = samples_from(course, len(numbers), wires, lambda: np.array([each.random() for each in draws]))
        found = torch.zeros((len(numbers), circuit.bits), dtype=torch.uint8)
        for bit, wire in wire_of_bit.items():
            found[:, bit] = read[:, wires.index(wire)]
        bits[rows] = flipped(found, errors, draws)

    walk(circuit if plain is None else plain, state, group.numbers, given, seed, write, errors)
    return group.joined(bits)


@dataclass(frozen=True)
class ShotGroup:
    """The ranks that share this rank's states (None: it alone), and the numbers of the shots that they take."""

    whole: Communicator | None
    comm: Communicator | None
    numbers: np.ndarray
    writes: bool  # of the ranks of a group one has its results

    @classmethod
    def of(cls, comm: Communicator | None, shots: int, ranks_per_state: int | None) -> ShotGroup:
        size = 1 if require_comm(comm) is None else comm.size  # type: ignore[union-attr]
        each = size if ranks_per_state is None else ranks_per_state
        if not is_index(each) or each < 1 or size % each or each & (each - 1):
            raise UsageError(f"ranks_per_state={each!r} of {size} ranks: expected a power of two that divides {size}")
        if comm is None or each == size:
            return cls(None, comm, np.arange(shots), True)
        mine = comm.split([[*range(first, first + each)] for first in range(0, size, each)]) if each > 1 else None
        numbers = np.array_split(np.arange(shots), size // each)[comm.rank // each]
        return cls(comm, mine, numbers, comm.rank % each == 0)

    def state(self, wires: int, dtype: torch.dtype, options: dict[str, Any]) -> State:
        if self.whole is not None and options.get("device") is None:
            options = {**options, "device": self.whole.device}
        return State(wires, self.comm, dtype=dtype, **options)

    def joined(self, results: torch.Tensor) -> torch.Tensor:
        """The results of all groups, each group having written its own rows."""
        if self.whole is None:
            return results
        return self.whole.all_reduce((results * self.writes).to(self.whole.device)).cpu()


def final_measurements(circuit: Circuit) -> tuple[Circuit | None, dict[int, int]]:
    """The circuit without its measurements, and the wire of each bit; None where something follows a measurement, and
    for what only a walk can do: resets and conditions."""
    plain = Circuit(circuit.wires)
    wire_of_bit: dict[int, int] = {}
    read: set[int] = set()
    for each in circuit.operations:
        if each.name == "barrier":
            continue
        if each.name == "measure" and not each.condition:
            wire_of_bit[each.bits[0]] = each.targets[0]
            read.add(each.targets[0])
        elif each.condition or not (each.is_unitary or isinstance(each.gate, Channel)) or read & set(each.wires):
            return None, {}
        else:
            plain.append(each)
    return plain, wire_of_bit


Arrival = Callable[[State, np.ndarray, list[np.random.Generator]], None]


def walk(
    circuit: Circuit,
    state: State,
    numbers: np.ndarray,
    given: tuple,
    seed: int | Sequence[int],
    arrive: Arrival,
    errors: np.ndarray | None = None,
) -> None:
    """Run the circuit for the shots of these numbers. `arrive(state, numbers, generators)` is called at the end with
    shots that share a state; where the states that wait do not fit, each shot goes alone."""
    seeds = (seed,) if isinstance(seed, int) else seed
    shared, rest = _parted(circuit)
    weights, features = given
    state.run(shared, weights[: shared.weights], features[: shared.features])
    program = QuantumProgram.of(state.schedule(rest), state.rank, state.index_map)
    draws = {int(number): np.random.default_rng([*seeds, int(number)]) for number in numbers}
    together = state.local.nbytes * max(1, len(numbers)).bit_length() <= _AT_ONCE
    walker = _Walker(program, given, draws, arrive, errors)
    for shots in [numbers] if together and len(numbers) else numbers.reshape(-1, 1):
        walker.go(state.twin(), 0, shots)


@dataclass(frozen=True)
class _Walker:
    program: QuantumProgram
    given: tuple
    draws: dict[int, np.random.Generator]
    arrive: Arrival
    errors: np.ndarray | None

    def go(self, course: State, first_step: int, shots: np.ndarray) -> None:
        """Run the steps from `first_step` on for shots that have drawn alike. Where they part, the largest group goes
        on here and the others each on a copy: so at most log2(shots) copies are alive."""
        for number in range(first_step, len(self.program.steps)):
            step = self.program.steps[number]
            if not isinstance(step, Measure | Kraus):
                course.do(step, *self.given)
                continue
            if not course.holds(step.condition):
                continue
            require_finished(step)
            weights = course.outcomes(step)
            *others, (outcome, read, shots) = self._groups(course, step, weights, shots)
            for other_outcome, other_read, group in others:
                other = course.twin()
                _collapse(other, step, other_outcome, other_read, weights)
                self.go(other, number + 1, group)
            _collapse(course, step, outcome, read, weights)
        course.layout, course.index_map = self.program.schedule.finish, self.program.index_map.copy()
        self.arrive(course, shots, [self.draws[int(shot)] for shot in shots])

    def _groups(
        self, course: State, step: Measure | Kraus, weights: np.ndarray, shots: np.ndarray
    ) -> list[tuple[int, int, np.ndarray]]:
        """(outcome, bit that is read, shots) of each group, the largest last."""
        uniform = np.array([self.draws[int(shot)].random() for shot in shots])
        codes = 2 * drawn(weights, uniform)
        if isinstance(step, Measure):
            codes += codes >> 1
            if self.errors is not None and step.bits:
                wrong = self.errors[step.bits[0]][codes & 1]
                codes ^= np.array([self.draws[int(shot)].random() for shot in shots]) < wrong
        codes = course.agreed(codes)
        found, which, sizes = np.unique(codes, return_inverse=True, return_counts=True)
        order = np.argsort(sizes, kind="stable")
        return [(int(found[at]) >> 1, int(found[at]) & 1, shots[which == at]) for at in order]


def _collapse(course: State, step: Measure | Kraus, outcome: int, read: int, weights: np.ndarray) -> None:
    course.collapse(step, outcome, float(weights[outcome]))
    if isinstance(step, Measure):
        course.bits.update(dict.fromkeys(step.bits, read))


def _parted(circuit: Circuit) -> tuple[Circuit, Circuit]:
    """What comes before the first random outcome or condition, and the rest."""
    operations = [each for each in circuit.operations if each.name != "barrier"]
    first = next((index for index, each in enumerate(operations) if not each.is_unitary), len(operations))
    shared, rest = Circuit(circuit.wires, circuit.bits), Circuit(circuit.wires, circuit.bits)
    for index, each in enumerate(operations):
        (shared if index < first else rest).append(each)
    return shared, rest
