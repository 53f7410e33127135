"""One simulation from the command line: what is asked of a circuit, and how a group of ranks answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.quantum import outputs, storage
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.parameter import require_seed
from unisono.quantum.distributed.rank_groups import share
from unisono.quantum.observables.expectation import expectations
from unisono.quantum.observables.measurement_plan import reading
from unisono.quantum.observables.observable import observables
from unisono.quantum.schedule.logical_qubits import narrowest
from unisono.quantum.schedule.schedule import Schedule
from unisono.quantum.shots import final_measurements, measured
from unisono.quantum.state import State


@dataclass(frozen=True)
class QuantumJob:
    circuit: Circuit
    observables: tuple[str, ...] = ()
    shots: int | None = None
    probabilities: tuple[int, ...] | None = None
    variance: bool = False
    state: bool = False
    save: str | None = None
    weights: tuple[float, ...] = ()
    features: tuple[float, ...] = ()
    seed: int = 0
    dtype: str = "complex128"

    @property
    def asks_something(self) -> bool:
        return self.shots is not None or self._asks_state

    @property
    def _asks_state(self) -> bool:
        return bool(self.observables or self.state or self.save or self.probabilities is not None)

    @property
    def unmeasured(self) -> Circuit | None:
        """The circuit without its final measurements; None where something follows a measurement."""
        return final_measurements(self.circuit)[0]

    def check(self) -> None:
        """Refuse what cannot be answered, before any rank starts."""
        self.circuit.check_values(self.weights, self.features)
        for each in observables(self.observables) if self.observables else ():
            each.check(self.circuit.wires)
        bad = [wire for wire in self.probabilities or () if not 0 <= wire < self.circuit.wires]
        if bad:
            raise UsageError(f"--probabilities of wire {bad[0]}: the circuit has wires 0 to {self.circuit.wires - 1}")
        if self.probabilities is not None and len(set(self.probabilities)) != len(self.probabilities):
            raise UsageError(f"--probabilities {','.join(map(str, self.probabilities))}: a wire is named twice")
        if self.probabilities is not None and len(self.probabilities) > outputs.MOST_PROBABILITIES:
            raise UsageError(f"--probabilities: at most {outputs.MOST_PROBABILITIES} wires can be read at once")
        if self.save and Path(self.save).exists():
            raise UsageError(f"--save {self.save}: it exists already; name another folder")
        require_seed(self.seed)
        if self.shots is not None and self.shots < 1:
            raise UsageError(f"--shots {self.shots}: expected at least 1")
        if self._asks_state and self.unmeasured is None:
            raise UsageError(
                "the circuit measures or resets in the middle, so that its final state differs from shot to shot; "
                "only --shots can be asked for"
            )

    def plan(self, ranks: int) -> dict[str, Any]:
        """What it would take on so many ranks: figures, and a text with all of them."""
        global_qubits = min(ranks.bit_length() - 1, max(0, self.circuit.wires - narrowest(self.circuit.operations)))
        schedule = Schedule.of(self.unmeasured or self.circuit, 1 << global_qubits)
        forecast = schedule.describe(getattr(torch, self.dtype))
        found: dict[str, Any] = {
            "wires": self.circuit.wires,
            "ranks": 1 << global_qubits,
            "operations": forecast.operations,
            "exchanges": forecast.exchanges,
            "exchanges_in_order": forecast.in_order_exchanges,
            "bytes_sent": forecast.sent,
            "bytes_sent_in_order": forecast.in_order_sent,
            "sweeps": forecast.sweeps,
            "peak_memory": forecast.memory,
            "seconds": forecast.seconds,
            "text": str(forecast),
        }
        if self.observables:
            pauli_strings = {
                pauli_string for each in observables(self.observables) for _, pauli_string in each.paulis().terms
            }
            plan = reading(sorted(pauli_strings), schedule.finish, global_qubits)
            found["exchanges_of_observables"] = plan.exchanges
            found["text"] += f"\nobservables  {len(pauli_strings)} Pauli strings with {plan.exchanges} exchanges"
        if 1 << global_qubits < ranks:
            found["text"] += f"\nranks        {1 << global_qubits} of {ranks} share the state; the others would be idle"
        return found


def on_rank(job: QuantumJob) -> dict[str, Any]:
    """What each started rank runs; the answer of rank 0 counts."""
    comm = world.init()
    try:
        return read(job, comm)
    finally:
        world.shutdown()


def read(job: QuantumJob, comm: Communicator | None) -> dict[str, Any]:
    """Simulate, and answer everything that is asked for. Every rank calls it."""
    circuit = job.circuit
    shared = share(comm, circuit.wires, narrowest=narrowest(circuit.operations), warn=False)  # it is in the answer
    found: dict[str, Any] = {
        "wires": circuit.wires,
        "operations": len(circuit),
        "depth": circuit.depth(),
        "ranks": 1 << shared.global_qubits,
        "dtype": job.dtype,
        "seed": job.seed,
        "note": shared.note,
    }
    if shared.group != 0:
        return found
    begin = time.perf_counter()
    _answer(job, shared.comm, found)
    found["seconds"] = time.perf_counter() - begin
    return found


def _answer(job: QuantumJob, comm: Communicator | None, found: dict[str, Any]) -> None:
    dtype: torch.dtype = getattr(torch, job.dtype)
    values: dict[str, Any] = {"weights": job.weights, "features": job.features}
    measures = any(each.name == "measure" for each in job.circuit.operations)
    if job.shots is not None and measures:
        bits = measured(job.circuit, job.shots, comm=comm, seed=job.seed, dtype=dtype, **values)
        found["counts"] = outputs.counts(bits)
    plain = job.unmeasured
    if plain is None or not (job._asks_state or (job.shots is not None and not measures)):
        return
    state = outputs.simulate(plain, comm=comm, dtype=dtype, **values)
    if job.shots is not None and not measures:
        found["counts"] = outputs.counts(outputs.samples(state, job.shots, seed=job.seed))
    if job.observables:
        found["observables"] = _observed(job, state)
    if job.probabilities is not None:
        chances = outputs.probabilities(state, job.probabilities)
        found["probabilities"] = _named(chances.tolist(), len(job.probabilities))
    if job.state:
        pairs = torch.view_as_real(state.amplitudes().cpu().to(torch.complex128)).tolist()
        found["state"] = _named(pairs, job.circuit.wires)
    if job.save:
        storage.save(state, job.save)
        found["saved"] = job.save


def _observed(job: QuantumJob, state: State) -> list[dict[str, Any]]:
    made = observables(job.observables)
    values = expectations(state, made).tolist()
    entries: list[dict[str, Any]] = [
        {"observable": text, "value": value} for text, value in zip(job.observables, values, strict=True)
    ]
    if job.variance:
        for row, variance in zip(entries, outputs.variances(state, made).tolist(), strict=True):
            row["variance"] = variance
    return entries


def _named(values: list[Any], bits: int) -> dict[str, Any]:
    return {f"{index:0{bits}b}": value for index, value in enumerate(values)}
