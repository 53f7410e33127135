"""The overhead benchmark compares like with like: every contestant trains the same model to the same losses."""

from __future__ import annotations

import pytest

import unisono as uni
from benchmarks import overhead
from benchmarks.contestants import Config

TINY = Config(vocabulary=32, context=8, width=16, heads=2, layers=2, batch=8, microbatches=4)
ROUNDS = 2


@pytest.mark.parametrize(
    ("group", "rival"),
    [
        ("dp", "torch DDP"),
        ("zero3", "torch fully_shard"),
        ("tp", "torch parallelize_module"),
        ("pp", "torch Schedule1F1B"),
    ],
)
@pytest.mark.thorough
def test_contestants_reach_the_same_losses(group: str, rival: str) -> None:
    ranks = uni.spawn(overhead.compete, 2, "gloo", (group, TINY, ROUNDS), timeout=120)
    losses = ranks[0]["losses"]
    assert rival in losses
    assert all(len(values) == ROUNDS + overhead.WARM_UP for values in losses.values())
    assert len(set(losses[rival])) > 1
    assert overhead.loss_gap(losses) < overhead.TOLERANCE


def found(unisono: list[float], rival: list[float], loss: float = 1.0) -> dict[str, object]:
    return overhead.summary({"unisono": unisono, "torch": rival}, {"unisono": [1.0], "torch": [loss]}, {})


def test_verdict_goes_by_the_ratio_within_rounds() -> None:
    assert overhead.verdict("dp", found([1.0, 9.0, 2.0], [1.0, 9.0, 2.0]), is_gpu=False) == []
    (slow,) = overhead.verdict("dp", found([1.1, 9.9, 2.2], [1.0, 9.0, 2.0]), is_gpu=False)
    assert "1.100 times torch" in slow


def test_different_losses_make_it_void() -> None:
    (void,) = overhead.verdict("dp", found([1.0, 1.0], [1.0, 1.0], loss=1.01), is_gpu=False)
    assert "VOID" in void
