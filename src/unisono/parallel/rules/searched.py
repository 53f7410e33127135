"""Rules for models that show no pattern: searched for in the graph, layer by layer (see `graph.problem`).

The search may shard every nn.Linear by columns or by rows, and every nn.Embedding by rows of its vocabulary, and must
shard the linear layers that the ranks divide. It minimises what travels. A model's own code runs between its layers,
on whatever they give, so of the other ops only those that work element by element may see shards; everything else is
given full tensors. Where shards go from layers sharded by columns through such ops to layers sharded by rows and
nowhere else, nothing is communicated; elsewhere a layer gathers its output, or shards its input.

What is found is tried, where the model is small enough: simulated ranks must give what the full model gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree

from unisono.errors import MissingPackageError
from unisono.graph.capture.trace import trace
from unisono.graph.placement import dp, ilp
from unisono.graph.placement.assignment import Assignment, producers
from unisono.graph.placement.problem import Problem
from unisono.graph.rules.option import REPLICATE, Option
from unisono.graph.rules.registry import target_name
from unisono.mesh.mesh import Mesh
from unisono.mesh.random.random_functions import constant_draws
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.meta.meta_tensors import realised_copy
from unisono.parallel.rules.trial import together, varied

_SMALL = 5 * 10**7  # parameters of a model that is tried
_FEW = 400  # nodes of a graph that is searched exactly
_ONE = {
    "abs", "alias", "celu", "clone", "contiguous", "dropout", "elu", "exp", "gelu", "hardswish", "hardtanh",
    "leaky_relu", "mish", "neg", "relu", "relu6", "selu", "sigmoid", "silu", "softplus", "sqrt", "square", "tanh",
}  # fmt: skip
_TWO = {"mul", "add", "sub", "div"}  # of tensors: a number may have been read off a shape


def searched_rules(
    model: nn.Module, ranks: int, example: tuple[Any, Any], shard: Callable[..., None]
) -> dict[str, str]:
    """Rules for so many ranks; empty where no layer can be sharded. shard(module, rules, comm) shares a model between
    the ranks of a communicator."""
    found = trace(model, example)
    problem = _LayerProblem.of(found, Mesh.describe((ranks,), ("tp",)))
    rules = _rules(problem.assignment(_solved(problem)), model)
    if rules and not _holds(model, rules, ranks, example[0], shard):
        rules = {name: "column_gather" for name, text in rules.items() if text.startswith("column")}
        rules = rules if _holds(model, rules, ranks, example[0], shard) else {}
    return rules


def _solved(problem: Problem) -> dict[str, int]:
    if len(problem.choices) <= _FEW:
        try:
            return ilp.solve(problem)
        except MissingPackageError:
            pass
    return dp.solve(problem)


# ---- the problem -----------------------------------------------------------------------------------------------------


class _LayerProblem(Problem):
    """The problem, with those choices only that a model's own code can be run with."""

    def _divides(self, node: fx.Node, some: tuple[Option, ...]) -> bool:
        return super()._divides(node, some) and self._is_allowed(node, some[0])

    def _is_allowed(self, node: fx.Node, option: Option) -> bool:
        if node.op == "placeholder":
            return node.name in self.trace.parameters or not option.splits
        shapes = [self.trace.specs[source][output].shape for source, output in producers(node)]
        word = target_name(node.target).removeprefix("aten.").partition(".")[0]
        if word == "linear" and self._is_layer(node):
            return option.splits == self._can_shard(shapes) and (not option.splits or bool(_layer_kind(option, shapes)))
        if not option.splits:
            return True
        if word == "embedding":
            is_by_rows = option.inputs[0] == Shard(0) and not isinstance(option.outputs[0], Shard)
            return is_by_rows and self._is_layer(node)
        if word in _ONE or (word in _TWO and len(shapes) == 2):
            last = Shard(len(shapes[0]) - 1)
            return len(set(shapes)) == 1 and {*option.inputs, *option.outputs} == {last}
        return False

    def _is_layer(self, node: fx.Node) -> bool:
        """Whether the op alone uses its parameter: one that layers share would have to be sharded alike in all of
        them."""
        weights = [given for given in node.all_input_nodes if given.name in self.trace.parameters]
        return bool(weights) and all(len(weight.users) == 1 for weight in weights)

    def _can_shard(self, shapes: list[tuple[int, ...]]) -> bool:
        return any(size % self.mesh.shape[0] == 0 for size in shapes[1])


