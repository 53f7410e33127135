"""Pipelines of all kinds for the tests of this folder."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from unisono.plan.schedules.schedule import NAMES, Schedule, schedule


def examples(count: int) -> settings:
    """So many examples, the same ones every time, however slow the machine."""
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


@st.composite
def pipelines(draw: st.DrawFn, most_ranks: int = 9, most_microbatches: int = 28) -> Schedule:
    """Any schedule, with fewer microbatches than ranks as well as more."""
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, most_ranks))
    microbatches = 1 if name == "naive" else draw(st.integers(1, most_microbatches))
    chunks = draw(st.integers(1, 4)) if name == "interleaved" else None
    return schedule(name, ranks, microbatches, chunks)


def every_pipeline(ranks: int, microbatches: int) -> list[Schedule]:
    made = [schedule(name, ranks, 1 if name == "naive" else microbatches) for name in NAMES]
    return [*made, schedule("interleaved", ranks, microbatches, 3)]
