"""Measures this machine: the figures of a Hardware file.

On a CPU, processes with one thread each measure at the same time, because that is how they will compute: they share
memory bandwidth and caches. Where there are more ranks than cores, as many as there are cores do: those are the rates
of a core, and the planner knows that the others take turns with them. On a GPU one process measures the device; links
are those of the other ranks on this host, where there are several GPUs.
"""

from __future__ import annotations

import os
import statistics

import torch

from unisono.comm.communicator import Communicator
from unisono.planner.measure.attention import AttentionTimer
from unisono.planner.measure.figures import Figures
from unisono.planner.measure.links import Care, links, posting
from unisono.planner.measure.links import together as of_ranks
from unisono.planner.measure.ops import Clock


def measured(
    comm: Communicator, device: torch.device, care: Care | None = None, *, with_dropout: bool = True
) -> Figures:
    """What one rank sees while all of them measure; of ranks that found no core, only what they see of links.

    with_dropout: as it is once a process has drawn for a while, for which it may have to compile."""
    care = care or Care()
    places = comm.all_gather_object(comm.local_rank) if comm.size > 1 else [0]
    cores = usable_cores()
    busy = [rank for rank, place in enumerate(places) if device.type == "cuda" or place < cores]
    figures: Figures = {"links": {}, "cores": cores * places.count(0), "hosts": places.count(0)}
    if comm.rank in busy:
        together = comm if len(busy) == comm.size else comm.subgroup(busy)
        clock = Clock(together, device, care)
        computing = _computing(clock, with_dropout)
        for _ in range(0 if device.type == "cuda" else care.passes - 1):
            computing = _better(computing, _computing(clock, with_dropout))
        figures |= computing
    if comm.size > 1:
        comm.barrier()
        clock = Clock(comm, device, care)
        figures["links"] = links(comm, care, clock.time, len(busy) == comm.size)
        if device.type != "cuda":
            figures["post"] = posting(comm, care)
    return figures


def usable_cores() -> int:
    """Of this host, by this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _computing(clock: Clock, with_dropout: bool) -> Figures:
    device = clock.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    figures: Figures = {"flops": {}}
    for each in (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,):
        figures["flops"][str(each).removeprefix("torch.")] = clock.products(each)
    if device.type != "cuda":
        figures["backward"] = clock.products_of_backward(dtype)
    if device.type == "cuda":
        figures["attention"] = clock.attentions(dtype)
        figures["attention_float32"] = clock.attentions(torch.float32)
        figures["library"] = clock.library()
    figures["bandwidth"] = clock.bandwidth()
    figures["overhead"] = clock.overhead()
    products = (*figures["flops"][str(dtype).removeprefix("torch.")], *figures.get("backward", ()))
    figures["ops"] = clock.ops(dtype, with_dropout, max(rate for _, rate in products))
    figures["optimizer"] = clock.optimizer()
    if device.type != "cuda":
        matrices = AttentionTimer(clock, dtype)
        figures["matrices"] = {"attention": matrices.figures(dropout=0.0)}
        if with_dropout:
            figures["matrices"]["attention_dropout"] = matrices.figures(dropout=0.1)
            figures["dropout"] = clock.dropout_overhead()
    if device.type != "cuda":
        figures["looped"] = clock.optimizer(foreach=False)
    return figures


def _better(one: Figures, other: Figures) -> Figures:
    """Of two passes, some seconds apart: what else the machine does for a while only adds to what things take."""
    chosen = dict(one)
    for key in ("bandwidth", "optimizer", "looped"):
        chosen[key] = max(one[key], other[key])
    for key in ("overhead", *(key for key in ("dropout",) if key in one)):
        chosen[key] = min(one[key], other[key])
    chosen["matrices"] = {
        kind: {key: list(map(min, points, other["matrices"][kind][key])) for key, points in of_kind.items()}
        for kind, of_kind in one["matrices"].items()
    }
    chosen["backward"] = list(map(max, one["backward"], other["backward"]))
    chosen["flops"] = {dtype: list(map(max, points, other["flops"][dtype])) for dtype, points in one["flops"].items()}
    # A backward is timed together with its forward: of both, the pass in which they took less together.
    chosen["ops"] = {
        op: min(rates, other["ops"][op], key=lambda pair: 1 / pair[0] + 1 / pair[1]) for op, rates in one["ops"].items()
    }
    return chosen


def merged(figures: list[Figures]) -> Figures:
    """Of several ranks: the mean."""
    if len(figures) == 1:
        return figures[0]
    together = dict(figures[0])
    together["links"] = {
        name: of_ranks(name, [each["links"][name] for each in figures]) for name in figures[0]["links"]
    }
    for key in ("bandwidth", "overhead", "optimizer", "looped", "step", "microbatch", "post"):
        together[key] = statistics.mean([each[key] for each in figures if key in each] or [0.0])
    return together
