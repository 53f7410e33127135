"""What plans need: the published tables, from the formulas and from our own trace; closed forms against schedules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.ranks import RankPool
from unisono.plan.cost.memory import MemoryModel, chunks_alive, saved_by, state_of
from unisono.plan.hardware.spec import Hardware, Link
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import ModelProfile, OptimizerState, Setting, Weight
from unisono.plan.profile.stages import Stages
from unisono.plan.schedules.activations import Sizes, peak
from unisono.plan.schedules.schedule import schedule, stage_placement
from unisono.planner.planner import Planner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import gpt as examples

MIB, GIB = 2**20, 2**30
# arXiv 2205.05198: GPT-3 175B, one sample, tp=8, bytes of activations of one layer and of all 96.
HEADS, LENGTH, WIDTH, LAYERS, TP = 96, 2048, 12288, 96, 8
PER_LAYER = {"none": 2736, "tp": 552, "tp+sp": 342, "tp+sp+attention": 102, "full": 48}
ALL_LAYERS = {"none": 256.5, "tp": 51.75, "tp+sp": 32.0625, "tp+sp+attention": 9.5625, "full": 4.5}
SETTINGS = {
    "none": Setting(1, 1, 1, 1, False, "none"),
    "tp": Setting(1, TP, 1, 1, False, "none"),
    "tp+sp": Setting(1, TP, 1, 1, True, "none"),
    "tp+sp+attention": Setting(1, TP, 1, 1, True, "attention"),
    "full": Setting(1, 1, 1, 1, False, "full"),
}


@cache
def profile_of_175b() -> ModelProfile:
    """GPT-3 as the paper has it: dropout everywhere, masks of a byte, attention that keeps its matrices, and layers cut
    by columns that gather their inputs again."""
    hardware = Hardware(
        "paper", 8, 80e9, {"bfloat16": 1e15}, 1e12, Link(1e11, 0), Link(1e10, 0), flash=False, dropout_mask=1.0
    )
    task = examples.large_gpt("gpt3", examples.Config(51200, LENGTH, WIDTH, HEADS, LAYERS, dropout=0.1), batch=8)
    return Planner(task, hardware, keeps_gathered=False).profile


@pytest.mark.parametrize("name", PER_LAYER)
def test_activations_of_gpt3_from_its_trace(name: str) -> None:
    profile = profile_of_175b()
    layer = saved_by(profile, profile.blocks[0], SETTINGS[name])
    assert round(layer / MIB) == PER_LAYER[name]
    total = sum(saved_by(profile, block, SETTINGS[name]) for block in profile.blocks)
    assert total / GIB == pytest.approx(ALL_LAYERS[name], rel=2e-4)  # the paper leaves out the norms' statistics


def test_activations_of_gpt3_from_the_formulas() -> None:
    s, h, a = LENGTH, WIDTH, HEADS
    values = {
        "none": s * h * (34 + 5 * a * s / h),
        "tp": s * h * (10 + 24 / TP + 5 * a * s / (h * TP)),
        "tp+sp": s * h / TP * (34 + 5 * a * s / h),
        "tp+sp+attention": 34 * s * h / TP,
        "full": 2 * s * h,
    }
    assert {name: value / MIB for name, value in values.items()} == PER_LAYER
    assert {name: value * LAYERS / GIB for name, value in values.items()} == ALL_LAYERS


def test_gpt3_has_its_parameters_and_fused_attention_keeps_no_matrix() -> None:
    profile = Planner(examples.gpt3_175b(), read_hardware("h100")).profile
    embeddings = (51200 + LENGTH) * WIDTH
    assert profile.parameters == embeddings + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH
    assert profile.tied == ("tokens.weight",)
    kept = saved_by(profile, profile.blocks[0], Setting(1, 1, 1, 1, False, "none"))
    assert kept == pytest.approx(32 * LENGTH * WIDTH, rel=2e-3)  # 34 without two masks; a number a query


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_of_seven_and_a_half_billion_parameters(stage: int, gigabytes: float) -> None:
    # Mixed precision: a float32 copy and two moments.
    weights = [Weight(f"w{n}", (75_000, 1000), 2, master=4, zero_master=4) for n in range(100)]
    adam = OptimizerState(plain=8, sharded=8)
    plan = Plan(dp=64, zero=stage)
    held = state_of(weights, plan).bytes(plan, adam)
    assert round(sum(held) / 1e9, 1) == gigabytes


def test_state_is_what_ranks_hold() -> None:
    """Cut by tp, by rows over the replicas, by experts."""
    weights = [
        Weight("up", (4096, 1024), 4, tp_dim=0),
        Weight("norm", (1024,), 4),
        Weight("e", (8, 64, 64), 4, None, True),
    ]
    plan = Plan(dp=4, tp=2, cp=2, ep=4, zero=1)
    state = state_of(weights, plan)
    assert state.elements == 4096 * 1024 // 2 + 1024 + 8 * 64 * 64 // 4
    assert state.sharded == 4096 * 1024 // 2 // 8 + 1024 // 8 + 64 * 64  # experts have dp / ep x cp = 2 replicas
    parameters, gradients, optimizer = state.bytes(plan, OptimizerState())
    assert (parameters, gradients, optimizer) == (4 * state.elements, 4 * state.elements, 8 * state.sharded)
    assert state_of(weights[:2], Plan(dp=8, zero=3, shard=4)) == state_of(weights[:2], Plan(dp=4, zero=3))


@pytest.mark.parametrize("name", ["f-then-b", "1f1b", "interleaved", "zb1p", "zbv"])
def test_closed_forms_bound_what_schedules_keep(name: str) -> None:
    """Exact for those without halves; an upper bound for zero bubble, which the limit of its schedule is."""
    for ranks in (2, 3, 4):
        for microbatches in (1, 2, 3, 4, 8, 11):
            for chunks in (2, 3) if name == "interleaved" else (2,) if name == "zbv" else (1,):
                order = schedule(name, ranks, microbatches, chunks if chunks > 1 else None)
                for rank in range(ranks):
                    counted = peak(order, rank, Sizes())
                    closed = chunks_alive(name, ranks, microbatches, chunks, rank)
                    assert closed >= counted
                    if name in ("f-then-b", "1f1b") or (name == "interleaved" and rank == 0):
                        assert closed == counted


def test_more_saving_needs_less() -> None:
    task = examples.large_gpt("activations", examples.Config(256, 256, 64, 4, 4), batch=64)
    profile = Planner(task, read_hardware("h100")).profile
    memory = MemoryModel(profile)

    def needs(text: str) -> float:
        plan = Plan.parse(text)
        return memory.footprint(plan, Stages(profile, tuple(range(plan.pp)), stage_placement(plan.pp, 1, False))).total

    assert needs("dp=8") > needs("dp=8,recompute=full")
    assert needs("dp=8,microbatches=1") > needs("dp=8,recompute=full,zero=3")
    assert needs("dp=4,tp=2") > needs("dp=4,tp=2,sp")


PLANS = ("dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2,sp", "pp=2,microbatches=2", "cp=2,zero=1")


def test_predicted_state_is_that_of_real_trainers(pools: Callable[[str, int], RankPool]) -> None:
    from tests.equivalence import tasks

    planner = Planner(tasks.gpt, read_hardware("h100"))
    search = planner.search(2)
    for text, measured in zip(PLANS, pools("gloo", 2).run(_states)[0], strict=True):
        plan = Plan.parse(text)
        stages = search.stages(plan.but(boundaries=(0, 2) if plan.pp > 1 else ()))
        parameters, _, optimizer = search.memory._state(plan, stages, 0).bytes(plan, planner.profile.optimizer)
        assert measured == parameters + optimizer, text


def _states(comm: object) -> list[float]:
    import unisono as uni
    from tests.equivalence import tasks

    found = []
    for text in PLANS:
        trainer = uni.parallelize(
            tasks.gpt.model, text, loss=tasks.gpt.loss, optimizer=tasks.gpt.optimizer, example=tasks.gpt.batch(0),
            rules=tasks.gpt.rules, check="off",
        )  # fmt: skip
        trainer.step(tasks.gpt.batch(0))
        held = sum(p.numel() * p.itemsize for p in trainer.model.parameters())
        kept = sum(
            value.numel() * value.itemsize
            for each in trainer.optimizer.state.values()
            for value in each.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
        found.append(float(held + kept))
    return found
