"""The loop of `Engine.fit`: steps, looks, checkpoints, and how a run ends."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.launch import environment
from unisono.parallel.share import rows_of
from unisono.parallel.trainer import Trainer, takes_closure
from unisono.plan.plan import DATA
from unisono.train import evaluation, finite
from unisono.train.callbacks import Callback
from unisono.train.checkpoint import Checkpoints
from unisono.train.data import Batch, Loader
from unisono.train.moment import Moment, tokens_of
from unisono.train.pace import Pace, slowest
from unisono.train.preemption import Preemption
from unisono.train.progress import Display
from unisono.train.run_folder import RunFolder

if TYPE_CHECKING:
    from unisono.train.engine import Engine

_NONFINITE = ("stop", "skip")


class NonFiniteLoss(UnisonoError, ArithmeticError):
    """The loss was NaN or infinite; the message says when, on which samples and where it began."""


@dataclass
class History:
    """What a run gave: the loss of every step done, and the values of every evaluation."""

    losses: list[float] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)
    first_step: int = 0  # steps that were done before, after a resume
    step: int = 0
    skipped: int = 0
    stopped: str = ""  # why the run ended before its time; nothing where it did not


class Fit:
    """One run of `Engine.fit`."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        epochs: int,
        steps: int | None,
        callbacks: Sequence[Callback],
        progress: bool,
        look_every: int,
        nonfinite: str,
    ) -> None:
        for name, value in (("epochs", epochs), ("steps", steps), ("look_every", look_every)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"fit({name}={value!r}): expected a whole number of at least 1")
        if nonfinite not in _NONFINITE:
            raise UsageError(f"fit(nonfinite={nonfinite!r}): expected one of {', '.join(_NONFINITE)}")
        self.engine = engine
        self.loader = loader
        self.epochs = epochs
        self.steps = _steps_of(loader, epochs, steps)
        self.look_every = look_every
        self.skips = nonfinite == "skip"
        self.validation: Loader | None = None
        self.history = History()
        self.moment: Moment | None = None
        self._display = Display(progress and engine.comm.rank == 0)
        self._folder: RunFolder | None = None
        self._checkpoints: Checkpoints | None = None
        self._save_every: int | None = None
        self._resume = False
        self._callbacks: list[Callback] = [self._display, *callbacks]
        self._preemption = Preemption(engine.comm)
        self._pace = Pace()

    def save_to(self, path: Path, every: int | None, keep: int, resume: bool) -> None:
        if every is not None and every < 1:
            raise UsageError(f"fit(save_every={every}): expected at least 1")
        self._folder = RunFolder(path, self.engine.comm.rank)
        self._checkpoints = Checkpoints(self._folder.checkpoints, keep=keep)
        self._save_every = every
        # A job that the launcher started again goes on from where it was, whatever the script says.
        self._resume = resume or int(os.environ.get(environment.ATTEMPT, "0")) > 0
        self._callbacks.insert(1, self._folder)

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self) -> History:
        self.engine.prepare(self.loader.example())
        self._require_rows()
        self._restore()
        done = self.engine.ready.steps
        self.history.first_step = self.history.step = done
        if self._folder is not None:
            self._folder.open(self._about(), done)
        for each in self._callbacks:
            each.on_start(self.engine, done, self.steps)
        self._pace.start()
        try:
            with self._preemption.listening():
                self._epochs()
        finally:
            self._pace.stop()
            for each in reversed(self._callbacks):
                each.on_end(self.engine, self.moment)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return self.history

    def _epochs(self) -> None:
        while self.loader.epoch < self.epochs and not self._is_done():
            for batch in self.loader:
                if self._is_over(self._step(batch)):
                    return
            self._end_epoch()
            if self.history.stopped:
                return
        self._save(is_last=True)

    def _is_done(self) -> bool:
        return self.steps is not None and self.engine.ready.steps >= self.steps

    def _is_over(self, ends: bool) -> bool:
        """Whether the run ends after this step; with a checkpoint where it was asked to go."""
        if self._preemption.was_asked():
            self.history.stopped = "asked to stop (SIGTERM)"
            self._save(is_last=True)
            self._display.say(f"asked to stop: ended after step {self.history.step}{self._where_saved()}")
            return True
        if ends:
            self.history.stopped = "a callback ended it"
            self._save(is_last=True)
            return True
        return False

    def _step(self, batch: Batch) -> bool:
        """One step and all that follows from it; whether a callback wants to end the run."""
        trainer, began = self.engine.ready, time.perf_counter()
        self._preemption.ask()
        loss, is_skipped = self._trained(trainer, batch)
        if self.engine.schedule is not None and not is_skipped:
            self.engine.schedule.step()
        self.history.losses.append(loss)
        self.history.step = trainer.steps
        self.moment = Moment(
            step=trainer.steps,
            epoch=self.loader.epoch + 1,
            epochs=self.epochs,
            steps=self.steps,
            loss=loss,
            rates=tuple(float(group["lr"]) for group in trainer.optimizer.param_groups if "lr" in group),
            samples=batch.rows,
            tokens=tokens_of(batch.pair[0]),
            seconds=time.perf_counter() - began,
            predicted=None if self.engine.choice is None else self.engine.choice.seconds,
            ids=batch.ids,
            skipped=is_skipped,
        )
        if trainer.steps % self.look_every == 0:
            self._look(self.moment)
        asks = [bool(each.on_step(self.engine, self.moment)) for each in self._callbacks]
        if self._save_every is not None and trainer.steps % self._save_every == 0:
            self._save()
        return self._agreed(any(asks))

    def _agreed(self, ends: bool) -> bool:
        """Callbacks of a user may want to end the run on one rank only; then it ends on all."""
        if len(self._callbacks) <= 1 + (self._folder is not None):
            return False
        return any(self.engine.comm.all_gather_object(ends))

    def _trained(self, trainer: Trainer, batch: Batch) -> tuple[float, bool]:
        """The loss of a training step, and whether the step was left out because it is not finite."""
        if takes_closure(trainer.optimizer):
            loss = float(trainer.step(batch.pair))
            if not math.isfinite(loss):
                raise NonFiniteLoss(self._told(loss, batch, finite.first_culprit(trainer, batch.pair)))
            return loss, False
        held = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()} if self.skips else {}
        trainer.zero_grad()
        loss = float(trainer.backward(batch.pair))
        if math.isfinite(loss):
            trainer.update()
            return loss, False
        if not self.skips:
            raise NonFiniteLoss(self._told(loss, batch, finite.first_culprit(trainer, batch.pair)))
        with torch.no_grad():
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(held[name])
        trainer.zero_grad()
        trainer.steps += 1
        self.history.skipped += 1
        return loss, True

    def _told(self, loss: float, batch: Batch, culprit: str) -> str:
        ids = list(batch.ids)
        shown = f"{ids[:16]}{' ...' if len(ids) > 16 else ''}"
        return (
            f"the loss is {loss} at step {self.engine.ready.steps + 1} (epoch {self.loader.epoch + 1}) on samples "
            f"{shown}; {culprit}. Nothing was updated by this step; fit(nonfinite='skip') leaves such steps out"
        )

    # ---- looks and ends of epochs --------------------------------------------------------------------------------

    def _look(self, moment: Moment) -> None:
        """What every rank holds, and whether one of them keeps the others waiting."""
        comm = self.engine.comm
        own, passed = self._pace.own_seconds()
        seen = comm.all_gather_object((peak_memory(), own, passed, comm.host))
        moment.memory = tuple(memory for memory, *_ in seen)
        moment.slow = slowest([own for _, own, *_ in seen], max(p for *_, p, _ in seen), [host for *_, host in seen])

    def _end_epoch(self) -> None:
        assert self.moment is not None
        moment = self.moment
        moment.epoch = self.loader.epoch  # which the loader has finished by now
        if self.validation is not None:
            pairs = (batch.pair for batch in self.validation)
            values = evaluation.evaluate(self.engine.ready, pairs, self.engine.metrics)
            moment.values = {f"validation_{name}": value for name, value in values.items()}
            self.history.values.append(moment.values)
        asks = [bool(each.on_epoch(self.engine, moment)) for each in self._callbacks]
        if self._agreed(any(asks)):
            self.history.stopped = "a callback ended it"
        if self._save_every is None or self.history.stopped:
            self._save()

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, is_last: bool = False) -> None:
        if self._checkpoints is None or self._checkpoints.newest_step == self.engine.ready.steps:
            return
        path = self._checkpoints.save(
            self.engine.ready, self.loader.state_dict(), extra=self.engine.own_state(), wait=is_last
        )
        for each in self._callbacks:
            each.on_save(self.engine, self.engine.ready.steps, str(path))

    def _restore(self) -> None:
        if self._checkpoints is None:
            return
        if not self._resume:
            self._checkpoints.require_none()
            return
        restored = self._checkpoints.load(self.engine.ready)
        if restored is None:
            return
        self.loader.load_state_dict(restored.data)
        self.engine.load_own_state(restored.extra)
        for line in restored.notes:
            self._display.say(line)
        self._display.say(f"resumed from {restored.path} at step {restored.step}")

    def _where_saved(self) -> str:
        return "" if self._folder is None else f", saved in {self._folder.checkpoints}"

    def _about(self) -> dict[str, Any]:
        """What the run folder tells of this start."""
        trainer = self.engine.ready
        return {
            "model": self.engine.fingerprint,
            "plan": str(trainer.plan),
            "world": self.engine.comm.size,
            "backend": self.engine.comm.backend,
            "steps": self.steps,
            "epochs": self.epochs,
            "batch_size": self.loader.batch_size,
            "seed": self.engine.seed,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "predicted": None if self.engine.choice is None else self.engine.choice.about(),
        }

    def _require_rows(self) -> None:
        """Every batch, also the last and smallest one, must be enough for a pipeline's microbatches."""
        trainer = self.engine.ready
        parts = trainer.mesh.size(*DATA) * trainer.plan.microbatches
        smallest = self.loader.smallest
        if trainer.plan.pp > 1 and smallest is not None and smallest < parts:
            raise UsageError(
                f"the smallest batch of an epoch has {smallest} samples (batch_size={self.loader.batch_size}), but plan "
                f"{trainer.plan} cuts each batch in {parts}: use fewer microbatches, or a batch_size that leaves more"
            )


def _steps_of(loader: Loader, epochs: int, steps: int | None) -> int | None:
    whole = None if loader.steps is None else loader.steps * epochs
    return whole if steps is None else steps if whole is None else min(steps, whole)


def peak_memory() -> int:
    """Bytes that this rank has held at most: of GPU memory where it has a GPU, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
