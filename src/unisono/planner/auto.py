"""plan="auto": the plan of a job, and predictions for a run before it begins.

1. search    rank 0 ranks all plans by the cost model (plan/search), on the machine that the ranks have measured
2. replay    the best few are tried on every rank, with communication simulated, and predicted from that (replay.py)
3. race      the best of those take real steps, and the fastest is chosen (race.py)

Every rank has the same answer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.operation import no_communication
from unisono.errors import UsageError
from unisono.plan.hardware.spec import Hardware
from unisono.plan.plan import Plan
from unisono.plan.search.search import WITHIN, Candidate, Search
from unisono.plan.search.why_not import why_not
from unisono.planner.choice import Choice, Job
from unisono.planner.measure.machine import forget, hardware_here
from unisono.planner.planner import Planner
from unisono.planner.race import race
from unisono.planner.replay import replay

_RANKED = 24  # plans of the search that are looked at
_REPLAYED = 8  # of these, the most that are replayed,
_COMPILED = 3  # where each has to be compiled,
_ALIKE = 2  # and the most with the same mesh: the cost model tells these apart less well than a replay does
_MUCH_SLOWER = 2.0  # times the best prediction of the cost model: what it says takes longer is not replayed
_FEW_RANKS = 16  # up to which all plans that are not much slower are looked at closely; the search stays short
_FAR_OFF = 1.5  # of measured and predicted times: a machine that was measured at a bad moment


def choose(job: Job, comm: Communicator, device: torch.device, options: Any, *, with_race: bool = True) -> Choice:
    """The fastest plan. Without a race, the best by the cost model alone.

    options: further arguments of `parallelize`. A job that cannot be traced shares its batch, and nothing is predicted
    of it."""
    if options.get("batch") == "local":
        return Choice(Plan(dp=comm.size), note='batch="local": each rank has its own samples, so dp alone is chosen')
    hardware = hardware_here(comm, device)
    search, choices = _planned(job, comm, hardware, _RANKED if with_race else 1)
    if job.compile:  # the cost model knows operations, and not how they are fused
        choices = [replace(each, plan=each.plan.but(compile=True)) for each in choices]
    room = hardware.usable_memory - max(comm.all_gather_object(_given_bytes(job, device), only_data=True))
    most = _COMPILED if job.compile else _REPLAYED
    entrants = [each for each in _diverse(choices, most) if (each.memory or 0) <= room]  # beside the user's own module
    is_plain = choices[0].plan.but(compile=False) == Plan()  # one device that does nothing else: nothing is faster
    if with_race and not is_plain and len(choices) > 1 and entrants and not choices[0].note:
        found = replay([each.plan for each in entrants], job, comm, device, hardware, options)
        predicted = zip(entrants, found, strict=True)
        replayed = [replace(each, seconds=seconds, reason=reason) for each, (seconds, reason) in predicted]
        best = race(replayed, job, comm, device, options)
        if _is_far_off(best):
            forget(comm, device)
    else:
        best = choices[0]
    return _with_reasons(search, best, comm)


def prediction(plan: Plan, job: Job, comm: Communicator, device: torch.device, options: Any) -> Choice:
    """What is predicted of a plan: by a replay, where there is memory for it beside the training itself."""
    hardware = hardware_here(comm, device)
    _, (choice,) = _planned(job, comm, hardware, 1, plan)
    if choice.note or not choice.memory or 2 * choice.memory > hardware.usable_memory:
        return choice
    ((seconds, _),) = replay([plan], job, comm, device, hardware, options)
    return choice if seconds is None else replace(choice, seconds=seconds)


_APPLIED = (
    "in a prediction by one of them: a plan has changed the module in place; pass a function that builds the model"
)


def _planned(
    job: Job, comm: Communicator, hardware: Hardware, top: int, plan: Plan | None = None
) -> tuple[Search | None, list[Choice]]:
    """The best plans by the cost model, or the plan that is given; the search on rank 0."""
    search: Search | None = None
    found: list[Choice] | str | None = None
    if comm.rank == 0:
        try:
            with no_communication(_APPLIED):
                search = Planner(job.task(), hardware, cudagraph=job.cudagraph).search(comm.size)
                found = _ranked(search, top, plan)
        except Exception as error:
            if search is not None and plan is None and isinstance(error, UsageError):
                found = str(error)
            else:  # the cost model does not cover the job, or a plan given by hand; rank 0 must not fail alone
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                found = [Choice(plan or Plan(dp=comm.size), note=f"not predicted: {first}")]
    found = comm.broadcast_object(found, only_data=True)
    if isinstance(found, str):
        raise UsageError(found)
    assert found is not None
    return search, found


def _ranked(search: Search, top: int, plan: Plan | None) -> list[Choice]:
    if plan is not None:
        return [_choice(search, search.judged(plan, played=True))]
    within = _MUCH_SLOWER if top > 1 and search.world <= _FEW_RANKS else WITHIN
    best = {str(each.plan): each for each in search.run(top, within).candidates}
    return [_choice(search, each) for each in best.values()]


def _choice(search: Search, best: Candidate) -> Choice:
    stages = search.stages(best.plan)
    return Choice(
        best.plan,
        best.seconds,
        int(best.footprint.total),
        best.footprint.parts(),
        [search.memory.of_rank(best.plan, stages, rank).parts() for rank in range(best.plan.pp)],
        flops=search.profile.flops,
    )


def _given_bytes(job: Job, device: torch.device) -> int:
    """Of a module that the user has on the device already, and that stays there while copies of it are tried."""
    if not isinstance(job.model, nn.Module):
        return 0
    return sum(each.nbytes for each in job.model.parameters() if each.device.type == device.type)


def _diverse(choices: Sequence[Choice], most: int) -> list[Choice]:
    """The best few, of which not many have the same mesh."""
    seen: Counter[object] = Counter()
    chosen: list[Choice] = []
    for each in choices:
        seen[each.plan.shape] += 1
        near = (each.seconds or 0.0) <= _MUCH_SLOWER * (choices[0].seconds or 0.0)
        if seen[each.plan.shape] <= _ALIKE and near and len(chosen) < most:
            chosen.append(each)
    return chosen


def _is_far_off(best: Choice) -> bool:
    """Whether predictions of the plans that raced were: by the median of them."""
    ratios = [lap.measured / lap.predicted for lap in best.race if lap.measured and lap.predicted]
    return bool(ratios) and not 1 / _FAR_OFF < statistics.median(ratios) < _FAR_OFF


def _with_reasons(search: Search | None, best: Choice, comm: Communicator) -> Choice:
    """With why not its neighbours: by the race, or by the cost model where that does not contradict it."""
    why: list[tuple[str, str]] = []
    if search is not None and not best.note and best.seconds is not None:
        judged = search.judged(best.plan.but(compile=False), played=True)
        measured = {str(Plan.parse(lap.plan).but(compile=False)): lap.measured for lap in best.race if lap.measured}
        for each in why_not(search, judged):
            if best.race and str(each.plan) in measured:
                slower = measured[str(each.plan)] / measured[str(judged.plan)] - 1
                why.append((each.change, f"{slower:+.0%} (measured)"))
            elif not best.race or each.seconds is None or each.seconds >= judged.seconds:
                why.append((each.change, each.reason))
    return replace(best, why=comm.broadcast_object(why, only_data=True))
