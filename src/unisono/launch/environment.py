"""The variables through which a launcher tells a rank who it is.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torchrun's, so that plain
torch.distributed scripts run too. The rest is unisono's own.
"""

from __future__ import annotations

import os

BACKEND = "UNISONO_BACKEND"  # what `--backend` said: gloo, nccl or mpi; absent for auto
CHECK_PLAN = "UNISONO_CHECK_PLAN"  # "auto", "full" or "off": how a plan is proved before the first step
CHECK = "UNISONO_CHECK"  # "1": compare every collective between ranks before it runs
HOST = "UNISONO_HOST"  # this rank's host as the user wrote it
FAILURE_FILE = "UNISONO_FAILURE_FILE"  # where this rank writes why it failed, for the launcher to show
TIMEOUT = "UNISONO_TIMEOUT"  # seconds: the default timeout of collectives, as `--timeout` said
ATTEMPT = "UNISONO_ATTEMPT"  # how often the job was restarted before this start: "0", "1", ...
GONE = "UNISONO_GONE"  # the hosts that an elastic job has lost: "b,c"; absent while it has all

SSH = "UNISONO_SSH"  # read by the launcher: the ssh command, when no --ssh is given
SILENCE = "UNISONO_SILENCE"  # read by the launcher: seconds without a word after which a host counts as gone
MPIEXEC = "UNISONO_MPIEXEC"  # read by the launcher: the mpiexec to use
CONNECT = "UNISONO_CONNECT"  # how an agent that mpiexec started finds its launcher

# A remote rank starts in its host's own environment; of the launcher's, these travel with the job.
TRAVELLING_PREFIXES = ("UNISONO_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "PYTHON")
STAYING = (CONNECT, FAILURE_FILE, GONE, HOST, SSH, SILENCE, MPIEXEC)


def absolute_path(path: str) -> str:
    """A list of folders such as PYTHONPATH, of which relative ones mean the same from any directory."""
    return os.pathsep.join(os.path.abspath(folder) for folder in path.split(os.pathsep))


def travelling(environment: dict[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that goes with the job to other hosts."""
    return {
        name: absolute_path(value) if name == "PYTHONPATH" and value else value
        for name, value in environment.items()
        if name.startswith(TRAVELLING_PREFIXES) and name not in STAYING
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
    """Who a rank is and where its world meets."""
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
    """What torch.distributed's env:// looks for: it then joins the launcher's store, and opens none."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": "unisono",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
