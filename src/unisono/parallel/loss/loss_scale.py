"""The scale of a float16 loss, which the device decides: whether a step is skipped, and what the next scale is.

Gradients that are small beside the loss would be 0 in float16. So the loss is multiplied by a scale before the
backward, and gradients are divided by it after. A scale that is too large makes inf or nan of some gradient on some
rank: then no rank updates anything, and the scale halves.

    scaler = LossScaler(mesh)
    scaler.scale(partial).backward()
    scaler.unscale(parameters)                  # the same answer on every rank, in scaler.overflow
    with fused(optimizer, scaler.overflow, on_gpus=True):  # changes nothing where it is 1: see mesh/optimizers.py
        optimizer.step()
    scaler.update()

Scale, counters and the answer are tensors on the device, and torch's kernels for them are those of its GradScaler. The
host waits for the device only to read one: `value`, `is_finite`, `skipped`, `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.errors import UsageError
from unisono.mesh.gradient_norm import by_kind
from unisono.mesh.mesh import Mesh
from unisono.torch_compat import unscale_, update_scale_


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
        self._mesh = mesh
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._device: torch.device | None = None  # that of the first loss or gradients
        self._scale = torch.tensor(init_scale, dtype=torch.float32, device="cpu")
        self._good_steps = torch.zeros((), dtype=torch.int32, device="cpu")
        self._skipped = torch.zeros((), dtype=torch.int32, device="cpu")
        self.overflow: torch.Tensor | None = None  # 1 where a gradient since `forget` is inf or nan, else 0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward from; in float32 at least, where it does not overflow."""
        loss = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return loss * self._scale_at(loss)

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / self._scale_at(loss)

    def _scale_at(self, loss: torch.Tensor) -> torch.Tensor:
        self._settle_on(loss.device)
        return self._scale.to(loss.device, loss.dtype)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide gradients by the scale in place; `overflow` is then whether all gradients of all ranks are finite."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        comm = self._mesh.comm()
        device = self._settle_on(gradients[0].device if gradients else comm.device)
        found = torch.zeros((), dtype=torch.float32, device=device) if self.overflow is None else self.overflow
        inverse = self._scale.double().reciprocal().float()
        for alike in by_kind(gradients):
            here = torch.zeros((), dtype=torch.float32, device=alike[0].device)
            unscale_(alike, here, inverse.to(here.device))
            found = torch.maximum(found, here.to(device))
        self.overflow = self._anywhere(found)

    def _anywhere(self, found: torch.Tensor) -> torch.Tensor:
        """Whether any rank has found one."""
        comm = self._mesh.comm()
        return comm.all_reduce(found.to(comm.device), "max").to(found.device) if comm.size > 1 else found

    def forget(self) -> None:
        """There are no gradients."""
        self.overflow = None

    def update(self) -> None:
        """Adapt the scale to what `unscale` has found in this step."""
        if self.overflow is None:
            raise UsageError("update: unscale the gradients of this step first, so that there is something to learn")
        update_scale_(self._scale, self._good_steps, self.overflow, self._growth, self._backoff, self._interval)
        self._skipped.add_(self.overflow.to(torch.int32))
        self.overflow = None

    def _settle_on(self, device: torch.device) -> torch.device:
        if self._device is None:
            self._device = device
            self._scale, self._good_steps, self._skipped = (
                each.to(device, non_blocking=True) for each in (self._scale, self._good_steps, self._skipped)
            )
        return self._device

    # ---- what the host reads, and then waits for ---------------------------------------------------------------------

    @property
    def value(self) -> float:
        return float(self._scale)

    @value.setter
    def value(self, scale: float) -> None:
        self._scale.fill_(scale)

    @property
    def is_finite(self) -> bool | None:
        """Whether all gradients that were unscaled in this step are finite; None where there were none."""
        return None if self.overflow is None else not bool(self.overflow)

    @property
    def skipped(self) -> int:
        """Steps whose gradients overflowed."""
        return int(self._skipped)

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped.fill_(count)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": int(self._good_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["scale"])
        self._good_steps.fill_(int(state["good_steps"]))
