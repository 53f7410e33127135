"""Runs a program with random numbers that are the same on one device and on many; the program is not edited.

    unisono run -n 2 --as paddle tests/compat/prelude.py program.py

Layers draw from a seed, and a dataset that draws its samples with NumPy draws those of sample i from i, on whichever
rank and in whichever process it is read: one of 40, around zero, so that there is something to learn. (Of samples that
are all different and above zero, the networks of 002 learn within ten batches to give zeros: then all losses are the
same, and comparing them shows nothing.) With float64 first, the program's float32 is float64, where what is not
rounding shows:

    unisono run -n 2 --as paddle tests/compat/prelude.py float64 program.py

show=EXPRESSION prints a value of the program's own names once it has ended, for programs that print nothing.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any

import numpy as np
import torch
import torch.utils.data

SEED = 0
SAMPLES = 40


def seed_samples(cls: type, **kwargs: Any) -> None:
    """Of each class of datasets that is defined from now on."""
    read = vars(cls).get("__getitem__")
    if read is not None:

        def seeded(self: Any, index: int) -> Any:
            np.random.seed(index % SAMPLES)
            return tuple(map(_centred, read(self, index)))

        cls.__getitem__ = seeded  # type: ignore[attr-defined]


def _centred(value: Any) -> Any:
    is_float = getattr(value, "dtype", None) == np.float32
    return (value - np.float32(0.5)).astype(str(torch.get_default_dtype())[6:]) if is_float else value


def compute_in_float64() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        names = importlib.import_module("paddle").tensor._DTYPES
    except ImportError:  # the program is another framework's
        return
    names["float32"] = torch.float64


if __name__ == "__main__":
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    torch.utils.data.Dataset.__init_subclass__ = classmethod(seed_samples)  # type: ignore[assignment]
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "float64":
        compute_in_float64()
        sys.argv = sys.argv[1:]
    show = sys.argv.pop(0).removeprefix("show=") if sys.argv[0].startswith("show=") else ""
    names = runpy.run_path(sys.argv[0], run_name="__main__")
    if show:
        print("shown:", eval(show, names))
