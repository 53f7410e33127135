"""How many heads of keys each attention of a model is given, as it runs.

Models may repeat heads of keys while they are traced, so that each query has its own, and leave that to attention when
they run. What ranks send of keys and values is what attention is given then: so the model is run once on real inputs,
without numbers of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.even_experts import evenly_visited
from unisono.parallel.hollow import hollow_copy
from unisono.parallel.pipeline.inputs import call
from unisono.parallel.pipeline.rehearsal import device_of
from unisono.parallel.pipeline.shadow import Shadow
from unisono.parallel.shapes import KnownShapes


def key_heads(model: nn.Module, inputs: Any) -> list[int]:
    """In the order of their calls; none where the model cannot run hollow."""
    seen: list[int] = []
    with contextlib.suppress(Exception), no_side_effects(model), torch.no_grad(), KnownShapes():
        whole = hollow_copy(model)
        with Shadow(device_of(inputs)), evenly_visited(whole), _Watch(seen):
            call(whole, inputs)
        return seen
    return []


class _Watch(TorchFunctionMode):
    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self._seen.append((args[1] if len(args) > 1 else kwargs["key"]).shape[-3])
        return function(*args, **kwargs)
