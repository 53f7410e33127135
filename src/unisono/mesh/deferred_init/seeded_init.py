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

import torch

from unisono.errors import UsageError


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In the block, torch's generators start from the seed, as do Python's and NumPy's, and new tensors are made on the
    CPU.

    Afterwards the generators are as they were before. A constructor that draws from Python's `random`, as to choose a
    layer, would otherwise make another model on every rank. Parameters made on a GPU would differ from those made on a CPU:
    build here, then move the module.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _outside_torch(seed), torch.random.fork_rng(devices=gpus), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        if torch.backends.cuda.is_built():  # torch defers it until GPUs are in use
            torch.cuda.manual_seed_all(seed)
        yield


@contextlib.contextmanager
def _outside_torch(seed: int) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


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
