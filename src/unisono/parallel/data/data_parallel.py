"""Data parallelism: every rank has the full model and a share of the batch.

Each rank computes the gradient of its part of the loss. The loss on the global batch is the sum of the parts (loss.py),
so its gradient is the sum of theirs: after summing, all ranks take the same optimizer step and stay equal.

`sum_gradients` is that sentence in code. `DataParallel` does the same while the backward is still running (reducer.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from unisono.comm.handle import Handle
from unisono.mesh.bucket import Bucket, bucket_bytes_for, buckets_of
from unisono.mesh.mesh import Mesh
from unisono.parallel.data.reducer import Missing, Reducer
from unisono.parallel.layout import summed_axes, summed_parameters
from unisono.parallel.master_weights import MasterWeights


def sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """The reference: sum every gradient over the ranks that hold parts of it, one after the other."""
    for parameter in model.parameters():
        axes = summed_axes(parameter, mesh)
        if axes and parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            mesh.comm(*axes).all_reduce(parameter.grad)


class FlaggedBucket(Bucket):
    """Its message ends with a number for each parameter: how many ranks have a gradient for it.

    So a gradient of zeros is distinguished from none, which an optimizer passes over, without a message of its own.
    """

    @property
    def size(self) -> int:
        return super().size + len(self.parameters)

    def slots(self, message: torch.Tensor) -> list[list[torch.Tensor]]:
        return super().slots(message[: super().size])

    def flags(self, message: torch.Tensor) -> torch.Tensor:
        return message[super().size :]


class DataParallel(Reducer[FlaggedBucket]):
    """Sums gradients in buckets during the backward, each parameter's over the axes that its layout names.

    replicas = DataParallel(model, mesh)
    for microbatch in all but the last:
        with replicas.hold():
            loss(...).backward()
    loss(...).backward()
    replicas.finish()                # now every parameter's .grad is that of the global batch

    Gradients of the step before must be gone (zero_grad) when a step's first backward begins: it writes over them. (Not
    so in a loop of the user's own, where those of the step before are the same on all ranks, and their mean is too.)
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        bucket_bytes: int | None = None,
        reduce_dtype: torch.dtype | None = None,
        masters: MasterWeights | None = None,
    ) -> None:
        """reduce_dtype: in which float32 gradients travel and are summed. masters: of half parameters; they get the
        gradients."""
        self._model = model
        self.masters = masters
        most = bucket_bytes or bucket_bytes_for(model)
        buckets: list[FlaggedBucket] = buckets_of(
            summed_parameters(model.named_parameters(), mesh), mesh, most, FlaggedBucket
        )
        for bucket in buckets:
            bucket.reduce_in(reduce_dtype)
        super().__init__(buckets)

    def complete(self) -> None:
        super().complete()
        if self.masters is not None:
            self.masters.take_gradients()

    def finish(self) -> None:
        super().finish()
        if self.masters is not None:
            self.masters.take_gradients()

    @property
    def has_copies(self) -> bool:
        """Whether the optimizer updates copies of some parameters."""
        return self.masters is not None

    def publish(self) -> None:
        """After what the optimizer updates was changed: bring the parameters up to date."""
        if self.masters is not None:
            self.masters.publish()

    def optimized(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates, by the parameters' names."""
        copies = {}
        if self.masters is not None:
            self.masters.take_values()
            copies = self.masters.copies
        for name, parameter in self._model.named_parameters():
            yield name, copies.get(name, parameter)

    def _reduce_async(self, bucket: FlaggedBucket) -> Handle:
        message = bucket.message()
        seen = [float(id(parameter) in self._seen) for parameter in bucket.parameters]
        flags = bucket.flags(message)
        if all(seen):
            flags.fill_(1.0)
        else:
            flags.copy_(torch.tensor(seen))
        return bucket.comm.all_reduce(message, async_op=True)

    def _store_gradients(self, bucket: FlaggedBucket, total: torch.Tensor) -> None:
        for parameter, slots in zip(bucket.parameters, bucket.slots(total), strict=True):
            parameter.grad = slots[0]
        if any(id(parameter) not in self._seen for parameter in bucket.parameters):
            for parameter, ranks in zip(bucket.parameters, bucket.flags(total).tolist(), strict=True):
                if not ranks:
                    parameter.grad = None
        if not self.is_own:
            bucket.spare.put(total)  # the next step's gradients come when these are gone

    def _ask_for_missing(self) -> Missing:
        return []  # the messages show it
