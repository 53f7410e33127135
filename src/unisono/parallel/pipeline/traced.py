"""A model's graph, split into the stages of a pipeline: what a static program runs where stages are marked.

The graph is that of `graph.trace`. Ops belong to the stage of the marked module that they run in, or else to that of
the op before. Each stage is one block of a `TracedStages`, whose parameters keep the model's names; what one stage
makes and a later one needs travels between their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace, trace
from unisono.graph.rules.call import tensors_of
from unisono.parallel.meta.meta_tensors import meta_copy

Starts = Mapping[str, int]  # modules that begin a stage -> its number


@dataclass(frozen=True)
class TracedSegment:
    """The ops of one stage. `run` takes the device it runs on, parameters and buffers (`held`, by the model's names),
    the model's inputs (`inputs`) and what earlier stages made (`received`), and gives what later ones need (`sent`)."""

    run: fx.GraphModule
    ops: tuple[fx.Node, ...]
    held: tuple[str, ...]
    inputs: tuple[int, ...]  # their numbers
    received: tuple[str, ...]
    sent: tuple[str, ...]


@dataclass(frozen=True)
class TracedSplit:
    trace: Trace
    segments: tuple[TracedSegment, ...]


class _TracedSplits:
    """The graphs of a model by kind of input, traced when they are first met. Copies of a model share them."""

    def __init__(self, model: nn.Module, starts: Starts, count: int) -> None:
        self._model = meta_copy(model)
        self._starts = dict(starts)
        self._count = count
        self._known: dict[Any, TracedSplit] = {}

    def __deepcopy__(self, memo: Any) -> _TracedSplits:
        return self

    def of(self, inputs: Any, training: bool) -> TracedSplit:
        leaves, form = pytree.tree_flatten(inputs)
        key = (training, form, *((tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves))
        if key not in self._known:
            self._model.train(training)
            empty = pytree.tree_map(_without_data, inputs)
            traced = trace(self._model, (empty, None))
            self._known[key] = TracedSplit(traced, _segments(traced, self._starts, self._count))
        return self._known[key]


def _without_data(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


class TracedStages(nn.Module):
    """The model as its graph, stage after stage. Its modules and parameters are the model's own."""

    pipeline_blocks = "traced_stages"

    def __init__(self, model: nn.Module, starts: Starts, count: int) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in model._buffers.items():
            self.register_buffer(name, buffer, name not in model._non_persistent_buffers_set)
        self.splits = _TracedSplits(model, starts, count)
        self.traced_stages = nn.ModuleList(_StageOps(number) for number in range(count))
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs or (args[0] if len(args) == 1 else args)
        split = self.splits.of(given, self.training)
        leaves = tuple(leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))
        values: tuple[torch.Tensor, ...] = ()
        for number, stage in enumerate(self.traced_stages):
            held = _Held(self, split.segments[number])
            values = stage(held, leaves, *values)
        return pytree.tree_unflatten(list(values), split.trace.output_spec)


class _Held:
    """A segment and where its parameters are: an argument that is not a tensor, so that no rank sends it."""

    def __init__(self, owner: nn.Module, segment: TracedSegment) -> None:
        self.segment = segment
        self._owner = owner

    def tensors(self) -> list[torch.Tensor]:
        return [_attribute(self._owner, name) for name in self.segment.held]


class _StageOps(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(
        self, held: _Held, leaves: tuple[torch.Tensor, ...], *received: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        segment = held.segment
        inputs = [leaves[number] for number in segment.inputs]
        given = (*held.tensors(), *inputs, *received)
        made: tuple[torch.Tensor, ...] = segment.run(_device(given, leaves), *given)
        return made


def _device(given: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> torch.device:
    """The device of a stage: that of what it is given, or, if it is given nothing, the model's inputs."""
    return next((tensor.device for tensor in (*given, *leaves)), torch.device("cpu"))


def _attribute(owner: nn.Module, name: str) -> torch.Tensor:
    """A parameter by name, also where it is put away because another rank holds it."""
    module, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(owner.get_submodule(module), last)
    return found


# ---- splitting -------------------------------------------------------------------------------------------------------


def _segments(traced: Trace, starts: Starts, count: int) -> tuple[TracedSegment, ...]:
    _require_plain(traced)
    stage_of = _stages(traced, starts, count)
    last = dict.fromkeys(traced.outputs, count - 1)
    for node in traced.graph.nodes:
        for user in node.users:
            if user.op == "call_function":
                last[node.name] = max(last.get(node.name, 0), stage_of[user.name])
    nodes = [node for node in traced.graph.nodes if node.op == "call_function"]
    crossing = [
        [node for node in nodes if stage_of[node.name] <= stage < last.get(node.name, 0)] for stage in range(count - 1)
    ]
    segments = []
    for stage in range(count):
        ops = [node for node in nodes if stage_of[node.name] == stage]
        received = crossing[stage - 1] if stage else []
        sent = crossing[stage] if stage < count - 1 else [traced.node(name) for name in traced.outputs]
        segments.append(_segment(traced, ops, received, sent))
    return tuple(segments)


def _segment(
    traced: Trace, ops: Sequence[fx.Node], received: Sequence[fx.Node], sent: Sequence[fx.Node]
) -> TracedSegment:
    graph, values = fx.Graph(), {}
    needed = {used.name for op in (*ops, *sent) for used in (*op.all_input_nodes, op)}
    names = {**traced.parameters, **traced.buffers}
    held = [node for node in names if node in needed]
    inputs = [node for node in traced.inputs if node in needed]
    device = graph.placeholder("device_of_the_stage")
    for name in (*held, *inputs, *(node.name for node in received)):
        values[traced.node(name)] = graph.placeholder(name)

    def here(argument: Any) -> Any:
        """A value of this graph. A device, which a trace without data only supposes, is the one the stage runs on."""
        if isinstance(argument, torch.device):
            return device
        return values[argument] if isinstance(argument, fx.Node) else argument

    for op in ops:
        assert callable(op.target)
        args, kwargs = fx.node.map_aggregate(op.args, here), fx.node.map_aggregate(op.kwargs, here)
        values[op] = graph.call_function(op.target, args, kwargs)
    graph.output(tuple(values[node] for node in sent))
    run = fx.GraphModule(nn.Module(), graph)
    numbers = tuple(traced.inputs.index(name) for name in inputs)
    return TracedSegment(
        run,
        tuple(ops),
        tuple(names[node] for node in held),
        numbers,
        tuple(node.name for node in received),
        tuple(node.name for node in sent),
    )


def _stages(traced: Trace, starts: Starts, count: int) -> dict[str, int]:
    """The stage of every op."""
    found, stage, seen = {}, 0, {0}
    for op in traced.ops:
        wished = next((number for name, number in starts.items() if f"{op.path}.".startswith(f"{name}.")), stage)
        if wished < stage:
            raise UsageError(
                f"{op.name} ({op.path} {op.line}) is marked for stage {wished}, but runs after an op of stage {stage}; "
                "stages must run one after the other"
            )
        stage = wished
        seen.add(stage)
        found[op.name] = stage
    missing = sorted(set(range(count)) - seen)
    if missing:
        raise UsageError(
            f"no op runs on stage {missing[0]} of {count}; mark its first module: mesh.at(pp={missing[0]})"
        )
    return found


def _require_plain(traced: Trace) -> None:
    drawing = next((op for op in traced.ops if "draw" in op.node.meta), None)
    if drawing is not None:
        raise UsageError(
            f"{drawing.name} ({drawing.path} {drawing.line}) draws random numbers, which a static pipeline cannot do "
            "alike under every plan; uni.apply_marks runs the model itself, and can"
        )
    if traced.changed or traced.constants:
        what = next(iter((*traced.changed, *traced.constants)))
        raise UsageError(f"{what} is a buffer that changes, or a tensor in the code; use uni.apply_marks")
    if any(len(tensors_of(op.node.meta.get("val"))) != 1 for op in traced.ops):
        several = next(op for op in traced.ops if len(tensors_of(op.node.meta.get("val"))) != 1)
        raise UsageError(f"{several.name} ({several.path} {several.line}) gives several tensors; use uni.apply_marks")
