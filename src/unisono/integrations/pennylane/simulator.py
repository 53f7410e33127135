"""A tape as a program with angles, and the state that it makes.

A program is compiled once for each structure (gates and wires) and run with the angles of each tape, or of each sample
of a batch. The states of tapes that a derivative will be asked of, or that are measured in several bases, are kept for
a while.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pennylane as qml
import torch
from pennylane.operation import StatePrepBase

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.integrations.pennylane.operators import GateSpec, operation_of, spec_of
from unisono.integrations.ranks import compiled
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.state import State

MOST_PROGRAMS = 64
KEPT = 256 << 20  # bytes of states that are kept, and one state in any case


@dataclass(frozen=True, eq=False)
class TapeProgram:
    """What all tapes of one structure share. `weight_of[i]` is the weight that the tape's parameter i is, or None."""

    program: QuantumProgram
    comm: Communicator | None
    weight_of: tuple[int | None, ...]


@dataclass(frozen=True)
class Job:
    """A tape, or one sample of its batch, made ready: its program, the angles, and the amplitudes that it starts from,
    if any. `labels[w]` is the label of wire w."""

    shared: TapeProgram
    angles: np.ndarray
    start: np.ndarray | None
    labels: tuple[Any, ...]
    key: tuple[Any, ...]

    @property
    def wires(self) -> int:
        return len(self.labels)

    @property
    def wire_of(self) -> dict[Any, int]:
        return {label: wire for wire, label in enumerate(self.labels)}


@dataclass(frozen=True)
class JobBatch:
    """A tape made ready: a job for each sample of its batch, all of one program; without a batch (`size` None) there is
    one. `batched` are the weights that have a value for each sample."""

    samples: tuple[Job, ...]
    size: int | None
    batched: frozenset[int]

    def is_batched(self, parameter: int) -> bool:
        """Whether a parameter of the tape has an angle for each sample."""
        known = self.samples[0].shared.weight_of
        return parameter < len(known) and known[parameter] in self.batched


