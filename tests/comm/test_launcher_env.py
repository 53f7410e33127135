"""Whoever started this process, it knows its rank; and what makes no world is an error."""

from __future__ import annotations

import pytest

from unisono.comm.rendezvous import launcher_env
from unisono.comm.rendezvous.launcher_env import RankInfo, find_rank_info
from unisono.errors import UsageError
from unisono.launch import scheduler

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PMI2 = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankInfo(0, 1, launcher_env.ALONE, None, 0, 1)),
        (TORCHRUN, RankInfo(3, 8, launcher_env.ENVIRONMENT, None, 1, 2)),
        (OPENMPI, RankInfo(2, 4, launcher_env.MPIEXEC, None, 0, 2)),
        (MPICH, RankInfo(1, 4, launcher_env.MPIEXEC, None, 1, 4)),
        (SLURM, RankInfo(5, 8, launcher_env.SRUN, "tcp://gpu07:26477", 1, None)),
        # srun --mpi=pmi2 tells PMI's variables too, and has the last word; in a Slurm job's script mpiexec has it.
        (SLURM | PMI2, RankInfo(5, 8, launcher_env.SRUN, "tcp://gpu07:26477", 1, None)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"} | MPICH, RankInfo(1, 4, launcher_env.MPIEXEC, None, 1, 4)),
        (MPICH | TORCHRUN, RankInfo(3, 8, launcher_env.ENVIRONMENT, None, 1, 2)),
        (MPICH | TORCHRUN | {"UNISONO_BACKEND": "mpi"}, RankInfo(1, 4, launcher_env.MPIEXEC, None, 1, 4)),
        # The batch script of a Slurm job is no rank of it.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, RankInfo(0, 1, launcher_env.ALONE, None, 0, 1)),
    ],
)
def test_each_launcher_is_understood(environ: dict[str, str], expected: RankInfo) -> None:
    assert find_rank_info(environ=environ) == expected


@pytest.mark.parametrize(
    ("url", "kind"),
    [("tcp://10.0.0.1:2345", launcher_env.TCP), ("file:///tmp/meet", launcher_env.FILE)],
)
def test_a_seat_by_hand(url: str, kind: str) -> None:
    assert find_rank_info(url, 1, 4, {}) == RankInfo(1, 4, kind, url)
    assert find_rank_info(f"{url}?rank=1&world_size=4", environ={}) == RankInfo(1, 4, kind, url)
    assert find_rank_info(url, environ=TORCHRUN) == RankInfo(3, 8, kind, url)


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (("tcp://10.0.0.1:2345", None, 4), {}, "needs rank as well"),
        (("tcp://10.0.0.1:2345",), {}, "needs rank and world_size"),
        (("tcp://10.0.0.1", 0, 4), {}, "expected tcp://HOST:PORT"),
        (("tcp://10.0.0.1:99999", 0, 4), {}, "port from 1 to 65535"),
        (("file://tmp/meet", 0, 4), {}, "must be absolute"),
        (("http://x:1", 0, 4), {}, "expected tcp://"),
        (("tcp://h:1?rank=x&world_size=2",), {}, "rank is 'x'; expected a whole number"),
        (("tcp://h:1", 4, 4), {}, "rank 4 does not fit a world of 4: ranks go from 0 to 3"),
        (("tcp://h:1", -1, 4), {}, "rank -1 does not fit"),
        (("tcp://h:1", 0, 0), {}, "a world of 0 ranks"),
        (("env://",), {}, "neither RANK and WORLD_SIZE"),
        ((), {"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
        ((), {"WORLD_SIZE": "1"}, "WORLD_SIZE is set but RANK is not"),
        ((), TORCHRUN | {"RANK": "nine"}, "RANK is 'nine'"),
        ((), {"PMI_RANK": "1"}, "PMI_RANK is set but PMI_SIZE is not"),
        ((None, 0, 2), {}, "start more processes"),
        ((None, 0, 4), TORCHRUN, "rank=0 was given, but this process is rank 3 of 8"),
    ],
)
def test_what_makes_no_world_is_an_error(
    arguments: tuple[str | int | None, ...], environ: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        find_rank_info(*arguments, environ=environ)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("login", "login"), ("a,b", "a"), ("n[3,5-7]", "n3"), ("gpu[07-09,12],x", "gpu07"), ("r[1-2]-ib", "r1-ib")],
)
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert scheduler.first_slurm_host(nodes) == first
