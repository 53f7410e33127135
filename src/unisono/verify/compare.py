"""A verdict: how far a run under a plan is from the run on one device, kind by kind, and whether that is rounding."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.signatures.records import plain_record
from unisono.verify.float64 import wide
from unisono.verify.training_record import Tensors, TrainingRecord

# Halves: the dtype of what is computed; parameters, gradients and optimizer state are then float32. Rounding alone
# sends a ReLU, or a sign in Adam, to the other side now and then: so norms are compared, and less is proved.
HALF_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.2, "float16": 0.05}
LOSS_TOLERANCE = TOLERANCE | {"bfloat16": 1e-2, "float16": 2e-3}
KINDS = ("initial parameters", "loss", "gradients", "parameters", "buffers", "optimizer state")
_AFTER_AN_UPDATE = frozenset({"parameters", "buffers", "optimizer state"})
# A tensor this much smaller than the largest of its kind is zero but for rounding; its relative deviation has no
# meaning. In float32 that of a bias which BatchNorm cancels is 1e-7 of the largest: times the tolerance, this is 1e-6.
_NEGLIGIBLE = {"float64": 1e-5, "float32": 1e-2, "bfloat16": 0.05, "float16": 0.05}
# A gradient this much smaller than the largest (in units of the tolerance) is nothing but rounding: that of a key's
# bias, which softmax cancels, is one. What Adam makes of it, and of its parameter, is of no size of its own.
_NOISE = 1e-3
# Such a gradient also moves single elements, as of a bias of queries, keys and values in one. In float64 Adam's epsilon
# is larger than it, but not that of Adafactor. Again beside the largest gradient of all.
_NOISE_OF_ELEMENTS = {"float64": _NOISE * TOLERANCE["float64"], "float32": 1e-6}


# The size of rounding in sums of a few terms, relative to their result; how far beyond what it does to a job on one
# device a plan may be off, and up to which deviation it is asked at all: more where the first step agrees, as rounding
# grows from step to step (LayerNorm multiplies that of a padded token's zeros by 300).
ROUNDING = 4 * 2.0**-52
_AS_FAR = 10
_MOST_SENSITIVE = 1e-4
_MOST_SENSITIVE_LATER = 0.1


@plain_record
@dataclass(frozen=True)
class WorstDeviation:
    """The largest relative deviation among the tensors of one kind."""

    kind: str
    deviation: float
    name: str  # of the tensor
    compared: int  # tensors of this kind


@plain_record
@dataclass(frozen=True)
class Verdict:
    plan: str
    equivalent: bool
    worst: list[WorstDeviation] = field(default_factory=list)
    first_divergence: str = ""  # the first module in forward order whose activations differ
    guess: str = ""  # what kind of fault it looks like
    refusal: str = ""  # why the plan was refused, before it ran
    failure: str = ""  # how the run ended, where it neither was refused nor came to an end
    note: str = ""  # what was done for the proof that was not asked for
    coverage: str = ""  # how much of the model tp shards
    compilation: str = ""  # what was compiled
    first_step_agrees: bool = False  # its loss and gradients

    @property
    def ran(self) -> bool:
        return not self.refusal and not self.failure

    def as_json(self) -> dict[str, Any]:
        """JSON knows no infinity: a deviation without size, as of a tensor that is missing, is null there."""
        worst = [asdict(each) | {"deviation": _finite(each.deviation)} for each in self.worst]
        return asdict(self) | {"worst": worst}

    @classmethod
    def of_json(cls, reported: dict[str, Any]) -> Verdict:
        worst = [WorstDeviation(**each | {"deviation": _or_infinite(each["deviation"])}) for each in reported["worst"]]
        return cls(**reported | {"worst": worst})


def _finite(deviation: float) -> float | None:
    return deviation if math.isfinite(deviation) else None


def _or_infinite(deviation: float | None) -> float:
    return math.inf if deviation is None else deviation


def compared(plan: object, plain: TrainingRecord, planned: TrainingRecord, dtype: str) -> Verdict:
    """The verdict on a run, without the search for what went wrong."""
    noise = _driven_by_noise(plain, _NOISE * TOLERANCE[dtype])
    worst = [
        _worst("initial parameters", plain.initial, planned.initial, dtype, exact=True),
        _worst("loss", _by_step(plain.losses), _by_step(planned.losses), dtype),
        _worst("gradients", _gradients(plain), _gradients(planned), dtype),
        _worst("parameters", plain.parameters, _less_rounding(plain, planned, dtype), dtype, noise=noise),
        _worst("buffers", plain.buffers, planned.buffers, dtype, least=_largest(plain.parameters)),
        _worst("optimizer state", _state(plain), _state(planned), dtype, noise=noise),
    ]
    is_equivalent = all(each.deviation <= _allowed(each.kind, dtype) for each in worst)
    first = [
        _worst("loss", _by_step(plain.losses[:1]), _by_step(planned.losses[:1]), dtype),
        _worst("gradients", _gradients(plain, 1), _gradients(planned, 1), dtype),
    ]
    agrees = all(each.deviation <= _allowed(each.kind, dtype) for each in first)
    return Verdict(
        str(plan),
        is_equivalent,
        worst,
        note=_note(plain),
        coverage=planned.coverage,
        compilation=planned.compilation,
        first_step_agrees=agrees,
    )


def _note(plain: TrainingRecord) -> str:
    names = ", ".join(sorted(plain.replaced))
    return f"{names} has no float64 kernel: for the proof its single products are computed" if names else ""


def may_be_rounding(verdict: Verdict, dtype: str) -> bool:
    """Whether losses and gradients agree, and only what optimizers make of gradients differs: where those of a bias are
    rounding (BatchNorm takes it away again), Adam moves it all the same, and BatchNorm's running mean with it."""
    off = {each.kind for each in verdict.worst if each.deviation > _allowed(each.kind, dtype)}
    return dtype in _NOISE_OF_ELEMENTS and bool(off) and off <= _AFTER_AN_UPDATE


