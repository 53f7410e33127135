"""Progress of a run, shown by rank 0: a bar in a terminal, one line that is updated in a notebook, plain lines
elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from unisono.amounts import MIB, format_bytes, format_clock, format_seconds
from unisono.launch.notebook import is_notebook
from unisono.train.callbacks import Callback, StepInfo

if TYPE_CHECKING:
    from unisono.train.engine import Engine

_REDRAW = 0.1  # seconds between two updates of the bar
_BAR = 24  # its width, at most a seventh of the line
_LINES = 20  # approximate number of plain lines for a run


class Display(Callback):
    """Progress on rank 0; silent on the others."""

    def __init__(self, is_shown: bool, console: Console | None = None, log_every: int | None = None) -> None:
        """log_every: steps between two plain lines; default: about 20 lines for a run."""
        self._log_every = log_every
        self._in_notebook = is_shown and console is None and is_notebook()
        terminal = False if self._in_notebook else None  # rich would draw HTML, also from ranks forked from a kernel
        plain = Console(highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=terminal)
        self._console = console or plain
        self._line: Any = None  # of a notebook
        self._is_shown = is_shown
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._drawn = 0.0
        self._last_line = 0
        self._steps: int | None = None
        self._began, self._first = 0.0, 0  # when, and after which step
        self._memory: tuple[int, ...] = ()
        self._slow = ""

    def message(self, text: str) -> None:
        if self._is_shown:
            with contextlib.suppress(OSError):  # a full disk, or nobody reads any more
                (self._bar.console if self._bar else self._console).print(text, markup=False)

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        self._steps = steps
        self._began, self._first = time.perf_counter(), first_step
        if self._in_notebook:
            from IPython.display import display

            self._line = display({"text/plain": ""}, raw=True, display_id=True)
            return
        if not self._is_shown or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=self._bar_width),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step, epoch="", text="")
        with contextlib.suppress(OSError):
            self._bar.start()

    def on_step(self, engine: Engine, info: StepInfo) -> None:
        with contextlib.suppress(OSError):
            self._show(info)

    def _show(self, info: StepInfo) -> None:
        self._memory = info.memory or self._memory
        if info.slow and info.slow != self._slow:
            self.message(info.slow)
        self._slow = info.slow or self._slow
        if not self._is_shown:
            return
        is_last = info.step == info.steps
        now = time.perf_counter()
        is_due = is_last or now - self._drawn > _REDRAW
        if self._bar is not None or self._line is not None:
            self._drawn = now if is_due else self._drawn
        if self._line is not None:
            if is_due:
                self._line.update({"text/plain": self._text(info)}, raw=True)
        elif self._bar is not None:
            epoch = f"{info.epoch}/{info.epochs}"
            text = _step_text(info, self._memory, self._room(epoch))
            self._bar.update(self._task, completed=info.step, epoch=epoch, text=text, refresh=is_due)
        elif is_last or self._is_line_due(info):
            self._last_line = info.step
            self.message(self._text(info))

    def _text(self, info: StepInfo) -> str:
        of = f"/{info.steps}" if info.steps else ""
        left = f", {format_clock(self._seconds_left(info))} left" if info.steps else ""
        return f"epoch {info.epoch} step {info.step}{of} {_step_text(info, self._memory)}{left}"

    def _is_line_due(self, info: StepInfo) -> bool:
        if self._log_every is not None:
            return info.is_logged
        return self._last_line == 0 or info.step - self._last_line >= max(1, (self._steps or 1000) // _LINES)

    def _seconds_left(self, info: StepInfo) -> float:
        """By the time of the run so far, including evaluations and checkpoints."""
        passed = time.perf_counter() - self._began
        return passed / (info.step - self._first) * ((info.steps or 0) - info.step)

    @property
    def _bar_width(self) -> int:
        return min(_BAR, self._console.width // 7)

    def _room(self, epoch: str) -> int:
        """Characters of the line beside the bar, the steps and the remaining time."""
        steps = 2 * len(str(self._steps or "?")) + 1
        spaces = 4
        return self._console.width - len(f"epoch {epoch}") - self._bar_width - steps - len("0:00:00") - spaces

    def on_evaluation(self, engine: Engine, info: StepInfo) -> None:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in info.values.items())
        self.message(f"{f'epoch {info.epoch}' if info.ends_epoch else f'step {info.step}'}: {shown}")

    def on_end(self, engine: Engine, info: StepInfo | None) -> None:
        if self._line is not None and info is not None:
            self._line.update({"text/plain": self._text(info)}, raw=True)
            self._line = None
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar = None


def _step_text(info: StepInfo, memory: tuple[int, ...], room: int | None = None) -> str:
    """The numbers of a step; where there is little room, without the less important ones."""
    parts = _parts(info, memory)
    chosen = sorted(parts, key=lambda part: _IMPORTANCE.index(part))
    while room is not None and len(chosen) > 1 and len(", ".join(parts[part] for part in chosen)) > room:
        chosen.pop()
    return ", ".join(text for part, text in parts.items() if part in chosen).replace(", (", " (")


_IMPORTANCE = ("loss", "metrics", "step", "tokens", "samples", "mfu", "predicted", "memory", "rate", "norms")


def _parts(info: StepInfo, memory: tuple[int, ...]) -> dict[str, str]:
    parts = {"loss": f"loss {info.loss:.4f}" + (" (skipped)" if info.skipped else "")}
    if info.metrics:
        parts["metrics"] = ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items())
    if info.rates:
        parts["rate"] = f"rate {info.rates[0]:.2g}"
    if info.seconds:
        parts["samples"] = f"{info.samples / info.seconds:.0f} samples/s"
        if info.tokens is not None:
            parts["tokens"] = f"{info.tokens / info.seconds:,.0f} tokens/s"
    if info.mfu is not None:
        parts["mfu"] = f"{info.mfu:.0%} MFU"
    if info.gradient_norm is not None and info.weight_norm is not None:
        parts["norms"] = f"gradient norm {info.gradient_norm:.3g}, weight norm {info.weight_norm:.4g}"
    parts["step"] = format_seconds(info.seconds, "ms", 0) + "/step"
    if info.predicted is not None:
        parts["predicted"] = f"(predicted {1000 * info.predicted:.0f})"
    if memory:
        low, high = min(memory), max(memory)
        least = "" if high - low < MIB else f"{low / MIB:.0f}-"
        parts["memory"] = f"{least}{format_bytes(high, 'MiB', 0)}/rank"
    return parts
