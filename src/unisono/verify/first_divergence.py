"""Where two runs diverge first, and what that looks like: for a plan that is not equivalent.

Activations under a plan are shards of those on one device. Without knowing any strategy, a shard is compared with the
parts of the full tensor that it can be: samples of the data ranks, consecutive or zigzag tokens, a slice of the
features. Where all activations agree, the first of loss, gradients, update and buffers that does not is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unisono.amounts import ranks_in_words
from unisono.comm.communicator import Communicator
from unisono.comm.signatures.records import plain_record
from unisono.parallel.layout import Split
from unisono.plan.plan import AXES, COPIES, Plan
from unisono.verify.float64 import wide
from unisono.verify.training_record import TrainingRecord

Tensors = dict[str, torch.Tensor]
_EXACT = 1e-6  # relative: a factor this close to a count is that count


@plain_record
@dataclass(frozen=True)
class _Divergence:
    """The first on one rank."""

    order: int  # of the module, in forward order
    name: str
    shape: str
    deviation: float
    factor: float  # by which the full tensor is off; 0 where that is no one number


def find_first_divergence(
    comm: Communicator,
    plan: Plan,
    plain: Tensors,
    mine: Tensors,
    tolerance: float,
    records: tuple[TrainingRecord, TrainingRecord] | None = None,
) -> str:
    """The first module in forward order, over all ranks, whose output is no part of the plain model's.

    records: of the plain model and under the plan; they show what differs where no activation does.
    """
    found, compared = _first_on_this_rank(plan, comm.rank, plain, mine, tolerance)
    everyone: list[tuple[_Divergence | None, list[str]]]
    everyone = comm.all_gather_object((found, compared), only_data=True)
    diverging = [(each, rank) for rank, (each, _) in enumerate(everyone) if each is not None]
    if not diverging and records is None:
        return "activations agree, what follows does not"
    if not diverging:
        assert records is not None
        return f"activations agree{after_the_forward(comm, *records, tolerance)}"
    first, rank = min(diverging, key=lambda item: item[0].order)
    reported = f"{first.name or 'the model'} {first.shape} on rank {rank}: deviation {first.deviation:.2g}"
    return reported + _of_other_ranks(plan, first, everyone)


def _first_on_this_rank(
    plan: Plan, rank: int, plain: Tensors, mine: Tensors, tolerance: float
) -> tuple[_Divergence | None, list[str]]:
    """And the modules whose outputs agree, up to there."""
    coordinate = _coordinate(plan, rank)
    agreeing: list[str] = []
    for order, (name, full) in enumerate(plain.items()):
        closest = _closest(full, mine[name], plan, coordinate) if name in mine else None
        if closest is None:
            continue
        deviation, factor = closest
        if deviation > tolerance:
            shape = f"{str(full.dtype).removeprefix('torch.')}{list(mine[name].shape)}"
            return _Divergence(order, name, shape, deviation, factor), agreeing
        agreeing.append(name)
    return None, agreeing


def _of_other_ranks(plan: Plan, first: _Divergence, everyone: list[tuple[_Divergence | None, list[str]]]) -> str:
    """Whether others diverge there too: what only some do, or all by the number of ranks, depends on the rank."""
    agreeing = [rank for rank, (_, names) in enumerate(everyone) if first.name in names]
    there = [(rank, each) for rank, (each, _) in enumerate(everyone) if each is not None and each.name == first.name]
    is_first = not any(everyone[rank][1] for rank, _ in there)
    samples = "; no module before it was compared: is its input this rank's part of the batch?" if is_first else ""
    if agreeing:
        off, fine = ranks_in_words([rank for rank, _ in there]), ranks_in_words(agreeing)
        return f"; it differs on {off} and agrees on {fine}: does this forward depend on the rank?{samples}"
    factors = {round(each.factor, 6) for _, each in there}
    factor = _named_factor(plan, first.factor) if len(factors) == 1 else ""
    if factor:
        return f"; on every rank it is {factor.partition(':')[0]}: does this forward read the world size?"
    return samples


def after_the_forward(comm: Communicator, plain: TrainingRecord, planned: TrainingRecord, tolerance: float) -> str:
    """What differs first where all activations of the first step agree."""
    if plain.losses and planned.losses and _off(plain.losses[0], planned.losses[0]) > tolerance:
        reported = (
            f", the loss does not ({planned.losses[0]:.6g} under the plan, {plain.losses[0]:.6g} on one device): the "
            "loss function depends on the rank or the world size, or its mean is taken in another way"
        )
    elif plain.gradients and (off := _deviating(plain.gradients[0], planned.gradients[0], tolerance)):
        reported = (
            f" and so does the loss, gradients do not (first in backward order: {off[-1]}): the fault is in the "
            "backward pass or in the reduction of gradients"
        )
    else:
        reported = f", and so do the first gradients, {_after_the_backward(plain, planned, tolerance)}"
    settings = _settings(
        plain, comm.all_gather_object(planned.settings, only_data=True)
    )  # by every rank, whatever differs on it
    return (
        f", and so do the first gradients, but {settings}"
        if settings and reported.startswith(", and so do")
        else reported
    )


def _settings(plain: TrainingRecord, of_ranks: list[dict[str, float]]) -> str:
    for name, value in plain.settings.items():
        off = {rank: numbers[name] for rank, numbers in enumerate(of_ranks) if numbers.get(name, value) != value}
        if off:
            where = "under the plan" if len(off) == len(of_ranks) else f"on {ranks_in_words(list(off))}"
            return (
                f"the optimizer's {name} is {next(iter(off.values())):.6g} {where} and {value:.6g} on one device: does "
                "it read the rank or the world size?"
            )
    return ""


def _after_the_backward(plain: TrainingRecord, planned: TrainingRecord, tolerance: float) -> str:
    for step in range(1, min(len(plain.gradients), len(planned.gradients))):
        if _off(plain.losses[step], planned.losses[step]) > tolerance:
            break  # of other parameters
        off = _deviating(plain.gradients[step], planned.gradients[step], tolerance)
        if off:
            return f"but not those of step {step}, whose loss agrees ({off[-1]}): does a step keep another's gradients?"
    off = _deviating(plain.parameters, planned.parameters, tolerance)
    if off:
        return f"{off[0]} does not: the fault is in clipping or in the optimizer"
    off = _deviating(plain.buffers, planned.buffers, tolerance)
    if off:
        return f"and parameters, the buffer {off[0]} does not: is it updated from this rank's samples only?"
    return "and updates on rank 0: the fault is in the optimizer state, or in updates on other ranks"


def _off(plain: float, planned: float) -> float:
    return abs(plain - planned) / max(abs(plain), 1e-300)


def _deviating(plain: Tensors, planned: Tensors, tolerance: float) -> list[str]:
    largest = max((float(wide(tensor).abs().max()) for tensor in plain.values() if tensor.numel()), default=0.0)
    found = []
    for name, tensor in plain.items():
        other = planned.get(name)
        if other is None or other.shape != tensor.shape:
            found.append(name)
        elif tensor.numel():
            expected = wide(tensor)
            scale = max(float(expected.abs().max()), _EXACT * largest, 1e-300)
            if not float((expected - wide(other)).abs().max()) / scale <= tolerance:
                found.append(name)
    return found


def _coordinate(plan: Plan, rank: int) -> dict[str, int]:
    coordinate = {}
    for axis, size in reversed(list(zip(AXES, plan.shape, strict=True))):
        rank, coordinate[axis] = divmod(rank, size)
    return coordinate


def _closest(full: torch.Tensor, shard: torch.Tensor, plan: Plan, at: dict[str, int]) -> tuple[float, float] | None:
    """The smallest deviation of the shard from any part of the full tensor that it may be, and the factor by which it
    is off; None where it is not known."""
    best = None
    for part in _parts(full, shard.shape, plan, at):
        scale = max(float(full.abs().max()), 1e-300) if full.numel() else 1.0
        expected, got = wide(part), wide(shard)
        deviation = float((expected - got).abs().max() / scale) if shard.numel() else 0.0
        if best is None or deviation < best[0]:
            best = deviation, _factor(expected, got)
    return best


def _factor(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The number f for which got is f times expected; 0 where there is none."""
    size = float((expected.conj() * expected).real.sum())
    factor = float((expected.conj() * got).real.sum()) / size if size else 0.0
    rest = float((got - factor * expected).norm())
    return factor if rest <= _EXACT * float(got.norm()) else 0.0


