"""The stack of another thread, looked at without harm to it.

Up to Python 3.11 the making of a frame object may set off a garbage collection. What is collected may let go of the GIL
(the end of a tensor does), the other thread goes on meanwhile, and the frame object is then tied to a frame that is no
more: the process crashes or hangs, seldom and far from the cause. So nothing is collected while frames are taken.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import FrameType


def frames_of(thread: int | None) -> list[FrameType]:
    """The frames of the thread with that identity, innermost first; none if it has ended."""
    frames = []
    with _nothing_collected():
        frame = sys._current_frames().get(thread or 0)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    return frames


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    if sys.version_info >= (3, 12) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
