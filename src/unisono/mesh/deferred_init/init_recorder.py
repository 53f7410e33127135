"""Records what a model's constructor does, without the memory.

While an InitRecorder is entered, new tensors are on torch's "meta" device, and every operation on them is recorded,
with the storages that it reads and writes. Random numbers are drawn all the same, into memory that is freed at once, so
that the generator is at every operation where it would be; its state is recorded with the operation. A replay
(replay.py) then gives any of these tensors, bit for bit, without the others. An approximate recorder draws nothing:
each operation gets a state of its own, from which a replay gives other numbers of the same distribution.

Tensors that the constructor puts on the meta device itself have no values and are not recorded; it must have replaced
them by others when it is done. What cannot be recorded (access to memory outside torch, tensors of unknown origin)
raises CannotRecord. Code that is recorded sees devices as if the tensors were real.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.mesh.interception import LIKE_OPS, Interception
from unisono.torch_compat import disable_dispatch_modes, no_torch_function, storage_uses

_aten = torch.ops.aten
_META = torch.device("meta")
_CPU = torch.device("cpu")
# Ops that write all of their first argument without reading it.
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
_LOOKS = (_aten._local_scalar_dense.default,)  # .item() and what comes down to it
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


class CannotRecord(Exception):
    """What was done cannot be replayed."""


@dataclass(frozen=True)
class RecordedStorage:
    """A storage of meta tensors, with the device that it would be on."""

    nbytes: int
    device: torch.device
    storage: torch.UntypedStorage  # on meta; kept, so that no other gets its address


@dataclass(frozen=True)
class TensorRef:
    """A tensor, as a view of a recorded storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def covers(self, storage: RecordedStorage) -> bool:
        """Whether writing the tensor writes all of the storage."""
        contiguous = torch.empty(self.size, device=_META).stride() == self.stride
        return contiguous and math.prod(self.size) * self.dtype.itemsize == storage.nbytes


@dataclass(frozen=True)
class Constant:
    """A tensor that existed before, with its value at the time of use."""

    value: torch.Tensor


@dataclass(frozen=True)
class RecordedOp:
    func: Any
    args: tuple[Any, ...]  # with a TensorRef or a Constant for each tensor
    kwargs: dict[str, Any]
    reads: frozenset[int]  # storages whose contents make a difference
    writes: frozenset[int]
    overwrites: frozenset[int]  # of those: without reading them
    created: tuple[tuple[int, TensorRef], ...]  # outputs, by number, in storage that is new
    default: torch.dtype
    generator: torch.Tensor | None  # its state before, where random numbers are drawn