def rounding_of(plain: TrainingRecord, dtype: str) -> float:
    """The largest gradient of an element that is nothing but rounding."""
    return _NOISE_OF_ELEMENTS[dtype] * _largest(_gradients(plain))


def without_rounding(verdict: Verdict, quiet: Verdict) -> Verdict:
    """The verdict, with that on two runs in which gradients of rounding moved nothing for what follows an update."""
    later = [each for each in quiet.worst if each.kind in _AFTER_AN_UPDATE]
    earlier = [each for each in verdict.worst if each.kind not in _AFTER_AN_UPDATE]
    return replace(verdict, equivalent=quiet.equivalent, worst=[*earlier, *later])


def may_be_sensitive(verdict: Verdict, dtype: str) -> bool:
    """Whether all deviations are so small that a job which multiplies rounding, as L-BFGS does where it divides by the
    change of a gradient, could have them on one device too."""
    off = [each for each in verdict.worst if each.deviation > _allowed(each.kind, dtype)]
    return dtype == "float64" and bool(off) and all(each.deviation <= _most_sensitive(verdict) for each in off)


def _most_sensitive(verdict: Verdict) -> float:
    return _MOST_SENSITIVE_LATER if verdict.first_step_agrees else _MOST_SENSITIVE


def within_sensitivity(verdict: Verdict, plain: TrainingRecord, disturbed: TrainingRecord, dtype: str) -> Verdict:
    """The verdict, given a second run on one device in which rounding moved parameters and gradients."""
    moved = {each.kind: each.deviation for each in compared(verdict.plan, plain, disturbed, dtype).worst}
    allowed = {kind: max(_allowed(kind, dtype), _AS_FAR * moved.get(kind, 0.0)) for kind in KINDS}
    if max(moved.values()) > _most_sensitive(verdict) or any(
        each.deviation > allowed[each.kind] for each in verdict.worst
    ):
        return verdict
    farthest = max(moved.values())
    note = f"rounding alone moves this job on one device by {farthest:.0e}: the limit is {_AS_FAR} times that"
    if farthest > _MOST_SENSITIVE:
        note += f", and {TOLERANCE[dtype]:.0e} in the first step"
    return replace(verdict, equivalent=True, note="; ".join(filter(None, (verdict.note, note))))


