"""Paddle's optimizers: settings, of which a torch optimizer is made where it is known what it updates.

Without a plan that is the list of parameters that it was given; under one, this rank's part of them (`bind`).
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from unisono.compat.language import say
from unisono.compat.paddle.paddle_names import missing_names
from unisono.compat.paddle.regularizer import L2Decay
from unisono.errors import UsageError

_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Optimizer(abc.ABC):
    """What all have in common. parameters may be left out in static mode, where `minimize` finds them."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        parameters: Iterable[torch.Tensor] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        if isinstance(learning_rate, bool) or not isinstance(learning_rate, int | float):
            raise UsageError(
                say(
                    f"{type(self).__name__}(learning_rate={learning_rate!r}): Paddle also takes a schedule; here "
                    "give a "
                    "number, and change it with optimizer.set_lr(value)",
                    f"{type(self).__name__}(learning_rate={learning_rate!r})：飞桨还接受学习率策略；这里请给出数值，"
                    "并用 optimizer.set_lr(value) 修改",
                )
            )
        if grad_clip is not None:
            raise UsageError(
                say(
                    f"{type(self).__name__}(grad_clip=...): Paddle clips before each step; here use uni.Engine(clip=) "
                    "or uni.parallelize(clip=)",
                    f"{type(self).__name__}(grad_clip=...)：飞桨在每步之前裁剪梯度；这里请用 uni.Engine(clip=) 或 "
                    "uni.parallelize(clip=)",
                )
            )
        self._lr = float(learning_rate)
        self._decay = weight_decay.coeff if isinstance(weight_decay, L2Decay) else float(weight_decay or 0.0)
        self._parameters = None if parameters is None else _tensors(type(self).__name__, parameters)
        self._names: list[str] = []  # of the parameters, in the model of the plan
        self._owner: Any = None  # the trainer or the program that it is bound to
        self._inner: torch.optim.Optimizer | None = None
        self._step: Callable[[], Any] | None = None  # of the plan that it is bound to
        self._clear: Callable[[], Any] | None = None
        _optimizers.add(self)

    @abc.abstractmethod
    def make(self, parameters: Any) -> torch.optim.Optimizer:
        """A torch optimizer of these settings."""

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer that does the work."""
        if self._inner is None:
            if not self._parameters:
                raise UsageError(
                    say(
                        f"{type(self).__name__} was made without parameters, which Paddle allows in static mode only; "
                        "give parameters=model.parameters(), or call paddle.enable_static() first",
                        f"{type(self).__name__} 没有给出 parameters，飞桨仅在静态图模式下允许；请给出 "
                        "parameters=model.parameters()，或先调用 paddle.enable_static()",
                    )
                )
            self._inner = self.make(self._parameters)
        return self._inner

    def give(self, parameters: list[torch.Tensor]) -> None:
        """The parameters of a static program, where none were given."""
        if self._parameters is None:
            self._parameters = parameters

    def updates(self, parameter: torch.Tensor) -> bool:
        return any(each is parameter for each in self._parameters or ())

    def bind(self, owner: Any, step: Callable[[], Any], clear: Callable[[], Any]) -> None:
        """From now on it is the optimizer of a plan: of a trainer or a program, which takes the state that was loaded
        or trained before. Every rank calls it."""
        before = None if self._inner is None else self._inner.state_dict()
        self._owner, self._inner, self._step, self._clear = owner, owner.optimizer, step, clear
        if before is not None and before["state"]:
            self._give_state(before["state"])
        self.set_lr(self._lr)

    def step(self) -> None:
        if self._step is not None:
            self._step()
        else:
            self.inner.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        if self._clear is not None:
            self._clear()
        else:
            self.inner.zero_grad()

    clear_gradients = clear_grad

    def minimize(self, loss: Any, startup_program: Any = None, parameters: Any = None, no_grad_set: Any = None) -> Any:
        """Backward and a step; in static mode, both become part of the program."""
        program = getattr(loss, "program", None)
        if program is not None:
            program.minimize(self, loss)
        else:
            loss.backward()
            self.step()
        return None, None

    def get_lr(self) -> float:
        return self._lr

    def set_lr(self, value: float) -> None:
        self._lr = float(value)
        for group in () if self._inner is None else self._inner.param_groups:
            group["lr"] = self._lr

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, by their numbers, in full also under a plan, where every rank calls it. As in
        Paddle, the learning rate is no part of it."""
        if self._owner is None:
            return self.inner.state_dict()
        full = self._owner.state_dict()["optimizer"]
        states = {number: full["state"].get(name, {}) for number, name in enumerate(self._names)}
        groups = [{**full["param_groups"][0], "params": list(range(len(self._names)))}]
        return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that `state_dict` gave, under this or another plan; also before the plan is made."""
        if self._owner is None:
            self.inner.load_state_dict(state_dict)
        else:
            self._give_state(state_dict["state"])
        self.set_lr(self._lr)

    def _give_state(self, states: dict[int, Any]) -> None:
        full = self._owner.state_dict()
        given = {name: states.get(number, {}) for number, name in enumerate(self._names)}
        self._owner.load_state_dict({**full, "optimizer": {**full["optimizer"], "state": given}})


def _tensors(name: str, parameters: Iterable[Any]) -> list[torch.Tensor]:
    listed = list(parameters)
    if any(isinstance(each, dict) for each in listed):
        raise UsageError(
            say(
                f"{name}(parameters=[{{...}}]): Paddle takes groups with rates and decays of their own; here give "
                "a list of parameters, or use uni.Engine(parameter_groups=...)",
                f"{name}(parameters=[{{...}}])：飞桨接受带各自学习率和衰减的参数组；这里请给出参数列表，或使用 "
                "uni.Engine(parameter_groups=...)",
            )
        )
    return listed


def require_all_of(layer: torch.nn.Module, optimizer: Optimizer) -> Optimizer:
    """The optimizer; UsageError where it does not have just the parameters of the layer that are trained: a plan's
    optimizer has all of them."""
    trained = {id(each) for each in layer.parameters() if each.requires_grad}
    given = {id(each) for each in optimizer._parameters or () if each.requires_grad}
    if trained != given:
        raise UsageError(
            say(
                f"{type(optimizer).__name__} has {len(trained & given)} of the {len(trained)} trained parameters of "
                f"{type(layer).__name__}, and {len(given - trained)} others; Paddle updates just those, but a plan "
                "all of "
                "the model's: give parameters=model.parameters(), and set stop_gradient = True for those to be left",
                f"{type(optimizer).__name__} 含有 {type(layer).__name__} 的 {len(trained)} 个可训练参数中的 "
                f"{len(trained & given)} 个，另有 {len(given - trained)} 个其它参数；飞桨只更新这些参数，"
                "而并行方案更新模型的"
                "全部参数：请给出 parameters=model.parameters()，并把不训练的参数设为 stop_gradient = True",
            )
        )
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    optimizer._names = [names[id(each)] for each in optimizer._parameters or () if id(each) in names]
    return optimizer


def optimizer_of(layer: torch.nn.Module) -> Optimizer | None:
    """The optimizer that a program has made of a layer's parameters; None where there is none."""
    for parameter in layer.parameters():
        for optimizer in _optimizers:
            if optimizer.updates(parameter):
                return optimizer
    return None


class SGD(Optimizer):
    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self._lr, weight_decay=self._decay)


class Momentum(Optimizer):
    """velocity = momentum * velocity + gradient; parameter = parameter - learning_rate * velocity."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        momentum: float = 0.9,
        parameters: Iterable[torch.Tensor] | None = None,
        use_nesterov: bool = False,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        self._momentum, self._nesterov = momentum, use_nesterov

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr=self._lr, momentum=self._momentum, nesterov=self._nesterov, weight_decay=self._decay
        )


class Adam(Optimizer):
    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Iterable[torch.Tensor] | None = None,
        weight_decay: Any = None,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        self._betas, self._epsilon = (beta1, beta2), epsilon

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=self._lr, betas=self._betas, eps=self._epsilon, weight_decay=self._decay)


class AdamW(Adam):
    """The decay is of the parameter itself, and not added to its gradient."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Iterable[torch.Tensor] | None = None,
        weight_decay: Any = 0.01,
        grad_clip: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, parameters, weight_decay, grad_clip, name)

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=self._lr, betas=self._betas, eps=self._epsilon, weight_decay=self._decay
        )


__getattr__ = missing_names(__name__)
