"""Replay: the time of a step under a plan on this machine, from real steps of every rank with simulated communication.

Each rank builds its own part of the plan and trains it for a few steps in a world whose other ranks do not exist
(simulate/rank.py): modules, ops, copies into messages, the optimizer and all that Python does around them are those of
training. All ranks do so at the same time, so that they contend for memory bandwidth and cores as they will. What the
messages would take is added, by their sizes, from the measured links. Of a pipeline, each action is timed, and the
schedule is played with those times.

A plan that is refused, fails or runs out of memory on one rank blocks no other: no rank waits for another.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.comm.signatures.records import plain_record
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.inputs import cloned
from unisono.parallel.meta.meta_tensors import deep_copy
from unisono.parallel.trainer import Trainer
from unisono.plan.cost.collective import group_of
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import REPLICAS, Plan
from unisono.plan.schedules.action import Action
from unisono.plan.schedules.schedule import Schedule
from unisono.plan.schedules.timeline import Costs, timeline
from unisono.planner.choice import Job
from unisono.simulate.rank import simulated_trainer

# Steps that are timed, after two: one that makes the optimizer's state, one whose messages are counted. The median of
# a few survives a disturbance; all ranks stop after the same time, so that none is timed while others are idle.
_FEWEST, _MOST = 3, 10
_ENOUGH = 0.4  # seconds of steps, beyond the fewest
_LONG = 5.0  # seconds of a step after which one is enough
_BACKWARD = 2 / 3  # of a step's computation: what messages of gradients can hide behind

Found = TypeVar("Found")


@plain_record
class Message(NamedTuple):
    """An operation of a communicator: its name, the ranks that take part (of a send, from and to), and this rank's
    bytes."""

    op: str
    ranks: tuple[int, ...]
    size: int


@plain_record
@dataclass
class RankReplay:
    """What one rank measured."""

    plan: Plan
    seconds: float = 0.0  # of a step, without communication
    messages: dict[Message, int] = field(default_factory=dict)  # how many of a step
    replicas: tuple[int, ...] = ()  # ranks that have the same parameters as this one
    schedule: Schedule | None = None  # of a pipeline
    neighbours: tuple[int, ...] = ()  # ranks of its pipeline
    actions: dict[tuple[str, int], float] = field(default_factory=dict)  # seconds by kind and stage


class Prediction(NamedTuple):
    """Seconds of a step, or the reason why there are none."""

    seconds: float | None
    reason: str = ""


def replay(
    plans: Sequence[Plan], job: Job, comm: Communicator, device: torch.device, hardware: Hardware, options: Any
) -> list[Prediction]:
    """Predictions for plans; every rank calls it and has the same answer. options: further arguments of
    `parallelize`."""
    found = []
    with measuring(job, device):
        for plan in plans:
            of_ranks, reason = on_all_ranks(comm, partial(replay_rank, plan, comm.rank, job, device, options))
            found.append(Prediction(None, reason) if reason else Prediction(step_seconds(of_ranks, hardware)))
    return found


# ---- on one rank -----------------------------------------------------------------------------------------------------


def replay_rank(plan: Plan, rank: int, job: Job, device: torch.device, options: Any) -> RankReplay:
    found = RankReplay(plan)
    with simulated_trainer(fresh(job, device).task(), plan, rank, cloned(job.example), options) as trainer:
        timed_step(trainer, job.example, device)  # makes the optimizer's state
        with traffic.counted(partial(_note, found, rank)):
            first = timed_step(trainer, job.example, device)
        found.replicas = trainer.mesh.comm(*REPLICAS).ranks if trainer.mesh.size(*REPLICAS) > 1 else ()
        if trainer.pipeline is not None:
            found.schedule, found.neighbours = trainer.pipeline.schedule, trainer.pipeline.comm.ranks
        fewest = _FEWEST if first < _LONG else 1
        steps: list[float] = []
        with _actions_timed(trainer, device) as actions:
            while len(steps) < fewest or (len(steps) < _MOST and sum(steps) < _ENOUGH):
                steps.append(timed_step(trainer, job.example, device))
        found.seconds = statistics.median(steps)
        found.actions = {key: statistics.median(taken) for key, taken in actions.items()}
    return found


def _note(found: RankReplay, rank: int, record: traffic.CommRecord) -> None:
    ranks = (rank, *record.ranks) if record.op == "send" else record.ranks
    if len(ranks) > 1:
        size = 0 if record.tensor is None else record.tensor.numel() * record.tensor.element_size()
        message = Message(record.op, ranks, size)
        found.messages[message] = found.messages.get(message, 0) + 1


@contextlib.contextmanager
def _actions_timed(trainer: Trainer, device: torch.device) -> Iterator[dict[tuple[str, int], list[float]]]:
    """Seconds that each action of a pipeline computes, by kind and stage."""
    taken: dict[tuple[str, int], list[float]] = {}
    if trainer.pipeline is None:
        yield taken
        return
    around = trainer.pipeline.around

    @contextlib.contextmanager
    def timed(action: Action) -> Iterator[None]:
        start = time.perf_counter()
        with around(action):
            yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.setdefault((action.kind, action.stage), []).append(time.perf_counter() - start)

    trainer.pipeline.around = timed
    try:
        yield taken
    finally:
        trainer.pipeline.around = around


# ---- of all ranks ----------------------------------------------------------------------------------------------------


def step_seconds(of_ranks: Sequence[RankReplay], hardware: Hardware) -> float:
    """Of the slowest rank, or of the pipeline."""
    if of_ranks[0].schedule is None:
        return max(rank.seconds + _within(rank, hardware) + _exposed(rank, hardware) for rank in of_ranks)
    return _pipeline_seconds(of_ranks, of_ranks[0].schedule, hardware)


def _within(rank: RankReplay, hardware: Hardware) -> float:
    """Seconds of messages that forward and backward wait for: all but those of replicas and between stages."""
    return sum(
        count * message_seconds(message, hardware)
        for message, count in rank.messages.items()
        if not _is_of_replicas(message, rank) and not _is_between_stages(message, rank)
    )


def _is_between_stages(message: Message, rank: RankReplay) -> bool:
    return message.op == "send" and message.ranks[1] in rank.neighbours


def _is_of_replicas(message: Message, rank: RankReplay) -> bool:
    """Gradients and parameters, not the keys and values of context parallelism or tokens on their way to experts."""
    return message.op not in ("send", "all_to_all") and set(message.ranks) <= set(rank.replicas)


def _exposed(rank: RankReplay, hardware: Hardware) -> float:
    """Seconds of replicas' messages that do not hide behind the backward. As in `plan.cost.replicas`, parameters that
    ZeRO 1 and 2 gather after the optimizer's step hide behind nothing, nor do gradients that wait for a pipeline."""
    zero, travel, hiding = rank.plan.zero, 0.0, 0.0
    for message, count in rank.messages.items():
        if _is_of_replicas(message, rank):
            seconds = count * message_seconds(message, hardware)
            travel += seconds
            if not (zero in (1, 2) and message.op.startswith("all_gather")):
                hiding += seconds
    can_hide = rank.plan.pp == 1 or zero >= 2
    return travel - (min(hiding, hardware.overlap * _BACKWARD * rank.seconds) if can_hide else 0.0)


