"""The Engine under several plans: the same losses, metrics, outputs and data as on one process; and its refusals."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from tests.train import stores
from unisono.errors import CheckpointError, UnisonoError, UsageError
from unisono.launch import environment
from unisono.planner.measure.machine import HARDWARE
from unisono.train.fit import NonFiniteLoss
from unisono.train.telemetry.straggler import straggler_message

PLANS = ["dp=2,pp=2,microbatches=2", "dp=2,cp=2", "dp=2,tp=2,zero=2"]
TOLERANCE = 1e-9
TWO_CORES = Path(__file__).resolve().parents[2] / "tools" / "two_cores.toml"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (each(h).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.o(y))
        return x + self.fc2(torch.relu(self.fc1(x)))


class Words(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


RULES = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o": "row", "*.fc1": "column", "*.fc2": "row"}


def data(rows: int = 21) -> list[tuple[torch.Tensor, torch.Tensor]]:
    words = torch.randint(11, (rows, 9), generator=torch.Generator().manual_seed(1))
    return [(row[:-1], row[1:]) for row in words]


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).double().mean()


class Seen(uni.Callback):
    def __init__(self, stop_at: int | None = None) -> None:
        self.ids: list[int] = []
        self.stop_at = stop_at

    def on_step(self, engine: uni.Engine, info: Any) -> bool:
        self.ids += info.ids
        return info.step == self.stop_at


def engine(plan: str, metrics: Any = None, model: Any = None, check: str = "off") -> uni.Engine:
    return uni.Engine(
        model or (lambda: Words().double()),
        loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        metrics=metrics,
        plan=plan,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        clip=1.0,
        rules=RULES,
        seed=3,
        check=check,
    )


def trained(comm: Any, plan: str) -> dict[str, Any]:
    one = engine(plan, ["accuracy", uni.Accuracy(3), "perplexity", right])
    seen = Seen()
    history = one.fit(data(), epochs=2, batch_size=8, validation=data(12), callbacks=[seen], progress=False)
    values = one.evaluate(data(12), batch_size=4)
    outputs = one.predict(torch.stack([x for x, _ in data(5)]))
    return {
        "losses": history.losses,
        "ids": seen.ids,
        "values": values,
        "during": history.values[-1],
        "outputs": outputs,
    }


@pytest.fixture(scope="module")
def alone(pools: Callable[[str, int], RankPool]) -> dict[str, Any]:
    return pools("gloo", 1).run(trained, "dp=1")[0]


def shifted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of a language model whose targets are its inputs."""
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def smoothed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def perplexities(comm: Any, plan: str) -> dict[str, Any]:
    def evaluated(loss: Any, metric: Any) -> dict[str, float]:
        made = uni.Engine(
            lambda: Words().double(),
            loss,
            lambda p: torch.optim.SGD(p, lr=0.1),
            metrics=[metric],
            plan=plan,
            rules=RULES,
            check="off",
        )
        made.prepare(tuple(torch.stack(each) for each in zip(*data(4), strict=True)))
        return made.evaluate(data(12), batch_size=4)

    with pytest.raises(UsageError, match="the training loss is neither"):
        evaluated(smoothed, "perplexity")
    return {"shifted": evaluated(shifted, "perplexity"), "as told": evaluated(smoothed, uni.Perplexity(shift=0))}


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_perplexity_is_that_of_the_loss(plan: str, pools: Callable[[str, int], RankPool]) -> None:
    for found in pools("gloo", 2).run(perplexities, plan):
        assert found["shifted"]["perplexity"] == pytest.approx(math.exp(found["shifted"]["loss"]))
        assert found["as told"]["perplexity"] != pytest.approx(math.exp(found["as told"]["loss"]))


