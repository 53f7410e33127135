"""A record of a few training steps: everything that must not depend on the plan.

`plain_record` makes it on one device, with nothing of unisono but the random numbers; `planned_record` makes it under
a plan, from the shards of all ranks. Tensors are on the CPU, in full, by the parameters' names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from unisono.comm.rendezvous.solo import alone
from unisono.mesh.deferred_init.seeded_init import build, in_dtype
from unisono.mesh.mesh import Mesh
from unisono.mesh.named_groups import NamedParameters
from unisono.mesh.random.state import RandomState
from unisono.parallel.apply import deferred_for, parallelize
from unisono.parallel.compile.regions import modules_in_regions
from unisono.parallel.expert.expert import collect_aux
from unisono.parallel.float8 import in_float8
from unisono.parallel.full_state import full_optimizer_state
from unisono.parallel.inputs import call
from unisono.parallel.layout import full_tensors_of, layout_of
from unisono.parallel.pipeline.off_stage import is_off_stage
from unisono.parallel.precision import Precision, autocast
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer, takes_closure
from unisono.plan.plan import Plan
from unisono.torch_compat import is_functorch_wrapped
from unisono.verify.float64 import Float64Mode

Tensors = dict[str, torch.Tensor]


@dataclass
class TrainingRecord:
    initial: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)  # a step each, before clipping
    scales: list[float] = field(default_factory=list)  # of the loss, after each step
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)
    activations: Tensors = field(default_factory=dict)  # of the first step: by module, in forward order
    replaced: set[str] = field(default_factory=set)  # kernels without float64, for the proof
    settings: dict[str, float] = field(default_factory=dict)  # the optimizer's: lr, weight_decay, ...
    coverage: str = ""  # how much of the model tp shards
    compilation: str = ""  # what was compiled


def batch_of(task: Task, step: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """The step's global batch, its floating-point tensors in `dtype`, complex ones in that precision."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_complex():
            return leaf.to(dtype.to_complex())
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, task.batch(step))


@alone()
def plain_record(
    task: Task,
    steps: int,
    dtype: torch.dtype,
    seed: int = 0,
    precision: str | Precision = "fp32",
    rounding: float = 0.0,
    noise: float = 0.0,
) -> TrainingRecord:
    """One device, one process, the plain model on the full batch; in half precision as torch itself does it. A rank of
    a job may call it: the task then sees a world of one.

    rounding: gradients of elements that are no larger are recorded, but 0 for the optimizer. noise: of this size, it is
    added to parameters (relative to each element) and to gradients (relative to the largest element), as if sums were
    taken in another order."""
    precision = Precision.of(precision)
    model = in_dtype(build(task.model, seed), dtype)
    random = RandomState(seed)
    random.name_modules(model)
    optimizer = task.optimizer(NamedParameters.of(model))
    float8 = precision.float8(model).chosen
    masters = precision.update_on_one_device(optimizer, model, lambda: (seed, random.step))
    named = {**dict(model.named_parameters()), **masters.copies}  # what the optimizer updates
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=precision.init_scale,
        growth_interval=precision.growth_interval,
        enabled=precision.dtype == torch.float16,
    )
    record = TrainingRecord(initial=_copied(named.items()))

    def evaluated(step: int) -> torch.Tensor:
        inputs, targets = batch_of(task, step, dtype)
        random.step = step
        in_double = Float64Mode(dtype)
        _round(named.values(), noise, step)
        masters.publish()
        with in_double, random, ActivationRecorder(model, record.activations if step == 0 else None):
            with autocast(precision.dtype, torch.device("cpu")), in_float8(model, float8, precision.is_emulated):
                loss = task.loss(call(model, inputs), targets)
                aux = collect_aux(model)
                loss = loss if aux is None else loss + aux
            for parameter in (*model.parameters(), *named.values()):
                parameter.grad = None
            scaler.scale(loss).backward()
        masters.take_gradients()
        _disturb(named.values(), noise, step)
        record.replaced |= in_double.replaced
        return loss.detach()

    def clip() -> None:
        if task.clip is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), task.clip)

    def evaluated_and_clipped(step: int) -> torch.Tensor:
        loss = evaluated(step)
        clip()
        return loss

    for step in range(steps):
        if takes_closure(optimizer):
            record.losses.append(float(optimizer.step(partial(evaluated_and_clipped, step))))  # type: ignore[arg-type]
            record.gradients.append(_gradients(named.items()))
            continue
        record.losses.append(evaluated(step).item())
        scaler.unscale_(optimizer)
        record.gradients.append(_gradients(named.items()))
        leave_out(rounding, named.values())
        clip()
        scaler.step(optimizer)
        scaler.update()
        record.scales.append(scaler.get_scale())
    record.parameters = _copied(named.items())
    record.buffers = _copied(model.named_buffers())
    record.settings = settings_of(optimizer)
    state = {name: optimizer.state.get(parameter, {}) for name, parameter in named.items()}
    record.optimizer = flat_state(_trained(state, model))
    return record


