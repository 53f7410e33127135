"""The pipeline at work, against one process: losses, gradients and two steps, under every schedule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.parallel.cases import CASES, STEPS, Job, agree, batch, build, called, piped, plain, rows
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.plan.schedules.activations import microbatches_alive
from unisono.plan.schedules.schedule import schedule

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


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv"])
def test_a_hugging_face_model_as_it_is(pools: Pools, name: str) -> None:
    pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    job = Job("llama", name, (2, 1, 1))
    agree(pools("gloo", 2).run(piped, job), plain("llama", sum(job.sizes)))


def test_tied_parameters_lie_on_both_ends_and_count_once(pools: Pools) -> None:
    for case, name in (("gpt", "tokens.weight"), ("tied layers", "0.weight")):
        first, last = pools("gloo", 2).run(piped, Job(case, "1f1b", (2, 1)))
        assert first.tied == last.tied == ((name, (0, 1)),)
        assert (first.elsewhere, last.elsewhere) == (frozenset(), {name})
        assert name in first.parameters
        assert name in last.parameters
        # In the V both ends are on rank 0: nothing is shared between ranks.
        folded = pools("gloo", 2).run(piped, Job(case, "zbv", (2, 1)))
        assert [report.tied for report in folded] == [(), ()]
        assert [name in report.parameters for report in folded] == [True, False]


def test_a_parameter_used_between_blocks_lies_on_every_rank_that_uses_it(pools: Pools) -> None:
    reports = pools("gloo", 4).run(piped, Job("relay", "1f1b", (1, 1)))
    assert all(report.tied == (("depths", (0, 1, 2, 3)),) for report in reports)


@pytest.mark.parametrize("job", [Job("relay", "1f1b", (2, 1, 3)), Job("gpt", "zbv", (1, 3))], ids=["dict", "tensor"])
def test_evaluation_and_predictions_are_on_every_rank(pools: Pools, job: Job) -> None:
    reports = pools("gloo", 2).run(piped, job)
    case = CASES[job.case]
    model = build(case)
    model.load_state_dict(plain(job.case, sum(job.sizes)).parameters, strict=False)
    inputs, targets = batch(case, sum(job.sizes), STEPS - 1)
    with torch.no_grad():
        outputs = called(model, inputs)
        expected = case.part(outputs, targets) / sum(job.sizes)
    for report in reports:
        assert report.evaluated == pytest.approx(expected.item(), rel=1e-9)
        torch.testing.assert_close(report.predicted, rows(outputs, job.sizes), rtol=1e-8, atol=1e-10)


def _checked_there(comm: Communicator, job: Job) -> None:
    agree(comm.all_gather_object(piped(comm, job)), plain(job.case, sum(job.sizes)))


def test_over_mpi(pools: Pools) -> None:
    for job in (Job("gpt", "1f1b", (2, 1, 1)), Job("relay", "zbv", (2, 1, 1))):
        pools("mpi", 2).run(_checked_there, job)
