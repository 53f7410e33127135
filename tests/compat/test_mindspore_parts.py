"""MindSpore's names one by one: ops, layers, losses and optimizers against torch; datasets; what is not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import unisono.compat.mindspore as ms
import unisono.compat.mindspore.dataset as ds
from unisono.compat.mindspore import Parameter, Tensor, nn, ops
from unisono.compat.mindspore.common import initializer as initial
from unisono.compat.mindspore.context import reset_context
from unisono.compat.mindspore.diagnosis import misplaced_arguments
from unisono.compat.mindspore.layout import _axes_of, _prime_axes, _shapes, _turned
from unisono.compat.mindspore.train import load_checkpoint, load_param_into_net, save_checkpoint
from unisono.compat.mindspore.train.batches import shard_counts
from unisono.errors import UsageError

X = torch.linspace(-2, 3, 24).reshape(4, 6)
Y = torch.linspace(1, 2, 24).reshape(4, 6)
CUBE = torch.linspace(-1, 1, 24).reshape(2, 3, 4)

# An op, what it is given, and what torch makes of that.
OPS: list[tuple[Any, tuple[Any, ...], Callable[..., torch.Tensor]]] = [
    (ops.MatMul(transpose_b=True), (X, Y), lambda x, y: x @ y.t()),
    (ops.MatMul(transpose_a=True), (X, Y), lambda x, y: x.t() @ y),
    (ops.BatchMatMul(transpose_b=True), (CUBE, CUBE), lambda x, y: x @ y.mT),
    (ops.ReLU(), (X,), F.relu),
    (ops.Sigmoid(), (X,), torch.sigmoid),
    (ops.Tanh(), (X,), torch.tanh),
    (ops.GeLU(), (X,), lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    (ops.Exp(), (X,), torch.exp),
    (ops.Log(), (Y,), torch.log),
    (ops.Sqrt(), (Y,), torch.sqrt),
    (ops.Square(), (X,), lambda x: x * x),
    (ops.Neg(), (X,), lambda x: -x),
    (ops.Abs(), (X,), torch.abs),
    (ops.Add(), (X, Y), lambda x, y: x + y),
    (ops.Sub(), (X, Y), lambda x, y: x - y),
    (ops.Mul(), (X, Y), lambda x, y: x * y),
    (ops.Div(), (X, Y), lambda x, y: x / y),
    (ops.RealDiv(), (X, Y), lambda x, y: x / y),
    (ops.Pow(), (Y, 3), lambda y, n: y**n),
    (ops.Maximum(), (X, Y), torch.maximum),
    (ops.Minimum(), (X, Y), torch.minimum),
    (ops.BiasAdd(), (X, Y[0]), lambda x, b: x + b),
    (ops.Softmax(), (X,), lambda x: F.softmax(x, -1)),
    (ops.LogSoftmax(0), (X,), lambda x: F.log_softmax(x, 0)),
    (ops.ReduceSum(), (X,), torch.sum),
    (ops.ReduceSum(keep_dims=True), (X, 1), lambda x, dim: x.sum(dim, keepdim=True)),
    (ops.ReduceMean(), (X, (0, 1)), lambda x, dims: x.mean(dims)),
    (ops.ReduceMax(), (X, 0), lambda x, dim: x.amax(dim)),
    (ops.Reshape(), (X, (6, 4)), lambda x, shape: x.reshape(shape)),
    (ops.Transpose(), (CUBE, (2, 0, 1)), lambda x, dims: x.permute(dims)),
    (ops.ExpandDims(), (X, 0), lambda x, dim: x[None]),
    (ops.Squeeze(0), (X[None],), lambda x: x[0]),
    (ops.Cast(), (X, ms.float64), lambda x, dtype: x.double()),
    (ops.Concat(1), ((X, Y),), lambda both: torch.cat(both, 1)),
    (ops.Gather(), (X, torch.tensor([[0, 2], [1, 1]]), 0), lambda x, i, dim: x[i]),
    (ops.Gather(), (CUBE, torch.tensor([2, 0]), 1), lambda x, i, dim: x[:, i]),
]


@pytest.mark.parametrize(("op", "given", "torchs"), OPS, ids=[op.name for op, *_ in OPS])
def test_an_op_is_torchs(op: Any, given: tuple[Any, ...], torchs: Callable[..., torch.Tensor]) -> None:
    torch.testing.assert_close(op(*given), torchs(*given))


def test_functions_are_torchs() -> None:
    torch.testing.assert_close(ops.softmax(X, axis=0), F.softmax(X, 0))
    torch.testing.assert_close(ops.transpose(CUBE, (1, 0, 2)), CUBE.permute(1, 0, 2))
    torch.testing.assert_close(ops.cat((X, Y), axis=1), torch.cat((X, Y), 1))
    labels = torch.tensor([0, 5, 2, 1], dtype=torch.int32)
    torch.testing.assert_close(ops.cross_entropy(X, labels), F.cross_entropy(X, labels.long()))


def test_layers_are_torchs_with_mindspores_arguments() -> None:
    dense = nn.Dense(6, 3, activation="relu")
    torch.testing.assert_close(dense(X), F.relu(F.linear(X, dense.weight, dense.bias)))
    assert nn.Dense(6, 3, has_bias=False).bias is None
    image = torch.linspace(-1, 1, 2 * 3 * 7 * 7).reshape(2, 3, 7, 7)
    same = nn.Conv2d(3, 4, 3, stride=2)
    torch.testing.assert_close(same(image), F.conv2d(F.pad(image, (1, 1, 1, 1)), same.weight, stride=2))
    even = nn.Conv2d(3, 4, 2)  # one more zero on the right and below, as MindSpore pads
    torch.testing.assert_close(even(image), F.conv2d(F.pad(image, (0, 1, 0, 1)), even.weight))
    padded = nn.Conv2d(3, 4, 3, pad_mode="pad", padding=2, has_bias=True)
    torch.testing.assert_close(padded(image), F.conv2d(image, padded.weight, padded.bias, padding=2))
    valid = nn.Conv2d(3, 4, 3, pad_mode="valid")
    assert valid(image).shape == (2, 4, 5, 5)
    torch.testing.assert_close(nn.MaxPool2d(2, 2)(image), F.max_pool2d(image, 2, 2))
    torch.testing.assert_close(nn.LayerNorm((6,))(X), F.layer_norm(X, (6,), eps=1e-7))
    table = nn.Embedding(5, 3)
    ids = torch.tensor([4, 0])
    torch.testing.assert_close(table(ids), table.embedding_table[ids])
    torch.testing.assert_close(nn.Flatten()(image), image.flatten(1))
    for cell, function in (
        (nn.Sigmoid(), torch.sigmoid),
        (nn.Tanh(), torch.tanh),
        (nn.Softmax(), lambda x: F.softmax(x, -1)),
    ):
        torch.testing.assert_close(cell(X), function(X))
    chain = nn.SequentialCell([nn.Dense(6, 3), nn.GELU()])
    torch.testing.assert_close(chain(X), F.gelu(F.linear(X, chain[0].weight, chain[0].bias), approximate="tanh"))


def test_layers_that_training_changes() -> None:
    """In MindSpore a Cell is not in training until it is set so."""
    image = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    torch.testing.assert_close(nn.AvgPool2d(2, 2)(image), F.avg_pool2d(image, 2, 2))
    assert nn.Dropout(p=0.5)(X) is X
    dropped = nn.Dropout(keep_prob=0.75).set_train()(torch.ones(10_000))
    assert 0.2 < (dropped == 0).float().mean() < 0.3
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    ours, torchs = nn.BatchNorm2d(3, momentum=0.8), torch.nn.BatchNorm2d(3, momentum=0.2)
    torch.testing.assert_close(ours(image), torchs.eval()(image))
    torch.testing.assert_close(ours.set_train()(image), torchs.train()(image))
    torch.testing.assert_close(ours.moving_mean, torchs.running_mean)
    torch.testing.assert_close(ours.moving_variance, torchs.running_var)
    with pytest.raises(UsageError, match="BatchNorm1d takes tensors of 2 dims"):
        nn.BatchNorm1d(3)(image)


def test_learning_rates_of_steps() -> None:
    assert nn.piecewise_constant_lr([2, 5], [0.1, 0.01]) == [0.1, 0.1, 0.01, 0.01, 0.01]
    assert nn.cosine_decay_lr(0.0, 1.0, 4, 1, 2) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert nn.exponential_decay_lr(1.0, 0.25, 4, 2, 2) == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert nn.exponential_decay_lr(1.0, 0.25, 4, 2, 2, is_stair=True) == [1.0] * 4
    assert nn.warmup_lr(0.4, 6, 2, 2) == pytest.approx([0.0, 0.0, 0.2, 0.2, 0.4, 0.4])
    assert nn.SGD([Parameter(X)], nn.piecewise_constant_lr([1, 2], [0.1, 0.01])).rate(7) == 0.01
    with pytest.raises(UsageError, match="expected rising steps"):
        nn.piecewise_constant_lr([2, 2], [0.1, 0.01])


def test_losses_are_torchs() -> None:
    labels = torch.tensor([0, 5, 2, 1], dtype=torch.int32)
    torch.testing.assert_close(nn.MSELoss()(X, Y), F.mse_loss(X, Y))
    torch.testing.assert_close(nn.L1Loss("sum")(X, Y), F.l1_loss(X, Y, reduction="sum"))
    sparse = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    torch.testing.assert_close(sparse(X, labels), F.cross_entropy(X, labels.long()))
    dense = nn.SoftmaxCrossEntropyWithLogits()
    one_hot = F.one_hot(labels.long(), 6).float()
    torch.testing.assert_close(dense(X, one_hot), F.cross_entropy(X, labels.long(), reduction="none"))
    torch.testing.assert_close(nn.CrossEntropyLoss()(X, labels), F.cross_entropy(X, labels.long()))


def test_optimizers_do_mindspores_steps() -> None:
    """Momentum and Adam as MindSpore's documents write them, beside what is made here."""
    draws = [torch.linspace(-1, 1, 5) * (step + 1) for step in range(4)]
    start = torch.linspace(0.5, 1.5, 5)
    made = {
        "momentum": nn.Momentum([Parameter(start)], 0.1, 0.9),
        "nesterov": nn.Momentum([Parameter(start)], 0.1, 0.9, use_nesterov=True),
        "adam": nn.Adam([Parameter(start)], 0.1, eps=1e-3),
        "decayed": nn.AdamWeightDecay([Parameter(start)], 0.1, weight_decay=0.1),
    }
    for name, settings in made.items():
        weight, p = torch.nn.Parameter(start.clone()), start.clone()
        optimizer = settings.make([weight])
        v, m = torch.zeros(5), torch.zeros(5)
        for t, gradient in enumerate(draws, start=1):
            weight.grad = gradient.clone()
            optimizer.step()
            if name == "decayed":
                m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
                p = p - 0.1 * (m / (v.sqrt() + 1e-6) + 0.1 * p)
            elif name == "adam":
                m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
                p = p - 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-3)
            else:
                v = 0.9 * v + gradient
                p = p - 0.1 * (gradient + 0.9 * v if name == "nesterov" else v)
        torch.testing.assert_close(weight.detach(), p, rtol=1e-6, atol=1e-7)


