"""Learning rates for each step, as lists that an optimizer takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from unisono.compat.language import say
from unisono.errors import UsageError


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """learning_rates[i] until step milestone[i]."""
    if len(milestone) != len(learning_rates) or any(b <= a for a, b in zip([0, *milestone], milestone, strict=False)):
        raise UsageError(
            say(
                f"piecewise_constant_lr({list(milestone)}, {list(learning_rates)}): expected rising steps and "
                "as many rates",
                f"piecewise_constant_lr({list(milestone)}, {list(learning_rates)})：步数须递增，且学习率与之一样多",
            )
        )
    starts = [0, *milestone]
    return [rate for i, rate in enumerate(learning_rates) for _ in range(starts[i], starts[i + 1])]


def cosine_decay_lr(
    min_lr: float, max_lr: float, total_step: int, step_per_epoch: int, decay_epoch: int
) -> list[float]:
    def rate(epoch: int) -> float:
        return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * min(epoch, decay_epoch) / decay_epoch))

    return _by_epoch(rate, total_step, step_per_epoch)


def exponential_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    def rate(epoch: int) -> float:
        return learning_rate * decay_rate ** (epoch // decay_epoch if is_stair else epoch / decay_epoch)

    return _by_epoch(rate, total_step, step_per_epoch)


def warmup_lr(learning_rate: float, total_step: int, step_per_epoch: int, warmup_epoch: int) -> list[float]:
    return _by_epoch(lambda epoch: learning_rate * min(epoch, warmup_epoch) / warmup_epoch, total_step, step_per_epoch)


def _by_epoch(rate: Callable[[int], float], total_step: int, step_per_epoch: int) -> list[float]:
    return [rate(step // step_per_epoch) for step in range(total_step)]
