"""Loggers: what TensorBoard, W&B and MLflow get of a run, by their own packages, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uni
from tests.ranks import RankPool

Pools = Callable[[str, int], RankPool]


def data(samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(0, 8, (samples, 5), generator=torch.Generator().manual_seed(samples))
    return [(row, row.double().mean().reshape(1)) for row in ids]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids).mean(1))


def engine(plan: str) -> uni.Engine:
    return uni.Engine(
        lambda: Model().double(),
        nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        plan=plan,
        check="off",
    )


GIVEN: dict[str, Any] = {"batch_size": 4, "progress": False}


def losses(comm: Any, plan: str) -> list[float]:
    return engine(plan).fit(data(16), **GIVEN).losses


def logged(comm: Any, logger: Callable[[], uni.Callback], folder: str) -> list[float]:
    """Two steps, and after a resume two more."""
    given = {**GIVEN, "save": folder, "validation": data(4)}
    found = engine("dp=2").fit(data(16), max_steps=2, callbacks=[logger()], **given).losses
    return found + engine("dp=2").fit(data(16), resume=True, callbacks=[logger()], **given).losses


# ---- W&B -------------------------------------------------------------------------------------------------------------


def wandb_logger(folder: str) -> uni.Callback:
    return uni.WandbLogger("tests", mode="offline", dir=folder, settings={"silent": True, "console": "off"})


def with_wandb(comm: Any, folder: str) -> list[float]:
    return logged(comm, lambda: wandb_logger(folder), folder)


def records_of(file: Path) -> Iterator[Any]:
    """The records of an offline run: blocks of 32 KiB, as in a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, block, at, parts = file.read_bytes(), 32768, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        if not kind:
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.thorough
def test_wandb(pools: Pools, tmp_path: Path) -> None:
    (expected,) = pools("gloo", 1).run(losses, "dp=1")
    for found in pools("gloo", 2).run(with_wandb, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-12)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1  # rank 0's, and the resumed run has its id
    lines = []
    for file in files:
        for record in records_of(file):
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if items:
                lines.append({key: json.loads(value) for key, value in items.items()})
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(expected, rel=1e-12)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert all(line["samples_per_second"] > 0 and line["tokens_per_second"] > 0 for line in lines if "loss" in line)
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4]


# ---- MLflow ----------------------------------------------------------------------------------------------------------


def with_mlflow(comm: Any, folder: str) -> list[float]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    uri = (Path(folder) / "mlruns").as_uri()
    return logged(comm, lambda: uni.MLflowLogger("tests", tracking_uri=uri, params={"note": "x"}), folder)


@pytest.mark.thorough
def test_mlflow(pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    (expected,) = pools("gloo", 1).run(losses, "dp=1")
    for found in pools("gloo", 2).run(with_mlflow, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-12)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["plan"] == "dp=2"
    assert run.data.params["note"] == "x"
    history = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda metric: metric.step)
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert [metric.value for metric in history] == pytest.approx(expected, rel=1e-12)
    assert {"samples_per_second", "tokens_per_second", "validation_loss"} <= set(run.data.metrics)


# ---- TensorBoard, and any --------------------------------------------------------------------------------------------


def test_tensorboard_has_the_throughput(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = engine("dp=1").fit(data(16), save=tmp_path / "run", validation=data(4), **GIVEN)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(found.losses, rel=1e-6)
    for name in ("samples_per_second", "tokens_per_second"):
        assert all(event.value > 0 for event in events.Scalars(name))
    assert [event.step for event in events.Scalars("validation_loss")] == [4]


class Broken(uni.Logger):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def _act(self, name: str) -> None:
        self.calls += 1
        if name == self.at:
            raise ConnectionError("no server")

    def open(self, about: dict[str, Any], first_step: int) -> str | None:
        self._act("open")
        return "its id"

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._act("write")

    def close(self) -> None:
        self._act("close")


@pytest.mark.parametrize(("at", "calls"), [("open", 1), ("write", 2), ("close", 6), ("", 6)])
def test_a_failure_is_one_warning(at: str, calls: int) -> None:
    expected = engine("dp=1").fit(data(16), **GIVEN).losses
    logger = Broken(at)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine("dp=1").fit(data(16), callbacks=[logger], **GIVEN).losses == expected
    shown = [str(each.message) for each in caught if "Broken" in str(each.message)]
    assert shown == ["Broken failed and logs no more, training continues: no server"] * bool(at)
    assert logger.calls == calls


def test_a_run_folder_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        engine("dp=1").fit(data(16), save=tmp_path / "run", **GIVEN)
    assert (tmp_path / "run" / "steps.jsonl").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()
