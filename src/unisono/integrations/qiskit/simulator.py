"""A circuit of Qiskit as a program with angles, run for each set of parameter values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.integrations.ranks import compiled, job_communicator, shared_generator
from unisono.quantum.arguments import require_device, require_dtype
from unisono.quantum.circuit.channels import Channel
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.kernels.runner import require_kernel
from unisono.quantum.outputs import samples
from unisono.quantum.qiskit_circuits import from_qiskit
from unisono.quantum.schedule.logical_qubits import narrowest
from unisono.quantum.shots import final_measurements, measured
from unisono.quantum.state import State


@dataclass(frozen=True, eq=False)
class Prepared:
    """`program` makes the state that is measured, and `wire_of_bit` is the wire of each bit; None where something
    follows a measurement, or a reset, a condition or a channel is in the way."""

    simulator: Simulator
    circuit: Circuit
    program: QuantumProgram | None
    comm: Communicator | None
    wire_of_bit: dict[int, int]

    def state(self, values: np.ndarray) -> State:
        assert self.program is not None
        made = State(self.circuit.wires, self.comm, **self.simulator.options)
        return made.run(self.program, values[: self.program.schedule.weights])

    def bits(self, values: np.ndarray, shots: int, seed: int) -> np.ndarray:
        """Readings of all classical bits, uint8, (shots, bits)."""
        read = np.zeros((shots, self.circuit.bits), dtype=np.uint8)
        if self.program is None:
            given = values[: self.circuit.weights]
            options = {"comm": self.comm, "seed": seed, **self.simulator.options}
            return measured(self.circuit, shots, weights=given, **options).numpy()
        if not self.wire_of_bit:
            return read
        wires = sorted(set(self.wire_of_bit.values()))
        found = samples(self.state(values), shots, seed=seed, wires=wires).numpy()
        for bit, wire in self.wire_of_bit.items():
            read[:, bit] = found[:, wires.index(wire)]
        return read


class Simulator:
    """What the backend and the primitives share: the ranks of the job and how states are kept on them."""

    def __init__(self, ranks: int | None, dtype: torch.dtype, device: Any, kernel: str, seed: Any) -> None:
        require_dtype(dtype)
        require_kernel(kernel)
        self.comm = job_communicator(ranks)
        place = self.comm.device if device is None and self.comm is not None else require_device(device or "cpu")
        self.options: dict[str, Any] = {"dtype": dtype, "device": place, "kernel": kernel}
        self.draws = shared_generator(seed, self.comm)

    @property
    def ranks(self) -> int:
        """How many ranks share each state."""
        return 1 if self.comm is None else self.comm.size

    def seed(self) -> int:
        return int(self.draws.integers(1 << 62))

    def prepare(self, circuit: Any) -> Prepared:
        made = from_qiskit(circuit)
        plain, wire_of_bit = final_measurements(made)
        is_noisy = any(isinstance(each.gate, Channel) for each in made.operations)  # every shot draws anew
        if plain is not None and not is_noisy:
            program, comm = compiled(plain, self.comm, **self.options)
            return Prepared(self, made, program, comm, wire_of_bit)
        fits = made.wires - (self.ranks.bit_length() - 1) >= narrowest(made.operations)
        return Prepared(self, made, None, self.comm if fits else None, {})
