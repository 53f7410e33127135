"""What a person sees of a run, from rank 0: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from unisono.train.callbacks import Callback
from unisono.train.moment import Moment

if TYPE_CHECKING:
    from unisono.train.engine import Engine

_REDRAW = 0.1  # seconds between two states of the bar
_BAR = 24  # its width, at most a seventh of the line
_LINES = 20  # plain lines that a run is worth, about


class Display(Callback):
    """Rank 0's view of the run; silent on the others."""

    def __init__(self, is_shown: bool, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._is_shown = is_shown
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._drawn = 0.0
        self._told = 0
        self._steps: int | None = None
        self._began, self._first = 0.0, 0  # when, and after which step
        self._memory: tuple[int, ...] = ()
        self._slow = ""

    def say(self, text: str) -> None:
        if self._is_shown:
            (self._bar.console if self._bar else self._console).print(text, markup=False)

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        self._steps = steps
        self._began, self._first = time.perf_counter(), first_step
        if not self._is_shown or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=self._bar_width),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step, epoch="", told="")
        self._bar.start()

    def on_step(self, engine: Engine, moment: Moment) -> None:
        self._memory = moment.memory or self._memory
        if moment.slow and moment.slow != self._slow:
            self.say(moment.slow)
        self._slow = moment.slow or self._slow
        if not self._is_shown:
            return
        is_last = moment.step == moment.steps
        if self._bar is not None:
            now = time.perf_counter()
            is_due = is_last or now - self._drawn > _REDRAW
            self._drawn = now if is_due else self._drawn
            epoch = f"{moment.epoch}/{moment.epochs}"
            told = _told(moment, self._memory, self._room(epoch))
            self._bar.update(self._task, completed=moment.step, epoch=epoch, told=told, refresh=is_due)
        elif is_last or self._told == 0 or moment.step - self._told >= max(1, (self._steps or 1000) // _LINES):
            self._told = moment.step
            of = f"/{moment.steps}" if moment.steps else ""
            left = f", {_clock(self._seconds_left(moment))} left" if moment.steps else ""
            self.say(f"epoch {moment.epoch} step {moment.step}{of} {_told(moment, self._memory)}{left}")

    def _seconds_left(self, moment: Moment) -> float:
        """By all that the run has done so far, evaluations and checkpoints too."""
        passed = time.perf_counter() - self._began
        return passed / (moment.step - self._first) * ((moment.steps or 0) - moment.step)

    @property
    def _bar_width(self) -> int:
        return min(_BAR, self._console.width // 7)

    def _room(self, epoch: str) -> int:
        """What the line has left for words beside the bar, the steps and the time that remains."""
        steps = 2 * len(str(self._steps or "?")) + 1
        return (
            self._console.width - len(f"epoch {epoch}") - self._bar_width - steps - len("0:00:00") - 4
        )  # spaces between

    def on_epoch(self, engine: Engine, moment: Moment) -> None:
        if moment.values:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in moment.values.items())
            self.say(f"epoch {moment.epoch}: {shown}")

    def on_end(self, engine: Engine, moment: Moment | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _told(moment: Moment, memory: tuple[int, ...], room: int | None = None) -> str:
    """What is told of a step; where there is little room, the less important parts are left out."""
    parts = _parts(moment, memory)
    chosen = sorted(parts, key=lambda part: _IMPORTANCE.index(part))
    while room is not None and len(chosen) > 1 and len(", ".join(parts[part] for part in chosen)) > room:
        chosen.pop()
    return ", ".join(text for part, text in parts.items() if part in chosen).replace(", (", " (")


_IMPORTANCE = ("loss", "step", "tokens", "samples", "predicted", "memory", "rate")


def _parts(moment: Moment, memory: tuple[int, ...]) -> dict[str, str]:
    parts = {"loss": f"loss {moment.loss:.4f}" + (" (skipped)" if moment.skipped else "")}
    if moment.rates:
        parts["rate"] = f"rate {moment.rates[0]:.2g}"
    if moment.seconds:
        parts["samples"] = f"{moment.samples / moment.seconds:.0f} samples/s"
        if moment.tokens is not None:
            parts["tokens"] = f"{moment.tokens / moment.seconds:,.0f} tokens/s"
    parts["step"] = f"{1000 * moment.seconds:.0f} ms/step"
    if moment.predicted is not None:
        parts["predicted"] = f"(predicted {1000 * moment.predicted:.0f})"
    if memory:
        low, high = min(memory) / 2**20, max(memory) / 2**20
        parts["memory"] = f"{high:.0f} MiB/rank" if high - low < 1 else f"{low:.0f}-{high:.0f} MiB/rank"
    return parts


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