class Simulator:
    """Runs tapes whose operators are all native."""

    def __init__(self, comm: Communicator | None, dtype: torch.dtype, device: torch.device, kernel: str) -> None:
        self.comm, self.dtype, self.device, self.kernel = comm, dtype, device, kernel
        self._programs: OrderedDict[tuple[Any, ...], TapeProgram] = OrderedDict()
        self._states: OrderedDict[tuple[Any, ...], State] = OrderedDict()

    def prepare(self, tape: Any, device_wires: Any = None) -> JobBatch:
        labels = tuple(device_wires) if device_wires is not None else standard_order(tape)
        wire_of = None if labels == tuple(range(len(labels))) else {label: wire for wire, label in enumerate(labels)}
        operators = tape.operations
        start, first, specs = _preparation(operators, labels, wire_of)
        angles: list[Any] = []
        for op in operators[first:]:
            spec = spec_of(op, wire_of)
            specs.append((spec, len(op.data)))
            if spec is not None and not spec.is_array:
                angles += map(float if op.batch_size is None else qml.math.toarray, op.data)
        structure = (len(labels) or 1, start is not None, sum(len(op.data) for op in operators[:first]), *specs)
        shared = self._program(structure)
        begins = b"" if start is None else hashlib.blake2b(start.data).digest()
        batched = frozenset(number for number, each in enumerate(angles) if np.ndim(each))
        sizes = sorted({len(angles[number]) for number in batched})
        if len(sizes) > 1:
            raise UsageError(f"a circuit with batches of {' and '.join(map(str, sizes))} samples: expected one size")
        size = sizes[0] if sizes else None
        if size == 0:
            raise UsageError("a circuit with a batch of 0 samples: expected 1 or more")
        samples = [
            Job(shared, numbers, start, labels or (0,), (shared, numbers.tobytes(), begins))
            for numbers in _rows(angles, 1 if size is None else size)
        ]
        return JobBatch(tuple(samples), size, batched)

    def state(self, job: Job, *, keep: bool = False) -> State:
        """The state that the tape makes, or the kept one. A kept state must not be changed."""
        if (found := self._states.get(job.key)) is not None:
            return found
        if not keep:
            return self._run(job)
        size = torch.empty(0, dtype=self.dtype).element_size() << job.wires >> job.shared.program.schedule.global_qubits
        while self._states and (len(self._states) + 1) * size > KEPT:
            self._states.popitem(last=False)
        self._states[job.key] = self._run(job)
        return self._states[job.key]

    def take(self, job: Job, *, again: bool = False) -> State:
        """The same for who will change it: it is no longer kept, but as a small copy where it is needed again."""
        found = self._states.pop(job.key, None)
        if found is None:
            found = self._run(job)
        if again and 2 * found.local.nbytes <= KEPT:
            self._states[job.key] = found.twin()
        return found

    def forget(self) -> None:
        self._states.clear()

    def rotated(self, state: State, operators: Sequence[Any], labels: Sequence[Any]) -> State:
        """The state after further operators; the state itself is not changed."""
        if not operators:
            return state
        circuit = Circuit(state.wires)
        angles: list[float] = []
        for op in operators:
            if (spec := spec_of(op, {label: wire for wire, label in enumerate(labels)})) is not None:
                circuit.append(operation_of(spec, len(angles)))
                angles += [] if spec.is_array else map(float, op.data)
        return state.twin().run(circuit, np.array(angles))

    def _run(self, job: Job) -> State:
        state = State(job.wires, job.shared.comm, dtype=self.dtype, device=self.device, kernel=self.kernel)
        if job.start is not None:
            state.set_amplitudes(torch.from_numpy(job.start))
        return state.run(job.shared.program, job.angles)

    def _program(self, structure: tuple[Any, ...]) -> TapeProgram:
        if structure in self._programs:
            self._programs.move_to_end(structure)
            return self._programs[structure]
        wires, has_start, skipped, *specs = structure
        circuit, weight_of, count = Circuit(wires), [None] * skipped, 0
        for spec, parameters in specs:
            if spec is not None:
                circuit.append(operation_of(spec, count))
            angles = 0 if spec is None or spec.is_array else parameters
            weight_of += [*range(count, count + angles)] if angles else [None] * parameters
            count += angles
        options = (self.comm, self.dtype, self.device, self.kernel)
        made = TapeProgram(*compiled(circuit, *options, has_start=has_start), tuple(weight_of))
        while len(self._programs) >= MOST_PROGRAMS:
            self._programs.popitem(last=False)
        self._programs[structure] = made
        return made


def _rows(angles: Sequence[Any], samples: int) -> np.ndarray:
    """The angles of each sample, those that samples share in each row."""
    rows = np.empty((samples, len(angles)))
    for number, each in enumerate(angles):
        rows[:, number] = each
    return rows


def standard_order(tape: Any) -> tuple[Any, ...]:
    """The labels of a tape's wires in PennyLane's standard order, for devices that were made without wires."""
    order = tape._get_standard_wire_map()
    return tuple(range(tape.num_wires)) if order is None else tuple(sorted(order, key=order.__getitem__))


def _preparation(
    operators: Sequence[Any], labels: tuple[Any, ...], wire_of: Mapping[Any, int] | None
) -> tuple[np.ndarray | None, int, list[tuple[GateSpec | None, int]]]:
    """The amplitudes that a state preparation at the beginning gives, how many operators it takes, and gates that do
    it instead: a basis state needs no amplitudes."""
    if not operators or not isinstance(operators[0], StatePrepBase):
        return None, 0, []
    op = operators[0]
    if isinstance(op, qml.BasisState):
        wires = [label if wire_of is None else wire_of[label] for label in op.wires]
        bits = np.asarray(qml.math.toarray(op.data[0])).astype(int).reshape(-1).tolist()
        return None, 1, [(GateSpec("x", (wire,)), 0) for wire, bit in zip(wires, bits, strict=True) if bit]
    vector = qml.math.toarray(op.state_vector(wire_order=labels))
    return np.ascontiguousarray(vector, dtype=np.complex128).reshape(-1), 1, []
