"""From marks to placements on a mesh, one an axis.

A strategy gives the number of shards along each dim of a tensor: (2, 4). On a mesh, axes whose lengths
multiply to that number shard the dim. Where axes are alike there is a choice, and it must suit all tensors of an op
together: on each axis one of the op's options must have them so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch import fx
from torch.distributed.tensor import Shard

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace
from unisono.graph.marks.spec import Mark, PlacementSpec
from unisono.graph.placement.assignment import producers
from unisono.graph.rules.option import REPLICATE, Option
from unisono.graph.rules.registry import options, target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Placements, checked

Slot = tuple[str, bool, int]  # node, is it an input, its number


def placements_of_marks(trace: Trace, mesh: Mesh, marks: Sequence[Mark]) -> dict[Slot, Placements]:
    """The placements that marked inputs and outputs of nodes must have. UsageError where a mark cannot be satisfied."""
    fixed: dict[Slot, Placements] = {}
    for _, group in itertools.groupby(sorted(marks, key=lambda mark: mark.op), key=lambda mark: mark.op):
        together = list(group)
        listed = [together] if together[0].op >= 0 else [[mark] for mark in together]
        for some in listed:
            _join(fixed, some, _settled(trace, mesh, some))
    return fixed


def batch_marks(trace: Trace, mesh: Mesh, axis: str) -> list[Mark]:
    """Marks that shard the batch: the first dim of inputs and targets, along one axis of the mesh."""
    placements = tuple(Shard(0) if name == axis else REPLICATE for name in mesh.names)
    names = [name for name in (*trace.inputs, *trace.targets) if trace.specs[name][0].shape]
    return [Mark(name, 0, PlacementSpec(mesh, placements, line=f"batch along {axis}")) for name in names]


def _join(fixed: dict[Slot, Placements], marks: Sequence[Mark], placements: Sequence[Placements]) -> None:
    for mark, wanted in zip(marks, placements, strict=True):
        slot = (mark.node, mark.is_input, mark.number)
        if fixed.setdefault(slot, wanted) != wanted:
            raise UsageError(
                f"{_name(mark)} is marked twice: {fixed[slot]} and {mark.placement_spec}; remove one of the marks"
            )


def _settled(trace: Trace, mesh: Mesh, marks: Sequence[Mark]) -> list[Placements]:
    """The first placements of the marked tensors of one call for which every op has options."""
    candidates = [list(_candidates(trace, mesh, mark)) for mark in marks]
    for chosen in itertools.product(*candidates):
        if all(_has_options(trace, mesh, name, marks, chosen) for name in dict.fromkeys(mark.node for mark in marks)):
            return list(chosen)
    shown = "; ".join(f"{_name(mark)}: {mark.placement_spec}" for mark in marks)
    node = trace.node(marks[0].node)
    raise UsageError(
        f"the marks {shown} cannot be satisfied on {mesh}: {target_name(node.target)} cannot be sharded so. "
        f"On one axis it takes {_shown(options(node))}"
    )


def _candidates(trace: Trace, mesh: Mesh, mark: Mark) -> Iterator[Placements]:
    shape = _shape(trace, mark)
    placement_spec = mark.placement_spec
    if placement_spec.shard_counts is not None:
        yield from _by_shard_counts(mark, placement_spec.shard_counts, shape, mesh)
        return
    assert placement_spec.placements is not None
    assert placement_spec.mesh is not None
    placements = checked(placement_spec.placements, placement_spec.mesh, len(shape))
    yield on_mesh(placement_spec, placements, mesh)


def on_mesh(placement_spec: PlacementSpec, placements: Placements, mesh: Mesh) -> Placements:
    """Placements on the mark's mesh as placements on `mesh`, which must have the same axes, and may have more."""
    own = placement_spec.mesh
    assert own is not None
    for name, size in zip(own.names, own.shape, strict=True):
        if name not in mesh.names or mesh.size(name) != size:
            raise UsageError(
                f"a mark is for {own} ({placement_spec.line}), but the program is for {mesh}; use one mesh for both"
            )
    by_name = dict(zip(own.names, placements, strict=True))
    return tuple(by_name.get(name, REPLICATE) for name in mesh.names)


