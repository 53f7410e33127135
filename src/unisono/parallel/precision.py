"""Training in half precision, with the same decisions on every rank.

with autocast(torch.bfloat16, device):          # matrix products in half, sums and norms in float32
    outputs = model(inputs)

scaler = LossScaler(mesh)                       # for float16, whose smallest gradients vanish
scaler.scale(partial).backward()
if scaler.unscale(parameters):                  # the same answer on every rank: all finite, everywhere
    optimizer.step()
scaler.update()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh

HALVES = (torch.float16, torch.bfloat16)


def autocast(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for a half dtype; nothing for None and whole precisions."""
    if dtype is None or dtype in (torch.float32, torch.float64):
        return contextlib.nullcontext()
    if dtype not in HALVES:
        raise UsageError(f"precision {dtype}; expected float16, bfloat16, float32 or float64")
    return torch.autocast(device.type, dtype=dtype)


def accumulate_in_float32(parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on, gradients of half parameters are added up, and kept, in float32.

    Microbatches whose gradients are small beside the sum of the ones before would be lost to rounding otherwise.
    """
    for parameter in parameters:
        if parameter.dtype in HALVES and parameter.requires_grad:
            parameter.grad_dtype = torch.float32


class LossScaler:
    """Scales the loss so that float16 gradients keep their small values; steps that overflow are skipped.

    The scale halves when any rank of the mesh met an inf or nan, and doubles after `growth_interval` good steps.
    """

    def __init__(
        self,
        mesh: Mesh,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if init_scale <= 0 or growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise UsageError(
                f"loss scaler: init_scale={init_scale}, growth_factor={growth_factor}, "
                f"backoff_factor={backoff_factor}, growth_interval={growth_interval}; expected a scale above 0, growth "
                "above 1, backoff between 0 and 1 and an interval of at least 1"
            )
        self.value = init_scale
        self._mesh = mesh
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._good_steps = 0
        self._is_finite: bool | None = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Divide gradients by the scale in place; whether all gradients of all ranks are finite."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        comm = self._mesh.comm()
        found = torch.zeros((), device=gradients[0].device if gradients else comm.device)
        for gradient in gradients:
            gradient.mul_(1.0 / self.value)
            found = torch.maximum(found, (~gradient.isfinite()).any().float().to(found.device))
        if comm.size > 1:
            comm.all_reduce(found, "max")
        self._is_finite = not bool(found)
        return self._is_finite

    def update(self) -> None:
        """Adapt the scale to what the last `unscale` found."""
        if self._is_finite is None:
            raise UsageError("update: unscale the gradients of this step first, so that there is something to learn")
        if not self._is_finite:
            self.value *= self._backoff
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._interval:
                self.value *= self._growth
                self._good_steps = 0
        self._is_finite = None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["scale"]), int(state["good_steps"])
