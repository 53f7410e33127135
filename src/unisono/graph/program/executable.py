"""A form of a program: one traced graph (to train, evaluate or predict, for one shape of batch), ready to run here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.errors import UsageError
from unisono.graph.capture.source import line_of
from unisono.graph.program.binding import bind
from unisono.graph.program.codegen import generate
from unisono.graph.program.gradient_sums import GradientSums
from unisono.graph.program.lowering import Lowered, ShardedSpec
from unisono.graph.program.shards import ProgramShards
from unisono.graph.program.zero import GatherInBackward
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import local_box
from unisono.mesh.random.state import RandomState
from unisono.torch_compat import FakeTensor

Slicer = Callable[[torch.Tensor], torch.Tensor]


class Executable:
    """Runs a lowered graph on this rank's shards. Every rank of the mesh makes the same forms in the same order."""

    def __init__(
        self,
        lowered: Lowered,
        shards: ProgramShards,
        random: RandomState,
        device: torch.device,
        again: GatherInBackward | None = None,
    ) -> None:
        """again: gathers parameters again in the backward."""
        self.lowered = lowered
        trace = lowered.trace
        callees = bind(lowered, random)
        if again is not None:
            for each in lowered.moves:
                if each.source in trace.parameters:
                    callees[each.name] = again.watched(each, callees[each.name])  # type: ignore[arg-type]
        self._run, self.source = generate(lowered, callees, device)
        held = [name for name in lowered.given if name not in fed(lowered)]
        self._held = [_held(name, lowered, shards, device) for name in held]
        self._parts = [(i, *_part(name, lowered, shards)) for i, name in enumerate(held) if name in trace.packed_slices]
        self._slicers = [_sharded(lowered.given[name], lowered.mesh, device) for name in fed(lowered)]
        self._changed = [shards.buffers[trace.buffers[name]] for name in lowered.changed]
        self.sums = GradientSums(
            {trace.parameters[name]: axes for name, axes in lowered.summed.items()}, shards.parameters, lowered.mesh
        )

    def __call__(self, leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Outputs, and the values that buffers take: for the tensors of a global batch, of which it takes its part."""
        inputs = [shard(leaf) for shard, leaf in zip(self._slicers, leaves, strict=True)]
        held = self._held
        if self._parts:
            held = held[:]
            for i, dim, start, length in self._parts:
                held[i] = held[i].narrow(dim, start, length)
        made = self._run(*held, *inputs)
        count = len(self.lowered.outputs)
        return made[:count], made[count:]

    @torch.no_grad()
    def keep(self, values: Sequence[torch.Tensor]) -> None:
        """Let buffers take their new values; after the backward, which may still read the old ones."""
        for buffer, value in zip(self._changed, values, strict=True):
            buffer.copy_(value)


def _part(name: str, lowered: Lowered, shards: ProgramShards) -> tuple[int, int, int]:
    """Where in the local tensor of an unpacked parameter one of its parts is: dim, start and length."""
    packed = lowered.trace.packed_slices[name]
    held = shards.specs[packed.parameter]
    lengths = held.lengths(lowered.mesh)
    full = [part.shape[held.dim] for part in held.parts]
    number = next(k for k in range(len(full)) if sum(full[:k]) == packed.start)
    return held.dim, sum(lengths[:number]), lengths[number]


def fed(lowered: Lowered) -> list[str]:
    """What a batch brings."""
    return [*lowered.trace.inputs, *lowered.trace.targets]


def _held(name: str, lowered: Lowered, shards: ProgramShards, device: torch.device) -> torch.Tensor:
    trace = lowered.trace
    if name in trace.parameters:
        return shards.parameters[trace.parameters[name]]
    if name in trace.buffers:
        return shards.buffers[trace.buffers[name]]
    constant = trace.constants[name]
    users = list(trace.node(name).users)
    if isinstance(constant, FakeTensor) and users:
        line = line_of(users[0])
        raise UsageError(
            f"at {line} the model uses the .data of one of its tensors, which a graph takes for a constant; use "
            ".detach() instead"
        )
    return _sharded(lowered.given[name], lowered.mesh, device)(constant) if users else torch.empty(0)


def _sharded(spec: ShardedSpec, mesh: Mesh, device: torch.device) -> Slicer:
    sizes, offsets = local_box(spec.shape, mesh, spec.placements)
    if sizes == spec.shape:
        return lambda full: full.to(device)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    return lambda full: full[part].to(device).contiguous()
