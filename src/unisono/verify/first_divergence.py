"""Where two runs part, and what that looks like: for a verdict that says no.

Activations under a plan are pieces of those on one device. Without knowing any strategy, a piece is held against the
part of the whole that it can be: rows for the data ranks, consecutive or zigzag tokens, a slice of the features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from unisono.comm.communicator import Communicator
from unisono.parallel.layout import Split
from unisono.plan.plan import AXES, Plan
from unisono.verify.record import Record

Tensors = dict[str, torch.Tensor]


def first_parting(comm: Communicator, plan: Plan, plain: Tensors, mine: Tensors, tolerance: float) -> str:
    """The first module in forward order, over all ranks, whose output is no part of the plain model's."""
    found: tuple[int, str, str, float] | None = None
    coordinate = _coordinate(plan, comm.rank)
    for order, (name, whole) in enumerate(plain.items()):
        if name not in mine:
            continue
        deviation = _closest(whole, mine[name], plan, coordinate)
        if deviation is not None and deviation > tolerance:
            found = (order, name, f"{str(whole.dtype).removeprefix('torch.')}{list(mine[name].shape)}", deviation)
            break
    everyone = [(each, rank) for rank, each in enumerate(comm.all_gather_object(found)) if each is not None]
    if not everyone:
        return "activations agree: the fault lies in the backward pass, the reduction or the update"
    (_, name, shape, deviation), rank = min(everyone, key=lambda item: item[0][0])
    return f"{name or 'the model'} {shape} on rank {rank}: deviation {deviation:.2g}"


def _coordinate(plan: Plan, rank: int) -> dict[str, int]:
    places = {}
    for axis, size in reversed(list(zip(AXES, plan.shape, strict=True))):
        rank, places[axis] = divmod(rank, size)
    return places


def _closest(whole: torch.Tensor, piece: torch.Tensor, plan: Plan, at: dict[str, int]) -> float | None:
    """The smallest deviation of the piece from any part of the whole that it may be; None where it cannot be told."""
    best = None
    for part in _parts(whole, piece.shape, plan, at):
        scale = max(float(whole.abs().max()), 1e-300)
        deviation = float((part.double() - piece.double()).abs().max() / scale) if piece.numel() else 0.0
        best = deviation if best is None else min(best, deviation)
    return best


def _parts(whole: torch.Tensor, shape: torch.Size, plan: Plan, at: dict[str, int]) -> Iterator[torch.Tensor]:
    if whole.dim() != len(shape):
        return
    parts = [whole]
    for dim, (length, wanted) in enumerate(zip(whole.shape, shape, strict=True)):
        if length == wanted:
            continue
        parts = [
            part.index_select(dim, torch.tensor(held, dtype=torch.long))
            for part in parts
            for held in _held(dim, length, wanted, plan, at)
        ]
    yield from parts


def _held(dim: int, length: int, wanted: int, plan: Plan, at: dict[str, int]) -> Iterator[list[int]]:
    """Which indices of a dimension this rank may hold."""
    if dim == 0:
        rows = list(Split.even((), 0, length, plan.dp).held[at["dp"] * plan.ep + at["ep"]])
        first = list(Split.even((), 0, len(rows), plan.microbatches).held[0])
        if len(first) == wanted:
            yield [rows[i] for i in first]
    for ranks, place in ((plan.cp, at["cp"]), (plan.tp, at["tp"])):
        if ranks > 1:
            held = list(Split.even((), dim, length, ranks).held[place])
            if len(held) == wanted:
                yield held
            if length % (2 * ranks) == 0 and length // ranks == wanted:
                half = length // (2 * ranks)
                late = (2 * ranks - 1 - place) * half
                yield [*range(place * half, (place + 1) * half), *range(late, late + half)]


def guess_fault(plan: Plan, plain: Record, planned: Record) -> str:
    """One line on what the fault looks like: a factor that equals a count of the plan is named as such."""
    lost = [loss for loss in plain.losses if not math.isfinite(loss)]
    if lost:
        return f"one device gives a loss of {lost[0]} too: with such batches nothing can be compared"
    if plain.losses and planned.losses:
        told = _named_factor(plan, planned.losses[0] / plain.losses[0] if plain.losses[0] else 1.0)
        if told:
            return f"the loss is {told}"
    factors = [
        float((planned.gradients[0][name].double() * g.double()).sum() / (g.double() ** 2).sum())
        for name, g in plain.gradients[0].items()
        if name in planned.gradients[0] and planned.gradients[0][name].shape == g.shape and float(g.abs().max()) > 0
    ]
    off = [factor for factor in factors if abs(factor - 1) > 1e-6]
    if off and max(off) - min(off) < 1e-6 * abs(off[0]):
        told = _named_factor(plan, off[0])
        which = "all gradients are" if len(off) == len(factors) else f"{len(off)} of {len(factors)} gradients are"
        return f"{which} {told or f'{off[0]:.6g} times those of one device'}"
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
