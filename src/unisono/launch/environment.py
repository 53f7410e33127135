"""Environment variables of ranks and of the launcher.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torchrun's, so that plain
torch.distributed scripts run too. The others are unisono's own.
"""

from __future__ import annotations

import os
import tempfile

BACKEND = "UNISONO_BACKEND"  # from `--backend`: gloo, nccl or mpi; unset for auto
CHECK_PLAN = "UNISONO_CHECK_PLAN"  # "auto", "full" or "off": how a plan is verified before the first step
PLAN = "UNISONO_PLAN"  # the plan that ranks use, whatever their script says
RACE = "UNISONO_RACE"  # "0": plan="auto" takes the plan with the best prediction, without a race
AS = "UNISONO_AS"  # from `--as`: "name=module,..." of import names that stand for modules in ranks, see worker.aliases
COMPAT = "UNISONO_COMPAT"  # from `--compat`: the module whose `install` ranks call before their program
USE_ENV = "UNISONO_USE_ENV"  # "1": scripts that parse --local-rank do not get it
CHECK = "UNISONO_CHECK"  # "1": compare every collective between ranks before it runs
HOST = "UNISONO_HOST"  # this rank's host as given by the user
FAILURE_FILE = "UNISONO_FAILURE_FILE"  # path of this rank's failure record, see outcome.failure
TIMEOUT = "UNISONO_TIMEOUT"  # seconds: the default timeout of collectives, from `--timeout`
DEFAULT_TIMEOUT = 1800.0  # seconds, where TIMEOUT is not set
LAUNCHER = "UNISONO_LAUNCHER"  # process id of the launcher, on its host
ATTEMPT = "UNISONO_ATTEMPT"  # restarts of the job before this start: "0", "1", ...
MEMORY = "UNISONO_MEMORY"  # folder in the memory of each host, for checkpoints that last as long as the job
SECRET_FILE = "UNISONO_SECRET_FILE"  # path of the job's secret, see store.secret; users may name one of their own
TUNNEL = "UNISONO_TUNNEL"  # from `--encrypt`: see tunnel.addresses
STORE = "UNISONO_STORE"  # address and port of the job's store, and the MASTER_PORT beside which it was given
LOST_HOSTS = "UNISONO_GONE"  # hosts that an elastic job has lost: "b,c"; unset if none

SSH = "UNISONO_SSH"  # read by the launcher: the ssh command, when no --ssh is given
HOST_TIMEOUT = "UNISONO_SILENCE"  # read by the launcher: seconds without an answer after which a host is lost
MPIEXEC = "UNISONO_MPIEXEC"  # read by the launcher: the mpiexec to use
CONNECT = "UNISONO_CONNECT"  # address of the launcher for agents started by mpiexec
PRELOAD = "UNISONO_PRELOAD"  # "1" for them: see worker.preload

# A remote rank starts in its host's environment, with these variables of the launcher's.
FORWARDED_PREFIXES = ("UNISONO_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "PYTHON")
_OF_THE_JOB = (CONNECT, PRELOAD, FAILURE_FILE, SECRET_FILE, STORE, TUNNEL, LAUNCHER, LOST_HOSTS, MEMORY)
NOT_FORWARDED = (*_OF_THE_JOB, HOST, SSH, HOST_TIMEOUT, MPIEXEC)


def memory_prefix() -> str:
    """How the names of folders in memory begin that are this user's."""
    return f"unisono-{os.getuid()}-"


def memory_folder(token: str) -> str:
    """The folder in memory of a job: on Linux in /dev/shm, whose files outlive processes, but not the machine."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(root, memory_prefix() + token)


def absolute_path(path: str) -> str:
    """A search path such as PYTHONPATH with its relative folders made absolute."""
    return os.pathsep.join(os.path.abspath(folder) for folder in path.split(os.pathsep))


def forwarded(environment: dict[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that is forwarded to ranks."""
    return {
        name: absolute_path(value) if name == "PYTHONPATH" and value else value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED
    }


def of_rank(
    *,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    node: int,
    nodes: int,
    address: str,
    port: int,
    host: str,
    attempt: int,
) -> dict[str, str]:
    """The identity of a rank and the address of its rendezvous."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        HOST: host,
        ATTEMPT: str(attempt),
    }


def of_elastic(attempt: int, max_restarts: int) -> dict[str, str]:
    """With these, torch.distributed's env:// joins the launcher's store instead of opening one."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": "unisono",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
