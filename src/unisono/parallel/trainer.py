"""The Trainer: a model under a plan, one step at a time.

What `apply.parallelize` has composed, the trainer runs: it cuts the batch, runs forward and backward under the plan,
has the gradients summed, clips, and lets the optimizer step. It returns the loss that one device would have seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.random import RandomState
from unisono.parallel.clip import clip_by_norm
from unisono.parallel.context import Context
from unisono.parallel.data import DataParallel
from unisono.parallel.expert import collect_aux
from unisono.parallel.logits import Proof, in_pieces
from unisono.parallel.loss import GlobalLoss
from unisono.parallel.pipeline.inputs import call
from unisono.parallel.pipeline.runtime import PipelineRuntime
from unisono.parallel.pipeline.tied import TiedGradients
from unisono.parallel.share import Share, rows_of, share, shares
from unisono.parallel.zero import Zero
from unisono.plan.action import Action
from unisono.plan.plan import DATA, REPLICAS, Plan


@dataclass
class Trainer:
    """Trains `model`; made by `uni.parallelize`. With pp=1, `model` is an ordinary module to call."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    loss: GlobalLoss
    optimizer: Optimizer
    random: RandomState
    replicas: DataParallel | Zero
    clip: float | None = None
    context: Context | None = None
    pipeline: PipelineRuntime | None = None
    tied: TiedGradients | None = None
    steps: int = 0
    norm: torch.Tensor | None = None  # of the last step's gradients, before clipping
    _microbatches: list[Share] = field(default_factory=list)
    logits: Proof = field(init=False)
    _partials: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logits = Proof(self.loss.loss)

    def step(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """One training step on a global batch (inputs, targets), given alike to all ranks; the loss on all of it."""
        self.optimizer.zero_grad()
        loss = self.backward(batch)
        self._clip()
        self.optimizer.step()
        self.steps += 1
        return loss

    def backward(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """Forward and backward only; after it, gradients are those of the global batch."""
        with self._cut(batch):
            if self.pipeline is None:
                self._run_microbatches()
                loss = self.loss.total(self._partials)
            else:
                with self.replicas.hold():
                    loss = self.pipeline.step([self._inputs(part) for part in self._microbatches])
                loss = self.mesh.comm(*REPLICAS).all_reduce(loss.detach().clone())
        if self.tied is not None:
            self.tied.sum()
        self.replicas.finish()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """The loss on a global batch, without gradients, in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            with self._cut(batch):
                if self.pipeline is not None:
                    loss = self.pipeline.evaluate([self._inputs(part) for part in self._microbatches])
                    return self.mesh.comm(*REPLICAS).all_reduce(loss.detach().clone())
                for number, part in enumerate(self._microbatches):
                    with self._microbatch(number):
                        self._partials.append(self._partial_loss(call(self.model, self._inputs(part)), number))
                return self.loss.total(self._partials)
        finally:
            self.model.train(was_training)

    # ---- one step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _cut(self, batch: tuple[Any, Any]) -> Iterator[None]:
        """Take this rank's share of the batch, in microbatches, with the random numbers that belong to it."""
        rows = rows_of(batch)
        mine = share(batch, self.mesh.index(*DATA), self.mesh.size(*DATA))
        self._require_rows(rows)
        self._microbatches = shares(mine.batch, self.plan.microbatches)
        self._partials = []
        if self.context is not None:
            self.context.expect(*batch)
            self.loss.dims = self.context.dims
        self.random.step = self.steps
        # Who has targets is after a loss: it needs no whole logits.
        with self.random, self.random.sharded(0, mine.positions, mine.of), in_pieces(batch[1] is not None):
            yield

    def _require_rows(self, rows: int) -> None:
        parts = self.mesh.size(*DATA) * self.plan.microbatches
        if self.plan.pp > 1 and rows < parts:
            raise UsageError(
                f"a batch of {rows} samples for {self.mesh.size(*DATA)} data ranks x {self.plan.microbatches} "
                f"microbatches of a pipeline; expected at least {parts}: use fewer microbatches"
            )

    def _run_microbatches(self) -> None:
        last = len(self._microbatches) - 1
        for number, part in enumerate(self._microbatches):
            with self._microbatch(number), contextlib.ExitStack() as stack:
                if number < last:
                    stack.enter_context(self.replicas.hold())
                partial = self._partial_loss(call(self.model, self._inputs(part)), number)
                partial.backward()
                self._partials.append(partial.detach())

    def _microbatch(self, number: int) -> contextlib.AbstractContextManager[None]:
        part = self._microbatches[number]
        if len(self._microbatches) == 1:
            return contextlib.nullcontext()
        return self.random.microbatch(part.positions, of=part.of)

    def around(self, action: Action) -> contextlib.AbstractContextManager[None]:
        """The scope of what the pipeline computes for an action."""
        return self._microbatch(action.microbatch)

    def _inputs(self, part: Share) -> Any:
        return part.batch[0]

    def _targets(self, part: Share) -> Any:
        targets = part.batch[1]
        return targets if self.context is None else self.context.cut_targets(targets)

    def _rows(self, part: Share) -> int:
        """How many samples of the outputs for this part the rank has."""
        rows = rows_of(part.batch)
        return rows if self.context is None else self.context.rows(rows)

    def _partial_loss(self, outputs: Any, number: int) -> torch.Tensor:
        """This microbatch's part of the loss. The first one counts what all of them will count."""
        outputs = self.logits.fitting(outputs, self._targets(self._microbatches[number]))
        if number == 0:
            rows = [self._rows(part) for part in self._microbatches]
            likes = [_with_rows(outputs, rows[0], count) for count in rows]
            self.loss.prepare([(like, self._targets(p)) for like, p in zip(likes, self._microbatches, strict=True)])
        partial = self.loss(outputs, self._targets(self._microbatches[number]))
        aux = collect_aux(self.model)
        return partial if aux is None else partial + aux

    def _clip(self) -> None:
        if self.clip is None:
            return
        elsewhere = self.tied.elsewhere if self.tied is not None else frozenset()
        named = dict(self.optimized())
        uncounted = [parameter for name, parameter in named.items() if name in elsewhere]
        self.norm = clip_by_norm(named.values(), self.clip, self.mesh, uncounted=uncounted)

    def optimized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizer updates on this rank, by the parameters' names."""
        if isinstance(self.replicas, Zero):
            yield from self.replicas.optimized()
        else:
            yield from self.model.named_parameters()


def _with_rows(outputs: Any, rows: int, wanted: int) -> Any:
    """Outputs as they will be for another number of samples; for their shapes only."""
    if rows == wanted:
        return outputs

    def resized(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == rows:
            return leaf.new_zeros(()).expand(wanted, *leaf.shape[1:])
        return leaf

    return tree_map(resized, outputs)
