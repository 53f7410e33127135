"""Circuits as differentiable functions, without a module: initial states, amplitude embedding, final states.

psi = uq.evaluate(circuit, weights=weights, initial=uq.amplitude_embedding(x, wires=4))
energy = uq.evaluate(other, "Z0 Z1", weights=more, initial=psi)      # gradients of weights, more and x
"""

from __future__ import annotations

from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import require_count, shown
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.layer import Layer


def amplitude_embedding(x: torch.Tensor, wires: int, *, pad: float | complex = 0.0) -> torch.Tensor:
    """Vectors of up to 2^wires numbers, (..., length), as amplitudes: padded with `pad`, and divided by their norm.

    Differentiable: layer(initial=uq.amplitude_embedding(x, wires=4))."""
    size = 1 << require_count("wires", wires, 1, 40)
    if not isinstance(x, torch.Tensor) or not (x.is_complex() or x.is_floating_point()) or not x.dim():
        raise UsageError(f"amplitude_embedding of {shown(x)}: expected a tensor of (..., at most {size}) numbers")
    if x.shape[-1] > size:
        raise UsageError(f"amplitude_embedding of {x.shape[-1]} numbers: {wires} wires have {size} amplitudes")
    if isinstance(pad, complex) and not x.is_complex():
        x = x.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)
    filled = torch.cat([x, x.new_full((*x.shape[:-1], size - x.shape[-1]), pad)], dim=-1)
    norms = torch.linalg.vector_norm(filled, dim=-1, keepdim=True)
    if not bool((torch.isfinite(norms) & (norms > 0)).all()):
        raise UsageError(
            "amplitude_embedding of a vector whose norm is zero or not finite: expected numbers, not all zero"
        )
    return filled / norms


def evaluate(
    circuit: Circuit,
    observables: Any = (),
    *,
    weights: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    comm: Communicator | None = None,
    dtype: torch.dtype = torch.complex128,
    **options: Any,
) -> torch.Tensor:
    """Expectation values, or without observables the final amplitudes, as a differentiable function.

    A Layer keeps what is compiled; this compiles at each call.

    Args:
        circuit: The circuit.
        observables: Of which expectation values are returned.
        weights: Values of its weights.
        features: Values of its features, of one sample or of a batch.
        initial: The initial amplitudes.
        comm: The ranks that share the state.
        dtype: Of amplitudes.
        **options: Those of Layer.
    """
    if not isinstance(observables, tuple | list) or observables:
        options.setdefault("output", "expectations")
    options.setdefault("output", "state")
    given = None if weights is None else torch.as_tensor(weights)
    layer = Layer(circuit, observables, comm, dtype=dtype, weights=() if given is None else given, **options)
    if given is None:
        return layer(features, initial)
    return torch.func.functional_call(layer, {"weights": given.to(layer.real_dtype)}, (features, initial))
