"""Optimizers: torch's, with MindSpore's arguments and defaults.

MindSpore makes an optimizer of the net's parameters. Here it has its settings, and `Model` makes torch's of the shards
that a rank has (`make`). `learning_rate` is a number, or a number for each step.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unisono.compat.language import say
from unisono.errors import UsageError


class Optimizer(abc.ABC):
    """`make(parameters)` gives torch's."""

    def __init__(self, params: Any, learning_rate: Any, weight_decay: float, loss_scale: float) -> None:
        name = type(self).__name__
        self.parameters: list[nn.Parameter] = list(params)
        if any(isinstance(each, dict) for each in self.parameters):
            raise UsageError(
                say(
                    f"{name}: groups of parameters with settings of their own are not here; give a list",
                    f"{name}：这里没有各自设置的参数组；请给出列表",
                )
            )
        if not self.parameters or not all(isinstance(each, nn.Parameter) for each in self.parameters):
            raise UsageError(
                say(
                    f"{name}: expected the net's parameters, as net.trainable_params() gives them",
                    f"{name}：应为网络的参数，即 net.trainable_params() 所给出的",
                )
            )
        self.rates = _rates(name, learning_rate)
        self.weight_decay = float(weight_decay)
        if loss_scale != 1.0:
            raise UsageError(
                say(
                    f"{name}(loss_scale={loss_scale}): expected 1.0; losses are not scaled in float32",
                    f"{name}(loss_scale={loss_scale})：应为 1.0；float32 下 loss 不缩放",
                )
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0; the last of the given ones stays."""
        return self.rates[min(step, len(self.rates) - 1)]

    @abc.abstractmethod
    def make(self, parameters: Any) -> torch.optim.Optimizer: ...

    def get_lr(self) -> float:
        return self.rates[0]


def _rates(name: str, given: Any) -> list[float]:
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    rates = list(given) if isinstance(given, Iterable) else [given]
    if not rates or any(isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 0 for rate in rates):
        raise UsageError(
            say(
                f"{name}(learning_rate={given!r}): expected a number, or one for each step",
                f"{name}(learning_rate={given!r})：应为一个数，或每步一个",
            )
        )
    return [float(rate) for rate in rates]


class Momentum(Optimizer):
    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        momentum: float,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(params, learning_rate, weight_decay, loss_scale)
        self.momentum, self.use_nesterov = float(momentum), use_nesterov

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=self.rate(0),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.use_nesterov,
        )


class SGD(Optimizer):
    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__(params, learning_rate, weight_decay, loss_scale)
        self.settings: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.rate(0), weight_decay=self.weight_decay, **self.settings)


class Adam(Optimizer):
    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        use_amsgrad: bool = False,
    ) -> None:
        super().__init__(params, learning_rate, weight_decay, loss_scale)
        if use_nesterov:
            raise UsageError(
                say(
                    "Adam(use_nesterov=True) is not here; torch.optim.NAdam is, with uni.to_static",
                    "这里没有 Adam(use_nesterov=True)；请用 torch.optim.NAdam 和 uni.to_static",
                )
            )
        self.settings: dict[str, Any] = {"betas": (beta1, beta2), "eps": eps, "amsgrad": use_amsgrad}

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return _Adam(parameters, lr=self.rate(0), weight_decay=self.weight_decay, **self.settings)


class AdamWeightDecay(Optimizer):
    """Moments are not corrected for their start, and the decay is added to the update."""

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, learning_rate, weight_decay, 1.0)
        self.settings: dict[str, Any] = {"betas": (beta1, beta2), "eps": eps}

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        defaults = {"lr": self.rate(0), "weight_decay": self.weight_decay, **self.settings}
        return _AdamWeightDecay(parameters, defaults)


class _AdamWeightDecay(torch.optim.Optimizer):
    is_elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


class _Adam(torch.optim.Adam):
    """MindSpore adds eps to the root of the second moment before it is corrected, torch after: eps / sqrt(1 - beta2^t)
    is to torch's what eps is to MindSpore's."""

    is_elementwise = True

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._eps: float = settings["eps"]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            steps = [float(self.state[p]["step"]) for p in group["params"] if "step" in self.state.get(p, {})]
            group["eps"] = self._eps / math.sqrt(1 - group["betas"][1] ** (max(steps, default=0.0) + 1))
        return super().step(closure)
