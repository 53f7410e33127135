"""Replays a recorded constructor: the values of chosen tensors, from the operations that they depend on alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.deferred_init.init_recorder import CannotRecord, Constant, InitRecorder, RecordedOp, TensorRef
from unisono.torch_compat import disable_dispatch_modes, no_torch_function


def replay(recorder: InitRecorder, refs: Sequence[TensorRef]) -> list[torch.Tensor]:
    """The tensors with their values after all operations; those of one storage share it again."""
    run = _Replay(recorder)
    with _isolated():
        for number in steps_for(recorder, {ref.storage for ref in refs}):
            run.step(recorder.steps[number])
        return [run.tensor(ref) for ref in refs]


def steps_for(recorder: InitRecorder, storages: set[int]) -> list[int]:
    """The numbers of the operations that the final contents of these storages depend on, in order."""
    writers = _writers(recorder)
    chosen: set[int] = set()
    asked = [(storage, len(recorder.steps)) for storage in storages]
    done: set[tuple[int, int]] = set()
    while asked:
        storage, before = asked.pop()
        if (storage, before) in done:
            continue
        done.add((storage, before))
        for number in reversed(writers.get(storage, [])):
            if number >= before:
                continue
            step = recorder.steps[number]
            if number not in chosen:
                chosen.add(number)
                asked += [(each, number) for each in (step.reads | step.writes) - step.overwrites]
            if storage in step.overwrites:
                break
    return sorted(chosen)


def elements_written(step: RecordedOp) -> int:
    """About how many elements an operation writes."""
    refs = [each for each in tree_leaves(step.args) if isinstance(each, TensorRef)]
    return max((math.prod(ref.size) for ref in [*refs, *(created for _, created in step.created)]), default=0)


def _writers(recorder: InitRecorder) -> dict[int, list[int]]:
    known: dict[int, list[int]] = recorder.writers
    for number in range(recorder.indexed, len(recorder.steps)):
        for storage in recorder.steps[number].writes:
            known.setdefault(storage, []).append(number)
    recorder.indexed = len(recorder.steps)
    return known


class _Replay:
    def __init__(self, recorder: InitRecorder) -> None:
        self._storages = recorder.storages
        self._real: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        storage = self._storages[ref.storage]
        if ref.storage not in self._real:
            self._real[ref.storage] = torch.UntypedStorage(storage.nbytes, device=storage.device)
        made = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return made.set_(self._real[ref.storage], ref.offset, ref.size, ref.stride)

    def step(self, step: RecordedOp) -> None:
        generator = torch.default_generator

        def given(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
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
        for order, ref in step.created:
            self._adopt(tensors[order], ref, step)

    def _adopt(self, tensor: torch.Tensor, ref: TensorRef, step: RecordedOp) -> None:
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if layout != (ref.size, ref.stride, ref.offset, ref.dtype):
            raise CannotRecord(f"{step.func} gave {layout}, where {ref} was recorded")
        storage = tensor.untyped_storage()
        if storage.nbytes() != self._storages[ref.storage].nbytes:
            raise CannotRecord(f"{step.func} gave {storage.nbytes()} bytes, where others were recorded")
        self._real[ref.storage] = storage


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Modes around the caller do not affect the replay, and the generator is restored."""
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
