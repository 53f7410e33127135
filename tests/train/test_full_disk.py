"""A disk that fills while a job runs: logs are lost and not the training, and a restart makes room first."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

import unisono as uni
from unisono.errors import UsageError
from unisono.report.run_record import Run
from unisono.train.engine import Engine
from unisono.train.telemetry.progress import Display


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    yield
    uni.shutdown()


def engine() -> Engine:
    return Engine(lambda: nn.Linear(3, 2), loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 3, generator=generator), torch.randint(2, (64,), generator=generator))


def fill(disk: Path, name: str = "filler") -> Path:
    file = disk / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(bytes(512))
        except OSError:
            return file


class FullBetween(uni.Callback):
    """The disk is full from the end of one step to the end of another."""

    def __init__(self, disk: Path, first: int, last: int) -> None:
        self.disk, self.first, self.last = disk, first, last

    def on_step(self, engine: Engine, info: Any) -> None:
        if info.step == self.first:
            fill(self.disk)
        elif info.step == self.last:
            (self.disk / "filler").unlink()


def test_logs_that_cannot_be_written_stop_no_run(full_disk: Path) -> None:
    run = full_disk / "run"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filling = FullBetween(full_disk, 5, 70)
        history = engine().fit(
            samples(), epochs=10, batch_size=8, save=run, save_every=1000, callbacks=[filling], progress=False
        )
    assert len(history.losses) == 80
    texts = [str(each.message) for each in caught]
    assert any(f"is not logged in {run}" in text and "0 B are free there" in text for text in texts), texts
    logged = [line["step"] for line in Run.read(run).steps]
    assert logged[:4] == [1, 2, 3, 4]
    assert logged[-8:] == list(range(73, 81)), "the log goes on when it can"
    assert uni.Checkpoints(run / "checkpoints").steps() == [80]


def test_a_restart_makes_room_before_it_asks_for_any(full_disk: Path) -> None:
    run = full_disk / "run"
    engine().fit(samples(), epochs=1, batch_size=8, save=run, progress=False)
    fill(full_disk, "run/checkpoints/.writing-00000009-dead/rank-00000.safetensors")
    history = engine().fit(samples(), epochs=2, batch_size=8, save=run, resume=True, progress=False)
    assert (history.first_step, history.step) == (8, 16)
    fill(full_disk)
    with pytest.raises(UsageError, match=rf"{run}: cannot be created: No space left on device, 0 B are free"):
        engine().fit(samples(), epochs=3, batch_size=8, save=run, resume=True, progress=False)
    assert json.loads((run / "run.json").read_text())["starts"], "what was noted before is not lost"
    assert not (run / "run.json.new").exists()


def test_an_output_that_cannot_be_written_stops_no_run() -> None:
    display = Display(True, Console(file=open("/dev/full", "w", buffering=1), force_terminal=True))  # noqa: SIM115
    engine().fit(samples(), epochs=1, batch_size=8, progress=False, callbacks=[display])
    display.message("and neither does a sentence")
