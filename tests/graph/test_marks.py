"""Marks count or are errors; propagation keeps them and gives the rest what costs least."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.graph import hugging_face
from unisono.errors import UsageError
from unisono.graph.capture.trace import Trace, trace
from unisono.graph.placement import cost
from unisono.graph.placement.assignment import Assignment
from unisono.graph.placement.find import find
from unisono.graph.placement.propagate import propagate
from unisono.graph.placement.strategy import batch_marks
from unisono.mesh.mesh import Mesh
from unisono.mesh.route import find_route

R, S = uni.Replicate(), uni.Shard
MESH = Mesh.describe((2, 4), ("dp", "mp"))
EXAMPLE = (torch.zeros(16, 32), torch.zeros(16, 16))


class Net(nn.Module):
    """The quickstart of seeds/003: one hidden layer, with one matmul marked."""

    def __init__(self, in_strategy: Any = ((2, 4), (4, 1))) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16))
        self.weight2 = nn.Parameter(torch.randn(16, 16))
        self.matmul = uni.shard(torch.matmul, in_strategy=in_strategy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.relu(self.matmul(x, self.weight)), self.weight2)


def _forward_collectives(assignment: Assignment) -> list[tuple[str, str, tuple[int, ...]]]:
    """(source, kind, axes) of everything that communicates in the forward pass."""
    found = []
    for move in assignment.reshards():
        route = find_route(move.spec.shape, 4, assignment.mesh.shape, move.current, move.wanted)
        found += [(move.source, step.kind, step.axes) for step in route if step.communicates]
    return found


def test_the_quickstart_gives_the_published_strategies() -> None:
    traced = trace(Net(), (EXAMPLE[0], None))
    found = propagate(traced, MESH, fully_use_devices=True)
    assert found.strategy("matmul") == ((2, 4), (4, 1))
    assert found.strategy("relu") == ((2, 4),)
    assert found.strategy("matmul_1") == ((2, 4), (4, 1))
    assert [found.local_shape(name) for name in ("input_0", "p_weight", "matmul")] == [(8, 8), (8, 16), (8, 16)]
    assert found.local_shape("relu") == (8, 4)
    assert [found.local_shape(name) for name in ("p_weight2", "matmul_1")] == [(4, 16), (8, 16)]
    # Where MindSpore sums over (0, 1, 2, 3) and slices, the sum is scattered at once, for half the bytes.
    collective = _forward_collectives(found)
    assert [step for step in collective if step[1] == "reduce_scatter"] == [("matmul", "reduce_scatter", (1,))]
    assert ("matmul", "all_reduce", (1,)) not in collective
    assert MESH.groups("mp")[0] == (0, 1, 2, 3)
    move = next(move for move in found.reshards() if move.source == "matmul")
    all_reduce = 2 * 8 * 16 * 4 * 3 / 4
    assert cost.of_reshard(move, MESH).forward_bytes == all_reduce / 2


def test_without_full_use_a_wave_ends_where_full_is_cheaper() -> None:
    found = propagate(trace(Net(), EXAMPLE, F.mse_loss), MESH)
    assert found.strategy("relu") == ((2, 1),)
    assert found.strategy("matmul_1") == ((2, 1), (1, 1))


def test_two_marks_a_layer_make_megatrons_layout() -> None:
    mesh = Mesh.describe((2, 2), ("dp", "tp"))
    for name, columns, rows in (
        ("llama", ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")),
        ("bert", ("query", "key", "value", "intermediate.dense"), ("attention.output.dense", "0.output.dense")),
    ):
        model = hugging_face.model(name)
        for parameter in dict(model.named_parameters()):
            if parameter.endswith(("q_proj.weight", "up_proj.weight", "query.weight", "intermediate.dense.weight")):
                uni.mark(model, parameter, mesh, [R, S(0)])
        traced = trace(model, hugging_face.batch(name), hugging_face.loss)
        found = find(traced, mesh)
        for node, parameter in traced.parameters.items():
            layer = parameter.removesuffix(".weight")
            sharded = S(0) if layer.endswith(columns) else S(1) if layer.endswith(rows) else None
            if sharded is not None and parameter.endswith(".weight"):
                assert found.layout(node) == (R, sharded), parameter
        tensor_parallel = [step for step in _forward_collectives(found) if step[2] == (1,)]
        assert [kind for _, kind, _ in tensor_parallel] == ["all_reduce"] * 2  # one a half of the layer
        assert not found.notes


def test_fused_projections_are_split_part_by_part() -> None:
    mesh = Mesh.describe((1, 2), ("dp", "tp"))
    model = hugging_face.model("gpt2").eval()
    for parameter in ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"):
        uni.mark(model, parameter, mesh, [R, S(1)])
    found = propagate(trace(model, hugging_face.batch("gpt2"), hugging_face.loss, unpacked=True), mesh)
    for part in range(3):
        assert found.layout(f"p_transformer_h_0_attn_c_attn_weight_part{part}") == (R, S(1))
    assert found.layout("p_transformer_h_0_attn_c_proj_weight") == (R, S(0))
    assert found.layout("p_transformer_h_0_mlp_c_proj_weight") == (R, S(0))
    assert [kind for _, kind, axes in _forward_collectives(found) if axes == (1,)] == ["all_reduce"] * 2


class Marked(nn.Module):
    """Marks of every kind inside a forward."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = uni.shard_tensor(x, self.mesh, [S(0), R])
        hidden = uni.shard_op(self.up, self.mesh, inputs=[None], outputs=[[S(0), S(1)]])(x)
        return uni.reshard(self.down(F.relu(hidden)), self.mesh, [S(0), S(1)]) * 2


