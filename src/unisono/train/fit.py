"""The training loop of `Engine.fit`: steps, memory and straggler samples, evaluation, checkpoints, end of the run."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import UnisonoError, UsageError
from unisono.launch import environment
from unisono.launch.outcome import failure
from unisono.parallel.trainer import Trainer, takes_closure
from unisono.train import evaluation, nonfinite
from unisono.train.callbacks import Callback, StepInfo, tokens_of
from unisono.train.checkpoint.checkpoints import Checkpoints
from unisono.train.checkpoint.in_memory import MemoryCheckpoints
from unisono.train.data.given_batches import GivenBatches
from unisono.train.data.loader import Loader
from unisono.train.data.sampler import require_whole_number
from unisono.train.metric_sums import TrainingMetrics
from unisono.train.preemption import OUT_OF_TIME, TERMINATED, Preemption
from unisono.train.telemetry.loggers import TensorBoardLogger
from unisono.train.telemetry.progress import Display
from unisono.train.telemetry.run_folder import RunFolder
from unisono.train.telemetry.step_profile import StepProfile
from unisono.train.telemetry.step_trace import StepTrace, device_peak
from unisono.train.telemetry.straggler import BusyMonitor, straggler_message

if TYPE_CHECKING:
    from unisono.train.engine import Engine

_NONFINITE = ("stop", "skip")
_NOT_UPDATED = "No parameter was updated by this step; fit(nonfinite='skip') skips such steps"
_PERMANENT = "Training cannot continue; resume from an earlier checkpoint, with a lower learning rate or clip=..."
_MAYBE_UPDATED = "The optimizer evaluates the loss several times in a step, and may have updated parameters before"
_UPDATED = "The step ran as a CUDA graph, which has updated parameters; use cudagraph=False to see it before"


class NonFiniteLoss(UnisonoError, ArithmeticError):
    """The loss was NaN or infinite; the message contains the step, the samples and the module of origin."""


@dataclass
class History:
    """Result of a run: the loss of every step, and the values of every evaluation."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # of every step, with fit(train_metrics=True)
    values: list[dict[str, float]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)  # the steps after which `values` were measured
    first_step: int = 0  # steps done before, after a resume
    step: int = 0
    skipped: int = 0
    stopped: str = ""  # why the run ended early; "" if it did not


@dataclass(frozen=True)
class Options:
    """Options of a run, see `Engine.fit`."""

    epochs: int = 1
    max_steps: int | None = None
    look_every: int = 10
    nonfinite: str = "stop"
    save_every: int | None = None
    keep: int | None = 3
    resume: bool = False
    progress: bool = True
    evaluate_every: int | None = None
    max_time: float | None = None  # seconds
    log_every: int | None = None
    norms: bool = False
    profile_steps: str | None = None
    train_metrics: bool = False
    memory_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "look_every", "save_every", "evaluate_every", "log_every", "memory_every"):
            if getattr(self, name) is not None:
                require_whole_number(f"fit: {name}", getattr(self, name), 1)
        if self.nonfinite not in _NONFINITE:
            raise UsageError(f"fit(nonfinite={self.nonfinite!r}): expected one of {', '.join(_NONFINITE)}")
        for name in ("norms", "train_metrics"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"fit({name}={getattr(self, name)!r}): expected True or False")