def _layer_kind(option: Option, shapes: list[tuple[int, ...]]) -> str:
    inputs, weight = option.inputs[:2]
    if weight == Shard(0) and inputs == REPLICATE:
        return "column"
    return "row" if weight == Shard(1) and inputs == Shard(len(shapes[0]) - 1) else ""


# ---- from placements to rules ----------------------------------------------------------------------------------------


def _rules(assignment: Assignment, model: nn.Module) -> dict[str, str]:
    """Layers and how they are sharded."""
    found = assignment.trace
    modules = dict(model.named_modules())
    full = _gathered(assignment)
    rules: dict[str, str] = {}
    for op in found.ops:
        option = assignment.options[op.name][0]
        name = next((found.parameters[each] for each in op.inputs if each in found.parameters), "")
        layer, _, kind_of_parameter = name.rpartition(".")
        if not option.splits or kind_of_parameter != "weight" or layer not in modules:
            continue
        kind = ""
        if isinstance(modules[layer], nn.Embedding):
            kind = "vocab"
        elif isinstance(modules[layer], nn.Linear):
            kind = _layer_kind(option, [found.specs[each][0].shape for each in op.inputs])
            if op.name in full:
                kind = {"column": "column_gather", "row": "row_split"}.get(kind, kind)
        if kind:
            rules[layer] = kind
    return rules


def _gathered(assignment: Assignment) -> set[str]:
    """Ops of layers whose shards do not stay among themselves."""
    groups: dict[str, str] = {}

    def root(name: str) -> str:
        while groups.setdefault(name, name) != name:
            name = groups[name]
        return name

    broken: set[str] = set()
    for source, output, user, i in assignment.edges():
        given, wanted = assignment.layout(source, output)[0], assignment.wanted(user, i)[0]
        if source in assignment.trace.parameters:
            continue
        if isinstance(given, Shard) and given == wanted:
            groups[root(source)] = root(user)
        else:
            broken |= {name for name, index in ((source, given), (user, wanted)) if isinstance(index, Shard)}
    roots = {root(name) for name in broken}
    return {name for name in assignment.options if root(name) in roots}


# ---- whether it holds ------------------------------------------------------------------------------------------------


def _holds(model: nn.Module, rules: dict[str, str], ranks: int, inputs: Any, shard: Callable[..., None]) -> bool:
    """Whether simulated ranks give what the model gives alone; where that cannot be tried, it is taken to hold."""
    real = realised_copy(model) if sum(map(torch.numel, model.parameters())) <= _SMALL else None
    if real is None:
        return True
    full = real.double().cpu().eval()

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().cpu()
        return leaf.double() if leaf.is_floating_point() else leaf

    inputs = pytree.tree_map(given, inputs)

    def run(module: nn.Module) -> list[torch.Tensor]:
        args, kwargs = _arguments(inputs)
        outputs = module(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]

    for tried in (full, *varied(full)):
        try:
            with no_side_effects(model), torch.no_grad(), constant_draws():
                expected = run(tried)
                if tried is not full and not all(bool(leaf.isfinite().all()) for leaf in expected):
                    continue
                outcomes = together(tried, rules, ranks, run, shard)
        except Exception:  # a model may refuse a size that is not its own
            return False
        if not all(
            len(got) == len(expected) and all(_is_close(a, b) for a, b in zip(got, expected, strict=True))
            for got in outcomes
        ):
            return False
    return True


def _is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """But for rounding: some models compute in float32 on their way, of whatever dtype they are."""
    if got.shape != expected.shape:
        return False
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return torch.allclose(got, expected, atol=1e-5 * largest if math.isfinite(largest) else 1e-8, equal_nan=True)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