class InitRecorder(Interception):
    """`with recorder: model = make()`; afterwards `ref(tensor)` identifies a meta tensor of the model."""

    def __init__(
        self, replay: Callable[[InitRecorder, Sequence[TensorRef]], list[torch.Tensor]], *, is_approximate: bool = False
    ) -> None:
        """replay: computes the values of tensors from the operations recorded so far."""
        super().__init__()
        self.is_approximate = is_approximate
        self.steps: list[RecordedOp] = []
        self.storages: list[RecordedStorage] = []
        self.writers: dict[int, list[int]] = {}  # of each storage, the steps that write it; of the first `indexed`
        self.indexed = 0
        self._numbers: dict[int, int] = {}
        self._constants: dict[int, tuple[torch.Tensor, Constant]] = {}
        self._external_views: set[int] = set()  # storages of views of tensors that existed before
        self._replay = replay
        self._queries = _TensorQueries(self)

    def __enter__(self) -> InitRecorder:
        super().__enter__()
        self._queries.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._queries.__exit__(*error)
        super().__exit__(*error)

    def close(self) -> None:
        """Check that tensors that existed before have not changed meanwhile, and release them."""
        for seen, constant in self._constants.values():
            if not torch.equal(_bytes(seen), _bytes(constant.value)):
                raise CannotRecord(f"a tensor of shape {tuple(seen.shape)} was changed past torch while it was in use")
        self._constants.clear()

    def uses(self, storage: int) -> int:
        """How many tensors use a storage now."""
        return storage_uses(self.storages[storage].storage)

    # ---- tensors -------------------------------------------------------------------------------------------------

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of a meta tensor's storage; None for other tensors."""
        if tensor.device != _META or tensor.layout != torch.strided:
            return None
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def ref(self, tensor: torch.Tensor) -> TensorRef | None:
        number = self.number(tensor)
        if number is None:
            return None
        if tensor.untyped_storage().nbytes() != self.storages[number].nbytes:
            raise CannotRecord("a tensor's memory has changed its size")
        if tensor.is_conj() or tensor.is_neg():
            raise CannotRecord("a tensor is kept conjugated or negated, without being computed")
        return TensorRef(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that a tensor would have now."""
        ref = self.ref(tensor)
        if ref is None:
            return tensor
        with disable_dispatch_modes(), no_torch_function():
            return self._replay(self, [ref])[0]

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            ref = self.ref(leaf)
            return self._constant(leaf) if ref is None else ref
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

    def made_by(
        self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor on the CPU of which a replay gets the values from function(*args)."""
        with disable_dispatch_modes(), no_torch_function():
            made = torch.empty(tuple(shape), dtype=dtype, device=_META)
            created = self._created(made, _CPU)
        written = frozenset(ref.storage for _, ref in created)
        self.steps.append(
            RecordedOp(
                function, args, {}, frozenset(), written, written, tuple(created), torch.get_default_dtype(), None
            )
        )
        return made

    def _is_on_meta(self, leaf: Any) -> bool:
        """Whether it is a tensor that the constructor has put on the meta device itself."""
        return isinstance(leaf, torch.Tensor) and leaf.device == _META and self.number(leaf) is None

    # ---- operations ----------------------------------------------------------------------------------------------

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with no_torch_function():
            if func in _LOOKS:
                return func(self.values(args[0]))
            return self._step(func, args, kwargs)

    def _step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(map(self._is_on_meta, tree_leaves((args, kwargs)))):
            device = kwargs.get("device")
            if func.overloadpacket not in LIKE_OPS or device is None or torch.device(device) == _META:
                return self._step_on_meta(func, args, kwargs)
            args = (self.made_by(_empty, (args[0].shape, args[0].dtype), args[0].shape, args[0].dtype), *args[1:])
        if "resize" in func.name() or func.overloadpacket in (_aten.set_, _aten.set):
            raise CannotRecord(f"{func} changes a tensor's memory")
        if func.overloadpacket is _aten._to_copy and self._existed_before(args[0]):
            raise CannotRecord("a module that was there before is moved or converted")
        noted_args, noted_kwargs = tree_map(self._noted, args), tree_map(self._noted, kwargs)
        if noted_kwargs.get("device") == _META:  # an operation that is made of others: where its arguments are
            noted_kwargs = {**noted_kwargs, "device": self._device(noted_args, {**noted_kwargs, "device": None})}
        written = self._written(func, noted_args, noted_kwargs)
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = self._draw(func, noted_args, noted_kwargs)
        if _is_in_place(func):  # on meta it does nothing, and torch would import its compiler for that
            outcome = args[0]
        else:
            outcome = func(*tree_map(_as_meta, args), **_on_meta(func, kwargs))
        refs = [each for each in tree_leaves((noted_args, noted_kwargs)) if isinstance(each, TensorRef)]
        created = self._created(outcome, self._device(noted_args, noted_kwargs))
        if _is_view(func) and any(isinstance(each, Constant) for each in tree_leaves((noted_args, noted_kwargs))):
            self._external_views |= {ref.storage for _, ref in created}
        if not written and not created:
            return outcome  # a view, or no tensor at all
        overwrites = {ref.storage for _, ref in created}
        target = noted_args[0] if func.overloadpacket in _FILLS else None
        if isinstance(target, TensorRef) and target.covers(self.storages[target.storage]):
            others = [ref.storage for ref in refs if ref is not target]
            overwrites |= {target.storage} - set(others)
        reads = frozenset() if func.overloadpacket in LIKE_OPS else frozenset(ref.storage for ref in refs) - overwrites
        writes = frozenset({ref.storage for ref in written} | overwrites)
        self.steps.append(
            RecordedOp(
                func,
                noted_args,
                noted_kwargs,
                reads,
                writes,
                frozenset(overwrites),
                tuple(created),
                torch.get_default_dtype(),
                generator,
            )
        )
        return outcome

    def _step_on_meta(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on tensors that the constructor has put on the meta device: there is nothing to compute."""
        if any(self.number(leaf) is not None for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
            raise CannotRecord(f"{func} takes tensors on the device meta and others")
        return func(*args, **kwargs)

    def _existed_before(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.nn.Parameter) and self.number(tensor) is None

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TensorRef]:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        written: list[TensorRef] = []
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for leaf in tree_leaves(given.get(argument.name)):
                if isinstance(leaf, Constant):
                    raise CannotRecord(f"{func} changes a tensor that is not the model's")
                if isinstance(leaf, TensorRef) and leaf.storage in self._external_views:
                    raise CannotRecord(f"{func} changes a part of a tensor that is not the model's")
                if isinstance(leaf, TensorRef):
                    written.append(leaf)
        return written

    def _created(self, outcome: Any, device: torch.device) -> list[tuple[int, TensorRef]]:
        created: list[tuple[int, TensorRef]] = []
        tensors = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, torch.Tensor)]
        new: set[int] = set()
        for order, tensor in enumerate(tensors):
            if tensor.device != _META or tensor.layout != torch.strided:
                raise CannotRecord(f"a tensor on {tensor.device} is the output of an operation on meta tensors")
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                self._numbers[storage._cdata] = len(self.storages)
                self.storages.append(RecordedStorage(storage.nbytes(), device, storage))
                new.add(len(self.storages) - 1)
            ref = self.ref(tensor)
            assert ref is not None
            if ref.storage in new:
                created.append((order, ref))
        return created

    def _device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Where an operation's outputs would be."""
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, TensorRef):
                return self.storages[leaf.storage].device
            if isinstance(leaf, Constant):
                return leaf.value.device
        return _CPU

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Draw what the operation draws; the generator's state before."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        generator = given[0] if given else torch.default_generator
        if generator.device != _CPU or self._device(args, kwargs) != _CPU:
            raise CannotRecord("random numbers are drawn on a device")
        form_only = func.overloadpacket in LIKE_OPS or func.overloadpacket in _FILLS

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                if form_only:
                    return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype)
                return self._replay(self, [leaf])[0]
            return leaf.value.clone() if isinstance(leaf, Constant) else leaf

        with disable_dispatch_modes():
            state = generator.get_state()
            if self.is_approximate:
                torch.empty(1).uniform_(generator=generator)
            else:
                func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
        return state

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        """The device that a recorded meta tensor would be on."""
        number = self.number(tensor)
        return None if number is None else self.storages[number].device


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _is_in_place(func: Any) -> bool:
    """Whether it changes what is in its first argument (not its shape, as t_ does), and returns it."""
    if torch.Tag.inplace_view in func.tags:
        return False
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [each for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return len(returns) == 1 and written == arguments[:1] and func.overloadpacket.__name__.endswith("_")


def _is_view(func: Any) -> bool:
    """Whether its output shares an argument's storage. torch.tensor ends with lift_fresh, whose argument is new."""
    if func.overloadpacket in (_aten.lift_fresh, _aten.lift):
        return False
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device != _META:
        with disable_dispatch_modes():
            return torch.empty_like(leaf, device=_META)
    return leaf


def _on_meta(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {argument.name for argument in func._schema.arguments}
    kwargs = {key: value for key, value in tree_map(_as_meta, kwargs).items() if key != "pin_memory"}
    return {**kwargs, "device": _META} if "device" in names else kwargs


class _TensorQueries(TorchFunctionMode):
    """Answers queries of tensors that are no operations: devices are those of the model, and values are replayed."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == _META:
            with disable_dispatch_modes():  # as from_pretrained does, before it reads the weights
                return func(*args, **kwargs)
        device = None
        if args and isinstance(args[0], torch.Tensor):
            device = self._recorder.device_of(args[0])
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
            return self._recorder.values(args[0]).tolist()
        if func is torch.Tensor.cpu and device == _CPU:
            return args[0]
        if func in _GIVE_THEMSELVES:  # or a copy, on another device: the default one, if none is asked for
            kwargs["device"] = _same(kwargs.get("device") or device, device)
        if func is torch.Tensor.to:
            args = tuple(_same(arg, device) for arg in args)
            kwargs = {key: _same(value, device) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _same(argument: Any, device: torch.device) -> Any:
    """`tensor.to` of the tensor's own device returns the tensor itself: so it must for a meta tensor."""
    if isinstance(argument, str | torch.device):
        asked = torch.device(argument)
        is_there = asked.type == device.type and (asked.index in (None, device.index) or device == _CPU)
        return _META if is_there else argument
    return argument


_GIVE_THEMSELVES = (torch.as_tensor, torch.asarray)
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
