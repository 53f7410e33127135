"""An account of a program: what one rank does, op by op, in words and numbers. Pictures and texts are made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from unisono.graph.program.lowering import Compute, Lowered, Redistribute, ShardedSpec, used_by
from unisono.graph.render.inside_ops import InnerCollective, collectives_inside, received
from unisono.graph.rules import target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Placements, fair_shape, shard_dim
from unisono.mesh.route import RouteStep

Shape = tuple[int, ...]
_UNSHOWN = {"device", "pin_memory", "layout"}
SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32"}


@dataclass(frozen=True)
class CollectiveStep:
    """A step of a move, as one rank sees it: a collective, or a slice or the like that needs no other rank."""

    kind: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    received: int  # bytes
    before: Shape  # the local shard
    after: Shape
    detail: str  # what is reduced, gathered or sharded
    is_collective: bool


@dataclass(frozen=True)
class ListedOp:
    """One line of the program. A move has no serial side."""

    name: str
    serial: str  # "relu = relu(matmul)"
    serial_shapes: str  # "f32[16,16] -> f32[16,16]"
    distributed: str
    local_shapes: str
    placements: str
    strategy: str  # "((2,4),(4,1))": shards a dim of each input
    path: str
    source: str  # file.py:42
    local: str = ""  # what runs instead of the op
    note: str = ""  # what a reader should know of the choice
    forward: tuple[CollectiveStep, ...] = ()
    backward: tuple[CollectiveStep, ...] = ()
    uses: tuple[str, ...] = ()  # names of the lines whose values it takes


@dataclass(frozen=True)
class ListedInput:
    """A parameter, buffer or input."""

    name: str
    kind: str
    full: str
    local: str
    placements: str
    strategy: str
    summed: tuple[str, ...] = ()  # axes over which its gradient is summed after the backward
    note: str = ""
    kept: str = ""  # how much of it the optimizer has, or the rank between uses, where ranks share it out


@dataclass
class Listing:
    mesh: Mesh
    rank: int
    given: list[ListedInput] = field(default_factory=list)
    lines: list[ListedOp] = field(default_factory=list)
    sums: list[CollectiveStep] = field(default_factory=list)  # of parameters' gradients, in messages
    updates: list[CollectiveStep] = field(default_factory=list)  # of parameters, after the optimizer
    about: list[str] = field(default_factory=list)  # what is true of all lines
    outputs: list[str] = field(default_factory=list)
    order: str = ""  # of a pipeline's rank: F forward, B backward, I and W its halves, each with stage and microbatch

    @property
    def forward(self) -> list[CollectiveStep]:
        return [collective for line in self.lines for collective in line.forward if collective.is_collective]

    @property
    def backward(self) -> list[CollectiveStep]:
        return [
            collective for line in self.lines for collective in line.backward if collective.is_collective
        ] + self.sums

    def as_json(self) -> dict[str, Any]:
        mesh = dict(zip(self.mesh.names, self.mesh.shape, strict=True))
        return {"mesh": mesh} | {each.name: _plain(getattr(self, each.name)) for each in fields(self)[1:]}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [asdict(each) if isinstance(each, ListedInput | ListedOp | CollectiveStep) else each for each in value]
    return value


def listing_of(lowered: Lowered, rank: int = 0) -> Listing:
    """What `rank` does; it need not be running."""
    made = Listing(lowered.mesh, rank)
    trace = lowered.trace
    kinds = {"parameter": trace.parameters, "buffer": trace.buffers}
    for name, spec in lowered.given.items():
        kind = next((kind for kind, names in kinds.items() if name in names), None)
        kind = kind or ("input" if name in trace.inputs else "target" if name in trace.targets else "constant")
        shown = {**trace.parameters, **trace.buffers}.get(name, name)
        if name in trace.packed_slices:
            shown += f" from {trace.packed_slices[name].start}"
        local = _tensor(spec, spec.local(lowered.mesh, rank))
        made.given.append(
            ListedInput(
                shown,
                kind,
                _tensor(spec, spec.shape),
                local,
                placements_text(spec.placements),
                strategy_text(spec, lowered.mesh),
                lowered.summed.get(name, ()),
                lowered.assignment.notes.get(name, ""),
            )
        )
    operations = {op.name: op for op in trace.ops}
    for instruction in lowered.instructions:
        if isinstance(instruction, Redistribute):
            made.lines.append(_of_move(instruction, lowered.mesh, rank))
        else:
            op = operations[instruction.name]
            made.lines.append(_of_compute(instruction, lowered, rank, op.path, op.line))
    made.lines = [
        replace(line, uses=used_by(each)) for line, each in zip(made.lines, lowered.instructions, strict=True)
    ]
    made.sums = _sums(lowered, rank)
    made.outputs = [name or "None" for name in lowered.outputs]
    return made


def _of_compute(compute: Compute, lowered: Lowered, rank: int, path: str, source: str) -> ListedOp:
    mesh = lowered.mesh
    inputs = [lowered.values[name] for name in compute.inputs if name in lowered.values]
    word = _word(compute.node)
    rewritten = [
        f"{option.local} over {name}"
        for option, name in zip(compute.options, mesh.names, strict=True)
        if option.local is not None
    ]
    forward, backward = (_inside(collectives, mesh, rank) for collectives in collectives_inside(compute, lowered, rank))
    return ListedOp(
        compute.name,
        f"{compute.name} = {word}({_arguments(compute.node)})",
        _shapes(
            [_tensor(spec, spec.shape) for spec in inputs], [_tensor(spec, spec.shape) for spec in compute.outputs]
        ),
        f"{compute.name} = {word}({', '.join(compute.inputs)})",
        _shapes(
            [_tensor(spec, spec.local(mesh, rank)) for spec in inputs],
            [_tensor(spec, spec.local(mesh, rank)) for spec in compute.outputs],
        ),
        _shapes(
            [placements_text(spec.placements) for spec in inputs],
            [placements_text(spec.placements) for spec in compute.outputs],
        ),
        f"({','.join(strategy_text(spec, mesh) for spec in inputs)})",
        path,
        source,
        ", ".join(rewritten),
        lowered.assignment.notes.get(compute.name, ""),
        forward,
        backward,
    )


def _word(node: fx.Node) -> str:
    """The linear of aten.linear.default."""
    words = target_name(node.target).split(".")
    return words[1] if len(words) > 2 else words[0]


def _inside(collectives: Sequence[InnerCollective], mesh: Mesh, rank: int) -> tuple[CollectiveStep, ...]:
    """The collectives inside an op."""
    made = []
    for each in collectives:
        names = tuple(mesh.names[axis] for axis in each.axes)
        ranks = mesh.along(*names, rank=rank)
        bytes_received = received(each, mesh.shape)
        made.append(
            CollectiveStep(
                "all_reduce", names, ranks, bytes_received, each.shape, each.shape, f"{each.op}, inside the op", True
            )
        )
    return tuple(made)


def _arguments(node: fx.Node) -> str:
    """As in the traced graph: tensors by name, numbers as they are; what is there by default is left out."""
    words = [_argument(value) for value in node.args]
    words += [f"{key}={_argument(value)}" for key, value in node.kwargs.items() if key not in _UNSHOWN]
    return ", ".join(words)


def _argument(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value)


def _of_move(move: Redistribute, mesh: Mesh, rank: int) -> ListedOp:
    redistribution = move.redistribution
    before, after = (
        ShardedSpec(redistribution.shape, redistribution.dtype, placements)
        for placements in (redistribution.before, redistribution.after)
    )
    backward: tuple[CollectiveStep, ...] = ()
    if redistribution.gradient_after is not None:
        backward = collectives(
            redistribution.backward_steps(mesh), redistribution.shape, redistribution.gradient_after, mesh, rank
        )
    forward = collectives(redistribution.forward_steps(mesh), redistribution.shape, redistribution.before, mesh, rank)
    words = " + ".join(collective.kind for collective in forward) or "same"
    return ListedOp(
        move.name,
        "",
        "",
        f"{move.name} = {words}({move.source})",
        _shapes([_tensor(before, before.local(mesh, rank))], [_tensor(after, after.local(mesh, rank))]),
        _shapes([placements_text(redistribution.before)], [placements_text(redistribution.after)]),
        "",
        "",
        "",
        forward=forward,
        backward=backward,
    )


def collectives(
    steps: Sequence[RouteStep], shape: Shape, start: Placements, mesh: Mesh, rank: int
) -> tuple[CollectiveStep, ...]:
    """The steps of a route from `start`, seen from a rank."""
    state = list(start)
    coordinate = mesh.coordinate(rank)
    seen = []
    for step in steps:
        longest = tuple(0 if axis in step.axes else index for axis, index in enumerate(coordinate))
        # Shards that are gathered are padded to the longest, which is that of the first.
        before = fair_shape(shape, mesh, state, longest if step.kind == "all_gather" else coordinate)
        for axis in step.axes:
            state[axis] = step.after
        after = fair_shape(shape, mesh, state, coordinate)
        names = tuple(mesh.names[axis] for axis in step.axes)
        ranks = mesh.along(*names, rank=rank)
        seen.append(
            CollectiveStep(
                step.kind, names, ranks, round(step.received), before, after, _detail(step), step.communicates
            )
        )
    return tuple(seen)


def _detail(step: RouteStep) -> str:
    words = []
    if isinstance(step.before, Partial):
        words.append(step.before.reduce_op)
    gathered, sharded = shard_dim(step.before), shard_dim(step.after)
    if gathered is not None:
        words.append(f"gathers dim {gathered}")
    if sharded is not None:
        words.append(f"shards dim {sharded}")
    return ", ".join(words)


def _sums(lowered: Lowered, rank: int) -> list[CollectiveStep]:
    """The gradients of parameters that are summed after the backward: one entry a set of axes."""
    sizes: dict[tuple[str, ...], int] = {}
    counts: dict[tuple[str, ...], int] = {}
    for name, axes in lowered.summed.items():
        spec = lowered.given[name]
        elements = math.prod(spec.local(lowered.mesh, rank))
        sizes[axes] = sizes.get(axes, 0) + elements * spec.dtype.itemsize
        counts[axes] = counts.get(axes, 0) + 1
    made = []
    for axes, size in sizes.items():
        ranks = lowered.mesh.along(*axes, rank=rank)
        received = round(2 * size * (len(ranks) - 1) / len(ranks))
        detail = f"sum, gradients of {counts[axes]} parameter{'s' if counts[axes] > 1 else ''}"
        made.append(CollectiveStep("all_reduce", axes, ranks, received, (size,), (size,), detail, len(ranks) > 1))
    return made


# ---- words -----------------------------------------------------------------------------------------------------------


def strategy(spec: ShardedSpec, mesh: Mesh) -> tuple[int, ...]:
    """The number of shards along each dim."""
    counts = [1] * len(spec.shape)
    for axis, placement in enumerate(spec.placements):
        dim = shard_dim(placement)
        if dim is not None:
            counts[dim] *= mesh.shape[axis]
    return tuple(counts)


def strategy_text(spec: ShardedSpec, mesh: Mesh) -> str:
    return f"({','.join(map(str, strategy(spec, mesh)))})"


def placements_text(placements: Sequence[Placement]) -> str:
    """[S0,P]: sharded along dim 0 on the first axis, parts of a sum on the second."""
    return f"[{','.join(_short(placement) for placement in placements)}]"


def _short(placement: Placement) -> str:
    dim = shard_dim(placement)
    if dim is not None:
        return f"S{dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R"


def _tensor(spec: ShardedSpec, shape: Shape) -> str:
    return tensor_text(spec.dtype, shape)


def tensor_text(dtype: torch.dtype, shape: Shape) -> str:
    """f32[8,16]"""
    name = str(dtype).removeprefix("torch.")
    return f"{SHORT.get(name, name)}[{','.join(map(str, shape))}]"


def _shapes(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    return f"{' '.join(inputs)} -> {' '.join(outputs)}".strip()
