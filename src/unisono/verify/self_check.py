"""The self-check: a plan is proved on the user's own model and first batch before the first step counts.

`parallelize` takes one training step on one device (rank 0, outside every process group, before the plan is applied)
and one under the plan, compares the loss, every gradient, every update and every buffer by their fingerprints, and puts
everything back. Where they differ by more than rounding, the run stops before anything is trained or saved:

    check="auto"   the full model where one device can hold it, on as many samples as take a few steps' time; of a
                   larger model a reduced one, with fewer blocks of the same kinds
    check="full"   the full model on the full first batch, whatever it takes
    check="off"    nothing is proved

`trainer.proof` has in one line what was proved, or why nothing could be.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from unisono.amounts import format_seconds
from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.rendezvous.solo import alone
from unisono.comm.signatures.plain_data import is_plain
from unisono.errors import PlanMismatch, UnisonoError, UsageError
from unisono.launch import environment
from unisono.mesh.deferred_init.deferred_model import DeferredModel, tensors_in
from unisono.parallel import apply
from unisono.parallel.apply import Model
from unisono.parallel.blocks import find_blocks
from unisono.parallel.compose import schedule_of
from unisono.parallel.full_state import full_tensors_in
from unisono.parallel.layout import layout_of
from unisono.parallel.loss.loss import Loss
from unisono.parallel.meta.meta_tensors import deep_copy
from unisono.parallel.pipeline.layers import build_full
from unisono.parallel.precision import Precision
from unisono.parallel.share import BatchDim, Share, first_batch_size, first_samples, full_batch_of, share
from unisono.parallel.task import Task
from unisono.parallel.tensor.region import Region
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import DATA, Plan
from unisono.planner.auto_recompute import resolve_recompute
from unisono.planner.choice import Job
from unisono.verify.fingerprint import (
    TOLERANCE,
    Deviation,
    FingerprintRecord,
    TrainingSetup,
    constants_of,
    differences,
    farthest,
    plain_step,
    planned_step,
    replica_difference,
    rounded_step,
    vary_constants,
)
from unisono.verify.first_divergence import find_first_divergence, guess_fault
from unisono.verify.rewind import generators_kept
from unisono.verify.verify import verify_here

_log = logging.getLogger("unisono")
CHECKS = ("auto", "full", "off")
_QUICK = 1.0  # seconds that a step of one device on the full batch may take, whatever a step under the plan takes; and
# that applying the plan may, for a proof in float64 beside
_VERY_QUICK = 0.2  # seconds, likewise, for a proof in float64 beside
_STEPS = 2.0  # steps under the plan that the step of one device may take
_COPIES = 5  # of the parameters: values to restore, gradients, two of an Adam, and one for activations
_SHARE_OF_MEMORY = 0.4  # of what is free where rank 0 computes
_SMALL = 1e6  # parameters of a model that is proved in float64, too
_FAULT_IN_FLOAT64 = 1e-5  # models may round to float32 on the way
_MOST_ON_CPU = 2e8  # parameters; a step of a larger model takes minutes there


def parallelize(
    model: Model,
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
    check: str = "auto",
    **options: Any,
) -> Trainer:
    """Put a plain model under a plan; every rank calls it alike, and trains with the Trainer's `step`.

    Args:
        model: A module, which becomes that of rank 0 everywhere, or a function that builds one, called after
            torch.manual_seed(seed), or a list of uni.nn.LayerSpec, which are built so.
        plan: A Plan or its text, as "dp=2,tp=2".
        loss: loss(outputs, targets) gives a scalar.
        optimizer: optimizer(parameters) gives a torch optimizer.
        example: A batch (inputs, targets), which pipelines need to find their stages, and tp to search a model for
            rules.
        rules: Which layers tp shards, and how; default: what the model brings or shows.
        clip: The largest norm of the gradients.
        seed: Of initial weights and random numbers.
        dtype: Of the model's parameters; default: as it is built.
        precision: "fp32", "bf16", "fp16" or "fp8", in which all is computed from float32 parameters; "fp32" leaves the
            model's own dtype. "bf16" and "fp8" take bfloat16 parameters, too; options follow as
            "bf16,reduce=bf16,master=none" (see Precision).
        check: How the plan is proved before the first step, on the example or, without one, on the first batch: "auto",
            "full" or "off".
        **options: batch, "global" (default) or "local": whether all ranks give the same batch, of which each takes its
            part, or each data rank its own samples. batch_dim, along which dim of a batch's tensors samples are: 1 for
            time-major batches, (1, 0) for time-major inputs with targets that have samples first, None for a tensor
            without samples, as in ({"x": 0, "edges": None}, 0). cudagraph: on one GPU, run steps as a CUDA graph, for
            small models.

    Returns:
        The trainer of this rank.

    Raises:
        UsageError: The plan does not fit the ranks, or cannot give the result of one device for this model.
    """
    plan = plan_of_job(plan)
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    plan, chosen = _with_recompute(plan, model, loss, optimizer, example, rules, clip, options.get("batch_dim", 0))
    precision = Precision.of(precision)
    given: dict[str, Any] = {"rules": rules, "clip": clip, "seed": seed, "dtype": dtype, "precision": precision}
    level = check_level(check)
    if level == "off" or not changes_anything(plan):
        trainer = apply.parallelize(model, plan, loss=loss, optimizer=optimizer, example=example, **given, **options)
        trainer.chosen = chosen
        return trainer
    proof = _Proof(plan, TrainingSetup(loss, optimizer, clip, seed, precision), level, {**given, **options})
    proof.make = model if callable(model) and not isinstance(model, nn.Module) else None
    first = example if example is None or dtype is None else _in_dtype(example, dtype)
    started = time.perf_counter()
    trainer = apply.parallelize(
        model,
        plan,
        loss=loss,
        optimizer=optimizer,
        example=example,
        **given,
        **options,
        on_ready=lambda deferred: proof.begin(deferred, first),
    )
    trainer.chosen = chosen
    proof.seconds_to_apply = time.perf_counter() - started
    if first is None:
        trainer.on_first_batch = lambda batch: proof.end_on(trainer, batch)
    else:
        proof.end(trainer, first)
    return trainer


def _with_recompute(
    plan: Plan, model: Model, loss: Loss, optimizer: Any, example: Any, rules: Any, clip: Any, batch_dim: BatchDim
) -> tuple[Plan, str]:
    """The plan with a recomputation instead of auto:..., and a sentence on it; before ranks communicate."""
    if plan.memory_limit is None:
        return plan, ""
    job = None
    if example is not None:
        full = (lambda: build_full(model, 0)) if isinstance(model, Sequence) else model
        job = Job(full, loss, optimizer, example, rules, batch_dim, clip)
    inputs = [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    return resolve_recompute(plan, job, inputs[0].device if inputs else torch.device("cpu"))


def _in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """A batch for a model that was converted: its floating-point tensors are, too."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, batch
    )


