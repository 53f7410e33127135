"""The Engine: trains a plain model under a given or searched plan.

    engine = uni.Engine(model, loss=F.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), plan="auto")
    engine.fit(dataset, epochs=3, batch_size=64, save="runs/gpt", resume=True)
    engine.evaluate(held_out); engine.predict(x); engine.save(path); engine.load(path)

The same script runs in one process and under `unisono run -n 8`; every rank makes the same calls.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.same_data import SameBatch, require_same_batch
from unisono.errors import CheckpointError, UsageError
from unisono.launch import environment
from unisono.mesh.named_groups import Groups, grouped
from unisono.parallel import task
from unisono.parallel.apply import Model
from unisono.parallel.inputs import as_inputs, as_pair
from unisono.parallel.loss.loss import Loss
from unisono.parallel.loss.model_loss import is_label, own_loss
from unisono.parallel.pipeline.layers import build_full
from unisono.parallel.precision import Precision
from unisono.parallel.share import BatchDim, Share, first_batch_size, require_batch_dim
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.planner.auto import choose, prediction
from unisono.planner.auto_recompute import resolve_recompute
from unisono.planner.choice import Choice, Job
from unisono.train import evaluation
from unisono.train.callbacks import BestValue, Callback, SaveBest
from unisono.train.checkpoint.checkpoints import Checkpoints
from unisono.train.checkpoint.folder_lock import BEST
from unisono.train.checkpoint.inventory import shapes_here
from unisono.train.checkpoint.weights import export_pretrained
from unisono.train.data.given_batches import GivenBatches
from unisono.train.data.loader import Loader
from unisono.train.data.reading import Collate, collate_samples, collated
from unisono.train.data.sampler import require_whole_number
from unisono.train.fit import Fit, History, Options
from unisono.train.metric_sums import TrainingMetrics
from unisono.train.metrics import Function, Metric, named, number_of
from unisono.train.telemetry.run_folder import RunFolder
from unisono.train.telemetry.step_program import StepProgram
from unisono.train.telemetry.step_trace import steps_of
from unisono.verify.self_check import check_level, parallelize

Scheduler = Callable[[Optimizer], Any]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TASK_BATCHES = 4  # of the data of a script, that a Task made of it has


class Engine:
    """Trains, evaluates and saves a model under a plan.

    Args:
        model: A module, or a function that builds one. It is put into training mode if it is in evaluation mode, as
            from_pretrained returns it.
        loss: loss(outputs, targets) returns a scalar; default: the loss that the model computes itself, outputs.loss.
        optimizer: optimizer(parameters) returns a torch optimizer.
        metrics: Names ("accuracy", "top5", "perplexity"), Metrics, or functions (outputs, targets) -> number.
        plan: "auto", a Plan or its text.
        scheduler: scheduler(optimizer) returns a torch scheduler, stepped after every training step.
        precision: "fp32", "bf16", "fp16" or "fp8", with options, as "bf16,reduce=bf16"; see uni.parallelize.
        clip: The maximum norm of the gradients.
        seed: Of initial weights, the order of samples, and random numbers in the model.
        rules: Which layers tp shards, if the model does not define it.
        device: Of this rank; default: its GPU if it has one, else the CPU.
        check: How the plan is verified on the model and the first batch before training: "auto", "full" or "off".
        batch: What ranks give to `run`, and what a DataLoader that is given to `fit` or `evaluate` reads: "global", the
            same batch on all ranks, or "local", on each data rank its own samples.
        batch_dim: The dim of samples in a batch, as for uni.parallelize: 1 for time-major batches, which the engine's
            loader then makes.
        race: With plan="auto", the plans with the best predictions take a few real steps each, and the fastest is
            chosen; without, the best prediction is.
        compile: As `compile` in a plan, also for plan="auto".
        cudagraph: On one GPU, run steps as a CUDA graph, for small models.
        collate: Makes a batch from a list of samples, as a Hugging Face data collator, for datasets given to `fit`,
            `evaluate` and `predict`.
        parameter_groups: Options of the optimizer by patterns of parameters' names, as {"head.*": {"lr": 1e-3},
            "*.bias|*.norm*": {"weight_decay": 0.0}}; the first pattern that matches counts.

    Raises:
        UsageError: An argument is not what was expected.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss | None = None,
        optimizer: Callable[[Any], Optimizer] | None = None,
        metrics: Sequence[str | Metric | Function] | None = None,
        plan: str | Plan = "auto",
        scheduler: Scheduler | None = None,
        precision: str | Precision = "fp32",
        clip: float | None = None,
        seed: int = 0,
        rules: Any = None,
        device: torch.device | str | None = None,
        check: str = "auto",
        batch: str = "global",
        batch_dim: BatchDim = 0,
        race: bool = True,
        compile: bool = False,
        cudagraph: bool = False,
        collate: Collate | None = None,
        parameter_groups: Groups | None = None,
    ) -> None:
        self._batch_dim = require_batch_dim(batch_dim)
        plan = os.environ.get(environment.PLAN) or plan
        if not isinstance(plan, str | Plan):
            raise UsageError(f'Engine(plan={plan!r}): expected "auto", a Plan or its text, as "dp=2,tp=2"')
        self._model: nn.Module | Callable[[], nn.Module] = _buildable(model, seed)
        self._device = None if device is None else torch.device(device)
        self._loss: Loss = own_loss if loss is None else loss
        if optimizer is None:
            raise UsageError(f"Engine without optimizer=; expected a function: {_FORMS['optimizer']}")
        self._optimizer = optimizer if parameter_groups is None else grouped(optimizer, parameter_groups)
        self._collate = collate
        self._scheduler = scheduler
        self.metrics = named(metrics)
        self._plan = plan if isinstance(plan, Plan) or plan == "auto" else Plan.parse(plan)
        if not isinstance(compile, bool):
            raise UsageError(f"Engine(compile={compile!r}): expected True or False")
        if compile and isinstance(self._plan, Plan):
            self._plan = self._plan.but(compile=True)
        self._compile = compile
        if not isinstance(cudagraph, bool):
            raise UsageError(f"Engine(cudagraph={cudagraph!r}): expected True or False")
        self._cudagraph = cudagraph
        self._precision = Precision.of(precision)
        if clip is not None and (not isinstance(clip, int | float) or isinstance(clip, bool) or not clip >= 0):
            raise UsageError(f"Engine(clip={clip!r}): expected a number of at least 0, or None")
        self._clip = clip
        self._rules = rules
        self._check = check
        if batch not in ("global", "local"):
            raise UsageError(f'Engine(batch={batch!r}): expected "global" or "local"')
        self._batch = batch
        check_level(check)
        if not isinstance(race, bool):
            raise UsageError(f"Engine(race={race!r}): expected True or False")
        self._race = race and os.environ.get(environment.RACE) != "0"
        self.seed = require_whole_number("Engine: seed", seed, 0)
        if seed >= 2**63:
            raise UsageError(f"Engine(seed={seed}): expected a number below 2**63")
        for name, value in (("loss", loss), ("optimizer", optimizer), ("scheduler", scheduler), ("collate", collate)):
            if value is not None and not callable(value):
                raise UsageError(f"Engine({name}={value!r}): expected a function; {_FORMS[name]}")
        self.trainer: Trainer | None = None
        self.schedule: Any = None  # torch's scheduler, set by prepare
        self.choice: Choice | None = None
        self._training_metrics: TrainingMetrics | None = None
        self._example: tuple[Any, Any] | None = None
        self.program = StepProgram(None)

    # ---- before training -----------------------------------------------------------------------------------------

    def prepare(self, example: Any) -> Engine:
        """Choose the plan and apply it to the model; `fit` does so with its first batch.

        Args:
            example: A batch.

        Returns:
            The engine itself.
        """
        if self.trainer is not None:
            return self
        example = as_pair(example)
        _require_pair(example)
        if task.is_sought():
            task.found(self._task([example]))
        self._example = example
        chosen = ""
        if self._plan == "auto":
            plan = self._chosen(example).plan
        else:
            assert isinstance(self._plan, Plan)
            plan = _fitting(self._plan, self.comm.size)
            plan, chosen = resolve_recompute(plan, self._job(example), self.device)
            self._plan = plan
        if self.comm.rank == 0:  # before the plan shards the module in place
            self.program = StepProgram(self._job(example))
        self.trainer = parallelize(
            self._placed(),
            plan,
            loss=self._loss,
            optimizer=self._optimizer,
            example=example,
            rules=self._rules,
            check=self._check,
            batch_dim=self._batch_dim,
            cudagraph=self._cudagraph,
            **self._options(),
        )
        self.trainer.chosen = chosen
        if self._scheduler is not None:
            self.schedule = _require_scheduler(self._scheduler(self.trainer.optimizer))
        return self

    def _options(self) -> dict[str, Any]:
        """Of the trainer, beside what is trained."""
        return {"clip": self._clip, "seed": self.seed, "precision": self._precision, "batch": self._batch}

    def _chosen(self, example: tuple[Any, Any]) -> Choice:
        """The plan of plan="auto"."""
        if self.choice is None or (self._race and not self.choice.race):
            job = self._job(example)
            self.choice = choose(job, self.comm, self.device, self._options(), with_race=self._race)
        return self.choice

    def predicted(self, example: tuple[Any, Any] | None = None) -> Choice:
        """The prediction for the plan, which is searched for if none is given; every rank calls it.

        Args:
            example: A batch; default: the one that the engine was prepared with.
        """
        if self.choice is None:
            example = self._example if example is None else example
            if example is None:
                raise UsageError("the engine has seen no batch yet: call prepare(example) with one")
            if not isinstance(self._plan, Plan):
                return self._chosen(example)
            self._plan, _ = resolve_recompute(self._plan, self._job(example), self.device)
            self.choice = prediction(self._plan, self._job(example), self.comm, self.device, self._options())
        return self.choice

    def _job(self, example: tuple[Any, Any]) -> Job:
        return Job(
            self._model,
            self._loss,
            self._optimizer,
            example,
            self._rules,
            self._batch_dim,
            self._clip,
            self._precision,
            compile=self._compile,
            cudagraph=self._cudagraph,
        )

    def cost(self) -> Choice:
        """The predicted time of a step and memory of a rank; every rank calls it."""
        return self.predicted()

    def explain(self) -> str:
        """The plan, its prediction, and why not its neighbours; every rank calls it."""
        return str(self.predicted())

    def _recall(self, folder: str | Path, batch_size: int) -> None:
        """A run that resumes with as many ranks as before keeps its plan; after a restart by the launcher also the
        prediction, for which ranks had measured their machine."""
        starts = RunFolder.starts(Path(folder))
        if not starts or starts[-1]["world"] != self.comm.size:
            return
        last = starts[-1]
        if self._plan == "auto":
            self._plan = Plan.parse(last["plan"])
        is_restart = int(os.environ.get(environment.ATTEMPT, "0")) > 0
        is_same = last["plan"] == str(self._plan) and last.get("batch_size") == batch_size
        if is_restart and is_same and last.get("predicted"):
            assert isinstance(self._plan, Plan)
            self.choice = Choice.recalled(self._plan, last["predicted"])

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self._device is None:
            self._device = torch.device("cpu")
            if torch.cuda.is_available():
                self._device = torch.device("cuda", self.comm.local_rank % torch.cuda.device_count())
        return self._device

    def _placed(self) -> nn.Module | Callable[[], nn.Module]:
        """The model on this rank's device; a function builds it on the CPU first."""
        model, device = self._model, self.device
        if isinstance(model, nn.Module):
            return _training(model.to(device))

        def placed() -> nn.Module:
            made = model()
            return _training(made.to(device)) if isinstance(made, nn.Module) else made

        return placed

    def require_numbers(self) -> None:
        """Check that every metric function returns a number for the engine's first batch."""
        functions = {name: each for name, each in self.metrics.items() if not isinstance(each, Metric)}
        if functions and self._example is not None:
            inputs, targets = self._example
            outputs = self.ready.predict(inputs)
            for name, function in functions.items():
                number_of(name, function(outputs, targets))

    @property
    def comm(self) -> Communicator:
        return world.world() if world.is_initialized() else world.init()

    @property
    def _batch_device(self) -> torch.device | None:
        """The device that batches must be moved to, if any."""
        return None if self.device.type == "cpu" else self.device

    @property
    def ready(self) -> Trainer:
        """The trainer; UsageError before `prepare`."""
        if self.trainer is None:
            raise UsageError("the engine has no plan yet: call prepare(example) with one batch, or fit(dataset)")
        return self.trainer

    @property
    def plan(self) -> Plan:
        return self.ready.plan

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.ready.model

    def dataloader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | None = None,
        workers: int = 0,
        global_batches: bool = False,
        drop_last: bool = False,
    ) -> Loader:
        """Global batches in an order that depends on seed and epoch only; each rank reads its part.

        An engine without a plan is prepared with the first batch.

        Args:
            dataset: As for `fit`.
            batch_size: Samples of a global batch.
            shuffle: Default for map-style datasets.
            workers: Processes that read samples.
            global_batches: Every rank reads full batches.
            drop_last: Drop the last batch if it is smaller.
        """
        self._require_global("fit and evaluate read one dataset")
        given: dict[str, Any] = {
            "shuffle": shuffle, "seed": self.seed, "workers": workers, "batch_dim": self._batch_dim,
            "drop_last": drop_last, "collate": self._collate,
        }  # fmt: skip
        if self.trainer is None:
            self._prepare_with(Loader(dataset, batch_size, device=self._batch_device, **given))
        part = (0, 1) if global_batches else self.ready.part
        return Loader(dataset, batch_size, part=part, device=self._batch_device, **given)

    def _given(self, loader: DataLoader[Any]) -> GivenBatches:
        """The batches of the user's own DataLoader: global ones, or with Engine(batch="local") those of each rank."""
        is_local = self._batch == "local"
        if is_local and evaluation.needs_global_batches(self.metrics):
            raise UsageError(
                'a metric that is a function needs global batches, but Engine(batch="local") reads others on every '
                'data rank; use a uni.Metric, or batch="global"'
            )

        def batches(index: int) -> GivenBatches:
            options = {"is_local": is_local, "index": index, "seed": self.seed, "device": self._batch_device}
            return GivenBatches(loader, self.comm, **options)  # type: ignore[arg-type]

        if self.trainer is None:
            self._prepare_with(batches(self.comm.rank))
        return batches(self.ready.part[0])

    def _require_global(self, what: str) -> None:
        if self._batch == "local":
            raise UsageError(
                f'Engine(batch="local") is for run(batch) and for a DataLoader, where every data rank has its own '
                f'samples, but {what} on every rank; use batch="global"'
            )

    def _prepare_with(self, loader: Loader | GivenBatches) -> None:
        if isinstance(loader, Loader):
            self._require_global("fit and evaluate read one dataset")
        if self.trainer is None:
            first = loader.first(global_batches=True)
            if first is None:
                raise UsageError("the dataset is empty; expected at least one sample")
            batch = first.batch if isinstance(first, Share) else first
            if self._batch == "global":
                require_same_batch(batch, self.comm)
            self.prepare(batch)

    # ---- training ------------------------------------------------------------------------------------------------

    @overload
    def run(self, batch: Any, *, metrics: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def run(self, batch: Any, *, metrics: Literal[True]) -> tuple[torch.Tensor, dict[str, float]]: ...

    def run(self, batch: Any, *, metrics: bool = False) -> torch.Tensor | tuple[torch.Tensor, dict[str, float]]:
        """One training step on a global batch.

        Args:
            batch: The same on every rank or, with Engine(batch="local"), the rank's own samples: (inputs, targets), or
                a mapping of the model's inputs with labels, from which the model computes the loss.
            metrics: Return the engine's metrics of the batch too, from the outputs of the step itself, as
                {"train_accuracy": 0.75}.

        Returns:
            The loss as on one device; with `metrics`, the loss and the values by name.
        """
        batch = as_pair(batch)
        if task.is_sought():
            task.found(self._task([batch]))
        if self.trainer is None and self._batch == "global":
            SameBatch(self.comm).require(batch)
        self.prepare(batch)
        if not first_batch_size(batch, self._batch_dim):
            raise UsageError("run: the batch has no sample; expected at least one")
        if not metrics:
            return self._stepped(batch)
        if self._training_metrics is None:
            self._training_metrics = TrainingMetrics(self.ready, self.metrics)
        with self.ready.observing(self._training_metrics.observe):
            loss = self._stepped(batch)
        return loss, self._training_metrics.values()

    def _stepped(self, batch: Any) -> torch.Tensor:
        loss = self.ready.step(batch)
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def fit(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        max_steps: int | None = None,
        max_time: float | str | None = None,
        validation: Any = None,
        evaluate_every: int | None = None,
        save: str | Path | None = None,
        save_best: str | None = None,
        save_every: int | None = None,
        memory_every: int | None = None,
        keep: int = 3,
        resume: bool = False,
        shuffle: bool | None = None,
        workers: int = 0,
        drop_last: bool = False,
        nonfinite: str = "stop",
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        look_every: int = 10,
        log_every: int | None = None,
        norms: bool = False,
        profile_steps: str | None = None,
        train_metrics: bool = False,
    ) -> History:
        """Train on the dataset; every rank calls it.

        Args:
            dataset: A dataset, a uni.Loader or a torch DataLoader. A loader decides on batch size and order; its
                batches are global or each rank's own, see Engine(batch=).
            epochs: How often the dataset is gone through.
            batch_size: Samples of a global batch.
            max_steps: End after so many, possibly within an epoch.
            max_time: End after the step that runs at that time: seconds, or a text, as "90m" or "12h".
            validation: Data to evaluate after each epoch, and after every `evaluate_every` steps.
            evaluate_every: Steps between two evaluations within an epoch.
            save: The run folder, with a log and checkpoints; or "memory": no folder, and checkpoints every `save_every`
                steps in the memory of the hosts, from which restarts of the job go on.
            save_best: A value of the evaluations, as "validation_loss"; the step with the best one is kept in the
                folder `best` of the run folder.
            save_every: Steps between two checkpoints; default: one after every epoch.
            memory_every: Steps between two checkpoints in memory, beside those in the run folder.
            keep: How many of the newest checkpoints are kept.
            resume: Continue from the newest valid checkpoint.
            shuffle: Default for map-style datasets.
            workers: Processes that read samples.
            drop_last: Drop the last batch of an epoch if it is smaller.
            nonfinite: "stop" at a loss that is NaN or infinite, or "skip" such steps.
            callbacks: uni.Callback objects, as uni.EarlyStopping and the loggers.
            progress: Whether rank 0 shows the progress.
            look_every: Steps between two samples of memory and stragglers.
            log_every: Steps between two lines of the logs (default: 1) and of the output that is no terminal (default:
                about 20 lines for a run).
            norms: Log the norms of gradients, before clipping, and of weights, of the full model.
            profile_steps: "10..12" writes the trace of torch's profiler for these steps, one for each rank, to the run
                folder.
            train_metrics: Compute the engine's metrics of every training batch too, from the outputs of the step
                itself; `history.metrics["train_accuracy"]` has a value for each step.

        Returns:
            The history of losses and evaluations, the same on every rank.
        """
        if save is not None and (not isinstance(save, str | Path) or not str(save)):
            raise UsageError(f"fit(save={save!r}): expected the path of a folder")
        if save == "memory":
            if save_every is None or memory_every is not None or resume:
                raise UsageError(
                    "fit(save='memory') needs save_every=STEPS, and has neither memory_every nor resume: what is in "
                    "memory lasts as long as the job; for a folder of that name, save='./memory'"
                )
            save, save_every, memory_every = None, None, save_every
        if save is None and (save_every is not None or resume):
            raise UsageError("fit(save_every=..., resume=...) needs save=FOLDER, the folder of checkpoints")
        for each in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
            if not isinstance(callbacks, Sequence) or not isinstance(each, Callback):
                raise UsageError(f"fit(callbacks=...): {each!r}; expected a list of uni.Callback")
        options = Options(
            epochs, max_steps, look_every, nonfinite, save_every, keep, resume, progress, evaluate_every,
            _seconds(max_time), log_every, norms, profile_steps, train_metrics, memory_every,
        )  # fmt: skip
        if profile_steps is not None:
            steps_of(profile_steps)
            if save is None:
                raise UsageError(f"fit(profile_steps={profile_steps!r}) needs save=FOLDER, the folder of the run")
        callbacks = [*callbacks, *self._best(save_best, save)]
        watched = next((type(each).__name__ for each in callbacks if isinstance(each, BestValue)), "")
        if validation is None and (watched or evaluate_every is not None):
            raise UsageError(
                f"fit({'evaluate_every=' if evaluate_every is not None else watched}) without validation=; expected "
                "data to evaluate"
            )
        if task.is_sought():
            task.found(self._task(self._first_batches(dataset, batch_size, shuffle)))
        if save is not None and self.trainer is None:
            has_batches = isinstance(dataset, Loader | DataLoader)
            self._recall(save, dataset.batch_size if has_batches else batch_size)
        loader = dataset
        if isinstance(dataset, Loader | DataLoader) and (shuffle is not None or workers or drop_last):
            raise UsageError(
                f"fit({type(dataset).__name__}, shuffle=, workers= or drop_last=): order and batches are the loader's; "
                "give these to it"
            )
        if isinstance(dataset, Loader):
            self._prepare_with(dataset)
        elif isinstance(dataset, DataLoader):
            loader = self._given(dataset)
        else:
            loader = self.dataloader(dataset, batch_size, shuffle=shuffle, workers=workers, drop_last=drop_last)
        held_out = None if validation is None else self._in_order(validation, batch_size)
        folder = None if save is None else RunFolder(save, self.comm.rank)
        return Fit(self, loader, options, folder, held_out, callbacks).run()

    def _best(self, monitor: str | None, save: str | Path | None) -> list[Callback]:
        if monitor is None:
            return []
        if save is None:
            raise UsageError(f"fit(save_best={monitor!r}) needs save=FOLDER, the folder of the run")
        return [SaveBest(monitor, Path(save) / BEST)]

    def _first_batches(self, data: Any, batch_size: int, shuffle: bool | None) -> list[tuple[Any, Any]]:
        """Some global batches, for a Task."""
        if self._batch == "local":
            raise UsageError(
                'Engine(batch="local") gives every data rank its own batches, but verify, plan and explain need global '
                'ones; use batch="global", or a uni.Task'
            )
        if not isinstance(data, Loader | DataLoader):
            options: dict[str, Any] = {"shuffle": shuffle, "seed": self.seed, "batch_dim": self._batch_dim}
            data = Loader(data, batch_size, collate=self._collate, global_batches=True, **options)
        batches = [each.batch if isinstance(each, Share) else each for each in itertools.islice(data, _TASK_BATCHES)]
        if not batches:
            raise UsageError("the dataset is empty; expected at least one sample")
        return [as_pair(each) for each in batches]

    def _task(self, batches: Sequence[tuple[Any, Any]]) -> task.Task:
        """What is trained, for verify, plan and explain of a training script."""
        model = self._model
        return task.Task(
            model=(lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model,
            loss=self._loss,
            optimizer=self._optimizer,
            batch=lambda seed: batches[seed % len(batches)],
            rules=self._rules,
            clip=self._clip,
            batch_dim=self._batch_dim,
            precision=self._precision,
        )

    # ---- after training ------------------------------------------------------------------------------------------

    def evaluate(self, dataset: Any, batch_size: int = 32) -> dict[str, float]:
        """The mean loss and the metrics over all samples, the same on every rank.

        Args:
            dataset: As for `fit`.
            batch_size: Samples of a global batch.

        Returns:
            The values by name.
        """
        return evaluation.evaluate(self.ready, self._in_order(dataset, batch_size), self.metrics)

    def predict(self, inputs: Any, batch_size: int = 32) -> Any:
        """The model's outputs for all inputs, in order, on every rank.

        Args:
            inputs: As for the model, or a list or dataset of dicts, which Engine(collate=...) makes one batch of.
            batch_size: Samples of a global batch.
        """
        self._require_global("predict takes all inputs")
        inputs = self._named_inputs(inputs)
        return evaluation.predict(self.ready, inputs, batch_size, self.device)

    def save(self, path: str | Path) -> None:
        """Save a checkpoint that any plan can load; replaces an earlier one there. Every rank calls it.

        Args:
            path: A folder.
        """
        saved = Checkpoints(path, keep=1)
        if len(saved.steps()) > 1:
            raise UsageError(
                f"{path} holds the checkpoints of steps {', '.join(map(str, saved.steps()))}; they would be deleted; "
                "give another folder"
            )
        with contextlib.closing(saved):
            saved.save(self.ready, self.ready.steps, extra=self.own_state())

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str = "50GB") -> None:
        """Save a Hugging Face model as a folder that `from_pretrained` reads, under any plan. Every rank calls it.

        Args:
            folder: Where to.
            max_shard_size: Of a file, as for transformers' own save_pretrained.
        """
        export_pretrained(self.ready, folder, max_shard_size)

    def load(self, path: str | Path) -> None:
        """Load a checkpoint of the same model, saved under any plan.

        Args:
            path: The folder.
        """
        self.load_own_state(Checkpoints(path).load(self.ready).extra)

    def about_model(self) -> dict[str, Any]:
        """Name and number of parameters of the model; every rank calls it."""
        own = {name for name, _ in self.ready.model.named_parameters()}
        mine = {name: about for name, about in shapes_here(self.ready).items() if name in own}
        full: dict[str, Any] = {}
        for theirs in self.ready.mesh.comm("pp").all_gather_object(mine, only_data=True):
            full |= theirs
        model = self._model if isinstance(self._model, nn.Module) else self.ready.model
        return {"name": type(model).__name__, "parameters": sum(math.prod(shape) for shape, _ in full.values())}

    def own_state(self) -> dict[str, Any]:
        """State beside the trainer's: of the scheduler."""
        if self.schedule is None:
            return {}
        return {"schedule": self.schedule.state_dict(), "scheduler": type(self.schedule).__qualname__}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore the scheduler; one that was not saved starts now."""
        if self.schedule is None or "schedule" not in state:
            return
        kind = type(self.schedule).__qualname__
        saved = state.get("scheduler", kind)
        if saved != kind:
            raise CheckpointError(
                f"the checkpoint has a scheduler {saved}, but this one is {kind}, which cannot load its state; build "
                "it as it was when the checkpoint was saved"
            )
        self.schedule.load_state_dict(state["schedule"])

    def _named_inputs(self, inputs: Any) -> Any:
        """Inputs for `predict`: samples that are dicts collated, and without labels, from which a model would compute
        the loss of a part of the samples."""
        if _has_samples_of_names(inputs):
            inputs = collated([inputs[index] for index in range(len(inputs))], self._collate or collate_samples)
        config = getattr(self.ready.model, "config", None)
        feeds_labels = getattr(config, "is_encoder_decoder", False)  # to the decoder
        if not isinstance(inputs, Mapping) or self._example is None or self._example[1] is not None or feeds_labels:
            return as_inputs(inputs)
        return {name: value for name, value in inputs.items() if not is_label(name)}

    def _in_order(self, dataset: Any, batch_size: int) -> Loader | GivenBatches:
        if isinstance(dataset, Loader):
            return dataset
        if isinstance(dataset, DataLoader):
            return self._given(dataset)
        return self.dataloader(
            dataset, batch_size, shuffle=False, global_batches=evaluation.needs_global_batches(self.metrics)
        )


def _has_samples_of_names(inputs: Any) -> bool:
    """Whether it is a dataset (of torch, of Hugging Face, a list) of samples that are dicts, and not a batch."""
    if isinstance(inputs, torch.Tensor | tuple | Mapping) or not hasattr(inputs, "__getitem__"):
        return False
    with contextlib.suppress(LookupError):  # a table, whose columns have names
        return hasattr(inputs, "__len__") and len(inputs) > 0 and isinstance(inputs[0], Mapping)
    return False


def _training(model: nn.Module) -> nn.Module:
    """The model in training mode; of one that is in it already, modules keep the mode that they were given."""
    return model if model.training else model.train()


def _buildable(model: Model, seed: int) -> nn.Module | Callable[[], nn.Module]:
    """A list of LayerSpec as a function that builds the model."""
    if isinstance(model, nn.Module) or callable(model):
        return model
    if not isinstance(model, list | tuple) or not model:
        raise UsageError(
            f"Engine(model={model!r}): expected an nn.Module, a function that builds one or a list of uni.nn.LayerSpec"
        )
    return lambda: build_full(model, seed)


_FORMS = {
    "loss": "loss(outputs, targets) returns a scalar tensor",
    "optimizer": "optimizer(parameters) returns a torch optimizer, e.g. lambda p: torch.optim.AdamW(p, lr=3e-4)",
    "scheduler": "scheduler(optimizer) returns a torch scheduler",
    "collate": "collate(samples) returns a batch",
}


def _seconds(given: float | str | None) -> float | None:
    """Of a number, or a text such as "90m"."""
    if given is None:
        return None
    number, unit = (given, 1.0) if not isinstance(given, str) else (given[:-1], _UNITS.get(given[-1:], 0.0))
    try:
        seconds = math.nan if isinstance(number, bool) else float(number) * unit
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f'fit(max_time={given!r}): expected seconds, or a text such as "90m" or "12h"')
    return seconds


def _fitting(plan: Plan, ranks: int) -> Plan:
    """The plan, if it fits these ranks; else UsageError, which names hosts that were lost."""
    try:
        return plan.fit(ranks)
    except UsageError as error:
        lost = os.environ.get(environment.LOST_HOSTS)
        if not lost:
            raise
        raise UsageError(
            f"{error}. The job lost host {lost} and continues with {ranks} ranks: Engine(plan='auto') chooses a plan "
            "for them"
        ) from None


def _require_pair(example: Any) -> None:
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise UsageError(f"a batch is a {type(example).__name__}; expected (inputs, targets)")


def _require_scheduler(schedule: Any) -> Any:
    """Return the scheduler, if it can be stepped after each training step without arguments."""
    if not all(callable(getattr(schedule, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise UsageError(f"scheduler(optimizer) returned a {type(schedule).__name__}; expected a torch scheduler")
    needed = [each.name for each in signature(schedule.step).parameters.values() if each.default is each.empty]
    if needed:
        raise UsageError(
            f"{type(schedule).__name__}.step needs {needed[0]}, but the engine steps its scheduler after every step "
            "without arguments; step this one yourself, in the on_epoch of a callback"
        )
    return schedule
