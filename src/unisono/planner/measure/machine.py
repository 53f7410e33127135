"""This machine as a Hardware: measured by its ranks, all at the same time, and remembered in the user's cache folder.

On CPUs every rank has one thread and they measure together, because that is how they will compute. Where there are more
ranks than cores, as many as there are cores do: those are the rates of a core, and the planner knows that the others
take turns with them. GPUs are measured by all ranks; links are those between the job's ranks, for tensors on their
device. `unisono bench hardware` measures one GPU, and no links.

The file's name has what the figures depend on: the device, torch, the backend, and the ranks of each host.
"""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.signatures.records import plain_record
from unisono.errors import UsageError
from unisono.launch.spawn import spawn
from unisono.plan.hardware.spec import Curve, Hardware, Link
from unisono.plan.hardware.toml import read_hardware, write_hardware
from unisono.planner.measure.links import BRIEF, CAREFUL, Care, links, of_ranks
from unisono.planner.measure.ops import Clock, Points

HARDWARE = "UNISONO_HARDWARE"  # a hardware file, as `unisono bench hardware` writes it
CACHE = "UNISONO_CACHE"  # the folder of measured hardware files; default: unisono in the user's cache folder

Figures = dict[str, Any]  # what one rank has measured


def hardware_here(comm: Communicator, device: torch.device) -> Hardware:
    """What this job runs on: the file that UNISONO_HARDWARE names, or what an earlier job with as many ranks measured
    here, or what the ranks measure now, in a second or two. Every rank calls it and has the same answer."""
    file = _cache_file(comm, device)
    known = comm.broadcast_object(_known(file) if comm.rank == 0 else None, only_data=True)
    if isinstance(known, str):
        raise UsageError(known)
    if known is None:
        # The user's random numbers are as if nothing had been measured.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            known = measured_by(comm, device, BRIEF)
        if comm.rank == 0:
            _write(file, known)
    found: Hardware = known
    return found


def forget(comm: Communicator, device: torch.device) -> None:
    """The next job measures again, unless the user has named a file."""
    if comm.rank == 0 and not os.environ.get(HARDWARE):
        _cache_file(comm, device).unlink(missing_ok=True)


def measure(ranks: int = 2, backend: str | None = None, brief: bool = False) -> Hardware:
    """The same, carefully and in processes of its own: `unisono bench hardware`."""
    found: Hardware = spawn(_on_rank, 1 if torch.cuda.is_available() else ranks, backend, (brief,))[0]
    return found


def _on_rank(brief: bool) -> Hardware:
    torch.set_num_threads(1)
    comm = world.init()
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return measured_by(comm, device, BRIEF if brief else CAREFUL)
    finally:
        world.shutdown()


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured_by(comm: Communicator, device: torch.device, care: Care) -> Hardware:
    """Every rank calls it and has the same answer."""
    locations = _rank_locations(comm, device)
    usable: dict[str, set[int]] = {}
    for each in locations:
        usable.setdefault(each.host, set()).update(each.cores)
    cores = {host: len(of_host) for host, of_host in usable.items()}
    busy = [rank for rank, each in enumerate(locations) if each.gpu or each.local_rank < cores[each.host]]
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    mine: Figures = {}
    if comm.rank in busy:
        group = comm if len(busy) == comm.size else comm.subgroup(busy)
        mine = _computing(Clock(group, device, care.rounds, care.seconds))
        mine["library"] = float(torch.cuda.memory_allocated(device) - allocated) if device.type == "cuda" else 0.0
    if comm.size > 1:
        comm.barrier()
        clock = Clock(comm, device, care.rounds, care.seconds)
        amid_work = len(busy) == comm.size and device.type != "cuda"
        mine["links"] = links(comm, care, clock.time, amid_work, device)
    figures = comm.all_gather_object(mine, only_data=True) if comm.size > 1 else [mine]
    counted = [each for each in figures if "flops" in each]
    return _hardware(counted, _joined(figures), device, locations, sum(cores.values()))


@plain_record
class _RankLocation(NamedTuple):
    """Where a rank runs."""

    host: str
    local_rank: int
    cores: frozenset[int]
    gpu: str