def plan_of_job(plan: Plan | str) -> Plan | str:
    """The plan of `unisono run --plan`, if it gives one; else the script's. "auto" is for an Engine, whose plan this
    is."""
    asked = os.environ.get(environment.PLAN, "")
    return plan if asked in ("", "auto") else asked


def check_level(check: str) -> str:
    """The argument, unless the launcher sets it (`unisono run --check-plan`)."""
    if check not in CHECKS:
        raise UsageError(f"check={check!r}; expected one of {', '.join(CHECKS)}")
    return os.environ.get(environment.CHECK_PLAN) or check


def changes_anything(plan: Plan) -> bool:
    """Whether a step under the plan is anything but a step of one device."""
    return plan.world > 1 or plan.microbatches > 1 or plan.recompute != "none" or plan.zero > 0 or plan.compile


class _Proof:
    """One proof, in two parts: before the plan is applied, and after it. Every rank takes part in both."""

    def __init__(self, plan: Plan, job: TrainingSetup, level: str, options: dict[str, Any]) -> None:
        self._plan = plan
        self._job = job
        self._level = level
        self._options = options
        self._dim = options.get("batch_dim", 0)
        self._comm: Communicator = world.world() if world.is_initialized() else world.init()
        self._samples = 0  # of the batch, that are used
        self._is_quick = False  # whether a step on one device takes next to no time
        self._dtype = torch.float32  # in which it was proved
        self._plain: FingerprintRecord | None = None  # on rank 0
        self._kept: nn.Module | None = None  # of rank 0, where the first batch is not known yet
        self._reduced: nn.Module | None = None
        self._blocks = ""  # how many it has
        self._obstacle = ""  # why nothing can be proved
        self.make: Callable[[], nn.Module] | None = None  # builds the model once more
        self.seconds_to_apply = 0.0  # that the plan took, which a proof in float64 applies again
        self._seconds = 0.0

    # ---- before the plan is applied --------------------------------------------------------------------------------

    def begin(self, deferred: DeferredModel, example: tuple[Any, Any] | None) -> None:
        """Take the step of one device, or keep what it takes."""
        started = time.perf_counter()
        self._obstacle = obstacle_in(deferred.model)
        is_large = not self._obstacle and self._level == "auto" and not fits(deferred.model)
        if any(self._comm.all_gather_object(is_large, only_data=True)):
            self._reduced, self._blocks = reduced_model(deferred, self._plan)
            if self._reduced is None:
                self._obstacle = (
                    "the model is too large for a step on one device, and has no repeated blocks to leave out"
                )
        elif not self._obstacle:
            is_small = example is not None and _is_small(deferred.model)
            self.make = (self.make or _copies_of(deferred.model)) if is_small else None
            failure = self._begin_on_rank_0(deferred, example) if self._comm.rank == 0 else None
            self._agree(failure)
        self._seconds += time.perf_counter() - started

    def _begin_on_rank_0(self, deferred: DeferredModel, example: tuple[Any, Any] | None) -> Exception | None:
        try:
            with alone():
                if example is None:
                    self._kept = deferred.rebuilt("").model if deferred.is_deferred else deep_copy(deferred.model)
                else:
                    self._take_plain_step(
                        deferred.rebuilt("").model if deferred.is_deferred else deferred.model, example
                    )
        except torch.OutOfMemoryError:
            self._obstacle = "a step of the full model does not fit the memory of one device"
        except Exception as error:
            if example is None:
                self._obstacle = f"the model cannot be copied ({type(error).__name__}: {error}); pass example="
            else:
                return error
        return None

    def _agree(self, failure: Exception | None) -> None:
        """All ranks go on alike: with the samples and the obstacle of rank 0, or with its error."""
        sentence = ""
        if failure is not None:
            sentence = str(failure)
            if not isinstance(failure, UsageError):
                sentence = f"one device fails on the first batch, without any plan: {type(failure).__name__}: {failure}"
        mine = (self._samples, self._is_quick, self._obstacle, sentence)
        self._samples, self._is_quick, self._obstacle, sentence = self._comm.broadcast_object(mine, only_data=True)
        if sentence:
            raise UsageError(sentence) from failure

    def _take_plain_step(self, model: nn.Module, batch: tuple[Any, Any]) -> None:
        """On as many samples as take little time: a few first, to see how long they take."""
        samples = first_batch_size(batch, self._dim)
        parts = self._plan.dp * self._plan.ep * self._plan.microbatches
        few = samples if self._level == "full" else min(samples, 2 * parts)
        started = time.perf_counter()
        rounded = rounded_step(model, self._job, first_samples(batch, few, self._dim))
        seconds = (time.perf_counter() - started) * samples / max(few, 1)
        self._samples = (
            samples if seconds < _QUICK else max(few, min(samples, int(samples * _STEPS / self._plan.world)))
        )
        some = first_samples(batch, self._samples, self._dim)
        if self._samples > few:
            started = time.perf_counter()
            rounded = rounded_step(model, self._job, some)
            seconds = (time.perf_counter() - started) * samples / self._samples
        self._is_quick = seconds < _VERY_QUICK
        self._plain = plain_step(model, self._job, some, rounded)

    # ---- under the plan --------------------------------------------------------------------------------------------

    def end_on(self, trainer: Trainer, batch: Any) -> None:
        """For a trainer that was made without an example: its first batch is one."""
        started = time.perf_counter()
        if isinstance(batch, Share):
            batch = full_batch_of(
                trainer.mesh.comm(*DATA).all_gather_object(batch, only_data=is_plain(batch)), self._dim
            )
        if self._reduced is None and not self._obstacle:
            self._follow(trainer)
            failure = None
            if self._comm.rank == 0:
                assert self._kept is not None
                try:
                    with alone():
                        self._take_plain_step(self._kept, batch)
                except Exception as error:
                    failure = error
            self._kept = None
            self._agree(failure)
        self._seconds += time.perf_counter() - started
        self.end(trainer, batch)

    def _follow(self, trainer: Trainer) -> None:
        """A trainer that goes on from a state that was loaded is compared with a step from that state."""
        if not trainer.steps:
            return
        self._job = replace(self._job, step=trainer.steps)
        values = full_tensors_in(trainer.model, dict(trainer.optimized()), trainer.mesh)
        if self._kept is not None:
            self._kept.load_state_dict(values, strict=False)

    def end(self, trainer: Trainer, batch: tuple[Any, Any]) -> None:
        """Take the step under the plan and compare; PlanMismatch on every rank where it is not that of one device."""
        started = time.perf_counter()
        subject = "your model"
        if self._reduced is not None:
            with generators_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer_of_reduced, subject = self._with_reduced(batch), f"a reduced model with {self._blocks}"
                found = [] if self._obstacle else self._compared(trainer_of_reduced, batch)
        else:
            found = [] if self._obstacle else self._compared(trainer, batch)
            found = found and self._in_float64(trainer, batch, found)
        self._seconds += time.perf_counter() - started
        trainer.proof = self._report(found, subject)
        if self._comm.rank == 0:
            _log.info(trainer.proof)
            if trainer.coverage:
                _log.info(trainer.coverage)
            if self._obstacle:
                warnings.warn(trainer.proof, stacklevel=4)

    def _with_reduced(self, batch: tuple[Any, Any]) -> Trainer:
        model, self._reduced = self._reduced, None
        assert model is not None
        return apply.parallelize(
            model,
            self._plan,
            loss=self._job.loss,
            optimizer=self._job.optimizer,
            example=batch,
            **self._options,
            on_ready=lambda deferred: self._agree(
                self._begin_on_rank_0(deferred, batch) if self._comm.rank == 0 else None
            ),
        )

    def _compared(self, trainer: Trainer, batch: tuple[Any, Any]) -> list[Deviation]:
        mine = None if self._plain is None else replace(self._plain, activations={})
        plain = self._comm.broadcast_object(mine, only_data=True)
        self._dtype = plain.dtype
        some: Any = self._some_of(trainer, batch)
        some = share(some, *trainer.part, self._dim) if trainer.batch == "local" else some
        planned = planned_step(trainer, some, plain)
        own = differences(plain, planned, has_history=trainer.steps > 0)
        found = farthest(self._comm.all_gather_object(own, only_data=True))
        found.append(replica_difference(self._comm, planned))
        if any(each.is_fault for each in found):
            raise PlanMismatch(self._diagnosis(plain, planned, found))
        return found

    def _some_of(self, trainer: Trainer, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """The samples that are used; of ranks that have samples of their own, all take part in a step on rank 0's."""
        batch = self._comm.broadcast_object(batch, only_data=is_plain(batch)) if trainer.batch == "local" else batch
        return first_samples(batch, self._samples, self._dim)

    def _in_float64(self, trainer: Trainer, batch: tuple[Any, Any], found: list[Deviation]) -> list[Deviation]:
        """For a small model, the same once more on copies of it, where rounding hides nothing."""
        if self.make is None or self._dtype != torch.float32 or trainer.steps:
            return found
        if not self._comm.broadcast_object(self._is_quick and self.seconds_to_apply < _QUICK, only_data=True):
            return found
        some, make = self._some_of(trainer, batch), self.make

        def varied() -> nn.Module:
            model = make()
            vary_constants(model, constants_of(model))
            return model

        task = Task(
            varied, self._job.loss, self._job.optimizer, lambda step: some, self._options["rules"], self._job.clip
        )
        try:
            with generators_kept(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of the plan were given for the user's own model
                verdict = verify_here(self._comm, task, self._plan.but(compile=False), steps=2)
        except UnisonoError:
            return found  # for example an operation without float64: what is proved in float32 stands
        worst = {each.kind: each for each in verdict.worst}
        if any(not each.deviation <= _FAULT_IN_FLOAT64 for each in verdict.worst):
            most = max(verdict.worst, key=lambda each: each.deviation)
            faults = f"{most.kind} in float64, {most.name} is off by {most.deviation:.2g}"
            raise PlanMismatch(self._sentence(faults, verdict.first_divergence, verdict.guess))
        self._dtype = torch.float64
        return [Deviation("gradient", worst["gradients"].name, worst["gradients"].deviation, _FAULT_IN_FLOAT64)]

    def _diagnosis(self, plain: FingerprintRecord, planned: FingerprintRecord, found: list[Deviation]) -> str:
        """What differs, where it begins and what it looks like; every rank calls it."""
        plain.activations = self._comm.broadcast_object({} if self._plain is None else self._plain.activations)
        limit = 10 * TOLERANCE[planned.dtype]
        activations = (plain.activations, planned.activations)
        where = find_first_divergence(self._comm, self._plan, *activations, limit, (plain, planned))
        looks = self._comm.broadcast_object(guess_fault(self._plan, plain, planned), only_data=True)
        faults = "; ".join(_shown(each) for each in found if each.is_fault)
        return self._sentence(faults, where, looks)

    def _sentence(self, faults: str, where: str, looks: str) -> str:
        return (
            f"plan {self._plan} does not give the result of one device on your model: {faults}. First divergence: "
            f"{where}{f'. {looks}' if looks else ''}. Nothing was trained or saved; use another plan, or "
            'check="off" to train all the same'
        )

    def _report(self, found: list[Deviation], subject: str) -> str:
        if self._obstacle:
            return f"plan {self._plan} not proved: {self._obstacle}"
        worst = max(each.deviation for each in found if each.kind == "gradient")
        dtype = str(self._dtype).removeprefix("torch.")
        seconds = format_seconds(self._seconds, "s", 1)
        return f"plan {self._plan} proved on {subject}: worst gradient {worst:.0e} ({dtype}), {seconds}"


def _shown(difference: Deviation) -> str:
    what = {"loss": "the loss is", "gradient": "the gradient of", "update": "the update of", "buffer": "buffer"}
    name = f" {difference.name} is" if difference.name else ""
    return f"{what.get(difference.kind, difference.kind)}{name} off by {difference.deviation:.2g}"


# ---- what can be proved ----------------------------------------------------------------------------------------------


def obstacle_in(model: nn.Module) -> str:
    """Why one device cannot run the model alone; empty where it can."""
    for name, parameter in model.named_parameters():
        if layout_of(parameter).splits or isinstance(parameter, DTensor):
            return f"{name} is sharded already, so that one device does not have it"
    for name, module in model.named_modules():
        for value in vars(module).values():
            comm = value.comm if isinstance(value, Region) else value
            if isinstance(comm, Communicator) and comm.size > 1:
                return f"{name or 'the model'} ({type(module).__name__}) communicates by itself"
            if isinstance(value, dist.ProcessGroup) and value.size() > 1:
                return f"{name or 'the model'} ({type(module).__name__}) communicates by itself"
    return ""


def fits(model: nn.Module) -> bool:
    """Whether one device has the memory and the time for a step of the full model."""
    parameters = list(model.parameters())
    elements = sum(parameter.numel() for parameter in parameters)
    needed = _COPIES * sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available()):
        return needed < _SHARE_OF_MEMORY * torch.cuda.mem_get_info()[0]
    return elements <= _MOST_ON_CPU and needed < _SHARE_OF_MEMORY * _available_memory()


def _is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) <= _SMALL