def _pipeline_seconds(of_ranks: Sequence[RankReplay], schedule: Schedule, hardware: Hardware) -> float:
    """The schedule played with the times of the slowest rank of each stage. Where ranks share cores, they were timed
    while all of them computed; in a pipeline a rank that waits leaves its core to the others."""
    turns = hardware.turns(len(of_ranks))
    actions: dict[tuple[str, int], float] = {}
    for rank in of_ranks:
        passes = sum(kind != "W" for kind, _ in rank.actions) * schedule.microbatches
        waits = _within(rank, hardware) / passes if passes else 0.0
        for (kind, stage), seconds in rank.actions.items():
            taken = seconds / turns + (waits if kind != "W" else 0.0)
            actions[kind, stage] = max(actions.get((kind, stage), 0.0), taken)
    stages = range(len(schedule.placement))
    split = [actions.get(("I", stage), 0.0) + actions.get(("W", stage), 0.0) for stage in stages]
    backward = [actions.get(("B", stage), split[stage]) for stage in stages]
    sends = [message for rank in of_ranks for message in rank.messages if _is_between_stages(message, rank)]
    costs = Costs(
        forward=[actions[("F", stage)] for stage in stages],
        backward=backward,
        inputs=[actions.get(("I", stage), backward[stage]) for stage in stages],
        weights=[actions.get(("W", stage), 0.0) for stage in stages],
        transfer=max((group_of(hardware, sent.ranks).send(sent.size) for sent in sends), default=0.0),
    )
    acting = [schedule.microbatches * sum(rank.actions.values()) for rank in of_ranks]
    outside = max(rank.seconds - taken + _exposed(rank, hardware) for rank, taken in zip(of_ranks, acting, strict=True))
    shared = max(rank.seconds + _within(rank, hardware) + _exposed(rank, hardware) for rank in of_ranks)
    return max(timeline(schedule, costs).makespan + outside, shared)


