"""Weights of a float32 model that ZeRO keeps in a half dtype in the model: code that would take them for float32.

The optimizer has their float32 values, each rank those of its shard. A forward under autocast rounds such a weight
anyway, so training is exact. Outside of it the model would be another than on one device: `model.state_dict()` and a
copy of the model (an exponential moving average) would have rounded weights, and layers that are called outside
torch.autocast would multiply by them, or fail. These are refused. The trial of the model on a few samples, which runs
without autocast, has them in float32 (`widened`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError
from unisono.parallel.float8 import Float8Linear
from unisono.parallel.full_state import Refusal
from unisono.parallel.precision import HALF_DTYPES, model_dtype

_MOST_WIDENED = 2**28  # elements, which take 1 GiB in float32


def refuse_float32_uses(model: nn.Module, rounded: Collection[str], plan: str) -> None:
    """rounded: names of the parameters that are in a half dtype."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if name in rounded}
    for parameter in model.parameters():
        if id(parameter) in names:
            refusal = Refusal(
                f"plan {plan}: a copy of the model would have {names[id(parameter)]} in {_half(parameter)}, the dtype "
                f"in which ZeRO gathers it; {_advice(parameter)}"
            )
            parameter.__deepcopy__ = refusal  # type: ignore[method-assign]
    for path, module in model.named_modules():
        owned = [each for each in module._parameters.values() if id(each) in names]
        if owned:
            assert owned[0] is not None
            name, half, advice = names[id(owned[0])], _half(owned[0]), _advice(owned[0])
            module.register_state_dict_pre_hook(
                Refusal(
                    f"plan {plan}: model.state_dict() would have {name} in {half}, the dtype in which ZeRO gathers it; "
                    f'use trainer.state_dict()["model"], which every rank calls, or {advice.removeprefix("use ")}'
                )
            )
            if not isinstance(module, Float8Linear):  # which rounds its operands itself
                called = f"{path or 'the model'} ({type(module).__name__})"
                module.register_forward_pre_hook(
                    _require_autocast(
                        f"plan {plan}: {called} was called outside torch.autocast, but ZeRO gathers its weight in "
                        f"{half}; {advice}"
                    )
                )


@contextlib.contextmanager
def widened(model: nn.Module) -> Iterator[bool]:
    """In the block, the model has its rounded weights in float32, to be tried outside autocast; False where they are
    too large for that."""
    rounded = [each for each in model.parameters() if model_dtype(each) != each.dtype]
    if sum(each.numel() for each in rounded) > _MOST_WIDENED:
        yield False
        return
    kept = [each.data for each in rounded]
    for each in rounded:
        each.data = each.data.to(model_dtype(each))
    try:
        yield True
    finally:
        for each, data in zip(rounded, kept, strict=True):
            each.data = data


def _require_autocast(message: str) -> Any:
    def before(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for each in module._parameters.values():
            if each is not None and each.dtype in HALF_DTYPES and not torch.is_autocast_enabled(each.device.type):
                raise UsageError(message)

    return before


def _half(parameter: nn.Parameter) -> str:
    return "bf16" if parameter.dtype == torch.bfloat16 else "fp16"


def _advice(parameter: nn.Parameter) -> str:
    return f'use precision="{_half(parameter)},gather=fp32"'