class Inner(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((2, 3)), ms.float32))
        self.frozen = Parameter(Tensor(np.ones(2), ms.float32), requires_grad=False)


class Outer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.own = Parameter(Tensor([1.0, 2.0]), name="mine")
        self.matmul = ops.MatMul()


def test_cells_and_parameters_have_mindspores_names(tmp_path: Path) -> None:
    net = Outer()
    assert set(net.parameters_dict()) == {"mine", "inner.weight", "inner.frozen"}
    assert [p.name for p in net.trainable_params()] == ["mine", "inner.weight"]
    assert [p.name for p in net.untrainable_params()] == ["inner.frozen"]
    assert list(net.name_cells()) == ["inner"]  # an op is no cell
    assert net.matmul.instance_name == "matmul"
    with pytest.raises(UsageError, match=r"Outer has no construct\(\)"):
        net(X)
    save_checkpoint(net, str(tmp_path / "net"))
    other = Outer()
    with torch.no_grad():
        for parameter in other.get_parameters():
            parameter.zero_()
    assert load_param_into_net(other, load_checkpoint(str(tmp_path / "net.ckpt"))) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    with pytest.raises(UsageError, match="there is no such file"):
        load_checkpoint(str(tmp_path / "nowhere.ckpt"))


def test_initial_values_are_those_of_the_seed() -> None:
    ms.set_seed(4)
    first = initial.initializer("normal", [400, 5])
    again = initial.initializer("normal", [400, 5])
    ms.set_seed(4)
    assert torch.equal(first, initial.initializer(initial.Normal(), [400, 5]))
    assert not torch.equal(first, again)
    assert first.std().item() == pytest.approx(0.01, rel=0.1)
    assert initial.initializer("ones", 3).tolist() == [1, 1, 1]
    assert initial.initializer(0.5, [2]).tolist() == [0.5, 0.5]
    assert initial.initializer("uniform", [1000]).abs().max() <= 0.07
    with pytest.raises(UsageError, match=r"initializer\('normall'\): did you mean 'normal'\?"):
        initial.initializer("normall", [2])


