"""The plans that every architecture is tried under."""

from __future__ import annotations

from tests.matrix.architectures import ARCHITECTURES, MIXTURE

PLANS = (
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "tp=2,sp",
    "pp=2,microbatches=2",
    "cp=2",
    "cp=2,context=ulysses",
    "dp=2,microbatches=2",
    "dp=2,recompute=full",
    "dp=2,recompute=selective",
)
EXPERTS = ("dp=2,ep=2",)
HYBRIDS = ("dp=2,tp=2", "tp=2,pp=2,microbatches=2", "dp=2,zero=3,tp=2")
WITH_HYBRIDS = ("bert", "gpt2", "llama", "gemma2", "qwen3-moe", "t5", "vit", "mamba", "mamba2")


def plans_of(name: str) -> tuple[str, ...]:
    experts = EXPERTS if ARCHITECTURES[name].kind == MIXTURE else ()
    return PLANS + experts + (HYBRIDS if name in WITH_HYBRIDS else ())
