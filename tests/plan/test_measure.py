"""Measured machines: of two passes the better counts."""

from __future__ import annotations

from unisono.plan.measure import Figures, _better


def _figures(slower: float) -> Figures:
    return {
        "flops": {"float32": [(1e6, 8e9 / slower), (1e9, 3e10)]},
        "backward": [(1e6, 9e9)],
        "attention": [(1e6, 5e9 / slower)],
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
