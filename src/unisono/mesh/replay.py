"""The replay of a recording: the values of chosen tensors, from the steps that they depend on and no others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.recording import CannotRecord, Constant, Place, Recording, Step
from unisono.torch_compat import disable_dispatch_modes, no_torch_function


def realise(recording: Recording, places: Sequence[Place]) -> list[torch.Tensor]:
    """The tensors that lie there after all steps; those of one memory share it again."""
    run = _Run(recording)
    with _apart():
        for number in steps_for(recording, {place.memory for place in places}):
            run.step(recording.steps[number])
        return [run.tensor(place) for place in places]


def steps_for(recording: Recording, memories: set[int]) -> list[int]:
    """The numbers of the steps that what is in these memories at the end depends on, in order."""
    writers = _writers(recording)
    chosen: set[int] = set()
    asked = [(memory, len(recording.steps)) for memory in memories]
    done: set[tuple[int, int]] = set()
    while asked:
        memory, before = asked.pop()
        if (memory, before) in done:
            continue
        done.add((memory, before))
        for number in reversed(writers.get(memory, [])):
            if number >= before:
                continue
            step = recording.steps[number]
            if number not in chosen:
                chosen.add(number)
                asked += [(each, number) for each in (step.reads | step.writes) - step.renews]
            if memory in step.renews:
                break
    return sorted(chosen)


def work_of(step: Step) -> int:
    """How many elements a step writes, about."""
    places = [each for each in tree_leaves(step.args) if isinstance(each, Place)]
    return max((math.prod(place.size) for place in [*places, *(born for _, born in step.born)]), default=0)


def _writers(recording: Recording) -> dict[int, list[int]]:
    known: dict[int, list[int]] = recording.writers
    for number in range(recording.indexed, len(recording.steps)):
        for memory in recording.steps[number].writes:
            known.setdefault(memory, []).append(number)
    recording.indexed = len(recording.steps)
    return known


class _Run:
    def __init__(self, recording: Recording) -> None:
        self._memories = recording.memories
        self._real: dict[int, torch.UntypedStorage] = {}

    def tensor(self, place: Place) -> torch.Tensor:
        memory = self._memories[place.memory]
        if place.memory not in self._real:
            self._real[place.memory] = torch.UntypedStorage(memory.nbytes, device=memory.device)
        made = torch.empty(0, dtype=place.dtype, device=memory.device)
        return made.set_(self._real[place.memory], place.offset, place.size, place.stride)

    def step(self, step: Step) -> None:
        generator = torch.default_generator

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return self.tensor(leaf)
            if isinstance(leaf, Constant):
                return leaf.value.clone()
            return generator if isinstance(leaf, torch.Generator) else leaf

        if step.generator is not None:
            generator.set_state(step.generator)
        if torch.get_default_dtype() != step.default:
            torch.set_default_dtype(step.default)
        outcome = step.func(*tree_map(given, step.args), **tree_map(given, step.kwargs))
        tensors = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)]
        for order, place in step.born:
            self._adopt(tensors[order], place, step)

    def _adopt(self, tensor: torch.Tensor, place: Place, step: Step) -> None:
        lies = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if lies != (place.size, place.stride, place.offset, place.dtype):
            raise CannotRecord(f"{step.func} gave {lies}, where {place} was foreseen")
        storage = tensor.untyped_storage()
        if storage.nbytes() != self._memories[place.memory].nbytes:
            raise CannotRecord(f"{step.func} gave {storage.nbytes()} bytes, where others were foreseen")
        self._real[place.memory] = storage


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Nothing that surrounds the caller changes what is replayed, and the generator is put back."""
    default = torch.get_default_dtype()
    try:
        with (
            disable_dispatch_modes(),
            no_torch_function(),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
