"""The message from a stage to the next: the tensors that the next block needs, and a form that describes them.

The form is sent ahead once for each kind of microbatch; afterwards both ends know what comes, and receives can be
posted before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unisono.comm.signatures.records import plain_record
from unisono.parallel.pipeline.skips import Label

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
Key = tuple[Any, ...]


@plain_record
@dataclass(frozen=True)
class TensorForm:
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False  # a gradient comes back for it

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def placeholder(self, device: torch.device) -> torch.Tensor:
        """Zeros of that shape in the memory of one."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.shape)


@plain_record
@dataclass(frozen=True)
class MessageForm:
    """The positions of a message's tensors among the arguments of the block that it is for."""

    tensors: tuple[TensorForm, ...]
    positions: tuple[
        tuple[int, ...], ...
    ]  # where each stands among the flattened arguments and `labels`, perhaps twice
    arguments: int  # how many flattened arguments there are
    results: tuple[Any, ...]  # what each block before returns, with a TensorForm for each tensor
    labels: tuple[Label, ...] = ()  # of tensors that are carried round the blocks

    @property
    def differentiable(self) -> tuple[TensorForm, ...]:
        return tuple(form for form in self.tensors if form.differentiable)

    def carried(self, tensors: Sequence[torch.Tensor]) -> dict[Label, torch.Tensor]:
        """What of a message of this form is carried round the blocks, by label."""
        pairs = (
            (tensor, position)
            for tensor, positions in zip(tensors, self.positions, strict=True)
            for position in positions
        )
        return {self.labels[at - self.arguments]: tensor for tensor, at in pairs if at >= self.arguments}


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether it has a shape only, and one number in memory."""
    return tensor.numel() > 1 and not any(tensor.stride())


def form_of_result(result: Any) -> Any:
    """What a block returned, without the numbers. Objects that only the model understands are left out."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorForm.of(value.detach())
        return value if isinstance(value, _PLAIN) else None

    return tree_map(leaf, result)


def meta_result(form: Any, device: torch.device, writable: bool = False) -> Any:
    """Something of that form to pass along where nobody looks at the numbers."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, TensorForm):
            return leaf
        return leaf.empty(device).zero_() if writable else leaf.placeholder(device)

    return tree_map(made, form)


def kind_of(inputs: Any) -> Key:
    """Microbatches of one kind make messages of one form. Both ends of a message have the inputs and agree."""
    leaves: list[Any] = []
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            leaves.append((tuple(leaf.shape), leaf.dtype))
        else:
            leaves.append(leaf if isinstance(leaf, _PLAIN) else type(leaf).__qualname__)
    return (torch.is_grad_enabled(), *leaves)


def indices_of(leaves: Sequence[Any], travels: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The positions of the leaves that travel; a tensor that occurs several times is sent once."""
    positions: dict[int, list[int]] = {}
    for position, (leaf, goes) in enumerate(zip(leaves, travels, strict=True)):
        if goes:
            positions.setdefault(id(leaf), []).append(position)
    return tuple(map(tuple, positions.values()))
