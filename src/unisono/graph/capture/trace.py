"""The trace: a model (and its loss) as one graph of ops on full tensors, without running it on data.

    traced = trace(model, (inputs, targets), loss=F.cross_entropy)
    for op in traced.ops:
        print(op.name, op.outputs, op.flops, op.path, op.line)

torch.export captures the ops that the model calls, as it calls them (linear, attention, layer_norm stay as they are).
Nothing is allocated: a model on the meta device is traced like any other.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree

from unisono.errors import UsageError
from unisono.graph.capture.attention_heads import part_from_samples
from unisono.graph.capture.autocast import Autocast, insert_casts
from unisono.graph.capture.channel_dropout import channel_dropout_decomposed
from unisono.graph.capture.export import captured
from unisono.graph.capture.functionalize import clean
from unisono.graph.capture.module_state import lost_state
from unisono.graph.capture.op import Memory, Op, TensorSpec
from unisono.graph.capture.op_costs import weigh
from unisono.graph.capture.rng_use import RngUse
from unisono.graph.capture.source import assigning_line, line_of, path_of
from unisono.graph.capture.step import ModelWithLoss
from unisono.graph.capture.unfuse import PackedSlice, unpack
from unisono.graph.capture.unsupported import gradients_at_hooks, gradients_of_its_own
from unisono.graph.marks.api import placement_spec_of, placement_specs_for
from unisono.graph.marks.recorder import MarkRecorder
from unisono.graph.marks.recording import recording
from unisono.graph.marks.spec import Mark, PlacementSpec, joined
from unisono.graph.rules.call import OpCall, tensors_of
from unisono.graph.rules.factory import draws
from unisono.mesh.random.random_functions import draws_decomposed
from unisono.mesh.side_effects import no_side_effects
from unisono.torch_compat import FakeTensorMode

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """Names are those of the graph's nodes; placeholders come first, in the order of parameters, buffers, constants,
    inputs and targets."""

    graph: fx.Graph
    ops: list[Op]
    parameters: dict[str, str]  # placeholder -> name in the model; one of names that are tied
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]  # tensors that the code itself holds
    inputs: tuple[str, ...]  # in the order of the flattened inputs of the example; those that are tensors
    targets: tuple[str, ...]
    outputs: tuple[str, ...]  # the loss, or the tensors of the model's output, flattened
    output_spec: Any  # pytree.tree_unflatten(list of outputs, output_spec) is what the model returned
    changed: dict[str, str] = field(default_factory=dict)  # buffer's placeholder -> node of its value afterwards
    tracked: frozenset[str] = frozenset()  # nodes whose tensors have gradients
    specs: dict[str, tuple[TensorSpec, ...]] = field(default_factory=dict)  # of every node
    memory: dict[str, tuple[Memory, ...]] = field(default_factory=dict)  # of every node

    packed_slices: dict[str, PackedSlice] = field(
        default_factory=dict
    )  # placeholders that stand for a part of their parameter
    marks: tuple[Mark, ...] = ()  # placements that the user wants
    assigned: dict[str, str] = field(default_factory=dict)  # buffers that the forward replaced, and at which line
    lost: tuple[str, ...] = ()  # what the model does that its ops do not show (see unsupported.py)

    @property
    def placeholders(self) -> tuple[str, ...]:
        return (*self.parameters, *self.buffers, *self.constants, *self.inputs, *self.targets)

    def node(self, name: str) -> fx.Node:
        found = self._nodes.get(name)
        if found is None:
            raise UsageError(f"the trace has no node {name!r}")
        return found

    @property
    def _nodes(self) -> dict[str, fx.Node]:
        known = self.__dict__.get("_by_name")
        if known is None:
            known = {node.name: node for node in self.graph.nodes}
            object.__setattr__(self, "_by_name", known)
        return known

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    @property
    def saved(self) -> int:
        return sum(op.saved for op in self.ops)


def trace(
    model: nn.Module,
    example: tuple[Any, Any],
    loss: Loss | None = None,
    *,
    unpacked: bool = False,
    marked: bool = True,
    autocast: Autocast | None = None,
) -> Trace:
    """The graph of model(inputs), or of loss(model(inputs), targets), for an `example` of (inputs, targets).

    Inputs are a tensor, a tuple, or a dict of keyword arguments, as in uni.Task. Only shapes and dtypes of the example
    count. Sizes are fixed by it. UsageError where the model cannot be traced, with the line that is in the way.
    unpacked: fused projections are taken apart (see `unpack`), so that each of their parts can be sharded by itself;
    their parameters then have a placeholder a part, and `packed_slices` gives which part it is. marked: whether marks
    that the model makes as it runs count, so that one that would not is an error. autocast: as if the model ran under
    torch.autocast; its casts are ops of the graph.
    """
    inputs, targets = _checked(example)
    placement_specs = placement_specs_for(model)
    lost = gradients_at_hooks(model)
    with (
        no_side_effects(model, loss),
        recording(model, marked) as recorder,
        _without_data(model) as fake,
        channel_dropout_decomposed(),
        draws_decomposed(),
        _assignments(model) as assigned,
    ):
        given = fake((_arguments(inputs), targets if loss is not None else None))
        step = ModelWithLoss(model, loss)
        rng_use = RngUse(model)
        with contextlib.ExitStack() as stack:
            stack.callback(step.attributes.put_back)
            if autocast is not None:
                stack.enter_context(autocast.here())
            with gradients_of_its_own() as own:
                program = captured(step, given)
            lost += [*own, *lost_state(step, given, program, fake, marked), *_lost_draws(rng_use, step, given)]
    example_specs = [
        placement_spec_of(leaf) for leaf in pytree.tree_leaves((_arguments(inputs), targets)) if _is_tensor(leaf)
    ]
    return replace(
        _read(
            program,
            model,
            given,
            recorder,
            joined(placement_specs, recorder.placement_specs),
            example_specs,
            unpacked,
            autocast,
        ),
        assigned=assigned,
        lost=tuple(lost),
    )


def _checked(example: Any) -> tuple[Any, Any]:
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise UsageError(f"example is {type(example).__name__}; expected (inputs, targets), as uni.Task's batch gives")
    return example[0], example[1]


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _lost_draws(rng_use: RngUse, step: ModelWithLoss, given: Any) -> list[str]:
    """Where the model draws from other generators than torch's; a second run finds the lines."""
    if not rng_use.was_used:
        return []
    with recording(step.model, binding=False), rng_use.watched() as lines, contextlib.suppress(UsageError):
        captured(step, given)
    where = f"at {lines[0]} " if lines else ""
    return [
        f"{where}the model draws from Python's random or from numpy.random, and a program would keep for ever the "
        "numbers of its trace; use torch.rand, torch.randn and the like, which draw the same under every plan"
    ]