def _by_shard_counts(
    mark: Mark, shard_counts: tuple[int, ...], shape: tuple[int, ...], mesh: Mesh
) -> Iterator[Placements]:
    if len(shard_counts) != len(shape):
        raise UsageError(
            f"{_name(mark)} has shape {shape}, but {mark.placement_spec} has {len(shard_counts)} numbers; "
            "expected one a dim"
        )
    if mesh.size() % math.prod(shard_counts):
        raise UsageError(
            f"{_name(mark)}: {mark.placement_spec} makes {math.prod(shard_counts)} shards, which do not divide "
            f"the {mesh.size()} ranks of {mesh}"
        )
    found = False
    for dims in itertools.product([None, *range(len(shape))], repeat=mesh.ndim):
        counts = [1] * len(shape)
        for axis, dim in enumerate(dims):
            if dim is not None:
                counts[dim] *= mesh.shape[axis]
        idle = any(dim is not None and mesh.shape[axis] == 1 for axis, dim in enumerate(dims))
        if tuple(counts) == shard_counts and not idle:
            found = True
            yield tuple(REPLICATE if dim is None else Shard(dim) for dim in dims)
    if not found:
        raise UsageError(
            f"{_name(mark)}: {mark.placement_spec} on {mesh}: no axes multiply to its numbers; "
            f"expected products of {', '.join(map(str, mesh.shape))}"
        )


def _shape(trace: Trace, mark: Mark) -> tuple[int, ...]:
    name, number = (mark.node, mark.number)
    if mark.is_input:
        name, number = producers(trace.node(mark.node))[mark.number]
    return trace.specs[name][number].shape


def _has_options(trace: Trace, mesh: Mesh, name: str, marks: Sequence[Mark], chosen: Sequence[Placements]) -> bool:
    listed = options(trace.node(name))
    mine = [(mark, placements) for mark, placements in zip(marks, chosen, strict=True) if mark.node == name]
    return all(
        any(all(_agrees(option, mark, placements[axis]) for mark, placements in mine) for option in listed)
        for axis in range(mesh.ndim)
    )


def _agrees(option: Option, mark: Mark, placement: Placement) -> bool:
    return (option.inputs if mark.is_input else option.outputs)[mark.number] == placement


def unkept(trace: Trace, node: fx.Node, mesh: Mesh, marked: Sequence[Placements]) -> UsageError:
    """Marks that an op could keep, if its tensors had other sizes."""
    shapes = [trace.specs[source][output].shape for source, output in producers(node)]
    shapes += [spec.shape for spec in trace.specs[node.name]] if node.op != "output" else []
    held = {**trace.parameters, **trace.buffers}.get(node.name, node.name)
    lines = sorted(
        {mark.placement_spec.line for mark in trace.marks if mark.node == node.name and mark.placement_spec.line}
    )
    where = f" (marked at {', '.join(lines)})" if lines else ""
    texts = ", ".join(_words(placements) for placements in marked)
    return UsageError(
        f"{held}{where} cannot be placed as {texts} on {mesh}: ranks share dims evenly, and its sizes are "
        f"{', '.join(map(str, shapes))}; mark another dim, or use a mesh whose axes divide them"
    )


def _words(placements: Placements) -> str:
    return f"[{', '.join(map(_word, placements))}]"


def _word(placement: Placement) -> str:
    return {"Replicate": "R", "Partial": "P"}.get(type(placement).__name__, f"S{getattr(placement, 'dim', '')}")


def _name(mark: Mark) -> str:
    return f"{'input' if mark.is_input else 'output'} {mark.number} of {mark.node}"


def _shown(listed: Sequence[Option]) -> str:
    texts = [f"{','.join(map(_word, option.inputs))}->{','.join(map(_word, option.outputs))}" for option in listed[:12]]
    return "  ".join(texts)
