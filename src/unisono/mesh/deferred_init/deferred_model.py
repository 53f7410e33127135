"""Deferred initialization: a model built on the meta device, and the values of each of its tensors on demand.

    deferred = defer_init(make_model, seed)
    deferred.model                        # on torch's "meta" device: shapes, no memory
    deferred.value("blocks.3.fc1.weight") # what one process gets from torch.manual_seed(seed), bit for bit

A rank materializes what it owns, one tensor at a time: it needs the memory of its own part and of the largest tensor.
It takes the time of building the full model, as random numbers can only be reached through those before them, plus the
random numbers of its own part once more.

A constructor that cannot be recorded (see init_recorder.py) is run, and the model has its values from the beginning;
`note` has the reason. So is one whose replay would take much longer, as where each tensor depends on all before it.

`defer_init_approximately` gives values of the same distributions, but not the same numbers. It takes no time to reach
them, so that a few modules of a model of any size can be run for trial.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unisono.mesh.deferred_init.init_recorder import CannotRecord, InitRecorder, TensorRef
from unisono.mesh.deferred_init.replay import elements_written, replay, steps_for
from unisono.mesh.deferred_init.seeded_init import build, seeded
from unisono.mesh.deferred_init.weight_files import recorded_files
from unisono.mesh.side_effects import no_side_effects, recorded
from unisono.torch_compat import no_function_modes

Make = Callable[[], nn.Module]
_MAX_WORK = 4  # times that of building the model, to build all of it tensor by tensor
_KINDS = (torch.Tensor, nn.Parameter)
_SOURCE = "unisono_source"


class DeferredModel:
    def __init__(
        self,
        model: nn.Module,
        make: Make,
        seed: int,
        recorder: InitRecorder | None,
        note: str = "",
        rewind: Callable[[], None] = lambda: None,
    ) -> None:
        """rewind: restores the state of Python that the function was first called in."""
        self.model = model
        self.note = note  # why its initialization is not deferred
        self._rewind = rewind
        self._make = make
        self._seed = seed
        self._recorder = recorder
        self._refs: dict[str, TensorRef] = {}
        self._built: dict[str, torch.Tensor] = {}
        self._default = torch.get_default_dtype()
        if recorder is not None:
            for name, tensor in tensors_in(model):
                ref = recorder.ref(tensor)
                assert ref is not None
                self._refs[name] = ref
                setattr(tensor, _SOURCE, (self, name))

    @property
    def is_deferred(self) -> bool:
        return self._recorder is not None

    def __contains__(self, name: str) -> bool:
        return name in self._refs

    def __deepcopy__(self, memo: Any) -> DeferredModel:
        return self

    def value(self, name: str) -> torch.Tensor:
        """A parameter, buffer or other tensor of the model, by its name: in full, in storage of its own."""
        assert self._recorder is not None
        if not self._built:
            try:
                return replay(self._recorder, [self._refs[name]])[0]
            except torch.OutOfMemoryError:
                raise  # the full model would need more
            except (CannotRecord, RuntimeError) as error:
                self.note = f"{name}: {error}".splitlines()[0]
                self._built = dict(tensors_in(self._build()))
        return self._built[name].detach().clone()

    def device(self, name: str) -> torch.device:
        """Where a tensor will be."""
        assert self._recorder is not None
        return self._recorder.storages[self._refs[name].storage].device

    def rebuilt(self, note: str) -> DeferredModel:
        """The same model, built at once."""
        return DeferredModel(self._build(), self._make, self._seed, None, note)

    def _build(self) -> nn.Module:
        """The full model, as it would have been built where its initialization was deferred."""
        with _without_function_modes(self._default), no_side_effects(self._make):
            self._rewind()
            return build(self._make, self._seed)


def source_of(tensor: torch.Tensor) -> tuple[DeferredModel, str] | None:
    """The deferred-init model that a meta tensor belongs to, and its name there."""
    return getattr(tensor, _SOURCE, None)


def forget_source(tensor: torch.Tensor) -> None:
    vars(tensor).pop(_SOURCE, None)


def defer_init(make: Make, seed: int) -> DeferredModel:
    """The model that `make()` builds after torch.manual_seed(seed), without its values."""
    rewind = recorded(make)
    try:
        return _recorded(make, seed, rewind, InitRecorder(replay))
    except Exception as error:  # the constructor's own mistake comes up again when it is run
        reason = str(error) if isinstance(error, CannotRecord) else f"{type(error).__name__}: {error}"
    rewind()
    return build_now(make, seed, reason.splitlines()[0])


def defer_init_approximately(make: Make, seed: int) -> DeferredModel:
    """The same modules, with values of the same distributions. CannotRecord where a function cannot be recorded, or the
    modules depend on random numbers."""
    rewind = recorded(make)
    try:
        return _recorded(make, seed, rewind, InitRecorder(_replay_unless_random, is_approximate=True))
    except CannotRecord:
        raise
    except Exception as error:
        raise CannotRecord(f"{type(error).__name__}: {error}") from error
    finally:
        rewind()


def _replay_unless_random(recorder: InitRecorder, refs: Sequence[TensorRef]) -> list[torch.Tensor]:
    steps = steps_for(recorder, {ref.storage for ref in refs})
    if any(recorder.steps[number].generator is not None for number in steps):
        raise CannotRecord("it looks at random numbers while it is built")
    return replay(recorder, refs)


def build_now(make: Make, seed: int, note: str = "") -> DeferredModel:
    """The model with its values."""
    return DeferredModel(build(make, seed), make, seed, None, note)


def _recorded(make: Make, seed: int, rewind: Callable[[], None], recorder: InitRecorder) -> DeferredModel:
    with seeded(seed), recorded_files(recorder), recorder:
        model = make()
    if not isinstance(model, nn.Module):
        raise CannotRecord(f"it gave a {type(model).__name__}")
    recorder.close()
    refer_strongly(model)
    _require_all_known(model, recorder)
    return DeferredModel(model, make, seed, recorder, rewind=rewind)


def _require_all_known(model: nn.Module, recorder: InitRecorder) -> None:
    """CannotRecord where a meta tensor is held outside the model, or a tensor of the model was not recorded."""
    storages: dict[int, int] = {}
    for name, tensor in tensors_in(model):
        ref = recorder.ref(tensor)
        if ref is None:
            where = "is left on the device meta" if tensor.is_meta else "was there before the model was built"
            raise CannotRecord(f"{name} {where}")
        if type(tensor) not in _KINDS or tensor.grad_fn is not None or tensor.grad is not None:
            raise CannotRecord(f"{name} is no plain tensor")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CannotRecord(f"{name} has hooks")
        if weakref.getweakrefcount(tensor):  # values could not replace it
            raise CannotRecord(f"something keeps a weak reference to {name}")
        if storages.setdefault(ref.storage, id(tensor)) != id(tensor):
            raise CannotRecord(f"{name} shares its memory with another tensor")
    del tensor
    held = dict.fromkeys(storages, 1)
    if _stray(recorder, held) is not None:
        gc.collect()
    stray = _stray(recorder, held)
    if stray is not None:
        raise CannotRecord(f"a tensor of {recorder.storages[stray].nbytes} bytes is kept outside the model's modules")
    _require_little_work(recorder, storages)


def refer_strongly(model: nn.Module) -> None:
    """torch's recurrent layers keep weak references to their weights, to notice when these are replaced. A weight
    that is to get its values must have none; any function that returns the weight serves instead."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            kept = [None if refer is None else partial(_itself, refer()) for refer in module._flat_weight_refs]
            module._flat_weight_refs = kept  # type: ignore[assignment]


