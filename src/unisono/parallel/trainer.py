"""The Trainer: a model under a plan, one step at a time.

What `apply.parallelize` has composed, the trainer runs: it splits the batch, runs forward and backward under the plan,
has the gradients summed, clips, and lets the optimizer step. It returns the loss that one device would have seen.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from unisono.comm.signatures.plain_data import is_plain
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.optimizers import can_be_skipped, fused
from unisono.mesh.random.state import Key, RandomState, SampleDim
from unisono.parallel.checks.optimizer_scope import require_elementwise_hooks, run_own_hooks_last
from unisono.parallel.checks.parameter_reads import ParameterReads
from unisono.parallel.checks.rounded_weights import widened
from unisono.parallel.checks.samples import Samples, find_samples
from unisono.parallel.compile.cuda_graph import GraphedStep, require_capturable_optimizer
from unisono.parallel.compile.regions import Compilation, eager_regions
from unisono.parallel.context.context import Context
from unisono.parallel.context.sequence import SequenceParallel
from unisono.parallel.data.batchnorm import has_batchnorm
from unisono.parallel.data.clip import TorchClipping, clip_by_norm, clip_by_value, gradient_norm, weight_norm
from unisono.parallel.data.data_parallel import DataParallel
from unisono.parallel.expert.expert import collect_aux, has_moe
from unisono.parallel.full_state import full_optimizer, full_tensors_in, load_full_state, load_tensors
from unisono.parallel.inputs import as_inputs, as_pair, call, without_cache
from unisono.parallel.layout import Split
from unisono.parallel.loss.batch_loss import GatheredLoss
from unisono.parallel.loss.loss import GlobalLoss
from unisono.parallel.loss.loss_scale import LossScaler
from unisono.parallel.loss.model_loss import ModelLoss, Recorded
from unisono.parallel.outputs import (
    joined,
    require_full_parameters,
    with_batch_size,
    with_full_sequences,
    without_samples,
    zero_of,
)
from unisono.parallel.pipeline.generation import generated
from unisono.parallel.pipeline.message import kind_of
from unisono.parallel.pipeline.runtime import PipelineRuntime
from unisono.parallel.pipeline.tied import TiedGradients
from unisono.parallel.precision import FULL, Precision, autocast
from unisono.parallel.share import (
    BatchDim,
    OwnShare,
    Share,
    batch_slice,
    dims_of,
    first_batch_size,
    inputs_dim,
    joined_batches,
    run_on,
    shares,
    targets_dim,
)
from unisono.parallel.tensor.head_width import HeadWidth
from unisono.parallel.tensor.logits import Proof, full_of_shard, in_shards
from unisono.parallel.zero.zero import ShardedOptimizer
from unisono.plan.plan import DATA, REPLICAS, Plan
from unisono.plan.schedules.action import Action

Batch = tuple[Any, Any] | Share


@dataclass
class Trainer:
    """Trains `model`; made by `uni.parallelize`. With pp=1, `model` is a module for a loop of one's own (loop.py)."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    loss: GlobalLoss
    optimizer: Optimizer
    random: RandomState
    replicas: DataParallel | ShardedOptimizer
    clip: float | None = None
    context: Context | None = None
    sequence: SequenceParallel | None = None
    pipeline: PipelineRuntime | None = None
    tied: TiedGradients | None = None
    precision: Precision = FULL
    scaler: LossScaler | None = None
    steps: int = 0
    note: str = ""  # why a model that a function builds was built in full on every rank, before it was sharded
    chosen: str = ""  # which recomputation recompute=auto:... chose, and why
    proof: str = ""  # what was proved of the plan before the first step, or why nothing was
    float8: str = ""  # which linear layers compute in float8, and which do not, with precision="fp8"
    coverage: str = ""  # how much of the parameters and FLOPs tp shards
    rules: Any = None  # how tp shards each layer, given or inferred
    last_batch_size: int = 0  # samples of the last global batch
    norm: torch.Tensor | None = None  # of the last step's gradients, before clipping
    model_loss: ModelLoss | None = None  # where the model computes the loss of labels among its inputs
    holds_shards: bool = False  # whether the optimizer has less than all of every parameter
    torch_clipping: TorchClipping | None = None  # of gradients that are sharded, in a loop of the user's own
    compilation: Compilation | None = None  # of a plan with compile
    cuda_graph: GraphedStep | None = None  # with cudagraph=True
    reads: ParameterReads | None = None  # of parameters by other modules than their own, until each mode has shown none
    rounds_weights: bool = False  # whether the model has weights in a half dtype that are float32 in the user's
    batch: str = "global"  # what ranks give: "global", all of them the same batch, or "local", their own samples
    is_updating: bool = False  # whether the optimizer's step is one of this trainer's
    batch_dim: BatchDim = 0  # where samples are in (inputs, targets): see share.py
    samples: Samples | None = None  # where they are in what the model draws and returns, once that is known
    tries_samples: bool = False  # whether the first step is to find out
    _predicts: Samples | None = None  # where samples are in what the model returns in evaluation mode
    _tries_predictions: bool = True  # whether the next prediction is to find out
    head_width: HeadWidth | None = (
        None  # of the full model, until a step has shown that tp has not sharded through heads
    )
    _full: tuple[Any, Any] | None = None  # the global batch, where this rank was given all of it
    _microbatches: list[Share] = field(default_factory=list)
    logits: Proof = field(init=False)
    _skipped: int = 0  # before the scaler began to count
    _runs_spare: bool = False  # whether parts without samples run on a spare one
    _records: bool = False  # whether forwards are recorded for the model's own loss
    _partials: list[torch.Tensor] = field(default_factory=list)
    _observe: Callable[[Any, Any], None] | None = None
    on_action: Callable[[Action, float, float], None] | None = None  # gets what a pipeline did, from when to when
    on_microbatch: Callable[[int, Action | None], None] | None = (
        None  # gets which comes, and what a pipeline does to it
    )

    # gets a microbatch's number, outputs, targets and part of the loss, on the ranks that compute it
    on_loss: Callable[[int, Any, Any, torch.Tensor], None] | None = None
    on_first_batch: Callable[[Any], None] | None = None  # called once, before anything is computed for it

    def __post_init__(self) -> None:
        self.logits = Proof(self.loss.loss)
        self._own_share = OwnShare(self.mesh)

    @property
    def skipped(self) -> int:
        """Steps whose gradients overflowed (fp16)."""
        return self._skipped if self.scaler is None else self._skipped + self.scaler.skipped

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped = count
        if self.scaler is not None:
            self.scaler.skipped = 0

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch this rank takes, of how many: see `share`."""
        return self._own_share.part

    def step(self, batch: Batch) -> torch.Tensor:
        """One training step on a global batch (inputs, targets); the loss on all of it.

        All ranks give the full batch, or each gives the `Share` of it that is its `part`, as a Loader does. Of a
        trainer with batch="local", every data rank gives its own samples: the global batch is all of them. A batch
        that is a mapping is the model's named inputs, with the labels of a loss that the model computes itself.
        """
        batch = as_pair(batch)
        if self.on_first_batch is not None:
            look, self.on_first_batch = self.on_first_batch, None
            look(batch)
        if takes_closure(self.optimizer):
            return self._step_with_closure(batch)
        if self.cuda_graph is not None:
            steps, share = self.steps, self._mine(batch)
            loss, self.norm = self.cuda_graph(share.batch, steps)
            self.steps, self.last_batch_size = steps + 1, share.of
            return loss
        return self._eager_step(batch)[0]

    def _eager_step(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss, and the norm of the gradients where they are clipped."""
        self.zero_grad()
        loss = self.backward(batch)
        self.update()
        return loss, self.norm

    def capture_steps(self) -> None:
        """From now on, `step` runs as a CUDA graph."""
        require_capturable_optimizer(self.optimizer)
        self.cuda_graph = GraphedStep(self._eager_step, self.model, self.optimizer, self.random)

    def zero_grad(self) -> None:
        """Forget all gradients, also of parameters that the optimizer was not given."""
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            parameter.grad = None
        for _, each in self.optimized() if self.replicas.has_copies else ():
            each.grad = None
        if self.scaler is not None:
            self.scaler.forget()
        self.forget_gradients()

    def _step_with_closure(self, batch: Batch) -> torch.Tensor:
        """For optimizers that evaluate the model several times in a step, each time with the step's random numbers."""

        def evaluated() -> torch.Tensor:
            self.zero_grad()
            loss = self.backward(batch)
            self._clip()
            self._observe = None  # of several evaluations, the first is at the parameters of the step
            return loss

        self.require_hooks()
        with self._updating():
            loss: Any = self.optimizer.step(evaluated)  # type: ignore[arg-type]  # torch takes tensors, its types say floats
        self.steps += 1
        return torch.as_tensor(loss).detach()

    def backward(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """Forward and backward only, which a pipeline interleaves; the loss on the global batch.

        After it, gradients are those of the global batch, before clipping. Those of earlier calls since `zero_grad` are
        kept and added to, as by torch; `scale` is a factor of this batch's, as 1 / 4 for the mean of four batches.
        """
        if isinstance(batch, torch.Tensor):
            raise UsageError(
                "trainer.backward was given a tensor; expected the batch: loss = trainer.backward((inputs, targets)) "
                "runs forward and backward under any plan, and for a loss of your own use loss.backward() (with pp=1)"
            )
        earlier = self._take_gradients()
        with self.replicas.stepping():
            loss = self._backward(as_pair(batch))
        if earlier or scale != 1.0:
            self._add_gradients(earlier, scale)
        if self.torch_clipping is not None:
            self.torch_clipping.refuse()
        return loss

    def _gradients_at(self) -> Iterator[torch.Tensor]:
        """What may have a gradient: parameters and, where the optimizer updates others, those."""
        yield from self.model.parameters()
        if self.replicas.has_copies:
            yield from (each for _, each in self.optimized())

    def _take_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gradients of earlier backwards, off the tensors that have them: the sums over ranks write over them."""
        if all(each.grad is None for each in self._gradients_at()):
            return []
        self.replicas.complete()
        taken = []
        for each in self._gradients_at():
            if each.grad is not None:
                taken.append((each, each.grad.clone()))  # buckets are used again
                each.grad = None
        return taken

    @torch.no_grad()
    def _add_gradients(self, earlier: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float) -> None:
        if scale != 1.0:
            for gradient in {
                id(each.grad): each.grad for each in self._gradients_at() if each.grad is not None
            }.values():
                gradient.mul_(scale)
        for each, gradient in earlier:
            each.grad = gradient if each.grad is None else gradient.add_(each.grad)

    def forget_gradients(self) -> None:
        """Gradients have been used, or are gone: until the next backward there is nothing that torch could clip."""
        if self.torch_clipping is not None:
            self.torch_clipping.allow()

    def _backward(self, batch: Batch) -> torch.Tensor:
        if self.tries_samples:
            self.tries_samples = False
            self.samples = self._tried_samples(batch, self.loss.loss)
        with self.heads_full((batch.batch if isinstance(batch, Share) else batch)[0]), self._sharded(batch):
            if self.pipeline is None:
                self._run_microbatches()
                loss = self.loss.total(self._partials)
            else:
                with self.replicas.hold():
                    loss = self.pipeline.step([self._inputs(part) for part in self._microbatches])
                loss = self.mesh.comm(*REPLICAS).all_reduce(loss.detach().clone())
                if self.scaler is not None:
                    loss = self.scaler.unscaled(loss)
        self.end_reads()
        self.replicas.finish()
        if self.tied is not None:
            self.tied.sum(dict(self.optimized()))
        if self.scaler is not None:
            self.scaler.unscale(parameter for _, parameter in self.optimized())
        return loss

    def update(self) -> None:
        """Clip and let the optimizer step; where gradients overflowed on any rank (fp16), no rank changes anything.

        The host waits for whether they did only where the optimizer's step cannot be skipped on the device."""
        if self.scaler is None:
            self._update()
        else:
            self._update_unless_overflow(self.scaler)
            self.scaler.update()
        self.forget_gradients()
        self.steps += 1

    def _update(self, unless: torch.Tensor | None = None) -> None:
        self._clip()
        self.require_hooks()
        with fused(self.optimizer, unless, on_gpus=self.scaler is not None), self._updating():
            self.optimizer.step()

    def _update_unless_overflow(self, scaler: LossScaler) -> None:
        """Ranks may differ in how they skip, so all of them communicate in a skipped step as in any other."""
        overflow, before = scaler.overflow, self.norm
        if overflow is None:
            return
        if can_be_skipped(self.optimizer, overflow.device) and (self.clip is None or before is not None):
            self._update(unless=overflow)
            if before is not None and self.norm is not None:
                self.norm = torch.where(overflow.to(before.device) > 0, before, self.norm)
        elif scaler.is_finite:
            self._update()
        else:
            self._clip()
            self.norm = before
            for _ in self.optimized():  # which takes over what the user has changed in parameters
                pass
            self.replicas.publish()

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        self.is_updating = True
        try:
            yield
        finally:
            self.is_updating = False

    # ---- a loop of one's own: see loop.py ------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Here backward() of a user-written loop only accumulates: for all but the last of several microbatches."""
        return self.replicas.hold()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch.nn.utils.clip_grad_norm_ for the full model, of which a rank may have shards; every rank calls it."""
        self.replicas.complete()
        counted, uncounted = self._counted()
        return clip_by_norm([*counted, *uncounted], max_norm, self.mesh, norm_type, uncounted=uncounted)

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the full model's gradients, after `backward`; every rank calls it."""
        self.replicas.complete()
        counted, uncounted = self._counted()
        return gradient_norm([*counted, *uncounted], self.mesh, uncounted=uncounted)

    def weight_norm(self) -> torch.Tensor:
        """The 2-norm of the full model's parameters; every rank calls it."""
        counted, uncounted = self._counted()
        return weight_norm([*counted, *uncounted], self.mesh, uncounted)

    def _counted(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the optimizer updates, and of it what another stage counts in norms."""
        elsewhere = self.tied.elsewhere if self.tied is not None else frozenset()
        named = list(self.optimized())
        return [each for name, each in named if name not in elsewhere], [e for name, e in named if name in elsewhere]

    def clip_grad_value_(self, limit: float) -> None:
        """torch.nn.utils.clip_grad_value_ for the full model."""
        self.replicas.complete()
        clip_by_value((parameter for _, parameter in self.optimized()), limit)

    # ---- without gradients ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batch: Batch, observe: Callable[[Any, Any], None] | None = None) -> torch.Tensor:
        """The loss on a global batch, without gradients, in evaluation mode.

        `observe(outputs, targets)` is called on the ranks that compute the loss, for each part of the batch that
        they have, with full logits. The tp ranks of one data rank all observe the same.
        """
        batch = as_pair(batch)
        with self.replicas.stepping(), self._evaluating(), self._sharded(batch), self._observed(observe):
            if self.pipeline is not None:
                loss = self.pipeline.evaluate([self._inputs(part) for part in self._microbatches])
                self.end_reads()
                return self.mesh.comm(*REPLICAS).all_reduce(loss.detach().clone())
            for number, part in enumerate(self._microbatches):
                with self._microbatch(number), self.computing(), run_on(part):
                    self._partials.append(self._partial_loss(self.run_model(self._inputs(part)), number))
            self.end_reads()
            return self.loss.total(self._partials)

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The model's outputs for a global batch of inputs, in its order, on every rank; in evaluation mode."""
        self.loss.settle()
        batch: Any = (as_inputs(inputs), None)
        if isinstance(inputs, Share):
            spare = None if inputs.spare is None else (inputs.spare, None)
            batch = inputs._replace(batch=(inputs.batch, None), spare=spare)
        with self.replicas.stepping(), self._evaluating(), without_cache(self.model):
            self._try_prediction(batch)
            with self._sharded(batch, wants_loss=False):
                batch_sizes = [len(part.positions) for part in self._microbatches]
                if self.pipeline is not None:
                    outputs = self.pipeline.predict([self._inputs(part) for part in self._microbatches])
                else:
                    outputs = []
                    for number, part in enumerate(self._microbatches):
                        with self._microbatch(number), self.computing(), run_on(part):
                            outputs.append(call(self.model, self._inputs(part)))
            self.end_reads()
        outputs = [with_full_sequences(part, self.context) for part in outputs]
        for number, part in enumerate(self._microbatches):
            if self._is_spare(part):
                outputs[number] = without_samples(outputs[number], self.prediction_dims_of(outputs[number], 1))
        output_dims = self.prediction_dims_of(outputs[0], batch_sizes[0])
        are_known = any(known is not None and output_dims is known.outputs for known in (self._predicts, self.samples))
        return joined(outputs, batch_sizes, self.mesh.comm(*DATA), output_dims, may_lack_samples=are_known)

    def _try_prediction(self, batch: Batch) -> None:
        """In evaluation mode a model may return other outputs than those that were tried before training."""
        is_sharded = self.part[1] * self.plan.microbatches > 1 and self.pipeline is None and self.context is None
        samples = batch.of if isinstance(batch, Share) else first_batch_size(batch, self.batch_dim)
        if self._tries_predictions and is_sharded and samples > 1:
            self._tries_predictions = False
            self._predicts = self._tried_samples(batch, None)

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """The model's own `generate` (Hugging Face), in evaluation mode; every rank calls it with the same prompts.

        Through a pipeline: greedy, without a cache, with max_new_tokens= and, if need be, attention_mask=.
        """
        if self.pipeline is not None:
            return generated(self.predict, self.model, input_ids, **options)
        if not callable(getattr(self.model, "generate", None)):
            raise UsageError(f"{type(self.model).__name__} has no generate(); expected a Hugging Face model that has")
        with self._evaluating():
            return self.model.generate(input_ids, **options)  # type: ignore[operator]

    @contextlib.contextmanager
    def observing(self, observe: Callable[[Any, Any], None]) -> Iterator[None]:
        """In the block, training steps show their outputs as `evaluate` does: detached, with full logits."""
        if self.cuda_graph is not None:
            raise UsageError(
                "a step that runs as a CUDA graph computes nothing beside it: metrics of training batches need "
                "cudagraph=False"
            )
        self._observe = observe
        try:
            yield
        finally:
            self._observe = None

    @contextlib.contextmanager
    def _observed(self, observe: Callable[[Any, Any], None] | None) -> Iterator[None]:
        self._observe = observe
        try:
            with contextlib.nullcontext() if observe is None else in_shards(False):
                yield
        finally:
            self._observe = None

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, is_training in modes:
                module.training = is_training

    # ---- one step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sharded(self, batch: Batch, wants_loss: bool = True) -> Iterator[None]:
        """Take this rank's share of the batch, in microbatches, with the random numbers that belong to it."""
        mine = self._mine(batch)
        fewest = min(len(mine.positions), mine.of // self.part[1])
        self._runs_spare = fewest < self.plan.microbatches and self.can_run_spare()
        self._own_share.require_batch_size(mine, self.batch_dim, self.plan, self._runs_spare)
        self.last_batch_size = mine.of
        self._microbatches = [
            part if len(part.positions) or part.spare is not None else part._replace(spare=mine.spare)
            for part in shares(mine.batch, self.plan.microbatches, self.batch_dim)
        ]
        self._partials = []
        self._full = None if isinstance(batch, Share) or self.batch == "local" else batch
        inputs, targets = mine.batch
        if self.context is not None:
            self.context.expect(inputs, self._labelled(mine.batch) if wants_loss else targets)
            self.loss.dims = self.context.dims
        self.random.step = self.steps
        if isinstance(self.loss, GatheredLoss):
            self.loss.lengths = [len(held) for held in Split.even((), 0, mine.of, self.part[1]).held]
        self._records = wants_loss and self.model_loss is not None
        self.random.sample_dims = self.sample_dims
        held: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if len(mine.positions) < mine.of:
            held = self.random.samples(*self._drawn(mine))
        # With targets a loss is computed, which needs no full logits.
        is_for_loss = targets is not None or self._records
        with self.random, held, in_shards(is_for_loss):
            yield

    def can_run_spare(self) -> bool:
        """Whether a part without samples may run on a spare one, of which nothing is used: not where samples have an
        effect on each other. Every rank calls it."""
        are_apart = self.context is None and self.plan.ep == 1 and not isinstance(self.loss, GatheredLoss)
        are_apart = are_apart and not has_batchnorm(self.model) and not self._has_moe
        if self.pipeline is None:
            return are_apart
        return all(self.mesh.comm("pp").all_gather_object(are_apart, only_data=True))

    def _is_spare(self, part: Share) -> bool:
        return self._runs_spare and not len(part.positions) and part.spare is not None

    def _drawn(self, part: Share) -> tuple[range, int]:
        """The samples that a part draws random numbers for, of how many."""
        return (range(1), max(part.of, 1)) if self._is_spare(part) else (part.positions, part.of)

    @property
    def sample_dims(self) -> dict[Key, SampleDim] | None:
        """Where samples are in random numbers; in evaluation mode a model makes other calls than those tried."""
        return self.samples.draws if self.samples is not None and self.model.training else None

    def _tried_samples(self, batch: Batch, loss: Callable[[Any, Any], torch.Tensor] | None) -> Samples | None:
        """Find out where samples are, on the first samples of some ranks' parts; all ranks refuse alike."""
        if self.rounds_weights and self.plan.zero == 3:
            return None  # gathered in a half dtype, the model cannot be run outside autocast
        mine = self._mine(batch)
        comm = self.mesh.comm(*DATA)
        few = [batch_slice(mine.batch, 0, 2, self.batch_dim)]
        if comm.size > 1:
            few = comm.all_gather_object(few[0], only_data=is_plain(few[0]))
        samples, refusal = None, None
        try:
            together = joined_batches(few, self.batch_dim)
            with eager_regions(), widened(self.model) as can_run:
                if can_run:
                    looks_back = self.plan.zero < 3 and self.plan.pp == 1
                    samples = find_samples(
                        self.model, together, self.batch_dim, loss, self.plan.microbatches, looks_back=looks_back
                    )
        except UsageError as error:
            refusal = str(error)
        for message in self.mesh.comm(*self.mesh.names).all_gather_object(refusal, only_data=True):
            if message is not None:
                raise UsageError(message)
        return samples

    @contextlib.contextmanager
    def heads_full(self, inputs: Any) -> Iterator[None]:
        """In the first run of the model, on these inputs: UsageError where tp has split heads."""
        if self.head_width is None:
            yield
            return
        self.random.full_shapes = self.head_width.drawn_shapes(inputs)
        self.random.full_samples = first_batch_size(inputs, inputs_dim(self.batch_dim))
        with self.head_width.required(inputs):
            yield
        self.head_width = None

    def _mine(self, batch: Batch) -> Share:
        return self._own_share.of(batch, self.batch_dim, self.batch == "local")

    def _run_microbatches(self) -> None:
        last = len(self._microbatches) - 1
        for number, part in enumerate(self._microbatches):
            if self.on_microbatch is not None:
                self.on_microbatch(number, None)
            with self._microbatch(number), contextlib.ExitStack() as stack:
                if number < last:
                    stack.enter_context(self.replicas.hold())
                with self.computing(), run_on(part):
                    partial = self._partial_loss(self.run_model(self._inputs(part)), number)
                self._partials.append(partial.detach())
                if number == last:
                    self.loss.start_total(self._partials)
                _require_gradient(partial)
                self._scaled(partial).backward()

    def _microbatch(self, number: int) -> contextlib.AbstractContextManager[None]:
        part = self._microbatches[number]
        if len(self._microbatches) == 1:
            return contextlib.nullcontext()
        return self.random.microbatch(*self._drawn(part))

    @contextlib.contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """The scope of what the pipeline computes for an action."""
        if self.on_microbatch is not None:
            self.on_microbatch(action.microbatch, action)
        if self.sequence is not None:
            self.sequence.enter_microbatch(kind_of(self._inputs(self._microbatches[action.microbatch])))
        with contextlib.ExitStack() as scopes:
            scopes.enter_context(self._microbatch(action.microbatch))
            if isinstance(self.replicas, ShardedOptimizer):
                scopes.enter_context(self.replicas.at_work(action.stage, action.kind))
            if action.kind == "F":
                scopes.enter_context(self.computing())
            began = time.time()
            yield
            if self.on_action is not None:
                self.on_action(action, began, time.time())

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The scope of a forward; a backward follows it by itself."""
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        is_watched = self.reads is not None and self.model.training not in self.reads.shown
        with autocast(self.precision.dtype, device), (is_watched and self.reads) or contextlib.nullcontext():
            yield

    def end_reads(self) -> None:
        """The model has run in its mode, training or evaluation, without refused reads: later runs are not watched."""
        if self.reads is not None:
            self.reads.shown.add(self.model.training)
            self.reads = self.reads if len(self.reads.shown) < 2 else None

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def pipeline_loss(self, outputs: Any, number: int) -> torch.Tensor:
        """What the last stage runs backward from."""
        partial = self._partial_loss(outputs, number)
        if not torch.is_grad_enabled():
            return partial
        _require_gradient(partial)
        return self._scaled(partial)

    def run_model(self, inputs: Any) -> Any:
        """What the loss takes of the model's forward on a microbatch."""
        if isinstance(self.loss, GatheredLoss):
            with self.loss.products(self.model):
                return call(self.model, inputs)
        if not self._records or self.model_loss is None:
            return call(self.model, inputs)
        if self.context is None:
            return self.model_loss.record(self.model, inputs)
        return self.model_loss.record(self.model, inputs, self.context.shown, self.context.kept)

    def first_microbatch(self) -> tuple[Any, Any]:
        """This rank's inputs and targets of the last step's first microbatch."""
        first = self._microbatches[0]
        return self._inputs(first), self._targets(first)

    def _inputs(self, part: Share) -> Any:
        return (part.spare if self._is_spare(part) else part.batch)[0]

    def _targets(self, part: Share) -> Any:
        targets = self._labelled(part.batch)
        return targets if self.context is None else self.context.shard_targets(targets)

    def _labelled(self, batch: tuple[Any, Any]) -> Any:
        """The targets, with the labels among the inputs where the model takes such."""
        return batch[1] if self.model_loss is None else self.model_loss.labelled(batch)

    def _pairs(self, outputs: Any, part: Share) -> list[tuple[Any, Any]]:
        """What the loss is called with for a microbatch: all of it, or each run of this rank's tokens where the loss
        looks from a token at the next one."""
        if self.context is None or self.context.is_full or not self.loss.shift:
            return [(outputs, self._targets(part))]
        return self.context.shifted_runs(tree_map(full_of_shard, outputs), self._labelled(part.batch))

    def _batch_size(self, part: Share) -> int:
        """How many samples of the outputs for this part the rank has."""
        batch_size = len(part.positions)
        return batch_size if self.context is None else self.context.num_samples(batch_size)

    def output_dims_of(self, outputs: Any, batch_size: int) -> Sequence[SampleDim | None]:
        """Where samples are in the model's outputs for so many, leaf by leaf; None where there are none."""
        return self._output_dims(outputs, batch_size, None if self._records else self.samples)

    def prediction_dims_of(self, outputs: Any, batch_size: int) -> Sequence[SampleDim | None]:
        """The same for the outputs of `predict`."""
        return self._output_dims(outputs, batch_size, self._predicts or self.samples)

    def _output_dims(self, outputs: Any, batch_size: int, known: Samples | None) -> Sequence[SampleDim | None]:
        leaves = tree_flatten(outputs)[0]
        if known is not None and len(known.outputs) == len(leaves):
            return known.outputs
        along = inputs_dim(self.batch_dim)
        dims = dims_of(outputs, along if isinstance(along, int) else 0)
        have = [dim is not None and x.shape[dim] == batch_size for x, dim in zip(leaves, dims, strict=True)]
        return [SampleDim(x.ndim, d) if has else None for x, d, has in zip(leaves, dims, have, strict=True)]

    @cached_property
    def _has_moe(self) -> bool:
        return has_moe(self.model)

    def _partial_loss(self, outputs: Any, number: int) -> torch.Tensor:
        """This microbatch's part of the loss. The first one counts what all of them will count."""
        part = self._microbatches[number]
        if self._is_spare(part):
            outputs = without_samples(outputs, self.output_dims_of(outputs, 1))
        outputs = self.logits.fitting(outputs, self._targets(part))
        require_full_parameters(outputs, are_gathered=self.plan.zero == 3)
        if number == 0:
            if self.context is not None:
                self.loss.learn_shift(outputs, self._targets(part))
            batch_sizes = [self._batch_size(part) for part in self._microbatches]
            output_dims = self.output_dims_of(outputs, batch_sizes[0])
            self.loss.expect(output_dims, targets_dim(self.batch_dim))
            likes = [with_batch_size(outputs, output_dims, batch_sizes[0], count) for count in batch_sizes]
            full = None
            if self.pipeline is None and self.context is None and self._full is not None:
                count = first_batch_size(self._full, self.batch_dim)
                full = (with_batch_size(outputs, output_dims, batch_sizes[0], count), self._labelled(self._full))
            pairs = [self._pairs(like, each) for like, each in zip(likes, self._microbatches, strict=True)]
            self.loss.prepare([pair for of_microbatch in pairs for pair in of_microbatch], full)
        partials = [self.loss(*pair) for pair in self._pairs(outputs, part)]
        partial = sum(partials[1:], partials[0]) if partials else zero_of(outputs)
        if self._observe is not None:
            self._show(outputs, self._targets(part))
        if self.on_loss is not None:
            self.on_loss(number, tree_map(full_of_shard, outputs), self._targets(part), partial.detach())
        aux = collect_aux(self.model) if self._has_moe else None
        return partial if aux is None else partial + aux

    @torch.no_grad()
    def _show(self, outputs: Any, targets: Any) -> None:
        """Let the observer see outputs as the model would have returned them, with full logits."""
        assert self._observe is not None
        if isinstance(outputs, Recorded):
            outputs, targets = outputs.evaluated(targets.labels), targets.targets
        self._observe(tree_map(_seen, outputs), targets)

    def require_hooks(self) -> None:
        """Of step hooks that came after the plan was applied: as those that were there."""
        if self.holds_shards:
            require_elementwise_hooks(self.optimizer)
        if self.holds_shards or self.replicas.has_copies:
            run_own_hooks_last(self.optimizer)  # parameters are published after hooks have changed their copies

    def _clip(self) -> None:
        if self.clip is not None:
            self.norm = self.clip_grad_norm_(self.clip)

    def optimized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the optimizer updates on this rank, by the parameters' names."""
        return self.replicas.optimized()

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from, as full tensors by name, on every rank; every rank calls it."""
        self.loss.settle()
        optimized = dict(self.optimized())
        return {
            "model": full_tensors_in(self.model, optimized, self.mesh),
            "optimizer": full_optimizer(self.optimizer, optimized, self.mesh),
            "steps": self.steps,
            "skipped": self.skipped,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same model, saved under this or another plan; every rank calls it."""
        optimized = dict(self.optimized())
        if self.cuda_graph is not None:
            self.cuda_graph.forget()
        load_tensors(self.model, optimized, self.mesh, state["model"])
        load_full_state(self.optimizer, optimized.items(), self.mesh, state["optimizer"], state["model"])
        self.replicas.publish()
        self.steps, self.skipped = state["steps"], state["skipped"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _seen(leaf: Any) -> Any:
    """Of an output, what an observer may have: full logits, without their history."""
    return full_of_shard(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf


def takes_closure(optimizer: Optimizer) -> bool:
    """Whether its step cannot do without a function that evaluates the model again."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _require_gradient(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient: no parameter takes part in it; return it as it was computed, without .detach(), "
            ".item() or torch.no_grad(), and leave parameters that are to be trained requires_grad=True"
        )
