"""Where in the user's program an op comes from."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from types import TracebackType

import torch
from torch import fx

from unisono import errors

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(errors.__file__)))


def is_of_a_library(file: str) -> bool:
    """Whether a file of Python code is torch's or unisono's own, or none at all."""
    return file.startswith((*_LIBRARIES, "<"))


def line_of(node: fx.Node) -> str:
    """ "file.py:42": the innermost line outside torch; "" where none is known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_LIBRARIES)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def path_of(node: fx.Node, drop: str = "") -> str:
    """The dotted name of the module that a node runs in, without a leading `drop`."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(stack.values())), "")
    path = re.sub(r"@\d+$", "", path)
    return path.removeprefix(drop).lstrip(".") if drop and (path == drop or path.startswith(f"{drop}.")) else path


def failing_line(trail: TracebackType | None) -> tuple[str, str]:
    """Of a traceback, the innermost line outside torch and unisono: where it is and its text."""
    frames = [frame for frame in traceback.extract_tb(trail) if not is_of_a_library(frame.filename)]
    if not frames:
        return "", ""
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}", (frames[-1].line or "").strip()


def assigning_line() -> str:
    """Of an attribute of a module that is being set, by whom; "" where torch itself does it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "__setattr__":
        frame = frame.f_back
    setter = frame.f_back if frame is not None else None
    if setter is None or setter.f_code.co_filename.startswith(_LIBRARIES):
        return ""
    return f"{os.path.basename(setter.f_code.co_filename)}:{setter.f_lineno}"


class Maker:
    """The user's function that is making something, and the call that it is in. What is dropped while the function runs
    or returns was thrown away; what is dropped later, with a model that had it, was kept."""

    def __init__(self) -> None:
        frame = inspect.currentframe()
        while frame is not None and is_of_a_library(frame.f_code.co_filename):
            frame = frame.f_back
        caller = frame.f_back if frame is not None else None
        self._function = None if frame is None else (id(frame), frame.f_code)
        self._call = None if caller is None else (id(caller), caller.f_lasti)

    def is_at_work(self) -> bool:
        frame = inspect.currentframe()
        while frame is not None:
            if (id(frame), frame.f_code) == self._function or (id(frame), frame.f_lasti) == self._call:
                return True
            frame = frame.f_back
        return False


def calling_line() -> str:
    """The innermost line outside torch and unisono that is running; "" where none is."""
    frame = inspect.currentframe()
    while frame is not None and is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
