"""Training in half precision, with the same decisions on every rank.

Parameters, gradients and optimizer state stay in float32; what is computed from them is rounded where torch's autocast
finds that halves do (matrix products, attention) and not where they do not (norms, losses, sums). So one process under
torch.autocast, and for float16 with torch.amp.GradScaler, is what a plan must agree with.

with autocast(torch.bfloat16, device):
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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh

HALVES = (torch.float16, torch.bfloat16)
_COMPUTED_IN: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """What a job computes in: "fp32" (the parameters' own precision), "bf16" or "fp16".

    The scale of the loss, which only fp16 needs, begins at `init_scale`, halves when a gradient overflows and doubles
    after `growth_interval` steps without.
    """

    name: str = "fp32"
    init_scale: float = 2.0**16
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.name not in _COMPUTED_IN:
            raise UsageError(f"precision={self.name!r}; expected one of {', '.join(_COMPUTED_IN)}")

    @classmethod
    def of(cls, given: str | Precision) -> Precision:
        return given if isinstance(given, Precision) else cls(given)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what is computed; None for that of the parameters."""
        return _COMPUTED_IN[self.name]

    def scaler(self, mesh: Mesh) -> LossScaler | None:
        if self.dtype != torch.float16:
            return None
        return LossScaler(mesh, self.init_scale, growth_interval=self.growth_interval)

    def require_float32(self, model: nn.Module) -> None:
        """Halves are computed from float32 parameters, which keep the small changes of a step."""
        for name, parameter in model.named_parameters():
            if self.dtype is not None and parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise UsageError(
                    f"precision={self.name} keeps parameters in float32, but {name} is {parameter.dtype}; pass the "
                    "model in float32" + ("" if parameter.dtype in HALVES else f", or leave precision={self.name} out")
                )


FULL = Precision()


def autocast(dtype: torch.dtype | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """torch's autocast for a half dtype; nothing for None and full precisions."""
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
        self.is_finite: bool | None = None  # what the last `unscale` found; None before

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward from; in float32 at least, where it does not overflow."""
        return (loss.float() if loss.dtype in HALVES else loss) * self.value

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
            found = comm.all_reduce(found.to(comm.device), "max")
        self.is_finite = not bool(found)
        return self.is_finite

    def update(self) -> None:
        """Adapt the scale to what the last `unscale` found."""
        if self.is_finite is None:
            raise UsageError("update: unscale the gradients of this step first, so that there is something to learn")
        if not self.is_finite:
            self.value *= self._backoff
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._interval:
                self.value *= self._growth
                self._good_steps = 0
        self.is_finite = None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["scale"]), int(state["good_steps"])
