"""`uni.parallelize`: a plan meets a model.

The model is built from one seed, and its modules are named: random numbers go by those names. Where a function builds
it, and the plan leaves a rank a part, it is first built on the meta device (mesh/deferred_init/): a rank never holds
the full model. What cannot give the result of one device is refused before ranks communicate (checks/). Then the
strategies are applied, in the order of compose.py.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.signatures.plain_data import is_plain
from unisono.errors import TaskError, UsageError
from unisono.mesh.deferred_init.deferred_model import DeferredModel, build_now, defer_init
from unisono.mesh.deferred_init.seeded_init import in_dtype, states_outside_torch
from unisono.mesh.mesh import Mesh
from unisono.mesh.named_groups import GroupedOptimizer
from unisono.mesh.random.state import RandomState
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.checks.batch_statistics import require_full_batch_norms
from unisono.parallel.checks.parameter_reads import ParameterReads
from unisono.parallel.checks.preview import require_fitting_loss
from unisono.parallel.checks.samples import HoldsItself, find_samples
from unisono.parallel.checks.separable import require_separable
from unisono.parallel.checks.tokenwise import require_tokenwise
from unisono.parallel.checks.updated_buffers import require_steady_buffers
from unisono.parallel.compile.cuda_graph import require_capturable
from unisono.parallel.compile.regions import without_compiled
from unisono.parallel.compose import Composition, compose, example_inputs, schedule_of
from unisono.parallel.context.sequence import require_sound_blocks
from unisono.parallel.data import batchnorm
from unisono.parallel.expert.expert import needs_full_batch
from unisono.parallel.float8 import require_float8
from unisono.parallel.inputs import cloned
from unisono.parallel.loop import OwnLoop, refuse_calls
from unisono.parallel.loss.batch_loss import BatchLoss, GatheredLoss, OutputKinds, require_full_batches
from unisono.parallel.loss.loss import Loss
from unisono.parallel.loss.model_loss import ModelLoss, NeedsValues
from unisono.parallel.meta.filling import Filling
from unisono.parallel.pipeline.layers import LayerSpec, build_full
from unisono.parallel.pipeline.rehearsal import rehearse, rehearse_with_values, rehearsed
from unisono.parallel.pipeline.split import require_stages
from unisono.parallel.precision import Precision
from unisono.parallel.share import BatchDim, require_batch_dim
from unisono.parallel.tensor.coverage import coverage
from unisono.parallel.tensor.tensor_parallel import deriving_once, fitting_rules, require_shareable
from unisono.parallel.trainer import Trainer, takes_closure
from unisono.plan.plan import AXES, RECOMPUTE, Plan
from unisono.plan.search.balance import checked

Found = TypeVar("Found")
Model = nn.Module | Callable[[], nn.Module] | Sequence[LayerSpec]


@deriving_once()
def parallelize(
    model: Model | DeferredModel,
    plan: Plan | str,
    *,
    loss: Loss,
    optimizer: Callable[[Any], Optimizer],
    example: tuple[Any, Any] | None = None,
    rules: Any = None,
    clip: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    precision: str | Precision = "fp32",
    on_ready: Callable[[DeferredModel], None] | None = None,
    batch: str = "global",
    batch_dim: BatchDim = 0,
    cudagraph: bool = False,
) -> Trainer:
    """Put a plain model under a plan; every rank calls it alike, and trains with the Trainer's `step`.

    `uni.parallelize` is this with a proof before the first step (verify/self_check.py, which documents the arguments
    that both take).

    Args:
        on_ready: Called on every rank with the model as it will be trained, before the plan is applied to it.
        batch: What ranks will give: "global", all of them the same batch, of which each takes its part, or "local",
            each data rank its own samples.
        batch_dim: Along which dim of a batch's tensors samples are: 1 for time-major batches, (1, 0) for time-major
            inputs with targets that have samples first, None for a tensor without samples, as in ({"x": 0, "edges":
            None}, 0).
        cudagraph: On one GPU, run steps as a CUDA graph, which launches all kernels at once; for small models.

    Returns:
        The trainer of this rank.

    Raises:
        UsageError: The plan does not fit the ranks, or cannot give the result of one device for this model.
    """
    if batch not in ("global", "local"):
        raise UsageError(f'parallelize(batch={batch!r}): expected "global" or "local"')
    precision = Precision.of(precision)
    require_batch_dim(batch_dim)
    given, optimizer = optimizer, _checked(optimizer)
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    if plan.memory_limit is not None:
        raise UsageError(
            f"recompute={plan.recompute} is chosen by uni.parallelize and uni.Engine; here, name one of "
            f"{', '.join(RECOMPUTE)}"
        )
    comm = world.world() if world.is_initialized() else world.init()
    plan.fit(comm.size)
    example = cloned(example)
    if (plan.cp > 1 or plan.sequence) and batch_dim not in (0, (0, 0)):
        raise UsageError(
            f"batch_dim={batch_dim!r} with {'cp' if plan.cp > 1 else 'sp'}, which needs batches with samples first; "
            "transpose the batch, or leave it out of the plan"
        )
    if isinstance(model, nn.Module):
        model, was_compiled = without_compiled(model)
        plan = plan.but(compile=plan.compile or was_compiled)
    states = states_outside_torch()
    deferred = deferred_for(plan, model, seed, dtype)
    drawn = {name: state for name, state in states.items() if states_outside_torch().get(name) != state}
    full = deferred.model
    plan = plan.but(compile=plan.compile or getattr(full, _WAS_COMPILED, False))
    are_rules_given = rules is not None
    refuse_what_cannot_be_right(plan, full)
    if isinstance(given, GroupedOptimizer):
        given.require_members(name for name, _ in full.named_parameters())
    precision.require_dtypes(full, optimizer)
    if cudagraph:
        require_capturable(plan, full, precision)
    if precision.float8(full).chosen and not precision.is_emulated:
        device = next(parameter.device for parameter in full.parameters())
        require_float8(comm.device if device.type == "meta" else device)
    if isinstance(loss, BatchLoss):
        require_full_batches(plan, example)
        if batch_dim != 0:
            raise UsageError(f"uni.BatchLoss with batch_dim={batch_dim!r}: expected batches with samples first")
    kinds, model_loss = None, None
    if example is not None and plan.dp * plan.cp * plan.microbatches > 1:
        if isinstance(loss, BatchLoss):
            deferred, kinds = _tried(deferred, loss, lambda model: OutputKinds.of(model, loss, example))
        elif batch_dim == 0:
            deferred, model_loss = _tried(deferred, loss, lambda model: ModelLoss.of(model, loss, example))
        full = deferred.model
    shown, covered, samples = None, None, None
    is_batch_sharded = plan.dp * plan.microbatches > 1
    with no_side_effects(full, loss):
        if plan.tp > 1:
            rules = fitting_rules(full, plan.tp, rules, example)
            styles = require_shareable(full, plan.tp, rules)
            covered = coverage(full, styles, plan.tp, example)
            if plan.sequence and example is not None:
                require_sound_blocks(full, styles)
                require_tokenwise(full, example, "sp", styles)
        if example is not None:
            of_loss = ParameterReads(full, str(plan), None, is_pipeline=True) if plan.pp > 1 else None
            require_fitting_loss(full, loss, example, batch_dim, of_loss)
            require_steady_buffers(full, plan, example, batch_dim)
            if is_batch_sharded:
                find = partial(
                    find_samples, batch=example, dim=batch_dim, loss=None if model_loss is not None else loss,
                    microbatches=plan.microbatches, may_mix=isinstance(loss, BatchLoss), looks_back=True,
                )  # fmt: skip
                try:
                    samples = find(full)
                except HoldsItself:
                    deferred = deferred.rebuilt(
                        "a hook or a closure of it holds the model, of which no copy can be tried"
                    )
                    full = deferred.model
                    samples = find(full)
                require_full_batch_norms(full, plan, example, batch_dim)
            if plan.cp > 1:
                require_tokenwise(full, example, "cp", model_loss=model_loss)
        if plan.pp > 1:
            inputs = example_inputs(plan, example, batch_dim)
            if not rehearse(full, schedule_of(plan), inputs):
                rehearse_with_values(full, schedule_of(plan), inputs)
            shown = rehearsed(full, schedule_of(plan), inputs) if deferred.is_deferred else None
    if plan.pp > 1 and deferred.is_deferred and shown is None:
        deferred = deferred.rebuilt("its forward cannot be run tensor by tensor, to see what each stage of it uses")
        full = deferred.model
    mesh = Mesh(plan.shape, AXES).connect()  # the first time that ranks communicate
    _require_same_draws(comm, drawn)
    if not all(comm.all_gather_object(deferred.is_deferred, only_data=True)) and deferred.is_deferred:
        deferred, shown = deferred.rebuilt("another rank could not build its part alone"), None
        full = deferred.model
    if plan.tp > 1 and not are_rules_given:
        rules = comm.broadcast_object(rules, only_data=is_plain(rules))  # ranks that search by themselves might differ
    if isinstance(model, nn.Module):
        comm.broadcast_parameters(full)
    if on_ready is not None:
        on_ready(deferred)
    random = RandomState(seed)
    random.refuses_unfollowed = plan.world * plan.microbatches > 1
    random.name_modules(full)

    def under_plan() -> Trainer:
        filling = Filling(deferred, mesh) if deferred.is_deferred else None
        trainer = compose(
            Composition(
                full, plan, mesh, random, loss, optimizer, example, rules, clip,
                filling=filling, rehearsal=shown, model_loss=model_loss, batch_dim=batch_dim, precision=precision,
            )
        )  # fmt: skip
        if isinstance(trainer.loss, GatheredLoss):
            trainer.loss.outputs = kinds
        trainer.note = deferred.note
        trainer.coverage = "" if covered is None else str(covered)
        trainer.rules = rules
        trainer.samples = samples
        trainer.tries_samples = is_batch_sharded and example is None and plan.cp == 1
        trainer.precision = precision
        trainer.scaler = precision.scaler(mesh)
        trainer.batch = batch
        if trainer.scaler is not None and takes_closure(trainer.optimizer):
            raise UsageError(
                f"precision=fp16 with {type(trainer.optimizer).__name__}, which evaluates the model several times in a "
                "step: one that overflows could not be taken back; use bf16 or fp32"
            )
        if cudagraph:
            trainer.capture_steps()
        if plan.pp == 1:
            OwnLoop(trainer)
        else:
            refuse_calls(trainer)
        return trainer

    trainer = _agreed(comm, under_plan)
    if covered is not None and covered.is_little and comm.rank == 0:
        warnings.warn(f"{covered}; pass rules that shard more, or use less tp", UserWarning, stacklevel=2)
    return trainer


def _tried(deferred: DeferredModel, loss: Loss, trial: Callable[[nn.Module], Found]) -> tuple[DeferredModel, Found]:
    """What trial(model) finds; and the deferred-init model, built where that takes values."""
    try:
        with no_side_effects(deferred.model, loss):
            return deferred, trial(deferred.model)
    except NeedsValues:
        deferred = deferred.rebuilt("its forward cannot be run without values, to see what the loss takes of it")
    with no_side_effects(deferred.model, loss):
        return deferred, trial(deferred.model)


def _require_same_draws(comm: Communicator, drawn: dict[str, Any]) -> None:
    """UsageError where the model's function drew from these generators, and ranks had them in different states."""
    digests = {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in drawn.items()}
    everyone = comm.all_gather_object(digests, only_data=True)
    for name in dict.fromkeys(name for each in everyone for name in each):
        if len({each.get(name) for each in everyone}) > 1:
            raise UsageError(
                f"the function that makes the model draws from {name}, which is in another state on every rank, so "
                "they made different models; seed it on every rank before, as by random.seed(0) or "
                "numpy.random.seed(0), or draw with torch, which is seeded"
            )


