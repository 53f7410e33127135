"""Comparing a run on some samples with a run on all of them: outputs, buffers, and where samples are mixed first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from unisono.mesh.random.state import SampleDim
from unisono.parallel.share import samples_between

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def found_output_dims(full: Any, part: Any, batch_size: int, held: int) -> tuple[SampleDim | None, ...]:
    """Where samples are in every leaf, given outputs for all of them and for the first ones; nothing where the latter
    are of another form altogether."""
    leaves, spec = tree_flatten(full)
    others, other_spec = tree_flatten(part)
    if spec != other_spec:
        return ()
    found: list[SampleDim | None] = []
    for full_value, mine in zip(leaves, others, strict=True):
        if not isinstance(full_value, torch.Tensor):
            found.append(None)
            continue
        if full_value.ndim != mine.ndim:
            return ()
        changed = [dim for dim, size in enumerate(mine.shape) if size != full_value.shape[dim]]
        if any(mine.shape[dim] * batch_size != full_value.shape[dim] * held for dim in changed):
            return ()
        if len(changed) > 1:  # samples by samples, as a matrix of similarities is
            found.append(SampleDim(full_value.ndim, None))
            continue
        found.append(_first_fitting(mine, full_value, changed[0], batch_size, held) if changed else None)
    return tuple(found)


def _first_fitting(mine: torch.Tensor, full_value: torch.Tensor, dim: int, batch_size: int, held: int) -> SampleDim:
    orders = [SampleDim(full_value.ndim, dim), SampleDim(full_value.ndim, dim, alternates=True)]
    if full_value.is_meta or full_value.shape[dim] == batch_size:
        return orders[0]
    fitting = (order for order in orders if are_close(mine, samples_between(full_value, order, batch_size, 0, held)))
    return next(fitting, orders[0])


def matches(mine: torch.Tensor, full_value: torch.Tensor, held: range, batch_size: int) -> bool:
    """Whether a part's tensor is that part of the full batch's one, along any dim that follows the number of samples;
    also where they cannot be compared because of their shapes."""
    changed = [
        dim
        for dim in range(full_value.ndim)
        if mine.ndim == full_value.ndim and mine.shape[dim] != full_value.shape[dim]
    ]
    if not changed and mine.ndim == full_value.ndim:
        return are_close(mine, full_value)
    if len(changed) != 1 or mine.shape[changed[0]] * batch_size != full_value.shape[changed[0]] * len(held):
        return True
    orders = [SampleDim(full_value.ndim, changed[0]), SampleDim(full_value.ndim, changed[0], alternates=True)]
    return any(
        are_close(mine, samples_between(full_value, order, batch_size, held.start, held.stop)) for order in orders
    )


def sample_weights(x: torch.Tensor, where: SampleDim, held: range) -> torch.Tensor:
    """Numbers around 1 in the shape of the outputs for these samples: those of a sample do not depend on the others."""
    assert where.dim is not None
    times = x.shape[where.dim] // len(held)
    per_sample = []
    for sample in held:
        generator = torch.Generator().manual_seed(sample)
        shape = [times if dim == where.dim else size for dim, size in enumerate(x.shape)]
        per_sample.append(1 + torch.rand(shape, generator=generator, dtype=torch.float64))
    joined = torch.stack(per_sample, where.dim + 1 if where.alternates else where.dim)
    return joined.flatten(where.dim, where.dim + 1).to(x)


def gradients_match(
    alone: torch.Tensor | None, both: torch.Tensor | None, held: range, batch_size: int, largest: float
) -> bool:
    """As `matches`; what is small beside the largest gradient may be rounding alone."""
    if alone is None or both is None:
        return alone is both
    noise = 1e-2 * _TOLERANCE.get(both.real.dtype, 2e-3) * largest
    if alone.shape == both.shape or not both.numel() or float(both.abs().max()) <= noise >= float(alone.abs().max()):
        return True  # of no samples: the sum of their gradients
    return matches(alone, both, held, batch_size)


def is_inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def are_close(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    if mine.shape != expected.shape or mine.dtype != expected.dtype:
        return False
    if not mine.numel() or not is_inexact(mine):
        return True
    finite = expected[expected.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    tolerance = _TOLERANCE.get(mine.real.dtype, 2e-3)
    return torch.allclose(mine, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@dataclass(frozen=True)
class Written:
    """A buffer before and after a forward pass."""

    old: torch.Tensor
    new: torch.Tensor

    def differs_from(self, other: Written) -> bool:
        if self.new.shape != other.new.shape or not self.new.is_floating_point():
            return not are_same(self.new, other.new)
        change = (self.new - self.old).abs().max() if self.new.shape == self.old.shape else self.new.abs().max()
        return bool((self.new - other.new).abs().max() > 1e-2 * change)


def are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class Found(Exception):
    """The first difference."""


class FirstDifference:
    """Compares what comes into and out of modules in one run with what did in another."""

    def __init__(self, events: list[tuple[str, Any]], held: range, batch_size: int) -> None:
        self._events, self._held, self._batch_size = events, held, batch_size
        self._next = 0
        self.point = ""

    def meet(self, point: str, values: list[torch.Tensor]) -> None:
        if self._next >= len(self._events) or self._events[self._next][0] != point:
            raise Found  # another way through the model: nothing is known
        full_tensors = self._events[self._next][1]
        self._next += 1
        for mine, full_value in zip(values, full_tensors, strict=False):
            if not matches(mine, full_value, self._held, self._batch_size):
                self.point = f"it shows first in {point}"
                raise Found


@contextlib.contextmanager
def noting(model: nn.Module, note: Callable[[str, list[torch.Tensor]], None]) -> Iterator[None]:
    """In the block, `note` is given what comes into and out of every module."""

    def into(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        note(f"the input of {name}", floats_in((args, kwargs)))

    def out_of(name: str, module: nn.Module, _: Any, outputs: Any) -> None:
        note(f"the output of {name} ({type(module).__name__})", floats_in(outputs))

    hooks: list[Any] = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(partial(into, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(out_of, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def floats_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and is_inexact(leaf)]


def copied(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.detach().clone() for value in values]
