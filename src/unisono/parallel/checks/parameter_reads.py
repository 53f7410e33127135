"""Parameters that are read beyond the module that owns them: by another module, or by the loss.

Under tp, ep and ZeRO 3 a rank holds a shard of a parameter. The layer that owns it knows; any other code that reads it
(a weight regulariser, `F.linear(x, self.embedding.weight)`, a penalty on `layer.weight.norm()`) would take the shard
for the full parameter, often in shapes that fit. Ranks of a pipeline hold the parameters of their stages only, so that
a loss that reads parameters would miss the others. Where ZeRO gathers weights in a half dtype, code that computes in
float32 from them (a penalty on a weight's norm) would take rounded values. So the first forward in training mode, the
first in evaluation mode, and the losses computed in them are watched, and such a read is refused. A read that begins
later, such as a penalty from some step on, is not noticed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unisono.errors import UsageError
from unisono.mesh.interception import function_arguments
from unisono.parallel.checks.value_reads import is_ours
from unisono.parallel.layout import layout_of
from unisono.parallel.precision import PRODUCTS
from unisono.parallel.zero.units import Unit, Units
from unisono.torch_compat import no_torch_function_subclass

READ_BY_PARENT = "unisono_read_by_parent"  # on shards that their module's parent reads as well, as was tried
BORROWS = "unisono_borrows"  # on modules that hold a parameter of a sharded layer, and do not know that it is a shard

_SAME_OF_A_SHARD = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse",
        "itemsize", "layout", "ndim", "requires_grad", "_version",
    )
} | {
    torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_complex, torch.Tensor.is_floating_point,
    torch.Tensor.requires_grad_, torch.is_complex, torch.is_floating_point,
}  # fmt: skip
_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class ParameterReads(TorchFunctionMode):
    """In the block, UsageError where a parameter is read by code that takes this rank's part of it for all of it."""

    def __init__(
        self,
        model: nn.Module,
        plan: str,
        units: Units | None,
        *,
        is_pipeline: bool,
        rounded: Collection[str] = (),
    ) -> None:
        """rounded: the parameters, by name, that the model has in a half dtype for matrix products."""
        super().__init__()
        self._plan, self._is_pipeline, self._model = plan, is_pipeline, model
        self.shown: set[bool] = set()  # the modes, by model.training, in which the model has run without such reads
        self._modules = set(model.modules())
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._owners: dict[int, list[nn.Module]] = {}
        parents = {child: parent for parent in model.modules() for child in parent.children()}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None and {"tp", "ep"} & set(layout_of(parameter).axes):
                    self._owners.setdefault(id(parameter), []).append(module)
                    if getattr(parameter, READ_BY_PARENT, False) and module in parents:
                        self._owners[id(parameter)].append(parents[module])
        self._rounded = {id(parameter): name for name, parameter in model.named_parameters() if name in rounded}
        self._units: dict[int, Unit] = {}
        if units is not None and not is_pipeline:
            self._units = {id(parameter): unit for unit in units for _, parameter in unit.named}

        self._functions: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> ParameterReads:
        self._functions.append(function_arguments(self._argument))
        self._functions[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._functions.pop().__exit__(*failure)

    def _argument(self, given: Any) -> Any:
        """Of an autograd function, such as a kernel that does the work of several layers at once."""
        if isinstance(given, nn.Parameter):
            self._require_owned(given)
            if id(given) in self._rounded and not is_ours():
                self._refuse_rounded(given)
        return given

    @property
    def is_needed(self) -> bool:
        return bool(self._owners or self._units or self._rounded) or self._is_pipeline

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _SAME_OF_A_SHARD:
            for parameter in _parameters((*args, *(kwargs or {}).values())):
                self._require_owned(parameter)
            if function in _DERIVATIVES and self._units and not is_ours():
                raise UsageError(
                    f"plan {self._plan}: {_caller(self._model)} computes gradients during the forward, when ZeRO 3 has "
                    "freed parameters that they need; use zero=2 or less"
                )
        outcome = function(*args, **kwargs or {})
        if self._rounded and getattr(function, "__name__", "") not in PRODUCTS:
            self._require_no_numbers((*args, *(kwargs or {}).values()), outcome)
        return outcome

    def _require_no_numbers(self, given: Any, outcome: Any) -> None:
        """Of a function other than a product: it may only give views of rounded parameters."""
        with no_torch_function_subclass():
            sources = [leaf._base if leaf._base is not None else leaf for leaf in _tensors(given)]
            rounded = [source for source in sources if id(source) in self._rounded]
            if not rounded or is_ours():
                return
            memory = {each.untyped_storage()._cdata for each in rounded}
            for made in _tensors((outcome,)):
                if made.is_floating_point() and made.untyped_storage()._cdata not in memory:
                    self._refuse_rounded(rounded[0])

    def _refuse_rounded(self, parameter: torch.Tensor) -> None:
        half = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
        raise UsageError(
            f"plan {self._plan}: {_caller(self._model)} reads {self._rounded[id(parameter)]} other than in a matrix "
            f"product or convolution, but ZeRO gathers it in {half}; use "
            f'precision="{half},gather=fp32", or a plan without zero'
        )

    def _require_owned(self, parameter: nn.Parameter) -> None:
        name = self._names.get(id(parameter))
        if name is None or is_ours():
            return
        owners = self._owners.get(id(parameter))
        unit = self._units.get(id(parameter))
        if owners is not None and not any(module in owners and not _borrows(module) for module in _running()):
            reason = "of which each rank holds a shard"
            keep = f'keep it full with the rule {{"{_layer(name)}": "replicate"}}, or use a plan without tp and ep'
        elif unit is not None and not unit.is_full:
            reason = "which ZeRO 3 gathers for its own module only"
            keep = "use zero=2 or less"
        elif self._is_pipeline and not any(module in self._modules for module in _running()):
            reason = "but ranks of a pipeline hold the parameters of their stages only"
            keep = "use pp=1"
        else:
            return
        raise UsageError(f"plan {self._plan}: {_caller(self._model)} reads {name}, {reason}; {keep}")


def _parameters(values: Any) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, tuple | list):
            yield from _parameters(value)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _running() -> Iterator[nn.Module]:
    """The modules whose methods are on the stack, from the innermost."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back  # type: ignore[assignment]


def _borrows(module: nn.Module) -> bool:
    return getattr(module, BORROWS, False)


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or "the model"


def _caller(model: nn.Module) -> str:
    """The innermost module that runs, by name and class; the loss, where none does."""
    module = next(_running(), None)
    if module is None:
        return "the loss"
    name = next((name for name, each in model.named_modules() if each is module), "")
    return f"{name} ({type(module).__name__})" if name else type(module).__name__