class Fit:
    """One run of `Engine.fit`."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader | GivenBatches,
        options: Options,
        folder: RunFolder | None,
        validation: Loader | GivenBatches | None,
        callbacks: Sequence[Callback],
    ) -> None:
        self.engine = engine
        self.loader = loader
        self.options = options
        self.folder = folder
        self.validation = validation
        self.steps: int | None = None  # trainer.steps at the end of the run; None if the data has no length
        self._began = engine.ready.steps  # steps done before this run
        self.history = History()
        self.info: StepInfo | None = None
        self._loss = math.nan  # of the last step before a resume
        self._display = Display(options.progress and engine.comm.rank == 0, log_every=options.log_every)
        self._checkpoints = None if folder is None else Checkpoints(folder.checkpoints, keep=options.keep)
        self._memory = None if options.memory_every is None else MemoryCheckpoints()
        self._saved = -1  # last saved step
        self._in_memory = -1  # last step saved in memory
        self._ended = loader.epoch  # epochs whose on_epoch was called
        self._given = list(callbacks)
        self._skips = options.nonfinite == "skip"
        self._callbacks: list[Callback] = [self._display]
        if folder is not None:
            self._callbacks.append(folder)
            self._callbacks.append(TensorBoardLogger(folder.path / "tensorboard", is_optional=True))
        self._callbacks += callbacks
        self._preemption = Preemption(engine.comm)
        self._busy = BusyMonitor()
        self._is_compilation_reported = False
        self._profile = StepProfile()
        self._trace = StepTrace(options.profile_steps, folder.path if folder else None, engine.comm.rank)
        self._peak = device_peak(engine.device, engine.ready.precision.dtype)
        self._gradient_norm: float | None = None
        self._metrics = TrainingMetrics(engine.ready, engine.metrics) if options.train_metrics else None
        self._deadline = math.inf if options.max_time is None else time.monotonic() + options.max_time

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self) -> History:
        if self.folder is None or self._checkpoints is None:
            return self._run()
        with self.folder.held() as self._checkpoints.lock:
            return self._run()

    def _run(self) -> History:
        self._require_samples()
        self._require_skippable()
        is_resumed = self._restore()
        self.steps = self._last_step()
        if not is_resumed:
            self._require_epochs()
        self._require_numbers()
        if self.options.progress:
            self._display.message(self.engine.predicted().summary())
            if self.engine.ready.chosen:
                self._display.message(self.engine.ready.chosen)
            if self.engine.ready.proof:
                self._display.message(self.engine.ready.proof)
            if self.engine.ready.coverage:
                self._display.message(self.engine.ready.coverage)
            if self.engine.ready.note:
                self._display.message(f"the full model was built on every rank: {self.engine.ready.note}")
        done = self.engine.ready.steps
        self.history.first_step = self.history.step = done
        if self.folder is not None:
            self.folder.open(self._about(), done)
        for each in self._callbacks:
            each.on_start(self.engine, done, self.steps)
        self._busy.start()
        try:
            failure.note_stop("")
            with self._preemption.listening():
                self._epochs()
            self.engine.ready.loss.settle()
        except BaseException:
            if self._checkpoints is not None:
                self._checkpoints.settle()  # do not lose a checkpoint that is being written
            raise
        finally:
            self._busy.stop()
            self._trace.stop()
            if self.folder is not None and self._profile.is_recorded:
                measured = self._profile.as_json(self.engine.ready)
                measured |= {"plan": str(self.engine.plan), "peak": peak_memory()}
                self.folder.write_rank(measured | {"program": self.engine.program.lines})
            if self.folder is not None and self.engine.comm.rank == 0 and self.engine.program.is_recorded:
                self.folder.write_program(self.engine.program.page(self.engine.ready, 0))
            for each in reversed(self._callbacks):
                each.on_end(self.engine, self.info)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return self.history

    def _report_compilation(self) -> None:
        """Once, after the first step."""
        compilation = self.engine.ready.compilation
        if compilation is not None and self.options.progress and not self._is_compilation_reported:
            self._is_compilation_reported = True
            self._display.message(str(compilation))

    def _epochs(self) -> None:
        if self._ended < self.loader.epoch:  # stopped right after the last step of an epoch, then resumed
            self._end_epoch()
            if self.history.stopped:
                return
        while self.loader.epoch < self.options.epochs and not self._is_done():
            position, done = self.loader.position, self.engine.ready.steps
            for batch in self.loader:
                if self._is_over(self._step(batch)):
                    return
                self._report_compilation()
                if self.options.max_steps is not None and self._is_done():
                    break
            if self.engine.ready.steps > done or (position and self._ended < self.loader.epoch):
                self._end_epoch()
            elif not position:  # else it was resumed at the end of an epoch of unknown length
                raise UsageError(f"the dataset had no sample in epoch {self.loader.epoch}; expected at least one")
            if self.history.stopped:
                return
        self._save(is_last=True)

    def _is_done(self) -> bool:
        return self.steps is not None and self.engine.ready.steps >= self.steps

    def _is_over(self, ends: bool) -> bool:
        """Whether the run ends after this step; if so, it is saved."""
        reason = self._preemption.reason()
        if reason == TERMINATED:
            self.history.stopped, shown = "asked to stop (SIGTERM)", "asked to stop"
        elif reason == OUT_OF_TIME:
            self.history.stopped = shown = f"max_time of {self.options.max_time:g} s is over"
        elif not ends:
            return False
        self._save(is_last=True)
        if reason == TERMINATED:
            where = self._where_saved()
            code = failure.RESUMABLE if where else 128 + signal.SIGTERM
            failure.note_stop(f"fit ended after step {self.history.step}{where}", code)
        if reason:
            self._display.message(f"{shown}: ended after step {self.history.step}{self._where_saved()}")
        return True

    def _step(self, batch: Any) -> bool:
        """One step with its callbacks and checkpoint; whether a callback ends the run."""
        trainer, began = self.engine.ready, time.perf_counter()
        if time.monotonic() >= self._deadline:
            self._preemption.request(OUT_OF_TIME)
        self._preemption.start_check()
        self._trace.before(trainer.steps + 1)
        with self._observed(trainer):
            loss, is_skipped = self._trained(trainer, batch)
        if self.engine.schedule is not None and not is_skipped:
            self.engine.schedule.step()
        if written := self._trace.after(trainer.steps):
            self._display.message(written)
        choice, seconds = self.engine.choice, time.perf_counter() - began
        is_logged = self._is_logged(trainer.steps)
        metrics = {} if self._metrics is None else self._metrics.values()
        for name, value in metrics.items():
            self.history.metrics.setdefault(name, []).append(value)
        self.history.losses.append(loss)
        self.history.step = trainer.steps
        self.info = StepInfo(
            step=trainer.steps,
            epoch=self.loader.epoch + 1,
            epochs=self.options.epochs,
            steps=self.steps,
            loss=loss,
            metrics=metrics,
            rates=tuple(float(group["lr"]) for group in trainer.optimizer.param_groups if "lr" in group),
            samples=trainer.last_batch_size,
            tokens=tokens_of(batch, trainer.last_batch_size),
            seconds=seconds,
            predicted=None if choice is None else choice.seconds,
            ids=self.loader.ids,
            skipped=is_skipped,
            is_logged=is_logged,
            gradient_norm=self._gradient_norm,
            weight_norm=float(trainer.weight_norm()) if self.options.norms and is_logged else None,
        )
        if choice is not None and choice.flops and self._peak:
            done = 3 * choice.flops * trainer.last_batch_size  # a backward computes twice what a forward does
            self.info.mfu = done / seconds / (self._peak * self.engine.comm.size)
        if trainer.steps % self.options.look_every == 0:
            self._sample(self.info)
        asked = [each for each in self._callbacks if each.on_step(self.engine, self.info)]
        every = self.options.evaluate_every
        if every is not None and trainer.steps % every == 0 and self.loader.state_dict()["position"]:
            asked += self._evaluate(self.info)
        if self._is_due() and self.loader.state_dict()["position"]:  # else after the evaluation of the epoch
            self._save()
        if self._is_due_in_memory() and self.loader.state_dict()["position"]:
            self._save_in_memory()
        return self._agreed(asked)

    @contextlib.contextmanager
    def _observed(self, trainer: Trainer) -> Iterator[None]:
        """Record the program of the second step and the profile of the third, when all memory is allocated; of a
        shorter run, of the last two steps, or of one."""
        done = len(self.history.losses)
        profiled = min(2, (self.steps or 3) - 1 - self.history.first_step)
        with contextlib.ExitStack() as observers:
            if self.folder is not None and not self.engine.program.is_recorded and done == max(profiled - 1, 0):
                observers.callback(self._busy.own_seconds)  # only some ranks record: do not count the others' waiting
                observers.enter_context(self.engine.program.recording(trainer))
            if self.folder is not None and not self._profile.is_recorded and done == profiled:
                observers.enter_context(self._profile.recording(trainer))
            yield

    def _agreed(self, asked: Sequence[Callback]) -> bool:
        """Whether a callback ends the run, on any rank; why is then in the history."""
        if not any(each.ends_runs for each in self._given):
            return False
        reasons = self.engine.comm.all_gather_object(str(asked[0].reason) if asked else "", only_data=True)
        self.history.stopped = next(filter(None, reasons), "")
        return bool(self.history.stopped)

    def _trained(self, trainer: Trainer, batch: Any) -> tuple[float, bool]:
        """The loss of a training step, and whether the step was skipped because it is not finite."""
        self._gradient_norm = None
        wants_norm = self.options.norms and self._is_logged(trainer.steps + 1)
        is_captured = trainer.cuda_graph is not None
        if takes_closure(trainer.optimizer) or is_captured:  # a step that cannot be stopped before its update
            with self._measured(trainer):
                loss = float(trainer.step(batch))
            if wants_norm:
                self._gradient_norm = float(trainer.gradient_norm() if trainer.norm is None else trainer.norm)
            if not math.isfinite(loss):
                outcome = _UPDATED if is_captured else _MAYBE_UPDATED
                raise self._nonfinite(loss, nonfinite.origin(trainer, batch), trainer.steps, outcome)
            return loss, False
        held = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()} if self._skips else {}
        trainer.zero_grad()
        with self._measured(trainer):
            loss = float(trainer.backward(batch))
        if math.isfinite(loss):
            if wants_norm:
                self._gradient_norm = float(trainer.gradient_norm())
            trainer.update()
            return loss, False
        if not self._skips:
            raise self._nonfinite(loss, nonfinite.origin(trainer, batch), trainer.steps + 1, _NOT_UPDATED)
        if broken := nonfinite.nonfinite_parameter(trainer):
            raise self._nonfinite(loss, broken, trainer.steps + 1, _PERMANENT)
        with torch.no_grad():
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(held[name])
        trainer.zero_grad()
        trainer.steps += 1
        self.history.skipped += 1
        return loss, True

    def _measured(self, trainer: Trainer) -> contextlib.AbstractContextManager[None]:
        """Around a training step, whose outputs the metrics see, if they were asked for."""
        return contextlib.nullcontext() if self._metrics is None else trainer.observing(self._metrics.observe)

    def _is_logged(self, step: int) -> bool:
        return step % (self.options.log_every or 1) == 0 or step == self.steps

    def _nonfinite(self, loss: float, origin: str, step: int, outcome: str) -> NonFiniteLoss:
        ids = self.loader.ids
        shown = f"{ids[:16]}{' ...' if len(ids) > 16 else ''}"
        where = f"at step {step} (epoch {self.loader.epoch + 1}) on samples {shown}"
        return NonFiniteLoss(f"the loss is {loss} {where}; {origin}. {outcome}")

    # ---- sampling and ends of epochs -----------------------------------------------------------------------------

    def _sample(self, info: StepInfo) -> None:
        """Gather the peak memory of all ranks, and look for a straggler."""
        comm = self.engine.comm
        own, passed = self._busy.own_seconds()
        seen = comm.all_gather_object((peak_memory(), own, passed, comm.host), only_data=True)
        info.memory = tuple(memory for memory, *_ in seen)
        passed = max(passed for *_, passed, _ in seen)
        info.slow = straggler_message([own for _, own, *_ in seen], passed, [host for *_, host in seen])

    def _is_due(self) -> bool:
        """Whether `save_every` requires a checkpoint after this step."""
        return self.options.save_every is not None and self.engine.ready.steps % self.options.save_every == 0

    def _is_due_in_memory(self) -> bool:
        every = self.options.memory_every
        return every is not None and self.engine.ready.steps % every == 0

    def _end_epoch(self) -> None:
        if self.info is None:  # after a resume, with no step since
            done, epoch = self.engine.ready.steps, self.loader.epoch
            self.info = StepInfo(done, epoch, self.options.epochs, self.steps, self._loss, (), 0, None, 0.0)
        info = self.info
        info.ends_epoch = True
        is_evaluated = self.history.evaluated[-1:] == [info.step]  # by evaluate_every
        asked = [] if self.validation is None or is_evaluated else self._evaluate(info)
        asked += [each for each in self._callbacks if each.on_epoch(self.engine, info)]
        if self._agreed(asked) and self.options.progress:
            self._display.message(f"ended after step {info.step}: {self.history.stopped}")
        self._ended = self.loader.state_dict()["epoch"]
        if self.options.save_every is None or self._is_due() or self.history.stopped:
            self._saved = -1  # a checkpoint saved at this step does not include the end of the epoch
            self._save()
        if self._is_due_in_memory():
            self._in_memory = -1
            self._save_in_memory()

    def _evaluate(self, info: StepInfo) -> list[Callback]:
        """Evaluate the validation data; callbacks that ask to end the run."""
        assert self.validation is not None
        with contextlib.ExitStack() as scopes:
            for each in self._given:
                scopes.enter_context(each.evaluating(self.engine))
            values = evaluation.evaluate(self.engine.ready, self.validation, self.engine.metrics)
            info.values = {f"validation_{name}": value for name, value in values.items()}
            self.history.values.append(info.values)
            self.history.evaluated.append(info.step)
            return [each for each in self._callbacks if each.on_evaluation(self.engine, info)]

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, is_last: bool = False) -> None:
        """Start a checkpoint of this step, written in the background; if it is the last, wait for it."""
        step = self.engine.ready.steps
        if is_last and self.history.stopped:
            self._save_in_memory()
        if self._checkpoints is None or self.folder is None:
            return
        if self._saved != step:
            self._saved = step
            self._checkpoints.save(self.engine.ready, step, self.loader.state_dict(), self._own_state(), wait=is_last)
            for each in self._callbacks:
                each.on_save(self.engine, step, str(self.folder.checkpoints))
        if is_last:
            self._checkpoints.wait()

    def _save_in_memory(self) -> None:
        step = self.engine.ready.steps
        if self._memory is not None and self._in_memory != step:
            self._in_memory = step
            self._memory.save(self.engine.ready, step, self.loader.state_dict(), self._own_state())

    def _own_state(self) -> dict[str, Any]:
        """What a checkpoint has beside the trainer's state and the loader's."""
        own = {**self.engine.own_state(), "began": self._began, "ended": self._ended}
        own["callbacks"] = [each.state_dict() for each in self._given]
        if self.info is not None and math.isfinite(self.info.loss):
            own["loss"] = self.info.loss
        return own

    def _restore(self) -> bool:
        """Resume from the newest valid checkpoint, if requested or after a restart of the job; whether it did."""
        is_restart = int(os.environ.get(environment.ATTEMPT, "0")) > 0
        newest = None if self._memory is None or not is_restart else self._memory.newest_good()
        if newest is not None and self._memory is not None:
            on_disk = [] if self._checkpoints is None else self._checkpoints.steps()
            if newest.step >= max(self.engine.comm.broadcast_object(on_disk, only_data=True), default=-1):
                self._load(self._memory, "memory")
                self._in_memory = newest.step
                return True
        if self._checkpoints is None or self.folder is None:
            return False
        self._checkpoints.tidy()
        self._checkpoints.require_same_model(self.engine.ready)
        if not self.options.resume and not is_restart:
            if self._checkpoints.steps():
                raise UsageError(
                    f"run folder {self.folder.path} has checkpoints of an earlier run (the newest of step "
                    f"{self._checkpoints.steps()[-1]}); pass resume=True to continue from it, or give another folder"
                )
            return False
        if self._checkpoints.newest_good() is None:
            return False
        self._saved = self._load(self._checkpoints, str(self.folder.checkpoints))
        return True

    def _load(self, checkpoints: Checkpoints, where: str) -> int:
        """Load the newest; its step."""
        restored = checkpoints.load(self.engine.ready)
        self.loader.load_state_dict(restored.data_state)
        self.engine.load_own_state(restored.extra)
        self._began = restored.extra.get("began", 0)
        self._ended = restored.extra.get("ended", self.loader.epoch)
        self._loss = restored.extra.get("loss", math.nan)
        states = restored.extra.get("callbacks", [])
        if len(states) == len(self._given):
            for each, state in zip(self._given, states, strict=True):
                if state:
                    each.load_state_dict(state)
        elif any(states):
            self._display.message(
                f"the state of callbacks is not restored: the checkpoint has that of {len(states)}, and there are "
                f"{len(self._given)}"
            )
        under = "" if restored.plan == str(self.engine.plan) else f", saved under plan {restored.plan}"
        if restored.note:
            self._display.message(restored.note)
        self._display.message(f"resumed at step {restored.step} from {where}{under}")
        return restored.step

    def _where_saved(self) -> str:
        return "" if self.folder is None else f", saved in {self.folder.checkpoints}"

    def _about(self) -> dict[str, Any]:
        """The entry of this start in run.json."""
        trainer = self.engine.ready
        return {
            "model": self.engine.about_model(),
            "plan": str(trainer.plan),
            "world": self.engine.comm.size,
            "backend": self.engine.comm.backend,
            "steps": self.steps,
            "epochs": self.options.epochs,
            "batch_size": self.loader.batch_size,
            "seed": self.engine.seed,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "predicted": None if self.engine.choice is None else self.engine.choice.about(),
        }

    def _last_step(self) -> int | None:
        """trainer.steps at the end of the run: at the end of the data, or after `max_steps`."""
        left = self.loader.batches_left(self.options.epochs)
        end = None if left is None else self.engine.ready.steps + left
        if self.options.max_steps is None:
            return end
        wanted = self._began + self.options.max_steps
        return wanted if end is None else min(wanted, end)

    def _require_epochs(self) -> None:
        if self.loader.epoch >= self.options.epochs:
            raise UsageError(
                f"the loader has completed {self.loader.epoch} epochs, and fit(epochs={self.options.epochs}) ends "
                "there: nothing would be trained; give more epochs, or start over with loader.set_epoch(0)"
            )

    def _require_skippable(self) -> None:
        if self._skips and takes_closure(self.engine.ready.optimizer):
            name = type(self.engine.ready.optimizer).__name__
            raise UsageError(
                f"fit(nonfinite='skip') with {name}, which evaluates the loss several times in a step: a step of it "
                "cannot be skipped; use nonfinite='stop'"
            )
        if self._skips and self.engine.ready.cuda_graph is not None:
            raise UsageError(
                "fit(nonfinite='skip') with cudagraph=True, whose steps have updated parameters when their loss is "
                "known; use nonfinite='stop', or leave cudagraph out"
            )

    def _require_numbers(self) -> None:
        """Compute every metric once before training, so that one that fails does so now."""
        if self.validation is not None:
            first = self.validation.first()
            evaluation.evaluate(self.engine.ready, [] if first is None else [first], self.engine.metrics)
        else:
            self.engine.require_numbers()

    def _require_samples(self) -> None:
        """Every batch, also the smallest, must have enough samples for the microbatches of a pipeline, if its model
        cannot run a microbatch without samples."""
        trainer = self.engine.ready
        parts = trainer.part[1] * trainer.plan.microbatches
        for what, loader in (("training", self.loader), ("validation", self.validation)):
            smallest = None if loader is None else loader.smallest_batch
            if loader is None or smallest is None or smallest >= parts or trainer.plan.pp == 1:
                continue
            if not trainer.can_run_spare():
                raise UsageError(
                    f"the smallest {what} batch of an epoch has {smallest} samples (batch_size={loader.batch_size}), "
                    f"but plan {trainer.plan} divides each batch into {parts}: use fewer microbatches, or a batch_size "
                    "that leaves more"
                )


def peak_memory() -> int:
    """Peak memory of this rank in bytes: of its GPU if it has one, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
