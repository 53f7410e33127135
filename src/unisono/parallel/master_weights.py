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

import contextlib
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.global_index import Part
from unisono.mesh.mesh import Mesh
from unisono.mesh.optimizers import COMPUTES_IN_PARTS
from unisono.mesh.random.draw import Draw
from unisono.parallel.layout import layout_of, set_layout

ROUNDINGS = ("stochastic", "kahan")
_REMAINDER = "remainder"  # in the optimizer's state: what rounding has cut off a parameter
_KEEPS_REMAINDERS = "unisono_keeps_remainders"  # on an optimizer of which RoundedStep has made the step
AT_ONCE = 2**24  # elements of the parameters that are float32 at one time


def float32_copy(parameter: nn.Parameter) -> nn.Parameter:
    return copy_of(parameter, parameter, torch.promote_types(parameter.dtype, torch.float32), parameter.device)


def copy_of(parameter: nn.Parameter, values: torch.Tensor, dtype: torch.dtype, device: Any) -> nn.Parameter:
    """What the optimizer has of a parameter, or of a shard of it (`values`), in another dtype or on another device."""
    copy = nn.Parameter(values.detach().to(device, dtype, copy=True))
    set_layout(copy, layout_of(parameter))
    return copy


class Versions:
    """Detects in-place changes that a user makes to parameters, such as model.load_state_dict or a clamp under
    torch.no_grad(). Writes through `parameter.data` are not counted by torch, and not detected."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.remember()

    def remember(self) -> None:
        self._versions = {name: each._version for name, each in self._parameters.items()}

    def changed(self) -> list[str]:
        """Names of the parameters that were changed since `remember`."""
        return [name for name, each in self._parameters.items() if each._version != self._versions[name]]

    def require_unchanged(self) -> None:
        """After the optimizer's step, before parameters are overwritten."""
        for name in self.changed():
            raise UsageError(
                f"{name} was changed during the optimizer's step, by a step hook or by the optimizer itself, but the "
                "optimizer updates a copy of it; change the tensors in optimizer.param_groups"
            )


