"""Reading a file that others still write, line by line, while this thread is busy elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_PAUSE = 0.1  # seconds between looks


class Follower:
    """While open, calls `read` with each line that is added to the file; at the end with those that are left."""

    def __init__(self, path: Path, read: Callable[[str], None]) -> None:
        self._path = path
        self._read = read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        # Until the first line comes this thread takes no lock: ranks are forked meanwhile.
        start = 0
        try:
            while True:
                is_last = self._done.wait(_PAUSE)
                whole = self._path.read_bytes()[start:] if self._path.exists() else b""
                complete = whole[: whole.rfind(b"\n") + 1]
                start += len(complete)
                for line in complete.decode().splitlines():
                    self._read(line)
                if is_last:
                    return
        except BaseException as error:
            self._error = error
