"""When a run evaluates, what it keeps, and when it ends: the same on all ranks, also after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.train.callbacks import StepInfo

Pools = Callable[[str, int], RankPool]


def data(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return [(row, row.sum().reshape(1)) for row in x]


def engine(plan: str, lr: float = 1e-2) -> uni.Engine:
    return uni.Engine(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        plan=plan,
        check="off",
    )


GIVEN: dict[str, Any] = {"batch_size": 4, "progress": False, "validation": data(6)}


def plain_losses(comm: Any) -> list[float]:
    return engine("dp=1").fit(data(20), epochs=2, **GIVEN).losses


class Evaluations(uni.Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def on_evaluation(self, engine: uni.Engine, info: StepInfo) -> None:
        self.steps.append((info.step, info.ends_epoch))


def kept_the_best(comm: Any, plan: str, folder: str) -> dict[str, Any]:
    seen = Evaluations()
    one = engine(plan)
    history = one.fit(
        data(20), epochs=2, evaluate_every=2, save=folder, save_best="validation_loss", callbacks=[seen], **GIVEN
    )
    losses = [values["validation_loss"] for values in history.values]
    best = losses.index(min(losses))
    one.load(f"{folder}/best")
    return {
        "losses": history.losses,
        "evaluated": history.evaluated,
        "steps": seen.steps,
        "best": min(losses),
        "best step": history.evaluated[best],
        "loaded": (one.ready.steps, one.evaluate(GIVEN["validation"], 4)["loss"]),
    }


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "pp=2,microbatches=2"])
def test_the_best_step_is_kept(pools: Pools, tmp_path: Path, plan: str) -> None:
    (expected,) = pools("gloo", 1).run(plain_losses)
    for found in pools("gloo", 2).run(kept_the_best, plan, str(tmp_path / "run")):
        assert found["losses"] == pytest.approx(expected, rel=1e-12)  # evaluations change nothing
        assert found["evaluated"] == [2, 4, 5, 6, 8, 10]
        assert found["steps"] == [(2, False), (4, False), (5, True), (6, False), (8, False), (10, True)]
        assert found["loaded"] == (found["best step"], pytest.approx(found["best"], rel=1e-12))


def test_the_best_step_is_saved_by_ranks_that_join_the_world_in_fit(tmp_path: Path) -> None:
    """As in a script under `unisono run`, which does not call uni.init(): its first save is that of all ranks."""
    folder = str(tmp_path / "run")
    for found in uni.spawn(lambda: kept_the_best(None, "dp=2,zero=3", folder), 2, timeout=60):
        assert found["loaded"] == (found["best step"], pytest.approx(found["best"], rel=1e-12))
    (saved,) = (tmp_path / "run" / "best").glob("step-*")
    assert sorted(file.name for file in saved.glob("rank-*")) == ["rank-00000.safetensors", "rank-00001.safetensors"]


def stopped(comm: Any, folder: str) -> list[Any]:
    """Without a rate nothing improves: the second evaluation is the first without an improvement."""
    given = {**GIVEN, "save": folder, "epochs": 9}
    first = engine("dp=2", lr=0.0).fit(data(8), max_steps=6, callbacks=[uni.EarlyStopping(patience=4)], **given)
    again = uni.EarlyStopping(patience=4)
    rest = engine("dp=2", lr=0.0).fit(data(8), resume=True, callbacks=[again], **given)
    return [first.stopped, first.step, rest.stopped, rest.step, again.waited, again.best_step]


def test_early_stopping_continues_after_a_resume(pools: Pools, tmp_path: Path) -> None:
    for found in pools("gloo", 2).run(stopped, str(tmp_path / "run")):
        first, at, reason, step, waited, best = found
        assert (first, at) == ("", 6)
        assert reason.startswith("validation_loss has not improved in 4 evaluations: the best was ")
        assert reason.endswith(", at step 2")
        assert (step, waited, best) == (10, 4, 2)


def out_of_time(comm: Any, folder: str) -> tuple[str, int, int]:
    one = engine("dp=2")
    history = one.fit(data(8), epochs=10**6, max_time=0.3 if comm.rank else "1h", save=folder, **GIVEN)
    saved = uni.Checkpoints(f"{folder}/checkpoints").steps()[-1]
    return history.stopped, history.step, saved


def test_a_run_ends_in_time_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    ends = pools("gloo", 2).run(out_of_time, str(tmp_path / "run"))
    assert len({end[1:] for end in ends}) == 1
    for reason, step, saved in ends:
        assert "max_time" in reason
        assert step == saved > 0


def test_a_best_value_is_one_that_is_finite() -> None:
    best = uni.EarlyStopping("validation_accuracy", 2, min_delta=0.1)
    asked = []
    for step, value in enumerate((math.nan, 0.5, 0.55, 0.7, math.inf, 0.75), 1):
        info = StepInfo(step, 1, 1, None, 0.0, (), 1, None, 1.0, values={"validation_accuracy": value})
        asked.append(best.on_evaluation(None, info))  # type: ignore[arg-type]
    assert asked == [False, False, False, False, False, True]
    assert (best.best, best.best_step) == (0.7, 4)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"evaluate_every": 2, "validation": None}, r"fit\(evaluate_every=\) without validation="),
        ({"callbacks": [uni.EarlyStopping()], "validation": None}, r"fit\(EarlyStopping\) without validation="),
        ({"callbacks": [uni.EarlyStopping("validation_los", mode="min")]}, "but the evaluation gives validation_loss"),
        ({"save_best": "validation_loss"}, r"fit\(save_best='validation_loss'\) needs save=FOLDER"),
        ({"max_time": "soon"}, r'max_time=\'soon\'\): expected seconds, or a text such as "90m"'),
        ({"max_time": 0}, "max_time=0"),
        ({"evaluate_every": 0}, "evaluate_every"),
    ],
)
def test_refusals(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        engine("dp=1").fit(data(8), **{**GIVEN, **given})


def test_early_stopping_refuses() -> None:
    with pytest.raises(UsageError, match='whether less or more of it is better is not known; give mode="min"'):
        uni.EarlyStopping("validation_f1")
    with pytest.raises(UsageError, match="patience"):
        uni.EarlyStopping(patience=0)
    with pytest.raises(UsageError, match="min_delta=-1"):
        uni.EarlyStopping(min_delta=-1)


def test_the_page_has_all_that_a_callback_gets() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "callbacks.md").read_text(encoding="utf-8")
    tables = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    methods = [name for name, each in vars(uni.Callback).items() if callable(each) and not name.startswith("_")]
    assert len(methods) == 9
    assert [name for name in methods if f"`{name}(" not in tables] == []
    assert [each.name for each in fields(StepInfo) if f"`{each.name}`" not in tables] == []