@torch.no_grad()
def take_changes(copy: torch.Tensor, published: torch.Tensor, parameter: torch.Tensor) -> None:
    """Give a copy those elements of its parameter that are no longer what was published of the copy."""
    now = parameter.detach().to(copy.device)
    copy.copy_(torch.where(now == published.to(now.dtype), copy, now.to(copy.dtype)))


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
        self.versions = Versions(self._parameters)
        if emulates is not None:
            self.publish()

    @property
    def replacing(self) -> dict[torch.Tensor, nn.Parameter]:
        """The copies by their parameters."""
        return {each: self.copies[name] for name, each in self._parameters.items()}

    def take_gradients(self) -> None:
        """Move gradients from parameters to their copies."""
        for name, copy in self.copies.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradient = parameter.grad.to(copy.device, copy.dtype)
                copy.grad = gradient if copy.grad is None else copy.grad + gradient
                parameter.grad = None

    def take_values(self) -> None:
        """Before copies are used: take over what the user has changed in the parameters."""
        for name in self.versions.changed():
            take_changes(self.copies[name], self._rounded(self.copies[name]), self._parameters[name])
        self.versions.remember()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies into the parameters."""
        for name, copy in self.copies.items():
            self._parameters[name].copy_(self._rounded(copy))
        self.versions.remember()

    def _rounded(self, copy: nn.Parameter) -> torch.Tensor:
        return copy if self._emulates is None else copy.to(self._emulates)


def hand_over(
    optimizer: Optimizer,
    copies: Mapping[torch.Tensor, nn.Parameter],
    own: Callable[[torch.Tensor, Any], Any] = lambda parameter, value: value,
) -> None:
    """Let an optimizer that has not stepped yet update copies of parameters, and give it their state.

    own: of state of a parameter, the part that belongs to its copy. From now on optimizer.zero_grad() also clears the
    gradients of the parameters, which stay there until they are summed, and optimizer.add_param_group() adds copies.
    """
    replaced = [each for group in optimizer.param_groups for each in group["params"] if each in copies]
    for group in optimizer.param_groups:
        group["params"] = [copies.get(each, each) for each in group["params"]]
    for parameter in [each for each in optimizer.state if each in copies]:
        copy, state = copies[parameter], optimizer.state.pop(parameter)
        optimizer.state[copy] = {key: _state_like(own(parameter, value), copy) for key, value in state.items()}
    clear, add = optimizer.zero_grad, optimizer.add_param_group

    def zero_grad(set_to_none: bool = True) -> None:
        clear(set_to_none)
        for parameter in replaced:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def add_param_group(param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        given = [each[1] if isinstance(each, tuple) else each for each in given]  # torch also takes (name, parameter)
        add({**param_group, "params": [copies.get(each, each) for each in given]})
        replaced.extend(each for each in given if each in copies)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _state_like(value: Any, copy: nn.Parameter) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == copy.shape:
        return value.to(copy.device, copy.dtype, copy=True)
    return value


def follow(optimizer: Optimizer, masters: MasterWeights) -> None:
    """Let an optimizer that has not stepped yet update master weights; parameters follow after each step."""

    def after(*_: Any) -> None:
        masters.versions.require_unchanged()
        masters.publish()

    hand_over(optimizer, masters.replacing)
    optimizer.register_step_pre_hook(lambda *_: masters.take_values())
    optimizer.register_step_post_hook(after)


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
        setattr(optimizer, _KEEPS_REMAINDERS, rounding == "kahan")
        optimizer.step = types.MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self) -> None:
        groups = self._optimizer.param_groups
        held = [group["params"] for group in groups]
        counts = _Counts(self._optimizer)
        try:
            for number, chunk in enumerate(self._chunks(held)):
                if number:
                    counts.restore()
                wide = {id(each): self._widened(each) for each in chunk if self._is_rounded(each)}
                chosen = {id(each): each for each in chunk}
                for group, parameters in zip(groups, held, strict=True):
                    group["params"] = [wide.get(id(each), each) for each in parameters if id(each) in chosen]
                with _without_hooks(self._optimizer):
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
            if chunk and elements + parameter.numel() > AT_ONCE:
                yield chunk
                chunk, elements = [], 0
            chunk.append(parameter)
            elements += parameter.numel()
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


@torch.no_grad()
def take_remainders(optimizer: Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    """After a state was loaded: remainders that rounding="kahan" has kept are added to tensors of a wider dtype, and
    stay in the state only with rounding="kahan"."""
    keeps = getattr(optimizer, _KEEPS_REMAINDERS, False)
    for tensor in tensors:
        state = optimizer.state.get(tensor, {})
        if _REMAINDER in state and not (keeps and tensor.dtype == torch.bfloat16):
            tensor.add_(state.pop(_REMAINDER).to(tensor.dtype))


class _Counts:
    """Numbers that an optimizer keeps beside the state of its parameters, such as a count of steps in its groups or
    attributes: a step that is computed in several parts must see the same in each of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kept = [{key: _kept(value) for key, value in each.items() if _is_count(value)} for each in self._holders]

    @property
    def _holders(self) -> list[dict[Any, Any]]:
        return [vars(self._optimizer), self._optimizer.state, *self._optimizer.param_groups]

    def restore(self) -> None:
        for holder, kept in zip(self._holders, self._kept, strict=True):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(holder.get(key), torch.Tensor):
                    holder[key].copy_(value)
                else:
                    holder[key] = value


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, bool | int | float | str | tuple)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """In the block, step hooks do not run, though a subclass may call its parent's step, which has them too."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = {name: getattr(optimizer, name) for name in names}
    for name in names:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, held in hooks.items():
            setattr(optimizer, name, held)


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