def test_marks_in_a_forward_are_kept() -> None:
    traced = trace(Marked(MESH), (torch.zeros(4, 8), None))
    found = propagate(traced, MESH)
    assert found.wanted("linear", 0) == (S(0), R)
    assert found.layout("linear") == (S(0), S(1))
    assert found.layout("p_up_weight") == (R, S(0))
    assert found.wanted("mul", 0) == (S(0), S(1))
    x = torch.randn(4, 8)
    model = Marked(MESH)
    torch.testing.assert_close(model(x), F.relu(x @ model.up.weight.T) @ model.down.weight.T * 2)  # without ranks


def test_a_parameter_is_marked_through_its_tensor_too() -> None:
    model = Net()
    assert uni.shard_tensor(model.weight2, MESH, [R, S(1)]) is model.weight2
    found = propagate(trace(model, EXAMPLE, F.mse_loss), MESH)
    assert found.layout("p_weight2") == (R, S(1))
    assert found.wanted("matmul_1", 1) == (R, S(1))


def test_a_dropped_mark_is_an_error() -> None:
    model = Net()
    uni.shard(torch.relu, in_strategy=((2, 4),))
    with pytest.raises(UsageError, match=r"relu marked at test_marks.py:\d+: .* thrown away and never called"):
        trace(model, EXAMPLE, F.mse_loss)
    trace(model, EXAMPLE, F.mse_loss)  # it is said once
    model.second = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"second .* was not called"):
        trace(model, EXAMPLE, F.mse_loss)
    model.second.called = True  # its end is not another test's


def _returns_another() -> Any:
    marked = uni.shard(torch.relu, in_strategy=((2, 4),))  # noqa: F841 (so it is dropped)
    return torch.relu


def test_a_model_that_is_dropped_has_thrown_no_mark_away() -> None:
    """As where a cell of a notebook is run again."""

    def made() -> nn.Module:
        model = Net()
        model.second = uni.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))  # type: ignore[assignment]
        return model

    model = made()
    model = made()
    del model
    gc.collect()
    trace(Net(), EXAMPLE, F.mse_loss)
    _returns_another()
    with pytest.raises(UsageError, match="thrown away and never called"):
        trace(Net(), EXAMPLE, F.mse_loss)