@pytest.mark.parametrize("plan", PLANS)
def test_every_rank_sees_what_one_process_sees(
    plan: str, alone: dict[str, Any], pools: Callable[[str, int], RankPool]
) -> None:
    assert len(alone["losses"]) == 6
    assert sorted(alone["ids"][:21]) == list(range(21)), "an epoch shows every sample once"
    assert alone["values"]["accuracy"] == pytest.approx(alone["values"]["right"])
    assert alone["values"]["perplexity"] == pytest.approx(math.exp(alone["values"]["loss"]))
    assert alone["during"]["validation_loss"] == pytest.approx(alone["values"]["loss"])
    for found in pools("gloo", 4).run(trained, plan):
        assert found["ids"] == alone["ids"]
        assert found["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
        assert found["values"] == pytest.approx(alone["values"], rel=1e-7)
        assert found["during"] == pytest.approx(alone["during"], rel=1e-7)
        torch.testing.assert_close(found["outputs"], alone["outputs"], rtol=1e-9, atol=1e-9)


class WordsWithLabels(Words):
    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return loss(super().forward(tokens), labels)


def trained_by_its_own_loss(comm: Any, plan: str) -> tuple[list[float], float]:
    """On samples that are dicts, of which some have fewer labels that count."""
    samples = [{"tokens": x, "labels": y.where(y > 2, -100)} for x, y in data()]
    one = uni.Engine(
        lambda: WordsWithLabels().double(),
        lambda outputs, targets: outputs,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        plan=plan,
        seed=3,
        check="off",
    )
    losses = one.fit(samples, epochs=2, batch_size=8, progress=False).losses
    return losses, one.evaluate(samples, batch_size=7)["loss"]


def test_a_dataset_of_dicts_is_for_models_that_compute_the_loss(pools: Callable[[str, int], RankPool]) -> None:
    alone, value = pools("gloo", 1).run(trained_by_its_own_loss, "dp=1")[0]
    assert len(alone) == 6
    for losses, mean in pools("gloo", 4).run(trained_by_its_own_loss, "dp=2,zero=1,pp=2,microbatches=2"):
        assert losses == pytest.approx(alone, rel=TOLERANCE)
        assert mean == pytest.approx(value, rel=1e-9)


# ---- stop and go on ------------------------------------------------------------------------------------------------


def stopped(comm: Any, plan: str, folder: str, at: int) -> Any:
    seen = Seen(at)
    history = engine(plan).fit(
        data(), epochs=2, batch_size=8, save=folder, save_every=2, callbacks=[seen], progress=False
    )
    return seen.ids, history.losses, history.stopped


def resumed(comm: Any, plan: str, folder: str) -> Any:
    seen = Seen()
    history = engine(plan).fit(
        data(), epochs=2, batch_size=8, save=folder, resume=True, callbacks=[seen], progress=False
    )
    return seen.ids, history.losses, history.first_step


@pytest.mark.thorough
def test_a_run_goes_on_in_mid_epoch_under_another_plan(
    tmp_path: Path, alone: dict[str, Any], pools: Callable[[str, int], RankPool]
) -> None:
    folder = str(tmp_path / "run")
    pool = pools("gloo", 4)
    ids, losses, why = pool.run(stopped, "dp=2,pp=2,microbatches=2", folder, 4)[0]
    assert (len(losses), why) == (4, "a callback ended it")
    for more_ids, more, first in pool.run(resumed, "dp=2,tp=2,zero=2", folder):
        assert first == 4
        assert ids + more_ids == alone["ids"], "no sample twice, none left out"
        assert losses + more == pytest.approx(alone["losses"], rel=TOLERANCE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [start["plan"] for start in starts] == ["dp=2,pp=2,microbatches=2", "dp=2,tp=2,zero=2"]
    assert [start["first_step"] for start in starts] == [0, 4]


def expected_again(comm: Any, directory: str) -> None:
    """Ranks that a launcher has started again go by what was measured before; a user's own resume measures anew."""
    given: dict[str, Any] = {"batch_size": 10, "save": f"{directory}/run", "progress": False}
    first = engine("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARDWARE, str(TWO_CORES))
        first.fit(data(), max_steps=1, **given)
    expected = first.choice
    assert expected is not None
    assert (expected.seconds or 0) > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environment.ATTEMPT, "1")
        again = engine("auto")
        again.fit(data(), max_steps=2, **given)
        assert again.choice is not None
        assert (again.choice.plan, again.choice.seconds, again.choice.memory) == (
            expected.plan,
            expected.seconds,
            expected.memory,
        )
    resumed = engine("auto")
    resumed.fit(data(), max_steps=3, resume=True, **given)
    assert resumed.choice is None


def test_what_was_expected_is_known_after_a_restart(tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(expected_again, str(tmp_path))


def recorded(comm: Any, folder: str) -> None:
    for name, model in (("function", lambda: Words().double()), ("module", Words().double())):
        trained = engine("dp=2", model=model)
        trained.fit(data(16), max_steps=2, batch_size=8, save=f"{folder}/{name}", progress=False)


def test_a_run_folder_has_the_program_of_a_step(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    pools("gloo", 2).run(recorded, str(tmp_path))
    of_function, of_module = ((tmp_path / name / "program.html").read_text() for name in ("function", "module"))
    assert "all_reduce" in of_function
    assert of_module == of_function  # which the plan sharded in place


def refused_folders(comm: Any, directory: str) -> None:
    tmp_path = Path(directory)
    folder = str(tmp_path / "run")
    given: dict[str, Any] = {"batch_size": 10, "save": folder, "progress": False}
    engine("dp=1").fit(data(), **given)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"has checkpoints of an earlier run .* resume=True"):
        engine("dp=1").fit(data(), **given)
    with pytest.raises(CheckpointError, match="is of another model"):
        engine("dp=1", model=lambda: Words(16).double()).fit(data(), **given, resume=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_folder_of_another_run_is_not_touched(tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(refused_folders, str(tmp_path))


def saved_and_loaded(comm: Any, directory: str) -> None:
    tmp_path = Path(directory)
    batch = torch.utils.data.default_collate(data(8))
    one, other = engine("dp=1").prepare(batch), engine("dp=1").prepare(batch)
    for _ in range(2):
        one.run(batch)
    one.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert float(one.run(batch)) == float(other.run(batch))
    assert one.schedule.last_epoch == other.schedule.last_epoch == 3
    fewer = engine("dp=1").prepare(batch)
    fewer.run(batch)
    fewer.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert other.ready.steps == 1, "what was saved last, though of fewer steps"
    for step in (1, 2):
        uni.Checkpoints(tmp_path / "of a run").save(fewer.ready, step)
    with pytest.raises(UsageError, match="holds the checkpoints of steps 1, 2; they would be deleted"):
        fewer.save(tmp_path / "of a run")
    with pytest.raises(CheckpointError, match=r"saved/step-00000001, which is a checkpoint itself: give"):
        other.load(tmp_path / "saved" / "step-00000001")
    other._scheduler, other.trainer = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), None
    with pytest.raises(CheckpointError, match="a scheduler CosineAnnealingLR, but this one is StepLR"):
        other.prepare(batch).load(tmp_path / "saved")
    other._optimizer, other.trainer = torch.optim.SGD, None
    with pytest.raises(CheckpointError, match="the optimizer was AdamW, but this one is SGD"):
        other.prepare(batch).load(tmp_path / "saved")

    normed = uni.Engine(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.functional.mse_loss, torch.optim.SGD, plan="dp=1"
    )
    normed.prepare((torch.zeros(8, 4), torch.zeros(8, 3)))
    assert normed.about_model() == {"name": "Sequential", "parameters": 15 + 6}, "and not its statistics"


def test_save_and_load(tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(saved_and_loaded, str(tmp_path))


def gone_on(comm: Any, directory: str) -> None:
    """Steps and epochs count from where a fit began, and what a batch_size or an end of data leaves is trained."""
    given: dict[str, Any] = {"progress": False}
    one = engine("dp=1")
    assert len(one.fit(data(), batch_size=10, **given).losses) == 3
    assert len(one.fit(data(), batch_size=10, **given).losses) == 3, "a second fit trains"
    assert one.fit(data(), batch_size=10, max_steps=2, **given).step == 8
    loader = one.dataloader(data(), 10)
    assert len(one.fit(loader, **given).losses) == 3
    with pytest.raises(UsageError, match=r"has completed 1 epochs, and fit\(epochs=1\) ends there"):
        one.fit(loader, **given)
    saved: dict[str, Any] = {"save": f"{directory}/run", **given}
    engine("dp=1").fit(data(), batch_size=5, **saved)
    larger = engine("dp=1").fit(data(), batch_size=15, epochs=3, resume=True, **saved)
    assert (larger.first_step, len(larger.losses)) == (5, 4), "two epochs are left, of two batches"
    for when in ("first", "then"):  # of data whose end only a look tells, saved at the end of an epoch
        flowing: dict[str, Any] = {
            "batch_size": 10,
            "save": f"{directory}/flow",
            "save_every": 3,
            "resume": when == "then",
        }
        history = engine("dp=1").fit(Flow(), epochs=1 if when == "first" else 2, **flowing, **given)
        assert len(history.losses) == 3


class Fails(uni.Metric):
    """The first time that it is asked for a whole epoch."""

    name = "fails"
    asked = 0

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        Fails.asked += 1
        if Fails.asked == 2:  # the first was before training
            raise KeyboardInterrupt
        return torch.ones(1)

    def value(self, sums: torch.Tensor) -> float:
        return 1.0


def evaluated(comm: Any, directory: str) -> None:
    """However a run ends between the last step of an epoch and the evaluation that follows, it is made, and once."""
    for name, dataset in (("listed", data()), ("flowing", Flow())):
        given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "validation": data(4), "progress": False}
        given |= {"save": f"{directory}/{name}", "save_every": 3}
        first = engine("dp=1").fit(dataset, callbacks=[Seen(3)], **given)
        assert (first.step, first.stopped, first.values) == (3, "a callback ended it", [])
        assert [len(engine("dp=1").fit(dataset, resume=True, **given).values) for _ in range(2)] == [2, 0]
        lines = [json.loads(line) for line in Path(directory, name, "steps.jsonl").read_text().splitlines()]
        reported = [(line["step"], "loss" in line) for line in lines]
        assert reported == [(1, True), (2, True), (3, True), (3, False), (4, True), (5, True), (6, True), (6, False)]
    given |= {"save": f"{directory}/killed", "save_every": 1}
    with pytest.raises(KeyboardInterrupt):
        engine("dp=1", [Fails()]).fit(data(), **given)
    again = engine("dp=1", [Fails()]).fit(data(), resume=True, **given)
    assert (again.first_step, len(again.values)) == (2, 2)


def test_every_epoch_is_evaluated_once(tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(evaluated, str(tmp_path))


class Crammed(uni.Callback):
    """After a checkpoint, no file can grow, as on a full disk."""

    def __init__(self, directory: str) -> None:
        self.saved = Path(directory, "run", "checkpoints", "step-00000002")

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        if info.step == 3:
            until = time.monotonic() + 60
            while not self.saved.exists() and time.monotonic() < until:
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def on_a_full_disk(comm: Any, directory: str) -> None:
    given: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 8,
        "save": f"{directory}/run",
        "save_every": 2,
        "progress": False,
    }
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(
            UnisonoError,
            match=r"the checkpoint of step 4 was not saved in .*: File too large .* are intact",
        ):
            engine("dp=1").fit(data(), callbacks=[Crammed(directory)], **given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert engine("dp=1").fit(data(), resume=True, **given).first_step == 2


def test_a_full_disk_is_reported_of_and_loses_nothing(tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(on_a_full_disk, str(tmp_path))


class Flow(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


def test_a_fit_goes_on_from_where_it_is(tmp_path: Path, pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(gone_on, str(tmp_path))


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def own_loaders(comm: Any, plan: str) -> dict[str, Any]:
    """Losses and values by loaders that a user made, of which one does not know of the plan."""
    one = engine(plan, ["accuracy", right])
    one._loss = summed
    found: dict[str, Any] = {}
    found["fitted"] = one.fit(uni.Loader(data(), 8, collate=torch.utils.data.default_collate), progress=False).losses
    found["again"] = one.fit(uni.Loader(data(), 8), progress=False).losses
    found["of data"] = one.evaluate(data(12), 4)
    found["whole"] = one.evaluate(uni.Loader(data(12), 4, shuffle=False))
    found["collated"] = one.evaluate(uni.Loader(data(12), 4, collate=torch.utils.data.default_collate))
    for part, words in ((one.ready.part, "is a function, which needs global batches"), ((1, 4), "rank's part")):
        if comm.size > 1:
            with pytest.raises(UsageError, match=words):
                one.evaluate(uni.Loader(data(12), 4, part=part))
    return found


def test_loaders_of_ones_own(pools: Callable[[str, int], RankPool]) -> None:
    alone = pools("gloo", 1).run(own_loaders, "dp=1")[0]
    assert alone["whole"] == alone["of data"]
    assert len(alone["fitted"]) == 3
    for found in pools("gloo", 2).run(own_loaders, "dp=2"):
        for name, values in alone.items():
            assert found[name] == pytest.approx(values, rel=TOLERANCE), name


# ---- a loss that is no number --------------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Divides by zero when it meets token 10 in the first place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Reciprocal())
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))


class Reciprocal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.detach().abs().max() < 1e3).to(x.dtype)


def breaking(comm: Any, nonfinite: str, folder: str) -> Any:
    rows = torch.ones(16, 4)
    rows[5] = 1e6
    samples = [(row, torch.tensor(0)) for row in rows]
    one = uni.Engine(Breaks, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=1e-3), plan=f"dp={comm.size}")
    try:
        history = one.fit(
            samples, batch_size=4, shuffle=False, nonfinite=nonfinite, save=folder, save_every=1, progress=False
        )
    except NonFiniteLoss as error:
        return str(error)
    held = [parameter.isfinite().all() for parameter in one.model.parameters()]
    return history.skipped, history.step, all(held)


def strict(line: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_loss_that_is_no_number_names_step_samples_and_module(
    tmp_path: Path, pools: Callable[[str, int], RankPool]
) -> None:
    for reported in pools("gloo", 2).run(breaking, "stop", str(tmp_path / "stop")):
        assert "at step 2 (epoch 1) on samples [4, 5, 6, 7]" in reported
        assert "inner.1 (Reciprocal) returned" in reported
        assert "(rank 0)" in reported
    saved = sorted(path.name for path in (tmp_path / "stop" / "checkpoints").iterdir())
    assert saved == ["step-00000001"], "what was being written when it stopped"
    assert pools("gloo", 2).run(breaking, "skip", str(tmp_path / "skip")) == [(1, 4, True)] * 2
    lines = [strict(line) for line in (tmp_path / "skip" / "steps.jsonl").read_text().splitlines()]
    assert [(line["loss"] is None, line.get("skipped", False)) for line in lines] == [
        (number == 1, number == 1) for number in range(4)
    ]


class Spiked(Words):
    """One token is embedded far away, and the second block cannot bear it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        with torch.no_grad():
            self.tokens.weight[11] = 1e5
        self.blocks[1].norm = nn.Sequential(Counting(), self.blocks[1].norm)


class Counting(Reciprocal):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("met", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.met += 1
        return super().forward(x)


class Kept(uni.Callback):
    """The full state after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_step(self, engine: uni.Engine, info: Any) -> None:
        self.states.append(copy.deepcopy(engine.ready.state_dict()))


def spiked(comm: Any, plan: str) -> tuple[list[str], int, str]:
    """How the state of a skipped step differs from that before; how many were; and what stops where it is not asked."""
    samples = data(16)
    samples[13][0][0] = 11
    one, kept = engine(plan, model=lambda: Spiked().double()), Kept()
    given: dict[str, Any] = {"batch_size": 8, "shuffle": False, "progress": False}
    skipped = one.fit(samples, **given, nonfinite="skip", callbacks=[kept]).skipped
    before, after = kept.states
    before["steps"] += 1
    faults = stores.unequal(after, before) + ([] if one.schedule.last_epoch == 1 else ["the scheduler went on"])
    with pytest.raises(NonFiniteLoss) as reported:
        one.fit(samples, **given)
    return faults, skipped, str(reported.value)


class Table:
    """Of columns with names, as a DataFrame."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize("plan", ["dp=2,tp=2,sp", "dp=2,pp=2,zero=3"])
def test_under_every_plan_the_same_module_is_named_and_the_same_state_kept(
    plan: str, pools: Callable[[str, int], RankPool]
) -> None:
    answers = pools("gloo", 4).run(spiked, plan)
    for faults, skipped, reported in answers:
        assert (faults, skipped) == ([], 1)
        assert reported == answers[0][2]
        assert "at step 4 (epoch 1) on samples [8, 9, 10, 11, 12, 13, 14, 15]" in reported
        assert "blocks.1.norm.0 (Counting) returned infinity for finite inputs" in reported


# ---- bad input -----------------------------------------------------------------------------------------------------


class Untouched(uni.Callback):
    def on_step(self, engine: uni.Engine, info: Any) -> None:
        raise AssertionError("it was trained")


class Counts(uni.Metric):
    name = "counts"

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones(2)

    def value(self, sums: torch.Tensor) -> Any:
        return sums


class Nothing(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def refused_input(comm: Any) -> None:
    def vector(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(-1) == targets).double()

    with pytest.raises(UsageError, match="unknown key 'dq'"):
        engine("dq=2")
    with pytest.raises(UsageError, match="metric 'acuracy'"):
        engine("dp=1", ["acuracy"])
    with pytest.raises(UsageError, match=r"metric 'vector' returned a tensor of shape \[8, 8\]; expected one number"):
        engine("dp=1", [vector]).fit(data(), batch_size=8, progress=False)
    with pytest.raises(UsageError, match="dataset is empty"):
        engine("dp=1").fit([], batch_size=8)
    with pytest.raises(UsageError, match="top12: the outputs have 11 classes"):
        engine("dp=1", [uni.Accuracy(12)]).fit(data(), validation=data(), progress=False, callbacks=[Untouched()])
    with pytest.raises(UsageError, match=r"metric 'counts' returned a tensor of shape \[2\]"):
        engine("dp=1", [Counts()]).fit(data(), validation=data(), progress=False, callbacks=[Untouched()])
    prepared = engine("dp=1", ["accuracy"]).prepare(torch.utils.data.default_collate(data(8)))
    with pytest.raises(UsageError, match="the dataset to evaluate is empty"):
        prepared.evaluate(Nothing())
    with pytest.raises(UsageError, match="the dataset had no sample in epoch 1"):
        prepared.fit(Nothing(), progress=False)
    with pytest.raises(UsageError, match="predict was given no sample"):
        prepared.predict(torch.zeros(0, 8, dtype=torch.long))
    for wrong, words in (("1", "clip='1'"), (float("nan"), "clip=nan"), (True, "clip=True")):
        with pytest.raises(UsageError, match=words):
            uni.Engine(Words, loss, torch.optim.SGD, clip=wrong)  # type: ignore[arg-type]
    for seed in (-1, 1.5, 2**63):
        with pytest.raises(UsageError, match="seed"):
            uni.Engine(Words, loss, torch.optim.SGD, seed=seed)  # type: ignore[arg-type]
    for save in ("", 3):
        with pytest.raises(UsageError, match=r"fit\(save=.*: expected the path of a folder"):
            prepared.fit(data(), save=save)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected a list of uni\.Callback"):
        prepared.fit(data(), callbacks=Seen())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the batch has no sample"):
        prepared.run((torch.zeros(0, 8, dtype=torch.long), torch.zeros(0, 8, dtype=torch.long)))
    with pytest.raises(UsageError, match="predict was given a list of tuples, like a dataset"):
        prepared.predict(data(4))
    with pytest.raises(UsageError, match=r"samples of this dataset cannot be collated: .*give them equal shapes"):
        prepared.predict([{"ids": [1, 2]}, {"ids": [1, 2, 3]}])
    with pytest.raises(UsageError, match="a batch of Table without tensors"):
        prepared.predict(Table())
    plateau = uni.Engine(
        Words, loss, torch.optim.SGD, plan="dp=1", scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau
    )
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau\.step needs metrics"):
        plateau.fit(data(), progress=False)
    several = uni.Engine(Words, loss, torch.optim.LBFGS, plan="dp=1")
    with pytest.raises(UsageError, match=r"nonfinite='skip'\) with LBFGS"):
        several.fit(data(), nonfinite="skip", progress=False)
    broken = engine("dp=1").prepare(torch.utils.data.default_collate(data(8)))
    with torch.no_grad():
        broken.model.get_parameter("head.weight")[0] = math.nan
    with pytest.raises(NonFiniteLoss, match=r"parameter head.weight is not finite .* Training cannot continue"):
        broken.fit(data(), nonfinite="skip", progress=False)
    with pytest.raises(UsageError, match="epochs=0"):
        engine("dp=1").fit(data(), epochs=0)
    with pytest.raises(UsageError, match="nonfinite='ignore'"):
        engine("dp=1").fit(data(), nonfinite="ignore")
    with pytest.raises(UsageError, match="needs save=FOLDER"):
        engine("dp=1").fit(data(), resume=True)
    with pytest.raises(UsageError, match="no plan yet"):
        engine("dp=1").predict(torch.zeros(2, 8, dtype=torch.long))
    unreduced = uni.Engine(
        Words,
        lambda outputs, targets: nn.functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction="none"
        ),
        lambda p: torch.optim.SGD(p, lr=0.1),
        plan="dp=1",
    )
    with pytest.raises(UsageError, match="expected one number in a tensor"):
        unreduced.fit(data(), batch_size=8, progress=False)


def test_bad_input_is_refused_before_training(pools: Callable[[str, int], RankPool]) -> None:
    pools("gloo", 1).run(refused_input)


class Normalised(Words):
    """Samples have an effect on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (-1, 8)), self.head)


def on_small_batches(comm: Any, plan: str) -> list[Any]:
    """A last batch of one sample, and fewer samples to evaluate and to predict than ranks and microbatches."""
    one = engine(plan, ["accuracy"])
    losses = one.fit(data(9), batch_size=8, epochs=2, validation=data(1), progress=False).losses
    return [losses, one.evaluate(data(3), batch_size=2), one.predict(data(1)[0][0][None]).tolist()]


@pytest.mark.parametrize("plan", ["dp=4", "dp=2,zero=3,tp=2", "pp=2,dp=2,microbatches=2", "dp=2,microbatches=4"])
def test_batches_smaller_than_the_number_of_ranks(plan: str, pools: Callable[[str, int], RankPool]) -> None:
    expected = pools("gloo", 1).run(on_small_batches, "dp=1")[0]
    ranks = 2 if plan == "dp=2,microbatches=4" else 4
    for losses, values, outputs in pools("gloo", ranks).run(on_small_batches, plan):
        assert losses == pytest.approx(expected[0], rel=TOLERANCE)
        assert values == pytest.approx(expected[1], rel=1e-7)
        torch.testing.assert_close(torch.tensor(outputs), torch.tensor(expected[2]))


def too_small(comm: Any) -> str:
    try:
        engine("pp=2,dp=2,microbatches=1", model=lambda: Normalised().double()).fit(
            data(9), batch_size=8, progress=False
        )
    except UsageError as error:
        return str(error)
    return ""


def test_a_last_batch_too_small_for_the_pipeline_is_refused(pools: Callable[[str, int], RankPool]) -> None:
    for reported in pools("gloo", 4).run(too_small):
        assert reported.startswith("the smallest training batch of an epoch has 1 samples (batch_size=8), but plan")


def with_data_of_its_own(comm: Any) -> str:
    torch.manual_seed(comm.rank)
    inputs = torch.randint(11, (8, 8))
    with pytest.raises(UsageError) as reported:
        engine("tp=2").fit([(row, row) for row in inputs], batch_size=8, progress=False)
    return str(reported.value)


def test_data_that_differs_among_ranks_is_refused(pools: Callable[[str, int], RankPool]) -> None:
    for reported in pools("gloo", 2).run(with_data_of_its_own):
        assert reported.startswith("the first batch that rank 1 reads is not the one that rank 0 reads")


class Dawdling(uni.Callback):
    def on_step(self, engine: uni.Engine, info: Any) -> None:
        if engine.comm.rank == 1:
            time.sleep(max(0.05, info.seconds))  # at least as long as a step takes, however busy the machine is


MACHINE = Path(__file__).resolve().parents[2] / "tools" / "two_cores.toml"


@contextlib.contextmanager
def known_machine() -> Iterator[None]:
    """The prediction is for this machine description; none is measured."""
    os.environ[HARDWARE] = str(MACHINE)
    try:
        yield
    finally:
        del os.environ[HARDWARE]


def with_a_slow_rank(comm: uni.Communicator) -> str:
    made = uni.Engine(nn.Linear(4, 2), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2")
    rows = [(torch.ones(4), torch.ones(2))] * 16
    with known_machine(), contextlib.redirect_stdout(io.StringIO()) as shown:
        made.fit(rows, epochs=1000, max_steps=20, batch_size=4, callbacks=[Dawdling()])
    return shown.getvalue()


def test_a_slow_rank_is_named_where_people_look(pools: Callable[[str, int], RankPool]) -> None:
    shown, silent = pools("gloo", 2).run(with_a_slow_rank)
    assert re.search(r"^rank 1 on \S+ is slow: it was busy \d+% of the time", shown, re.MULTILINE), shown
    assert "rank 0 on" not in shown
    assert silent == ""


def test_the_slow_rank_is_named() -> None:
    assert straggler_message([1.0, 1.1, 4.0, 0.9], 5.0, ["a", "a", "b", "b"]).startswith(
        "rank 2 on b is slow: it was busy 80%"
    )
    assert straggler_message([1.0, 1.1, 1.2, 0.9], 5.0, ["a"] * 4) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu(precision: str, tmp_path: Path) -> None:
    """One rank with a GPU: the same course of the loss as on the CPU, and a checkpoint that goes on there."""

    def course(device: str, **more: Any) -> list[float]:
        one = uni.Engine(
            Words,
            loss,
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            ["accuracy"],
            "dp=1",
            precision=precision,
            device=device,
        )
        return one.fit(data(), epochs=2, batch_size=8, validation=data(12), progress=False, **more).losses

    on_cpu = course("cpu")
    on_gpu = course("cuda", save=tmp_path / "run", max_steps=5)
    assert on_gpu == pytest.approx(on_cpu[:5], rel=1e-4 if precision == "fp32" else 3e-2)
    assert course("cpu", save=tmp_path / "run", resume=True) == pytest.approx(
        on_cpu[5:], rel=1e-4 if precision == "fp32" else 3e-2
    )