def _agreed(comm: Communicator, act: Callable[[], Trainer]) -> Trainer:
    """The result of act(); if any rank raises, all ranks raise the same error, so none is left waiting."""
    trainer: Trainer | None = None
    refusal: UsageError | None = None
    failure: Exception | None = None
    try:
        trainer = act()
    except UsageError as error:
        refusal = error
    except Exception as error:
        failure = error
        words = " ".join(str(error).split())
        refusal = TaskError(f"rank {comm.rank} failed while the plan was applied: {type(error).__name__}: {words}")
    found = next(
        (each for each in comm.all_gather_object(_is_task_error_and_text(refusal), only_data=True) if each is not None),
        None,
    )
    if found is not None:
        is_task_error, reported = found
        raise (TaskError if is_task_error else UsageError)(reported) from failure
    assert trainer is not None
    return trainer


def _is_task_error_and_text(refusal: UsageError | None) -> tuple[bool, str] | None:
    return None if refusal is None else (isinstance(refusal, TaskError), str(refusal))


def _checked(make: Callable[[Any], Optimizer]) -> Callable[[Any], Optimizer]:
    def made(parameters: Any) -> Optimizer:
        optimizer = make(parameters)
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"optimizer(parameters) gave a {type(optimizer).__name__}; expected a torch optimizer, as "
                "lambda p: torch.optim.AdamW(p, lr=3e-4) gives"
            )
        return optimizer

    return made


