"""uni.EMA: averages of the weights under any plan are those of torch's AveragedModel on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono as uni
from tests.ranks import RankPool
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]
State = dict[str, torch.Tensor]
NEAR = {"rtol": 1e-9, "atol": 1e-9}
DECAY, BATCH, FIRST = 0.8, 4, 4


def data(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return [(row, torch.stack([row.sum(), row.prod()])) for row in x]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def by_hand(every: int = 1) -> tuple[State, State, list[float]]:
    """The weights, their averages, and the losses of the averages, of a loop in one process."""
    torch.manual_seed(0)
    trained = model()
    averaged = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-2)
    held_out = torch.stack([x for x, _ in data(6)]), torch.stack([y for _, y in data(6)])
    samples, values, steps = data(20), [], 0
    for _ in range(2):
        for first in range(0, len(samples), BATCH):
            batch = samples[first : first + BATCH]
            optimizer.zero_grad()
            outputs = trained(torch.stack([x for x, _ in batch]))
            nn.functional.mse_loss(outputs, torch.stack([y for _, y in batch])).backward()
            optimizer.step()
            steps += 1
            if steps % every == 0:
                averaged.update_parameters(trained)
        with torch.no_grad():
            values.append(float(nn.functional.mse_loss(averaged(held_out[0]), held_out[1])))
    return dict(trained.state_dict()), dict(averaged.module.state_dict()), values


def engine(plan: str) -> uni.Engine:
    return uni.Engine(
        model,
        nn.functional.mse_loss,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        plan=plan,
        check="off",
    )


def trained(comm: Any, plans: list[str], folder: str, every: int = 1) -> dict[str, Any]:
    """Train under the first plan, and go on under the second."""
    given: dict[str, Any] = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "progress": False}
    given |= {"validation": data(6), "save": folder, "save_best": "validation_loss"}
    values: list[float] = []
    for number, plan in enumerate(plans):
        one, ema = engine(plan), uni.EMA(DECAY, every=every)
        steps = None if number == len(plans) - 1 else FIRST
        history = one.fit(data(20), max_steps=steps, resume=number > 0, callbacks=[ema], **given)
        if steps is None:
            values += [each["validation_loss"] for each in history.values]
    averages = ema.full_tensors()
    with ema.applied():
        uni.export_weights(one.ready, f"{folder}/averaged.safetensors")
        evaluated = one.evaluate(data(6), 4)["loss"]
    weights = one.ready.state_dict()["model"]
    one.load(f"{folder}/best")
    return {
        "averages": averages,
        "weights": weights,
        "values": values,
        "evaluated": evaluated,
        "best": one.evaluate(data(6), 4)["loss"],
    }


@pytest.mark.parametrize(
    "plans",
    [
        ["dp=2,zero=3", "tp=2"],
        ["tp=2", "pp=2,microbatches=2"],
        ["pp=2,microbatches=2", "dp=2,zero=3"],
        pytest.param(["dp=2"], marks=pytest.mark.thorough),
        pytest.param(["dp=2,zero=1", "dp=2,zero=2"], marks=pytest.mark.thorough),
    ],
    ids=" then ".join,
)
def test_averages_are_those_of_one_device(pools: Pools, tmp_path: Path, plans: list[str]) -> None:
    weights, averages, values = by_hand()
    for found in pools("gloo", 2).run(trained, plans, str(tmp_path / "run")):
        for name in weights:
            torch.testing.assert_close(found["averages"][name], averages[name], **NEAR)
            torch.testing.assert_close(found["weights"][name], weights[name], **NEAR)
        assert found["values"][-1] == pytest.approx(values[-1], rel=1e-9)
        assert found["evaluated"] == pytest.approx(values[-1], rel=1e-9)
        assert found["best"] == pytest.approx(min(values), rel=1e-9)  # which has the averages
    exported = load_file(tmp_path / "run" / "averaged.safetensors")
    assert set(exported) == set(averages)
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, averages[name], **NEAR)


def test_every_few_steps(pools: Pools, tmp_path: Path) -> None:
    _, averages, _ = by_hand(every=3)
    for found in pools("gloo", 2).run(trained, ["dp=2,zero=1"], str(tmp_path / "run"), 3):
        for name in averages:
            torch.testing.assert_close(found["averages"][name], averages[name], **NEAR)


def half(comm: Any, plan: str) -> tuple[set[torch.dtype], float]:
    """Averages of half weights are float32, and the weights are the same bits after `applied`."""
    rows = [(x.float(), y.float()) for x, y in data(8)]
    one = uni.Engine(
        lambda: model().bfloat16(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        plan=plan,
        precision="bf16",
        check="off",
    )
    ema = uni.EMA(0.5)
    one.fit(rows, batch_size=4, progress=False, callbacks=[ema])
    before = one.ready.state_dict()["model"]
    with ema.applied():
        inside = one.ready.state_dict()["model"]
    after = one.ready.state_dict()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = sum(float((inside[name] - before[name]).abs().sum()) for name in before)
    return {each.dtype for each in ema.full_tensors().values()}, moved


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "dp=2"])
def test_half_weights(pools: Pools, plan: str) -> None:
    for dtypes, moved in pools("gloo", 2).run(half, plan):
        assert dtypes == {torch.float32}
        assert moved > 0


def test_refusals() -> None:
    for decay in (1, -0.1, True, "0.9"):
        with pytest.raises(UsageError, match=r"EMA\(decay="):
            uni.EMA(decay)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="every"):
        uni.EMA(every=0)
    with pytest.raises(UsageError, match="no averages yet"), uni.EMA().applied():
        pass


def pretrained(comm: Any, plan: str, folder: str) -> State:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    ids = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(0))
    one = uni.Engine(
        lambda: GPT2LMHeadModel(config),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=plan,
        check="off",
    )
    ema = uni.EMA(0.5)
    one.fit([{"input_ids": row, "labels": row} for row in ids], batch_size=4, progress=False, callbacks=[ema])
    with ema.applied():
        one.save_pretrained(folder)
    one.save_pretrained(f"{folder}-weights")
    return ema.full_tensors()


@pytest.mark.parametrize("plan", ["dp=2,zero=3", pytest.param("tp=2", marks=pytest.mark.thorough)])
def test_averages_of_a_hugging_face_model_are_exported(pools: Pools, tmp_path: Path, plan: str) -> None:
    from transformers import GPT2LMHeadModel

    first, second = pools("gloo", 2).run(pretrained, plan, str(tmp_path / "gpt"))
    averaged = dict(GPT2LMHeadModel.from_pretrained(tmp_path / "gpt").named_parameters())
    weights = dict(GPT2LMHeadModel.from_pretrained(tmp_path / "gpt-weights").named_parameters())
    for name, tensor in averaged.items():
        assert torch.equal(tensor, first[name])
        assert torch.equal(first[name], second[name])
    assert not all(torch.equal(tensor, weights[name]) for name, tensor in averaged.items())
