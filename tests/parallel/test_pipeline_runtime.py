"""The pipeline's runtime: memory, random numbers, recomputation, frozen parameters, odd batches, errors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.parallel import models
from tests.parallel.cases import CASES, Job, agree, batch, build, called, piped, plain, rows, split_of
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.random.state import RandomState
from unisono.parallel.pipeline.backward import Arrival, Pass
from unisono.parallel.pipeline.message import MessageForm, TensorForm
from unisono.parallel.pipeline.runtime import PipelineRuntime
from unisono.parallel.pipeline.split import split
from unisono.parallel.pipeline.tied import TiedGradients
from unisono.parallel.recomputation.recompute import recompute
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.activations import microbatches_alive
from unisono.plan.schedules.schedule import schedule

Pools = Callable[[str, int], RankPool]


def _watched(comm: Communicator, job: Job) -> tuple[list[int], list[int]]:
    """How many microbatches' activations are alive: the most at any time on each stage, and after the step."""
    case = CASES[job.case]
    sharded, made = split_of(job, comm.size, comm.rank)
    targets = rows(batch(case, sum(job.sizes), 0)[1], job.sizes)
    made_here: dict[int, list[StorageWeakRef]] = {stage.number: [] for stage in sharded.stages}
    most = dict.fromkeys(made_here, 0)

    def hook(number: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            made_here[number].append(StorageWeakRef(output.untyped_storage()))

        return note

    def alive(number: int) -> int:
        return sum(not storage.expired() for storage in made_here[number])

    @contextlib.contextmanager
    def around(action: Action) -> Iterator[None]:
        yield
        most[action.stage] = max(most[action.stage], alive(action.stage))

    for stage in sharded.stages:
        stage.model.blocks[stage.span.start].fc1.register_forward_hook(hook(stage.number))  # type: ignore[index,union-attr]
    runtime = PipelineRuntime(
        sharded.stages, made, comm, lambda outputs, number: case.part(outputs, targets[number]), around=around
    )
    gc.disable()  # what is freed must be freed at once, not when the collector finds it
    try:
        runtime.step(rows(batch(case, sum(job.sizes), 0)[0], job.sizes))
        left = [alive(number) for number in made_here]
    finally:
        gc.enable()
    return list(most.values()), left


@pytest.mark.parametrize("name", ["f-then-b", "1f1b", "zb1p", "interleaved", "zbv"])
def test_activations_are_kept_as_long_as_the_schedule_says_and_no_longer(pools: Pools, name: str) -> None:
    job = Job("gpt", name, (1,) * 6)
    made = schedule(name, 4, 6)
    for rank, (most, left) in enumerate(pools("gloo", 4).run(_watched, job)):
        assert most == [microbatches_alive(made, stage) for stage in made.stages_of(rank)]
        assert left == [0] * len(most)


def _on_three_of_four(comm: Communicator, job: Job) -> Any:
    three = comm.split([[0, 1, 2], [3]])
    assert three is not None
    return piped(three, job) if three.size == 3 else None


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "interleaved", "zbv"])
def test_three_ranks(pools: Pools, name: str) -> None:
    job = Job("gpt", name, (2, 1, 1, 1, 2))
    reports = pools("gloo", 4).run(_on_three_of_four, job)
    agree(reports[:3], plain("gpt", sum(job.sizes)))


def test_empty_microbatches(pools: Pools) -> None:
    """As on a data rank that got fewer samples than there are microbatches."""
    for job in (Job("gpt", "1f1b", (2, 0, 1, 0)), Job("gpt", "zbv", (0, 2))):
        agree(pools("gloo", 2).run(piped, job), plain("gpt", sum(job.sizes)))


# ---- random numbers ----------------------------------------------------------------------------------------------


