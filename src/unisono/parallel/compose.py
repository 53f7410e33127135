"""The strategies in the order in which they are applied to the model of one rank: STEPS.

Each step changes the model in place, under its parameters' own names, and leaves what later steps need in the
Composition. Experts, layers and sequences are sharded while the model is still complete; then the pipeline keeps this
rank's stages; only what is left gets its values, and is replicated over the data ranks, plainly or by ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.named_groups import NamedParameters
from unisono.mesh.random.state import RandomState
from unisono.parallel.blocks import outermost_lists
from unisono.parallel.checks.optimizer_scope import require_full_parameters
from unisono.parallel.checks.parameter_groups import require_same_groups
from unisono.parallel.checks.parameter_reads import ParameterReads
from unisono.parallel.checks.rounded_weights import refuse_float32_uses
from unisono.parallel.compile.loss import CompiledLoss
from unisono.parallel.compile.regions import Compilation, compile_regions
from unisono.parallel.context.context import Context, context_parallelize
from unisono.parallel.context.sequence import SequenceParallel
from unisono.parallel.data import batchnorm
from unisono.parallel.data.data_parallel import DataParallel
from unisono.parallel.expert.expert import expert_parallelize
from unisono.parallel.float8 import Float8Layers, use_float8
from unisono.parallel.full_state import refuse_partial_state
from unisono.parallel.layout import is_summed, layout_of
from unisono.parallel.loss.batch_loss import BatchLoss, GatheredLoss
from unisono.parallel.loss.loss import GlobalLoss, Loss
from unisono.parallel.loss.model_loss import ModelLoss, with_model_loss
from unisono.parallel.master_weights import RoundedStep, follow
from unisono.parallel.meta.filling import Filling
from unisono.parallel.pipeline.parameter_usage import by_names
from unisono.parallel.pipeline.rehearsal import Rehearsal
from unisono.parallel.pipeline.runtime import PipelineRuntime
from unisono.parallel.pipeline.split import StageSplit, require_stages, split
from unisono.parallel.pipeline.tied import TiedGradients
from unisono.parallel.precision import FULL, Precision, accumulate_in_float32
from unisono.parallel.recomputation.recompute import recompute, runs_again
from unisono.parallel.share import BatchDim, first_batch_size, share, shares
from unisono.parallel.tensor.head_width import HeadWidth
from unisono.parallel.tensor.tensor_parallel import tensor_parallelize
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.fully_sharded import zero_optimizer
from unisono.parallel.zero.zero import ShardedOptimizer
from unisono.plan.plan import DATA, REPLICAS, Plan
from unisono.plan.schedules.schedule import Schedule, schedule

# Of the activations that a compiled region would keep, the share that it may under recompute=selective.
_SELECTIVE = 0.8


@dataclass
class Composition:
    """What the steps are given, and what they make."""

    model: nn.Module
    plan: Plan
    mesh: Mesh
    random: RandomState
    loss: Loss
    optimizer: Callable[[Any], Optimizer]
    example: tuple[Any, Any] | None = None
    rules: Any = None
    clip: float | None = None
    # Given the model when it is sharded, before anything is made of its parameters: to give memory to one that was
    # built without. `filling` gives it the values that it is to have; `rehearsal` then gives what a run of the full
    # model would show, as placeholders cannot be run among ranks.
    fill: Callable[[nn.Module], None] = lambda model: None
    filling: Filling | None = None
    rehearsal: Rehearsal | None = None
    model_loss: ModelLoss | None = None
    batch_dim: BatchDim = 0
    precision: Precision = FULL

    gathered: dict[str, torch.dtype] = field(default_factory=dict)  # by ZeRO, in other dtypes than parameters have
    float8: Float8Layers = field(default_factory=Float8Layers)
    compilation: Compilation | None = None
    head_width: HeadWidth | None = None
    context: Context | None = None
    sequence: SequenceParallel | None = None
    stages: StageSplit | None = None
    schedule: Schedule | None = None
    parameters_of_all_stages: dict[str, nn.Parameter] = field(default_factory=dict)
    replicas: DataParallel | ShardedOptimizer | None = None
    stepping: Optimizer | None = None


def shard_experts(made: Composition) -> None:
    if made.plan.tp > 1:  # reads the widths of heads of the full model
        made.head_width = HeadWidth(made.model, made.plan.tp, products=made.plan.cp == 1)
    expert_parallelize(made.model, made.mesh)


def compile_modules(made: Composition) -> None:
    """Blocks and other modules, as they are when they run: what later steps put around them stays eager."""
    if made.plan.compile:
        budget = _SELECTIVE if made.plan.recompute == "selective" else 1.0
        made.compilation = compile_regions(made.model, made.random, budget)


def shard_layers(made: Composition) -> None:
    if made.plan.tp > 1:
        made.sequence = tensor_parallelize(made.model, made.mesh, made.rules, sequence=made.plan.sequence)
        made.random.name_modules(made.model)  # those that replaced others, too: attention draws what it drops


def compute_in_float8(made: Composition) -> None:
    use_float8(made.model, made.float8.chosen, made.precision.is_emulated)


def shard_sequences(made: Composition) -> None:
    if made.plan.cp > 1:
        made.context = context_parallelize(made.model, made.mesh, made.plan.context)
        if made.example is not None:
            inputs, targets = made.example
            made.context.expect(inputs, targets if made.model_loss is None else made.model_loss.labelled(made.example))


def globalize_batch_statistics(made: Composition) -> None:
    if made.mesh.size(*DATA) > 1:
        batchnorm.convert(made.model, made.mesh)


def recompute_activations(made: Composition) -> None:
    if made.plan.compile and made.plan.recompute == "selective":
        return  # the compiler chooses what is cheap to compute again
    if made.plan.zero == 3 and made.plan.recompute == "selective" and not outermost_lists(made.model):
        return  # one region over several units: an op of one would run again while another unit's parameters are freed
    recompute(made.model, made.plan.recompute)


def keep_stages(made: Composition) -> None:
    """Leave this rank the blocks of its pipeline stages."""
    plan, mesh, model = made.plan, made.mesh, made.model
    if plan.pp == 1:
        return
    made.parameters_of_all_stages = dict(model.named_parameters())
    made.schedule = schedule_of(plan)
    with made.random:
        inputs = example_inputs(plan, made.example, made.batch_dim, mesh.index(*DATA))
        usage, shown = None, made.rehearsal
        if shown is not None:
            usage = by_names(model, require_stages(model, made.schedule), shown.users, shown.skips)
            if made.context is not None and shown.length is not None:
                made.context.learn(inputs, shown.length)
        made.stages = split(
            model, made.schedule, mesh.index("pp"), example=inputs, boundaries=plan.boundaries or None, usage=usage
        )
    made.random.step = 0
    if next(model.parameters(), None) is None:
        raise UsageError(
            f"the part of {type(model).__name__} that is left to rank {mesh.index('pp')} of the pipeline has no "
            "parameters, so there is nothing to optimize; use boundaries=... that give every rank some, or a "
            "smaller pp"
        )


def give_values(made: Composition) -> None:
    """Values for parameters that were deferred; under ZeRO 3, later, for this rank's shards only."""
    made.fill(made.model)
    if made.filling is not None:
        made.filling.fill(made.model, later=lambda each: made.plan.zero == 3 and is_summed(each, made.mesh))


