"""Lowering: from a traced model and an assignment to what one rank does, as data. Nothing here communicates or
computes.

Each op becomes a `Compute` on local shards. Where an op needs a tensor in another placement than it has, or returns its
gradient in another placement than the producer needs, a `Redistribute` comes before it. Ops that want one tensor alike
share one move, so that three projections of one input gather it once, and sum its gradient once.

Note: gradients of what is made of parameters alone. A parameter's gradient may stay in parts until the backward is over
(gradient_sums.py takes it from there), and so may that of anything computed from parameters, and from nothing of the
batch, by ops that are not split: backward is linear, so a part of the gradient gives a part. Along an axis this holds
where every user gives back parts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from unisono.errors import UsageError
from unisono.graph.capture.source import line_of
from unisono.graph.capture.trace import Trace
from unisono.graph.placement.assignment import Assignment, divides
from unisono.graph.program.redistribute import Redistribution
from unisono.graph.rules import OpCall, tensors_of
from unisono.graph.rules.factory import is_followed
from unisono.graph.rules.option import REPLICATE, SUM, Option, output_gradient
from unisono.graph.rules.registry import target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Placement, Placements, fair_shape

Options = tuple[Option, ...]


@dataclass(frozen=True)
class ShardedSpec:
    """A tensor of the program: the full one, and its placement."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: Placements

    def local(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        return fair_shape(self.shape, mesh, self.placements, mesh.coordinate(rank))


@dataclass(frozen=True)
class Redistribute:
    """A tensor on its way between two layouts."""

    name: str
    source: str
    redistribution: Redistribution


@dataclass(frozen=True)
class Compute:
    """An op on local shards. `inputs`: for each tensor that it takes, in order, the value that it comes from."""

    name: str
    node: fx.Node
    options: Options
    inputs: tuple[str, ...]
    outputs: tuple[ShardedSpec, ...]

    @property
    def is_item(self) -> bool:
        """Whether it only picks one of an op's outputs."""
        return self.node.target is operator.getitem


def used_by(each: Redistribute | Compute) -> tuple[str, ...]:
    """The values that an instruction takes."""
    return each.inputs if isinstance(each, Compute) else (each.source,)


@dataclass
class Lowered:
    """What one rank does, in order; the same on every rank but for the sizes of shards and the ranks in groups."""

    trace: Trace
    assignment: Assignment
    mesh: Mesh
    given: dict[str, ShardedSpec] = field(default_factory=dict)  # parameters, buffers, inputs
    instructions: list[Redistribute | Compute] = field(default_factory=list)
    outputs: list[str | None] = field(default_factory=list)  # None: an output that is no tensor
    changed: dict[str, str] = field(default_factory=dict)  # buffers' nodes: the values that they take
    values: dict[str, ShardedSpec] = field(default_factory=dict)
    summed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # parameters' nodes: axes that hold parts

    @property
    def moves(self) -> Iterator[Redistribute]:
        return (each for each in self.instructions if isinstance(each, Redistribute))

    @property
    def computes(self) -> Iterator[Compute]:
        return (each for each in self.instructions if isinstance(each, Compute))


def lower(trace: Trace, assignment: Assignment, mesh: Mesh) -> Lowered:
    """The program of a trace under an assignment, for the ranks of a mesh, which need not be running."""
    return _Lowering(trace, assignment, mesh).run()


class _Lowering:
    def __init__(self, trace: Trace, assignment: Assignment, mesh: Mesh) -> None:
        self.made = Lowered(trace, assignment, mesh)
        self.assignment = assignment
        self.nodes = list(trace.graph.nodes)
        self.differentiable = trace.tracked
        self.of_parameters = made_of_parameters(trace)
        self.in_parts = self._gradients_in_parts()
        for parts in self._unpacked():
            common = set.intersection(*(self.in_parts.get(name, set()) for name in parts))
            self.in_parts.update(dict.fromkeys(parts, common))
        self.moved: dict[tuple[str, Redistribution], str] = {}

    def run(self) -> Lowered:
        _refuse_assigned(self.made.trace)
        _refuse_lost(self.made.trace)
        _refuse_draws(self.made.trace)
        for node in self.nodes:
            if node.op == "placeholder":
                self._give(node)
            elif node.op == "call_function":
                self._compute(node)
            elif node.op == "output":
                self._leave(node)
        names = self.made.mesh.names
        for name in self.made.trace.parameters:
            axes = tuple(names[axis] for axis in sorted(self.in_parts.get(name, ())))
            if axes:
                self.made.summed[name] = axes
        return self.made

    def _unpacked(self) -> list[list[str]]:
        """The placeholders of each parameter that the trace has taken apart; one tensor holds them all."""
        found: dict[str, list[str]] = {}
        for name, packed in self.made.trace.packed_slices.items():
            found.setdefault(packed.parameter, []).append(name)
        return list(found.values())

    def _give(self, node: fx.Node) -> None:
        tensors = tensors_of(node.meta.get("val"))
        if tensors:
            first = next((parts[0] for parts in self._unpacked() if node.name in parts), node.name)
            spec = _sharded_spec(tensors[0], self.assignment.layout(first))
            if first != node.name and not divides(spec.shape, spec.placements, self.made.mesh.shape):
                raise UsageError(
                    f"{node.name} cannot be sharded as {first} is ({spec.placements}); trace without unpack"
                )
            self.made.given[node.name] = self.made.values[node.name] = spec

    def _compute(self, node: fx.Node) -> None:
        options = self.assignment.options[node.name]
        results = tensors_of(node.meta.get("val"))
        outputs = tuple(_sharded_spec(tensor, self.assignment.layout(node.name, i)) for i, tensor in enumerate(results))
        if node.target is operator.getitem:
            self._pick(node, options, outputs)
            return
        inputs = tuple(self._brought(tensor, node, options, i) for i, tensor in enumerate(OpCall(node).tensors))
        self.made.instructions.append(Compute(node.name, node, options, inputs, outputs))
        if len(outputs) == 1:
            self.made.values[node.name] = outputs[0]

    def _pick(self, node: fx.Node, options: Options, outputs: tuple[ShardedSpec, ...]) -> None:
        """One of several outputs: moved, where it has to be, after it is picked."""
        source, index = node.args
        assert isinstance(source, fx.Node)
        made = self.assignment.layout(source.name, int(index))  # type: ignore[arg-type]
        spec = ShardedSpec(outputs[0].shape, outputs[0].dtype, made)
        self.made.instructions.append(Compute(node.name, node, options, (source.name,), (spec,)))
        self.made.values[node.name] = spec

    def _brought(self, tensor: fx.Node, node: fx.Node, options: Options, i: int) -> str:
        """The value to use for the i-th tensor input of a node, moved where it has to be."""
        wanted = tuple(option.inputs[i] for option in options)
        gradient = tuple(self._gradient(option, i, axis, node) for axis, option in enumerate(options))
        return self._move(tensor, wanted, gradient, node.name in self.differentiable)

    def _move(self, tensor: fx.Node, wanted: Placements, gradient: Placements, gives_back: bool = True) -> str:
        spec = self.made.values[tensor.name]
        flows = gives_back and tensor.name in self.differentiable
        redistribution = Redistribution(
            spec.shape,
            spec.dtype,
            spec.placements,
            wanted,
            gradient if flows else None,
            self._needed(tensor.name, spec.placements) if flows else None,
        )
        if redistribution.is_idle:
            return tensor.name
        if (tensor.name, redistribution) not in self.moved:
            number = sum(name == tensor.name for name, _ in self.moved)
            name = f"{tensor.name}_moved{number or ''}"
            self.moved[tensor.name, redistribution] = name
            self.made.values[name] = ShardedSpec(spec.shape, spec.dtype, wanted)
            self.made.instructions.append(Redistribute(name, tensor.name, redistribution))
        return self.moved[tensor.name, redistribution]

    def _leave(self, node: fx.Node) -> None:
        """The caller gets full tensors; buffers keep what they become as they are placed."""
        full = (REPLICATE,) * self.made.mesh.ndim
        for value in node.args[0]:  # type: ignore[union-attr]
            is_tensor = isinstance(value, fx.Node) and bool(tensors_of(value.meta.get("val")))
            self.made.outputs.append(self._move(value, full, full) if is_tensor else None)  # type: ignore[arg-type]
        for buffer, changed in self.made.trace.changed.items():
            _refuse_change_of(buffer, self.made.trace)
            if buffer not in self.made.trace.buffers:
                continue
            current = self.made.values[buffer].placements
            self.made.changed[buffer] = self._move(self.made.trace.node(changed), current, full, gives_back=False)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _gradient(self, option: Option, i: int, axis: int, node: fx.Node) -> Placement:
        """The placement on an axis of the gradient for an input, as the op computes it."""
        if not option.splits and axis in self.in_parts.get(node.name, ()):
            return SUM
        return option.gradient(i)

    def _needed(self, name: str, placements: Placements) -> Placements:
        """How the gradient of a value must reach the op that made it, or the parameter that it is."""
        parts = self.in_parts.get(name, ())
        return tuple(SUM if axis in parts else output_gradient(placement) for axis, placement in enumerate(placements))

    def _gradients_in_parts(self) -> dict[str, set[int]]:
        """For parameters and what is made of them alone: the axes along which the gradient stays in parts."""
        found: dict[str, set[int]] = {}
        for node in reversed(self.nodes):
            if node.name not in self.differentiable:
                continue
            axes = set()
            for axis, placement in enumerate(self.assignment.layout(node.name)):
                if node.name not in self.of_parameters:
                    continue
                unsplit = node.op == "placeholder" or not self.assignment.options[node.name][axis].splits
                if placement == REPLICATE and unsplit and self._all_give_parts(node, axis, found):
                    axes.add(axis)
            found[node.name] = axes
        return found

    def _all_give_parts(self, node: fx.Node, axis: int, found: dict[str, set[int]]) -> bool:
        uses = [(user, i) for user in node.users for i, tensor in enumerate(_inputs(user)) if tensor is node]
        return bool(uses) and all(self._gives_parts(user, i, axis, found) for user, i in uses)

    def _gives_parts(self, user: fx.Node, i: int, axis: int, found: dict[str, set[int]]) -> bool:
        if user.op == "output":
            return False
        if user.name not in self.differentiable:
            return True  # gives nothing back at all
        option = self.assignment.options[user.name][axis]
        return option.gradient(i) == SUM or (not option.splits and axis in found.get(user.name, ()))


def _refuse_change_of(name: str, trace: Trace) -> None:
    """A model may change its buffers while it runs, and nothing else that outlives the run."""
    if name in trace.parameters:
        raise UsageError(
            f"the model changes its parameter {trace.parameters[name]} in its forward, which a program does not; "
            "use a plan, which needs no graph"
        )
    if name in trace.constants:
        line = line_of(trace.node(trace.changed[name]))
        raise UsageError(
            f"at {line} the model changes a tensor that is none of its buffers, or the .data of one, which a program "
            "would not keep; change a buffer itself (under torch.no_grad() where need be), or use a plan"
        )


def _refuse_assigned(trace: Trace) -> None:
    for name, line in trace.assigned.items():
        raise UsageError(
            f"at {line} the model replaces its buffer {name}, which a program would not "
            f"keep; change the buffer itself: self.{name.rpartition('.')[2]}.copy_(...)"
        )


def _refuse_lost(trace: Trace) -> None:
    for what in trace.lost:
        raise UsageError(what)


def _refuse_draws(trace: Trace) -> None:
    for node in trace.graph.nodes:
        if "draw" in node.meta and not is_followed(node):
            raise UsageError(
                f"at {line_of(node) or node.name} the model draws random numbers by {target_name(node.target)}, in a "
                "way of its own that is not the same under every placement; use torch.rand, torch.randn and the like "
                "and dropout (between the layers of a GRU: nn.Dropout), without generators of your own"
            )


def _sharded_spec(tensor: torch.Tensor, placements: Placements) -> ShardedSpec:
    return ShardedSpec(tuple(tensor.shape), tensor.dtype, tuple(placements))


def _inputs(node: fx.Node) -> list[fx.Node]:
    return OpCall(node).tensors


def made_of_parameters(trace: Trace) -> set[str]:
    """Parameters, and what single-output ops make of them without anything of the batch."""
    found, of_batch = set(trace.parameters), {*trace.inputs, *trace.targets}
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = {each.name for each in _inputs(node)}
        is_single = len(tensors_of(node.meta.get("val"))) == 1 and node.target is not operator.getitem
        if inputs & of_batch:
            of_batch.add(node.name)
        elif is_single and inputs & found and inputs & trace.tracked <= found:
            found.add(node.name)
    return found
