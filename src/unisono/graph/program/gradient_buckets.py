"""Gradients that ranks hold parts of, summed in buckets while the backward still computes others.

A parameter that is replicated on the ranks of an axis, and is used by ops that are split there, gets a part of its
gradient on each of them (data parallelism is one case). Nobody needs the sum before the optimizer, so it need not be
taken edge by edge: parameters whose parts are summed over the same axes share messages. The program is the same on all
ranks, so all fill buckets in the same order; which parameters get gradients at all is learnt from the first backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.mesh.mesh import Mesh

BUCKET_BYTES = 25 * 2**20

Axes = tuple[str, ...]


class GradientBucket:
    """Parameters of one dtype whose gradients are summed in one message, in the same memory step after step."""

    def __init__(self, parameters: list[torch.nn.Parameter], comm: Communicator) -> None:
        self.parameters = parameters
        self.comm = comm
        self.handle: Handle | None = None
        self._missing: set[int] = set()  # gradients that are not in the message yet
        self._message: torch.Tensor | None = None
        self._slots: dict[int, torch.Tensor] = {}  # in it, by parameter

    def add(self, parameter: torch.nn.Parameter) -> None:
        self.parameters.append(parameter)
        self._missing.add(id(parameter))

    def take(self, parameter: torch.Tensor) -> None:
        """Take a gradient off its parameter as soon as it is there: its memory serves for the next one."""
        gradient = parameter.grad
        assert gradient is not None
        if self._message is None:
            sizes = [each.numel() for each in self.parameters]
            self._message = torch.empty(sum(sizes), dtype=gradient.dtype, device=gradient.device)
            slices = self._message.split(sizes)
            self._slots = {id(p): each.view(p.shape) for p, each in zip(self.parameters, slices, strict=True)}
        self._slots[id(parameter)].copy_(gradient)
        parameter.grad = None
        self._missing.discard(id(parameter))
        if not self._missing:
            self.handle = self.comm.all_reduce(self._message, async_op=True)

    def clear(self) -> None:
        """Begin again: what a backward that failed has left is no part of the next one."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        self._missing = {id(parameter) for parameter in self.parameters}

    def arrive(self) -> None:
        for parameter in self.parameters:
            if id(parameter) in self._missing:
                self.take(parameter)
        self.clear()
        for parameter in self.parameters:
            parameter.grad = self._slots[id(parameter)]


class GradientSums:
    """Sums the gradients of parameters over axes of the mesh: `begin` before a backward, `finish` after it."""

    def __init__(self, summed: Mapping[str, Axes], parameters: Mapping[str, torch.nn.Parameter], mesh: Mesh) -> None:
        """summed: by a parameter's name, the axes along which ranks hold parts of its gradient."""
        self._summed = [(parameters[name], axes) for name, axes in summed.items() if axes and mesh.size(*axes) > 1]
        self._mesh = mesh
        self._buckets: list[GradientBucket] | None = None  # until the first backward has shown who gets a gradient
        self._home: dict[int, GradientBucket] = {}
        self._is_open = False
        for axes in sorted({axes for _, axes in self._summed}):
            mesh.comm(*axes)  # groups are made in the same order on every rank

    def begin(self) -> None:
        """Before a backward whose gradients this is to sum: parameters, which have none now, may be in several
        programs."""
        for bucket in self._buckets or ():
            bucket.clear()
        self._is_open = True

    def finish(self) -> None:
        """Wait until every gradient is the sum of its parts. All ranks call it."""
        if self._buckets is None:
            self._buckets = self._filled()
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    self._home[id(parameter)] = bucket
                    parameter.register_post_accumulate_grad_hook(self._ready)
        for bucket in self._buckets:
            bucket.arrive()
        self._is_open = False

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self._is_open:
            return
        self._home[id(parameter)].take(parameter)

    def _filled(self) -> list[GradientBucket]:
        """Last parameters first: about the order in which the backward gets to them."""
        buckets: list[GradientBucket] = []
        sizes: dict[tuple[Axes, torch.dtype], tuple[int, GradientBucket]] = {}
        for parameter, axes in reversed(self._summed):
            if parameter.grad is None:
                continue
            size = parameter.grad.numel() * parameter.grad.dtype.itemsize
            filled, bucket = sizes.get((axes, parameter.grad.dtype), (BUCKET_BYTES, None))
            if bucket is None or filled + size > BUCKET_BYTES:
                filled, bucket = 0, GradientBucket([], self._mesh.comm(*axes))
                buckets.append(bucket)
            bucket.add(parameter)
            sizes[axes, parameter.grad.dtype] = filled + size, bucket
        return buckets