def planned_record(
    task: Task,
    plan: Plan,
    steps: int,
    dtype: torch.dtype,
    seed: int = 0,
    prepare: Callable[[Trainer], None] | None = None,
    precision: str | Precision = "fp32",
    rounding: float = 0.0,
) -> TrainingRecord:
    """The same steps under the plan; every rank calls it and gets the full record. Activations are this rank's."""
    example = batch_of(task, 0, dtype)
    deferred = deferred_for(plan, task.model, seed, dtype)  # the user's own dtypes, so not within Float64Mode
    with Float64Mode(dtype):
        trainer = parallelize(
            deferred,
            plan,
            loss=task.loss,
            optimizer=task.optimizer,
            example=example,
            rules=task.rules,
            clip=task.clip,
            seed=seed,
            precision=precision,
            batch_dim=task.batch_dim,
        )
    return trainer_record(trainer, task, steps, dtype, prepare, rounding)


def trainer_record(
    trainer: Trainer,
    task: Task,
    steps: int,
    dtype: torch.dtype,
    prepare: Callable[[Trainer], None] | None = None,
    rounding: float = 0.0,
) -> TrainingRecord:
    """The steps of a trainer that has not taken any."""
    record = TrainingRecord(initial=_full(trainer, _parameters(trainer)), coverage=trainer.coverage)
    if prepare is not None:
        prepare(trainer)
    for step in range(steps):
        batch = batch_of(task, step, dtype)
        if takes_closure(trainer.optimizer):
            with Float64Mode(dtype):
                record.losses.append(trainer.step(batch).item())
            record.gradients.append(_full(trainer, dict(trainer.optimized()), of_gradients=True))
            continue
        trainer.zero_grad()
        with Float64Mode(dtype), activation_recorder(trainer, record.activations if step == 0 else None):
            record.losses.append(trainer.backward(batch).item())
        record.gradients.append(_full(trainer, dict(trainer.optimized()), of_gradients=True))
        leave_out(rounding, dict(trainer.optimized()).values())
        trainer.update()
        record.scales.append(1.0 if trainer.scaler is None else trainer.scaler.value)
    record.parameters = _full(trainer, _parameters(trainer))
    record.buffers = merged_over_stages(trainer.mesh, _copied(trainer.model.named_buffers()))
    state = full_optimizer_state(trainer.optimizer, trainer.optimized(), trainer.mesh)["state"]
    record.optimizer = merged_over_stages(trainer.mesh, flat_state(_trained(state, trainer.model)))
    record.settings = settings_of(trainer.optimizer)
    record.compilation = "" if trainer.compilation is None else str(trainer.compilation)
    return record


def leave_out(rounding: float, parameters: Iterable[torch.Tensor]) -> None:
    """Sets the elements of gradients to 0 that are no larger than rounding."""
    for parameter in parameters if rounding else ():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.masked_fill_(parameter.grad.abs() <= rounding, 0)


