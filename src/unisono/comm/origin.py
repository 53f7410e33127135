"""Where an error comes from."""

from __future__ import annotations

import os
from types import TracebackType

import torch.distributed as dist

from unisono.comm.log import frame_place

_TALKING = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(dist.__file__))


def is_of_a_backend(error: RuntimeError) -> bool:
    """Whether it comes out of native code that was called here or in torch.distributed, or out of mpi4py.

    Python runs handlers of signals amid whatever is going on: the error of one shows up in a collective and has nothing
    to do with it. A DataLoader's tells so that a worker has died.
    """
    innermost = _innermost(error.__traceback__)
    path = innermost.tb_frame.f_code.co_filename if innermost else ""
    return path.startswith(_TALKING) or not os.path.isabs(path)


def origin_of(trace: TracebackType | None) -> str:
    """For a sentence on an error: the place where it was raised."""
    innermost = _innermost(trace)
    return f" at {frame_place(innermost.tb_frame)}" if innermost else ""


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
