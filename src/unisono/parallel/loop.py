"""A loop of the user's own: `loss = f(trainer.model(x), y); loss.backward(); trainer.optimizer.step()`.

Every rank gives the global batch, gets the outputs of the global batch and so computes the loss that one device would,
whatever the loss is made of:

    trainer.model(x)           runs this data rank's samples of x; the outputs of all data ranks are gathered, in order
    loss.backward()            when it ends, the gradients are averaged over the replicas: those of one device, in
                               `.grad` (under ZeRO in those of this rank's shards, `trainer.optimized()`)
    trainer.optimizer.step()   clips before, where the trainer clips, and counts the step after

With batch="local" the model runs on the samples that this rank gives, and returns their outputs: as under torch's
DistributedDataParallel, the gradients are those of the mean of the ranks' losses.

Note: why gradients are averaged. R replicas hold the same parameters, and each computes a loss; the objective is the
mean of the R losses. Where all ranks compute the same loss from gathered outputs, that is the loss itself, also where
it uses parameters directly (a regularizer). The gradient of a tensor that all ranks have in common is then the same on
each of them and complete. The gradient of a tensor of which each rank has a shard is R times that of its shard, so that
the mean over the ranks is right for the parameters in between. Hence

    forward                 backward
    shard                   all-gather, divided by the number of ranks
    all-gather              shard, times the number of ranks

and either is the gradient of the other, so that both can be differentiated again (gradient penalties).
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.comm.same_data import SameBatch
from unisono.errors import UsageError
from unisono.mesh import autograd_collectives
from unisono.mesh.random import random_ops
from unisono.mesh.random.state import SampleDim
from unisono.parallel.checks.rounded_weights import widened
from unisono.parallel.checks.samples import Samples, find_samples
from unisono.parallel.data.clip import TorchClipping
from unisono.parallel.data.reducer import current_step
from unisono.parallel.expert.expert import MoE, needs_full_batch
from unisono.parallel.inputs import register_dataclasses
from unisono.parallel.layout import Split, layout_of, summed_axes
from unisono.parallel.precision import HALF_DTYPES
from unisono.parallel.share import batch_size_of
from unisono.parallel.tensor.logits import in_shards
from unisono.parallel.zero.units import on_gradient, refuse_create_graph
from unisono.parallel.zero.zero import ShardedOptimizer
from unisono.plan.plan import DATA, REPLICAS
from unisono.torch_compat import at_end_of_backward, in_backward, will_run

if TYPE_CHECKING:
    from unisono.parallel.trainer import Trainer

Lengths = Sequence[int]
Change = Callable[[torch.Tensor], torch.Tensor]


class OwnLoop:
    """Makes a trainer's model, gradients and optimizer do by themselves what `Trainer.step` does with them."""

    def __init__(self, trainer: Trainer) -> None:
        mesh, model = trainer.mesh, trainer.model
        self._trainer = trainer
        self._data = mesh.comm(*DATA)
        self._replicas = mesh.comm(*REPLICAS)
        self._cp = None if trainer.context is None or trainer.context.comm.size == 1 else trainer.context.comm
        self._calls: list[_ModelCall] = []  # of the model that are under way
        self._kinds: set[Any] = set()  # of outputs that all ranks have found to have samples
        self._tries_samples = True  # whether the next call is to find out where samples are in the outputs
        self._samples: Samples | None = None
        self._counting: list[tuple[Handle, int]] = []  # numbers of samples, on their way
        self._is_in_backward = False
        self._updates = 0  # of the optimizer that are under way: a subclass may call its parent's step, hooked as well
        everyone, peers = mesh.comm(), mesh.comm(*(axis for axis in mesh.names if axis not in DATA))
        self._same = SameBatch(everyone if trainer.batch == "global" else peers)
        self._same_without_gradients = SameBatch(peers)
        self._watched = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._watched:
            axes = summed_axes(parameter, mesh)
            ranks = mesh.size(*axes) if axes else 1
            if ranks != self._replicas.size:  # then the mean over its ranks is not the mean over the replicas
                parameter.register_hook(self._scaled_by(ranks / self._replicas.size))
        trainer.replicas.publish_after_backward()
        self._attach(model)
        _models[model] = weakref.ref(trainer)
        model.zero_grad = types.MethodType(_zero_grad, model)  # type: ignore[method-assign]
        has_copies = trainer.replicas.has_copies
        sharded = [each for each in model.parameters() if has_copies or layout_of(each).splits]
        trainer.torch_clipping = clipping = TorchClipping(sharded, str(trainer.plan))
        weakref.finalize(trainer, clipping.allow).atexit = False
        self._is_sharded = bool(sharded)
        if sharded:  # then torch's GradScaler calls step on every rank, and not on those alone that find no overflow
            trainer.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if has_copies:
            for parameter in model.parameters():
                setattr(parameter, _OPTIMIZER, weakref.ref(trainer.optimizer))
            _refuse_other_optimizers()
        trainer.optimizer.register_step_pre_hook(self._before_update)
        trainer.optimizer.register_step_post_hook(self._after_update)

    def _attach(self, model: nn.Module) -> None:
        # Functions, and not methods: a copy of the model shares them, and does not copy the trainer.
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._before_forward(args, kwargs) if module is self._trainer.model else None

        def after(module: nn.Module, args: Any, outputs: Any) -> Any:
            return self._after_forward(outputs) if module is self._trainer.model else None

        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def _scaled_by(self, factor: float) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def scaled(gradient: torch.Tensor) -> torch.Tensor | None:
            return None if current_step() is self._trainer.replicas else gradient * factor

        return scaled

    # ---- forward -------------------------------------------------------------------------------------------------

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        trainer, step = self._trainer, current_step()
        call = _ModelCall(is_own=step is not trainer.replicas and not any(each.is_own for each in self._calls))
        self._calls.append(call)
        if not call.is_own:
            return None
        self._require_sound(is_nested=step is not None)
        if self._cp is not None and (kwargs.get("use_cache") or kwargs.get("past_key_values") is not None):
            raise UsageError(
                "a cache of keys and values under cp: attention there is over the tokens of all ranks, which no cache "
                "has; generate with use_cache=False, or under a plan with cp=1"
            )
        given: Any = (args, kwargs)
        inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and not leaf.requires_grad]
        trains = torch.is_grad_enabled() or any(module.training for module in trainer.model.modules())
        if step is None:
            (self._same if trains else self._same_without_gradients).require(inputs)
            if trains:
                self._report_unproved()
            self._try_samples(args, kwargs)
        if trainer.random.step != trainer.steps:
            trainer.random.step = trainer.steps
        trainer.random.sample_dims = trainer.sample_dims
        if step is None:
            call.scope.enter_context(trainer.random)
            call.scope.enter_context(in_shards(False))
            call.scope.enter_context(trainer.computing())
            call.scope.enter_context(trainer.heads_full(kwargs if kwargs and not args else args))
        if step is not None:
            call.leave = _applied(_ScaleFunction, self._replicas.size)
            return _mapped(given, _applied(_ScaleFunction, 1 / self._replicas.size))
        if self._cp is not None:
            assert trainer.context is not None
            trainer.context.expect(given, None)
            given = _mapped(given, _applied(_UsedFunction, self._cp))
        if self._data.size == 1 or not (trains or needs_full_batch(trainer.model)):
            return given
        if trainer.batch_dim != 0:
            raise UsageError(
                f"batch_dim={trainer.batch_dim!r}: a loop of your own under data parallelism takes batches with "
                "samples first; use trainer.step(batch)"
            )
        call.batch_size = batch_size_of(given)
        return self._with_local(call, given) if trainer.batch == "local" else self._sharded(call, given)

    def _try_samples(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out where samples are in the outputs, where no example has shown it: on a few of the global batch."""
        trainer = self._trainer
        is_sharded = self._data.size > 1 and trainer.batch == "global" and trainer.batch_dim == 0
        if not self._tries_samples or not is_sharded or not torch.is_grad_enabled() or (args and kwargs):
            return
        inputs = kwargs or args
        if len({leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim}) != 1:
            return
        self._tries_samples = False
        self._samples = trainer.samples
        if self._samples is None and self._cp is None and not (trainer.rounds_weights and trainer.plan.zero == 3):
            self._calls.append(_ModelCall(is_own=True))  # so that the runs of the trial are none of the user's
            try:
                with widened(trainer.model) as can_run:
                    self._samples = (
                        find_samples(trainer.model, (inputs, None), looks_back=trainer.plan.zero < 3)
                        if can_run
                        else None
                    )
            finally:
                self._calls.pop()

    def _report_unproved(self) -> None:
        """Of a loop that computes its own loss, no batch with targets is seen that the plan could be proved on."""
        trainer = self._trainer
        if trainer.on_first_batch is None:
            return
        trainer.on_first_batch = None
        trainer.proof = (
            f"plan {trainer.plan} not proved: a loop of your own shows no batch; pass example= to parallelize"
        )
        if trainer.mesh.comm().rank == 0:
            warnings.warn(trainer.proof, stacklevel=2)

    def _sharded(self, call: _ModelCall, given: Any) -> Any:
        held = Split.even((), 0, call.batch_size, self._data.size).held
        call.lengths = [len(each) for each in held]
        mine = held[self._data.rank]
        assert isinstance(mine, range)
        call.scope.enter_context(self._trainer.random.samples(mine, of=call.batch_size))
        shard = _applied(_ShardFunction, 0, call.lengths, self._data)
        return tree_map(lambda leaf: shard(leaf) if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf, given)

    def _with_local(self, call: _ModelCall, given: Any) -> Any:
        rank, batch_size = self._data.rank, call.batch_size
        positions = range(rank * batch_size, (rank + 1) * batch_size)
        call.scope.enter_context(self._trainer.random.samples(positions, of=batch_size * self._data.size))
        if torch.is_grad_enabled():
            extremes = torch.tensor([batch_size, -batch_size], device=self._data.device)
            self._counting.append((self._data.all_reduce(extremes, "max", async_op=True), batch_size))
        return given

    def _after_forward(self, outputs: Any) -> Any:
        call = self._calls.pop()
        call.scope.close()
        if not call.is_own or outputs is None:
            return outputs
        register_dataclasses(outputs)
        self._trainer.end_reads()
        if call.leave is not None:
            outputs = _mapped(outputs, call.leave)
        elif self._cp is not None:
            outputs = self._with_full_sequences(outputs)
        if call.lengths is not None:
            outputs = self._gathered(outputs, call.lengths)
        if self._trainer.precision.dtype is not None:
            outputs = tree_map(_in_float32, outputs)
        for moe in self._trainer.model.modules():
            if isinstance(moe, MoE) and moe.aux_loss is not None and self._replicas.size > 1:
                moe.aux_loss = _Summed.apply(moe.aux_loss, self._replicas)
        followed = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for leaf in followed:
            on_gradient(leaf, self._begin_backward)
        if followed:
            random_ops.keep(self)
        return outputs

    def _with_full_sequences(self, outputs: Any) -> Any:
        context = self._trainer.context
        assert context is not None
        assert self._cp is not None
        if context.is_full:
            return outputs
        tokens = context.tokens(context.length)
        gather = _applied(_GatherFunction, 1, tokens.counts, self._cp)

        def full(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2 or leaf.shape[1] != tokens.counts[context.comm.rank]:
                return leaf
            return tokens.ordered(gather(leaf), 1)

        return tree_map(full, outputs)

    def _gathered(self, outputs: Any, lengths: Lengths) -> Any:
        mine = lengths[self._data.rank]
        leaves, spec = tree_flatten(outputs)
        known = self._samples
        if known is not None and len(known.outputs) == len(leaves):
            return self._gathered_where(outputs, known.outputs, lengths)
        kind = (spec, tuple(leaf.shape[1:] if isinstance(leaf, torch.Tensor) else None for leaf in leaves))
        if kind not in self._kinds:  # one rank's shape may look right by chance: all hear what each has found
            found = self._data.all_gather_object(_without_samples(outputs, mine), only_data=True)
            refusal = next(filter(None, found), None)
            if refusal is not None:
                raise UsageError(refusal)
            self._kinds.add(kind)
        gather = _applied(_GatherFunction, 0, lengths, self._data)
        return tree_map(lambda leaf: gather(leaf) if isinstance(leaf, torch.Tensor) else leaf, outputs)

    def _gathered_where(self, outputs: Any, output_dims: Sequence[SampleDim | None], lengths: Lengths) -> Any:
        """The outputs of all data ranks, of which it is known where samples are; what has none is the same on each."""
        leaves, spec = tree_flatten(outputs)
        found = []  # how many rows a sample has
        for leaf, where in zip(leaves, output_dims, strict=True):
            dim = where.dim if isinstance(leaf, torch.Tensor) and where is not None else None
            found.append(divmod(0 if dim is None else leaf.shape[dim], max(lengths[self._data.rank], 1)))
        if not min(lengths):  # a rank without samples cannot see it
            found = [
                max(of_ranks) for of_ranks in zip(*self._data.all_gather_object(found, only_data=True), strict=True)
            ]
        for number, ((path, leaf), where, (times, rest)) in enumerate(
            zip(tree_flatten_with_path(outputs)[0], output_dims, found, strict=True)
        ):
            if _hides_tensors(leaf):
                raise _hidden(keystr(path), leaf)
            if not isinstance(leaf, torch.Tensor) or where is None:
                continue
            batch_size = sum(lengths)
            if where.dim is None or where.alternates or rest:
                raise UsageError(
                    f"the model's output{keystr(path)} of shape {tuple(leaf.shape)} cannot be gathered from the data "
                    f"ranks for {batch_size} samples: it is made of all of them, or does not have them one after the "
                    "other; expected one row a sample: compute losses and means outside the model, or use "
                    "trainer.step(batch)"
                )
            leaves[number] = _applied(_GatherFunction, where.dim, [times * each for each in lengths], self._data)(leaf)
        return tree_unflatten(leaves, spec)

    def _require_sound(self, is_nested: bool) -> None:
        trainer = self._trainer
        if not in_backward():
            trainer.replicas.require_idle()
        if trainer.scaler is not None and torch.is_grad_enabled():
            raise UsageError(
                "precision=fp16 scales the loss, which only trainer.step does; in a loop of your own use "
                'precision="bf16", or trainer.step(batch)'
            )
        if is_nested and self._cp is not None:
            raise UsageError(
                "a model under cp was called inside the step of another trainer, whose outputs are of this rank's "
                "tokens only; call both models in a loop of your own, or use cp=1"
            )

    # ---- backward ------------------------------------------------------------------------------------------------

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if self._is_in_backward or current_step() is self._trainer.replicas:
            return
        self._updates = 0  # an update that ended with an error has not come to its end
        self._refuse_autograd_grad()
        if isinstance(self._trainer.replicas, ShardedOptimizer) and self._trainer.replicas.units is not None:
            refuse_create_graph()
        self._is_in_backward = True
        if self._trainer.torch_clipping is not None:
            self._trainer.torch_clipping.refuse()
        self._trainer.random.__enter__()  # for what is recomputed
        at_end_of_backward(_BackwardEnd(self._leave_backward, self._require_equal_counts))
        self._trainer.replicas.expect_backward()

    def _leave_backward(self) -> None:
        self._is_in_backward = False
        self._trainer.random.__exit__()
        random_ops.release(self)

    def _refuse_autograd_grad(self) -> None:
        """torch.autograd.grad gives a rank's part of a parameter's gradient, which nobody sums."""
        for parameter in self._watched if self._trainer.replicas.buckets else ():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            try:
                will_run(node)
            except RuntimeError:
                raise UsageError(
                    "torch.autograd.grad of a parameter gives this rank's part of its gradient under plan "
                    f"{self._trainer.plan}; use loss.backward(), after which .grad is that of the global batch"
                ) from None

    def _require_equal_counts(self) -> None:
        counting, self._counting = self._counting, []
        for handle, batch_size in counting:
            most, least = handle.wait().tolist()
            if most != -least:
                raise UsageError(
                    f'batch="local": this rank called the model with {batch_size} samples, while ranks had between '
                    f"{-least} and {most}; the mean of their losses is not that of all samples: give each rank equally "
                    "many (drop_last=True), or use trainer.step(batch), which takes any number"
                )

    # ---- update --------------------------------------------------------------------------------------------------

    def _before_update(self, *_: Any) -> None:
        trainer = self._trainer
        self._updates += 1
        if trainer.is_updating:
            return
        self._require_no_scaler()
        trainer.require_hooks()
        trainer.replicas.complete()
        self._require_equal_counts()
        if trainer.clip is not None:
            trainer.norm = trainer.clip_grad_norm_(trainer.clip)

    def _require_no_scaler(self) -> None:
        optimizer, clip = self._trainer.optimizer, self._trainer.clip
        if not hasattr(optimizer, "found_inf"):
            return
        if self._is_sharded or (clip is not None and getattr(optimizer, "grad_scale", None) is not None):
            reason = (
                "a rank sees its shards of the gradients only, and not whether others overflow"
                if self._is_sharded
                else f"clip={clip:g} would clip gradients that are still scaled"
            )
            raise UsageError(
                f"torch.amp.GradScaler under plan {self._trainer.plan}: {reason}; use "
                'parallelize(..., precision="fp16") and trainer.step(batch), or precision="bf16" without a scaler'
            )

    def _after_update(self, *_: Any) -> None:
        self._updates = max(self._updates - 1, 0)
        if self._updates:
            return
        self._trainer.forget_gradients()
        random_ops.release(self)  # again: a backward on a GPU ends in a thread of autograd
        if not self._trainer.is_updating:
            self._trainer.steps += 1


def refuse_calls(trainer: Trainer) -> None:
    """A rank of a pipeline has some stages of the model: a call of it, as of a full model, raises at once."""

    def before(module: nn.Module, *_: Any) -> None:
        if module is trainer.model and current_step() is not trainer.replicas:
            raise UsageError(
                f"trainer.model was called under plan {trainer.plan}, where a rank has some stages of the model only; "
                "use trainer.step, trainer.evaluate, trainer.predict or trainer.generate, or a plan with pp=1"
            )

    trainer.model.register_forward_pre_hook(before, prepend=True)


class _BackwardEnd:
    """What autograd calls when a backward has ended. It drops it unused where an exception ended the backward: then
    `leave` is run all the same."""

    def __init__(self, leave: Callable[[], None], end: Callable[[], None]) -> None:
        self._leave = weakref.finalize(self, leave)
        self._leave.atexit = False
        self._end = end

    def __call__(self) -> None:
        self._leave()
        self._end()


class _ModelCall:
    """One call of the model."""

    def __init__(self, is_own: bool) -> None:
        self.is_own = is_own  # the user's, and not one within a step of the trainer or within another call
        self.scope = contextlib.ExitStack()
        self.batch_size = 0
        self.lengths: Lengths | None = None  # numbers of samples of the data ranks, where the batch was sharded
        self.leave: Change | None = None


def _without_samples(outputs: Any, batch_size: int) -> str | None:
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, torch.Tensor) and (not leaf.ndim or leaf.shape[0] != batch_size):
            return (
                f"the model's output{keystr(path)} is of shape {tuple(leaf.shape)} for a data rank's {batch_size} "
                "samples; expected one row a sample, so that outputs can be gathered: compute losses and means outside "
                'the model, or use trainer.step(batch), or parallelize(..., batch="local") to average over ranks'
            )
        if _hides_tensors(leaf):
            return str(_hidden(keystr(path), leaf))
    return None


def _hidden(path: str, leaf: Any) -> UsageError:
    return UsageError(
        f"the model's output{path} is a {type(leaf).__name__}, and tensors in it are those of a data rank's samples: "
        "nobody gathers them; return tensors in tuples, dicts or dataclasses"
    )


def _hides_tensors(leaf: Any) -> bool:
    """Whether an object has tensors that a loss may read; those of a cache of keys and values it does not."""
    if isinstance(leaf, torch.Tensor) or hasattr(leaf, "get_seq_length"):
        return False
    return any(isinstance(each, torch.Tensor) for each in tree_leaves(list(getattr(leaf, "__dict__", {}).values())))


def _mapped(tree: Any, change: Change) -> Any:
    """The tree with every tensor that needs a gradient changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf, tree)


