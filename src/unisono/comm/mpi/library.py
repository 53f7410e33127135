"""MPI for stock PyTorch: a torch process group over mpi4py, registered as the c10d backend "mpi4py".

    library.register()
    dist.init_process_group(library.BACKEND, store=store, rank=rank, world_size=size)

(torch keeps the name "mpi" for a backend that only its own builds with MPI have.) Rank r of the world is
MPI's rank r; a sub-group is an MPI communicator of its own. Without mpiexec the world has one rank.
"""

from __future__ import annotations

import os
import sys
import zlib
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.comm.rendezvous import launcher_env
from unisono.errors import CommError, MissingPackageError, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

    from unisono.comm.mpi.process_group import MPIProcessGroup

BACKEND = "mpi4py"
_FEW = 16  # ranks up to which all may send to all
_TAGS = 32768  # as many as every MPI has
_RDMA = Path("/sys/class/infiniband")  # network cards that read and write memory by themselves


def register() -> None:
    """Make the backend known to torch. May be called again."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def load() -> Any:
    """mpi4py's MPI module, MPI being initialised."""
    if launcher_env.find_rank_info().size <= _FEW:
        # Of MPICH's ways to reduce and scatter without blocking, the one it chooses at 1 MiB is four times slower.
        os.environ.setdefault("MPIR_CVAR_IREDUCE_SCATTER_BLOCK_INTRA_ALGORITHM", "sched_pairwise")
    if not _RDMA.is_dir():
        # UCX, below MPICH, rewrites libc's munmap in the running process to keep its cache of memory that is registered
        # with a network card. Where there is none it gains nothing, and a thread that frees memory meanwhile may crash.
        os.environ.setdefault("UCX_MEM_EVENTS", "n")
    for again in (True, False):
        try:
            from mpi4py import MPI
        except ModuleNotFoundError as error:
            raise MissingPackageError("mpi4py", "the MPI backend", "mpi") from error
        except (ImportError, RuntimeError) as error:
            if again and (installed := _installed_library()):
                os.environ["MPI4PY_LIBMPI"] = str(installed)
                continue
            raise CommError(
                f"mpi4py is installed but finds no MPI library ({error}); run: pip install 'unisono[mpi]', "
                "or set MPI4PY_LIBMPI to the site's libmpi.so"
            ) from error
        break
    return MPI


def _installed_library() -> Path | None:
    """The library of the package mpich where mpi4py does not look: Debian's Python has it in /usr/local/lib."""
    if "MPI4PY_LIBMPI" in os.environ:
        return None
    try:
        files = metadata.files("mpich") or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())).resolve() for file in files if file.name.startswith("libmpi.so")]
    # of libmpi.so and libmpi.so.12 one is a link, which wheels cannot have, and came as a file of a few bytes
    return max((path for path in found if path.is_file()), key=lambda path: path.stat().st_size, default=None)


def world() -> tuple[int, int]:
    """This process's rank and the number of ranks, as MPI has them; (0, 1) without mpiexec."""
    comm = load().COMM_WORLD
    return comm.Get_rank(), comm.Get_size()


def _create(options: Any, backend_options: object) -> MPIProcessGroup:
    MPI = load()
    from unisono.comm.mpi import buffers
    from unisono.comm.mpi.process_group import MPIProcessGroup

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommError(
            "MPI was initialised without THREAD_MULTIPLE, which non-blocking calls need; "
            "leave MPI's initialisation to mpi4py, or ask there for THREAD_MULTIPLE"
        )
    ranks = list(options.global_ranks_in_group)
    if ranks:
        comm = _subgroup(MPI, ranks, options.group_id)
    else:
        _check_world(MPI, options.group_rank, options.group_size)
        _abort_when_failing()
        comm = MPI.COMM_WORLD.Dup()
        buffers.agree(comm)
    return MPIProcessGroup(options.store, comm, options.timeout)


def _subgroup(MPI: Any, ranks: list[int], group_id: str) -> MPI.Intracomm:
    """A communicator of `ranks`, in that order. Only they take part; the tag keeps creations apart."""
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    try:
        return MPI.COMM_WORLD.Create_group(group, zlib.crc32(str(group_id).encode()) % _TAGS)
    finally:
        group.Free()


def _check_world(MPI: Any, rank: int, size: int) -> None:
    mpi_rank, mpi_size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if (rank, size) == (mpi_rank, mpi_size):
        return
    asked = f"rank {rank} of {size} was asked for, but for MPI this is rank {mpi_rank} of {mpi_size}"
    if mpi_size > 1:
        raise UsageError(f"{asked}; leave rank and world_size to MPI, or start {size} ranks")
    library = MPI.Get_library_version().split(",")[0].splitlines()[0]
    if "SLURM_STEP_NUM_TASKS" in os.environ:
        raise UsageError(
            f"{asked}: srun has not passed it to MPI; use srun --mpi=pmi2 (MPICH) or --mpi=pmix (Open MPI), whichever "
            f"`srun --mpi=list` has for this library ({library}), or mpiexec -n {size} in the job"
        )
    raise UsageError(
        f"{asked}; start it with mpiexec -n {size}, and with the mpiexec of the MPI library that mpi4py "
        f"loaded ({library})"
    )


def _abort_when_failing() -> None:
    """Let an uncaught exception end the entire job.

    Otherwise the failing rank waits in MPI_Finalize for the others, who wait for it in some collective.
    """
    if getattr(sys.excepthook, "aborts_mpi", False):
        return
    show = sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import mpi4py.run

        show(kind, error, trace)
        mpi4py.run.set_abort_status(1)

    abort.aborts_mpi = True  # type: ignore[attr-defined]
    sys.excepthook = abort
