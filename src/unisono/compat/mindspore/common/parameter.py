"""Parameter: torch's, with the name that MindSpore gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unisono.compat.mindspore.common.tensor import plain


class Parameter(nn.Parameter):
    """`Parameter(default_input, name)`; without a name it is called as the attribute that it becomes."""

    @staticmethod
    def __new__(
        cls: type[Parameter],
        default_input: Any,
        name: str | None = None,
        requires_grad: bool = True,
        layerwise_parallel: bool = False,
        parallel_optimizer: bool = True,
    ) -> Parameter:
        values = default_input if isinstance(default_input, torch.Tensor) else torch.as_tensor(default_input)
        made = torch.Tensor._make_subclass(cls, plain(values).detach().clone(), requires_grad)
        made._given_name = name
        return made

    _given_name: str | None

    @property
    def name(self) -> str | None:
        return getattr(self, "_given_name", None)

    @name.setter
    def name(self, given: str | None) -> None:
        self._given_name = given

    def asnumpy(self) -> Any:
        return self.detach().cpu().numpy()

    def set_data(self, data: torch.Tensor) -> Parameter:
        with torch.no_grad():
            self.copy_(data)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        twin = memo[id(self)] = Parameter(self.data, self.name, self.requires_grad)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Parameter, (self.data.as_subclass(torch.Tensor), self.name, self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter (name={self.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # what is computed from one is torch's own tensor


class ParameterTuple(tuple[Parameter, ...]):
    """Parameters together."""
