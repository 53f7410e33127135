"""Loggers: the numbers of a run for TensorBoard, Weights & Biases and MLflow. They are callbacks:

    engine.fit(data, callbacks=[uni.WandbLogger(project="gpt"), uni.MLflowLogger("gpt")])

Rank 0 logs what `StepInfo.numbers` and evaluations have: loss, rates, samples and tokens a second, memory, norms and
metrics. It does so in a thread, so that training does not wait for a server. A logger that fails warns once and logs no
more; training goes on. A resumed run continues the run of the tracker whose id is in the checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.train.callbacks import Callback, StepInfo

if TYPE_CHECKING:
    from unisono.train.engine import Engine

_CLOSING = 60.0  # seconds that the end of a run waits for what has not been written
_GATHERED = 1.0  # seconds of numbers in one request to MLflow
_MOST = 500  # numbers in one request


class Logger(Callback):
    """Derive from it for a tracker of your own: `open`, `write` and `close` are called on rank 0 only, the last two in
    a thread, and may raise."""

    ends_runs = False

    def __init__(self) -> None:
        self.run_id: str | None = None  # of the tracker; a resumed run continues it
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_failed = False

    def open(self, about: dict[str, Any], first_step: int) -> str | None:
        """Start a run, or continue `self.run_id`; returns its id. about: the model, the plan and the seed."""
        raise AssertionError("a subclass opens the run of its tracker")

    def write(self, step: int, numbers: dict[str, float]) -> None:
        raise AssertionError("a subclass writes to its tracker")

    def close(self) -> None:
        """After the last step, also of a run that failed."""

    # ---- as a callback -------------------------------------------------------------------------------------------

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        about = {"plan": str(engine.plan), "ranks": engine.comm.size, "seed": engine.seed, "steps": steps}
        about |= {f"model_{name}": value for name, value in engine.about_model().items()}
        if engine.comm.rank == 0:
            self._error, self._is_failed = None, False
            try:
                self.run_id = self.open(about, first_step)
                self._thread = threading.Thread(target=self._write_all, name=type(self).__name__, daemon=True)
                self._thread.start()
            except Exception as error:
                self._failed(error)
        self.run_id = engine.comm.broadcast_object(self.run_id) if engine.comm.size > 1 else self.run_id

    def on_step(self, engine: Engine, info: StepInfo) -> None:
        if info.is_logged:
            self._log(info.step, info.numbers())

    def on_evaluation(self, engine: Engine, info: StepInfo) -> None:
        self._log(info.step, dict(info.values))

    def _log(self, step: int, numbers: dict[str, Any]) -> None:
        if self._error is not None:
            self._failed(self._error)
        if self._thread is not None:
            numbers = scalars(numbers)
            self._queue.put(lambda: self.write(step, numbers))

    def on_end(self, engine: Engine, info: StepInfo | None) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(self.close)
            self._queue.put(None)
            thread.join(_CLOSING)
            if self._error is None and thread.is_alive():
                self._error = TimeoutError(f"not all numbers were written in {_CLOSING:g} s")
            if self._error is not None:
                self._failed(self._error)

    def _write_all(self) -> None:
        """The thread: writes until the end, or the first failure."""
        while (action := self._queue.get()) is not None:
            if self._error is None:
                try:
                    action()
                except Exception as error:
                    self._error = error

    def _failed(self, error: Exception) -> None:
        if not self._is_failed:
            self._is_failed = True
            name, shown = type(self).__name__, str(error).strip() or type(error).__name__
            warnings.warn(f"{name} failed and logs no more, training continues: {shown}", RuntimeWarning, stacklevel=2)
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]


def scalars(numbers: dict[str, Any]) -> dict[str, float]:
    """What trackers draw: of the memory of ranks the largest, no texts."""
    found = {name: value for name, value in numbers.items() if isinstance(value, int | float) and name != "step"}
    if numbers.get("memory"):
        found["memory"] = max(numbers["memory"])
    return found


class TensorBoardLogger(Logger):
    """Writes event files for TensorBoard. The run folder of `fit(save=...)` has one, if tensorboard is installed.

    Args:
        folder: Where to.
        is_optional: Without tensorboard on rank 0, nothing is written.
    """

    def __init__(self, folder: str | Path, *, is_optional: bool = False) -> None:
        super().__init__()
        self._is_optional = is_optional
        if not is_optional:
            _require("tensorboard", "report", self)
        self.folder = Path(folder)
        self._writer: Any = None

    def open(self, about: dict[str, Any], first_step: int) -> str | None:
        if self._is_optional and importlib.util.find_spec("tensorboard") is None:
            self._writer = None
            return None
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), purge_step=first_step + 1)
        return None

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items() if self._writer is not None else ():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger(Logger):
    """Logs to Weights & Biases. If the script has called wandb.init itself, that run is used and left open.

    Args:
        project: Of the run.
        config: Logged beside the model, the plan and the seed.
        **options: Of wandb.init: name, entity, group, tags, mode="offline", dir, ...
    """

    def __init__(self, project: str | None = None, *, config: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self._wandb = _require("wandb", "wandb", self)
        self._options = {"project": project, **options}
        self._config = config or {}
        self._run: Any = None
        self._is_own = False

    def open(self, about: dict[str, Any], first_step: int) -> str | None:
        self._is_own = self._wandb.run is None
        if self._is_own:
            again = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
            self._run = self._wandb.init(**{**again, **self._options})
        else:
            self._run = self._wandb.run
        self._run.config.update({**about, **self._config}, allow_val_change=True)
        self._run.define_metric("*", step_metric="step")  # wandb's own would refuse steps that a resume repeats
        return str(self._run.id)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


class MLflowLogger(Logger):
    """Logs to MLflow: a run of an experiment.

    Args:
        experiment: Its name.
        name: Of the run.
        tracking_uri: Of the server; default: MLFLOW_TRACKING_URI.
        params: Logged beside the model, the plan and the seed.
        tags: Of the run.
    """

    def __init__(
        self,
        experiment: str = "unisono",
        *,
        name: str | None = None,
        tracking_uri: str | None = None,
        params: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._mlflow = _require("mlflow", "mlflow", self)
        self._experiment, self._name, self._uri = experiment, name, tracking_uri
        self._params, self._tags = params or {}, tags or {}
        self._client: Any = None
        self._metrics: list[Any] = []
        self._sent = 0.0

    def open(self, about: dict[str, Any], first_step: int) -> str | None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        self._metrics, self._sent = [], time.monotonic()
        if self.run_id is not None:
            self._client.update_run(self.run_id, "RUNNING")
            return self.run_id
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        run_id = str(self._client.create_run(experiment, run_name=self._name, tags=self._tags).info.run_id)
        for key, value in {**about, **self._params}.items():
            self._client.log_param(run_id, key, value)
        return run_id

    def write(self, step: int, numbers: dict[str, float]) -> None:
        now = int(1000 * time.time())
        metric = self._mlflow.entities.Metric
        self._metrics += [metric(name, float(value), now, step) for name, value in numbers.items()]
        if time.monotonic() - self._sent > _GATHERED or len(self._metrics) >= _MOST:
            self._send()

    def _send(self) -> None:
        while self._metrics:
            self._client.log_batch(self.run_id, self._metrics[:_MOST])
            del self._metrics[:_MOST]
        self._sent = time.monotonic()

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self.run_id)


def _require(package: str, extra: str, logger: Logger) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UsageError(
            f"{type(logger).__name__} needs {package}, which is not installed; pip install 'unisono[{extra}]'"
        ) from None