def _copies_of(model: nn.Module) -> Callable[[], nn.Module] | None:
    """A function that builds the model as it is now; None where it cannot be copied."""
    try:
        kept = deep_copy(model)
    except Exception:
        return None
    return lambda: deep_copy(kept)


def _available_memory() -> float:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2


# ---- a model with fewer blocks ---------------------------------------------------------------------------------------


_LEAST = 2  # blocks: one that follows another of its kind


def reduced_model(deferred: DeferredModel, plan: Plan) -> tuple[nn.Module | None, str]:
    """A copy with fewer blocks, in memory of its own, and how many they are; None where none can be left out.

    Parameters of a model that has no values yet are drawn at random, the same on every rank.
    """
    model = deferred.model
    try:
        blocks = find_blocks(model)
    except UsageError:
        return None, ""
    count = _kept([_kind(block) for block in blocks.modules], schedule_of(plan).stages if plan.pp > 1 else 1)
    if blocks.names or count >= len(blocks.modules):
        return None, ""
    holder = model.get_submodule(blocks.path)._modules
    removed = {key: holder.pop(key) for key in list(holder)[count:]}
    try:
        short = deep_copy(model, _values(model, deferred) if deferred.is_deferred else None)
    finally:
        holder.update(removed)
    _count_blocks_anew(short, len(blocks.modules), count)
    return short, f"{count} of its {len(blocks.modules)} blocks"


