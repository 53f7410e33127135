"""Circuits of Qiskit on unisono's simulator.

    from unisono.integrations.qiskit import UnisonoBackend, UnisonoEstimator, UnisonoSampler

    UnisonoSampler(seed=1).run([(circuit, values)], shots=1000).result()[0].data.meas.get_counts()

Read in this order:

    simulator      a circuit as a program with angles, run for each set of parameter values
    primitives     the sampler and the estimator (SamplerV2 and EstimatorV2 of Qiskit)
    backend        a BackendV2, for transpile() and backend.run()

`uq.from_qiskit` translates circuits; it is in quantum/qiskit_circuits.py.
"""

from __future__ import annotations

import importlib.util

from unisono.errors import MissingPackageError

if importlib.util.find_spec("qiskit") is None:
    raise MissingPackageError("qiskit", "the backend and the primitives", "qiskit")

from unisono.integrations.qiskit.backend import UnisonoBackend
from unisono.integrations.qiskit.primitives import UnisonoEstimator, UnisonoSampler

__all__ = ["UnisonoBackend", "UnisonoEstimator", "UnisonoSampler"]
