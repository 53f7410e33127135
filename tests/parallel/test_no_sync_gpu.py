"""A training step waits for nothing that the GPU has been given to do, under any plan.

One process is a rank of the plan, and the others are simulated: what a rank reads back from the GPU is the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from examples.gpt import GPT, Config
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan
from unisono.simulate.rank import build_trainer, on_device, simulated_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]

CONFIG = Config(vocabulary=64, width=64, heads=4, layers=4, context=32, dropout=0.1)
PLANS = [
    "dp=1",
    "microbatches=2",
    "compile",
    "recompute=full",
    "recompute=selective",
    "recompute=attention",
    "dp=2",
    "dp=2,compile",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "dp=2,zero=3,microbatches=2",
    "dp=2,zero=3,compile",
    "dp=4,zero=3,shard=2",
    "tp=2",
    "tp=2,sp",
    "tp=2,sp,compile",
    "cp=2",
    "cp=2,context=ulysses",
    "pp=2,microbatches=4",
    "pp=2,microbatches=4,schedule=f-then-b",
    "pp=2,microbatches=4,schedule=interleaved,chunks=2",
    "pp=2,microbatches=4,schedule=zbv,chunks=2",
    "pp=2,microbatches=4,compile",
    "pp=2,dp=2,zero=1,microbatches=2",
    "dp=2,tp=2,sp",
    "dp=2,tp=2,zero=3",
    "dp=2,cp=2,zero=2",
    "tp=2,pp=2,microbatches=2,sp",
]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def _tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves of the batch are the same: the rank that is there brings its own instead of the other's."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (2, 33), generator=drawn).repeat(4, 1)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


GPT_TASK = uni.Task(lambda: GPT(CONFIG), _loss, _adamw, _tokens, clip=1.0)


def _step_without_waiting(task: uni.Task, plan: Plan, rank: int) -> None:
    device = torch.device("cuda")
    with simulated_mesh(plan, rank) as mesh:
        given = on_device(task.batch(0), device)
        trainer = build_trainer(task, plan, mesh, given, device)
        if trainer.scaler is not None:
            _step_before(trainer)
        for _ in range(3):
            trainer.step(given)
        assert trainer.compilation is None or not trainer.compilation.failures, "it runs eagerly"
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.step(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _step_before(trainer: Trainer) -> None:
    """Of fp16: a step that does not overflow. Simulated ranks send what was in memory, so that all others might."""
    for _, parameter in trainer.optimized():
        parameter.grad = torch.zeros_like(parameter)
    trainer.norm = trainer.gradient_norm()
    with trainer._updating():
        trainer.optimizer.step()


class Experts(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.experts = nn.ModuleList(uni.nn.MoE(64, 128, experts=8, **options) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for norm, experts in zip(self.norms, self.experts, strict=True):
            x = x + experts(norm(x))
        return self.head(x)


@pytest.mark.parametrize("plan", PLANS)
def test_gpt(plan: str) -> None:
    chosen = Plan.parse(plan)
    for rank in sorted({0, chosen.world - 1}):
        _step_without_waiting(GPT_TASK, chosen, rank)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,microbatches=2"])
def test_low_precision(plan: str, precision: str) -> None:
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    wide = replace(CONFIG, width=256)
    chosen = Plan.parse(plan)
    for rank in sorted({0, chosen.world - 1}):
        _step_without_waiting(replace(GPT_TASK, model=lambda: GPT(wide), precision=precision), chosen, rank)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fp16_with_other_optimizers(optimizer: str) -> None:
    kinds = {"adam": torch.optim.Adam, "sgd": partial(torch.optim.SGD, momentum=0.9)}
    task = replace(GPT_TASK, optimizer=lambda parameters: kinds[optimizer](parameters, lr=1e-3), precision="fp16")
    _step_without_waiting(task, Plan(), 0)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="torch has no grouped product for this GPU that reads its sizes there",
)
@pytest.mark.parametrize("options", [{}, {"top_k": 3, "capacity_factor": 1.1, "aux_weight": 0.01, "gated": True}])
@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=2,zero=3"])
def test_experts(plan: str, options: dict[str, Any]) -> None:
    task = replace(GPT_TASK, model=lambda: Experts(**options), precision="bf16")
    _step_without_waiting(task, Plan.parse(plan), 0)