def _round(parameters: Iterable[torch.Tensor], noise: float, seed: int) -> None:
    """Moves every element by about one rounding, which BatchNorm over a few almost equal samples multiplies."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters if noise else ():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.mul_((1 + noise * drawn).to(parameter.dtype))


def _disturb(parameters: Iterable[torch.Tensor], noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters if noise else ():
        if parameter.grad is not None and not parameter.grad.is_sparse and parameter.grad.numel():
            drawn = torch.randn(parameter.grad.shape, generator=generator, dtype=torch.float64).to(parameter.grad)
            parameter.grad += noise * parameter.grad.abs().max() * drawn


def _parameters(trainer: Trainer) -> Tensors:
    """All of them: ZeRO optimizes no frozen ones, but has shards of the others."""
    return {**dict(trainer.model.named_parameters()), **dict(trainer.optimized())}


def _full(trainer: Trainer, named: Tensors, of_gradients: bool = False) -> Tensors:
    if of_gradients:
        known = with_gradients(trainer.mesh, named)
        named = {name: tensor for name, tensor in named.items() if name in known}
    held: Tensors = {}
    for name, tensor in named.items():
        local = tensor.grad if of_gradients else tensor
        held[name] = torch.zeros_like(tensor) if local is None else _dense(local) if of_gradients else local
    full_tensors = full_tensors_of(list(held.values()), [layout_of(named[name]) for name in held], trainer.mesh)
    return merged_over_stages(
        trainer.mesh, {name: full.detach().cpu().clone() for name, full in zip(held, full_tensors, strict=True)}
    )


def with_gradients(mesh: Mesh, named: Tensors) -> set[str]:
    """What any rank of the stage has a gradient for: one that owns nothing of a parameter has none."""
    here = {name for name, tensor in named.items() if tensor.grad is not None}
    comm = mesh.comm(*(axis for axis in mesh.names if axis != "pp"))
    return set().union(*comm.all_gather_object(here, only_data=True))


def merged_over_stages(mesh: Mesh, mine: Tensors) -> Tensors:
    """What all stages of the pipeline hold; of what several hold, this one's copy, so that ranks can compare theirs."""
    if mesh.size("pp") == 1:
        return mine
    merged: Tensors = {}
    for theirs in mesh.comm("pp").all_gather_object(mine, only_data=True):
        merged.update(theirs)
    return merged | mine  # in the order of all stages, on every rank


def _copied(named: Any) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def _gradients(named: Any) -> Tensors:
    return {name: _dense(p.grad).cpu().clone() for name, p in named if p.grad is not None}


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def _trained(state: dict[str, dict[str, Any]], model: nn.Module) -> dict[str, dict[str, Any]]:
    """Without frozen parameters: Adagrad makes states for them, which nothing reads, and ZeRO does not."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: each for name, each in state.items() if name not in frozen}


def flat_state(state: dict[str, dict[str, Any]]) -> Tensors:
    flat = {}
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor | int | float):
                flat[f"{name}:{key}"] = _dense(torch.as_tensor(value)).cpu().clone()
    return flat


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers that the optimizer was made with, where they are the same for all parameters."""
    groups = optimizer.param_groups
    numbers = {name: value for name, value in groups[0].items() if isinstance(value, int | float)} if groups else {}
    numbers = {name: value if type(value) in (bool, int) else float(value) for name, value in numbers.items()}
    return {name: value for name, value in numbers.items() if all(group.get(name) == value for group in groups)}


def activation_recorder(trainer: Trainer, into: Tensors | None, most: float = math.inf) -> ActivationRecorder:
    """As `ActivationRecorder`, of what this rank computes for the plan."""
    stages = [] if trainer.pipeline is None else list(trainer.pipeline.stages.values())
    since = stages[0].modules[0] if stages and not any(stage.is_first for stage in stages) else None
    return ActivationRecorder(trainer.model, into, most, since)


class ActivationRecorder:
    """While open, notes the first output of every module that runs, in the order they finish."""

    def __init__(
        self, model: nn.Module, into: Tensors | None, most: float = math.inf, since: nn.Module | None = None
    ) -> None:
        """most: bytes that may be kept. since: what runs before this module is of another stage of the pipeline, and
        computed of placeholders here."""
        self._model = model
        self._since = since
        self._off_stage: set[str] = set()
        self._into = into
        self._left = most
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        if self._into is not None and self._since is not None:
            self._hooks.append(self._since.register_forward_pre_hook(self._entered))
        if self._into is not None:
            compiled = modules_in_regions(self._model)
            for name, module in self._model.named_modules():
                if is_off_stage(module) or module in compiled:
                    continue  # its parameters are of another stage: nobody reads its output here; or no hook runs
                self._hooks.append(module.register_forward_hook(self._noting(name)))

    def _entered(self, *_: Any) -> None:
        self._since = None

    def _noting(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            into = self._into
            tensor = next((each for each in _tensors(output) if each.ndim), None)
            if self._since is not None:
                self._off_stage.add(name)
            if into is None or tensor is None or name in into or name in self._off_stage:
                return
            if is_functorch_wrapped(tensor):
                return  # in torch.vmap or torch.func.jvp, whose tensors end with it
            if tensor.nbytes <= self._left:
                self._left -= tensor.nbytes
                into[name] = tensor.detach().cpu().clone()

        return note

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and _is_number(leaf))


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
