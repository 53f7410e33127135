"""A form of a program: one traced graph (to train, evaluate or predict, for one shape of batch), ready to run here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.graph.binding import bind
from unisono.graph.code import generate
from unisono.graph.lowering import Laid, Lowered
from unisono.graph.pieces import Pieces
from unisono.graph.sums import Sums
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import local_box
from unisono.mesh.random import RandomState

Cut = Callable[[torch.Tensor], torch.Tensor]


class Form:
    """Runs a lowered graph on this rank's pieces. Every rank of the mesh makes the same forms in the same order."""

    def __init__(self, lowered: Lowered, pieces: Pieces, random: RandomState, device: torch.device) -> None:
        self.lowered = lowered
        trace = lowered.trace
        self._run, self.source = generate(lowered, bind(lowered, random), device)
        self._held = [_held(name, lowered, pieces, device) for name in lowered.given if name not in fed(lowered)]
        self._cuts = [_cut(lowered.given[name], lowered.mesh, device) for name in fed(lowered)]
        self._changed = [pieces.buffers[trace.buffers[name]] for name in lowered.changed]
        self.sums = Sums(
            ((pieces.parameters[trace.parameters[name]], axes) for name, axes in lowered.summed.items()), lowered.mesh
        )

    def __call__(self, leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Outputs, and the values that buffers take: for the tensors of a global batch, of which it takes its part."""
        pieces = [cut(leaf) for cut, leaf in zip(self._cuts, leaves, strict=True)]
        made = self._run(*self._held, *pieces)
        count = len(self.lowered.outputs)
        return made[:count], made[count:]

    @torch.no_grad()
    def keep(self, values: Sequence[torch.Tensor]) -> None:
        """Let buffers take their new values; after the backward, which may still read the old ones."""
        for buffer, value in zip(self._changed, values, strict=True):
            buffer.copy_(value)


def fed(lowered: Lowered) -> list[str]:
    """What a batch brings."""
    return [*lowered.trace.inputs, *lowered.trace.targets]


def _held(name: str, lowered: Lowered, pieces: Pieces, device: torch.device) -> torch.Tensor:
    trace = lowered.trace
    if name in trace.parameters:
        return pieces.parameters[trace.parameters[name]]
    if name in trace.buffers:
        return pieces.buffers[trace.buffers[name]]
    return _cut(lowered.given[name], lowered.mesh, device)(trace.constants[name])


def _cut(laid: Laid, mesh: Mesh, device: torch.device) -> Cut:
    sizes, offsets = local_box(laid.shape, mesh, laid.placements)
    if sizes == laid.shape:
        return lambda whole: whole.to(device)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return lambda whole: whole[part].to(device).contiguous()