def deferred_for(
    plan: Plan, model: Model | DeferredModel, seed: int, dtype: torch.dtype | None = None
) -> DeferredModel:
    """The model as the plan needs it: without values where a function builds it and ranks will own parts, else
    with them."""
    if isinstance(model, DeferredModel):
        if dtype is not None:
            raise UsageError(
                f"dtype={dtype} of a DeferredModel, which has its dtypes already; defer its initialization in {dtype}"
            )
        return model
    if isinstance(model, nn.Module):
        return build_now(lambda: model if dtype is None else in_dtype(model, dtype), seed)
    function = _function(model, seed)

    def make() -> nn.Module:
        made = function()
        if not isinstance(made, nn.Module):
            raise UsageError(f"{_TAKES}; the function gave {type(made).__name__}")
        made, was_compiled = without_compiled(made)
        setattr(made, _WAS_COMPILED, was_compiled)
        return made if dtype is None else in_dtype(made, dtype)

    is_sharded = plan.tp > 1 or plan.pp > 1 or plan.ep > 1 or plan.zero == 3
    return defer_init(make, seed) if is_sharded else build_now(make, seed)


_WAS_COMPILED = "unisono_was_compiled"
_TAKES = "parallelize takes an nn.Module, a function that builds one or a list of uni.nn.LayerSpec"