def _allowed(kind: str, dtype: str) -> float:
    if kind == "initial parameters":
        return 0.0
    return (LOSS_TOLERANCE if kind == "loss" else TOLERANCE)[dtype]


def _by_step(numbers: list[float], what: str = "") -> Tensors:
    return {f"{what}step {step}": torch.tensor(number, dtype=torch.float64) for step, number in enumerate(numbers)}


def _state(record: TrainingRecord) -> Tensors:
    """The optimizer's, and the scale of the loss, which changes by factors of two: no tolerance hides that."""
    return {**record.optimizer, **_by_step(record.scales, "scale of the loss:after ")}


def _gradients(record: TrainingRecord, first: int | None = None) -> Tensors:
    """Of all steps, or of the first few."""
    steps = enumerate(record.gradients[:first])
    return {f"{name} (step {step})": gradient for step, named in steps for name, gradient in named.items()}


def _driven_by_noise(plain: TrainingRecord, limit: float) -> frozenset[str]:
    """The parameters whose gradients are rounding and nothing else, in every step."""
    scale = _largest(_gradients(plain))
    felt = {
        name for named in plain.gradients for name, gradient in named.items() if _largest_of(gradient) > limit * scale
    }
    return frozenset(set(plain.parameters) - felt)


def _less_rounding(plain: TrainingRecord, planned: TrainingRecord, dtype: str) -> Tensors:
    """The parameters under the plan, without what an optimizer such as Adam makes of rounding.

    It moves an element as far for a gradient of rounding as for any other. So where an element's gradient is nothing
    else in all steps, it may be anywhere within the longest way that an element has gone; in float64, where only some
    optimizers do that, that such an element has gone.
    """
    kept = dict(planned.parameters)
    if dtype not in _NOISE_OF_ELEMENTS:
        return kept
    ways = {
        name: value - plain.initial[name]
        for name, value in plain.parameters.items()
        if name in plain.initial and not _is_exact(value)
    }
    rounded = _moved_by_rounding(plain, planned, _NOISE_OF_ELEMENTS[dtype])
    if dtype == "float64":
        ways = {name: ways[name][where] for name, where in rounded.items() if name in ways}
    farthest = 2 * _largest(ways)
    for name, where in rounded.items():
        value = plain.parameters[name]
        is_near = (kept[name] - value).abs() <= farthest
        kept[name] = torch.where(where & is_near, value, kept[name])
    return kept


def _moved_by_rounding(plain: TrainingRecord, planned: TrainingRecord, limit: float) -> dict[str, torch.Tensor]:
    """Of each parameter, which elements have a gradient that is rounding in all steps; one that is 0 is none."""
    limit *= _largest(_gradients(plain))
    found = {}
    for name, value in plain.parameters.items():
        seen, met = _largest_by_element(plain, name), _largest_by_element(planned, name)
        if name in planned.parameters and value.shape == planned.parameters[name].shape == seen.shape == met.shape:
            found[name] = (seen <= limit) & (met <= limit) & (seen + met > 0)
    return found


def _largest_by_element(record: TrainingRecord, name: str) -> torch.Tensor:
    """Of a parameter's gradients in all steps; empty where it has none."""
    seen = [named[name].abs() for named in record.gradients if name in named]
    return torch.stack(seen).amax(0) if seen else torch.empty(0)


