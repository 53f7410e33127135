"""MindSpore's communication: init, get_rank, get_group_size.

A backend is a preference: "nccl", "hccl" and "mccl" name devices, and a program for them runs on what the machine and
the launcher have. Without ranks (plain `python net.py`) the world has one.
"""

from __future__ import annotations

import sys

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.compat.language import say
from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.errors import UsageError

BACKENDS = ("nccl", "hccl", "mccl")
NCCL_WORLD_COMM_GROUP = "nccl_world_group"
HCCL_WORLD_COMM_GROUP = "hccl_world_group"
MCCL_WORLD_COMM_GROUP = "mccl_world_group"
GlobalComm = type("GlobalComm", (), {"WORLD_COMM_GROUP": NCCL_WORLD_COMM_GROUP})
_WORLD = (NCCL_WORLD_COMM_GROUP, HCCL_WORLD_COMM_GROUP, MCCL_WORLD_COMM_GROUP)

sys.modules[f"{__name__}.management"] = sys.modules[__name__]  # where MindSpore keeps the same functions
management = sys.modules[__name__]
__getattr__ = missing_names(__name__)


def joined() -> Communicator:
    """The world's communicator; joins the world if this process has not yet."""
    return world.world() if world.is_initialized() else world.init()


def init(backend_name: str | None = None) -> None:
    if backend_name is not None and backend_name not in BACKENDS:
        raise UsageError(
            say(
                f"init({backend_name!r}): expected one of {', '.join(BACKENDS)}, or none",
                f"init({backend_name!r})：应为 {', '.join(BACKENDS)} 之一，或不给出",
            )
        )
    joined()


def get_rank(group: str = NCCL_WORLD_COMM_GROUP) -> int:
    _require_world(group)
    return joined().rank


def get_group_size(group: str = NCCL_WORLD_COMM_GROUP) -> int:
    _require_world(group)
    return joined().size


def get_local_rank(group: str = NCCL_WORLD_COMM_GROUP) -> int:
    _require_world(group)
    return joined().local_rank


def release() -> None:
    """Leave the world."""
    if world.is_initialized():
        world.shutdown()


def _require_world(group: str) -> None:
    if group not in _WORLD:
        raise UsageError(
            say(
                f"group {group!r}: MindSpore makes others with create_group, which is not here; "
                f"uni.init().subgroup([...]) is, and expected one of {', '.join(_WORLD)}",
                f"组 {group!r}：MindSpore 用 create_group 建立其它组，这里没有；请用 "
                f"uni.init().subgroup([...])，此处应为 {', '.join(_WORLD)} 之一",
            )
        )
