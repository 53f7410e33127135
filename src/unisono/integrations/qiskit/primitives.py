"""Qiskit's primitives on unisono's simulator: a sampler and an estimator, of the second version of their interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch
from qiskit.primitives import (
    BaseEstimatorV2,
    BaseSamplerV2,
    BitArray,
    DataBin,
    PrimitiveJob,
    PrimitiveResult,
    PubResult,
    SamplerPubResult,
)
from qiskit.primitives.containers.estimator_pub import EstimatorPub
from qiskit.primitives.containers.sampler_pub import SamplerPub

from unisono.errors import UsageError
from unisono.integrations.qiskit.simulator import Simulator
from unisono.quantum.observables.expectation import expectations
from unisono.quantum.observables.observable import PauliSum, observable
from unisono.quantum.outputs import require_shots

_PROJECTORS = {"0": ("Z", 1), "1": ("Z", -1), "+": ("X", 1), "-": ("X", -1), "r": ("Y", 1), "l": ("Y", -1)}


class UnisonoSampler(BaseSamplerV2):
    """Samples of circuits, also with mid-circuit measurements, resets and if_test.

    ranks: how many ranks share each state, all of the job (the default) or 1; every rank runs the same circuits and has
    all results. dtype: torch.complex64 or torch.complex128. device: "cpu" or "cuda". seed: as for
    numpy.random.default_rng; the same seed gives the same samples on any number of ranks."""

    def __init__(
        self,
        *,
        default_shots: int = 1024,
        seed: Any = None,
        ranks: int | None = None,
        dtype: torch.dtype = torch.complex128,
        device: Any = None,
        kernel: str = "auto",
    ) -> None:
        self.default_shots = require_shots(default_shots)
        self._simulator = Simulator(ranks, dtype, device, kernel, seed)

    @property
    def ranks(self) -> int:
        return self._simulator.ranks

    def run(self, pubs: Iterable[Any], *, shots: int | None = None) -> PrimitiveJob:
        """The job has its result when this returns: ranks run circuits in the order of calls."""
        given = self.default_shots if shots is None else require_shots(shots)
        results = [self._pub(SamplerPub.coerce(pub, given)) for pub in pubs]
        return _done(PrimitiveResult(results, metadata={"version": 2}))

    def _pub(self, pub: SamplerPub) -> SamplerPubResult:
        circuit, values = pub.circuit, _values(pub)
        prepared = self._simulator.prepare(circuit)
        shape = pub.parameter_values.shape
        read = [prepared.bits(each, pub.shots, self._simulator.seed()) for each in values]
        bits = np.array(read, dtype=bool).reshape(*shape, pub.shots, circuit.num_clbits)
        number_of = {bit: number for number, bit in enumerate(circuit.clbits)}
        data = {
            register.name: BitArray.from_bool_array(bits[..., [number_of[bit] for bit in register]], order="little")
            for register in circuit.cregs
            if register.size
        }
        metadata = {"shots": pub.shots, "circuit_metadata": circuit.metadata}
        return SamplerPubResult(DataBin(**data, shape=shape), metadata=metadata)


class UnisonoEstimator(BaseEstimatorV2):
    """Expectation values, exact; with a precision above 0, of exact values with normal noise of that deviation.

    The options are those of UnisonoSampler."""

    def __init__(
        self,
        *,
        default_precision: float = 0.0,
        seed: Any = None,
        ranks: int | None = None,
        dtype: torch.dtype = torch.complex128,
        device: Any = None,
        kernel: str = "auto",
    ) -> None:
        self.default_precision = default_precision
        self._simulator = Simulator(ranks, dtype, device, kernel, seed)

    @property
    def ranks(self) -> int:
        return self._simulator.ranks

    def run(self, pubs: Iterable[Any], *, precision: float | None = None) -> PrimitiveJob:
        """The job has its result when this returns: ranks run circuits in the order of calls."""
        given = self.default_precision if precision is None else precision
        results = [self._pub(EstimatorPub.coerce(pub, given)) for pub in pubs]
        return _done(PrimitiveResult(results, metadata={"version": 2}))

    def _pub(self, pub: EstimatorPub) -> PubResult:
        """A state is made once for each set of values, and all observables that go with it are read off it."""
        values, wanted = _values(pub), [pauli_sum(each) for each in np.atleast_1d(pub.observables.tolist()).ravel()]
        prepared = self._simulator.prepare(pub.circuit)
        if prepared.program is None or (prepared.circuit.bits and prepared.wire_of_bit):
            raise UsageError(
                f"estimator of the circuit {pub.circuit.name!r}, which measures, resets or has channels: expected a "
                "unitary circuit; remove_final_measurements() takes final measurements away, and uq.DensityState gives "
                "expectation values under channels"
            )
        shape = pub.parameter_values.shape
        of_values, of_wanted = np.broadcast_arrays(
            np.arange(len(values)).reshape(shape), np.arange(len(wanted)).reshape(pub.observables.shape)
        )
        found = np.zeros(of_values.shape)
        for number, each in enumerate(values):
            chosen = np.unique(of_wanted[of_values == number])
            if len(chosen):
                read = expectations(prepared.state(each), [wanted[index] for index in chosen], restore=False).numpy()
                here = of_values == number
                found[here] = read[np.searchsorted(chosen, of_wanted[here])]
        if pub.precision:
            found = found + self._simulator.draws.normal(0, pub.precision, found.shape)
        data = DataBin(evs=found, stds=np.full(found.shape, float(pub.precision)), shape=found.shape)
        return PubResult(data, metadata={"target_precision": pub.precision, "circuit_metadata": pub.circuit.metadata})


def pauli_sum(terms: Mapping[str, float]) -> PauliSum:
    """An observable of Qiskit, whose last letter is qubit 0; of 0, 1, +, -, r and l each is a projector."""
    total: dict[str, float] = {}
    for label, coefficient in terms.items():
        if abs(complex(coefficient).imag) > 1e-12:
            raise UsageError(f"observable {label} with the coefficient {coefficient}: expected a real number")
        choices = []
        for qubit, letter in enumerate(reversed(label)):
            pauli, sign = _PROJECTORS.get(letter, (letter, 1))
            name = f"{pauli}{qubit}"
            choices.append([("", 0.5), (name, 0.5 * sign)] if letter in _PROJECTORS else [(name, 1.0)])
        for parts in product(*choices):
            paulis = " ".join(name for name, _ in parts if name and not name.startswith("I"))
            factor = float(np.prod([factor for _, factor in parts]))
            total[paulis] = total.get(paulis, 0.0) + complex(coefficient).real * factor
    return observable(total)


def _values(pub: Any) -> np.ndarray:
    """The values of the circuit's parameters, a row for each point of the sweep."""
    given = pub.parameter_values.as_array(pub.circuit.parameters)
    return np.asarray(given, dtype=np.float64).reshape(pub.parameter_values.size, len(pub.circuit.parameters))


def _done(result: PrimitiveResult) -> PrimitiveJob:
    job = PrimitiveJob(lambda: result)
    job._submit()
    return job
