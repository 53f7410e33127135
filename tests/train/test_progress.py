"""The line that a person sees of a run, on terminals of any width."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from unisono.train.callbacks import StepInfo
from unisono.train.telemetry.progress import Display

NO_ENGINE: Any = None


def line(width: int) -> str:
    """The bar after a step of 140, as it stands on the terminal."""
    info = StepInfo(80, 1, 3, 140, 2.8131, (0.0024,), 32, 2048, 0.794, 0.073, (349 << 20, 362 << 20))
    shown = io.StringIO()
    display = Display(True, Console(file=shown, width=width, force_terminal=True, highlight=False, soft_wrap=True))
    display.on_start(NO_ENGINE, 0, 140)
    display.on_step(NO_ENGINE, info)
    display.on_end(NO_ENGINE, info)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue().replace("\r", "\n")).strip().splitlines()[-1].strip()


@pytest.mark.parametrize("width", [56, 60, 76, 116, 160])
def test_the_bar_has_room_for_its_end(width: int) -> None:
    reported = line(width)
    assert len(reported) <= width
    assert re.match(r"epoch 1/3 [━╸╺ ]{8,} +80/140 loss 2\.8131", reported), reported
    assert reported.endswith("-:--:--"), reported
    assert "…" not in reported


def test_the_wider_the_more_is_reported() -> None:
    assert "ms/step" not in line(56)
    assert "loss 2.8131, 794 ms/step" in line(60)
    assert "loss 2.8131, 40 samples/s, 2,579 tokens/s, 794 ms/step" in line(100)
    everything = "loss 2.8131, rate 0.0024, 40 samples/s, 2,579 tokens/s, 794 ms/step (predicted 73), 349-362 MiB/rank"
    assert everything in line(160)


def test_the_time_that_is_left_counts_what_is_done_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now = io.StringIO(), [100.0]
    monkeypatch.setattr("unisono.train.telemetry.progress.time.perf_counter", lambda: now[0])
    display = Display(True, Console(file=shown, force_terminal=False, soft_wrap=True))
    display.on_start(NO_ENGINE, 40, 140)
    now[0] += 120
    display.on_step(NO_ENGINE, StepInfo(80, 1, 3, 140, 2.8131, (), 32, None, 0.1))
    assert "step 80/140 loss 2.8131" in shown.getvalue()
    assert "3:00 left" in shown.getvalue(), "40 steps took two minutes, and 60 are to come"
