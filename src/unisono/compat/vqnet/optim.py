"""VQNet's optimizers: torch's, with VQNet's arguments and defaults."""

from __future__ import annotations

from typing import Any

import torch

from unisono.compat.vqnet.vqnet_names import missing_names


class SGD(torch.optim.SGD):
    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0, nesterov: bool = False) -> None:
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov)


class Adam(torch.optim.Adam):
    is_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=(beta1, beta2), eps=epsilon, amsgrad=amsgrad)


class Adamax(torch.optim.Adamax):
    is_elementwise = True

    def __init__(
        self, params: Any, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, betas=(beta1, beta2), eps=epsilon)


class Adagrad(torch.optim.Adagrad):
    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.01, epsilon: float = 1e-8) -> None:
        super().__init__(params, lr=lr, eps=epsilon)


class Adadelta(torch.optim.Adadelta):
    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__(params, lr=lr, rho=beta, eps=epsilon)


class RMSProp(torch.optim.RMSprop):
    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.99, epsilon: float = 1e-8) -> None:
        super().__init__(params, lr=lr, alpha=beta, eps=epsilon)


class AdamW(torch.optim.AdamW):
    is_elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=(beta1, beta2), eps=epsilon, weight_decay=weight_decay, amsgrad=amsgrad)


__getattr__ = missing_names(__name__)
