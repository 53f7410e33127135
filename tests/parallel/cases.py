"""Jobs for the pipeline: a model, a batch and a loss by name, run on one process or on the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from tests.parallel import models
from unisono.comm.communicator import Communicator
from unisono.parallel.pipeline.layers import build_full, split_layers
from unisono.parallel.pipeline.runtime import PipelineRuntime
from unisono.parallel.pipeline.split import StageSplit, split
from unisono.parallel.pipeline.tied import TiedGradients
from unisono.plan.schedules.schedule import schedule

SEED = 5
STEPS = 2


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Any]  # (samples, generator)
    part: Callable[[Any, Any], torch.Tensor]  # (outputs, targets): summed, to be divided by the batch's samples
    layers: Callable[[], list[Any]] | None = None


def _features(width: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda samples, generator: torch.randn(samples, width, dtype=torch.float64, generator=generator)


def _tokens(vocabulary: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda samples, generator: torch.randint(vocabulary, (samples, 7), generator=generator)


def _classes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets % 3, reduction="sum")


def _next_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    shifted = torch.stack([(targets + i) % outputs.shape[-1] for i in range(outputs.shape[1])], 1)
    return F.cross_entropy(outputs.flatten(0, 1), shifted.flatten(), reduction="sum")


def _relayed(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    out = outputs["out"]
    aims = torch.linspace(0.5, 2, out.shape[-1], dtype=out.dtype) * (targets % 3).reshape(-1, 1, 1)
    return (out - aims).square().sum() + outputs["total"].sum()


def _powers(samples: int, generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(samples, 2, 3, dtype=torch.float64, generator=generator), "power": 2}


def _padded(samples: int, generator: torch.Generator) -> dict[str, Any]:
    mask = torch.arange(7) < torch.randint(3, 8, (samples, 1), generator=generator)
    return {"input_ids": _tokens(17)(samples, generator), "attention_mask": mask.long()}


CASES = {
    "mlp": Case(models.mlp, _features(4), _classes),
    "structured": Case(models.structured, _features(4), _classes),
    "two times": Case(models.two_times, _features(4), _classes),
    "gpt": Case(lambda: models.gpt(layers=8), _tokens(17), _next_tokens),
    "relay": Case(lambda: models.Relay(depth=8), _powers, _relayed),
    "llama": Case(
        lambda: models.llama(tie_word_embeddings=True).double(),
        _padded,
        lambda out, aims: _next_tokens(out.logits, aims),
    ),
    "tied layers": Case(
        lambda: build_full(models.tied_layers(), SEED), _tokens(11), _next_tokens, layers=models.tied_layers
    ),
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float64)
    try:
        return case.model()
    finally:
        torch.set_default_dtype(torch.float32)


def batch(case: Case, samples: int, step: int) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs = case.inputs(samples, generator)
    return inputs, torch.randint(50, (samples,), generator=generator)


def rows(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """The batch in microbatches of these sizes."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        tree_map(lambda leaf: leaf[start : start + size] if isinstance(leaf, torch.Tensor) else leaf, tree)  # noqa: B023
        for start, size in zip(starts, sizes, strict=True)
    ]


@dataclass
class Record:
    """What a run gave: by step, and by name of the parameter."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]  # parameters at the start


def plain(name: str, samples: int) -> Record:
    """One process, the full batch at once."""
    case = CASES[name]
    model = build(case)
    first = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for step in range(STEPS):
        inputs, targets = batch(case, samples, step)
        optimizer.zero_grad()
        loss = case.part(called(model, inputs), targets) / samples
        loss.backward()
        losses.append(loss.item())
        gradients.append(_gradients(model))
        optimizer.step()
    return Record(losses, gradients, {key: value.detach() for key, value in model.named_parameters()}, first)


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}


@dataclass(frozen=True)
class Job:
    case: str
    schedule: str
    sizes: tuple[int, ...]  # of the microbatches
    chunks: int | None = None
    boundaries: tuple[int, ...] | None = None
    with_example: bool = True
    split_backward: bool = True


def split_of(job: Job, ranks: int, rank: int) -> tuple[StageSplit, Any]:
    """This rank's part, and the schedule."""
    case = CASES[job.case]
    made = schedule(job.schedule, ranks, len(job.sizes), job.chunks)
    if case.layers is not None:
        torch.set_default_dtype(torch.float64)
        try:
            return split_layers(case.layers(), made, rank, SEED, boundaries=job.boundaries), made
        finally:
            torch.set_default_dtype(torch.float32)
    example = batch(case, 2, 0)[0] if job.with_example else None
    return split(build(case), made, rank, example=example, boundaries=job.boundaries), made


@dataclass
class Report(Record):
    peaks: dict[int, int]
    tied: tuple[tuple[str, tuple[int, ...]], ...]
    elsewhere: frozenset[str]
    evaluated: float
    predicted: list[Any]


def piped(comm: Communicator, job: Job) -> Report:
    """The same as `plain` on the ranks of a pipeline; gradients and parameters are those of this rank's stages."""
    case = CASES[job.case]
    sharded, made = split_of(job, comm.size, comm.rank)
    samples = sum(job.sizes)
    targets: list[torch.Tensor] = []

    def loss(outputs: Any, number: int) -> torch.Tensor:
        return case.part(outputs, targets[number]) / samples

    runtime = PipelineRuntime(sharded.stages, made, comm, loss, split_backward=job.split_backward)
    tied = TiedGradients(sharded.tied, comm)
    first = {key: value.detach().clone() for key, value in sharded.model.named_parameters()}
    optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=0.01)
    losses, gradients, peaks = [], [], {}
    for step in range(STEPS):
        inputs, full_targets = batch(case, samples, step)
        targets[:] = rows(full_targets, job.sizes)
        optimizer.zero_grad()
        losses.append(float(runtime.step(rows(inputs, job.sizes))))
        peaks = runtime.peaks
        tied.sum(dict(sharded.model.named_parameters()))
        gradients.append(_gradients(sharded.model))
        optimizer.step()
    evaluated = float(runtime.evaluate(rows(inputs, job.sizes)))
    predicted = runtime.predict(rows(inputs, job.sizes))
    return Report(
        losses,
        gradients,
        {key: value.detach() for key, value in sharded.model.named_parameters()},
        first,
        peaks,
        tuple((each.name, each.ranks) for each in sharded.tied),
        tied.elsewhere,
        evaluated,
        predicted,
    )


def agree(reports: Sequence[Report], reference: Record) -> None:
    """Every rank's loss, gradients and parameters are the reference's, and together the ranks have all of them."""
    held: set[str] = set()
    for report in reports:
        torch.testing.assert_close(report.losses, reference.losses, rtol=1e-10, atol=1e-12)
        held |= set(report.parameters)
        for name, value in report.first.items():
            assert torch.equal(value, reference.first[name]), f"{name} starts otherwise"
        for step, gradients in enumerate(report.gradients):
            for name, value in gradients.items():
                _close(value, reference.gradients[step][name], f"gradient of {name} in step {step}")
        for name in report.parameters:
            assert (name in reference.gradients[-1]) == (name in report.gradients[-1]), name
            _close(report.parameters[name], reference.parameters[name], name)
    assert held == set(reference.parameters)


def _close(value: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")