def _in_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in HALF_DTYPES else leaf


# ---- autograd functions of the note above --------------------------------------------------------------------------


def _applied(function: type[torch.autograd.Function], *given: Any) -> Change:
    """The function of tensors that applies an autograd function with these arguments."""
    return lambda x: function.apply(x, *given)


class _ShardFunction(torch.autograd.Function):
    """This rank's shard of a tensor that all ranks have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.given = (dim, lengths, comm)
        return autograd_collectives.split(x.detach(), dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _GatherFunction.apply(gradient, *ctx.given) / ctx.given[-1].size, None, None, None


class _GatherFunction(torch.autograd.Function):
    """All ranks' shards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: Lengths, comm: Communicator) -> torch.Tensor:
        ctx.given = (dim, lengths, comm)
        return autograd_collectives.gather(x.detach(), dim, lengths, comm)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _ShardFunction.apply(gradient, *ctx.given) * ctx.given[-1].size, None, None, None


class _UsedFunction(torch.autograd.Function):
    """A tensor that every rank of a group uses for another part of the work; its gradient is the mean of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _MeanFunction.apply(gradient, ctx.comm), None


class _MeanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format)) / comm.size

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _UsedFunction.apply(gradient, ctx.comm), None


class _Summed(torch.autograd.Function):
    """The sum of what the ranks have each a part of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.size = comm.size
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient * ctx.size, None


class _ScaleFunction(torch.autograd.Function):
    """A tensor whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient * ctx.factor, None


# ---- what torch's own functions cannot know ------------------------------------------------------------------------

_models: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Trainer]] = weakref.WeakKeyDictionary()


_OPTIMIZER = "unisono_optimizer"  # on a parameter of ZeRO: the only optimizer that gets its gradient


@functools.cache
def _refuse_other_optimizers() -> None:
    register_optimizer_step_pre_hook(_require_own)


def _require_own(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = getattr(parameter, _OPTIMIZER, None)
            if owner is not None and owner() is not optimizer:
                raise UsageError(
                    f"{type(optimizer).__name__} was made of parameters under ZeRO, or with master weights, whose "
                    "gradients only the trainer's own optimizer gets; return it from parallelize(optimizer=...), with "
                    "parameter groups where parts of the model need other options, and step trainer.optimizer"
                )


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """nn.Module.zero_grad, also of the shards that ZeRO's optimizer has."""
    nn.Module.zero_grad(model, set_to_none)
    trainer = _models[model]() if model in _models else None
    if trainer is not None:
        trainer.zero_grad()
