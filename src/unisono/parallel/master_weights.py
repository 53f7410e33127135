"""Bfloat16 parameters, and what the optimizer updates: a step is often smaller than half their last bit.

    master="fp32"   The optimizer has a float32 copy of every bfloat16 parameter (under ZeRO, of this rank's shard).
                    After its step parameters are the copies, rounded to nearest: MasterWeights.
    master=None     The optimizer has the bfloat16 parameters, and its state is bfloat16. Its step is computed in
                    float32, some parameters at a time, and the result is rounded: RoundedStep.

        rounding="stochastic"   up or down, with the probabilities that make the mean exact
        rounding="kahan"        to nearest; the remainder is kept in a second bfloat16, and added in the next step

Stochastic rounding takes random numbers by seed, step, parameter name and the element's index in the full parameter, so
that every plan rounds alike. Optimizer state is rounded stochastically in both cases: the running mean of squares of
Adam changes by 1/1000 of its size in a step, which rounding to nearest would leave out.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.mesh.global_index import Part
from unisono.mesh.mesh import Mesh
from unisono.mesh.optimizers import COMPUTES_IN_PARTS
from unisono.mesh.random.draw import Draw
from unisono.parallel.layout import layout_of, set_layout

ROUNDINGS = ("stochastic", "kahan")
_REMAINDER = "remainder"  # in the optimizer's state: what rounding has cut off a parameter
_AT_ONCE = 2**24  # elements of the parameters that are float32 at one time


def float32_copy(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copy = nn.Parameter(parameter.detach().to(dtype, copy=True))
    set_layout(copy, layout_of(parameter))
    return copy


class MasterWeights:
    """Float32 copies of parameters, by name, that an optimizer gets in their place."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        copy: Callable[[nn.Parameter], nn.Parameter] = float32_copy,
        emulates: torch.dtype | None = None,
    ) -> None:
        """emulates: parameters keep their wide dtype, and are rounded as if they had this one."""
        self._parameters = dict(parameters)
        self._emulates = emulates
        self.copies = {name: copy(each) for name, each in self._parameters.items()}
        if emulates is not None:
            self.publish()

    @property
    def replacing(self) -> dict[int, nn.Parameter]:
        """The copies, by the ids of their parameters."""
        return {id(each): self.copies[name] for name, each in self._parameters.items()}

    def take_gradients(self) -> None:
        """Move gradients from parameters to their copies."""
        for name, copy in self.copies.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradient = parameter.grad.to(copy.device, copy.dtype)
                copy.grad = gradient if copy.grad is None else copy.grad + gradient
                parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into the parameters."""
        for name, copy in self.copies.items():
            self._parameters[name].copy_(copy if self._emulates is None else copy.to(self._emulates))


def hand_over(optimizer: Optimizer, masters: MasterWeights) -> None:
    """Let an optimizer that has not stepped yet update the copies; parameters follow after each step."""
    replacing = masters.replacing
    for group in optimizer.param_groups:
        group["params"] = [replacing.get(id(each), each) for each in group["params"]]
    optimizer.register_step_post_hook(lambda *_: masters.publish())


class RoundedStep:
    """Makes an optimizer's step compute in float32 and round to bfloat16, for its parameters of that dtype."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Iterable[tuple[str, torch.Tensor]],
        rounding: str,
        random: Callable[[], tuple[object, ...]],
        mesh: Mesh | None = None,
        emulated: Collection[str] = (),
    ) -> None:
        """named: what the optimizer updates. random: what random numbers depend on beside names and indices. mesh: of
        parameters that are sharded. emulated: parameters of a wider dtype that are updated as if they were
        bfloat16."""
        self._names = {id(tensor): name for name, tensor in named}
        self._emulated = {key for key, name in self._names.items() if name in emulated}
        self._optimizer, self._rounding, self._random, self._mesh = optimizer, rounding, random, mesh
        hooked = type(optimizer).step
        self._plain: Callable[..., Any] = getattr(hooked, "__wrapped__", hooked)  # without the hooks around it

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.step()
            return loss

        setattr(optimizer, COMPUTES_IN_PARTS, True)
        optimizer.step = types.MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self) -> None:
        groups = self._optimizer.param_groups
        held = [group["params"] for group in groups]
        try:
            for chunk in self._chunks(held):
                wide = {id(each): self._widened(each) for each in chunk if self._is_rounded(each)}
                chosen = {id(each): each for each in chunk}
                for group, parameters in zip(groups, held, strict=True):
                    group["params"] = [wide.get(id(each), each) for each in parameters if id(each) in chosen]
                self._plain(self._optimizer)
                for key, parameter in wide.items():
                    self._narrow(chosen[key], parameter)
        finally:
            for group, parameters in zip(groups, held, strict=True):
                group["params"] = parameters

    def _is_rounded(self, parameter: torch.Tensor) -> bool:
        return parameter.dtype == torch.bfloat16 or id(parameter) in self._emulated

    def _chunks(self, held: list[list[nn.Parameter]]) -> Iterator[list[nn.Parameter]]:
        chunk: list[nn.Parameter] = []
        elements = 0
        for parameter in (each for parameters in held for each in parameters if each.grad is not None):
            if chunk and elements + parameter.numel() > _AT_ONCE:
                yield chunk
                chunk, elements = [], 0
            chunk.append(parameter)
            elements += parameter.numel()
        if chunk:
            yield chunk

    def _widened(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter in float32, with its gradient and state."""
        state = self._optimizer.state.pop(parameter, {})
        wide = nn.Parameter(parameter.detach().float())
        if _REMAINDER in state:
            wide.add_(state.pop(_REMAINDER).float())
        assert parameter.grad is not None
        wide.grad = parameter.grad.float()
        if state:
            self._optimizer.state[wide] = {
                key: value.float() if _is_like(value, parameter, torch.bfloat16) else value
                for key, value in state.items()
            }
        return wide

    def _narrow(self, parameter: nn.Parameter, wide: nn.Parameter) -> None:
        """Round what the step has made."""
        state = self._optimizer.state.pop(wide, {})
        kept = {
            key: self._stochastic(value, parameter, key) if _is_like(value, parameter, torch.float32) else value
            for key, value in state.items()
        }
        if self._rounding == "kahan":
            nearest = wide.detach().bfloat16()
            kept[_REMAINDER] = (wide.detach() - nearest.float()).bfloat16()
            parameter.copy_(nearest)
        else:
            parameter.copy_(self._stochastic(wide.detach(), parameter, "parameter"))
        self._optimizer.state[parameter] = kept

    def _stochastic(self, value: torch.Tensor, parameter: nn.Parameter, key: str) -> torch.Tensor:
        identity = (*self._random(), "rounding", self._names.get(id(parameter), ""), key)
        draw = Draw(identity, tuple(value.shape), parts_of(parameter, self._mesh))
        return round_stochastically(value, draw.words(value.device))


def round_stochastically(value: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Float32 to bfloat16, up or down by random int32 words.

    A bfloat16 is the upper half of a float32. The lower half is how far the value is beyond it: adding a random number
    of 16 bits carries into the upper half with that probability.
    """
    carried = (value.view(torch.int32) + (words & 0xFFFF)) & -0x10000
    return torch.where(value.isfinite(), carried.view(torch.float32), value).bfloat16()


def parts_of(tensor: torch.Tensor, mesh: Mesh | None) -> dict[int, Part]:
    """The positions in the full tensor that this rank holds, by dim."""
    parts: dict[int, Part] = {}
    for split in layout_of(tensor).splits:
        assert mesh is not None
        held = split.held[mesh.index(*split.axes)]
        part = Part(held if isinstance(held, range) else torch.as_tensor(list(held), dtype=torch.int64), split.length)
        parts[split.dim] = part.within(parts[split.dim]) if split.dim in parts else part
    return parts


def _is_like(value: Any, parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.dtype == dtype
    return is_tensor and value.shape == parameter.shape and value.dim() > 0
