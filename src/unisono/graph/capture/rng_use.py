"""Random numbers that a model takes from elsewhere than torch: a graph keeps what they were when it was traced."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy
from torch import nn

from unisono.graph.capture.source import is_of_a_library

_HELD = (random.Random, numpy.random.Generator, numpy.random.RandomState)


class RngUse:
    """Python's and numpy's generators: those that all share, and those that a model's modules hold."""

    def __init__(self, model: nn.Module) -> None:
        held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, _HELD)]
        self._readers: list[Callable[[], Any]] = [random.getstate, _of_numpy, *map(_reader, held)]
        self._before = self._now()

    @property
    def was_used(self) -> bool:
        """Whether any has been drawn from since."""
        return self._now() != self._before

    def _now(self) -> list[Any]:
        return [read() for read in self._readers]

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Which lines outside of libraries draw in the block. Slow: after every line it looks."""
        found: list[str] = []
        self._before = self._now()
        at = ""  # the line that runs

        def follow(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal at
            if _is_library(frame.f_code.co_filename):
                return None
            if self.was_used:
                self._before = self._now()
                found.append(at)
            goes_on = frame.f_back if event == "return" else frame
            if goes_on is not None and not _is_library(goes_on.f_code.co_filename):
                at = f"{os.path.basename(goes_on.f_code.co_filename)}:{goes_on.f_lineno}"
            return follow

        earlier = sys.gettrace()
        sys.settrace(follow)
        try:
            yield found
        finally:
            sys.settrace(earlier)


_STANDARD = sysconfig.get_paths()["stdlib"]
_PACKAGES = f"{os.sep}site-packages{os.sep}"
_BESIDE = tuple(f"{_PACKAGES}{name}{os.sep}" for name in ("numpy", "sympy", "mpmath"))  # torch traces with these


@functools.cache
def _is_library(file: str) -> bool:
    """Whether no line of a file is the user's or a model's."""
    is_standard = file.startswith(_STANDARD) and _PACKAGES not in file
    return is_standard or is_of_a_library(file) or any(name in file for name in _BESIDE)


def _of_numpy() -> Any:
    return _exact(numpy.random.get_state(legacy=False))


def _reader(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, random.Random):
        return generator.getstate
    if isinstance(generator, numpy.random.RandomState):
        return lambda: _exact(generator.get_state(legacy=False))
    return lambda: _exact(generator.bit_generator.state)


def _exact(state: Any) -> Any:
    """A state in which arrays are bytes: as text, numpy leaves out most of a long one."""
    if isinstance(state, dict):
        return {key: _exact(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, numpy.ndarray) else state
