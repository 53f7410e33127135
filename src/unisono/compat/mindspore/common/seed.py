"""The seed of initial values and of shuffles. MindSpore draws another one in every run; here it is 0 until it is set,
so that a run on many ranks can be compared with one on one."""

from __future__ import annotations

import numpy as np
import torch

from unisono.compat.language import say
from unisono.errors import UsageError

_seed: int | None = None
_drawn = 0  # initial values that were drawn since


def set_seed(seed: int) -> None:
    """Seed MindSpore's initial values and shuffles, NumPy and torch."""
    global _seed, _drawn
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(
            say(
                f"set_seed({seed!r}): expected a whole number that is not negative", f"set_seed({seed!r})：应为非负整数"
            )
        )
    _seed, _drawn = seed, 0
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_seed() -> int | None:
    return _seed


def next_generator() -> torch.Generator:
    """For the next tensor of initial values: the same on every rank, and whatever else draws numbers."""
    global _drawn
    _drawn += 1
    return torch.Generator().manual_seed((_seed or 0) * 1_000_003 + _drawn)
