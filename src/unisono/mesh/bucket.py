"""Buckets: gradients that become ready about the same time, and travel in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.mesh.mesh import Mesh
from unisono.torch_compat import foreach_copy_

Axes = tuple[str, ...]

BUCKET_BYTES = 25 * 2**20
LEAST_BUCKET_BYTES = 2**20
BUCKETS = 8  # of a model that is too small to fill large ones: so many leave, one after the other, in the backward


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def bucket_bytes_for(model: nn.Module) -> int:
    """How much travels in one message: the most that pays, but so that messages leave before the backward is over.

    Unless the model is on a CPU: there messages take the time of the cores that compute, and few of them cost least.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(parameter.is_cpu for parameter in parameters):
        return BUCKET_BYTES
    size = sum(parameter.numel() * gradient_dtype(parameter).itemsize for parameter in parameters)
    return min(max(size // BUCKETS, LEAST_BUCKET_BYTES), BUCKET_BYTES)


class Spare:
    """Reuses the buffer of a finished message for the next one, of any dtype, because allocation is slow."""

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        held = self._held
        if held is None or held.nbytes < size * dtype.itemsize or held.device != device:
            return torch.empty(size, dtype=dtype, device=device)
        self._held = None
        if held.dtype != dtype:
            held = held.view(torch.uint8)[: size * dtype.itemsize].view(dtype)
        return held[:size]

    def put(self, message: torch.Tensor) -> None:
        """The caller must not use the tensor afterwards."""
        if self._held is None or self._held.nbytes < message.nbytes:
            self._held = message


class Bucket:
    """Parameters of one device and group of ranks, whose gradients have one dtype and travel in one message."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.comm = comm
        self.everyone = comm  # all ranks that have parts of these gradients, where `comm` joins some of them
        self.missing = len(self.parameters)  # gradients of this round that are not there yet
        self.handle: Handle | None = None
        self.total: torch.Tensor | None = None  # what has arrived since the last finish
        self.spare = Spare()
        self.reduce_dtype: torch.dtype | None = None  # of the message; None for that of the gradients
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._message: torch.Tensor | None = None  # that is being filled
        self._slots: list[list[torch.Tensor]] = []  # in it, of each parameter
        self._packed: set[int] = set()

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients, and of their sum."""
        return gradient_dtype(self.parameters[0])

    def reduce_in(self, dtype: torch.dtype | None) -> None:
        """Float32 gradients are rounded to `dtype` for the message."""
        self.reduce_dtype = dtype if self.dtype == torch.float32 else None

    def name_of(self, parameter: torch.Tensor) -> str:
        return self.names[self._index[id(parameter)]]

    @property
    def size(self) -> int:
        """Elements of the message."""
        return sum(parameter.numel() for parameter in self.parameters)

    def slots(self, message: torch.Tensor) -> list[list[torch.Tensor]]:
        """Where the gradient of each parameter is in a message, as views, one for each of its `parts`."""
        shards = message.split([parameter.numel() for parameter in self.parameters])
        return [[shard.view(p.shape)] for p, shard in zip(self.parameters, shards, strict=True)]

    def parts(self, index: int, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        """A parameter's gradient, as it is sharded in a message."""
        return (gradient,)

    def pack(self, parameter: torch.Tensor) -> None:
        """Take the gradient off a parameter as soon as it is there: its memory serves for the next one."""
        index = self._index[id(parameter)]
        gradient = parameter.grad
        assert gradient is not None
        self._open()
        for slot, part in zip(self._slots[index], self.parts(index, gradient), strict=True):
            slot.copy_(part)
        parameter.grad = None
        self._packed.add(index)

    def message(self) -> torch.Tensor:
        """The full message, to be sent. What is still on parameters is taken off them; what is missing is zeros."""
        self._open()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, parameter in enumerate(self.parameters):
            if index in self._packed:
                continue
            if parameter.grad is None:
                for slot in self._slots[index]:
                    slot.zero_()
            else:
                targets += self._slots[index]
                sources += self.parts(index, parameter.grad)
        if targets:
            foreach_copy_(targets, sources)
        for parameter in self.parameters:
            parameter.grad = None
        assert self._message is not None
        message, self._message = self._message, None
        self._slots = []
        self._packed.clear()
        return message

    def reset(self) -> None:
        """Begin again: what a backward that failed has left is no part of the next one."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        self.missing = len(self.parameters)
        self._message, self._slots = None, []
        self._packed.clear()

    def _open(self) -> None:
        if self._message is None:
            self._message = self.spare.take(self.size, self.reduce_dtype or self.dtype, self.parameters[0].device)
            self._slots = self.slots(self._message)


def buckets_of(
    summed: Iterable[tuple[str, nn.Parameter, Axes]],
    mesh: Mesh,
    most_bytes: int,
    make: Callable[[Sequence[str], Sequence[nn.Parameter], Communicator], Any] = Bucket,
) -> list[Any]:
    """Deal parameters, each with the axes along which its gradient is summed, into buckets, last ones first: about the
    order in which backward gets them."""
    kinds: dict[tuple[Axes, torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    slots: dict[int, int] = {}
    for slot, (name, parameter, axes) in enumerate(summed):
        kinds.setdefault((axes, gradient_dtype(parameter), parameter.device), []).append((name, parameter))
        slots[id(parameter)] = slot
    made: list[tuple[int, Any]] = []
    for axes in sorted({axes for axes, _, _ in kinds}):
        mesh.comm(*axes)  # groups are made in the same order on every rank
    for (axes, _, _), members in kinds.items():
        for group in _filled(reversed(members), most_bytes):
            names, parameters = zip(*group, strict=True)
            made.append((slots[id(parameters[0])], make(names, parameters, mesh.comm(*axes))))
    return [bucket for _, bucket in sorted(made, key=lambda entry: -entry[0])]


def _filled(members: Iterable[tuple[str, nn.Parameter]], most_bytes: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    group: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in members:
        grown = size + parameter.numel() * gradient_dtype(parameter).itemsize
        if group and grown > most_bytes:
            yield group
            group, grown = [], grown - size
        group.append((name, parameter))
        size = grown
    if group:
        yield group
