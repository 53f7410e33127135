"""Callbacks of Model.train. Every rank calls its own; LossMonitor prints on each, as MindSpore's does."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from unisono.compat.language import say
from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.errors import UsageError

__getattr__ = missing_names(__name__)


class RunContext:
    """What callbacks are given. `original_args()` has cur_epoch_num, cur_step_num, batch_num, net_outputs and more."""

    def __init__(self, original_args: SimpleNamespace) -> None:
        self._args = original_args
        self._stops = False

    def original_args(self) -> Any:
        return self._args

    def request_stop(self) -> None:
        self._stops = True

    def get_stop_requested(self) -> bool:
        return self._stops


class Callback:
    """The methods are called under both of MindSpore's names: step_end and on_train_step_end."""

    def begin(self, run_context: RunContext) -> None: ...

    def epoch_begin(self, run_context: RunContext) -> None: ...

    def step_begin(self, run_context: RunContext) -> None: ...

    def step_end(self, run_context: RunContext) -> None: ...

    def epoch_end(self, run_context: RunContext) -> None: ...

    def end(self, run_context: RunContext) -> None: ...

    def on_train_begin(self, run_context: RunContext) -> None:
        self.begin(run_context)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.epoch_begin(run_context)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self.step_begin(run_context)

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.step_end(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self.epoch_end(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        self.end(run_context)


def step_in_epoch(args: Any) -> int:
    return (args.cur_step_num - 1) % args.batch_num + 1


class LossMonitor(Callback):
    """Prints the loss of every step, or of every per_print_times-th."""

    def __init__(self, per_print_times: int = 1) -> None:
        if isinstance(per_print_times, bool) or not isinstance(per_print_times, int) or per_print_times < 0:
            raise UsageError(
                say(
                    f"LossMonitor({per_print_times!r}): expected a whole number of steps",
                    f"LossMonitor({per_print_times!r})：应为整数步数",
                )
            )
        self._every = per_print_times

    def step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        loss = float(args.net_outputs)
        if loss != loss or loss in (float("inf"), float("-inf")):
            raise UsageError(
                say(
                    f"epoch: {args.cur_epoch_num} step: {step_in_epoch(args)}: the loss is {loss}; MindSpore "
                    "stops here too: try a smaller learning rate",
                    f"epoch: {args.cur_epoch_num} step: {step_in_epoch(args)}：loss 为 {loss}；MindSpore 也在"
                    "此停止：请减小学习率",
                )
            )
        if self._every and args.cur_step_num % self._every == 0:
            print(f"epoch: {args.cur_epoch_num} step: {step_in_epoch(args)}, loss is {loss}\n", end="", flush=True)


class TimeMonitor(Callback):
    """Prints the time of an epoch, and of its steps."""

    def __init__(self, data_size: int | None = None) -> None:
        self._began = 0.0

    def epoch_begin(self, run_context: RunContext) -> None:
        self._began = time.perf_counter()

    def epoch_end(self, run_context: RunContext) -> None:
        passed = 1000 * (time.perf_counter() - self._began)
        steps = run_context.original_args().batch_num
        print(f"Train epoch time: {passed:5.3f} ms, per step time: {passed / steps:5.3f} ms\n", end="", flush=True)


class CheckpointConfig:
    """When to save. integrated_save: a checkpoint has whole tensors, the default; otherwise the rank's shards."""

    def __init__(
        self,
        save_checkpoint_steps: int = 1,
        save_checkpoint_seconds: int = 0,
        keep_checkpoint_max: int = 5,
        keep_checkpoint_per_n_minutes: int = 0,
        integrated_save: bool = True,
        async_save: bool = False,
    ) -> None:
        if save_checkpoint_seconds or keep_checkpoint_per_n_minutes:
            raise UsageError(
                say(
                    "CheckpointConfig: by seconds or minutes, ranks would save at different steps; MindSpore "
                    "warns of it: use save_checkpoint_steps and keep_checkpoint_max",
                    "CheckpointConfig：按秒或分钟保存时，各进程会在不同的步保存；MindSpore 对此有警告：请用 "
                    "save_checkpoint_steps 和 keep_checkpoint_max",
                )
            )
        if save_checkpoint_steps < 1 or keep_checkpoint_max < 1:
            raise UsageError(
                say(
                    "CheckpointConfig: expected save_checkpoint_steps and keep_checkpoint_max of at least 1",
                    "CheckpointConfig：save_checkpoint_steps 和 keep_checkpoint_max 应不小于 1",
                )
            )
        self.save_checkpoint_steps = save_checkpoint_steps
        self.keep_checkpoint_max = keep_checkpoint_max
        self.integrated_save = integrated_save


class ModelCheckpoint(Callback):
    """Saves DIRECTORY/PREFIX-EPOCH_STEP.ckpt: parameters by their names, and the optimizer's states."""

    def __init__(
        self, prefix: str = "CKP", directory: str | None = None, config: CheckpointConfig | None = None
    ) -> None:
        if not isinstance(prefix, str) or "/" in prefix:
            raise UsageError(
                say(
                    f"ModelCheckpoint(prefix={prefix!r}): expected a name without a slash",
                    f"ModelCheckpoint(prefix={prefix!r})：应为不含斜杠的名字",
                )
            )
        self._prefix = prefix
        self._folder = Path(directory or ".")
        self._config = config or CheckpointConfig()
        self._saved: list[Path] = []
        self._step = 0

    @property
    def latest_ckpt_file_name(self) -> str:
        return str(self._saved[-1]) if self._saved else ""

    def begin(self, run_context: RunContext) -> None:
        """Files of an earlier run are kept: the prefix gets a number, as MindSpore's."""
        self._folder.mkdir(parents=True, exist_ok=True)
        first, number = self._prefix, 0
        while list(self._folder.glob(f"{self._prefix}-*.ckpt")):
            number += 1
            self._prefix = f"{first}_{number}"

    def step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        if args.cur_step_num % self._config.save_checkpoint_steps == 0:
            self._save(args)

    def end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        if args.cur_step_num and args.cur_step_num != self._step:
            self._save(args)

    def _save(self, args: Any) -> None:
        self._step = args.cur_step_num
        path = self._folder / f"{self._prefix}-{args.cur_epoch_num}_{step_in_epoch(args)}.ckpt"
        torch.save(args.checkpoint(self._config.integrated_save), path)
        self._saved.append(path)
        while len(self._saved) > self._config.keep_checkpoint_max:
            self._saved.pop(0).unlink(missing_ok=True)
