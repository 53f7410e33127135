"""One training step in a few numbers a tensor: on one device, and under a plan.

The fingerprint of a tensor is its norm and its projections on a few random sign vectors, drawn from the tensor's name.
Two tensors that differ by eps of their size have fingerprints that differ by about eps of the norm, wherever they
differ; and fingerprints take no memory, so the step of one device can be kept until the plan's step has been taken.

    plain = plain_step(model, job, batch, rounded_step(model, job, batch))     # one device, the unsharded model
    planned = planned_step(trainer, batch, plain.rounding)                     # every rank calls it
    differences(plain, planned)                         # the worst deviation of each kind

Both steps leave the model as it was (`rewind`).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.comm.communicator import Communicator
from unisono.comm.signatures.records import plain_record
from unisono.mesh.named_groups import NamedParameters
from unisono.mesh.random.state import RandomState
from unisono.parallel.expert.expert import collect_aux
from unisono.parallel.float8 import in_float8
from unisono.parallel.full_state import full_shape
from unisono.parallel.inputs import call, cloned
from unisono.parallel.layout import full_tensors_of, layout_of, local_of
from unisono.parallel.precision import FULL, Precision, autocast
from unisono.parallel.trainer import Trainer, takes_closure
from unisono.verify.rewind import ModelSnapshot, TrainerSnapshot, generators_kept
from unisono.verify.training_record import (
    ActivationRecorder,
    Tensors,
    TrainingRecord,
    activation_recorder,
    merged_over_stages,
    settings_of,
    with_gradients,
)

_PROJECTIONS = 4
_COLUMNS, _ROWS = 1024, 4096  # of a tensor's elements that are read at once
_MOST_ACTIVATIONS = 2**26  # bytes of activations that are kept, to find the first module that differs
# Deviations of what is computed in each dtype that are still rounding, relative to a tensor's norm.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}
_LOSS_TOLERANCE = TOLERANCE | {torch.bfloat16: 1e-2, torch.float16: 2e-3}
_NEGLIGIBLE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.05, torch.float16: 0.05}
# Of an update, which Adam makes of the gradient's signs: rounding decides the sign of the smallest.
_UPDATE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 0.1, torch.float16: 0.1}
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6}  # gradients this much smaller than the largest are nothing else
_SAFETY = 30.0  # times the deviation that one rounding of every parameter causes


@dataclass(frozen=True)
class TrainingSetup:
    """What is trained, but for the model and its data."""

    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], Optimizer]
    clip: float | None = None
    seed: int = 0
    precision: Precision = FULL
    step: int = 0  # which one it is: random numbers depend on it


@plain_record
@dataclass
class FingerprintRecord(TrainingRecord):
    """A record of one training step that holds fingerprints. Its `parameters` are their updates, instead of values."""

    replicas: Tensors = field(default_factory=dict)  # parameters and buffers after the step, as this rank holds them
    noise: dict[str, float] = field(default_factory=dict)  # deviations that rounding the parameters once would cause
    constants: dict[str, float] = field(default_factory=dict)  # see `constants_of`
    rounding: float = 0.0  # gradients of single elements that are no larger do not reach the optimizer
    dtype: torch.dtype = torch.float32  # in which it was computed


@plain_record
@dataclass(frozen=True)
class Deviation:
    kind: str  # loss, gradient, update, buffer, replica
    name: str
    deviation: float
    allowed: float

    @property
    def is_fault(self) -> bool:
        return not self.deviation <= self.allowed

    @property
    def excess(self) -> float:
        """The deviation beside what is allowed."""
        return math.inf if math.isnan(self.deviation) else self.deviation / self.allowed


def fingerprint(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[norm, projections...] in float64. Linear in the tensor, but for the norm.

    The elements are viewed as a matrix X of _COLUMNS columns; a projection is r X c, with random signs r that depend
    on the name and c that do not: the signs of all elements take no memory, and X is read once.
    """
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    rows = -(-len(flat) // _COLUMNS)
    signs = _signs((rows, _PROJECTIONS), zlib.crc32(name.encode())).to(flat.device)
    columns = _signs((_COLUMNS, _PROJECTIONS), 0).to(flat.device)
    found = torch.zeros(1 + _PROJECTIONS, dtype=torch.float64, device=flat.device)
    for begin in range(0, rows, _ROWS):
        values = flat[begin * _COLUMNS : (begin + _ROWS) * _COLUMNS].double()
        if len(values) % _COLUMNS:
            values = torch.nn.functional.pad(values, (0, -len(values) % _COLUMNS))
        values = values.view(-1, _COLUMNS)
        found[0] += values.square().sum()
        found[1:] += (signs[begin : begin + _ROWS] * (values @ columns)).sum(0)
    found[0].sqrt_()
    return found.cpu()


def _signs(shape: tuple[int, int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, shape, generator=generator).double() * 2 - 1


def _fingerprints(named: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: fingerprint(name, tensor) for name, tensor in named}


# ---- on one device -------------------------------------------------------------------------------------------------


def computed_in(model: nn.Module, precision: Precision) -> torch.dtype:
    """The dtype in which most of a model is computed."""
    if precision.dtype is not None:
        return precision.dtype
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.dtype in TOLERANCE]
    complexes = [parameter.dtype for parameter in model.parameters() if parameter.is_complex()]
    found = dtypes or [torch.float64 if dtype == torch.complex128 else torch.float32 for dtype in complexes]
    return max(set(found), key=found.count) if found else torch.float32


def rounded_step(model: nn.Module, job: TrainingSetup, batch: tuple[Any, Any]) -> FingerprintRecord:
    """Loss, gradients and buffers after every parameter was rounded again; the model is left as it was.

    A model that magnifies rounding (a norm over almost equal values, a chaotic recurrence) cannot be compared more
    closely than these deviate from the exact ones.
    """
    step = FingerprintRecord(dtype=computed_in(model, job.precision))
    state = ModelSnapshot(model)
    with generators_kept():
        try:
            vary_constants(model, constants_of(model))
            _round_anew(model, step.dtype)
            _evaluated(model, job, batch, step)
            step.gradients = [_fingerprints(_gradients(model))]
            step.buffers = _fingerprints(model.named_buffers())
        finally:
            state.restore()
    return step


def _noise(exact: FingerprintRecord, rounded: FingerprintRecord) -> dict[str, float]:
    """By tensor, relative to its norm."""
    gradients, others = exact.gradients[0], rounded.gradients[0]
    floor = _NEGLIGIBLE[exact.dtype] * _largest(gradients)
    noise = {name: _deviation(value, others.get(name, value), floor) for name, value in gradients.items()}
    noise |= {name: _deviation(value, rounded.buffers[name], 0.0) for name, value in exact.buffers.items()}
    noise["loss"] = abs(exact.losses[0] - rounded.losses[0]) / max(abs(exact.losses[0]), 1e-300)
    return {name: value for name, value in noise.items() if value == value}


@torch.no_grad()
def _round_anew(model: nn.Module, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps / 2
    for number, parameter in enumerate(model.parameters()):
        if parameter.is_floating_point():
            generator = torch.Generator(parameter.device).manual_seed(number)
            drawn = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            parameter.mul_(torch.where(drawn < 0.5, 1 - eps, 1 + eps).to(parameter.dtype))


def constants_of(model: nn.Module) -> dict[str, float]:
    """Trained parameters whose elements are all equal, with their value.

    Biases and the last layers of residual branches begin as zeros, norms as ones. That hides faults from a first step:
    a bias that every rank adds is 0 all the same, and nothing before a layer of zeros has a gradient. So the step that
    is compared begins from other values of these.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {
        name: float(parameter.detach().flatten()[0])
        for name, parameter in model.named_parameters()
        if len(names[id(parameter)]) == 1 and parameter.requires_grad and _is_constant(parameter.detach())
    }


def _is_constant(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or not tensor.is_floating_point() or tensor.is_sparse:
        return False
    flat = tensor.flatten()
    if flat[0] != flat[-1] or (len(flat) == 1 and flat[0] != 0):  # a single number is a scale, as of logits, or zero
        return False
    return bool((flat == flat[0]).all())


def _varied(name: str, value: float, shape: torch.Size) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return value + max(abs(value), 0.2) * (torch.rand(shape, generator=generator, dtype=torch.float32) - 0.5) / 5


@torch.no_grad()
def vary_constants(model: nn.Module, constants: dict[str, float]) -> list[nn.Parameter]:
    """Give parameters random elements near their constant value; those that were changed."""
    changed = [parameter for name, parameter in model.named_parameters() if name in constants]
    for name, parameter in model.named_parameters():
        if name in constants:
            parameter.copy_(_varied(name, constants[name], parameter.shape))
    return changed


def plain_step(
    model: nn.Module, job: TrainingSetup, batch: tuple[Any, Any], rounded: FingerprintRecord
) -> FingerprintRecord:
    """The fingerprints of one step of the unsharded model on the full batch; the model is left as it was."""
    step = FingerprintRecord(dtype=computed_in(model, job.precision), constants=constants_of(model))
    state = ModelSnapshot(model)
    with generators_kept():
        try:
            state.begin_from(vary_constants(model, step.constants))
            _take_plain_step(model, job, batch, step, state)
        finally:
            state.restore()
    step.noise = _noise(step, rounded)
    return step


def _take_plain_step(
    model: nn.Module, job: TrainingSetup, batch: tuple[Any, Any], step: FingerprintRecord, state: ModelSnapshot
) -> None:
    optimizer = job.optimizer(NamedParameters.of(model))
    masters = job.precision.update_on_one_device(optimizer, model, lambda: (job.seed, job.step))
    begun = {name: copy.detach().clone() for name, copy in masters.copies.items()}
    named = {**dict(model.named_parameters()), **masters.copies}
    step.settings = settings_of(optimizer)
    if takes_closure(optimizer):
        optimizer.step(partial(_evaluated_for_closure, model, job, batch, step))  # type: ignore[arg-type]
        del step.losses[1:]
        step.gradients = [_fingerprints(_gradients(model))]
    else:
        _evaluated(model, job, batch, step)
        step.gradients = [_fingerprints(_gradients(model))]
        step.rounding = _rounding(step.dtype, (gradient for _, gradient in _gradients(model)))
        masters.take_gradients()
        _drop_rounding(step.rounding, named.values())
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(named.values(), job.clip)
        optimizer.step()
    values = {name: begun[name] if name in begun else state.value(each) for name, each in named.items()}
    step.parameters = _fingerprints((name, each.detach() - values[name]) for name, each in named.items())
    step.buffers = _fingerprints(model.named_buffers())


def _evaluated_for_closure(
    model: nn.Module, job: TrainingSetup, batch: tuple[Any, Any], step: FingerprintRecord
) -> torch.Tensor:
    loss = _evaluated(model, job, batch, step)
    if job.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
    return loss


def _evaluated(model: nn.Module, job: TrainingSetup, batch: tuple[Any, Any], step: FingerprintRecord) -> torch.Tensor:
    """Forward and backward with the random numbers of step 0."""
    inputs, targets = cloned(batch)
    random = RandomState(job.seed, job.step)
    random.name_modules(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with random, _activations_of(model, step):
        float8 = job.precision.float8(model).chosen
        with autocast(job.precision.dtype, device), in_float8(model, float8, job.precision.is_emulated):
            loss = job.loss(call(model, inputs), targets)
            aux = collect_aux(model)
            loss = loss if aux is None else loss + aux
        model.zero_grad()
        scale = job.precision.init_scale if job.precision.dtype == torch.float16 else 1.0
        (loss * scale).backward()
    for parameter in model.parameters() if scale != 1.0 else ():
        if parameter.grad is not None:
            parameter.grad /= scale
    step.losses.append(float(loss.detach()))
    return loss.detach()


@contextlib.contextmanager
def _activations_of(subject: nn.Module | Trainer, step: FingerprintRecord) -> Iterator[None]:
    """The outputs of the modules, as far as there is room for them."""
    found: Tensors | None = None if step.activations else {}
    watch = activation_recorder if isinstance(subject, Trainer) else ActivationRecorder
    with watch(subject, found, _MOST_ACTIVATIONS):  # type: ignore[arg-type]
        yield
    step.activations = found or step.activations


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def _rounding(dtype: torch.dtype, gradients: Iterable[torch.Tensor]) -> float:
    largest = max((float(gradient.abs().max()) for gradient in gradients if gradient.numel()), default=0.0)
    return _ROUNDING.get(dtype, 0.0) * largest


def _drop_rounding(limit: float, parameters: Iterable[torch.Tensor]) -> None:
    """Adam moves an element as far for a gradient of rounding as for any other: such gradients are left out."""
    for parameter in parameters if limit else ():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.masked_fill_(parameter.grad.abs() <= limit, 0)


# ---- under the plan ------------------------------------------------------------------------------------------------


def planned_step(trainer: Trainer, batch: Any, plain: FingerprintRecord) -> FingerprintRecord:
    """The fingerprints of one step under the plan; every rank calls it, and the trainer is left as it was."""
    step = FingerprintRecord(dtype=computed_in(trainer.model, trainer.precision))
    state = TrainerSnapshot(trainer)
    with generators_kept():
        try:
            _vary_shards(trainer, plain.constants, state)
            _take_planned_step(trainer, cloned(batch), step, state.model, plain.rounding)
        finally:
            state.restore()
    return step


@torch.no_grad()
def _vary_shards(trainer: Trainer, constants: dict[str, float], state: TrainerSnapshot) -> None:
    """`vary_constants` where ranks hold shards; every rank calls it."""
    parameters, optimized = dict(trainer.model.named_parameters()), dict(trainer.optimized())
    for name, tensor in {**parameters, **optimized}.items():
        if name in constants:
            full = _varied(name, constants[name], full_shape(tensor))
            tensor.copy_(local_of(full, layout_of(tensor), trainer.mesh))
    trainer.replicas.publish()
    state.model.begin_from(each[name] for name in constants for each in (parameters, optimized) if name in each)


def _take_planned_step(
    trainer: Trainer, batch: Any, step: FingerprintRecord, before: ModelSnapshot, rounding: float
) -> None:
    trainer.zero_grad()
    step.settings = settings_of(trainer.optimizer)
    with _activations_of(trainer, step):
        if takes_closure(trainer.optimizer):
            step.losses.append(trainer.step(batch).item())
        else:
            step.losses.append(trainer.backward(batch).item())
    optimized = dict(trainer.optimized())
    known = with_gradients(trainer.mesh, optimized)
    gradients = {name: _gradient(tensor) for name, tensor in optimized.items() if name in known}
    step.gradients = [_global(trainer, gradients, optimized)]
    if not takes_closure(trainer.optimizer):
        _drop_rounding(rounding, optimized.values())
        trainer.update()
    changed = {**dict(trainer.model.named_parameters()), **optimized}
    updates = {name: tensor.detach() - before.value(tensor) for name, tensor in changed.items() if tensor in before}
    step.parameters = _global(trainer, updates, changed)
    step.buffers = merged_over_stages(trainer.mesh, _fingerprints(trainer.model.named_buffers()))
    held = {name: p for name, p in trainer.model.named_parameters() if p in before}  # not the shards of their owners
    step.replicas = _global(trainer, {name: p.detach() for name, p in held.items()}, held)
    step.replicas |= _fingerprints(trainer.model.named_buffers())


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad is None:
        return torch.zeros_like(tensor)
    return tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad


def _global(trainer: Trainer, local: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]) -> Tensors:
    """The fingerprints of global tensors, of which ranks hold shards by the owners' layouts."""
    names = list(local)
    found: Tensors = {}
    for begin in range(0, len(names), 16):
        some = names[begin : begin + 16]
        full_tensors = full_tensors_of(
            [local[name] for name in some], [layout_of(owners[name]) for name in some], trainer.mesh
        )
        found |= _fingerprints(zip(some, full_tensors, strict=True))
    return merged_over_stages(trainer.mesh, found)


# ---- compared ------------------------------------------------------------------------------------------------------


def differences(plain: FingerprintRecord, planned: FingerprintRecord, has_history: bool = False) -> list[Deviation]:
    """The worst deviation of each kind. has_history: the optimizer under the plan goes on from earlier steps, so that
    its update is none of a first step."""
    dtype = planned.dtype
    tolerance, negligible = TOLERANCE[dtype], _NEGLIGIBLE[dtype]
    loss = abs(plain.losses[0] - planned.losses[0]) / max(abs(plain.losses[0]), 1e-300)
    if plain.losses[0] == planned.losses[0] or (loss != loss and plain.losses[0] != plain.losses[0]):
        loss = 0.0
    found = [Deviation("loss", "", loss, _allowed(_LOSS_TOLERANCE[dtype], plain.noise.get("loss", 0.0)))]
    found.append(_worst("gradient", plain.gradients[0], planned.gradients[0], plain.noise, tolerance, negligible))
    is_rough = dtype not in _ROUNDING or max(plain.noise.values(), default=0.0) > tolerance
    updates = [
        {name: value[:1] if is_rough else value for name, value in s.parameters.items()} for s in (plain, planned)
    ]
    allowed = max(_UPDATE_TOLERANCE[dtype], 0.1 if is_rough else 0.0)
    if not has_history:
        found.append(_worst("update", updates[0], updates[1], {}, allowed, negligible))
    found.append(_worst("buffer", plain.buffers, planned.buffers, plain.noise, tolerance, 0.0))
    return found


def farthest(of_ranks: Sequence[Sequence[Deviation]]) -> list[Deviation]:
    """Of the differences that each rank finds, kind by kind, the worst: copies of a gradient may differ, of which only
    one is that of one device."""
    return [max(each, key=lambda found: found.excess) for each in zip(*of_ranks, strict=True)]


def replica_difference(comm: Communicator, planned: FingerprintRecord) -> Deviation:
    """The worst deviation of what any rank holds from what rank 0 holds of the same name; every rank calls it."""
    everyone = comm.all_gather_object(planned.replicas, only_data=True)
    worst = Deviation("replica", "", 0.0, TOLERANCE[planned.dtype])
    for rank, theirs in enumerate(everyone[1:], 1):
        both = [name for name in theirs if name in everyone[0]]
        for name in both:
            deviation = _deviation(everyone[0][name], theirs[name], 1e-12)
            if not deviation <= worst.deviation:
                worst = Deviation("replica", f"{name} on rank {rank}, beside rank 0", deviation, worst.allowed)
    return worst


def _worst(
    kind: str, plain: Tensors, planned: Tensors, noise: Mapping[str, float], tolerance: float, negligible: float
) -> Deviation:
    """Of all tensors of a kind, the one that exceeds what is allowed by most."""
    missing = sorted(set(plain) ^ set(planned))
    if missing:
        where = "under the plan" if missing[0] in plain else "on one device"
        return Deviation(kind, f"{missing[0]}, which has none {where}", float("inf"), tolerance)
    floor = negligible * _largest(plain)
    worst, excess = Deviation(kind, "", 0.0, tolerance), 0.0
    for name, value in plain.items():
        deviation, allowed = _deviation(value, planned[name], floor), _allowed(tolerance, noise.get(name, 0.0))
        if not deviation / allowed <= excess:
            worst, excess = Deviation(kind, name, deviation, allowed), deviation / allowed
    return worst


def _allowed(tolerance: float, noise: float) -> float:
    return max(tolerance, min(_SAFETY * noise, 0.5))


def _largest(prints: Tensors) -> float:
    return max((float(value[0]) for value in prints.values()), default=0.0)


def _deviation(plain: torch.Tensor, planned: torch.Tensor, floor: float) -> float:
    if torch.equal(plain, planned):
        return 0.0
    gap = float((plain - planned).abs().max()) / max(float(plain[0]), floor, 1e-300)
    return gap if gap == gap else (0.0 if _both_nan(plain, planned) else float("inf"))


def _both_nan(plain: torch.Tensor, planned: torch.Tensor) -> bool:
    return bool((plain.isfinite() == planned.isfinite()).all())