# ---- without data -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _without_data(model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Gives the model tensors without data while the block runs, and a function that does so for other values.

    They claim to be where the model is; one on the meta device, which has no data anyway, counts as on the CPU, so
    that what its forward makes on the default device fits.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((_device(p) for p in model.parameters()), torch.device("cpu"))
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in known:
            with mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
        return known[id(tensor)]

    original = _swap(model, fake)
    try:
        yield lambda tree: pytree.tree_map(fake, tree)
    finally:
        for holder, name, tensor in original:
            holder[name] = tensor


def _device(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def _swap(model: nn.Module, fake: Callable[[Any], Any]) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Replaces a model's tensors by fakes; what was there, with its owner, to put it back."""
    original: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for holder, found in (
            (module._parameters, module._parameters), (module._buffers, module._buffers), (vars(module), plain)
        ):  # fmt: skip
            for name, tensor in list(found.items()):
                if tensor is not None and (holder is not vars(module) or tensor.is_meta):
                    original.append((holder, name, tensor))
                    holder[name] = fake(tensor)
    return original


@contextlib.contextmanager
def _assignments(model: nn.Module) -> Iterator[dict[str, str]]:
    """Which buffers the model replaces in the block, and where: torch.export would pass over it."""
    found: dict[str, str] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def note(module: nn.Module, name: str, value: Any) -> None:
        line = assigning_line()
        is_itself = value is module._buffers.get(name)  # self.count += 1 changes it in place and sets it again
        if id(module) in names and line and not is_itself:
            found[f"{names[id(module)]}.{name}".lstrip(".")] = line

    hook = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        hook.remove()


# ---- reading -----------------------------------------------------------------------------------------------------


def _read(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    given: Any,
    recorder: MarkRecorder,
    placement_specs: dict[str, PlacementSpec],
    example_specs: list[PlacementSpec | None],
    unpacked: bool,
    autocast: Autocast | None,
) -> Trace:
    """placement_specs: for parameters and buffers; example_specs: for the tensors of the example, in order."""
    names = _tied(model)
    held: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    for spec in program.graph_signature.input_specs:
        held[spec.kind][spec.arg.name] = spec.target or ""
    graph, marks = clean(program.graph_module, recorder.notes, lambda graph: _number_draws(graph, model))
    for node in list(graph.nodes):
        if node.op == "placeholder" and not tensors_of(node.meta.get("val")):
            _refuse_use(node)
            graph.erase_node(node)
    held, marks = _renamed(graph, held, marks)
    parameters = _merge_tied(graph, _first_names(names, held[InputKind.PARAMETER]))
    buffers = _merge_tied(graph, _first_names(names, held[InputKind.BUFFER]))
    constants = {name: program.constants[target] for name, target in held[InputKind.CONSTANT_TENSOR].items()}
    user = list(held[InputKind.USER_INPUT])
    count = sum(map(_is_tensor, pytree.tree_leaves(given[0])))
    trained = {node: model.get_parameter(name).requires_grad for node, name in parameters.items()}
    packed_slices: dict[str, PackedSlice] = {}
    if unpacked:
        part_from_samples(graph)
        parameters, packed_slices = unpack(graph, parameters)
        trained = {node: model.get_parameter(name).requires_grad for node, name in parameters.items()}
    for node, name in (parameters | buffers).items():
        marks += [
            Mark(node, 0, placement_spec)
            for alias, placement_spec in placement_specs.items()
            if names.get(alias, alias) == name
        ]
    marks += [
        Mark(node, 0, placement_spec)
        for node, placement_spec in zip(user, example_specs, strict=False)
        if placement_spec is not None
    ]
    split = (user[:count], user[count:])
    if autocast is not None:
        insert_casts(graph, set(parameters), autocast)
    return replace(
        _assembled(program, graph, parameters, buffers, constants, split, trained, tuple(marks)),
        packed_slices=packed_slices,
    )


def _refuse_use(placeholder: fx.Node) -> None:
    for user in placeholder.users:
        raise UsageError(
            f"at {line_of(user) or user.name} the model gives {user.target} an object that is neither a tensor nor a "
            "number, such as a torch.Generator of its own, which a graph cannot hold; without one, torch.rand and "
            "its kin draw the same under every plan"
        )


def _renamed(
    graph: fx.Graph, held: dict[InputKind, dict[str, str]], marks: list[Mark]
) -> tuple[dict[InputKind, dict[str, str]], list[Mark]]:
    """Placeholders with the names that the user knows, without those of the module that joins model and loss."""
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    taken = set(nodes)
    new: dict[InputKind, dict[str, str]] = {kind: {} for kind in held}
    for kind, names in held.items():
        for name, target in names.items():
            if name not in nodes:
                continue
            wanted = re.sub(r"^inputs_(0_(?=\d+$)|1_)", lambda m: "input_" if m[1] != "1_" else "", name)
            wanted = re.sub(r"^([pbc])_model_", r"\1_", wanted)
            if wanted not in taken:
                nodes[name].name = nodes[name].target = wanted
                taken.add(wanted)
            new[kind][nodes[name].name] = target
    return new, [replace(mark, node=nodes[mark.node].name) if mark.node in nodes else mark for mark in marks]


def _number_draws(graph: fx.Graph, model: nn.Module) -> None:
    """Which random numbers an op draws: its module's name, and how often that module has drawn before (see
    RandomState, which names the calls of a running model so: one that is used several times by the first)."""
    first = {module: name for name, module in model.named_modules()}
    names = {name: first[module] for name, module in model.named_modules(remove_duplicate=False)}
    calls: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and draws(node):
            path = path_of(node, "model")
            path = names.get(path, path)
            node.meta["draw"] = (path, calls[path])
            calls[path] += 1


def _tied(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter or buffer, the first name that the same tensor has."""
    first: dict[int, str] = {}
    found = {}
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def _first_names(names: dict[str, str], placeholders: dict[str, str]) -> dict[str, str]:
    without = {node: target.removeprefix("model.") for node, target in placeholders.items()}
    return {node: names.get(name, name) for node, name in without.items()}


def _merge_tied(graph: fx.Graph, placeholders: dict[str, str]) -> dict[str, str]:
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first: dict[str, str] = {}
    for node, name in placeholders.items():
        if name in first:
            nodes[node].replace_all_uses_with(nodes[first[name]])
            graph.erase_node(nodes[node])
        else:
            first[name] = node
    return {node: name for name, node in first.items()}


def _assembled(
    program: torch.export.ExportedProgram,
    graph: fx.Graph,
    parameters: dict[str, str],
    buffers: dict[str, str],
    constants: dict[str, torch.Tensor],
    user: tuple[list[str], list[str]],
    trained: dict[str, bool],
    marks: tuple[Mark, ...],
) -> Trace:
    weights = weigh(graph, trained, {*parameters, *buffers, *constants})
    nodes = {node.name: node for node in graph.nodes}
    specs = {name: tuple(TensorSpec.of(t) for t in tensors_of(node.meta.get("val"))) for name, node in nodes.items()}
    ops = []
    for node in graph.nodes:
        if node.op == "call_function":
            weight, given = weights[node.name], tuple(used.name for used in OpCall(node).tensors)
            ops.append(
                Op(node.name, node.target, node, given, specs[node.name], weight.flops, weight.bytes_moved,
                   weight.saved, path_of(node, "model"), line_of(node), tuple(weight.saves))
            )  # fmt: skip
    output = nodes["output"].args[0]
    return Trace(
        graph=graph,
        ops=ops,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=tuple(user[0]),
        targets=tuple(user[1]),
        outputs=tuple(value.name for value in output if isinstance(value, fx.Node)),
        output_spec=program.call_spec.out_spec,
        changed={n.name: n.meta["changed_to"].name for n in graph.nodes if "changed_to" in n.meta},
        tracked=frozenset(name for name, weight in weights.items() if weight.tracked),
        specs=specs,
        memory={name: weight.results for name, weight in weights.items()},
        marks=marks,
    )
