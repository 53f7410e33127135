"""Layers of torch whose result depends on how a batch is sharded, and which no strategy corrects: refused by name.

BatchNorm is none of them (batchnorm.py), nor is dropout (mesh/random/state.py). These draw from torch's own generator
inside a kernel, or keep statistics of the samples that they see, or change with every forward pass, or write their
weights by the ids that they look up. What other layers do is seen when the model is tried on a few samples
(samples.py).
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from unisono.errors import UsageError
from unisono.plan.plan import RUN_ONCE, Plan

_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def require_separable(model: nn.Module, plan: Plan) -> None:
    """UsageError where a layer of the model cannot give under the plan what it gives on one device."""
    is_sharded = plan.dp * plan.microbatches > 1
    if plan.world * plan.microbatches > 1:
        _require_no_gradient_hooks(model)
    is_recomputed = plan.recompute not in RUN_ONCE
    for name, module in model.named_modules():
        called = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _require_plain_lookup(module, called, plan)
        if not module.training:
            continue
        if plan.world * plan.microbatches > 1 and _draws_by_itself(module):
            raise UsageError(
                f"{called} draws from torch's own generator, so what it drops or chooses would depend on the plan; use "
                "nn.Dropout, whose masks do not (between layers, where it is a recurrent one), or one device"
            )
        if is_sharded and isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise UsageError(
                f"{called} tracks running statistics, which would be those of the samples that a rank or a microbatch "
                "sees; leave track_running_stats out, or use dp=1 and microbatches=1"
            )
        if isinstance(module, _SpectralNorm) and plan.tp > 1:
            raise UsageError(
                f"{called} goes on whenever its layer's weight is read, and tp reads weights to shard them; use tp=1, "
                "or take the norm in the training loop"
            )
        if _iterates(module) and (plan.microbatches > 1 or is_recomputed):
            raise UsageError(
                f"{called} has a spectral norm that goes on in every forward pass, and microbatches or recomputation "
                "make more of them than one device does; use microbatches=1 and recompute=none, selective or attention"
            )


def _require_no_gradient_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name} has a hook on its gradient (register_hook), which would be given a rank's or a microbatch's "
                "part of the gradient; remove the hook, and change gradients in the loss, with clip= or in an optimizer"
            )


def _require_plain_lookup(module: nn.Embedding | nn.EmbeddingBag, called: str, plan: Plan) -> None:
    if module.max_norm is not None and plan.world * plan.microbatches > 1:
        raise UsageError(
            f"{called} has max_norm={module.max_norm}, so every lookup writes the weights of its ids, and ranks and "
            "microbatches look up some of the ids only; leave max_norm out, or use one device"
        )
    if module.scale_grad_by_freq and plan.dp * plan.microbatches * plan.cp * plan.tp > 1:
        raise UsageError(
            f"{called} has scale_grad_by_freq=True, and a rank or a microbatch counts its own ids only; leave it out, "
            "or use dp=1, cp=1, tp=1 and microbatches=1"
        )


def _iterates(module: nn.Module) -> bool:
    """Whether a forward pass goes on with an estimate of its weights' norm: as a parametrization, or as hooks."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


def _draws_by_itself(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, _RANDOM)
