"""Gradients that ranks hold parts of, summed in buckets while the backward still computes others.

A parameter that is replicated on the ranks of an axis, and is used by ops that are split there, gets a part of its
gradient on each of them (data parallelism is one case). Nobody needs the sum before the optimizer, so it need not be
taken edge by edge: parameters whose parts are summed over the same axes share messages. The program is the same on all
ranks, so all fill buckets in the same order; which parameters get gradients at all is known from the first backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unisono.mesh.bucket import BUCKET_BYTES, Axes, Bucket, buckets_of
from unisono.mesh.mesh import Mesh


class GradientSums:
    """Sums the gradients of parameters over axes of the mesh: `begin` before a backward, `finish` after it."""

    def __init__(self, summed: Mapping[str, Axes], parameters: Mapping[str, torch.nn.Parameter], mesh: Mesh) -> None:
        """summed: by a parameter's name, the axes along which ranks hold parts of its gradient."""
        self._summed = [
            (name, parameters[name], axes) for name, axes in summed.items() if axes and mesh.size(*axes) > 1
        ]
        self._mesh = mesh
        self._buckets: list[Bucket] | None = None  # until the first backward has shown who gets a gradient
        self._bucket_of: dict[int, Bucket] = {}
        self._is_open = False
        for axes in sorted({axes for _, _, axes in self._summed}):
            mesh.comm(*axes)  # groups are made in the same order on every rank

    def begin(self) -> None:
        """Before a backward whose gradients this is to sum: parameters, which have none now, may be in several
        programs."""
        for bucket in self._buckets or ():
            bucket.reset()
        self._is_open = True

    def finish(self) -> None:
        """Wait until every gradient is the sum of its parts. All ranks call it."""
        if self._buckets is None:
            self._buckets = self._found()
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    self._bucket_of[id(parameter)] = bucket
                    parameter.register_post_accumulate_grad_hook(self._ready)
        for bucket in self._buckets:
            if bucket.missing:
                self._send(bucket)
        for bucket in self._buckets:
            assert bucket.handle is not None
            total = bucket.handle.wait()
            bucket.handle = None
            for parameter, slots in zip(bucket.parameters, bucket.slots(total), strict=True):
                parameter.grad = slots[0]
            bucket.spare.put(total)  # the next step's gradients come when these are gone
        self._is_open = False

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self._is_open:
            return
        bucket = self._bucket_of[id(parameter)]
        bucket.pack(parameter)
        bucket.missing -= 1
        if not bucket.missing:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        bucket.missing = 0
        bucket.handle = bucket.comm.all_reduce(bucket.message(), async_op=True)

    def _found(self) -> list[Bucket]:
        return buckets_of([each for each in self._summed if each[1].grad is not None], self._mesh, BUCKET_BYTES)
