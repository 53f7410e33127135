"""A quantum model whose state is sharded over ranks, as a layer of a network."""

from __future__ import annotations

from typing import Any

from torch import nn

from unisono.compat.language import say
from unisono.compat.vqnet.distributed.joining import joined_if_many
from unisono.compat.vqnet.distributed.qmachine import ADJOINT, DistributeQMachine
from unisono.compat.vqnet.nn.module import Module
from unisono.compat.vqnet.tensor.qtensor import wrapped
from unisono.errors import UsageError

__all__ = ["DistQuantumLayerAdjoint", "DistributeQMachine"]


class DistQuantumLayerAdjoint(Module):
    """The module that is given, with gradients by the adjoint method, of its parameters and of its inputs.

    Every rank calls it with the same batch and gets the full output and the full gradients. All ranks start from
    rank 0's parameters.
    """

    def __init__(self, vqc_module: nn.Module, name: str = "") -> None:
        super().__init__(name)
        if not isinstance(vqc_module, nn.Module):
            raise UsageError(
                say(
                    f"DistQuantumLayerAdjoint of a {type(vqc_module).__name__}: expected a Module",
                    f"DistQuantumLayerAdjoint({type(vqc_module).__name__})：应为 Module",
                )
            )
        machines = [each for each in vqc_module.modules() if isinstance(each, DistributeQMachine)]
        if not machines:
            raise UsageError(
                say(
                    f"DistQuantumLayerAdjoint: {type(vqc_module).__name__} has no DistributeQMachine; set one "
                    "in __init__",
                    f"DistQuantumLayerAdjoint：{type(vqc_module).__name__} 没有 DistributeQMachine；请在 "
                    "__init__ 中设置",
                )
            )
        for machine in machines:
            if machine.grad_mode != ADJOINT:
                raise UsageError(
                    say(
                        f"DistQuantumLayerAdjoint: grad_mode={machine.grad_mode!r}; expected "
                        f"DistributeQMachine(..., grad_mode={ADJOINT!r})",
                        f"DistQuantumLayerAdjoint：grad_mode={machine.grad_mode!r}；应为 "
                        f"DistributeQMachine(..., grad_mode={ADJOINT!r})",
                    )
                )
        self.vqc_module = vqc_module
        comm = joined_if_many()
        if comm is not None and comm.size > 1:
            comm.broadcast_parameters(vqc_module)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped(self.vqc_module(x, *args, **kwargs))
