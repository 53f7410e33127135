"""Parameter groups that must not depend on the stage: optimizer(parameters) sees a stage's parameters in a pipeline.

One that puts parameters into groups by what they are gives each the same options as on one device. One that goes by
their index in the list, or by how many there are, does not: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.named_groups import NamedParameters


def require_same_groups(
    optimizer: Optimizer,
    held: Iterable[tuple[str, torch.Tensor]],
    make: Callable[[Any], Optimizer],
    full: Mapping[str, torch.Tensor],
) -> None:
    """UsageError where the optimizer gives a parameter it holds other options than it has in the full model."""
    meta = {name: _meta(tensor) for name, tensor in full.items()}
    try:
        expected = _options(make(NamedParameters(meta.values(), meta)))
    except Exception:  # one that needs numbers: nothing is shown
        return
    mine = _options(optimizer)
    for name, tensor in held:
        if name not in meta or id(tensor) not in mine or id(meta[name]) not in expected:
            continue
        theirs = expected[id(meta[name])]
        for option, value in mine[id(tensor)].items():
            if option in theirs and _differs(value, theirs[option]):
                raise UsageError(
                    f"optimizer(parameters) gives {name} {option}={value} among the parameters of its stage, and "
                    f"{option}={theirs[option]} among all of the model's; expected groups that go by what a parameter "
                    "is (its shape, or its dims), and not by its index in the list: or use pp=1"
                )


def _meta(tensor: torch.Tensor) -> nn.Parameter:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad)


def _options(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    return {
        id(parameter): {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _differs(mine: Any, theirs: Any) -> bool:
    plain = (bool, int, float, str, tuple)
    return isinstance(mine, plain) and isinstance(theirs, plain) and mine != theirs
