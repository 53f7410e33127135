"""The transcript of a step: the distributed program of a rank, line by line, as it ran.

The ranks of a pipeline run different programs, where a token goes is decided by numbers, and what ZeRO gathers depends
on what is used when: no graph that is drawn up before knows all of it. So one step of a run is written down: the ops of
the forward of a microbatch with their modules and local shapes, and everything that the rank said and heard, in order.
It is a step of its own, as writing takes time that nothing else is to be measured in.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unisono.comm import traffic
from unisono.graph.account import SHORT
from unisono.mesh.interception import Interception
from unisono.parallel.trainer import Trainer
from unisono.plan.action import Action
from unisono.torch_compat import MODULE_CALL, in_backward

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
_UPDATE = Trainer.update.__code__
_COMM = os.path.dirname(os.path.abspath(traffic.__file__)) + os.sep
_PASSED_OVER = {"detach", "alias", "empty", "empty_like", "lift_fresh", "t", "view"}
_MOST = 5000  # lines
_MOST_SHAPES = 4
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}

Line = dict[str, Any]


class Transcript:
    """Write one step down with `writing`; `lines` are then what a report shows."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.is_written = False
        self._microbatch = 0
        self._names: dict[nn.Module, str] = {}

    @contextlib.contextmanager
    def writing(self, trainer: Trainer) -> Iterator[None]:
        """The step that runs in the block is written down, on ranks that are the first of their stage."""
        coordinate = dict(zip(trainer.mesh.names, trainer.mesh.coordinate(), strict=True))
        self.is_written = True
        if any(place for axis, place in coordinate.items() if axis != "pp"):
            yield
            return
        self._names = {module: name for name, module in trainer.model.named_modules()}
        trainer.on_microbatch = self._begin
        try:
            with traffic.counted(self._hear), _Ops(self):
                yield
        finally:
            trainer.on_microbatch = None
            self._names = {}

    def _begin(self, microbatch: int, action: Action | None) -> None:
        self._microbatch = microbatch
        if action is not None or microbatch:
            what = _ACTIONS[action.kind] if action is not None else "forward and backward"
            stage = {} if action is None else {"stage": action.stage}
            self._write({"kind": "part", "name": what, "microbatch": microbatch, **stage})

    def compute(self, name: str, outcome: Any) -> None:
        if name in _PASSED_OVER or name.startswith("_record_function"):
            return
        place = _place(self._names)
        if place is None or (place[0] == FORWARD and self._microbatch):
            return
        phase, path = place
        if phase == BACKWARD or (phase == UPDATE and self.lines and self.lines[-1].get("name") == name):
            return  # what autograd makes of the forward, and one op after the other for all parameters
        shape = _shapes(outcome)
        if shape or phase == UPDATE:  # an optimizer's ops change what they are given
            self._write({"kind": "op", "phase": phase, "name": name, "path": path, "shape": shape})

    def _hear(self, said: traffic.CommRecord) -> None:
        phase, path = _place(self._names, in_comm=True) or (FORWARD, "")
        if self._microbatch and path:
            return  # of a microbatch like the first
        line = {"kind": "talk", "phase": phase, "name": said.op.removesuffix("_into"), "path": path}
        shape = "" if said.tensor is None else _shape(said.tensor)
        size = 0 if said.tensor is None else said.tensor.numel() * said.tensor.element_size()
        self._write({**line, "shape": shape, "ranks": list(said.ranks), "bytes": size})

    def _write(self, line: Line) -> None:
        if len(self.lines) < _MOST:
            self.lines.append(line)


class _Ops(Interception):
    def __init__(self, transcript: Transcript) -> None:
        super().__init__()
        self._transcript = transcript

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outcome = func(*args, **kwargs)
        if func.namespace != "c10d":
            self._transcript.compute(func.overloadpacket.__name__, outcome)
        return outcome


def _place(names: dict[nn.Module, str], in_comm: bool = False) -> tuple[str, str] | None:
    """In which part of a step the caller is, and in which module; None for what a communicator does by itself."""
    path: str | None = None
    phase = BACKWARD if in_backward() else FORWARD
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is MODULE_CALL:
            path = names.get(frame.f_locals["self"]) if path is None else path
        elif code is _UPDATE:
            phase = UPDATE
        elif not in_comm and code.co_filename.startswith(_COMM):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return phase, path or ""


def _shapes(outcome: Any) -> str:
    found = [_shape(leaf) for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)]
    return " ".join(found if len(found) <= _MOST_SHAPES else [*found[:_MOST_SHAPES], "..."])


def _shape(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{SHORT.get(name, name)}[{','.join(map(str, tensor.shape))}]"
