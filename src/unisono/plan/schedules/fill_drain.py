"""All forwards, then all backwards: the pipeline fills, then drains.

With m microbatches on p ranks (GPipe; here `f-then-b`; p = 4, m = 4, a backward drawn as long as a forward):

    rank 0   F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
    rank 1   .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 ..
    rank 2   .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 .. ..
    rank 3   .. .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. ..

Each rank idles 2(p-1) of 2(m+p-1) slots, the fraction (p-1)/(m+p-1), and keeps the activations of all m microbatches.
The naive pipeline is the case m = 1: the whole batch goes through at once, one rank works at a time.
"""

from __future__ import annotations

from unisono.plan.schedules.action import Action, Lists


def fill_drain(ranks: int, microbatches: int, chunks: int) -> Lists:
    """One stage a rank; backwards in the order of the forwards."""
    order = range(microbatches)
    return tuple(
        (*(Action("F", rank, j) for j in order), *(Action("B", rank, j) for j in order)) for rank in range(ranks)
    )
