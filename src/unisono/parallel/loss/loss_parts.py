"""Outputs and targets in parts, along samples or tokens, and what autograd knows of a loss of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from unisono.torch_compat import no_torch_function_subclass

_FEW = 16  # tokens
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def blank_like(outputs: Any) -> Any:
    """Zeros of the same shapes, which take no memory."""

    def blank(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = "cpu" if leaf.device.type == "meta" else leaf.device
        zero = torch.zeros((), dtype=leaf.dtype, device=device, requires_grad=leaf.is_floating_point())
        return zero.expand(leaf.shape)

    return tree_map(blank, outputs)


def detached_from(leaf: Any) -> Any:
    """The tensor without its history; it still has requires_grad, which distinguishes counts from values."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def leaves_but(value: torch.Tensor, known: Sequence[Any]) -> list[torch.Tensor]:
    """The leaves of autograd's graph that a value is computed from, but for those that known tensors come from."""
    with no_torch_function_subclass():  # sharded logits are inspected as they are, not gathered
        expected = {id(leaf) for tensor in known if isinstance(tensor, torch.Tensor) for leaf in _leaves_of(tensor)}
        return [leaf for leaf in _leaves_of(value) if id(leaf) not in expected]


def _leaves_of(value: torch.Tensor) -> list[torch.Tensor]:
    found = [value] if value.requires_grad and value.grad_fn is None else []
    seen: set[Any] = {None}
    pending: list[Any] = [value.grad_fn]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        pending.extend(each for each, _ in node.next_functions)
    return found


def has_gradient(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> bool:
    try:
        gradients = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return True  # it passes a parameter that ZeRO 3 has freed
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def is_near(full: torch.Tensor, parts: Sequence[torch.Tensor], extra: torch.Tensor | float) -> bool:
    """Whether the parts' sums are the full sum; extra: what both of them have."""
    scale = parts[0].abs() + parts[1].abs() + full.abs()
    gap = (full - parts[0] - parts[1] + extra).abs()
    return bool(gap <= _TOLERANCE.get(full.dtype, 1e-5) * scale)


def first_tokens(tree: Any) -> Any:
    """Few enough that one of them makes a difference in any precision."""

    def first(leaf: Any) -> Any:
        return leaf[:, :_FEW] if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 else leaf

    return tree_map(first, tree)


def counted_target(leaf: Any) -> Any:
    """Targets that are ignored are negative numbers, and would show nothing."""
    is_class = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dtype != torch.bool
    return leaf.clamp(min=0) if is_class else leaf


def halves_along(
    outputs: Any, targets: Any, dim: int, shift: int = 0
) -> tuple[tuple[Any, Any], tuple[Any, Any]] | None:
    """The batch in two along a dim; None where it has one sample or none."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.ndim > dim]
    batch_size = tensors[0].shape[dim] if tensors else 0
    if batch_size < 2:
        return None
    middle = (batch_size + 1) // 2
    both = (range(middle), range(middle, batch_size))
    first, second = (
        (part_of(outputs, dim, part, batch_size), part_of(targets, dim, part, batch_size)) for part in both
    )
    return shifted(first, targets, both[0], batch_size) if shift else first, second


def part_of(tree: Any, dim: int, part: range, length: int) -> Any:
    """Of all tensors in a tree that are so long along a dim, some."""

    def shard(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim > dim and leaf.shape[dim] == length:
            return leaf.narrow(dim, part.start, len(part)).contiguous()
        return leaf

    return tree_map(shard, tree)


def shifted(pair: tuple[Any, Any], targets: Any, run: range, length: int) -> tuple[Any, Any]:
    """Outputs of a run of tokens and targets, for a loss that compares a token's output with the next one's target.

    Such a loss passes over the last output. So a run that does not end the sequence gets one more target, the next
    one, and one more output, which nobody looks at."""
    if run.stop == length:
        return pair
    return tree_map(lambda leaf: _with_blank_token(leaf, len(run)), pair[0]), part_of(
        targets, 1, range(run.start, run.stop + 1), length
    )


def _with_blank_token(leaf: Any, tokens: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2 or leaf.shape[1] != tokens:
        return leaf
    return torch.cat([leaf, leaf.new_zeros(leaf.shape[0], 1, *leaf.shape[2:])], dim=1)
