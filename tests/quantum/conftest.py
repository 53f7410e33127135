"""What tests of circuits share."""

from __future__ import annotations

import pytest
import torch

from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.circuit.parameter import weight
from unisono.quantum.layer import Layer
from unisono.quantum.observables.observable import X, Z


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """The CPU kernels, compiled once and kept on disk, so that ranks need not all compile them at once."""
    circuit = Circuit(8).h(0).rx(1, weight(0)).cnot(0, 7)
    Layer(circuit, [Z(0), X(1)], dtype=torch.complex128)().sum().backward()
