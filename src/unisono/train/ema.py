"""EMA: an exponential moving average of the weights, under any plan.

    ema = uni.EMA(0.999)
    engine.fit(data, validation=held_out, callbacks=[ema])   # evaluates the averages
    with ema.applied():
        engine.save_pretrained("averaged")

Each rank averages what its optimizer updates: under ZeRO its shard, under tensor parallelism its slice, in a pipeline
its stage, in float32 where the model has half weights. The average is elementwise, so a shard of it is the average of
the shards, and no rank communicates for it. Averages have the layouts of their parameters; by these, checkpoints
store them for any other plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import UsageError
from unisono.parallel.full_state import full_tensors_in
from unisono.parallel.precision import HALF_DTYPES
from unisono.parallel.trainer import Trainer
from unisono.train.callbacks import Callback, StepInfo
from unisono.train.checkpoint.inventory import ByParameter
from unisono.train.data.sampler import require_whole_number

if TYPE_CHECKING:
    from unisono.train.engine import Engine


class EMA(Callback):
    """An exponential moving average of the weights, as torch's AveragedModel with get_ema_multi_avg_fn(decay): the
    first average is a copy, and then average = decay * average + (1 - decay) * weights. Buffers are not averaged.

    Checkpoints contain both the weights and the averages. In a loop of one's own, call `update(trainer)` after each
    step.

    Args:
        decay: Of the average, between 0 and 1.
        every: Steps between two updates.
        evaluate: Whether the evaluations of `fit` use the averages; `save_best` then keeps them, too.
    """

    ends_runs = False

    def __init__(self, decay: float = 0.999, *, every: int = 1, evaluate: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise UsageError(f"EMA(decay={decay!r}): expected a number of at least 0 and less than 1, as 0.999")
        if not isinstance(evaluate, bool):
            raise UsageError(f"EMA(evaluate={evaluate!r}): expected True or False")
        self.decay = decay
        self.every = require_whole_number("EMA: every", every, 1)
        self.evaluate = evaluate
        self.updates = 0
        self._averages: dict[str, torch.Tensor] = {}  # of this rank's shards, by the parameters' names
        self._trainer: Trainer | None = None

    @torch.no_grad()
    def update(self, trainer: Trainer) -> None:
        """Take the current weights into the averages."""
        self._trainer = trainer
        for name, tensor in trainer.optimized():
            average = self._averages.get(name)
            if average is not None:
                average.lerp_(tensor.detach().to(average.dtype), 1 - self.decay)
            elif tensor.is_floating_point():
                dtype = torch.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype
                self._averages[name] = tensor.detach().to(dtype, copy=True)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In the block, the model has the averages as its weights: for evaluate, predict, save_pretrained,
        export_weights or state_dict, but not for training. Every rank enters it."""
        trainer = self._require_trainer()
        weights = self._exchange(trainer, self._averages)
        try:
            yield
        finally:
            self._exchange(trainer, weights)

    @torch.no_grad()
    def _exchange(self, trainer: Trainer, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Replace the weights by these values; return the weights."""
        held = {}
        for name, tensor in list(trainer.optimized()):
            if name in values:
                held[name] = tensor.detach().clone()
                tensor.copy_(values[name])
        trainer.replicas.publish()
        return held

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """The averages of all parameters, and the buffers, as full tensors by name, on every rank; every rank calls
        it."""
        with self.applied():
            trainer = self._require_trainer()
            return full_tensors_in(trainer.model, dict(trainer.optimized()), trainer.mesh)

    def _require_trainer(self) -> Trainer:
        if self._trainer is None or not self.updates:
            raise UsageError("the EMA has no averages yet; give it to fit(callbacks=[ema]), or call update(trainer)")
        return self._trainer

    # ---- as a callback -------------------------------------------------------------------------------------------

    def on_start(self, engine: Engine, first_step: int, steps: int | None) -> None:
        if self._trainer is not None and self._trainer is not engine.ready:
            raise UsageError("this EMA has the averages of another engine; make a new one for each engine")
        self._trainer = engine.ready

    def on_step(self, engine: Engine, info: StepInfo) -> None:
        if not info.skipped and info.step % self.every == 0:
            self.update(engine.ready)

    def evaluating(self, engine: Engine) -> contextlib.AbstractContextManager[None]:
        return self.applied() if self.evaluate and self.updates else contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "averages": ByParameter(self._averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self._averages = state["updates"], state["averages"].tensors
