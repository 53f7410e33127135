"""The pipeline at work, against one process: losses, gradients and three steps, under every schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.cases import Job, agree, piped, plain
from tests.ranks import RankPool
from unisono.plan.activations import microbatches_alive
from unisono.plan.schedule import schedule

Pools = Callable[[str, int], RankPool]

JOBS = [
    (2, Job("mlp", "naive", (6,))),
    (4, Job("mlp", "f-then-b", (2, 2, 2))),
    (2, Job("mlp", "1f1b", (3, 1, 2, 1, 4))),
    (4, Job("mlp", "1f1b", (1,) * 8)),
    (4, Job("mlp", "1f1b", (2, 1))),
    (4, Job("mlp", "zb1p", (2, 1, 1, 3, 2, 1))),
    (2, Job("mlp", "zbv", (2, 1, 2, 2))),
    (2, Job("mlp", "interleaved", (2, 1, 2), chunks=4)),
    (1, Job("mlp", "1f1b", (2, 3))),
    (2, Job("structured", "1f1b", (2, 1, 3), boundaries=(0, 2))),
    (4, Job("structured", "f-then-b", (2, 1), boundaries=(0, 1, 3, 4))),
    (2, Job("structured", "zbv", (1, 1, 1), boundaries=(0, 2, 3, 5))),
    (2, Job("two times", "zb1p", (2, 2, 1))),
    (2, Job("two times", "zbv", (2, 2, 1))),
    (2, Job("two times", "zb1p", (2, 2, 1), split_backward=False)),
    (2, Job("gpt", "1f1b", (2, 1, 1))),
    (2, Job("gpt", "1f1b", (2, 1, 1), with_example=False)),
    (4, Job("gpt", "zb1p", (1, 2, 1, 1, 1))),
    (4, Job("gpt", "zbv", (1, 2, 1))),
    (4, Job("gpt", "interleaved", (1, 2, 1, 1))),
    (2, Job("relay", "1f1b", (2, 1, 1))),
    (4, Job("relay", "interleaved", (2, 1, 1), chunks=2)),
    (4, Job("relay", "zb1p", (2, 1, 1, 2))),
    (2, Job("relay", "zbv", (2, 1, 1))),
    (2, Job("tied layers", "1f1b", (2, 1, 1))),
    (4, Job("tied layers", "zb1p", (2, 1, 1))),
    (2, Job("tied layers", "zbv", (2, 1, 1))),
]


@pytest.mark.parametrize(("ranks", "job"), JOBS, ids=[f"{j.case}-{j.schedule}-{n}x{len(j.sizes)}" for n, j in JOBS])
def test_the_result_is_that_of_one_process(pools: Pools, ranks: int, job: Job) -> None:
    reports = pools("gloo", ranks).run(piped, job)
    agree(reports, plain(job.case, sum(job.sizes)))
    made = schedule(job.schedule, ranks, len(job.sizes), job.chunks)
    for rank, report in enumerate(reports):
        assert report.peaks == {stage: microbatches_alive(made, stage) for stage in made.stages_of(rank)}