def test_datasets() -> None:
    rows = ds.NumpySlicesDataset({"x": np.arange(10), "y": np.arange(10) * 2}, shuffle=False)
    batched = rows.map(lambda x: x + 1, "x").batch(4)
    assert [x.tolist() for x, _ in batched] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert batched.get_dataset_size() == 3
    assert rows.batch(4, drop_remainder=True).repeat(2).get_dataset_size() == 4
    assert next(rows.create_dict_iterator())["y"].item() == 0
    shuffled = ds.NumpySlicesDataset({"x": np.arange(10)})
    orders = [[int(x) for (x,) in shuffled] for _ in range(2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(10))
    shards = [ds.NumpySlicesDataset({"x": np.arange(10)}, num_shards=2, shard_id=shard) for shard in range(2)]
    assert sorted(int(x) for shard in shards for (x,) in shard) == list(range(10))
    with pytest.raises(UsageError, match="rows of 2 arrays, but its columns are"):
        list(ds.GeneratorDataset(lambda: iter([(1, 2)]), ["x"]))
    assert shard_counts(((2, 2), (4, 1)), [(1, 2), (1, 3)], ["x", "y"], 4) == [(2, 2), (4, 1)]


def make(batch_size: int, in_dim: int, steps: int) -> Callable[[], Any]:
    def generate() -> Any:
        for _ in range(steps):
            yield np.zeros((batch_size, in_dim))

    return generate


var_steps, var_in_dim, var_batch_size = 3, 8, 2
IN_ORDER = make(var_batch_size, var_in_dim, var_steps)


def swapped(batch_size: int, in_dim: int, steps: int) -> Callable[[], Any]:
    def generate() -> Any:
        yield np.zeros((batch_size, in_dim))

    return generate


SWAPPED = swapped(var_batch_size, var_steps, var_in_dim)


def test_arguments_out_of_their_places_are_found() -> None:
    assert misplaced_arguments(IN_ORDER) is None
    found = misplaced_arguments(SWAPPED)
    assert found is not None
    text = str(found)
    assert "swapped(batch_size, in_dim, steps) is called at test_mindspore_parts.py:" in text
    assert (
        "with var_steps=3 as in_dim and var_in_dim=8 as steps; call swapped(var_batch_size, var_in_dim, var_steps)"
        in text
    )
    assert misplaced_arguments(lambda: 1) is None
    assert misplaced_arguments(None) is None


def test_a_mesh_of_strategies() -> None:
    assert set(_shapes(8)) == {(8,), (2, 4), (4, 2), (2, 2, 2)}
    assert _turned((2, 4), (2, 4)) == 0
    assert _turned((2, 4), (4, 2)) == 1
    assert _turned((2, 4), (8,)) is None
    assert _turned((8, 1), (2, 4)) == 0
    assert _axes_of((4, 1), (2, 4)) == {1}
    assert [_prime_axes(ranks) for ranks in (2, 6, 8, 16)] == [(2,), (2, 3), (2, 2, 2), (2, 2, 4)]


def test_names_that_are_not_there_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "C.UTF-8")
    with pytest.raises(AttributeError, match=r"mindspore\.nn\.Dens is not one of .* did you mean Dense\?"):
        _ = nn.Dens
    with pytest.raises(ImportError, match=r"mindspore\.ops\.MatMull is not one of .* did you mean MatMul\?"):
        from unisono.compat.mindspore.ops import MatMull  # noqa: F401
    assert not hasattr(ms, "ops_that_nobody_has")
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    with pytest.raises(AttributeError, match="您要找的是 Dense 吗"):
        _ = nn.Dens


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ms.set_context(save_graph=2), "did you mean save_graphs"),
        (lambda: ms.set_context(save_graphs=7), "expected 0, 1, 2 or 3"),
        (lambda: ms.set_auto_parallel_context(search_mode="recursive"), "did you mean 'recursive_programming'"),
        (lambda: ms.set_auto_parallel_context(parallel_mode="auto"), "expected one of stand_alone"),
        (lambda: ms.set_auto_parallel_context(parallel_mode="hybrid_parallel"), "leaves the collectives"),
        (lambda: ms.set_auto_parallel_context(pipeline_stages=2), "MindSpore would cut the net"),
        (lambda: ms.set_auto_parallel_context(strategy_ckpt_load_file="x"), "not read from files"),
        (lambda: ms.set_auto_parallel_context(dataset_strategy="half"), "expected 'data_parallel', 'full_batch'"),
        (lambda: ops.MatMul().shard(((2, 0), (1, 1))), "expected whole numbers of at least 1"),
        (lambda: ops.MatMul()(X, X), r"MatMul takes an input of 4 columns, .*but its input 0 has shape \(4, 6\)"),
        (lambda: nn.Momentum([], 0.1, 0.9), r"as net.trainable_params\(\) gives them"),
        (lambda: nn.SGD([Parameter(X)], "fast"), "expected a number, or one for each step"),
        (lambda: ms.Model(nn.ReLU(), optimizer=torch.optim.SGD([Parameter(X)])), "expected one of mindspore.nn"),  # type: ignore[arg-type]
        (lambda: ms.Model(nn.ReLU(), metrics={"f1"}), "expected names among loss"),
    ],
)
def test_bad_input_is_one_sentence(call: Callable[[], Any], says: str) -> None:
    reset_context()
    with pytest.raises(UsageError, match=says):
        call()
    reset_context()
