"""Files that users give, or that others left in a folder: how they are read.

A pipe that nobody writes to would stop a rank for good, a device would fill its memory, and JSON of a thousand brackets
ends in a RecursionError. What is read here is a regular file, at most so large, and errors are OSError and ValueError.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

_LARGEST = 1 << 30


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; OSError if it is a pipe, a device, a socket or a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would wait for one
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return open(handle, "rb", buffering=0, closefd=True)
    except BaseException:
        os.close(handle)
        raise


def require_regular(path: str | os.PathLike[str]) -> None:
    """OSError where `open_regular` has one."""
    open_regular(path).close()


def read_text(path: str | os.PathLike[str], most: int = _LARGEST, encoding: str = "utf-8") -> str:
    """The text of a regular file of at most so many bytes; OSError or UnicodeDecodeError if it is none."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
        parts = []
        while len(part := file.read(size + 1)):
            parts.append(part)
            if sum(map(len, parts)) > most:
                raise OSError(errno.EFBIG, f"it grows beyond the {most} bytes that are read", str(path))
    return b"".join(parts).decode(encoding).replace("\r\n", "\n")


def parse_json(text: str) -> Any:
    """Of a text; ValueError whatever is wrong with it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: str | os.PathLike[str], most: int = _LARGEST) -> Any:
    """The value in a file; OSError or ValueError if there is none."""
    return parse_json(read_text(Path(path), most))
