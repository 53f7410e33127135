"""What a model's constructor does, written down instead of done.

While a Recording is open, tensors that are made are hollow (torch's "meta" device: no memory), and every operation on
them becomes a step, with the memories that it reads and writes. Random numbers are drawn all the same, into memory that
is dropped at once: the generator is at every step where it would be, and its state is kept with the step. So a replay
(replay.py) gives any of these tensors, bit for bit, without the others. A rough recording draws nothing: each step gets
a state of its own, from which a replay gives other numbers of the same kind.

What cannot be written down (a look at memory past torch, tensors of unknown origin) raises CannotRecord. Code that is
recorded sees devices as if the tensors were real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.interception import Interception
from unisono.torch_compat import disable_dispatch_modes, no_torch_function, storage_uses

_aten = torch.ops.aten
_META = torch.device("meta")
_CPU = torch.device("cpu")
# They write all of their first argument, and do not look at what is in it.
_FILLS = frozenset(
    (
        _aten.uniform_,
        _aten.normal_,
        _aten.zero_,
        _aten.fill_,
        _aten.copy_,
        _aten.exponential_,
        _aten.cauchy_,
        _aten.log_normal_,
        _aten.geometric_,
        _aten.random_,
    )
)
# They take a tensor for its form only.
_LIKES = frozenset(
    (
        _aten.empty_like,
        _aten.zeros_like,
        _aten.ones_like,
        _aten.full_like,
        _aten.rand_like,
        _aten.randn_like,
        _aten.randint_like,
    )
)
_LOOKS = (_aten._local_scalar_dense.default,)  # .item() and what comes down to it
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


class CannotRecord(Exception):
    """What was done cannot be done again from notes."""


@dataclass(frozen=True)
class Memory:
    """What tensors lie in: of so many bytes, on the device that it would be on."""

    nbytes: int
    device: torch.device
    storage: torch.UntypedStorage  # hollow; kept, so that no other gets its address


@dataclass(frozen=True)
class Place:
    """A tensor, by where it lies in which memory."""

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def covers(self, memory: Memory) -> bool:
        """Whether writing the tensor writes all of the memory."""
        contiguous = torch.empty(self.size, device=_META).stride() == self.stride
        return contiguous and math.prod(self.size) * self.dtype.itemsize == memory.nbytes


@dataclass(frozen=True)
class Constant:
    """A tensor that was there before, as it was when it was used."""

    value: torch.Tensor


@dataclass(frozen=True)
class Step:
    func: Any
    args: tuple[Any, ...]  # with a Place or a Constant for each tensor
    kwargs: dict[str, Any]
    reads: frozenset[int]  # memories whose contents make a difference
    writes: frozenset[int]
    renews: frozenset[int]  # of those: with no regard to what was in them
    born: tuple[tuple[int, Place], ...]  # outputs, by number, in memory that is new
    default: torch.dtype
    generator: torch.Tensor | None  # its state before, where random numbers are drawn


class Recording(Interception):
    """`with recording: model = make()`; afterwards `place(tensor)` tells where a hollow tensor of the model lies."""

    def __init__(
        self, realise: Callable[[Recording, Sequence[Place]], list[torch.Tensor]], *, is_rough: bool = False
    ) -> None:
        """realise: gives the values of tensors at this point of the recording."""
        super().__init__()
        self.is_rough = is_rough
        self.steps: list[Step] = []
        self.memories: list[Memory] = []
        self.writers: dict[int, list[int]] = {}  # of each memory, the steps that write it; of the first `indexed`
        self.indexed = 0
        self._numbers: dict[int, int] = {}
        self._constants: dict[int, tuple[torch.Tensor, Constant]] = {}
        self._foreign: set[int] = set()  # memories that stand for a view of a tensor that was there before
        self._realise = realise
        self._surface = _Surface(self)

    def __enter__(self) -> Recording:
        super().__enter__()
        self._surface.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._surface.__exit__(*error)
        super().__exit__(*error)

    def close(self) -> None:
        """Make sure that what was there before has not changed meanwhile, and let go of it."""
        for seen, constant in self._constants.values():
            if not torch.equal(_bytes(seen), _bytes(constant.value)):
                raise CannotRecord(f"a tensor of shape {tuple(seen.shape)} was changed past torch while it was in use")
        self._constants.clear()

    def uses(self, memory: int) -> int:
        """How many tensors lie in a memory now."""
        return storage_uses(self.memories[memory].storage)

    # ---- tensors -------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> int | None:
        """Of the memory that a hollow tensor lies in; None for others."""
        if tensor.device != _META or tensor.layout != torch.strided:
            return None
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def place(self, tensor: torch.Tensor) -> Place | None:
        number = self.number(tensor)
        if number is None:
            return None
        if tensor.untyped_storage().nbytes() != self.memories[number].nbytes:
            raise CannotRecord("a tensor's memory has changed its size")
        if tensor.is_conj() or tensor.is_neg():
            raise CannotRecord("a tensor is kept conjugated or negated, without being computed")
        return Place(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What would be in a tensor now."""
        place = self.place(tensor)
        if place is None:
            return tensor
        with disable_dispatch_modes(), no_torch_function():
            return self._realise(self, [place])[0]

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            place = self.place(leaf)
            return self._constant(leaf) if place is None else place
        if isinstance(leaf, (*_PLAIN, torch.device, torch.Generator)):
            return leaf
        raise CannotRecord(f"an operation takes a {type(leaf).__name__}")

    def _constant(self, tensor: torch.Tensor) -> Constant:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise CannotRecord(f"a {type(tensor).__name__} is in use")
        if tensor.device == _META:
            raise CannotRecord("a tensor of unknown origin, on the device meta, is in use")
        if id(tensor) not in self._constants:
            with disable_dispatch_modes():
                self._constants[id(tensor)] = tensor, Constant(tensor.detach().clone())
        return self._constants[id(tensor)][1]

    # ---- operations ----------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with no_torch_function():
            if func in _LOOKS:
                return func(self.values(args[0]))
            return self._step(func, args, kwargs)

    def _step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "resize" in func.name() or func.overloadpacket in (_aten.set_, _aten.set):
            raise CannotRecord(f"{func} changes a tensor's memory")
        if func.overloadpacket is _aten._to_copy and self._was_there(args[0]):
            raise CannotRecord("a module that was there before is moved or converted")
        noted_args, noted_kwargs = tree_map(self._noted, args), tree_map(self._noted, kwargs)
        if noted_kwargs.get("device") == _META:  # an operation that is made of others: where its arguments are
            noted_kwargs = {**noted_kwargs, "device": self._device(noted_args, {**noted_kwargs, "device": None})}
        written = self._written(func, noted_args, noted_kwargs)
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = self._draw(func, noted_args, noted_kwargs)
        if _is_in_place(func):  # hollow, it does nothing, and torch would import its compiler for that
            outcome = args[0]
        else:
            outcome = func(*tree_map(_hollow, args), **_on_meta(func, kwargs))
        places = [each for each in tree_leaves((noted_args, noted_kwargs)) if isinstance(each, Place)]
        born = self._born(outcome, self._device(noted_args, noted_kwargs))
        if _is_view(func) and any(isinstance(each, Constant) for each in tree_leaves((noted_args, noted_kwargs))):
            self._foreign |= {place.memory for _, place in born}
        if not written and not born:
            return outcome  # a view, or no tensor at all
        renews = {place.memory for _, place in born}
        target = noted_args[0] if func.overloadpacket in _FILLS else None
        if isinstance(target, Place) and target.covers(self.memories[target.memory]):
            others = [place.memory for place in places if place is not target]
            renews |= {target.memory} - set(others)
        reads = frozenset() if func.overloadpacket in _LIKES else frozenset(place.memory for place in places) - renews
        writes = frozenset({place.memory for place in written} | renews)
        self.steps.append(
            Step(
                func,
                noted_args,
                noted_kwargs,
                reads,
                writes,
                frozenset(renews),
                tuple(born),
                torch.get_default_dtype(),
                generator,
            )
        )
        return outcome

    def _was_there(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.nn.Parameter) and self.number(tensor) is None

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        written: list[Place] = []
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for leaf in tree_leaves(given.get(argument.name)):
                if isinstance(leaf, Constant):
                    raise CannotRecord(f"{func} changes a tensor that is not the model's")
                if isinstance(leaf, Place) and leaf.memory in self._foreign:
                    raise CannotRecord(f"{func} changes a part of a tensor that is not the model's")
                if isinstance(leaf, Place):
                    written.append(leaf)
        return written

    def _born(self, outcome: Any, device: torch.device) -> list[tuple[int, Place]]:
        born: list[tuple[int, Place]] = []
        tensors = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)]
        new: set[int] = set()
        for order, tensor in enumerate(tensors):
            if tensor.device != _META or tensor.layout != torch.strided:
                raise CannotRecord(f"a tensor on {tensor.device} came of an operation on hollow ones")
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                self._numbers[storage._cdata] = len(self.memories)
                self.memories.append(Memory(storage.nbytes(), device, storage))
                new.add(len(self.memories) - 1)
            place = self.place(tensor)
            assert place is not None
            if place.memory in new:
                born.append((order, place))
        return born

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Where an operation's outputs would be."""
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Place):
                return self.memories[leaf.memory].device
            if isinstance(leaf, Constant):
                return leaf.value.device
        return _CPU

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Draw what the operation draws; the generator's state before."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        generator = given[0] if given else torch.default_generator
        if generator.device != _CPU or self._device(args, kwargs) != _CPU:
            raise CannotRecord("random numbers are drawn on a device")
        form_only = func.overloadpacket in _LIKES or func.overloadpacket in _FILLS

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                if form_only:
                    return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype)
                return self._realise(self, [leaf])[0]
            return leaf.value.clone() if isinstance(leaf, Constant) else leaf

        with disable_dispatch_modes():
            state = generator.get_state()
            if self.is_rough:
                torch.empty(1).uniform_(generator=generator)
            else:
                func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        return state

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The device that a hollow tensor of the recording would be on."""
        number = self.number(tensor)
        return None if number is None else self.memories[number].device


def _is_in_place(func: Any) -> bool:
    """Whether it changes what is in its first argument (not its shape, as t_ does), and returns it."""
    if torch.Tag.inplace_view in func.tags:
        return False
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [each for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return len(returns) == 1 and written == arguments[:1] and func.overloadpacket.__name__.endswith("_")


def _is_view(func: Any) -> bool:
    """Whether what it gives lies in an argument's memory. torch.tensor ends with lift_fresh, whose argument is new."""
    if func.overloadpacket in (_aten.lift_fresh, _aten.lift):
        return False
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _hollow(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device != _META:
        with disable_dispatch_modes():
            return torch.empty_like(leaf, device=_META)
    return leaf


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {argument.name for argument in func._schema.arguments}
    kwargs = {key: value for key, value in tree_map(_hollow, kwargs).items() if key != "pin_memory"}
    return {**kwargs, "device": _META} if "device" in names else kwargs


class _Surface(TorchFunctionMode):
    """What code asks of a tensor past its operations: devices are those of the model, and values are looked up."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == _META:
            raise CannotRecord("the model makes tensors on the device meta by itself")
        device = None
        if args and isinstance(args[0], torch.Tensor):
            device = self._recording.device_of(args[0])
        if device is None:
            return func(*args, **kwargs)
        if func in _REFUSED:
            raise CannotRecord(f"{getattr(func, '__name__', func)} looks at memory past torch")
        if func in _DEVICE_FLAGS:
            return device.type == _DEVICE_FLAGS[func]
        if func == _DEVICE:
            return device
        if func is torch.Tensor.get_device:
            return -1 if device == _CPU else device.index or 0
        if func is torch.Tensor.tolist:
            return self._recording.values(args[0]).tolist()
        if func is torch.Tensor.cpu and device == _CPU:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_same(arg, device) for arg in args)
            kwargs = {key: _same(value, device) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _same(argument: Any, device: torch.device) -> Any:
    """A tensor that is asked to go where it is stays the same tensor: so must a hollow one."""
    if isinstance(argument, str | torch.device):
        asked = torch.device(argument)
        is_there = asked.type == device.type and (asked.index in (None, device.index) or device == _CPU)
        return _META if is_there else argument
    return argument


_DEVICE = torch.Tensor.device.__get__
_DEVICE_FLAGS: dict[Any, str] = {
    torch.Tensor.is_meta.__get__: "meta",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: "cuda",  # type: ignore[attr-defined]
}
_REFUSED: frozenset[Any] = frozenset(
    (
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.data_ptr,
        torch.Tensor.type,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
        torch.Tensor.share_memory_,
        torch.Tensor.pin_memory,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__dlpack__,
    )
)