def replicate(made: Composition) -> None:
    """Gradients are summed over the data ranks; under ZeRO each holds a shard of what all need."""
    plan, model, mesh, precision = made.plan, made.model, made.mesh, made.precision
    if precision.dtype is not None:
        accumulate_in_float32(model.parameters())
    if not plan.zero:
        made.stepping = made.optimizer(NamedParameters.of(model))
        require_full_parameters(made.stepping, made.optimizer, model, is_sharded=plan.pp > 1)
        masters = precision.masters(model, made.gathered)
        if masters is not None:
            follow(made.stepping, masters)
        made.replicas = DataParallel(model, mesh, reduce_dtype=precision.reduce_dtype, masters=masters)
        return
    options: dict[str, Any] = {"rounded": made.gathered, "reduce_dtype": precision.reduce_dtype}
    options |= {"masters": precision.master is not None, "emulated": precision.is_emulated}
    if made.stages is not None:
        options["units"] = [block for stage in made.stages.stages for block in stage.modules]
        options |= {"users": made.stages.users, "tied": [each.name for each in made.stages.tied]}
    if made.filling is not None:
        options |= {"fill": made.filling.fill_one, "materialized": made.filling.materialized("the optimizer")}
    made.replicas = zero_optimizer(model, mesh, made.optimizer, plan.zero, offload=plan.offload, **options)
    made.stepping = made.replicas.optimizer


