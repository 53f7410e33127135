"""Hugging Face models as they are, in float64 to 1e-9, although they round to float32 on their way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.equivalence.proof import prove, refused
from tests.ranks import RankPool
from unisono.plan.plan import Plan
from unisono.verify.float64 import Float64Mode

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
# Imported here, so that ranks that are forked later need not.
for _name in ("Llama", "Qwen2", "Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "GPT2", "Bert", "ViT", "T5", "Bart"):
    getattr(transformers, f"{_name}Model")

Pools = Callable[[str, int], RankPool]

PLANS = {
    "llama": ["tp=2", "cp=2"],
    "qwen2": ["dp=2,zero=3", "tp=2,sp", "cp=2,context=ulysses"],
    "mixtral": ["dp=2", "tp=2,sp", "dp=2,ep=2", "dp=4,ep=2,zero=1", "dp=2,ep=2,cp=2", "dp=2,ep=2,zero=3"],
    "qwen3_moe": ["dp=2,ep=2", "dp=2,ep=2,pp=2,microbatches=2"],
    "deepseek_v3": ["dp=2,ep=2"],
    "gpt_oss": ["dp=2,ep=2"],
    "next_token": ["cp=2", "cp=2,context=ulysses,microbatches=2", "tp=2,cp=2", "cp=2,pp=2,microbatches=2"],
    "gpt2": ["dp=2,zero=1", "tp=2", "cp=2", "pp=2,microbatches=2", "cp=2,pp=2,microbatches=2"],
    "bert": ["tp=2,sp", "cp=2"],
    "bert_classifier": ["dp=2,zero=2", "cp=2"],
    "vit": ["dp=2,zero=3", "tp=2", "cp=2,microbatches=3", "dp=2,cp=2"],
    "t5": [
        "dp=2",
        "dp=2,zero=1",
        "tp=2",
        "dp=2,zero=3",
        "pp=2,microbatches=2",
        "dp=2,zero=3,tp=2",
        "cp=2",
        "cp=2,context=ulysses",
    ],
    "bart": [
        "cp=2",
        "dp=2,cp=2,context=ulysses",
        "cp=2,pp=2,microbatches=2",
        "tp=2,sp",
        "dp=2,tp=2,sp",
        "tp=2,pp=2,sp,microbatches=2",
    ],
}
REFUSED = {
    ("llama", "dp=2,ep=2"): "has no uni.nn.MoE, and no experts of Hugging Face",
}


@pytest.mark.parametrize(("task", "plan"), [(task, plan) for task, plans in PLANS.items() for plan in plans])
def test_a_plan_changes_nothing(pools: Pools, task: str, plan: str) -> None:
    verdict = pools("gloo", Plan.parse(plan).world).run(prove, "foreign", task, plan)[0]
    assert verdict.equivalent, verdict


@pytest.mark.parametrize(("task", "plan"), REFUSED)
def test_what_cannot_be_right_is_refused(pools: Pools, task: str, plan: str) -> None:
    for reported in pools("gloo", 2).run(refused, "foreign", task, plan):
        assert REFUSED[task, plan] in reported


def test_double_stays_double() -> None:
    x = torch.randn(3, dtype=torch.float64)
    with Float64Mode():
        made = [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.softmax(-1, dtype=torch.float32),
            torch.arange(3).float(),
            torch.zeros(3),
            torch.ones(3, dtype=torch.float32),
        ]
        assert torch.ones(3, dtype=torch.complex64).dtype == torch.complex128
        assert x.to(torch.bfloat16).dtype == torch.bfloat16  # asked for in earnest
    assert [tensor.dtype for tensor in made] == [torch.float64] * len(made)
    assert torch.zeros(3).dtype == torch.float32
    with Float64Mode(torch.float32):
        assert x.float().dtype == torch.float32
        assert torch.zeros(3).dtype == torch.float32