class Dropping(nn.Module):
    """Marks in its forward, and drops what the mark returned."""

    def __init__(self, drop: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        self.drop(hidden)
        return F.relu(hidden)


@pytest.mark.parametrize(
    "drop",
    [
        lambda hidden: uni.shard(torch.relu, ((2, 4),)) and None,
        lambda hidden: uni.reshard(hidden, MESH, [S(0), S(1)]),
        lambda hidden: uni.shard_tensor(hidden, MESH, [S(0), S(1)]),
        lambda hidden: uni.reshard(F.gelu(hidden), MESH, [S(0), S(1)]),
        lambda hidden: uni.shard_op(F.gelu, MESH, inputs=[[S(0), S(1)]])(hidden),
        lambda hidden: uni.shard_op(F.gelu, MESH, outputs=[[S(0), S(1)]])(hidden),
        lambda hidden: uni.shard(torch.relu, ((2, 4),))(hidden),
    ],
)
def test_a_mark_that_a_forward_drops_is_an_error_of_that_trace(drop: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(UsageError, match=r"marked at test_marks.py:\d+.* (discarded|thrown away)"):
        trace(Dropping(drop), (torch.zeros(4, 8), None))


class Twice(nn.Module):
    """Marked in two ways, one after the other; what leaves it is marked too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = uni.shard_op(torch.matmul, MESH, inputs=[None, [R, S(0)]])(x, self.weight)
        hidden = uni.reshard(uni.reshard(hidden, MESH, [S(0), R]), MESH, [R, S(1)])
        return uni.reshard(F.relu(hidden), MESH, [S(1), R])


@pytest.mark.parametrize("search", ["propagate", "recursive", "dynamic", "exact"])
def test_marks_of_a_tensor_and_of_an_op_that_takes_it_both_hold(search: str) -> None:
    model = Twice()
    uni.mark(model, "weight", MESH, [R, S(1)])
    found = find(trace(model, (torch.zeros(4, 8), None)), MESH, search)
    assert found.layout("p_weight") == (R, S(1))
    assert found.wanted("matmul", 1) == (R, S(0))
    assert re.search(
        r"p_weight is placed as .*test_marks.* used here as .*test_marks.*redistributed", found.notes["matmul"]
    )
    assert found.wanted("alias_default", 0) == (S(0), R)
    assert found.wanted("relu", 0) == (R, S(1))
    assert found.wanted("alias_default_1", 0) == (S(1), R)


def test_a_parameter_that_is_made_of_a_marked_tensor_is_marked() -> None:
    model = Net()
    model.weight2 = nn.Parameter(uni.shard_tensor(torch.zeros(model.weight2.shape), MESH, [R, S(1)]))
    assert propagate(trace(model, EXAMPLE, F.mse_loss), MESH).layout("p_weight2") == (R, S(1))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (((2,), (4, 1)), r"strategy \(2,\) has 1 numbers for an input of shape \(16, 32\)"),
        (((2, 4),), "names 1 inputs, but was called with 2 tensors"),
        (((3, 4), (4, 1)), "does not divide the input"),
        (((4, 4), (4, 1)), "16 shards, which do not divide the 8 ranks"),
        (((8, 1), (2, 4)), "cannot be satisfied on"),
        (((1, 2), (1, 4)), "cannot be satisfied on"),
        (((2, 2), (2, 1)), "no axes multiply to its numbers"),
        (((2, 0), (4, 1)), "expected whole numbers of at least 1"),
        (((4, 2), (1, 8)), "cannot be satisfied"),
        ((16, 2), "expected a tuple of tuples"),
    ],
)
def test_a_strategy_that_is_off(strategy: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        propagate(trace(Net(strategy), EXAMPLE, F.mse_loss), MESH)


def test_a_parameter_is_marked_in_one_way() -> None:
    model = nn.Linear(8, 4)
    uni.mark(model, "weight", MESH, [R, S(0)])
    uni.mark(model, "weight", MESH, [R, S(0)])
    with pytest.raises(UsageError, match=r"weight is marked twice: .*test_marks.py.* and .*build the model again"):
        uni.mark(model, "weight", MESH, [R, S(1)])
    uni.shard_tensor(model.bias, MESH, [R, S(0)])
    uni.mark(model, "bias", MESH, [R, R])
    with pytest.raises(UsageError, match=r"bias is marked twice: .*test_marks.py.* and .*build the model again"):
        trace(model, (torch.zeros(4, 8), None))
    again = Again()
    uni.mark(again, "weight", MESH, [R, S(1)])
    with pytest.raises(UsageError, match="weight is marked twice"):
        trace(again, (torch.zeros(4, 8), None))


class Again(nn.Linear):
    """Marks its weight as it runs."""

    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, uni.shard_tensor(self.weight, MESH, [R, S(0)]))


def test_marks_that_contradict_or_do_not_fit() -> None:
    model = Net()
    with pytest.raises(UsageError, match=r"no parameter or buffer 'other.weight'"):
        uni.mark(model, "other.weight", MESH, [R, R])
    with pytest.raises(UsageError, match="expected a list of 2"):
        uni.mark(model, "weight", MESH, [R])
    with pytest.raises(UsageError, match="no parameter or buffer 'wait'; expected a name such as weight"):
        uni.mark(model, "wait", MESH, [R, R])
    with pytest.raises(UsageError, match="weight is marked without placements"):
        uni.mark(model, "weight", MESH)
    with pytest.raises(UsageError, match=r"mesh is None; expected a uni.Mesh"):
        uni.mark(model, "weight", None, [R, R])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"placements 3 on .*expected a list of 2"):
        uni.shard_op(torch.matmul, MESH, inputs=[3, None])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"shard\(matmul\) has no strategy"):
        uni.shard(torch.matmul, in_strategy=(None, None))
    with pytest.raises(UsageError, match=r"mark\(3, 'weight'\): expected an nn.Module"):
        uni.mark(3, "weight", MESH, [R, R])  # type: ignore[arg-type]
    for verb in (uni.shard_tensor, uni.reshard):
        with pytest.raises(UsageError, match="expected a tensor"):
            verb([1, 2], MESH, [R, R])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected Replicate\(\), as a number cannot be sharded"):
        uni.shard_tensor(torch.tensor(1.0), MESH, [S(0), R])
    for make in (lambda: uni.shard(3, ((2, 4),)), lambda: uni.shard_op(3, MESH, inputs=[[R, R]])):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="expected a function or a module"):
            make()
    three = Mesh.describe((3,), ("tp",))
    for search in ("propagate", "recursive", "dynamic", "exact"):
        uneven = nn.Linear(8, 4)
        uni.mark(uneven, "weight", three, [S(0)])
        with pytest.raises(
            UsageError, match=r"weight \(marked at .*\) cannot be placed as \[S0\] .* its sizes are \(4, 8\)"
        ):
            find(trace(uneven, (torch.zeros(4, 8), None)), three, search)
    uni.mark(model, "weight", Mesh.describe((8,), ("tp",)), [S(0)])
    with pytest.raises(UsageError, match=r"a mark is for Mesh\(tp=8\) .* but the program is for"):
        propagate(trace(model, EXAMPLE, F.mse_loss), MESH)
    twice = trace(Net(), EXAMPLE, F.mse_loss)
    with pytest.raises(UsageError, match="marked twice"):
        propagate(twice, MESH, [*batch_marks(twice, MESH, "dp"), *batch_marks(twice, MESH, "mp")])


def test_an_op_without_a_rule_is_full_and_noted() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x) * 2

    traced: Trace = trace(Odd(), (torch.zeros(8, 4, 4), None))
    found = find(traced, MESH)
    ((name, note),) = found.notes.items()
    assert "no rule for aten.linalg_matrix_exp.default" in note
    assert found.layout(name) == (R, R)


def _trace_of_a_sharded_model(comm: Any) -> tuple[Any, ...]:
    mesh = uni.Mesh((comm.size,), ("tp",))
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    model[0].weight = uni.shard_tensor(model[0].weight, mesh, [S(0)])  # type: ignore[assignment]
    dropped = model[2].weight
    uni.shard_tensor(dropped, mesh, [S(1)])  # what it returns is dropped: the parameter itself is marked
    found = propagate(trace(model, (torch.zeros(4, 8), None)), mesh)
    return found.layout("p_0_weight"), found.layout("p_2_weight"), found.layout("relu"), found.local_shape("p_0_weight")


def test_parameters_that_are_on_a_mesh_count_as_marked(pools: Any) -> None:
    for answer in pools("gloo", 2).run(_trace_of_a_sharded_model):
        assert answer == ((S(0),), (S(1),), (S(1),), (8, 8))