def _rank_locations(comm: Communicator, device: torch.device) -> list[_RankLocation]:
    """Of all ranks: what each may use differs where somebody has bound them to cores, or gave each a GPU."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    mine = _RankLocation(comm.host, comm.local_rank, frozenset(cores), gpu)
    return comm.all_gather_object(mine, only_data=True) if comm.size > 1 else [mine]


def _computing(clock: Clock) -> Figures:
    dtypes = (torch.bfloat16, torch.float32) if clock.is_gpu else (torch.float32,)
    return {
        "flops": {str(dtype).removeprefix("torch."): clock.products(dtype) for dtype in dtypes},
        "attention": clock.attentions(dtypes[0]),
        "bandwidth": clock.bandwidth(),
        "elementwise": clock.elementwise(dtypes[0]),
        "overhead": clock.overhead(),
    }


def _joined(figures: list[Figures]) -> dict[str, Points]:
    """Links, by the measurements of all ranks."""
    measured = [each["links"] for each in figures if "links" in each]
    return {name: of_ranks(name, [each[name] for each in measured]) for name in measured[0]} if measured else {}


def _hardware(
    figures: list[Figures],
    measured: dict[str, Points],
    device: torch.device,
    locations: list[_RankLocation],
    cores: int,
) -> Hardware:
    first, ranks, hosts = figures[0], len(locations), len({each.host for each in locations})
    is_gpu = device.type == "cuda"
    main = "bfloat16" if is_gpu else "float32"
    gpu = torch.cuda.get_device_properties(device) if is_gpu else None
    sharing = Counter((each.host, each.gpu) for each in locations).most_common(1)[0][1]  # ranks on one GPU
    bandwidth, elementwise, overhead = (
        statistics.mean(each[key] for each in figures) for key in ("bandwidth", "elementwise", "overhead")
    )
    link = _link(measured, ranks)
    peaks = {dtype: max(rate for _, rate in points) for dtype, points in first["flops"].items()}
    on_host = ranks // hosts if ranks > 1 else max(torch.cuda.device_count(), 1)
    return Hardware(
        name=gpu.name if gpu else f"{ranks} ranks on {platform.machine()} cores",
        devices_per_node=on_host if is_gpu else ranks,
        cores=None if is_gpu else cores,
        memory=float(gpu.total_memory) / sharing if gpu else host_memory() * hosts / ranks,
        memory_bandwidth=bandwidth,
        memory_efficiency=min(elementwise / bandwidth, 1.0),
        op_overhead=overhead,
        asynchronous=is_gpu,
        library_memory=first["library"],
        overlap=0.8 if is_gpu else 0.0,  # on CPUs messages take the time of the cores that compute
        dropout_mask=0.0 if is_gpu else 4.0,
        flops=peaks,
        matmul=_curve(first["flops"][main], peaks[main]),
        attention=_curve(first["attention"], peaks[main]),
        intra_node=link,
        inter_node=Link(link.bandwidth, link.latency),  # not measured: as within the node
    )


def _link(measured: dict[str, Points], ranks: int) -> Link:
    if not measured:
        return Link(1e11, 1e-5)  # one rank: nothing is measured
    small, large = measured["all_gather"][0], measured["all_gather"][-1]
    slope = large[1] - small[1]  # 0 where all sizes took equally long
    bandwidth = (ranks - 1) / ranks * large[0] / (slope if slope > 0 else large[1])
    curves = tuple((name, tuple(points)) for name, points in measured.items())
    return Link(bandwidth, small[1] / (ranks - 1), curves, ranks)


def _curve(points: Points, peak: float) -> Curve:
    """(FLOPs of a call, FLOPs a second) as shares of the peak."""
    return tuple((size, min(rate / peak, 1.0)) for size, rate in points)


def host_memory() -> float:
    """Bytes of this host, or of the container where that has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip() != "max":
        memory = min(memory, int(limit.read_text()))
    return float(memory)


# ---- the cache -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    given = os.environ.get(CACHE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unisono"


def _cache_file(comm: Communicator, device: torch.device) -> Path:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} x {os.cpu_count()}"
    of_hosts = [comm.hosts.count(host) for host in dict.fromkeys(comm.hosts)]
    depends_on = (name, platform.node(), torch.__version__, comm.backend, of_hosts, torch.get_num_threads())
    key = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:12]
    return cache_folder() / f"hardware-{comm.backend}-{comm.size}-{key}.toml"


def _known(file: Path) -> Hardware | str | None:
    """The user's file, or why it cannot be read; or what was measured, None where this version can read none."""
    named = os.environ.get(HARDWARE)
    try:
        return read_hardware(named or file) if named or file.is_file() else None
    except (UsageError, OSError) as error:
        return str(error) if named else None


def _write(file: Path, hardware: Hardware) -> None:
    """At once, so that no other job reads half a file; a folder that cannot be written is no reason to stop."""
    comment = f"Measured by a job with torch {torch.__version__}; delete the file to measure again."
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as temporary:
            temporary.write(write_hardware(replace(hardware, source=""), comment))
        os.replace(temporary.name, file)
    except OSError:
        pass
