"""Layers of torch whose result depends on how a batch is cut, and which no strategy makes good: refused by name.

BatchNorm is none of them (batchnorm.py), nor is dropout (mesh/random.py). These draw from torch's own generator inside
a kernel, or keep statistics of the samples that they see, or change with every forward pass.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from unisono.errors import UsageError
from unisono.plan.plan import Plan

_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def require_separable(model: nn.Module, plan: Plan) -> None:
    """UsageError where a layer of the model cannot give under the plan what it gives on one device."""
    is_cut = plan.dp * plan.microbatches > 1
    if plan.world * plan.microbatches > 1:
        _require_no_gradient_hooks(model)
    is_recomputed = plan.recompute not in ("none", "selective")
    for name, module in model.named_modules():
        called = f"{name or 'the model'} ({type(module).__name__})"
        if not module.training:
            continue
        if plan.world * plan.microbatches > 1 and _draws_by_itself(module):
            raise UsageError(
                f"{called} draws from torch's own generator, so what it drops or chooses would depend on the plan; use "
                "nn.Dropout, whose masks do not (between layers, where it is a recurrent one), or one device"
            )
        if is_cut and isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise UsageError(
                f"{called} tracks running statistics, which would be those of the samples that a rank or a microbatch "
                "sees; leave track_running_stats out, or use dp=1 and microbatches=1"
            )
        if isinstance(module, _SpectralNorm) and (plan.microbatches > 1 or is_recomputed):
            raise UsageError(
                f"{called} goes on in every forward pass, and microbatches or recomputation make more of them than one "
                "device does; use microbatches=1 and recompute=none or selective"
            )


def _require_no_gradient_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name} has a hook on its gradient (register_hook), which would be given a rank's or a microbatch's "
                "part of the gradient; remove the hook, and change gradients in the loss, with clip= or in an optimizer"
            )


def _draws_by_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, _RANDOM)