def _function(model: Any, seed: int) -> Callable[[], nn.Module]:
    if isinstance(model, list | tuple) and model and all(isinstance(each, LayerSpec) for each in model):
        return lambda: build_full(model, seed)
    if not callable(model):
        raise UsageError(f"{_TAKES}; it was given {type(model).__name__}")
    return model


def refuse_what_cannot_be_right(plan: Plan, model: nn.Module) -> None:
    require_separable(model, plan)
    if plan.microbatches > 1 and batchnorm.has_batchnorm(model):
        raise UsageError(
            f"microbatches={plan.microbatches}: BatchNorm takes its statistics over the full batch at once, which "
            "microbatches do not have; use microbatches=1, or another norm"
        )
    full = needs_full_batch(model)
    if full and (plan.microbatches > 1 or plan.pp > 1):
        raise UsageError(
            f"{full[0]} has a capacity or an auxiliary loss over the full batch; use microbatches=1 and pp=1, "
            "or a dropless MoE with aux_weight=0"
        )
    if full and plan.sequence:
        raise UsageError(
            f"{full[0]} has a capacity or an auxiliary loss over all tokens, but sp gives a tp rank a part of them; "
            "leave sp out"
        )
    if plan.pp == 1 and plan.schedule != "1f1b":
        raise UsageError(f"schedule={plan.schedule} orders the stages of a pipeline, but pp=1; leave it out")
    if plan.pp > 1:
        blocks = require_stages(model, schedule_of(plan))
        if plan.boundaries:
            checked(plan.boundaries, len(blocks.modules), schedule_of(plan).stages)
