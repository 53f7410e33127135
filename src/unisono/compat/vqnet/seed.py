"""One seed for all random numbers. VQNet calls this module `utils`."""

from __future__ import annotations

import random

import numpy as np
import torch

from unisono.compat.vqnet.vqnet_names import missing_names


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_seed() -> int:
    return torch.initial_seed()


__getattr__ = missing_names(__name__)
