"""Metrics of training batches: from the outputs of the step itself, equal to one device's under every kind of plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from tests.train.test_engine import RULES, Words, data, engine, loss, right
from unisono.errors import UsageError
from unisono.parallel.tensor.logits import LogitsShard

PLANS = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=3", "cp=2", "dp=2,microbatches=2"]


def batches() -> list[Any]:
    """One more sample than two ranks and three microbatches can share evenly."""
    return [torch.utils.data.default_collate(data(21)[start : start + 7]) for start in (0, 7, 14)]


def measured(comm: Any, plan: str) -> dict[str, Any]:
    fitted = engine(plan, ["accuracy", uni.Accuracy(3), "perplexity"])
    history = fitted.fit(data(), epochs=1, batch_size=8, shuffle=False, progress=False, train_metrics=True)
    by_hand = engine(plan, ["accuracy", "perplexity"])
    runs = [by_hand.run(batch, metrics=True) for batch in batches()]
    return {
        "losses": history.losses,
        "metrics": history.metrics,
        "runs": [values for _, values in runs],
        "run_losses": [float(each) for each, _ in runs],
        "loss_alone": float(by_hand.run(batches()[0])),
    }


@pytest.fixture(scope="module")
def alone(pools: Callable[[str, int], RankPool]) -> dict[str, Any]:
    pools("gloo", 2)  # ranks are forked before this process trains too
    return pools("gloo", 1).run(measured, "dp=1")[0]


def test_on_one_device_they_are_those_of_the_steps_outputs(alone: dict[str, Any]) -> None:
    assert set(alone["metrics"]) == {"train_accuracy", "train_top3", "train_perplexity"}
    assert len(alone["metrics"]["train_accuracy"]) == len(alone["losses"]) == 3
    expected = [math.exp(each) for each in alone["losses"]]
    assert alone["metrics"]["train_perplexity"] == pytest.approx(expected), "of the very loss that was trained"
    seen: list[float] = []

    class Watched(Words):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(tokens)
            seen.append(float((outputs.argmax(-1) == batches()[0][1]).double().mean()))
            return outputs

    one = engine("dp=1", ["accuracy", right], model=lambda: Watched().double())
    one.prepare(batches()[0])
    seen.clear()
    _, values = one.run(batches()[0], metrics=True)
    assert len(seen) == 1, "one forward"
    assert values == {"train_accuracy": pytest.approx(seen[0]), "train_right": pytest.approx(seen[0])}


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_changes_nothing(plan: str, alone: dict[str, Any], pools: Callable[[str, int], RankPool]) -> None:
    for found in pools("gloo", 2).run(measured, plan):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert found["run_losses"] == pytest.approx(alone["run_losses"], rel=1e-9)
        assert found["loss_alone"] == pytest.approx(alone["loss_alone"], rel=1e-9)
        assert found["metrics"] == {name: pytest.approx(each, rel=1e-9) for name, each in alone["metrics"].items()}
        assert found["runs"] == [pytest.approx(each, rel=1e-9) for each in alone["runs"]]


def of_sharded_logits(comm: Any, plan: str) -> tuple[list[dict[str, float]], bool]:
    """The metrics, and whether the loss was given shards of the logits."""
    sharded = False

    def watched(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal sharded
        sharded = sharded or isinstance(outputs, LogitsShard)
        return loss(outputs, targets)

    one = uni.Engine(
        lambda: Words().double(),
        watched,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        metrics=["accuracy", uni.Perplexity(shift=0)],
        plan=plan,
        rules={**RULES, "head": "logits"},
        seed=3,
        check="off",
    )
    return [one.run(batch, metrics=True)[1] for batch in batches()[:2]], sharded


def test_sharded_logits_are_seen_in_full(pools: Callable[[str, int], RankPool]) -> None:
    alone, is_sharded = pools("gloo", 1).run(of_sharded_logits, "dp=1")[0]
    assert not is_sharded
    for found, is_sharded in pools("gloo", 2).run(of_sharded_logits, "tp=2"):
        assert is_sharded, "the step itself goes without full logits"
        assert found == [pytest.approx(each, rel=1e-9) for each in alone]


def compiled(comm: Any, plan: str) -> list[dict[str, float]]:
    one = engine(plan, ["accuracy", "perplexity"])
    return [one.run(batch, metrics=True)[1] for batch in batches()[:2]]


@pytest.mark.thorough
def test_a_compiled_step_shows_its_outputs_too(alone: dict[str, Any], pools: Callable[[str, int], RankPool]) -> None:
    for found in pools("gloo", 2).run(compiled, "dp=2,compile"):
        assert found == [pytest.approx(each, rel=1e-9) for each in alone["runs"][:2]]


def test_an_optimizer_with_a_closure_has_those_of_the_first_evaluation() -> None:
    one = uni.Engine(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(),
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=5),
        metrics=["perplexity"],
        plan="dp=1",
        check="off",
    )
    x = torch.randn(12, 4, dtype=torch.double)
    value, values = one.run((x, torch.arange(12) % 3), metrics=True)
    assert values["train_perplexity"] == pytest.approx(math.exp(float(value)))


def test_they_are_printed_and_given_to_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = []

    class Log(uni.Callback):
        def on_step(self, engine: uni.Engine, info: Any) -> None:
            lines.append(info.numbers())

    history = engine("dp=1", ["accuracy"]).fit(data(), batch_size=8, callbacks=[Log()], train_metrics=True)
    shown = capsys.readouterr().out
    assert f"train_accuracy {history.metrics['train_accuracy'][-1]:.4g}" in shown
    assert [line["train_accuracy"] for line in lines] == history.metrics["train_accuracy"]
    silent = engine("dp=1", ["accuracy"]).fit(data(), batch_size=8, progress=False)
    assert silent.metrics == {}


def refused(comm: Any, plan: str) -> str:
    try:
        engine(plan, [right]).fit(data(), batch_size=8, progress=False, train_metrics=True)
    except UsageError as error:
        return str(error)
    return ""


def test_what_cannot_be_right_is_refused(pools: Callable[[str, int], RankPool]) -> None:
    for found in pools("gloo", 2).run(refused, "dp=2"):
        assert found.startswith("metric 'right' is a function, which needs the outputs of the full batch at once")
    with pytest.raises(UsageError, match="the engine has none"):
        engine("dp=1").fit(data(), progress=False, train_metrics=True)
    with pytest.raises(UsageError, match="train_metrics=1"):
        engine("dp=1", ["accuracy"]).fit(data(), progress=False, train_metrics=1)  # type: ignore[arg-type]
