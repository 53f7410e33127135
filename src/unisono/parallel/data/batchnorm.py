"""Batch normalisation over the global batch.

BatchNorm's statistics are those of the batch, so a rank that sees a part of it must ask the others. Every rank sends
its count, mean and sum of squared deviations for each channel; with them (Chan's formula)

    count = sum n_r      mean = sum n_r mean_r / count      deviations = sum (d_r + n_r (mean_r - mean)^2)

which stays exact where a sum of squares would cancel. The gradient of the normalised x is, with means over the global
batch, (dy - mean(dy) - x mean(dy x)) / deviation: two sums a channel cross the ranks in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.sharded_batch_norm import normalised, of_channels, scaled, sum_over_batch
from unisono.plan.plan import DATA


def convert(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Make every BatchNorm of the model use the statistics of the batch over the mesh's data axes. In place."""
    axes = [axis for axis in DATA if axis in mesh.names]
    if not axes or mesh.size(*axes) == 1:
        return model
    comm = mesh.comm(*axes)
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, _Global) or _runs_as_subclass(module):
            continue
        if type(module) in _GLOBAL:
            module.__class__ = _GLOBAL[type(module)]
            setattr(module, "_comm", comm)  # noqa: B010 (mypy still takes the module for what it was)
        elif isinstance(module, nn.SyncBatchNorm):
            raise UsageError(f"{name} is a {type(module).__name__}, a subclass of SyncBatchNorm; use nn.BatchNorm")
        else:
            setattr(module, "forward", partial(_run_subclass, module, name, module.forward, comm))  # noqa: B010
    return model


def _runs_as_subclass(module: _BatchNorm) -> bool:
    return isinstance(module.forward, partial) and module.forward.func is _run_subclass


def _run_subclass(module: _BatchNorm, name: str, forward: Callable[..., Any], comm: Communicator, *args: Any) -> Any:
    """A subclass runs its own forward, in which F.batch_norm is that of the global batch."""
    calls = _Calls(comm)
    with calls:
        outputs = forward(*args)
    if _uses_batch(module) and not calls.count:
        raise UsageError(
            f"{name} is a {type(module).__name__}, whose forward does not call F.batch_norm, so its statistics would "
            "be those of a rank's samples; call it there, use nn.BatchNorm, or a plan without dp"
        )
    return outputs


class _Calls(TorchFunctionMode):
    """While active, batch_norm takes the statistics of the global batch."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm, self.count = comm, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return _batch_norm(self._comm, *args, **(kwargs or {}))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether anything in the model depends on all samples of the batch, so that microbatches would change the
    result."""
    return any(isinstance(module, _BatchNorm) and _uses_batch(module) for module in model.modules())


def _uses_batch(module: _BatchNorm) -> bool:
    return module.training or module.running_mean is None


class _Global(_BatchNorm):
    """A BatchNorm whose batch is on several ranks."""

    _comm: Communicator

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return over_ranks(self, input, self._comm)


def over_ranks(module: _BatchNorm, input: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """What a BatchNorm gives for a batch that is on the ranks of comm, of which input is this rank's samples."""
    if not _uses_batch(module):
        mean, variance = module.running_mean, module.running_var
        return F.batch_norm(input, mean, variance, module.weight, module.bias, eps=module.eps)
    module._check_input_dim(input)
    tracks = module.training and module.track_running_stats
    if tracks and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    factor: Any = module.momentum
    if tracks and factor is None:  # the average of all batches so far
        factor = 1.0 / float(torch.as_tensor(module.num_batches_tracked))
    mean, variance = (module.running_mean, module.running_var) if tracks else (None, None)
    return _batch_norm(comm, input, mean, variance, module.weight, module.bias, True, factor, module.eps)


def _batch_norm(
    comm: Communicator,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """F.batch_norm of a batch that is on several ranks."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    output, mean, deviations, count = normalised(input, eps, partial(_statistics, comm), comm.all_reduce)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((deviations / (count - 1)).to(running_var.dtype), momentum)
    return scaled(output, weight, bias).to(input.dtype)


def _statistics(comm: Communicator, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean and the sum of squared deviations of each channel, and the count, over all ranks."""
    channels = wide.shape[1]
    here = wide.numel() // channels if channels else 0
    mean = sum_over_batch(wide) / max(here, 1)
    deviations = sum_over_batch((wide - of_channels(mean, wide)) ** 2)
    message = torch.cat([mean, deviations, mean.new_tensor([here])])
    everyone = message.new_empty(comm.size, len(message))
    comm.all_gather_into(everyone, message)
    means, squares, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    count = counts.sum()
    if here < 2 and int(count) < 2:  # asks the device only where it may be so
        raise UsageError(f"BatchNorm needs more than one value a channel to train; the global batch has {int(count)}")
    mean = (counts * means).sum(0) / count
    return mean, (squares + counts * (means - mean) ** 2).sum(0), count


class GlobalBatchNorm1d(_Global, nn.BatchNorm1d):
    pass


class GlobalBatchNorm2d(_Global, nn.BatchNorm2d):
    pass


class GlobalBatchNorm3d(_Global, nn.BatchNorm3d):
    pass


class GlobalSyncBatchNorm(_Global, nn.SyncBatchNorm):
    pass


_GLOBAL: dict[type[_BatchNorm], type[_Global]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
    nn.SyncBatchNorm: GlobalSyncBatchNorm,
}
