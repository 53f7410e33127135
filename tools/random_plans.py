"""Random plans for 2 and 4 ranks: every axis alone, most pairs of axes, and what can be said beside them."""

from __future__ import annotations

import random

_TWO = [
    "dp=2", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3", "tp=2", "tp=2", "tp=2,sp",
    "pp=2", "pp=2", "cp=2", "cp=2,context=ulysses", "dp=2,ep=2", "dp=2,zero=1,offload", "cp=2,zero=1", "cp=2,zero=3",
]  # fmt: skip
_FOUR = [
    "dp=4", "dp=4,zero=3", "dp=2,tp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3", "dp=2,pp=2", "dp=2,pp=2,zero=1",
    "tp=2,pp=2", "tp=2,sp,pp=2", "tp=4", "pp=4", "cp=4", "dp=2,cp=2", "tp=2,cp=2", "pp=2,cp=2", "dp=2,tp=2,sp",
    "dp=2,cp=2,zero=3", "dp=4,ep=2", "dp=2,tp=2,ep=2",
]  # fmt: skip
_SCHEDULES = ["1f1b", "1f1b", "1f1b", "naive", "f-then-b", "zb1p", "interleaved", "zbv"]
FOUR_RANKS = 0.2  # the share of plans for 4 ranks, which take longer


def plans(seed: int, count: int, only: str = "", has_experts: bool = False) -> list[str]:
    """Different plans; only: those that contain this word, such as "tp"."""
    draw = random.Random(f"plans of {seed}")
    drawn: dict[str, None] = {}
    for _ in range(200):
        shape = draw.choice(_FOUR if draw.random() < FOUR_RANKS else _TWO)
        if (only and only not in shape) or ("ep=" in shape and not has_experts):
            continue
        drawn[",".join([shape, *_more(draw, shape)])] = None
        if len(drawn) == count:
            break
    return list(drawn)


def _more(draw: random.Random, shape: str) -> list[str]:
    words = []
    if "pp=" in shape:
        schedule = draw.choice(_SCHEDULES)
        microbatches = 1 if schedule == "naive" else draw.choice([2, 2, 4, 3])
        words.append(f"microbatches={microbatches}")
        if schedule != "1f1b":
            words.append(f"schedule={schedule}")
        if schedule in ("interleaved", "zbv"):
            words.append("chunks=2")
    elif draw.random() < 0.2:
        words.append(f"microbatches={draw.choice([2, 2, 3])}")
    if draw.random() < 0.15:
        words.append(f"recompute={draw.choice(['full', 'selective'])}")
    return words
