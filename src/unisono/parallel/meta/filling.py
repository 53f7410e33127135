"""Filling: what a plan leaves this rank of a meta model gets its memory and its values.

The model was built and sharded without memory (mesh/deferred_init/deferred_model.py); its tensors have kept their
names, and their layouts give which shard of the full tensor this rank holds. Each is made in full, sharded and freed
before the next one: beside what the rank owns, no more than one full tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from unisono.mesh.deferred_init.deferred_model import (
    DeferredModel,
    forget_source,
    refer_strongly,
    refer_weakly,
    source_of,
    tensors_in,
)
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import layout_of, local_of
from unisono.parallel.meta.shells import MaterializedShells
from unisono.parallel.pipeline.message import is_placeholder


class Filling:
    """The values of a deferred-init model, as sharded on this rank."""

    def __init__(self, deferred: DeferredModel, mesh: Mesh) -> None:
        self._deferred = deferred
        self._mesh = mesh
        self._shells: dict[str, nn.Parameter] = {}  # whose values come later

    def fill(self, model: nn.Module, later: Callable[[nn.Parameter], bool] = lambda parameter: False) -> None:
        """Give values to all tensors of the model; tensors keep their identity, and what is written on them.

        Parameters that come `later` get a device, and the memory of a single number; `fill_one` is called for them.
        """
        refer_strongly(model)
        done: set[int] = set()
        for name, tensor in list(tensors_in(model)):
            if not tensor.is_meta or id(tensor) in done or _stands_in(tensor):
                continue
            done.add(id(tensor))
            if isinstance(tensor, nn.Parameter) and later(tensor):
                shell = torch.zeros((), dtype=tensor.dtype, device=self._deferred.device(name))
                _become(tensor, shell.expand(tensor.shape))
                self._shells[name] = tensor
            else:
                _become(tensor, self._shard(name, tensor))
        refer_weakly(model)

    @torch.no_grad()
    def fill_one(self, name: str, parameter: nn.Parameter) -> None:
        """The values of a parameter that was left for later."""
        if is_placeholder(parameter) or parameter.numel() == 1:
            parameter.data = self._shard(name, parameter)

    def materialized(self, what: str) -> MaterializedShells:
        """In the block, parameters that are left for later have their values for whoever reads them."""
        return MaterializedShells(self._shells, self._shard, what)

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = self._deferred.value(name)
        layout = layout_of(tensor)
        shard = local_of(value, layout, self._mesh) if layout.splits else value
        assert shard.shape == tensor.shape, f"{name} is {tuple(shard.shape)} here, where {tuple(tensor.shape)} is due"
        return shard


def _stands_in(tensor: torch.Tensor) -> bool:
    """Whether it is there for its shape only, instead of a parameter of another stage."""
    return is_placeholder(tensor) and source_of(tensor) is None


@torch.no_grad()
def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    forget_source(tensor)
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)
