"""Paddle's strategies and marks on ranks: combined, sharded as they say, and refused where they cannot be right."""

from __future__ import annotations

import copy
import os
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono.compat.paddle as paddle
from tests.ranks import RankPool
from unisono.compat.paddle import distributed as dist
from unisono.compat.paddle.distributed import environment, fleet
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
STEPS = 3


class Net(paddle.nn.Layer):
    """The document's, smaller; with the layers of fleet.meta_parallel, or with marks, where they are asked for."""

    def __init__(self, is_parallel: bool = False, mark: Callable[[Net, Any], Any] | None = None) -> None:
        super().__init__()
        if is_parallel:
            parts = fleet.meta_parallel
            self.linear1 = parts.ColumnParallelLinear(8, 12, gather_output=False, has_bias=True)
            self.linear2 = parts.RowParallelLinear(12, 8, input_is_parallel=True, has_bias=True)
        else:
            self.linear1 = paddle.nn.Linear(8, 12)
            self.linear2 = paddle.nn.Linear(12, 8)
        self.linear3 = paddle.nn.Linear(8, 4)
        self._mark = mark

    def forward(self, x: Any) -> Any:
        x = x if self._mark is None else self._mark(self, x)
        return self.linear3(paddle.nn.functional.relu(self.linear2(self.linear1(x))))


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batches(samples: int) -> list[tuple[Any, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [
        (
            paddle.to_tensor(torch.randn(samples, 8, generator=draw)),
            paddle.to_tensor(torch.randint(0, 4, (samples, 1), generator=draw)),
        )
        for _ in range(STEPS)
    ]


def loop(model: Any, optimizer: Any, given: list[tuple[Any, Any]]) -> list[float]:
    losses = []
    for x, label in given:
        loss = paddle.mean(paddle.nn.functional.cross_entropy(input=model(x), label=label))
        loss.backward()
        optimizer.step()
        model.clear_gradients()
        losses.append(float(loss))
    return losses


def momentum(model: Any) -> Any:
    return paddle.optimizer.Momentum(0.1, 0.9, parameters=model.parameters(), weight_decay=1e-3)


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """In float64, and without what another program has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    environment.state.degrees = environment.state.strategy = None
    try:
        return function(*args)
    finally:
        environment.state.degrees = environment.state.strategy = None
        torch.set_default_dtype(before)


def single(samples: int) -> list[float]:
    model = made()
    return loop(model, momentum(model), batches(samples))


# ---- strategies ------------------------------------------------------------------------------------------------------


def by_strategy(comm: Any, degrees: dict[str, int], is_parallel: bool) -> tuple[list[float], str, Any]:
    return fresh(_by_strategy, degrees, is_parallel)  # type: ignore[no-any-return]


def _by_strategy(degrees: dict[str, int], is_parallel: bool) -> tuple[list[float], str, Any]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
    model = made(is_parallel=is_parallel)
    optimizer = momentum(model)
    wrapped, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    sampler = paddle.io.DistributedBatchSampler(range(8), 8 // environment.state.degrees.data, rank=dist.get_rank())
    mine = next(iter(sampler))
    losses = loop(wrapped, optimizer, [(x[mine], label[mine]) for x, label in batches(8)])
    return losses, str(wrapped.trainer.plan), tuple(model.linear1.weight.shape)


# ---- states ----------------------------------------------------------------------------------------------------------


def goes_on(comm: Any, how: str) -> tuple[list[float], list[float], list[float]]:
    return fresh(_goes_on, how)  # type: ignore[no-any-return]


def _goes_on(how: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of one card; of a plan that goes on from its state; of one card that goes on from the plan's."""
    model = made()
    optimizer = momentum(model)
    expected = loop(model, optimizer, batches(8))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected += loop(model, optimizer, batches(8))
    optimizer.set_lr(0.01)
    expected += loop(model, optimizer, batches(8))

    model = made()
    optimizer = momentum(model)
    whole = batches(8)
    if how == "to_static":
        program = dist.to_static(model, None, paddle.nn.CrossEntropyLoss(), optimizer)
        model.set_state_dict(saved[0])
        optimizer.set_state_dict(saved[1])
        found = [float(program(*batch)) for batch in whole]
        optimizer.set_lr(0.01)
        found += [float(program(*batch)) for batch in whole]
        states = program.state_dict(), optimizer.state_dict()
    else:
        fleet.init(is_collective=True)
        wrapped, optimizer, _ = dist.sharding.group_sharded_parallel(model, optimizer, how)
        wrapped.set_state_dict(saved[0])
        optimizer.set_state_dict(saved[1])
        half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        mine = [(x[half], label[half]) for x, label in whole]
        found = loop(wrapped, optimizer, mine)
        optimizer.set_lr(0.01)
        found += loop(wrapped, optimizer, mine)
        states = wrapped.state_dict(), optimizer.state_dict()
    alone = made()
    optimizer = momentum(alone)
    alone.set_state_dict(states[0])
    optimizer.set_state_dict(states[1])
    optimizer.set_lr(0.01)
    after = loop(alone, optimizer, batches(8))
    return expected, found, after


@pytest.mark.parametrize("how", ["os", "p_g_os", "to_static"])
def test_states_go_from_one_card_to_a_plan_and_back(pools: Pools, how: str) -> None:
    results = pools("gloo", 2).run(goes_on, how)
    expected = results[0][0]
    found = torch.tensor([each[1] for each in results], dtype=torch.float64)
    mean = found.mean(0) if how != "to_static" else found[0]
    torch.testing.assert_close(mean, torch.tensor(expected[STEPS:], dtype=torch.float64), **CLOSE)
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-12)
    assert results[0][2] == pytest.approx(one_more_epoch(), rel=1e-9)


def one_more_epoch() -> list[float]:
    return fresh(_one_more_epoch)  # type: ignore[no-any-return]


def _one_more_epoch() -> list[float]:
    model = made()
    optimizer = momentum(model)
    for rate in (0.1, 0.1, 0.01, 0.01):
        optimizer.set_lr(rate)
        losses = loop(model, optimizer, batches(8))
    return losses


@pytest.mark.parametrize(
    ("degrees", "plan", "shape"),
    [
        ({"dp_degree": 2, "mp_degree": 2}, "dp=2,tp=2", (8, 6)),
        ({"dp_degree": 2, "sharding_degree": 2}, "dp=4,zero=1,shard=2", (8, 12)),
    ],
    ids=["dp-mp", "dp-sharding"],
)
def test_strategies_combine(pools: Pools, degrees: dict[str, int], plan: str, shape: tuple[int, ...]) -> None:
    found = pools("gloo", 4).run(by_strategy, degrees, "mp_degree" in degrees)
    expected = fresh(single, 8)
    assert {each[1] for each in found} == {plan}
    assert {each[2] for each in found} == {shape}
    count = 2 if "mp_degree" in degrees else 1  # ranks that have the same samples
    means = _double([each[0] for each in found]).view(-1, count, STEPS).mean((0, 1))
    torch.testing.assert_close(means, _double(expected), **CLOSE)


def _double(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- marks -----------------------------------------------------------------------------------------------------------


def mark_both(net: Net, x: Any) -> Any:
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    dist.shard_tensor(net.linear1.weight, mesh, [dist.Replicate(), dist.Shard(1)])
    dist.shard_tensor(net.linear2.weight, mesh, ["mp", None])  # a dims_mapping
    return dist.shard_tensor(x, mesh, [dist.Shard(0), dist.Replicate()])


def by_marks(comm: Any, where: str) -> tuple[list[float], Any, str]:
    return fresh(_by_marks, where)  # type: ignore[no-any-return]


def _by_marks(where: str) -> tuple[list[float], Any, str]:
    model = made(mark=mark_both if where == "forward" else None)
    if where == "outside":
        mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
        assert dist.shard_tensor(model.linear1.weight, mesh, [None, "mp"]) is model.linear1.weight
        dist.shard_tensor(model.linear2.weight, mesh, ["mp", None])
    optimizer = momentum(model)
    losses = loop(model, optimizer, batches(8))
    return losses, tuple(model.linear1.weight.shape), str(model.binding.trainer.plan)


@pytest.mark.parametrize("where", ["forward", "outside"])
def test_marks_on_a_mesh_of_two_dims(pools: Pools, where: str) -> None:
    expected = fresh(single, 8)
    for losses, shape, plan in pools("gloo", 4).run(by_marks, where):
        torch.testing.assert_close(_double(losses), _double(expected), **CLOSE)
        assert shape == (8, 6)
        assert plan == "dp=2,tp=2"


def frozen(comm: Any, size: int) -> tuple[list[float], bool, str]:
    return fresh(_frozen, size)  # type: ignore[no-any-return]


def _frozen(size: int) -> tuple[list[float], bool, str]:
    model = made()
    model.linear1.weight.stop_gradient = True
    before = model.linear1.weight.detach().clone()
    trained = model if size == 1 else paddle.DataParallel(model)
    optimizer = momentum(model)
    each = 8 // size
    part = slice(0, 8) if size == 1 else slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    losses = loop(trained, optimizer, [(x[part], label[part]) for x, label in batches(8)])
    refusal = ""
    if size > 1:
        model.linear1.weight.stop_gradient = False
        try:
            trained(batches(8)[0][0])
        except UsageError as error:
            refusal = str(error)
    return losses, torch.equal(before, model.linear1.weight), refusal


def test_frozen_parameters_stay_as_they_are(pools: Pools) -> None:
    expected, stayed, _ = fresh(_frozen, 1)
    assert stayed
    found = pools("gloo", 2).run(frozen, 2)
    assert all(each[1] and "changed after the first step" in each[2] for each in found)
    torch.testing.assert_close(_double([each[0] for each in found]).mean(0), _double(expected), **CLOSE)


def placed(comm: Any) -> Any:
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    given = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = dist.shard_tensor(given, mesh, [dist.Shard(0)])
    columns = dist.reshard(rows, mesh, [None, "x"])
    return rows.to_local().tolist(), columns.to_local().tolist(), mesh[1].process_ids, mesh.shape


def test_tensors_outside_of_layers_are_placed(pools: Pools) -> None:
    found = pools("gloo", 2).run(placed)
    assert found[0] == ([[1.0, 2.0]], [[1.0], [3.0]], [1], [2])
    assert found[1] == ([[3.0, 4.0]], [[2.0], [4.0]], [1], [2])


# ---- methods ---------------------------------------------------------------------------------------------------------


def split_and_take_the_largest(model: Net, x: Any) -> Any:
    """Methods that torch has too, with another meaning."""
    first, second = x.astype("float64").split(2, -1)
    return paddle.concat([first + second, first.max(axis=-1, keepdim=True) * second], axis=-1)


def torchs_own(model: Net, x: Any) -> Any:
    first, second = x[:, :4], x[:, 4:]
    return torch.cat([first + second, torch.amax(first, -1, True) * second], -1)


def by_methods(comm: Any) -> list[list[float]]:
    return fresh(_by_methods, comm.rank)  # type: ignore[no-any-return]


def _by_methods(rank: int) -> list[list[float]]:
    def run(mark: Callable[[Net, Any], Any], how: str) -> list[float]:
        model = made(mark=mark)
        optimizer = momentum(model)
        if how == "to_static":
            program = dist.to_static(model, None, paddle.nn.CrossEntropyLoss(), optimizer)
            return [float(program(*batch)) for batch in batches(8)]
        if how == "engine":
            engine = dist.auto_parallel.Engine(model, paddle.nn.CrossEntropyLoss(), optimizer)
            mine = slice(4 * rank, 4 * rank + 4)
            return [float(engine.run((x[mine], label[mine]))["loss"]) for x, label in batches(8)]
        return loop(model, optimizer, batches(8))

    return [
        run(torchs_own, "one card"),
        *(run(split_and_take_the_largest, how) for how in ("one card", "to_static", "engine")),
    ]


def test_methods_have_paddles_meaning_under_plans_and_in_programs(pools: Pools) -> None:
    for losses in pools("gloo", 2).run(by_methods):
        for found in losses[1:]:
            torch.testing.assert_close(found, losses[0], **CLOSE)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(comm: Any, name: str) -> str:
    cases: dict[str, Callable[[], Any]] = {
        "mesh": lambda: dist.ProcessMesh([0, 1, 2], dim_names=["dp"]),
        "part": lambda: dist.ProcessMesh([0], dim_names=["dp"]),
        "index": lambda: dist.ProcessMesh([0, 1], dim_names=["pp"])[2],
        "dims": lambda: dist.shard_tensor(paddle.ones([2, 2]), dist.ProcessMesh([0, 1], ["mp"]), ["dp", None]),
        "group": lambda: dist.new_group([0, 2]),
        "sharded": _sharded_over_a_part,
        "mp": lambda: _by_strategy({"dp_degree": 1, "mp_degree": 2}, False),
        "pp": lambda: _by_strategy({"dp_degree": 1, "pp_degree": 2}, False),
        "degrees": lambda: _by_strategy({"dp_degree": 3}, False),
        "batch": lambda: _engine().dataloader(range(9), batch_size=9),
        "pipeline": _engine_without_stages,
        "some": _with_some_parameters,
    }
    with unittest.mock.patch.dict(os.environ, LC_ALL="C"):
        try:
            fresh(cases[name])
        except UsageError as error:
            return str(error)
    return "nothing was refused"


def _sharded_over_a_part() -> None:
    group = dist.new_group([0])
    model = made()
    dist.sharding.group_sharded_parallel(model, momentum(model), "os", group=group)


def _with_some_parameters() -> None:
    """A plan's optimizer would train all of them."""
    model = made()
    optimizer = momentum(model.linear3)
    loop(paddle.DataParallel(model), optimizer, batches(8))


def _engine(strategy: Any = None) -> Any:
    model = made()
    return dist.auto_parallel.Engine(model, paddle.nn.CrossEntropyLoss(), momentum(model), strategy=strategy)


def _engine_without_stages() -> None:
    strategy = dist.auto_parallel.Strategy({"pipeline": {"enable": True, "accumulate_steps": 2}})
    _engine(strategy).run(batches(8)[0], mode="train")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mesh", "in a job of 2 ranks: Paddle would wait for ranks that are not there"),
        ("part", "here a mesh has all ranks of the job"),
        ("index", "give an index of the first dim, 0 to 1"),
        ("dims", "or for each dim of the tensor None or one of ['mp']"),
        ("group", "Paddle would wait for ranks that never come"),
        ("sharded", "Paddle would train the others apart"),
        ("mp", "has no layer of fleet.meta_parallel"),
        ("pp", "a pipeline is a PipelineLayer"),
        ("degrees", "need 3 ranks, but 2 are running"),
        ("batch", "give a multiple of 2"),
        ("pipeline", "without a mark in the forward"),
        ("some", "Momentum has 2 of the 6 trained parameters of Net"),
    ],
)
def test_what_is_refused_before_ranks_wait(pools: Pools, name: str, words: str) -> None:
    for text in pools("gloo", 2).run(refused, name):
        assert words in text
