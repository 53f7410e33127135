"""MindSpore's programs on many ranks: strategies, searches and settings give the losses of one device."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import unisono.compat.mindspore as ms
import unisono.compat.mindspore.dataset as ds
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.compat.mindspore import Parameter, nn, ops
from unisono.compat.mindspore.common.initializer import initializer
from unisono.compat.mindspore.context import reset_context
from unisono.compat.mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]
IN, HIDDEN, OUT, STEPS, EPOCHS = 32, 16, 16, 3, 2


class TwoProducts(nn.Cell):
    """strategy: of the first product."""

    def __init__(self, strategy: Any = None) -> None:
        super().__init__()
        self.first = Parameter(initializer("normal", [IN, HIDDEN]), "w")
        self.second = Parameter(initializer("normal", [HIDDEN, OUT]), "w2")
        self.product = ops.MatMul() if strategy is None else ops.MatMul().shard(strategy)
        self.active = ops.ReLU()
        self.last = ops.MatMul()

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.active(self.product(x, self.first)), self.second)


def batches(samples: int, width: int = IN) -> Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]:
    draw = np.random.default_rng(1)
    given = [(draw.random((samples, width), np.float32), draw.random((samples, OUT), np.float32)) for _ in range(STEPS)]
    return lambda: iter(given)


def of_rank(rank: int, ranks: int, samples: int) -> Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]:
    """The rank's samples of each global batch."""
    own = slice(rank * samples // ranks, (rank + 1) * samples // ranks)
    return lambda: ((x[own], y[own]) for x, y in batches(samples)())


def optimizers(net: nn.Cell) -> dict[str, Any]:
    parameters = net.trainable_params()
    return {
        "momentum": nn.Momentum(parameters, 0.2, 0.1),
        "sgd": nn.SGD(parameters, [0.2, 0.1], weight_decay=0.01),
        "adam": nn.Adam(parameters, 0.01),
    }


class Losses(ms.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def step_end(self, run_context: Any) -> None:
        self.found.append(float(run_context.original_args().net_outputs))


def one_device(samples: int, optimizer: str) -> list[float]:
    """A plain loop of torch over the global batches."""
    ms.set_seed(3)
    net = TwoProducts()
    settings = optimizers(net)[optimizer]
    stepping = settings.make(list(net.parameters()))
    losses = []
    for step, (x, y) in enumerate(itertools.chain(*(batches(samples)() for _ in range(EPOCHS)))):
        stepping.param_groups[0]["lr"] = settings.rate(step)
        loss = F.mse_loss(net(torch.from_numpy(x)), torch.from_numpy(y))
        stepping.zero_grad()
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses


def trained(comm: Communicator, case: dict[str, Any], samples: int, folder: str) -> dict[str, Any]:
    reset_context()
    ms.set_seed(3)
    if folder:
        ms.set_context(mode=ms.GRAPH_MODE, save_graphs=2, save_graphs_path=folder)
    ms.set_auto_parallel_context(**case["parallel"])
    net = TwoProducts(case.get("strategy"))
    losses = Losses()
    callbacks: list[Any] = [losses, LossMonitor(0)]
    if folder:
        config = CheckpointConfig(integrated_save=case.get("integrated", True), keep_checkpoint_max=2)
        callbacks.append(ModelCheckpoint(directory=f"{folder}/{comm.rank}", config=config))
    is_full = case["parallel"].get("dataset_strategy") == "full_batch"
    source = batches(samples) if is_full else of_rank(comm.rank, comm.size, samples)
    model = Model(net, loss_fn=nn.MSELoss(), optimizer=optimizers(net)[case.get("optimizer", "momentum")])
    model.train(EPOCHS, ds.GeneratorDataset(source, ["x", "y"]), callbacks=callbacks)
    reset_context()
    return {
        "losses": losses.found,
        "w": net.first.detach().numpy().copy(),
        "mesh": str(model.program.mesh),
        "zero": model.program._shares is not None,
    }


def test_a_strategy_makes_the_mesh_and_the_others_follow(pools: Pools, tmp_path: Path) -> None:
    """The quickstart's strategies, local shapes and group, on its eight ranks."""
    case = {
        "parallel": {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"},
        "strategy": ((2, 4), (4, 1)),
        "integrated": False,
    }
    found = pools("gloo", 8).run(trained, case, 16, str(tmp_path))
    assert all(each["losses"] == found[0]["losses"] for each in found)
    assert found[0]["losses"] == pytest.approx(one_device(16, "momentum"), abs=1e-6)
    assert found[0]["mesh"] == "Mesh(dp=2, mp=4)"
    (begin,) = (tmp_path / "rank_5").glob("step_parallel_begin_*.ir")
    for op in ("MatMul", "ReLU", "MatMul"):
        assert re.search(rf"= {op}\(", begin.read_text())
    strategies = re.findall(r"instance name: (\w+)\}.* \{in_strategy: (.*)\}", begin.read_text())
    assert strategies == [
        ("product", "((2, 4), (4, 1))"),
        ("active", "((2, 4))"),
        ("last", "((2, 4), (4, 1))"),
    ]
    (execute,) = (tmp_path / "rank_5").glob("18_execute_*.ir")
    lines = execute.read_text().splitlines()
    assert "    : (<Tensor[Float32], (8, 8)>, <Tensor[Float32], (8, 16)>) -> (<Tensor[Float32], (8, 16)>)" in lines
    assert "    : (<Tensor[Float32], (8, 4)>, <Tensor[Float32], (4, 16)>) -> (<Tensor[Float32], (8, 16)>)" in lines
    moved = next(i for i, line in enumerate(lines) if "ReduceScatter" in line)
    assert "group_ranks: 4-5-6-7" in lines[moved]
    assert lines[moved + 1].strip() == ": (<Tensor[Float32], (8, 16)>) -> (<Tensor[Float32], (8, 4)>)"
    for rank in range(8):
        saved = {path.name for path in (tmp_path / str(rank)).iterdir()}
        assert saved == {"CKP-2_2.ckpt", "CKP-2_3.ckpt"}
        shards = torch.load(tmp_path / str(rank) / "CKP-2_3.ckpt", weights_only=True)
        index = rank % 4
        assert np.array_equal(shards["w"].numpy(), found[0]["w"][8 * index : 8 * index + 8])
        assert shards["moments.w2"].shape == (4, 16)


CASES: dict[str, dict[str, Any]] = {
    "recursive": {
        "parallel": {"parallel_mode": "auto_parallel", "search_mode": "recursive_programming"},
        "optimizer": "adam",
    },
    "dynamic, full batch": {
        "parallel": {
            "parallel_mode": "auto_parallel",
            "search_mode": "dynamic_programming",
            "dataset_strategy": "full_batch",
        },
        "strategy": ((2, 2), (2, 1)),
        "optimizer": "sgd",
    },
    "semi-automatic, ZeRO": {
        "parallel": {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True},
        "strategy": ((1, 2), (2, 1)),
    },
    "data, a strategy of the dataset": {
        "parallel": {
            "parallel_mode": "data_parallel",
            "gradients_mean": True,
            "device_num": 4,
            "dataset_strategy": ((4, 1), (4, 1)),
        },
        "strategy": ((3, 1), (1, 1)),  # counts for nothing in this mode
        "optimizer": "adam",
    },
}


@pytest.mark.parametrize("name", CASES)
def test_settings_change_nothing_but_where_it_is_computed(pools: Pools, name: str) -> None:
    case = CASES[name]
    found = pools("gloo", 4).run(trained, case, 8, "")
    assert all(each["losses"] == found[0]["losses"] for each in found)
    assert found[0]["losses"] == pytest.approx(one_device(8, case.get("optimizer", "momentum")), abs=1e-6)
    assert all(np.array_equal(each["w"], found[0]["w"]) for each in found)
    assert found[0]["zero"] == bool(case["parallel"].get("enable_parallel_optimizer"))


class Images(nn.Cell):
    """Layers that draw, that have statistics, and cells within cells."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.front = nn.SequentialCell(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.flat = nn.Flatten()
        self.hidden = nn.Dense(16, 8, activation="relu")
        self.drop = nn.Dropout(p=0.25)
        self.table = Parameter(initializer("he_uniform", [8, 4]))
        self.matmul = ops.MatMul() if strategy is None else ops.MatMul().shard(strategy)
        self.bias = ops.BiasAdd()
        self.offset = Parameter(initializer("zeros", [4]))

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.hidden(self.flat(self.front(x))))
        return self.bias(self.matmul(hidden, self.table), self.offset)


def classified(comm: Communicator, search: str, strategy: Any) -> dict[str, Any]:
    reset_context()
    ms.set_seed(5)
    ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode=search, full_batch=True)
    net = Images(strategy)
    draw = np.random.default_rng(2)
    images = draw.standard_normal((24, 2, 4, 4), np.float32)
    data = {"image": images, "label": (images.mean((1, 2, 3)) > 0).astype(np.int32)}
    dataset = ds.NumpySlicesDataset(data).batch(8)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    optimizer = nn.AdamWeightDecay(net.trainable_params(), nn.cosine_decay_lr(0.0, 0.02, 9, 3, 3), weight_decay=0.01)
    model = Model(net, loss, optimizer, metrics={"loss", "accuracy"})
    losses = Losses()
    model.train(2, dataset, callbacks=losses)
    model.train(1, dataset, callbacks=losses)  # goes on
    measured = model.eval(ds.NumpySlicesDataset(data, shuffle=False).batch(24))
    outputs = model.predict(ms.Tensor(images[:1])).asnumpy()
    reset_context()
    state = {name: value.detach().numpy().copy() for name, value in net.state_dict().items()}
    return {"losses": losses.found, "measured": measured, "outputs": outputs, "state": state}


@pytest.mark.parametrize(
    ("search", "strategy"),
    [
        ("recursive_programming", None),
        pytest.param("sharding_propagation", ((2, 2), (2, 1)), marks=pytest.mark.thorough),
        pytest.param("dynamic_programming", None, marks=pytest.mark.thorough),
    ],
)
def test_a_net_of_layers_is_that_of_one_rank(pools: Pools, search: str, strategy: Any) -> None:
    (one,) = pools("gloo", 1).run(classified, search, strategy)
    for rank in pools("gloo", 4).run(classified, search, strategy):
        assert len(rank["losses"]) == 9
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert rank["measured"] == pytest.approx(one["measured"], abs=1e-5)
        assert set(rank["measured"]) == {"loss", "accuracy"}
        np.testing.assert_allclose(rank["outputs"], one["outputs"], atol=1e-5)
        for name, value in one["state"].items():
            np.testing.assert_allclose(rank["state"][name], value, atol=1e-5, err_msg=name)


# An op, its strategy for four ranks, the shapes that it takes, and what else it takes.
SHARDED: list[tuple[Any, Any, tuple[tuple[int, ...], ...], tuple[Any, ...]]] = [
    (ops.MatMul(transpose_b=True), ((2, 2), (1, 2)), ((8, 8), (4, 8)), ()),
    (ops.MatMul(transpose_a=True), ((1, 2), (1, 2)), ((8, 8), (8, 4)), ()),
    (ops.BatchMatMul(), ((4, 1, 1), (4, 1, 1)), ((8, 2, 4), (8, 4, 2)), ()),
    (ops.BatchMatMul(), ((2, 1, 2), (2, 2, 1)), ((8, 2, 4), (8, 4, 2)), ()),
    (ops.Add(), ((2, 2), (2, 2)), ((8, 4), (8, 4)), ()),
    (ops.BiasAdd(), ((2, 2), (2,)), ((8, 4), (4,)), ()),
    (ops.Sub(), ((4, 1), (4, 1)), ((8, 4), (8, 4)), ()),
    (ops.Mul(), ((2, 2), (1, 2)), ((8, 4), (1, 4)), ()),
    (ops.Div(), ((1, 4), (1, 4)), ((8, 4), (8, 4)), ()),
    (ops.ReLU(), ((2, 2),), ((8, 4),), ()),
    (ops.GeLU(), ((4, 1),), ((8, 4),), ()),
    (ops.Softmax(), ((4, 1),), ((8, 4),), ()),
    (ops.LogSoftmax(0), ((1, 4),), ((8, 4),), ()),
    (ops.ReduceSum(), ((2, 2),), ((8, 4),), (1,)),
    (ops.ReduceSum(keep_dims=True), ((2, 2),), ((8, 4),), ((0, 1),)),
    (ops.ReduceMean(), ((2, 2),), ((8, 4),), (0,)),
    (ops.Transpose(), ((2, 2),), ((8, 4),), ((1, 0),)),
]


class Weighted(nn.Cell):
    """An op of parameters, times the input, so that every tensor of the op has a gradient."""

    def __init__(self, op: Any, shapes: Any, others: Any) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            setattr(self, f"given{number}", Parameter(initializer("he_uniform" if len(shape) > 1 else "normal", shape)))
        self.op, self.others, self.count = op, others, len(shapes)

    def construct(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = self.op(*(getattr(self, f"given{number}") + 1 for number in range(self.count)), *self.others)
        return (made * made * x.mean()).mean() + y.mean()


def sharded_ops(comm: Communicator, chosen: list[int]) -> list[dict[str, Any]]:
    found = []
    for op, strategy, shapes, others in (SHARDED[number] for number in chosen):
        reset_context()
        ms.set_seed(1)
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)
        net = Weighted(copy.deepcopy(op).shard(strategy), shapes, others)
        losses = Losses()
        model = Model(net, optimizer=nn.SGD(net.trainable_params(), 0.1))  # the net gives the loss
        model.train(1, ds.GeneratorDataset(batches(4), ["x", "y"]), callbacks=losses)
        weights = [value.detach().numpy().copy() for value in net.state_dict().values()]
        nodes = [each for each in model.program.lowered.trace.ops if each.path == "op"]
        marked = {mark.node for mark in model.program.lowered.trace.marks}
        found.append({"losses": losses.found, "weights": weights, "marked": any(op.name in marked for op in nodes)})
    reset_context()
    return found


FIRST = [0, 3, 7, 11, 14]


@pytest.mark.parametrize(
    "chosen",
    [FIRST, pytest.param([n for n in range(len(SHARDED)) if n not in FIRST], marks=pytest.mark.thorough)],
    ids=["some", "the others"],
)
def test_ops_with_strategies_are_those_of_one_rank(pools: Pools, chosen: list[int]) -> None:
    (one,) = pools("gloo", 1).run(sharded_ops, chosen)
    for rank in pools("gloo", 4).run(sharded_ops, chosen):
        for number, ours, right in zip(chosen, rank, one, strict=True):
            case = SHARDED[number]
            assert ours["marked"], case
            assert ours["losses"] == pytest.approx(right["losses"], rel=1e-6), case
            for value, expected in zip(ours["weights"], right["weights"], strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=str(case))


class Within(TwoProducts):
    """The op is made in `construct`; one that is never called counts for nothing."""

    def __init__(self) -> None:
        super().__init__(strategy=((1, 3), (3, 1)))

    def construct(self, x: torch.Tensor) -> torch.Tensor:
        product = ops.MatMul().shard(((2, 2), (2, 1)))
        return self.last(self.active(product(x, self.first)), self.second)


def made_within(comm: Communicator) -> tuple[list[float], str]:
    reset_context()
    ms.set_seed(3)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", full_batch=True)
    net, losses = Within(), Losses()
    model = Model(net, nn.MSELoss(), optimizers(net)["momentum"])
    model.train(EPOCHS, ds.GeneratorDataset(batches(8), ["x", "y"]), callbacks=losses)
    reset_context()
    return losses.found, str(model.program.mesh)


def test_strategies_are_those_of_ops_that_are_called(pools: Pools) -> None:
    losses, mesh = pools("gloo", 4).run(made_within)[0]
    assert mesh == "Mesh(dp=2, mp=2)"
    assert losses == pytest.approx(one_device(8, "momentum"), abs=1e-6)


@pytest.mark.thorough
def test_on_mpi_too(pools: Pools) -> None:
    case = CASES["dynamic, full batch"]
    found = pools("mpi", 4).run(trained, case, 8, "")
    assert found[0]["losses"] == pytest.approx(one_device(8, case["optimizer"]), abs=1e-6)


def refused(comm: Communicator) -> list[str]:
    texts = []
    for given in REFUSED:
        reset_context()
        ms.set_auto_parallel_context(**{"parallel_mode": "auto_parallel", **given.get("parallel", {})})
        net = TwoProducts(given.get("strategy"))
        source = given.get("source", batches(4))
        model = Model(net, given.get("loss", nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.1, 0.9))
        with pytest.raises(UsageError) as error:
            model.train(1, ds.GeneratorDataset(source, ["x", "y"]))
        texts.append(str(error.value))
    reset_context()
    return texts


REFUSED: list[dict[str, Any]] = [
    {"strategy": ((2, 4), (4, 1)), "says": "makes 8 shards of input 0, but 2 ranks are running; MindSpore refuses"},
    {"strategy": ((1, 2), (2,)), "says": r"\(2,\) has 1 numbers; MindSpore refuses it too: give one a dim"},
    {"strategy": ((1, 2),), "says": "has strategies of 1 inputs, but the op was called with 2"},
    {"strategy": ((3, 1), (1, 1)), "says": r"cannot be cut into 3 even shards; MindSpore .* \(1, 2, 4, 8\)"},
    {"parallel": {"device_num": 8}, "says": r"device_num=8\), but 2 ranks are running; MindSpore would"},
    {"parallel": {"parallel_mode": "stand_alone"}, "says": "MindSpore would train 2 nets that know nothing"},
    {"parallel": {"parallel_mode": "data_parallel"}, "says": "MindSpore would add up the gradients of 2 ranks"},
    {"parallel": {"dataset_strategy": ((2, 1),)}, "says": "is for 1 columns, but the dataset has 2"},
    {"loss": nn.MSELoss("none"), "says": r"the loss is \(8, 16\), where one number is expected"},
    {
        "source": batches(4, 7),
        "says": r"MatMul \(product\) of TwoProducts takes an input of 32 columns, .* 'x' .*\(4, 7\)",
    },
]


def test_what_mindspore_refuses_is_refused_in_a_sentence(pools: Pools) -> None:
    for rank in pools("gloo", 2).run(refused):
        for given, text in zip(REFUSED, rank, strict=True):
            assert re.search(given["says"], text), text
            assert "\n" not in text
