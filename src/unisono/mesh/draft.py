"""A draft: a model that a function builds, hollow, and the means to give each of its tensors the values it would have.

    draft = drafted(make_model, seed)
    draft.model                        # on torch's "meta" device: shapes, no memory
    draft.value("blocks.3.fc1.weight") # what one process gets from torch.manual_seed(seed), bit for bit

So a rank makes what it owns, one tensor at a time: its memory is that of its own part and of the largest tensor. The
time is that of building the whole, as random numbers can only be reached through those before them, and of the random
numbers of its own part once more.

A constructor that cannot be written down (see recording.py) is run, and the model is whole from the beginning; `note`
says why. So is one that would take much longer by replaying, as where each tensor depends on all before it.

A sketch is a draft whose values are such as they would be, but not these numbers. It takes no time to reach them, so
that some modules of a model of any size can be run, to see what they do.
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

from unisono.mesh.initial import build, seeded
from unisono.mesh.recording import CannotRecord, Place, Recording
from unisono.mesh.replay import realise, steps_for, work_of
from unisono.mesh.side_effects import no_side_effects, recorded
from unisono.torch_compat import no_function_modes

Make = Callable[[], nn.Module]
_MOST_WORK = 4  # times that of building the whole, to build all of it tensor by tensor
_KINDS = (torch.Tensor, nn.Parameter)
_SOURCE = "unisono_source"


class Draft:
    def __init__(
        self,
        model: nn.Module,
        make: Make,
        seed: int,
        recording: Recording | None,
        note: str = "",
        rewind: Callable[[], None] = lambda: None,
    ) -> None:
        """rewind: restores the state of Python that the function was first called in."""
        self.model = model
        self.note = note  # why it was built whole
        self._rewind = rewind
        self._make = make
        self._seed = seed
        self._recording = recording
        self._places: dict[str, Place] = {}
        self._built: dict[str, torch.Tensor] = {}
        self._default = torch.get_default_dtype()
        if recording is not None:
            for name, tensor in tensors_in(model):
                place = recording.place(tensor)
                assert place is not None
                self._places[name] = place
                setattr(tensor, _SOURCE, (self, name))

    @property
    def is_hollow(self) -> bool:
        return self._recording is not None

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __deepcopy__(self, memo: Any) -> Draft:
        return self

    def value(self, name: str) -> torch.Tensor:
        """A parameter, buffer or other tensor of the model, by its name: whole, in memory of its own."""
        assert self._recording is not None
        if not self._built:
            try:
                return realise(self._recording, [self._places[name]])[0]
            except torch.OutOfMemoryError:
                raise  # the whole would need more
            except (CannotRecord, RuntimeError) as error:
                self.note = f"{name}: {error}".splitlines()[0]
                self._built = dict(tensors_in(self._build()))
        return self._built[name].detach().clone()

    def device(self, name: str) -> torch.device:
        """Where a tensor will be."""
        assert self._recording is not None
        return self._recording.memories[self._places[name].memory].device

    def rebuilt(self, note: str) -> Draft:
        """The same, whole."""
        return Draft(self._build(), self._make, self._seed, None, note)

    def _build(self) -> nn.Module:
        """The whole model, as it would have been built where it was drafted."""
        with _without_function_modes(self._default), no_side_effects(self._make):
            self._rewind()
            return build(self._make, self._seed)


def source_of(tensor: torch.Tensor) -> tuple[Draft, str] | None:
    """The draft that a hollow tensor is of, and its name there."""
    return getattr(tensor, _SOURCE, None)


def forget_source(tensor: torch.Tensor) -> None:
    vars(tensor).pop(_SOURCE, None)


def drafted(make: Make, seed: int) -> Draft:
    """The draft of what `make()` builds after torch.manual_seed(seed)."""
    rewind = recorded(make)
    try:
        return _recorded(make, seed, rewind, Recording(realise))
    except Exception as error:  # the constructor's own mistake comes up again when it is run
        told = str(error) if isinstance(error, CannotRecord) else f"{type(error).__name__}: {error}"
    rewind()
    return whole_draft(make, seed, told.splitlines()[0])


def sketched(make: Make, seed: int) -> Draft:
    """A draft of the same modules, with values of the same kind. CannotRecord where a function cannot be written down,
    or what it builds depends on random numbers."""
    rewind = recorded(make)
    try:
        return _recorded(make, seed, rewind, Recording(_unless_random, is_rough=True))
    except CannotRecord:
        raise
    except Exception as error:
        raise CannotRecord(f"{type(error).__name__}: {error}") from error
    finally:
        rewind()


def _unless_random(recording: Recording, places: Sequence[Place]) -> list[torch.Tensor]:
    steps = steps_for(recording, {place.memory for place in places})
    if any(recording.steps[number].generator is not None for number in steps):
        raise CannotRecord("it looks at random numbers while it is built")
    return realise(recording, places)


def whole_draft(make: Make, seed: int, note: str = "") -> Draft:
    """The model itself."""
    return Draft(build(make, seed), make, seed, None, note)


def _recorded(make: Make, seed: int, rewind: Callable[[], None], recording: Recording) -> Draft:
    with seeded(seed), recording:
        model = make()
    if not isinstance(model, nn.Module):
        raise CannotRecord(f"it gave a {type(model).__name__}")
    recording.close()
    refer_strongly(model)
    _require_all_known(model, recording)
    return Draft(model, make, seed, recording, rewind=rewind)


def _require_all_known(model: nn.Module, recording: Recording) -> None:
    """CannotRecord where a hollow tensor is out of reach, or a tensor of the model did not come of the recording."""
    memories: dict[int, int] = {}
    for name, tensor in tensors_in(model):
        place = recording.place(tensor)
        if place is None:
            raise CannotRecord(f"{name} was there before the model was built")
        if type(tensor) not in _KINDS or tensor.grad_fn is not None or tensor.grad is not None:
            raise CannotRecord(f"{name} is no plain tensor")
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise CannotRecord(f"{name} has hooks")
        if weakref.getweakrefcount(tensor):  # values could not take its place
            raise CannotRecord(f"something keeps a weak reference to {name}")
        if memories.setdefault(place.memory, id(tensor)) != id(tensor):
            raise CannotRecord(f"{name} shares its memory with another tensor")
    del tensor
    held = dict.fromkeys(memories, 1)
    if _stray(recording, held) is not None:
        gc.collect()
    stray = _stray(recording, held)
    if stray is not None:
        raise CannotRecord(f"a tensor of {recording.memories[stray].nbytes} bytes is kept outside the model's modules")
    _require_little_work(recording, memories)


def refer_strongly(model: nn.Module) -> None:
    """torch's recurrent layers keep weak references to their weights, to notice when others take their place. A weight
    that is to get its values must have none; they notice by any function that gives the weight."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            kept = [None if refer is None else partial(_itself, refer()) for refer in module._flat_weight_refs]
            module._flat_weight_refs = kept  # type: ignore[assignment]


def refer_weakly(model: nn.Module) -> None:
    """As torch does it: for a model that has its values."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights = [None if refer is None else refer() for refer in module._flat_weight_refs]
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def _itself(weight: Any) -> Any:
    return weight


def _require_little_work(recording: Recording, memories: Iterable[int]) -> None:
    """CannotRecord where steps would be done again too often. Forgets what steps that nothing comes of were given."""
    sizes = [work_of(step) for step in recording.steps]
    total = 0
    needed: set[int] = set()
    for memory in memories:
        numbers = steps_for(recording, {memory})
        needed.update(numbers)
        total += sum(sizes[number] for number in numbers)
        if total > _MOST_WORK * sum(sizes):
            raise CannotRecord("its tensors depend on each other so much that building them one by one takes too long")
    for number in set(range(len(recording.steps))) - needed:
        recording.steps[number] = replace(recording.steps[number], args=(), kwargs={}, generator=None)


def _stray(recording: Recording, held: dict[int, int]) -> int | None:
    """A memory in which more tensors lie than the model's."""
    for memory in range(len(recording.memories)):
        if recording.uses(memory) > held.get(memory, 0):
            return memory
    return None


def tensors_in(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module of the model holds, by its name: parameters, buffers and what else there is."""
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
