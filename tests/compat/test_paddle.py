"""Paddle's names: what they compute, and what is refused, in the user's language."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono.compat.paddle as paddle
from unisono.compat.paddle.base import core
from unisono.compat.paddle.base.framework import IrGraph
from unisono.compat.paddle.distributed import fleet
from unisono.compat.paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from unisono.compat.paddle.io import BatchSampler, DataLoader, Dataset, DistributedBatchSampler
from unisono.errors import UsageError
from unisono.plan.plan import Plan


@pytest.fixture(autouse=True)
def _english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")


# ---- what names compute ----------------------------------------------------------------------------------------------


def test_a_linear_has_its_weight_by_inputs_and_outputs() -> None:
    layer = paddle.nn.Linear(3, 5)
    assert tuple(layer.weight.shape) == (3, 5)
    assert layer.bias.abs().max() == 0
    assert layer.weight.abs().max() <= math.sqrt(6 / 8)
    x = paddle.randn([2, 3])
    assert torch.equal(layer(x), x @ layer.weight)
    assert paddle.nn.Linear(3, 5, bias_attr=False).bias is None


def test_momentum_with_l2_decay() -> None:
    parameter = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    optimizer = paddle.optimizer.Momentum(
        learning_rate=0.1, momentum=0.9, weight_decay=paddle.regularizer.L2Decay(0.5), parameters=[parameter]
    )
    value, velocity = parameter.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        (parameter * (step + 1)).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        velocity = 0.9 * velocity + (step + 1 + 0.5 * value)
        value = value - 0.1 * velocity
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-14, atol=0)
    assert parameter.grad is None


def test_labels_with_a_dim_of_one_and_accuracies() -> None:
    scores = paddle.to_tensor([[0.1, 0.5, 0.2, 0.9], [3.0, 1.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.5]])
    label = paddle.to_tensor([[3], [1], [0]], dtype="int64")
    expected = torch.nn.functional.cross_entropy(torch.tensor(scores.numpy()), torch.tensor([3, 1, 0]))
    assert paddle.nn.functional.cross_entropy(input=scores, label=label).item() == expected.item()
    assert paddle.nn.CrossEntropyLoss()(input=scores, label=label).item() == expected.item()
    assert paddle.metric.accuracy(input=scores, label=label, k=1).item() == pytest.approx(1 / 3)
    assert paddle.metric.accuracy(input=scores, label=label, k=3).item() == pytest.approx(2 / 3)
    metric = paddle.metric.Accuracy(topk=(1, 3))
    metric.update(metric.compute(scores, label))
    assert dict(zip(metric.name(), metric.accumulate(), strict=True)) == pytest.approx(
        {"acc_top1": 1 / 3, "acc_top3": 2 / 3}
    )
    with pytest.raises(UsageError, match=r"labels are \[B, 1\] or \[B\]"):
        paddle.nn.functional.cross_entropy(scores, paddle.zeros([3, 4], "int64"))


def test_arguments_that_torch_has_otherwise() -> None:
    """Losses have the labels' shape, dtypes are given, and what would be another dropout is refused."""
    functional = paddle.nn.functional
    scores, label = paddle.randn([3, 4]), paddle.to_tensor([[3], [1], [0]], dtype="int64")
    losses = functional.cross_entropy(scores, label, reduction="none")
    assert losses.shape == (3, 1)
    assert functional.cross_entropy(scores, label[:, 0], reduction="none").shape == (3,)
    assert losses.mean().item() == pytest.approx(functional.cross_entropy(scores, label).item())
    soft = functional.cross_entropy(scores, functional.softmax(scores), reduction="none", soft_label=True)
    assert soft.shape == (3, 1)
    assert functional.softmax(scores, -1, "float64").dtype == torch.float64
    assert not functional.dropout(paddle.ones([100]), 0.5, None, True).all()
    assert functional.dropout(paddle.ones([100]), 0.5, training=False).all()
    for call in (
        lambda: functional.dropout(scores, 0.5, 0),
        lambda: paddle.nn.Dropout(0.5, mode="downscale_in_infer")(scores),
    ):
        with pytest.raises(UsageError, match="each element is dropped for itself"):
            call()


