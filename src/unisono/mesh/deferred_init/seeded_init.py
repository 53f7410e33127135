"""Initial parameters as one process gets them from torch.manual_seed, whatever part of the model a rank builds.

Initializers draw from torch's generator one after the other, so the numbers of a layer depend on all layers before it.
Nothing skips ahead for every initializer. So a rank that needs some of the layers builds all of them in order, on the
CPU, and drops the others one by one: the time of building the full model, the memory of its own part and one layer.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from unisono.errors import UsageError


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In the block, torch's generators start from the seed and new tensors are made on the CPU.

    Afterwards the generators are as they were before. Parameters made on a GPU would differ from those made on a CPU:
    build here, then move the module.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if torch.backends.cuda.is_built():  # torch defers it until GPUs are in use
            torch.cuda.manual_seed_all(seed)
        yield


def states_outside_torch() -> dict[str, Any]:
    """Of generators of random numbers that no plan follows: Python's and NumPy's."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def build(model: Callable[[], torch.nn.Module], seed: int) -> torch.nn.Module:
    """The module that `model()` gives one process after torch.manual_seed(seed)."""
    with seeded(seed):
        return model()


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model with floating-point parameters and buffers in `dtype`, and complex ones in the complex dtype of that
    precision: `model.to(dtype)` would drop their imaginary parts."""

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(dtype if dtype.is_complex else dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model._apply(converted)
    return model.to(dtype)


def build_layers(
    layers: Sequence[Callable[[], torch.nn.Module]], wanted: Collection[int], seed: int
) -> dict[int, torch.nn.Module]:
    """The wanted ones of the layers that one process would build in order after torch.manual_seed(seed)."""
    unknown = sorted(set(wanted) - set(range(len(layers))))
    if unknown:
        raise UsageError(f"layers {unknown} are wanted, but there are only {len(layers)}, counted from 0")
    kept: dict[int, torch.nn.Module] = {}
    with seeded(seed):
        for number in range(max(wanted, default=-1) + 1):
            layer = layers[number]()
            if number in wanted:
                kept[number] = layer
            del layer
    return kept
