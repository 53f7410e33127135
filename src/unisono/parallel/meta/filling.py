"""Filling: what a plan leaves this rank of a hollow model gets its memory and its values.

The model was drafted (mesh/draft.py) and cut without memory; its tensors have kept their names, and their layouts tell
which piece of the whole this rank holds. Each is made whole, cut and let go before the next one: beside what the rank
owns, no more than one whole tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from unisono.mesh.draft import Draft, forget_source, refer_strongly, refer_weakly, source_of, tensors_in
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import layout_of, local_of
from unisono.parallel.meta.shells import Lent
from unisono.parallel.pipeline.message import is_hollow


class Filling:
    """The values of a draft, as they lie on this rank."""

    def __init__(self, draft: Draft, mesh: Mesh) -> None:
        self._draft = draft
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
                shell = torch.zeros((), dtype=tensor.dtype, device=self._draft.device(name))
                _become(tensor, shell.expand(tensor.shape))
                self._shells[name] = tensor
            else:
                _become(tensor, self._piece(name, tensor))
        refer_weakly(model)

    @torch.no_grad()
    def fill_one(self, name: str, parameter: nn.Parameter) -> None:
        """The values of a parameter that was left for later."""
        if is_hollow(parameter) or parameter.numel() == 1:
            parameter.data = self._piece(name, parameter)

    def lent(self, what: str) -> Lent:
        """In the block, parameters that are left for later have their values for whoever reads them."""
        return Lent(self._shells, self._piece, what)

    def _piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        value = self._draft.value(name)
        layout = layout_of(tensor)
        piece = local_of(value, layout, self._mesh) if layout.splits else value
        assert piece.shape == tensor.shape, f"{name} is {tuple(piece.shape)} here, where {tuple(tensor.shape)} is due"
        return piece


def _stands_in(tensor: torch.Tensor) -> bool:
    """Whether it is there for its shape only, in the place of a parameter of another stage."""
    return is_hollow(tensor) and source_of(tensor) is None


@torch.no_grad()
def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    forget_source(tensor)
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(made).update(vars(tensor))
    torch.utils.swap_tensors(tensor, made)
