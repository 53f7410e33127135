"""A backend of Qiskit, for transpile() and backend.run()."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from qiskit import QuantumCircuit
from qiskit.circuit import ForLoopOp, IfElseOp
from qiskit.circuit.library import UnitaryGate, get_standard_gate_name_mapping
from qiskit.providers import BackendV2, JobStatus, JobV1, Options
from qiskit.result import Result
from qiskit.transpiler import Target

from unisono.errors import UsageError
from unisono.integrations.qiskit.simulator import Simulator
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.parameter import require_seed
from unisono.quantum.outputs import require_shots


class UnisonoJob(JobV1):
    """A job that is done: run() simulates before it returns."""

    _async = False

    def __init__(self, backend: UnisonoBackend, job_id: str, result: Result) -> None:
        super().__init__(backend, job_id)
        self._result = result

    def submit(self) -> None:
        return None

    def result(self) -> Result:
        return self._result

    def status(self) -> JobStatus:
        return JobStatus.DONE


class UnisonoBackend(BackendV2):
    """State vectors by unisono.quantum, of any number of qubits that fits.

    ranks: how many ranks share each state, all of the job (the default) or 1. Options of run() are shots, memory and
    seed_simulator."""

    def __init__(
        self,
        *,
        ranks: int | None = None,
        dtype: torch.dtype = torch.complex128,
        device: Any = None,
        kernel: str = "auto",
        seed: Any = None,
    ) -> None:
        super().__init__(name="unisono", description="state vectors over the ranks of a job")
        self._simulator = Simulator(ranks, dtype, device, kernel, seed)
        self._target = Target(description="unisono", num_qubits=None)  # None: circuits keep their number of qubits
        for name, instruction in get_standard_gate_name_mapping().items():
            self._target.add_instruction(instruction, properties=None, name=name)
        for name, kind in (("unitary", UnitaryGate), ("if_else", IfElseOp), ("for_loop", ForLoopOp)):
            self._target.add_instruction(kind, name=name)

    @property
    def ranks(self) -> int:
        return self._simulator.ranks

    @property
    def target(self) -> Target:
        return self._target

    @property
    def max_circuits(self) -> None:
        return None

    @classmethod
    def _default_options(cls) -> Options:
        return Options(shots=1024, memory=False, seed_simulator=None)

    def run(self, run_input: QuantumCircuit | list[QuantumCircuit], **options: Any) -> UnisonoJob:
        """Counts of circuits, whose parameters all have numbers."""
        unknown = [name for name in options if name not in self.options]
        if unknown:
            raise UsageError(f"option {unknown[0]!r}: expected shots, memory or seed_simulator")
        chosen = {**vars(self.options), **options}
        is_one = isinstance(run_input, QuantumCircuit) or not isinstance(run_input, Iterable)
        circuits = [run_input] if is_one else list(run_input)
        for circuit in circuits:
            if not isinstance(circuit, QuantumCircuit):
                raise UsageError(f"run of {shown(circuit)}: expected a qiskit.QuantumCircuit, or several")
            if circuit.parameters:
                names = ", ".join(each.name for each in circuit.parameters)
                raise UsageError(
                    f"run of a circuit with the parameters {names}: assign_parameters first, or a primitive"
                )
        shots, seed = require_shots(chosen["shots"]), chosen["seed_simulator"]
        seeds = [self._simulator.seed() if seed is None else require_seed(seed) for _ in circuits]
        begin, job_id = time.perf_counter(), str(uuid.uuid4())
        results = [
            self._result(circuit, shots, seed, bool(chosen["memory"]))
            for circuit, seed in zip(circuits, seeds, strict=True)
        ]
        made = {
            "backend_name": self.name,
            "backend_version": self.backend_version,
            "job_id": job_id,
            "results": results,
            "status": "COMPLETED",
            "success": True,
            "time_taken": time.perf_counter() - begin,
        }
        return UnisonoJob(self, job_id, Result.from_dict(made))

    def _result(self, circuit: QuantumCircuit, shots: int, seed: int, memory: bool) -> dict[str, Any]:
        bits = self._simulator.prepare(circuit).bits(np.zeros(0), shots, seed)
        read = [hex(int("".join(map(str, row[::-1])) or "0", 2)) for row in bits.tolist()]
        counts = dict(Counter(read)) if circuit.num_clbits else {}
        header = {
            "name": circuit.name,
            "n_qubits": circuit.num_qubits,
            "creg_sizes": [[register.name, register.size] for register in circuit.cregs],
            "memory_slots": circuit.num_clbits,
            "global_phase": circuit.global_phase,
            "metadata": circuit.metadata or {},
        }
        return {
            "name": circuit.name,
            "seed_simulator": seed,
            "shots": shots,
            "data": {"counts": counts, **({"memory": read} if memory else {})},
            "status": "DONE",
            "success": True,
            "header": header,
        }
