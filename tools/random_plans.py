"""Random plans for 2 and 4 ranks: every axis alone, most pairs of axes, and what can be said beside them.

Plans are drawn for a model: most of them are such as it can be trained under, as far as `Traits` tells, and of every
axis that it takes there are about as many. A few are drawn without a look at the model.
"""

from __future__ import annotations

import random

from random_parts import Traits

_TWO = {
    "data": ["dp=2", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,zero=3", "dp=2,zero=1,offload"],
    "tensor": ["tp=2", "tp=2", "tp=2,sp"],
    "sequence": ["tp=2,sp"],
    "pipeline": ["pp=2"],
    "context": ["cp=2", "cp=2,context=ulysses", "cp=2,zero=1", "cp=2,zero=3"],
    "expert": ["dp=2,ep=2", "dp=2,ep=2,zero=1", "dp=2,ep=2,zero=3"],
    "none": ["dp=1"],  # with microbatches or recomputation
}
_FOUR = {
    "data": ["dp=4", "dp=4,zero=3", "dp=4,zero=1,shard=2", "dp=4,zero=3,shard=2"],
    "tensor": ["dp=2,tp=2", "dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3", "tp=4", "tp=2,pp=2"],
    "sequence": ["dp=2,tp=2,sp", "tp=2,sp,pp=2", "dp=2,tp=2,sp,zero=3"],
    "pipeline": ["dp=2,pp=2", "dp=2,pp=2,zero=1", "dp=2,pp=2,zero=3", "tp=2,pp=2", "pp=4"],
    "context": ["cp=4", "dp=2,cp=2", "tp=2,cp=2", "pp=2,cp=2", "dp=2,cp=2,zero=3"],
    "expert": ["dp=4,ep=2", "dp=2,tp=2,ep=2", "dp=2,ep=2,pp=2", "dp=4,ep=4"],
}
_SCHEDULES = ["1f1b", "1f1b", "1f1b", "f-then-b", "zb1p", "interleaved", "zbv"]
FOUR_RANKS = 0.15  # the share of plans for 4 ranks, which take longer
UNSUITABLE = 0.3  # the share of models that are given one plan which they cannot be expected to train under


def plans(seed: int, count: int, traits: Traits, only: str = "") -> list[str]:
    """Different plans; only: those that contain this word, such as "tp"."""
    draw = random.Random(f"plans of {seed}")
    drawn: dict[str, None] = {}
    has_unsuitable = draw.random() < UNSUITABLE
    for _ in range(300):
        shapes = _FOUR if draw.random() < FOUR_RANKS else _TWO
        shape = draw.choice(shapes[draw.choice([*shapes, "expert", "context", "pipeline"])])
        words = [shape, *_more(draw, shape, traits)]
        if only not in ",".join(words) or ("ep=" in shape and not traits.experts) or words == ["dp=1"]:
            continue
        if shape == "dp=1" and draw.random() < 0.6:
            continue
        if _suits(words, traits) or has_unsuitable:
            has_unsuitable = has_unsuitable and _suits(words, traits)
            drawn[",".join(words)] = None
        if len(drawn) == count:
            break
    return list(drawn)


def _more(draw: random.Random, shape: str, traits: Traits) -> list[str]:
    words = []
    is_single = shape == "dp=1"
    samples = traits.samples // _number(shape, "dp")
    counts = [count for count in (2, 2, 3, 4) if count <= samples and "microbatches" not in traits.unfit] or [1]
    if "pp=" in shape:
        schedules = [each for each in _SCHEDULES if each != "interleaved" or counts == [1] or _number(shape, "pp") == 2]
        schedule = "naive" if counts == [1] or draw.random() < 0.1 else draw.choice(schedules)
        has_chunks = schedule in ("interleaved", "zbv")
        if has_chunks and traits.blocks < 2 * _number(shape, "pp"):
            schedule, has_chunks = "1f1b", False
        if schedule == "interleaved":
            counts = [count for count in counts if count % _number(shape, "pp") == 0] or counts
        words.append(f"microbatches={1 if schedule == 'naive' else draw.choice(counts)}")
        words += [f"schedule={schedule}"] if schedule != "1f1b" else []
        words += ["chunks=2"] if has_chunks else []
    elif draw.random() < (0.6 if is_single else 0.2) and counts != [1]:
        words.append(f"microbatches={draw.choice(counts)}")
    if draw.random() < (0.7 if is_single else 0.15):
        kinds = ["full"] * ("recompute" not in traits.unfit and traits.blocks > 0) + ["selective", "attention"]
        words.append(f"recompute={draw.choice(kinds)}")
    return words


def _suits(words: list[str], traits: Traits) -> bool:
    """Whether the model can be expected to train under the plan."""
    plan = ",".join(words)
    axes = {axis for axis in ("dp", "tp", "pp", "cp", "ep") if _number(plan, axis) > 1}
    axes |= {word.partition("=")[0] for word in plan.split(",") if word.startswith(("sp", "zero", "microbatches"))}
    if "zero=3" in plan:
        axes.add("zero3")
    if "microbatches=1" in plan:
        axes.discard("microbatches")
    if "recompute=full" in plan:
        axes.add("recompute")
    if axes & traits.unfit:
        return False
    stages = _number(plan, "pp") * _number(plan, "chunks")
    if stages > 1 and traits.blocks < stages:
        return False
    if {"cp", "sp"} & axes and not traits.length:
        return False
    if traits.length % (2 * _number(plan, "cp")) and "cp" in axes:
        return False
    heads = _number(plan, "tp") * (_number(plan, "cp") if "ulysses" in plan else 1)
    if traits.heads and traits.heads % heads:
        return False
    return traits.samples >= _number(plan, "dp") * _number(plan, "microbatches")


def _number(plan: str, key: str) -> int:
    words = [word.partition("=") for word in plan.split(",")]
    return next((int(value) for name, _, value in words if name == key), 1)