def refer_weakly(model: nn.Module) -> None:
    """Restore torch's weak references, for a model that has its values."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights = [None if refer is None else refer() for refer in module._flat_weight_refs]
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def _itself(weight: Any) -> Any:
    return weight


def _require_little_work(recorder: InitRecorder, storages: Iterable[int]) -> None:
    """CannotRecord where operations would be repeated too often. Drops the arguments of operations that no tensor
    needs."""
    sizes = [elements_written(step) for step in recorder.steps]
    total = 0
    needed: set[int] = set()
    for storage in storages:
        numbers = steps_for(recorder, {storage})
        needed.update(numbers)
        total += sum(sizes[number] for number in numbers)
        if total > _MAX_WORK * sum(sizes):
            raise CannotRecord("its tensors depend on each other so much that building them one by one takes too long")
    for number in set(range(len(recorder.steps))) - needed:
        recorder.steps[number] = replace(recorder.steps[number], args=(), kwargs={}, generator=None)


def _stray(recorder: InitRecorder, held: dict[int, int]) -> int | None:
    """A storage with more tensors than the model's."""
    for storage in range(len(recorder.storages)):
        if recorder.uses(storage) > held.get(storage, 0):
            return storage
    return None


def tensors_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module of the model holds, by its name: parameters, buffers and others."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for name, tensor in value.items():
                    if tensor is not None:
                        yield f"{prefix}.{name}".lstrip("."), tensor
            elif key != "_modules":
                yield from _inside(value, f"{prefix}.{key}".lstrip("."))


def _inside(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _inside(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _inside(each, f"{name}[{number}]")


@contextlib.contextmanager
def _without_function_modes(default: torch.dtype) -> Iterator[None]:
    """In the block, nothing that surrounds the caller changes what torch's functions do, or the default dtype."""
    before = torch.get_default_dtype()
    with no_function_modes():
        torch.set_default_dtype(default)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
