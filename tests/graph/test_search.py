"""Searches for placements: as good as the hand-written layout of tensor parallelism, or better."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace, trace
from unisono.graph.marks.spec import Mark, PlacementSpec
from unisono.graph.placement import cost, dp, ilp
from unisono.graph.placement.assignment import Assignment
from unisono.graph.placement.cost import AxisLink
from unisono.graph.placement.find import find
from unisono.graph.placement.problem import DeviceRates, Problem
from unisono.graph.placement.propagate import propagate
from unisono.graph.placement.recursive import recursive
from unisono.mesh.mesh import Mesh

TP = Mesh.describe((2,), ("tp",))
COMMUNICATION_ONLY = DeviceRates(flops=1e30, memory=1e30, link=AxisLink(1e-12, 1e10))  # what counts is what travels
COLUMN = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "query",
    "key",
    "value",
    "intermediate.dense",
    "fc1",
    "wi",
)
COLUMN += ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v")
ROW = ("o_proj", "down_proj", "output.dense", "fc2", "SelfAttention.o", "wo")
MODELS = ("llama", "gpt2", "bert", "vit", "mixtral", "t5")


def net(width: int = 8) -> Trace:
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    return trace(model, (torch.zeros(4, width), torch.zeros(4, width)), nn.functional.mse_loss)


def chosen_by(problem: Problem, assignment: Any) -> dict[str, int]:
    return {
        name: [choice.options for choice in choices].index(assignment.options[name])
        for name, choices in problem.choices.items()
    }


def test_exact_is_the_best_of_all() -> None:
    """Every combination of choices of a net of few nodes, looked at one by one."""
    model = nn.Linear(4, 4, bias=False)
    found = trace(model, (torch.zeros(4, 4), torch.zeros(4, 4)), lambda y, t: ((y - t) ** 2).mean())
    rates = DeviceRates(flops=1e6, memory=1e6, link=AxisLink(1e-6, 1e6))
    problem = Problem.of(found, TP, rates=rates)
    numbers = [range(len(choices)) for choices in problem.choices.values()]
    best = min(problem.seconds(dict(zip(problem.choices, some, strict=True))) for some in itertools.product(*numbers))
    assert problem.seconds(ilp.solve(problem)) == pytest.approx(best, rel=1e-6)
    assert problem.seconds(dp.solve(problem)) == pytest.approx(best, rel=1e-6)
    problem = Problem.of(found, TP, rates=DeviceRates(flops=1e12, memory=1e12, link=AxisLink(1e-3, 1e6)))
    alone = ilp.solve(problem)
    assert not any(option.splits for name, c in alone.items() for option in problem.choices[name][c].options)
    problem.memory = 0.99 * problem.held(alone)
    fitting = [
        problem.seconds(chosen)
        for some in itertools.product(*numbers)
        if problem.held(chosen := dict(zip(problem.choices, some, strict=True))) <= problem.memory
    ]
    tight = ilp.solve(problem)
    assert problem.held(tight) <= problem.memory
    assert problem.seconds(tight) == pytest.approx(min(fitting), rel=1e-6)


def test_a_wide_table_of_frontiers_is_exact() -> None:
    problem = Problem.of(net(64), TP, rates=DeviceRates(flops=1e9, memory=1e9, link=AxisLink(1e-6, 1e8)))
    assert problem.seconds(dp.solve(problem)) == pytest.approx(problem.seconds(ilp.solve(problem)), rel=1e-6)


def test_under_a_limit_little_is_lost() -> None:
    """Limits from nearly the least to nearly what the best solution without one holds, on two axes."""
    mesh = Mesh.describe((2, 2), ("a", "b"))
    problem = Problem.of(net(64), mesh, rates=DeviceRates(flops=1e11, memory=1e10, link=AxisLink(1e-5, 1e9)))
    most, least = problem.held(dp.solve(problem)), ilp.min_bytes(problem)
    for share in (0.05, 0.3, 0.55, 0.8, 0.97):
        problem.memory = least + share * (most - least)
        found = dp.solve(problem)
        assert problem.held(found) <= problem.memory
        assert problem.seconds(found) == pytest.approx(problem.seconds(ilp.solve(problem)), rel=0.01)


def test_marks_are_kept() -> None:
    found = net()
    weight = next(iter(found.parameters))
    marks = [Mark(weight, 0, PlacementSpec(TP, (Shard(1),)))]
    for search in (ilp.exact, dp.dynamic, recursive):
        assert search(found, TP, marks).layout(weight) == (Shard(1),)


def test_what_cannot_fit_is_reported() -> None:
    for search in (ilp.exact, dp.dynamic):
        with pytest.raises(UsageError, match=r"fit 100 bytes a rank; parameters and activations need .* at least"):
            search(net(), TP, memory=100)
    with pytest.raises(UsageError, match="memory=-1; expected how many bytes a rank may hold"):
        find(net(), TP, "exact", memory=-1)
    with pytest.raises(UsageError, match="search='propagate' follows the marks"):
        find(net(), TP, memory=100)
    with pytest.raises(UsageError, match="search='recursive' decides once"):
        find(net(), TP, "recursive", memory=100)


@pytest.mark.parametrize("search", ["exact", "dynamic"])
def test_a_program_is_found_under_a_limit(search: str) -> None:
    traced = net(64)
    problem = Problem.of(traced, TP)
    least = ilp.min_bytes(problem)
    free, tight = find(traced, TP, search), find(traced, TP, search, memory=1.01 * least)
    assert bytes_held(problem, tight) <= 1.01 * least < bytes_held(problem, free)
    assert len(free.reshards()) < len(tight.reshards())  # room is paid for with communication


def bytes_held(problem: Problem, found: Assignment) -> float:
    chosen = {
        name: next(i for i, choice in enumerate(choices) if choice.options == found.options[name])
        for name, choices in problem.choices.items()
    }
    return problem.held(chosen)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("sharding_propagation", "propagate"),
        ("recursive_programming", "recursive"),
        ("dynamic_programming", "dynamic"),
    ],
)
def test_searches_have_mindspores_names(theirs: str, ours: str) -> None:
    traced = net()
    found, expected = find(traced, TP, theirs).options, find(traced, TP, ours).options
    assert found.keys() == expected.keys()
    for name, options in found.items():
        assert [each.outputs for each in options] == [each.outputs for each in expected[name]]


def test_two_axes() -> None:
    mesh = Mesh.describe((2, 2), ("a", "b"))
    found = ilp.exact(
        net(64), mesh, rates=DeviceRates(flops=1e9, memory=1e9, link=AxisLink(1e-9, 1e9)), fully_use_devices=True
    )
    products = [op.name for op in found.trace.ops if op.flops]
    assert products
    assert all(option.splits for name in products for option in found.options[name])


class Product(nn.Module):
    """A product whose two factors both have gradients, between ops that take any placement of their tensors."""

    def __init__(self, rows: int, inner: int, columns: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(rows, inner))
        self.right = nn.Parameter(torch.zeros(inner, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left.exp() @ self.right.exp()).exp() * x.mean()


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [((1024, 32, 32), (0, None)), ((32, 1024, 32), (1, 0)), ((32, 32, 1024), (None, 1))],
    ids=["rows", "inner", "columns"],
)
def test_recursive_divides_the_largest_op_along_its_longest_dim(
    sizes: tuple[int, int, int], dims: tuple[int | None, int | None]
) -> None:
    found = trace(Product(*sizes), (torch.zeros(4), torch.zeros(())), lambda y, t: y.sum() - t)
    rates = DeviceRates(flops=1e9, memory=1e30, link=AxisLink(1e-9, 1e9))
    divided = recursive(found, Mesh.describe((2, 2), ("a", "b")), rates=rates, fully_use_devices=True)
    for number, dim in enumerate(dims):
        expected = Replicate() if dim is None else Shard(dim)
        assert divided.wanted("matmul", number) == (expected, expected)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_recursive_is_never_better_than_exact_and_not_far_from_it(shape: tuple[int, ...]) -> None:
    mesh = Mesh.describe(shape, ("a", "b")[: len(shape)])
    for rates in (DeviceRates(flops=1e9, memory=1e9, link=AxisLink(1e-6, 1e9)), COMMUNICATION_ONLY):
        problem = Problem.of(net(64), mesh, rates=rates, fully=True)
        found = problem.seconds(chosen_by(problem, recursive(problem.trace, mesh, rates=rates, fully_use_devices=True)))
        best = problem.seconds(ilp.solve(problem))
        assert best * (1 - 1e-6) <= found <= 2 * best


def block(name: str) -> Trace:
    from tests.graph import hugging_face

    wide = {} if name in ("vit", "t5") else {"hidden_size": 128, "intermediate_size": 256}
    if name == "t5":
        import transformers as hf

        config = hf.T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
        model: nn.Module = hf.T5EncoderModel(config)
        tokens = hugging_face.batch("llama", 2)[0]
        return trace(model, (tokens, torch.zeros(())), lambda outputs, _: outputs.last_hidden_state.square().mean())
    return trace(hugging_face.model(name, **wide), hugging_face.batch(name, 2), hugging_face.loss)


def by_hand(name: str, found: Trace) -> list[Mark]:
    """The layout of Megatron: what opens a block is sharded by columns, what closes it by rows."""
    is_turned = name == "gpt2"  # its layers keep their weights the other way round
    marks = []
    for node, path in found.parameters.items():
        layer = path.removesuffix(".weight")
        if layer.endswith(COLUMN) or (is_turned and layer.endswith("c_fc")):
            marks.append(Mark(node, 0, PlacementSpec(TP, (Shard(int(is_turned)),))))
        elif layer.endswith(ROW) or (is_turned and layer.endswith("mlp.c_proj")):
            marks.append(Mark(node, 0, PlacementSpec(TP, (Shard(int(not is_turned)),))))
    return marks


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize("name", MODELS)
def test_no_more_is_said_than_in_the_layout_by_hand(name: str) -> None:
    found = block(name)
    hand = propagate(found, TP, by_hand(name, found))
    problem = Problem.of(found, TP, rates=COMMUNICATION_ONLY)
    problem.memory = problem.held(chosen_by(problem, hand))
    solved = ilp.solve(problem)
    best = problem.assignment(solved)
    if name == "gpt2":
        along = dp.solve(problem)
        assert problem.held(along) <= problem.memory
        assert problem.seconds(along) <= 1.05 * problem.seconds(solved)
    collectives, moved_by_hand = cost.of_assignment(best).bytes, cost.of_assignment(hand).bytes
    assert moved_by_hand > 0
    assert collectives <= moved_by_hand
    if name == "llama":
        assert collectives == moved_by_hand
        for node, path in found.parameters.items():
            if path.removesuffix(".weight").endswith(COLUMN + ROW):
                assert best.layout(node) == hand.layout(node), path
