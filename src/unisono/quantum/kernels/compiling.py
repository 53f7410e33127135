"""How kernels are compiled: `entry` for those that Python calls, kept on disk; `inner` for those that kernels call.

The ways into a kernel for Python and for C take numba longer to make than many a kernel, so each has those it needs."""

from __future__ import annotations

from typing import Any

import numba

_njit: Any = numba.njit  # its types know fewer options than it has
_ALL: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def entry(*, fastmath: bool = False) -> Any:
    return _njit(**_ALL, cache=True, fastmath=fastmath)


def inner(*, fastmath: bool = False) -> Any:
    return _njit(**_ALL, no_cpython_wrapper=True, fastmath=fastmath)
