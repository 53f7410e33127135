"""What a verdict tells apart: rounding from faults, in whole and in half precision."""

from __future__ import annotations

import json
import math

import pytest
import torch

from unisono.plan.plan import Plan
from unisono.verify.compare import KINDS, Verdict, compared
from unisono.verify.first_divergence import guess_fault
from unisono.verify.training_record import TrainingRecord


def record(factor: float = 1.0, scale: float = 2.0**16) -> TrainingRecord:
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
    return TrainingRecord(
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


def with_a_cancelled_bias(gradient: float = 1e-17, value: float = 0.3, moment: float = 1e-18) -> TrainingRecord:
    """A record with a parameter whose true gradient is 0: what it got is rounding."""
    made = record()
    for tensors, number in (
        (made.initial, 0.3),
        (made.gradients[0], gradient),
        (made.parameters, value),
    ):
        tensors["key.bias"] = torch.full((4,), number, dtype=torch.float64)
    made.optimizer["key.bias:exp_avg"] = torch.full((4,), moment, dtype=torch.float64)
    made.optimizer["key.bias:step"] = torch.tensor(3.0)
    return made


def test_a_gradient_of_rounding_hides_no_fault() -> None:
    plain = with_a_cancelled_bias()
    other_rounding = with_a_cancelled_bias(gradient=-3e-17, value=0.3 + 1e-12, moment=-3e-18)
    assert compared(Plan(), plain, other_rounding, "float64").equivalent
    for fault, kind in (
        ({"gradient": 1e-13}, "gradients"),
        ({"value": 0.3 + 1e-8}, "parameters"),
        ({"moment": 1e-10}, "optimizer state"),
    ):
        verdict = compared(Plan(), plain, with_a_cancelled_bias(**fault), "float64")
        assert not verdict.equivalent
        worst = max(verdict.worst, key=lambda each: each.deviation)
        assert (worst.kind, worst.name.startswith("key.bias")) == (kind, True)


def with_a_bias_of_keys(queries: float = 0.3, keys: float = 0.3, gradient: float = 1e-9) -> TrainingRecord:
    """One bias of queries and keys: the gradient of the keys is rounding, and Adam moves them all the same."""
    made = record()
    made.initial = {"weight": made.parameters["weight"] - 0.01, "bias": torch.full((4,), 0.29).double()}
    made.gradients[0]["bias"] = torch.tensor([0.1, 0.1, gradient, -gradient]).double()
    made.parameters["bias"] = torch.tensor([queries, queries, keys, keys]).double()
    return made


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "is_equivalent"),
    [
        ("float32", 0.3, 0.285, True),  # less than two steps of 0.01 apart
        ("float32", 0.3, 0.2, False),
        ("float32", 0.285, 0.3, False),
        ("float64", 0.3, 0.285, False),
    ],
)
def test_single_elements_that_rounding_moves(dtype: str, queries: float, keys: float, is_equivalent: bool) -> None:
    verdict = compared(Plan(), with_a_bias_of_keys(), with_a_bias_of_keys(queries, keys), dtype)
    assert verdict.equivalent == is_equivalent, verdict


@pytest.mark.parametrize(
    ("gradient", "moved", "keys", "is_equivalent"),
    [
        (1e-17, 0.3, 0.285, True),  # Adafactor: rounding moves elements as far as anything does
        (1e-17, 0.29, 0.3, False),  # Adam: its epsilon keeps them where they were
        (0.0, 0.3, 0.285, False),
    ],
)
def test_single_elements_that_rounding_moves_in_float64(
    gradient: float, moved: float, keys: float, is_equivalent: bool
) -> None:
    plain, planned = with_a_bias_of_keys(0.3, moved, gradient), with_a_bias_of_keys(0.3, keys, gradient)
    assert compared(Plan(), plain, planned, "float64").equivalent == is_equivalent


def test_a_small_gradient_is_no_rounding() -> None:
    """1e-11 of the largest, ten times what passes for rounding: its parameter must agree to its own size."""
    plain, planned = (with_a_cancelled_bias(gradient=3e-11, value=1e-4, moment=3e-12) for _ in range(2))
    planned.parameters["key.bias"] += 1e-11
    assert not compared(Plan(), plain, planned, "float64").equivalent


def test_nothing_is_proved_where_one_device_gives_no_number() -> None:
    nowhere = record()
    nowhere.losses = [float("nan")]
    assert not compared(Plan(), nowhere, nowhere, "float64").equivalent
    assert "one device gives a loss of nan too" in guess_fault(Plan(dp=2), nowhere, nowhere)


@pytest.mark.parametrize(
    ("factor", "reported"),
    [
        (3.0, "all gradients are 3 times too large, which is the number of microbatches: summed"),
        (1 / 4, "all gradients are 4 times too small, which is the world size: averaged"),
        (2.0, "2 times too large, which is dp"),
        (1 / 6, "6 times too small, which is dp times the number of microbatches"),
        (1.7, "all gradients are 1.7 times those of one device"),
        (1.0, "gradients agree in the first step"),
    ],
)
def test_a_factor_that_is_a_count_of_the_plan_is_named(factor: float, reported: str) -> None:
    assert reported in guess_fault(Plan(dp=2, tp=2, microbatches=3), record(), record(factor))


def test_as_json_and_back() -> None:
    short = record()
    short.gradients = [{}]
    verdict = compared(Plan(dp=2), record(), short, "float64")
    assert max(each.deviation for each in verdict.worst) == math.inf
    assert Verdict.of_json(json.loads(json.dumps(verdict.as_json(), allow_nan=False))) == verdict
