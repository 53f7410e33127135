"""The streams of a step's draws as a table on the GPU, for steps that are replayed without Python.

A draw's stream, the four words that philox mixes with the index of an element, is a hash of (seed, step, call). A CUDA
graph has the kernels of one step; replayed, they must draw the numbers of another. So the words of each call are a row
of a table, which kernels read, and the host writes the rows of a step before it is replayed:

    keys = StepKeys(state, device)
    with keys.used(step):               # some steps that run eagerly: they find out which calls there are
        train(batch)
    with keys.used(step), torch.cuda.graph(graph):
        train(batch)
    keys.write(step)                    # from now on, for every step; the same bits as without a table
    graph.replay()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from unisono.mesh.random.philox import PhiloxStream

if TYPE_CHECKING:
    from unisono.mesh.random.state import RandomState

_ROWS = 512  # of one tensor, and the most calls that a step may have when it is captured and no step before had


class StepKeys:
    """Of a RandomState whose draws are all on one device."""

    def __init__(self, state: RandomState, device: torch.device) -> None:
        self._state = state
        self._device = device
        self._calls: dict[tuple[object, ...], int] = {}  # what identifies a stream beside seed and step: its row
        self._tables: list[torch.Tensor] = []
        self._reserve()

    def _reserve(self) -> None:
        """Have memory for further calls. Of what a captured step allocates, each replay may write to it before."""
        while len(self._tables) * _ROWS < len(self._calls) + _ROWS:
            self._tables.append(torch.empty(_ROWS, 4, dtype=torch.int32, device=self._device))

    @contextlib.contextmanager
    def used(self, step: int) -> Iterator[None]:
        """In the block, which is this step, draws have their streams from the table."""
        if not _is_captured(self._device):
            self.write(step)
        self._state.keys = self
        try:
            yield
        finally:
            self._state.keys = None

    def stream(self, seed: object, step: object, *call: object) -> PhiloxStream:
        """The stream of a call, with its row in the table."""
        stream = PhiloxStream.of(seed, step, *call)
        is_new, is_captured = call not in self._calls, _is_captured(self._device)
        if is_new and is_captured and len(self._calls) == len(self._tables) * _ROWS:
            raise RuntimeError(f"the step draws random numbers in {_ROWS} calls more than those before")
        number, row = divmod(self._calls.setdefault(call, len(self._calls)), _ROWS)
        if is_new and not is_captured:
            self._reserve()
            self._tables[number][row].copy_(torch.tensor(stream.words, dtype=torch.int32, device="cpu"))
        return replace(stream, row=self._tables[number][row])

    def write(self, step: int) -> None:
        """Write the streams that all calls so far have in this step. The host does not wait."""
        if not self._calls:
            return
        self._reserve()
        words = [PhiloxStream.of(self._state.seed, step, *call).words for call in self._calls]
        rows = torch.tensor(words, dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
        for table, part in zip(self._tables, rows.split(_ROWS), strict=False):
            table[: len(part)].copy_(part, non_blocking=True)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