def _worst(
    kind: str,
    plain: Tensors,
    planned: Tensors,
    dtype: str,
    exact: bool = False,
    noise: frozenset[str] = frozenset(),
    least: float = 0.0,
) -> WorstDeviation:
    """least: the scale of tensors of this kind, where all of them are smaller: the mean of what a norm has centred is 0
    but for rounding."""
    missing = sorted(set(plain) ^ set(planned))
    if missing:
        where = "under the plan" if missing[0] in plain else "on one device"
        return WorstDeviation(kind, float("inf"), f"{missing[0]} is missing {where}", len(plain))
    scales: dict[str, float] = {}  # of an optimizer's states of each name, of other kinds altogether
    for key, reference in plain.items():
        scales[_family(key)] = max(scales.get(_family(key), least), _largest_of(reference))
    worst, name = 0.0, ""
    for key, reference in plain.items():
        if exact:
            equal = torch.equal(reference, planned[key])
            deviation = 0.0 if equal else max(_deviation(reference, planned[key], 0), 1e-300)
        else:
            of_noise = key.partition(":")[0] in noise  # optimizer states are called parameter:state
            floor = scales[_family(key)] * (1 if of_noise else _NEGLIGIBLE[dtype])
            deviation = _deviation(reference, planned[key], floor, of_norms=dtype in HALF_DTYPES)
        if deviation > worst:
            worst, name = deviation, key
    return WorstDeviation(kind, worst, name, len(plain))


def _family(key: str) -> str:
    return key.partition(":")[2]


def _largest(tensors: Tensors) -> float:
    return max((_largest_of(tensor) for tensor in tensors.values()), default=0.0)


def _largest_of(tensor: torch.Tensor) -> float:
    return float(wide(tensor).abs().max()) if tensor.numel() else 0.0


def _is_exact(tensor: torch.Tensor) -> bool:
    """Whether it holds booleans or integers, which no rounding can change."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def _deviation(reference: torch.Tensor, got: torch.Tensor, floor: float, of_norms: bool = False) -> float:
    """The largest difference beside the largest value; with `of_norms`, norm beside norm. Infinite where tensors of
    different kinds, or of booleans or integers, differ at all."""
    if reference.shape != got.shape or reference.is_complex() != got.is_complex():
        return float("inf")
    if not reference.numel():
        return 0.0
    if _is_exact(reference) or _is_exact(got):
        return 0.0 if reference.dtype == got.dtype and torch.equal(reference, got) else float("inf")
    reference, got = wide(reference), wide(got)
    difference = reference - got
    if not bool(difference.isfinite().all()):
        return 0.0 if torch.equal(reference, got) else float("inf")
    if of_norms:
        return float(difference.norm() / max(float(reference.norm()), floor * reference.numel() ** 0.5, 1e-300))
    return float(difference.abs().max() / max(float(reference.abs().max()), floor, 1e-300))


# ---- agreement of ranks ----------------------------------------------------------------------------------------------


def with_agreement(comm: Communicator, planned: TrainingRecord, verdict: Verdict, tolerance: float) -> Verdict:
    """The verdict of rank 0, with the tensors that differ between ranks. All ranks call it."""
    worst = list(verdict.worst)
    for index, each in enumerate(worst):
        if each.kind not in ("parameters", "buffers"):
            continue
        deviation, name = _farthest(comm, planned.parameters if each.kind == "parameters" else planned.buffers)
        if deviation > max(each.deviation, tolerance):
            worst[index] = replace(each, deviation=deviation, name=name)
    return replace(verdict, worst=worst, equivalent=verdict.equivalent and worst == verdict.worst)


def _farthest(comm: Communicator, tensors: Tensors) -> tuple[float, str]:
    """The largest deviation of any rank's sums from rank 0's, and of what."""
    if not tensors:
        return 0.0, ""
    mine = torch.stack([_sums(tensor) for tensor in tensors.values()]).to(comm.device)
    everyone = torch.stack(comm.all_gather(mine)).cpu()
    gaps = (everyone - everyone[0]).abs().amax(-1).nan_to_num(nan=torch.inf)  # rank, tensor
    sizes = torch.tensor([max(float(wide(tensor).norm()), 1e-300) for tensor in tensors.values()])
    apart = gaps / sizes
    rank, index = divmod(int(apart.argmax()), len(tensors))
    return float(apart.max()), f"{list(tensors)[index]} (rank {rank} beside rank 0)"


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.view_as_real(wide(tensor)).flatten() if tensor.is_complex() else wide(tensor).flatten()
    return torch.stack([flat.sum(), (flat * torch.arange(len(flat), dtype=torch.float64).cos()).sum()])
