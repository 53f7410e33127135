"""Where VQNet's programs find `comm`, with get_rank, get_local_rank and the like."""

from __future__ import annotations

from unisono.compat.vqnet.distributed import ControlComm as comm

__all__ = ["comm"]
