"""What a run logs (log_every, norms, profiles), and rates by parameter group: under any plan those of one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import unisono as uni
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.train.callbacks import StepInfo
from unisono.train.telemetry.step_trace import device_peak

Pools = Callable[[str, int], RankPool]
PLANS = ["dp=2,zero=3", "tp=2", "pp=2,microbatches=2"]
WARMUP, STEPS = 3, 10


def data(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return [(row, torch.stack([row.sum(), row.prod()])) for row in x]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Weight decay for matrices only, at another rate than that of biases."""
    parameters = list(parameters)
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "lr": 3e-2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def warmup_cosine(optimizer: torch.optim.Optimizer) -> Any:
    first = LinearLR(optimizer, 0.1, total_iters=WARMUP)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, STEPS - WARMUP)], [WARMUP])


def by_hand(clip: float) -> dict[str, Any]:
    torch.manual_seed(0)
    one = model()
    stepping = optimizer(one.parameters())
    schedule = warmup_cosine(stepping)
    found: dict[str, Any] = {"rates": [], "gradients": [], "weights": []}
    samples = data(20)
    for step in range(STEPS):
        batch = [samples[(4 * step + number) % 20] for number in range(4)]
        stepping.zero_grad()
        nn.functional.mse_loss(one(torch.stack([x for x, _ in batch])), torch.stack([y for _, y in batch])).backward()
        found["gradients"].append(float(nn.utils.clip_grad_norm_(one.parameters(), clip)))
        stepping.step()
        schedule.step()
        found["rates"].append(tuple(group["lr"] for group in stepping.param_groups))
        found["weights"].append(float(torch.cat([each.detach().flatten() for each in one.parameters()]).norm()))
    return {**found, "state": dict(one.state_dict())}


class Seen(uni.Callback):
    def __init__(self) -> None:
        self.infos: list[StepInfo] = []

    def on_step(self, engine: uni.Engine, info: StepInfo) -> None:
        self.infos.append(info)


def engine(plan: str, clip: float | None = None) -> uni.Engine:
    return uni.Engine(
        model, nn.functional.mse_loss, optimizer, plan=plan, check="off", scheduler=warmup_cosine, clip=clip
    )


GIVEN: dict[str, Any] = {"batch_size": 4, "epochs": 2, "shuffle": False, "progress": False}


def trained(comm: Any, plan: str, clip: float | None) -> dict[str, Any]:
    seen, one = Seen(), engine(plan, clip)
    one.fit(data(20), norms=True, callbacks=[seen], **GIVEN)
    return {
        "rates": [info.rates for info in seen.infos],
        "gradients": [info.gradient_norm for info in seen.infos],
        "weights": [info.weight_norm for info in seen.infos],
        "state": one.ready.state_dict()["model"],
    }


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("plan", PLANS)
def test_groups_schedules_and_norms_are_those_of_one_device(pools: Pools, plan: str, clip: float | None) -> None:
    expected = by_hand(torch.inf if clip is None else clip)
    for found in pools("gloo", 2).run(trained, plan, clip):
        for name in ("gradients", "weights"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9)
        for rates, wanted in zip(found["rates"], expected["rates"], strict=True):
            assert rates == pytest.approx(wanted, rel=1e-12)
        for name, tensor in expected["state"].items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=1e-9, atol=1e-9)


def logged(comm: Any, folder: str) -> None:
    engine("dp=2").fit(data(20), save=folder, log_every=4, norms=True, profile_steps="5..6", **GIVEN)


def test_logs_and_profiles(pools: Pools, tmp_path: Path) -> None:
    pools("gloo", 2).run(logged, str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 10]  # and the last
    assert all({"rate", "rate_1", "gradient_norm", "weight_norm"} <= set(line) for line in lines)
    for rank in (0, 1):
        trace = json.loads((tmp_path / "run" / "profile" / f"steps-5-6.rank-{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert names.count("aten::mse_loss") == 2
        assert any(name.startswith("Optimizer.step") for name in names)


def test_a_profile_is_named_and_lines_are_as_many_as_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = {**GIVEN, "progress": True}
    engine("dp=1").fit(data(20), save=tmp_path / "run", log_every=5, profile_steps="2", **given)
    shown = capfd.readouterr().out
    assert f"profile of steps 2: {tmp_path}/run/profile/steps-2.rank-0.json" in shown.replace("\n", "")
    assert [line.split()[3] for line in shown.splitlines() if line.startswith("epoch")] == ["5/10", "10/10"]


def test_the_peak_of_a_cpu_is_not_known() -> None:
    assert device_peak(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.parametrize("steps", ["", "0..3", "4..3", "a", 3])
def test_refused_profiles(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected steps, counted from 1"):
        engine("dp=1").fit(data(20), save=tmp_path / "run", profile_steps=steps, **GIVEN)
    with pytest.raises(UsageError, match="needs save=FOLDER"):
        engine("dp=1").fit(data(20), profile_steps="1", **GIVEN)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_model_flops_utilization_of_a_gpu() -> None:
    seen = Seen()
    one = uni.Engine(
        lambda: nn.Linear(1024, 512, bias=False),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        plan="dp=1",
        precision="bf16",
        check="off",
    )
    samples = [(torch.ones(1024), torch.ones(512))] * 64
    one.fit(samples, batch_size=32, callbacks=[seen])
    peak = device_peak(one.device, torch.bfloat16)
    if peak is None:
        pytest.skip(f"the peak of {torch.cuda.get_device_name()} is not known")
    for info in seen.infos:
        assert info.mfu == pytest.approx(3 * 2 * 1024 * 512 * 32 / info.seconds / peak)