STEPS: tuple[Callable[[Composition], None], ...] = (
    shard_experts,
    compile_modules,
    shard_layers,
    compute_in_float8,
    shard_sequences,
    globalize_batch_statistics,
    recompute_activations,
    keep_stages,
    give_values,
    replicate,
)


def compose(made: Composition) -> Trainer:
    made.gathered, made.float8 = made.precision.gathered(made.model), made.precision.float8(made.model)
    for step in STEPS:
        step(made)
    plan, mesh, model = made.plan, made.mesh, made.model
    assert made.stepping is not None
    assert made.replicas is not None
    trainer = Trainer(
        model, plan, mesh, _global_loss(made), made.stepping, made.random, made.replicas, made.clip, made.context
    )
    trainer.compilation, trainer.sequence = made.compilation, made.sequence
    trainer.head_width, trainer.model_loss, trainer.batch_dim = made.head_width, made.model_loss, made.batch_dim
    trainer.holds_shards = plan.zero > 0 or plan.pp > 1 or any(layout_of(p).splits for p in model.parameters())
    units = made.replicas.units if isinstance(made.replicas, ShardedOptimizer) else None
    trainer.float8 = str(made.float8) if made.float8.chosen else ""
    rounded = [name for name, each in model.named_parameters() if made.gathered.get(name) == each.dtype]
    reads = ParameterReads(model, str(plan), units, is_pipeline=plan.pp > 1, rounded=rounded)
    trainer.reads = reads if reads.is_needed else None
    trainer.rounds_weights = bool(rounded)
    refuse_float32_uses(model, rounded, str(plan))
    refuse_partial_state(model, trainer.optimizer, trainer.optimized(), str(plan), is_pipeline=plan.pp > 1)
    if made.precision.master is None:
        rounding, emulated = made.precision.rounding, made.precision.halves
        RoundedStep(
            made.stepping, trainer.optimized(), rounding, lambda: (trainer.random.seed, trainer.steps), mesh, emulated
        )
    if made.stages is not None and made.schedule is not None:
        require_same_groups(trainer.optimizer, trainer.optimized(), made.optimizer, made.parameters_of_all_stages)
        trainer.pipeline = PipelineRuntime(
            made.stages.stages,
            made.schedule,
            mesh.comm("pp"),
            trainer.pipeline_loss,
            around=trainer.around,
            split_backward=not runs_again(model) and not plan.compile and plan.zero < 3,
        )
        trainer.tied = TiedGradients(made.stages.tied, mesh.comm("pp"))
        for stage in made.stages.stages:
            if stage.is_last:
                stage.run_model = trainer.run_model
    return trainer


def _global_loss(made: Composition) -> GlobalLoss:
    """The loss, normalised over the global batch."""
    plan, comm = made.plan, made.mesh.comm(*REPLICAS)
    if made.compilation is not None and not isinstance(made.loss, BatchLoss):
        made.loss = CompiledLoss(made.loss, made.compilation)
    sharing = comm if comm.size > 1 else None
    if isinstance(made.loss, BatchLoss):
        return GatheredLoss(made.loss, sharing)
    normalised = GlobalLoss(with_model_loss(made.loss), sharing, dims=(0, 1) if plan.cp > 1 else (0,))
    normalised.sees_full_parameters = plan.tp * plan.pp * plan.ep == 1 and plan.zero < 3
    return normalised


def schedule_of(plan: Plan) -> Schedule:
    """What each rank of the plan's pipeline does, and when."""
    return schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks if plan.chunks > 1 else None)


def example_inputs(plan: Plan, example: tuple[Any, Any] | None, batch_dim: BatchDim = 0, index: int = 0) -> Any:
    """The inputs of a data rank's first microbatch of the example."""
    if example is None:
        raise UsageError("a pipeline needs an example batch to find its stages; pass example=(inputs, targets)")
    parts = plan.dp * plan.microbatches
    batch_size = first_batch_size(example, batch_dim)
    if batch_size < parts:
        raise UsageError(
            f"the example has {batch_size} samples for {plan.dp} data ranks x {plan.microbatches} "
            f"microbatches; expected at least {parts}"
        )
    return shares(share(example, index, plan.dp, batch_dim).batch, plan.microbatches, batch_dim)[0].batch[0]
