"""What a verdict tells apart: rounding from faults, in whole and in half precision."""

from __future__ import annotations

import pytest
import torch

from unisono.plan.plan import Plan
from unisono.train.record import Record
from unisono.train.verdict import KINDS, compared


def record(factor: float = 1.0, scale: float = 2.0**16) -> Record:
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    return Record(
        initial={"weight": weight},
        losses=[1.5],
        gradients=[{"weight": weight * factor}],
        scales=[scale],
        parameters={"weight": weight},
        optimizer={"weight:exp_avg": weight * 1e-3 * factor, "weight:step": torch.tensor(3.0)},
    )


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 0.1), ("float16", 0.02)]
)
def test_rounding_and_faults(dtype: str, rounding: float) -> None:
    near = compared(Plan(), record(), record(1 + rounding), dtype)
    assert near.equivalent
    assert tuple(each.kind for each in near.worst) == KINDS  # the matrix has a column for each
    assert not compared(Plan(), record(), record(1 + 20 * rounding), dtype).equivalent
    other_scale = compared(Plan(), record(), record(scale=2.0**15), dtype)
    assert not other_scale.equivalent
    assert "scale of the loss" in other_scale.worst[-1].name
