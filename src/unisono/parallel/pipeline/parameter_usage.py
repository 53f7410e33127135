"""The parameter usage of a model: which parameters and buffers each of its segments uses.

The blocks split a forward pass into segments: segment i runs from the entry of block i to the entry of block i+1, so
that whatever the model does between two blocks belongs to the one before. What it does before block 0 (embeddings)
counts to segment 0, and what it does after the last block (norm, head, ...) to the last segment.

With an example the model is run once, without gradients, and watched: what a segment uses is what its operations read.
Without one the order of registration decides, as most models are written in the order in which they run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.blocks import Blocks
from unisono.parallel.inputs import call
from unisono.parallel.pipeline.dependence import Dependence, Touch, storages_of
from unisono.parallel.pipeline.skips import Reads, Skips

Users = dict[str, frozenset[int]]  # of a parameter or buffer, by name: the segments that use it


@dataclass(frozen=True)
class ParameterUsage:
    users: dict[int, frozenset[int]]  # the id of a parameter or buffer -> the segments that use it
    operations: tuple[int, ...] | None = None  # floating-point operations of each segment, if they were counted
    skips: Skips = field(default_factory=Skips)  # if the model was run

    def of_copy(self, model: nn.Module, copy: nn.Module) -> ParameterUsage:
        """The parameter usage of a copy of the examined model."""
        pairs = zip(held_by(model), held_by(copy), strict=True)
        return ParameterUsage({id(theirs): self.users[id(ours)] for ours, theirs in pairs}, self.operations, self.skips)

    def by_name(self, model: nn.Module) -> Users:
        """Of the examined model, the segments by the names of parameters and buffers, all of them."""
        return {name: self.users[id(tensor)] for name, tensor in _named(model)}


def by_example(model: nn.Module, blocks: Blocks, example: Any, *, count: bool = False) -> ParameterUsage:
    """Run the model on the example, whose inputs are as a microbatch's. Random numbers and buffers are put back."""
    count_of = len(blocks.modules)
    users: dict[StorageWeakRef, set[int]] = {}
    here = -1
    counter = FlopCounterMode(display=False)
    marks = [0] * (count_of + 1)
    flow = Dependence()
    flow.mark(list(model.parameters()))
    reads = Reads(flow, lambda storage: touched(storage))

    writes = _WrittenBuffers(model, flow)

    def enter(number: int, arguments: Any) -> None:
        nonlocal here
        if number != here + 1:
            raise UsageError(
                f"{type(model).__name__} runs {blocks.name(number)} after "
                f"{blocks.name(here) if here >= 0 else 'nothing'}; "
                "a pipeline can shard only between blocks that run once each, in order"
            )
        writes.end_of_segment(max(here, 0))
        here = number
        reads.enter_block(number, arguments)
        marks[number] = counter.get_total_flops()

    def touched(storage: StorageWeakRef) -> None:
        users.setdefault(storage, set()).add(max(here, 0))

    hooks = [
        block.register_forward_pre_hook(_entering(enter, i), with_kwargs=True) for i, block in enumerate(blocks.modules)
    ]
    hooks += [block.register_forward_hook(lambda *given: reads.leave_block(given[-1])) for block in blocks.modules]
    try:
        counting = counter if count else contextlib.nullcontext()
        with left_as_it_was(model), torch.no_grad(), counting, Touch(touched), flow, reads:
            reads.read_tensors(call(model, example))
            writes.end_of_segment(max(here, 0))
    finally:
        for hook in hooks:
            hook.remove()
    if here != count_of - 1:
        raise UsageError(
            f"{type(model).__name__} did not run {blocks.name(here + 1)} on the example; all blocks must run"
        )
    writes.require_kept_in_place(blocks, users)
    marks[0], marks[-1] = 0, counter.get_total_flops()
    operations = tuple(end - start for start, end in pairwise(marks)) if count else None
    return ParameterUsage(_with_names(model, blocks, users), operations, reads.skips(count_of))


class _WrittenBuffers:
    """Buffers that get values which depend on parameters: only the stage that computes them has them."""

    def __init__(self, model: nn.Module, flow: Dependence) -> None:
        self._model, self._flow = type(model).__name__, flow
        self._holders = list(_buffers(model))
        self._before = [_state(module, key) for _, module, key in self._holders]
        self._written: dict[str, tuple[int, list[StorageWeakRef]]] = {}  # the last segment that did, and which memory

    def end_of_segment(self, segment: int) -> None:
        for position, (name, module, key) in enumerate(self._holders):
            now, before = _state(module, key), self._before[position]
            if now[0] is not before[0] or now[1] != before[1]:
                self._before[position] = now
                if now[0] is not None and now[0] in self._flow:
                    self._written[name] = (segment, storages_of(now[0]))

    def require_kept_in_place(self, blocks: Blocks, users: dict[StorageWeakRef, set[int]]) -> None:
        """UsageError where another segment, which may be on another stage, reads what one has written."""
        for name, (segment, memory) in self._written.items():
            others = {user for storage in memory for user in users.get(storage, ())} - {segment}
            if others:
                raise UsageError(
                    f"pipeline: {self._model} writes to the buffer {name} in or after {blocks.name(segment)}, and also "
                    f"uses it in or after {blocks.name(max(others))}, perhaps on another stage; pass its value through "
                    "the blocks as an argument and a result, or use pp=1"
                )


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{key}" if path else key, module, key


def _state(module: nn.Module, key: str) -> tuple[torch.Tensor | None, int]:
    tensor = module._buffers.get(key)
    return tensor, -1 if tensor is None else tensor._version


def by_order(model: nn.Module, blocks: Blocks) -> ParameterUsage:
    """Take the order in which parameters are registered for the order in which they are used."""
    return ParameterUsage(_with_names(model, blocks, {}))


def by_names(model: nn.Module, blocks: Blocks, known: Users, skips: Skips) -> ParameterUsage:
    """Take it from the parameter usage of a model with the same names, of which this one is a part."""
    users = {id(tensor): known[name] for name, tensor in _named(model) if name in known}
    return ParameterUsage(by_order(model, blocks).users | users, skips=skips)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _entering(enter: Any, number: int) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        enter(number, (args, kwargs))

    return hook


def _with_names(model: nn.Module, blocks: Blocks, seen: dict[StorageWeakRef, set[int]]) -> dict[int, frozenset[int]]:
    """The segments of every parameter and buffer: where it was seen and where it is held; failing both, by order."""
    number_of: dict[int, set[int]] = {}
    for number, block in enumerate(blocks.modules):
        for module in block.modules():
            number_of.setdefault(id(module), set()).add(number)
    index = 0  # of what is held outside the blocks
    segments: dict[int, set[int]] = {}
    positions: dict[int, set[int]] = {}
    for module in model.modules():
        inside = number_of.get(id(module), set())
        if inside:
            index = len(blocks.modules) - 1
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                segments.setdefault(id(tensor), set()).update(inside, *(seen.get(s, ()) for s in storages_of(tensor)))
                positions.setdefault(id(tensor), set()).update(inside or {index})
    return {key: frozenset(positions[key] if not seen or not segments[key] else segments[key]) for key in segments}


def held_by(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, module by module, in the order in which they were registered."""
    seen: set[int] = set()
    for child in module.modules():
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    on_gpu = {tensor.device for tensor in held_by(model) if tensor.is_cuda}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    values = [buffer.clone() for _, _, buffer in buffers]
    try:
        with torch.random.fork_rng(devices=sorted(on_gpu, key=str)), no_side_effects(model):
            yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), value in zip(buffers, values, strict=True):
                module._buffers[name] = buffer.copy_(value)