def _dropout_gradients(comm: Communicator | None, name: str, again: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Gradients of a GPT with dropout after two steps, on one process (no comm) or in a pipeline."""
    torch.manual_seed(1)
    model: nn.Module = models.gpt(layers=4, dropout=0.3).double()
    state = RandomState(seed=3)
    state.name_modules(model)
    case, samples = CASES["gpt"], sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def around(action: Action) -> contextlib.AbstractContextManager[Any]:
        if action.kind != "F":
            return contextlib.nullcontext()
        start = starts[action.microbatch]
        return state.microbatch(range(start, start + sizes[action.microbatch]), of=samples)

    inputs, targets = batch(case, samples, 0)
    parts = rows(targets, sizes)
    if comm is not None:
        made = schedule(name, comm.size, len(sizes))
        sharded = split(model, made, comm.rank, example=inputs)
        recompute(model, again)
        runtime = PipelineRuntime(
            sharded.stages, made, comm, lambda outputs, number: case.part(outputs, parts[number]), around=around
        )
    for state.step in range(2):
        with state:
            if comm is None:
                case.part(called(model, inputs), targets).backward()
            else:
                runtime.step(rows(inputs, sizes))
    if comm is not None:
        TiedGradients(sharded.tied, comm).sum(dict(model.named_parameters()))
    return {key: value.grad for key, value in model.named_parameters()}


@pytest.mark.parametrize("again", ["none", "selective", "attention", "full"])
@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv"])
def test_dropout_and_recomputation(pools: Pools, name: str, again: str) -> None:
    sizes = (2, 1, 3)
    expected = _dropout_gradients(None, name, again, sizes)
    found: dict[str, torch.Tensor] = {}
    for gradients in pools("gloo", 2).run(_dropout_gradients, name, again, sizes):
        found |= gradients
    assert set(found) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


# ---- frozen parameters -------------------------------------------------------------------------------------------


def _frozen(comm: Communicator | None, name: str) -> list[dict[str, Any]]:
    """Gradients with everything up to block 4 frozen, and then with all of it free again."""
    case = CASES["gpt"]
    model = build(case)
    inputs, targets = batch(case, 4, 0)
    sizes = (2, 1, 1)
    parts = rows(targets, sizes)
    if comm is not None:
        made = schedule(name, comm.size, len(sizes))
        sharded = split(model, made, comm.rank, example=inputs)
        runtime = PipelineRuntime(sharded.stages, made, comm, lambda outputs, number: case.part(outputs, parts[number]))
        tied = TiedGradients(sharded.tied, comm)
    results = []
    for freeze in (True, False):
        for key, parameter in model.named_parameters():
            held = key.startswith(("tokens", "positions", *(f"blocks.{i}." for i in range(5))))
            parameter.requires_grad_(not (freeze and held))
            parameter.grad = None
        if comm is None:
            case.part(called(model, inputs), targets).backward()
        else:
            runtime.forget()
            runtime.step(rows(inputs, sizes))
            tied.sum(dict(sharded.model.named_parameters()))
        results.append({key: value.grad for key, value in model.named_parameters()})
    return results


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_frozen_parameters_get_no_gradient_and_stop_none(pools: Pools, name: str) -> None:
    reports = pools("gloo", 4).run(_frozen, name)
    for turn, expected in enumerate(_frozen(None, name)):
        for report in reports:
            for key, value in report[turn].items():
                if expected[key] is None:
                    assert value is None, key
                else:
                    torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


# ---- what is sent ------------------------------------------------------------------------------------------------


def _sent(comm: Communicator) -> list[int]:
    job = Job("gpt", "1f1b", (1, 2, 1))
    case = CASES["gpt"]
    sharded, made = split_of(job, comm.size, comm.rank)
    inputs, targets = batch(case, 4, 0)
    parts = rows(targets, job.sizes)
    runtime = PipelineRuntime(sharded.stages, made, comm, lambda outputs, number: case.part(outputs, parts[number]))
    sent = []
    for _ in range(2):
        with traffic.counted() as counted:
            runtime.step(rows(inputs, job.sizes))
        sent.append(counted.payload["send"])
    return sent


def test_after_the_first_step_only_activations_and_gradients_are_sent(pools: Pools) -> None:
    tensor = 4 * 7 * 8 * 8  # samples, tokens, width, bytes
    sent = pools("gloo", 4).run(_sent)
    assert [second for _, second in sent] == [tensor, 2 * tensor, 2 * tensor, tensor]
    assert all(tensor < first < 2 * tensor + 8000 for first, _ in sent[:3])  # with forms, one for each kind


# ---- errors ------------------------------------------------------------------------------------------------------


def _refused(comm: Communicator) -> list[str]:
    printed = []
    sharded, made = split_of(Job("mlp", "1f1b", (1, 1)), comm.size, comm.rank)

    def attempt(what: Callable[[], Any]) -> None:
        try:
            what()
        except UsageError as error:
            printed.append(str(error))

    runtime = PipelineRuntime(sharded.stages, made, comm, lambda outputs, number: outputs)
    attempt(lambda: runtime.step([torch.zeros(1, 4)] * 3))
    attempt(lambda: PipelineRuntime(sharded.stages, schedule("1f1b", 3, 2), comm))
    attempt(lambda: PipelineRuntime(sharded.stages, schedule("zbv", comm.size, 2), comm))
    attempt(lambda: schedule("naive", comm.size, 2))
    return printed


def test_bad_requests_are_refused_on_every_rank(pools: Pools) -> None:
    for rank, printed in enumerate(pools("gloo", 2).run(_refused)):
        assert len(printed) == 4
        assert "made for 2 microbatches, but 3 were given" in printed[0]
        assert "for 3 pipeline ranks, but 2 are given" in printed[1]
        assert f"rank {rank} of the pipeline has stages [{rank}], but its schedule places" in printed[2]
        assert "takes microbatches=1, not 2" in printed[3]


def _bad_losses(comm: Communicator) -> list[str]:
    sharded, made = split_of(Job("mlp", "1f1b", (1,)), 1, 0)
    printed = []
    for loss in (lambda outputs, number: outputs, lambda outputs, number: 3.0, None):
        try:
            PipelineRuntime(sharded.stages, made, comm, loss).step([torch.zeros(1, 4, dtype=torch.float64)])
        except UsageError as error:
            printed.append(str(error))
    return printed


def test_a_loss_must_be_one_number(pools: Pools) -> None:
    (printed,) = pools("gloo", 1).run(_bad_losses)
    assert ["(1, 3)" in printed[0], "float" in printed[1], "given no loss" in printed[2]] == [True] * 3


def test_the_second_half_is_left_the_matrices_only() -> None:
    """A norm's gradients are sums: they cost less in the first half than autograd takes to be started for them."""
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(3, 4)
    arrival = Arrival([x], MessageForm((TensorForm((3, 4), x.dtype, True),), ((0,),), 1, None))
    one = Pass.of(arrival, [block(arrival.tensors[0])])
    one.backward_inputs([torch.ones(3, 4)])
    assert [parameter.grad is not None for parameter in block.parameters()] == [True, True, False, False, True, True]
    one.backward_weights()
    halves = [parameter.grad for parameter in block.parameters()]
    full = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    torch.testing.assert_close(halves, list(full))


def test_a_first_stage_runs_its_full_backward_in_the_first_half() -> None:
    """It has no inputs that anyone waits for; left to the second half, all of it would keep others waiting."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    one = Pass.of(None, [block(x)])
    one.backward_inputs([torch.ones(3, 4)])
    first_half = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    one.backward_weights()
    full = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    torch.testing.assert_close(first_half, list(full))
    torch.testing.assert_close([parameter.grad for parameter in block.parameters()], list(full))