class _Methods(paddle.nn.Layer):
    """Methods whose name torch has too, with another meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(6, 8)

    def forward(self, x: Any) -> Any:
        h = self.linear(x.astype("float32"))
        p, q = h.split(2, -1)
        top = h.reshape([0, 2, 4]).transpose([0, 2, 1]).max(axis=2)
        return (p * q).cast("float32") + top + h.min(-1, keepdim=True) + h.sort(-1)[:, :4] + h.median(-1, keepdim=True)


def _by_torch(model: _Methods, x: torch.Tensor) -> torch.Tensor:
    h = x.float() @ model.linear.weight + model.linear.bias
    ordered = torch.sort(h, -1).values
    middle = (ordered[:, 3:4] + ordered[:, 4:5]) / 2
    return h[:, :4] * h[:, 4:] + torch.maximum(h[:, :4], h[:, 4:]) + ordered[:, :1] + ordered[:, :4] + middle


def test_methods_have_paddles_meaning_in_a_forward_and_torchs_elsewhere() -> None:
    torch.manual_seed(0)
    model, x = _Methods(), torch.randn(5, 6, dtype=torch.float64)
    found = model(paddle.to_tensor(x))
    expected = _by_torch(model, x)
    torch.testing.assert_close(torch.tensor(found.numpy()), expected.detach())
    found.sum().backward()
    mine = model.linear.weight.grad.clone()
    model.clear_gradients()
    expected.sum().backward()
    torch.testing.assert_close(mine, model.linear.weight.grad)
    assert len(x.split(2)) == 3
    assert not hasattr(x, "astype")
    assert torch.nn.MultiheadAttention(6, 2)(x.float(), x.float(), x.float())[0].shape == (5, 6)


def test_methods_of_tensors_are_paddles() -> None:
    x = paddle.to_tensor([[-2.5, 0.5, 0.5], [1.5, -0.5, 1.0]])
    assert [part.shape for part in x.split([1, -1], axis=1)] == [(2, 1), (2, 2)]
    assert x.max(axis=0).tolist() == [1.5, 0.5, 1.0]
    assert x.min().item() == -2.5
    assert x.round().tolist() == [[-3, 1, 1], [2, -1, 1]]
    assert x.sort(axis=1, descending=True)[0].tolist() == [0.5, 0.5, -2.5]
    assert x.median().item() == 0.5
    assert x.equal(x).tolist() == [[True] * 3] * 2
    assert x.gather(paddle.to_tensor([1, 1]), axis=0).shape == (2, 3)
    assert x.unsqueeze([0, -1]).shape == (1, 2, 3, 1)
    assert x.matmul(x, transpose_y=True).shape == (2, 2)
    assert (x > 0).where(x, x * 0).min().item() == 0
    x.stop_gradient = False
    x.max(axis=1).sum().backward()
    assert x.grad.tolist() == [[0, 1, 1], [1, 0, 0]]  # each of those that are equal, as in Paddle
    with pytest.raises(UsageError, match="how many equal parts, and they must divide 3"):
        x.split(2, axis=1)


def test_states_in_files(tmp_path: Path) -> None:
    layer = paddle.nn.Linear(2, 2)
    paddle.save(layer.state_dict(), tmp_path / "folder" / "model.pdparams")
    loaded = paddle.load(tmp_path / "folder" / "model.pdparams")
    assert torch.equal(loaded["weight"], layer.weight)
    with pytest.raises(UsageError, match="no such file"):
        paddle.load(tmp_path / "other.pdparams")
    (tmp_path / "paddles.pdparams").write_bytes(b"another pickle")
    with pytest.raises(UsageError, match=r"no file of paddle\.save under unisono"):
        paddle.load(tmp_path / "paddles.pdparams")


def test_numpy_reads_tensors_with_gradients() -> None:
    layer = paddle.nn.Linear(3, 1)
    loss = paddle.mean(x=layer(paddle.ones([2, 3])))
    assert isinstance(loss, paddle.Tensor)
    assert np.array(loss) == loss.numpy() == float(loss) == loss.item()
    assert f"{loss:.3f}" == "%.3f" % loss  # noqa: UP031  # as Paddle's programs print
    assert loss.stop_gradient is False
    x = paddle.ones([2])
    x.stop_gradient = False
    assert x.requires_grad
    label = paddle.zeros([2], "int64")
    label.stop_gradient = False  # has no gradient, and is taken
    assert label.stop_gradient


@pytest.mark.parametrize(
    ("rank", "drop_last", "expected"),
    [
        (0, False, [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18]]),
        (1, False, [[4, 5, 6, 7], [12, 13, 14, 15], [19, 20, 0]]),
        (1, True, [[4, 5, 6, 7], [12, 13, 14, 15]]),
    ],
)
def test_data_ranks_read_runs_of_samples(rank: int, drop_last: bool, expected: list[list[int]]) -> None:
    """21 samples: the first one is read twice, so that both ranks have as many."""
    sampler = DistributedBatchSampler(range(21), 4, num_replicas=2, rank=rank, drop_last=drop_last)
    assert list(sampler) == expected
    assert len(sampler) == len(expected)


def test_data_ranks_share_a_shuffle() -> None:
    ranks = [DistributedBatchSampler(range(40), 5, 2, rank, shuffle=True) for rank in range(2)]
    for epoch in range(2):
        for each in ranks:
            each.set_epoch(epoch)
        read = [[index for batch in each for index in batch] for each in ranks]
        assert sorted(read[0] + read[1]) == list(range(40))
    assert read[0] != sorted(read[0])


class _Drawn(Dataset):
    def __getitem__(self, index: int) -> Any:
        return np.random.random([3]).astype("float32"), np.array([index])

    def __len__(self) -> int:
        return 8


def test_a_loader_is_called_and_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.compat.paddle import io

    loader = DataLoader(_Drawn(), batch_sampler=BatchSampler(_Drawn(), batch_size=4), num_workers=1)
    batches = [*loader(), *loader]
    assert len(loader) == 2
    assert [image.shape for image, _ in batches] == [(4, 3)] * 4
    assert batches[1][1].reshape(-1).tolist() == [4, 5, 6, 7]
    assert all(type(each) is paddle.Tensor for batch in batches for each in batch)
    assert not torch.equal(batches[0][0], batches[2][0])  # another epoch draws other numbers
    np.random.seed(3)  # as the program left it
    drawn = np.random.RandomState(3).random([3]).astype("float32")
    assert np.array_equal(next(iter(DataLoader(_Drawn())))[0][0], drawn)
    monkeypatch.setattr(io, "_UNTOUCHED", before := np.random.get_state())  # the program has drawn nothing
    first = [batch[0] for batch in DataLoader(_Drawn())]
    assert io._is_same_state(before, np.random.get_state())
    assert not torch.equal(first[0], first[1])


def test_layers_of_a_pipeline_are_divided() -> None:
    descs = [LayerDesc(paddle.nn.Linear, 4, 4), LayerDesc(paddle.nn.ReLU)] * 2 + [LayerDesc(paddle.nn.Linear, 4, 4)]
    assert PipelineLayer(descs, num_stages=2).boundaries == (0, 3)
    assert PipelineLayer(descs, num_stages=3, seg_method="layer:Linear").boundaries == (0, 2, 4)
    with pytest.raises(UsageError, match="5 layers do not make 6 stages"):
        PipelineLayer(descs, num_stages=6)
    with pytest.raises(UsageError, match="recompute_interval"):
        PipelineLayer(descs, num_stages=2, recompute_interval=1)


# ---- static programs -------------------------------------------------------------------------------------------------


@pytest.fixture
def program() -> Any:
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            yield paddle.static.default_main_program()
    finally:
        paddle.disable_static()


def test_a_program_is_recorded_and_run(program: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = paddle.nn.Linear(3, 2)
    x = paddle.static.data(name="x", shape=[None, 3], dtype="float32")
    y = paddle.static.data(name="y", shape=[None, 1], dtype="int64")
    out = paddle.nn.functional.relu(layer(x)) * 2 + 1
    loss = paddle.nn.functional.cross_entropy(input=out, label=y)
    right = paddle.metric.accuracy(input=out, label=y)
    assert out.shape == [-1, 2]
    assert loss.shape == []
    paddle.optimizer.SGD(learning_rate=0.5).minimize(loss)
    run = paddle.static.Executor()
    run.run(paddle.static.default_startup_program())
    values = np.random.RandomState(0).rand(5, 3).astype("float32"), np.array([[0], [1], [0], [1], [1]])
    before = layer.weight.detach().clone()
    first, share = run.run(program, feed={"x": values[0], "y": values[1]}, fetch_list=[loss.name, right])
    plain = torch.relu(torch.from_numpy(values[0]) @ before) * 2 + 1
    assert first == torch.nn.functional.cross_entropy(plain, torch.from_numpy(values[1])[:, 0]).numpy()
    assert share == (plain.argmax(1).numpy() == values[1][:, 0]).astype("float32").mean()
    assert not torch.equal(layer.weight, before)
    tested = program.clone(for_test=True)
    again = [run.run(tested, feed={"x": values[0], "y": values[1]}, fetch_list=[loss])[0] for _ in range(2)]
    assert again[0] == again[1] < first  # runs without the optimizer
    assert "relu(" in str(program)
    assert "sgd()" in str(program)
    path = IrGraph(core.Graph(program.desc), for_test=True).draw(str(tmp_path), "main", [])
    assert '"x" -> op0;' in Path(path).read_text()


def test_methods_of_variables_are_paddles(program: Any) -> None:
    x = paddle.static.data("x", [None, 4])
    first, second = x.astype("float64").split(2, -1)
    top = second.max(axis=-1)
    assert (first.shape, top.shape) == ([-1, 2], [-1])
    given = np.arange(8, dtype="float32").reshape(2, 4)
    found = paddle.static.Executor(paddle.CPUPlace()).run(program, feed={"x": given}, fetch_list=[first, top])
    assert found[0].tolist() == given[:, :2].tolist()
    assert found[1].tolist() == [3, 7]


def test_what_an_executor_refuses(program: Any) -> None:
    run = paddle.static.Executor()
    with pytest.raises(UsageError, match="the program is empty"):
        run.run(fetch_list=["loss"])
    with pytest.raises(UsageError, match="Paddle runs a Program"):
        run.run("main")  # type: ignore[arg-type]
    x = paddle.static.data("x", [None, 3])
    total = paddle.sum(x)
    with pytest.raises(UsageError, match="does not compute"):
        run.run(feed={"x": np.ones((1, 3))}, fetch_list=["los"])
    with pytest.raises(UsageError, match=r"feed has \['z'\], but the program reads \['x'\]"):
        run.run(feed={"z": np.ones((1, 3))}, fetch_list=[total])
    with pytest.raises(UsageError, match=r"of shape \[1, 4\], but static.data has \[-1, 3\]"):
        run.run(feed={"x": np.ones((1, 4))}, fetch_list=[total])
    with pytest.raises(UsageError, match="has no value yet"):
        float(total)
    with pytest.raises(UsageError, match=r"optimizer\.minimize"):
        total.backward()
    with pytest.raises(UsageError, match="the program has a variable of that name"):
        paddle.static.data("x", [None, 3])


def test_data_outside_static_mode() -> None:
    with pytest.raises(UsageError, match="enable_static"):
        paddle.static.data("x", [None, 3])


# ---- what is not here ------------------------------------------------------------------------------------------------


def test_a_name_that_is_not_here() -> None:
    with pytest.raises(AttributeError, match=r"in Paddle paddle.vision has datasets.*torchvision"):
        paddle.vision  # noqa: B018
    with pytest.raises(AttributeError, match=r"did you mean paddle.nn.Linear\?"):
        paddle.nn.Linaer  # noqa: B018
    with pytest.raises(ImportError, match=r"paddle\.jit compiles"):
        from unisono.compat.paddle import jit  # noqa: F401
    with pytest.raises(ImportError, match=r"did you mean paddle.distributed.shard_tensor\?"):
        from unisono.compat.paddle.distributed import shard_tensr  # noqa: F401
    assert not hasattr(paddle, "no_such_name")
    assert "unisono run --as paddle" in paddle.explain_missing_module("paddle.distributed.launch")


def test_errors_are_in_the_users_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LC_ALL")
    monkeypatch.delenv("LC_MESSAGES", raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    with pytest.raises(AttributeError, match=r"是否想写 paddle.nn.Linear？"):
        paddle.nn.Linaer  # noqa: B018
    with pytest.raises(UsageError, match="hybrid_configs：dp_degree=2, mp_degree=2"):
        _strategy(dp_degree=2, mp_degree=2).degrees(3)
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    with pytest.raises(UsageError, match="need 4 ranks, but 3 are running; Paddle would stop in an assertion: start 4"):
        _strategy(dp_degree=2, mp_degree=2).degrees(3)


def _strategy(**degrees: Any) -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    return strategy


def test_what_a_strategy_refuses() -> None:
    with pytest.raises(UsageError, match="did you mean mp_degree"):
        _strategy(mp_degre=2)
    with pytest.raises(UsageError, match=r"mp_degree=0; as in Paddle, a whole number"):
        _strategy(mp_degree=0).degrees(1)
    with pytest.raises(UsageError, match="sep_degree splits sequences"):
        _strategy(sep_degree=2)
    with pytest.raises(UsageError, match=r"DistributedStrategy\.amp"):
        fleet.DistributedStrategy().amp = True
    strategy = paddle.distributed.auto_parallel.Strategy()
    with pytest.raises(UsageError, match=r"strategy.sharding.stag = 2 \(did you mean stage\?\)"):
        strategy.sharding.stag = 2
    strategy.sharding.enable, strategy.sharding.degree = True, 3
    with pytest.raises(UsageError, match="does not divide the 4 data ranks"):
        strategy.shard(4)
    assert fleet.DistributedStrategy().degrees(6).data == 6
    given = fleet.DistributedStrategy()
    for mode, schedule in (("FThenB", "f-then-b"), ("F-then-B", "f-then-b"), ("1F1B", "1f1b")):
        given.pipeline_configs = {"schedule_mode": mode}
        assert Plan(pp=2, microbatches=2, schedule=given.schedule).schedule == schedule
    with pytest.raises(UsageError, match="parameter server"):
        fleet.init()
    with pytest.raises(UsageError, match="one of 'os', 'os_g', 'p_g_os'"):
        paddle.distributed.sharding.group_sharded_parallel(paddle.nn.Linear(2, 2), None, "os_p")  # type: ignore[arg-type]


def test_what_optimizers_refuse() -> None:
    with pytest.raises(UsageError, match="set_lr"):
        paddle.optimizer.SGD(learning_rate=object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="static mode only"):
        paddle.optimizer.SGD().step()
    with pytest.raises(UsageError, match="parameter_groups"):
        paddle.optimizer.SGD(0.1, parameters=[{"params": [], "learning_rate": 0.1}])  # type: ignore[list-item]


def test_modules_are_where_paddle_has_them() -> None:
    for name in ("distributed.fleet.meta_parallel", "distributed.auto_parallel", "base.framework", "nn.functional"):
        importlib.import_module(f"unisono.compat.paddle.{name}")