def message_seconds(message: Message, hardware: Hardware) -> float:
    ranks = group_of(hardware, message.ranks)
    match message.op:
        case "send":  # round a ring
            return ranks.exchange(message.size)
        case "all_gather" | "all_gather_into":
            return ranks.all_gather(message.size * ranks.ranks)
        case "reduce_scatter":
            return ranks.reduce_scatter(message.size)
        case "all_to_all":
            return ranks.all_to_all(message.size)
        case "broadcast":
            return ranks.all_gather(message.size)
        case "barrier":
            return ranks.all_reduce(1.0)
        case _:
            return ranks.all_reduce(message.size)


# ---- trying a plan ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def measuring(job: Job, device: torch.device) -> Iterator[None]:
    """Nothing that is trained in the block leaves a trace: random numbers, and Python state that user code can reach,
    are as before. Warnings are left for the plan that is chosen."""
    gpus = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), no_side_effects(job.model, job.loss, job.optimizer), torch.random.fork_rng(gpus):
        warnings.simplefilter("ignore")
        yield


def on_all_ranks(
    comm: Communicator, call: Callable[[], Found], errors: type[Exception] = Exception
) -> tuple[list[Found], str]:
    """What the call returned on each rank, and the first error of any. errors: those that do not end the job; any,
    where ranks do not wait for each other in the call."""
    mine: Found | None = None
    error = ""
    try:
        mine = call()
    except errors as raised:  # whatever fails under one plan need not under another, and training would show it
        error = _reason(raised)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found: list[tuple[Any, str]] = comm.all_gather_object((mine, error), only_data=True)
    failed = next((f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error), "")
    return [value for value, _ in found], failed


def _reason(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error):
        return f"out of memory ({first})"
    return first or type(error).__name__


def fresh(job: Job, device: torch.device) -> Job:
    """With a copy of the model, on the device as in training, and of the loss where that is a module."""
    given, loss = job.model, job.loss
    if isinstance(given, nn.Module):
        model: Any = deep_copy(given).to(device)
    else:

        def model() -> Any:
            made = given()
            return made.to(device) if isinstance(made, nn.Module) else made

    return replace(job, model=model, loss=deep_copy(loss) if isinstance(loss, nn.Module) else loss)


def timed_step(trainer: Trainer, batch: Any, device: torch.device) -> float:
    given = cloned(batch)
    start = time.perf_counter()
    trainer.step(given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
