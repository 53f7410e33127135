"""Clipping gradients, of which every rank holds some shards, as if one process held them all.

A shard may be on several ranks: on all replicas, or on the tensor-parallel ranks that replicate a parameter. Of
those, one counts it: the first along each axis that does not shard the parameter. So one message over the full mesh
gives the norm, whichever strategies shard what. Pipeline stages hold different parameters; one that is tied between
stages is named in `uncounted` on all but one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.mesh.gradient_norm import norm_of_shards, scale_to_norm
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import layout_of
from unisono.torch_compat import clip_grad
from unisono.torch_patches import PatchSet, original

STAGES = "pp"  # the axis along which ranks hold different parameters, not different shards


def gradient_norm(
    parameters: Iterable[torch.Tensor],
    mesh: Mesh,
    norm_type: float = 2.0,
    uncounted: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """The norm of all gradients of the full model. Every rank of the mesh calls it, after gradients are summed."""
    return _full_norm(parameters, lambda parameter: parameter.grad, mesh, norm_type, uncounted)


def weight_norm(
    parameters: Iterable[torch.Tensor], mesh: Mesh, uncounted: Collection[torch.Tensor] = ()
) -> torch.Tensor:
    """The 2-norm of all parameters of the full model. Every rank of the mesh calls it."""
    return _full_norm(parameters, lambda parameter: parameter, mesh, 2.0, uncounted)


def _full_norm(
    parameters: Iterable[torch.Tensor],
    value: Callable[[torch.Tensor], torch.Tensor | None],
    mesh: Mesh,
    norm_type: float,
    uncounted: Collection[torch.Tensor],
) -> torch.Tensor:
    """Of one value for each parameter, sharded like it."""
    norm_type = _checked(norm_type)
    skipped = {id(parameter) for parameter in uncounted}
    # Of the ranks that hold the same shard, the first one counts it.
    not_first = {axis for axis in mesh.names if axis != STAGES and mesh.index(axis) != 0}
    mine = [
        found.detach()
        for parameter in _once(parameters)
        if (found := value(parameter)) is not None
        and id(parameter) not in skipped
        and not_first <= {*layout_of(parameter).axes}
    ]
    return norm_of_shards(mine, mesh.comm(), norm_type)


def clip_by_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    mesh: Mesh,
    norm_type: float = 2.0,
    *,
    uncounted: Collection[torch.Tensor] = (),
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm over the full model is at most max_norm; returns the norm before.

    What torch.nn.utils.clip_grad_norm_ does to the full model in one process.
    """
    if not max_norm >= 0:
        raise UsageError(f"clip: max_norm={max_norm}; expected a number of at least 0")
    parameters = _once(parameters)
    norm = gradient_norm(parameters, mesh, norm_type, uncounted)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise UsageError(f"the norm of the gradients is {float(norm)}; a loss or a learning rate may be too large")
    scale_to_norm([each.grad.detach() for each in parameters if each.grad is not None], norm, max_norm)
    return norm


def clip_by_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Bring every element of the gradients into [-limit, limit], in place; no rank needs another for it."""
    if not limit >= 0:
        raise UsageError(f"clip: limit={limit}; expected a number of at least 0")
    for parameter in _once(parameters):
        if parameter.grad is not None:
            parameter.grad.detach().clamp_(-limit, limit)


def _once(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def _checked(norm_type: float) -> float:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise UsageError(f"clip: norm_type={norm_type}; expected a number above 0, or inf")
    return norm_type


# ---- torch's own clipping, while gradients are sharded ---------------------------------------------------------------

_SHARDED_BY = "unisono_gradient_sharded_by"  # on a parameter: the plan


class TorchClipping:
    """From a backward until the update, torch.nn.utils.clip_grad_norm_ and clip_grad_value_ refuse some parameters.

    A rank has shards of their gradients: torch would take the norm of the shards for that of the model, and clip other
    ranks' gradients by another factor, silently.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], plan: str) -> None:
        self._is_sharded = self._is_refused = False
        for parameter in parameters:  # not kept: whoever keeps this object does not keep the model
            setattr(parameter, _SHARDED_BY, plan)
            self._is_sharded = True

    def refuse(self) -> None:
        if self._is_sharded and not self._is_refused:
            self._is_refused = True
            _REFUSALS.enter()

    def allow(self) -> None:
        if self._is_refused:
            self._is_refused = False
            _REFUSALS.leave()


def _refusing(owner: Any, name: str) -> Callable[..., Any]:
    clip = original(owner, name)

    def refusing(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        plan = next((getattr(each, _SHARDED_BY) for each in parameters if hasattr(each, _SHARDED_BY)), None)
        if plan is not None:
            raise UsageError(
                f"torch.nn.utils clips what is in .grad of the model's parameters, but under plan {plan} the gradients "
                "are sharded over the ranks, or belong to master weights; use trainer.clip_grad_norm_(max_norm) or "
                "trainer.clip_grad_value_(limit)"
            )
        return clip(parameters, *args, **kwargs)

    return refusing


_CLIPPING = (
    (clip_grad, "_clip_grads_with_norm_"),  # clip_grad_norm_ looks it up in each call, also where imported by name
    (clip_grad, "clip_grad_value_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
)
_REFUSALS = PatchSet(
    {target: _refusing(*target) for target in _CLIPPING},
    why="torch would clip by the norm of one rank's shards",
    until="gradients have been used, or the trainer is gone",
)
