"""The variables through which a launcher tells a rank who it is.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torchrun's, so that plain
torch.distributed scripts run too. The rest is unisono's own.
"""

from __future__ import annotations

BACKEND = "UNISONO_BACKEND"  # what `--backend` said: gloo, nccl or mpi; absent for auto
CHECK = "UNISONO_CHECK"  # "1": compare every collective between ranks before it runs
HOST = "UNISONO_HOST"  # this rank's host as the user wrote it
FAILURE_FILE = "UNISONO_FAILURE_FILE"  # where this rank writes why it failed, for the launcher to show
TIMEOUT = "UNISONO_TIMEOUT"  # seconds that a collective may block before the watch stops the job
