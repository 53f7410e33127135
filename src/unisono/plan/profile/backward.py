"""What a backward holds, op by op: the gradients of activations that are alive while an op runs backward.

A tensor's gradient lives from the backward of its last user to that of the op that made it. Views have the memory of
what they view, and a sum hands its own gradient on to what it adds: such tensors have one gradient between them. A
tensor with several users gets a gradient from each; when the second comes, there are two for a moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from unisono.graph.capture.autocast import WEIGHT_CAST
from unisono.graph.capture.op import Op
from unisono.graph.capture.trace import Trace


class Held(NamedTuple):
    """Bytes of gradients: of tensors that tp shards, of others, and of those that are added to an existing one."""

    sharded: float = 0.0
    replicated: float = 0.0
    added: float = 0.0


def held_by_ops(trace: Trace, sharded: Collection[str]) -> dict[str, Held]:
    """For each op of the trace, by name, what is alive while it runs backward; `sharded` names what tp shards."""
    return _Gradients(trace, frozenset(sharded)).held()


class _Joined(dict[str, str]):
    """Sets of names; each is known by one of its members."""

    def of(self, name: str) -> str:
        while self.setdefault(name, name) != name:
            name = self[name]
        return name

    def join(self, one: str, other: str) -> None:
        self[self.of(one)] = self.of(other)


class _Gradients:
    def __init__(self, trace: Trace, sharded: frozenset[str]) -> None:
        self.trace = trace
        self.sharded = sharded
        self.sizes: dict[str, int] = {}  # of what has a gradient
        self.tensors = _Joined()  # views with what they view
        self.shared = _Joined()  # ... and sums with what they add
        self.made: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.of_parameters = set(trace.parameters)  # with their views and casts
        for number, op in enumerate(trace.ops):
            self._see(number, op)

    def _see(self, number: int, op: Op) -> None:
        inputs = [name for name in op.inputs if name in self.sizes]
        is_of_parameter = any(name in self.of_parameters for name in op.inputs)
        if not (inputs or is_of_parameter) or not any(spec.dtype.is_floating_point for spec in op.outputs):
            return
        for name in inputs:
            self.used[name] = number
        if not inputs and (not op.bytes_moved or op.node.meta.get(WEIGHT_CAST)):
            self.of_parameters.add(op.name)  # its gradient is not an activation's
            return
        self.sizes[op.name] = sum(spec.nbytes for spec in op.outputs)
        self.made[op.name] = number
        if is_view(op) and inputs:
            self.tensors.join(op.name, inputs[0])
            self.shared.join(op.name, inputs[0])
        elif _is_sum(op):
            for name in inputs:
                if self.trace.specs[name][0].shape == op.outputs[0].shape:
                    self.shared.join(op.name, name)

    def held(self) -> dict[str, Held]:
        last: dict[str, int] = {}
        spans: dict[str, list[int]] = {}  # of a gradient: first op, last op, bytes
        is_sharded: dict[str, bool] = {}
        for name, size in self.sizes.items():
            tensor, root = self.tensors.of(name), self.shared.of(name)
            end = self.used.get(name, self.made[name])
            last[tensor] = max(last.get(tensor, 0), end)
            first, latest, most = spans.get(root, [self.made[name], end, 0])
            spans[root] = [min(first, self.made[name]), max(latest, end), max(most, size)]
            is_sharded[root] = is_sharded.get(root, False) or name in self.sharded
        found = {}
        for number, op in enumerate(self.trace.ops):
            bytes_of, added = [0.0, 0.0], 0.0
            for root, (first, latest, size) in spans.items():
                if first <= number <= latest:
                    bytes_of[not is_sharded[root]] += size
            if not is_view(op) and not _is_sum(op):
                for name in {self.tensors.of(each) for each in op.inputs if each in self.sizes}:
                    if last[name] > number:
                        bytes_of[not is_sharded[self.shared.of(name)]] += self.sizes[name]
                        added += self.sizes[name]
            found[op.name] = Held(bytes_of[0], bytes_of[1], added)
        return found


def is_view(op: Op) -> bool:
    """Whether its result is memory of its input."""
    return not op.bytes_moved or (_packet(op) == "aten.dropout" and op.node.args[1] in (0, 0.0))


_PARTINGS = ("aten.unbind", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.select", "aten.slice")
_TURNS = ("aten.permute", "aten.transpose", "aten.t")
_FORMS = ("aten.view", "aten.reshape", "aten.unflatten", "aten._unsafe_view")


def moved_back(op: Op, makers: Mapping[str, Op]) -> int:
    """Bytes that the backward of a view moves: parts of a tensor are put together again, and what was turned after it
    was given another form must lie in order for the form that it had."""
    packet = _packet(op)
    source = makers.get(op.inputs[0]) if op.inputs else None
    if packet in _PARTINGS or (packet in _TURNS and source is not None and _packet(source) in _FORMS):
        sizes = source.outputs if source is not None else op.outputs
        return 2 * sum(spec.nbytes for spec in sizes)
    return 0


def _is_sum(op: Op) -> bool:
    return _packet(op) in ("aten.add", "aten.add_")


def _packet(op: Op) -> str:
    return str(getattr(op.target, "_overloadpacket", ""))
