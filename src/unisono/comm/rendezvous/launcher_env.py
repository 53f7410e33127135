"""A process's rank info: its rank in the world, read from the launcher's environment variables.

Every launcher has variables of its own. `find_rank_info` reads them in this order: what the caller gave, torchrun's and
unisono's RANK and WORLD_SIZE, then MPI's, then Slurm's; where none is set, a world of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsIndex
from urllib.parse import parse_qs, urlparse

from unisono.errors import UsageError
from unisono.launch import environment, scheduler

ALONE = "alone"
ENVIRONMENT = "environment"  # unisono run, torchrun, or the variables set by hand
MPIEXEC = "mpiexec"
SRUN = "srun"
TCP = "tcp"
FILE = "file"


@dataclass(frozen=True)
class RankInfo:
    rank: int
    size: int
    how: str
    url: str | None = None  # where to meet, when `how` needs an address
    local_rank: int | None = None  # None: not known; found by comparing host names
    local_size: int | None = None


def find_rank_info(
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> RankInfo:
    """This process's rank info. Raises UsageError when what is given or set makes no world."""
    for name, given in (("rank", rank), ("world_size", world_size)):
        if given is not None and not isinstance(given, SupportsIndex):
            raise UsageError(f"{name}={given!r}: expected a whole number")
    if init_method is not None and not isinstance(init_method, str):
        raise UsageError(f"init_method {init_method!r}: expected tcp://HOST:PORT, file:///PATH or env://")
    if init_method is not None and not init_method.startswith("env://"):
        info = _from_url(init_method, rank, world_size, environ)
    else:
        info = _from_environment(environ, wanted=init_method is not None)
        info = _overridden(info, rank, world_size)
    _check(info)
    return info


def _from_url(url: str, rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> RankInfo:
    parsed = urlparse(url)
    if parsed.scheme not in (TCP, FILE):
        raise UsageError(f"init_method {url!r}: expected tcp://HOST:PORT, file:///PATH or env://")
    query = parse_qs(parsed.query)
    rank = _first_int("rank", rank, query, environ.get("RANK"))
    size = _first_int("world_size", world_size, query, environ.get("WORLD_SIZE"))
    if rank is None or size is None:
        missing = " and ".join(n for n, v in (("rank", rank), ("world_size", size)) if v is None)
        raise UsageError(
            f"init_method {url!r} needs {missing} as well: uni.init(init_method=..., rank=0, world_size=4)"
        )
    if parsed.scheme == TCP:
        try:
            port = parsed.port
        except ValueError:
            port = None
        if not parsed.hostname or not port:
            raise UsageError(f"init_method {url!r}: expected tcp://HOST:PORT with a port from 1 to 65535")
        return RankInfo(rank, size, TCP, f"tcp://{parsed.netloc}")
    if parsed.netloc or not parsed.path.startswith("/"):
        raise UsageError(f"init_method {url!r}: the path must be absolute: file:///tmp/meet, not file://tmp/meet")
    return RankInfo(rank, size, FILE, f"file://{parsed.path}")


def _first_int(name: str, given: int | None, query: Mapping[str, list[str]], env: str | None) -> int | None:
    if given is not None:
        return given
    text = query[name][0] if name in query else env
    return None if text is None else _int(name, text)


def _int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; expected a whole number") from None


# Variables of the launchers: rank, size, local rank, local size.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# SLURM_STEP_NUM_TASKS is set for tasks that srun started and not in the batch script itself, which is no rank.
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def _from_environment(environ: Mapping[str, str], wanted: bool) -> RankInfo:
    # A rank of `unisono run --backend mpi` has torchrun's variables and MPI's: there, MPI's count.
    by_mpi = environ.get(environment.BACKEND) == "mpi" and not {_OPENMPI[0], _HYDRA[0]}.isdisjoint(environ)
    if not by_mpi and ("RANK" in environ or "WORLD_SIZE" in environ):
        for name in ("RANK", "WORLD_SIZE"):
            if name not in environ:
                other = "WORLD_SIZE" if name == "RANK" else "RANK"
                raise UsageError(f"{other} is set but {name} is not: set both, or start with `unisono run`")
        return _from_variables(environ, _TORCHRUN, ENVIRONMENT)
    if _OPENMPI[0] in environ:
        return _from_variables(environ, _OPENMPI, MPIEXEC)
    if _HYDRA[0] in environ and ("SLURM_STEP_NUM_TASKS" not in environ or _HYDRA[2] in environ):
        # Under Slurm, MPICH's mpiexec has srun start a helper on each node: its ranks inherit the helper's variables.
        return _from_variables(environ, _HYDRA, MPIEXEC)
    if scheduler.in_slurm_step(environ):
        return _from_variables(environ, _SRUN, SRUN, _slurm_url(environ))
    if wanted:
        raise UsageError("init_method env:// but neither RANK and WORLD_SIZE nor MPI's or Slurm's variables are set")
    return RankInfo(0, 1, ALONE, local_rank=0, local_size=1)


def _from_variables(
    environ: Mapping[str, str], names: tuple[str, str, str, str], how: str, url: str | None = None
) -> RankInfo:
    rank, size, local_rank, local_size = (_int(n, environ[n]) if n in environ else None for n in names)
    assert rank is not None
    if size is None:
        raise UsageError(f"{names[0]} is set but {names[1]} is not: was this process really started by {how}?")
    return RankInfo(rank, size, how, url, local_rank, local_size)


def _slurm_url(environ: Mapping[str, str]) -> str:
    host, port = scheduler.slurm_rendezvous(environ)
    return f"tcp://{host}:{port}"


def _overridden(info: RankInfo, rank: int | None, world_size: int | None) -> RankInfo:
    """`info`, after checking it against what the caller insists on."""
    for name, given, found in (("rank", rank, info.rank), ("world_size", world_size, info.size)):
        if given is not None and given != found:
            hint = "start more processes (unisono run -n ...)" if info.how == ALONE else "leave it out"
            raise UsageError(f"{name}={given} was given, but this process is rank {info.rank} of {info.size}; {hint}")
    return info


def _check(info: RankInfo) -> None:
    if info.size < 1:
        raise UsageError(f"a world of {info.size} ranks: world_size must be at least 1")
    if not 0 <= info.rank < info.size:
        raise UsageError(f"rank {info.rank} does not fit a world of {info.size}: ranks go from 0 to {info.size - 1}")
