"""Measured machines: of two passes the better counts, and figures are those that the machine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from unisono.plan.cost.op_time import IN_CACHE
from unisono.plan.hardware.spec import AttentionTime
from unisono.planner.measure.attention import AttentionTimer
from unisono.planner.measure.figures import Figures
from unisono.planner.measure.links import Care
from unisono.planner.measure.machine import _better
from unisono.planner.measure.ops import Clock

NO_ONE: Any = None  # to talk to


def _figures(slower: float) -> Figures:
    return {
        "flops": {"float32": [(1e6, 8e9 / slower), (1e9, 3e10)]},
        "backward": [(1e6, 9e9)],
        "matrices": {"attention": {"call": [1e-4 * slower, 2e-4], "forward": [(256.0, 1e-5 * slower)]}},
        "bandwidth": 3e10 / slower,
        "overhead": 1e-5 * slower,
        "ops": {"gelu": (4e9 / slower, 2e9), "add": (2e10, 1e10)},
        "optimizer": 1e10,
        "looped": 6e9 / slower,
    }


def test_a_disturbance_of_one_pass_does_not_count() -> None:
    assert _better(_figures(1.0), _figures(2.0)) == _better(_figures(2.0), _figures(1.0)) == _figures(1.0)


def test_a_backward_goes_with_its_forward() -> None:
    """A forward that was disturbed makes what is left for the backward look quick."""
    one, other = _figures(1.0), _figures(1.0)
    other["ops"]["gelu"] = (2e9, 2.5e9)
    assert _better(one, other)["ops"]["gelu"] == _better(other, one)["ops"]["gelu"] == (4e9, 2e9)


class _Products(Clock):
    """A machine that computes 3e10 operations a second, and brings weights into place at 4e9 bytes a second for a
    forward, and at 2e9 for both products of a backward."""

    def passes(self, call: Callable[[], torch.Tensor]) -> tuple[float, float]:
        with FlopCounterMode(display=False) as forward:
            result = call()
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
        ahead, back = (float(counter.get_total_flops()) for counter in (forward, backward))
        weights = 4 * ahead / (2 * len(result))
        return ahead / 3e10 + weights / 4e9, back / 3e10 + back / (2 * ahead) * weights / 2e9


def test_of_products_with_few_rows_computing_is_not_the_weights() -> None:
    clock = _Products(NO_ONE, torch.device("cpu"), Care())
    assert clock._weights(torch.float32, IN_CACHE, peak=3e10) == pytest.approx((4e9, 2e9))


class _Disturbed(Clock):
    """A machine that another job keeps busy whenever a forward is timed."""

    def time(self, call: Callable[[], Any]) -> float:
        return 1e-3 if call() is None else 5e-3  # a backward gives nothing


def test_a_disturbed_measurement_gives_no_times_below_zero() -> None:
    clock = _Disturbed(NO_ONE, torch.device("cpu"), Care())
    figures = AttentionTimer(clock, torch.float32).figures(0.0)
    assert all(seconds > 0 for key in ("forward", "backward") for _, seconds in figures[key])
    assert min(figures["call"] + figures["softmax_width"]) >= 0


class _Attentions(Clock):
    """A machine whose softmax is as wide as 30 forward, and as 10 backward, where calls take 0.1 and 0.2 ms beside."""

    def passes(self, call: Any) -> tuple[float, float]:
        rows, heads, length, width = call.args[0].shape
        return self.seconds(rows * heads, length**2, width)

    @staticmethod
    def seconds(matrices: float, elements: float, width: float) -> tuple[float, float]:
        return 1e-4 + matrices * elements * (width + 30) * 1e-10, 2e-4 + matrices * elements * (width + 10) * 2e-10


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_known_by_its_matrices_and_widths(dropout: float) -> None:
    clock = _Attentions(NO_ONE, torch.device("cpu"), Care())
    figures = AttentionTimer(clock, torch.float32).figures(dropout)
    known = AttentionTime(*(tuple(figures[key]) for key in ("call", "forward", "backward", "softmax_width")))
    for matrices, elements, width in ((8, 64**2, 16), (200, 32**2, 64), (16, 8**2, 128), (2, 2048**2, 32)):
        assert known.seconds(matrices, elements, width) == pytest.approx(clock.seconds(matrices, elements, width))