def _kept(kinds: list[Any], stages: int) -> int:
    """The length of the shortest prefix with all kinds of blocks, and one for each stage."""
    first = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
    return max(*first.values(), _LEAST - 1, stages - 1) + 1


def _kind(block: nn.Module) -> tuple[Any, ...]:
    return type(block), str(block), tuple(tuple(parameter.shape) for parameter in block.parameters())


def _values(model: nn.Module, deferred: DeferredModel) -> dict[int, torch.Tensor]:
    """For a copy, by the ids of the tensors that they replace: buffers as they would be, parameters at random."""
    generator = torch.Generator().manual_seed(0)
    values: dict[int, torch.Tensor] = {}
    for name, tensor in tensors_in(model):
        if not tensor.is_meta or id(tensor) in values:
            continue
        if isinstance(tensor, nn.Parameter):
            device = deferred.device(name)
            drawn = torch.randn(tensor.shape, generator=generator) * (0.02 if tensor.dim() > 1 else 0.1)
            drawn = drawn + 1 if tensor.dim() == 1 and name.endswith("weight") else drawn
            values[id(tensor)] = nn.Parameter(drawn.to(device, tensor.dtype), tensor.requires_grad)
        else:
            values[id(tensor)] = deferred.value(name)
    return values


def _count_blocks_anew(model: nn.Module, before: int, count: int) -> None:
    """Models that count their blocks keep the number in a configuration, which the copy has for itself."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if not isinstance(config, dict) and getattr(config, name, None) == before:
                setattr(config, name, count)