def _parts(full: torch.Tensor, shape: torch.Size, plan: Plan, at: dict[str, int]) -> Iterator[torch.Tensor]:
    if full.dim() != len(shape):
        return
    parts = [full]
    for dim, (length, wanted) in enumerate(zip(full.shape, shape, strict=True)):
        if length == wanted:
            continue
        parts = [
            part.index_select(dim, torch.tensor(held, dtype=torch.long))
            for part in parts
            for held in _held(dim, length, wanted, plan, at)
        ]
    yield from parts


def _data_index(at: dict[str, int], plan: Plan) -> int:
    """The index of a rank among those that share the batch."""
    return (at[COPIES] * (plan.dp // plan.copies // plan.ep) + at["dp"]) * plan.ep + at["ep"]


def _held(dim: int, length: int, wanted: int, plan: Plan, at: dict[str, int]) -> Iterator[list[int]]:
    """Which indices of a dimension this rank may hold."""
    if dim == 0:
        samples = list(Split.even((), 0, length, plan.dp).held[_data_index(at, plan)])
        first = list(Split.even((), 0, len(samples), plan.microbatches).held[0])
        if len(first) == wanted:
            yield [samples[i] for i in first]
    for ranks, index in ((plan.cp, at["cp"]), (plan.tp, at["tp"])):
        if ranks > 1:
            held = list(Split.even((), dim, length, ranks).held[index])
            if len(held) == wanted:
                yield held
            if length % (2 * ranks) == 0 and length // ranks == wanted:
                half = length // (2 * ranks)
                late = (2 * ranks - 1 - index) * half
                yield [*range(index * half, (index + 1) * half), *range(late, late + half)]


def guess_fault(plan: Plan, plain: TrainingRecord, planned: TrainingRecord) -> str:
    """One line on what the fault looks like: a factor that equals a count of the plan is named as such."""
    lost = [loss for loss in plain.losses if not math.isfinite(loss)]
    if lost:
        return f"one device gives a loss of {lost[0]} too: with such batches nothing can be compared"
    if plain.losses and planned.losses:
        reported = _named_factor(plan, planned.losses[0] / plain.losses[0] if plain.losses[0] else 1.0)
        if reported:
            return f"the loss is {reported}"
    factors = [
        float((wide(planned.gradients[0][name]) * wide(g).conj()).real.sum() / (wide(g).abs() ** 2).sum())
        for name, g in plain.gradients[0].items()
        if name in planned.gradients[0] and planned.gradients[0][name].shape == g.shape and float(g.abs().max()) > 0
    ]
    off = [factor for factor in factors if abs(factor - 1) > 1e-6]
    if off and max(off) - min(off) < 1e-6 * abs(off[0]):
        reported = _named_factor(plan, off[0])
        which = "all gradients are" if len(off) == len(factors) else f"{len(off)} of {len(factors)} gradients are"
        return f"{which} {reported or f'{off[0]:.6g} times those of one device'}"
    if not off and factors:
        return "gradients agree in the first step: look at the optimizer, clipping or buffers"
    return ""


def _named_factor(plan: Plan, factor: float) -> str:
    counts = {
        "dp": plan.dp,
        "tp": plan.tp,
        "cp": plan.cp,
        "pp": plan.pp,
        "the number of microbatches": plan.microbatches,
        "the world size": plan.world,
        "dp times the number of microbatches": plan.dp * plan.microbatches,
    }
    for name, count in counts.items():
        if count > 1 and abs(factor - count) < 1e-6 * count:
            return f"{count} times too large, which is {name}: summed where it should be averaged?"
        if count > 1 and abs(factor * count - 1) < 1e-6:
            return f"{count} times too small, which is {name}: averaged where it should be summed?"
    return ""
