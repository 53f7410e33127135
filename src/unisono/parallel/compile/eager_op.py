"""`unisono::eager`: an op that runs a Python function eagerly within a compiled graph, forward and backward.

Functions that unisono handles (dropout, attention, random numbers) depend on what is only known when they run: the
step, this rank's part of the batch, other ranks. In a compiled graph each call of one is such an op. Its forward runs
the function on detached inputs under autograd, and keeps that graph until the backward, which runs it:

    outputs, kept = eager(inputs)            kept: a tensor, saved for the backward, that stands for autograd's graph
    gradients = eager_backward(kept, gradients of outputs)

Note: lifetime. `kept` is a CPU tensor in the memory of a Python object that holds autograd's graph. When the tensor is
freed, after its backward or because there will be none, so are the object and the graph.

Note: caches. A call is identified by a text that contains all that distinguishes it, so that graphs of other processes
in inductor's cache are found only where they mean the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from unisono.errors import UsageError
from unisono.mesh.collective_ops import Numbered
from unisono.torch_compat import no_tracing, with_autograd

Run = Callable[[Callable[[], Any]], Any]


class _Kind(NamedTuple):
    ndim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class EagerCall:
    """A call in a graph: function(*args, **kwargs), of which tensors are inputs of the op."""

    function: Callable[..., Any]
    shape_of: Callable[..., Any]  # the same call of torch's own function, for the shapes of its outputs
    run: Run  # runs it with the step's random numbers
    constants: tuple[Any, ...]  # all leaves of the arguments, None instead of tensors
    tensors: tuple[int, ...]  # which leaves are tensors
    spec: TreeSpec
    autocast: tuple[str, torch.dtype] | None  # device type and dtype
    kinds: tuple[_Kind, ...]  # of the tensors

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        leaves = list(self.constants)
        for index, tensor in zip(self.tensors, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.autocast[0], dtype=self.autocast[1])


_calls: dict[str, EagerCall] = {}
_kept: Numbered[_Kept] = Numbered()


class _Kept(bytearray):
    """The memory of a tensor that stands for autograd's graph of a call."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]


def call_eagerly(
    identity: str,
    function: Callable[..., Any],
    shape_of: Callable[..., Any],
    run: Run,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """function(*args, **kwargs), which returns one tensor, as an op, while a graph is traced; and the tensor that the
    op keeps. after: the tensor that was kept by the op that is to run before."""
    leaves, spec = tree_flatten((args, kwargs))
    indices = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    tensors = [leaves[index] for index in indices]
    constants = tuple(None if index in indices else leaf for index, leaf in enumerate(leaves))
    device = tensors[0].device.type if tensors else "cpu"
    autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    kinds = tuple(_Kind(tensor.dim(), tensor.dtype, tensor.device) for tensor in tensors)
    # In one line: inductor writes it into comments of the code that it generates.
    key = " ".join(f"{identity} {constants} {indices} {autocast} {kinds} {spec}".split())
    _calls[key] = EagerCall(function, shape_of, run, constants, indices, spec, autocast, kinds)
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    output, kept = torch.ops.unisono.eager(tensors, key, needs, after)
    return output, kept


@torch.library.custom_op("unisono::eager", mutates_args=())
def _eager(tensors: list[torch.Tensor], call: str, needs: list[bool], after: torch.Tensor | None) -> list[torch.Tensor]:
    found = _calls[call]
    inputs = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)]
    args, kwargs = found.arguments(inputs)
    with with_autograd() if any(needs) else torch.no_grad(), found.scope():
        output: torch.Tensor = found.run(lambda: found.function(*args, **kwargs))
    kept = _Kept(8)
    (result,) = _unshared([output.detach()], tensors)
    if output.requires_grad:
        kept[:] = _kept.add(kept).to_bytes(8, "little")
        kept.outputs, kept.inputs = [output], inputs
    return [result, torch.frombuffer(kept, dtype=torch.int64)]


@_eager.register_fake
def _(tensors: list[torch.Tensor], call: str, needs: list[bool], after: torch.Tensor | None) -> list[torch.Tensor]:
    found = _calls[call]
    args, kwargs = found.arguments(tensors)
    with found.scope(), no_tracing():
        like = found.shape_of(*args, **kwargs)
    return [torch.empty_like(like, memory_format=torch.contiguous_format), torch.empty(1, dtype=torch.int64)]


@torch.library.custom_op("unisono::eager_backward", mutates_args=())
def _eager_backward(
    kept: torch.Tensor, grads: list[torch.Tensor], call: str, needs: list[bool], sizes: list[int]
) -> list[torch.Tensor]:
    graph = _kept.get(int(kept))
    if graph is None:
        raise UsageError(
            "saved_tensors_hooks (or save_on_cpu) around a compiled region have copied what it saves for the backward; "
            "leave compile out of the plan, or the hooks out of the forward"
        )
    wanted = [tensor for tensor, need in zip(graph.inputs, needs, strict=True) if need]
    with with_autograd():
        found = torch.autograd.grad(graph.outputs, wanted, grads, retain_graph=True, allow_unused=True)
    gradients = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(found, wanted, strict=True)]
    return _unshared(gradients, grads)


@_eager_backward.register_fake
def _(
    kept: torch.Tensor, grads: list[torch.Tensor], call: str, needs: list[bool], sizes: list[int]
) -> list[torch.Tensor]:
    left, made = list(sizes), []
    for kind, need in zip(_calls[call].kinds, needs, strict=True):
        if need:
            shape, left = left[: kind.ndim], left[kind.ndim :]
            made.append(torch.empty(shape, dtype=kind.dtype, device=kind.device))
    return made


def _unshared(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous tensors that share no memory with inputs or each other, as an op must return them."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    made = []
    for result in results:
        result = result.contiguous()
        if result.untyped_storage().data_ptr() in seen:
            result = result.clone()
        seen.add(result.untyped_storage().data_ptr())
        made.append(result)
    return made


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.call, ctx.needs, _ = inputs
    ctx.save_for_backward(output[-1])
    ctx.sizes = [size for tensor, need in zip(tensors, ctx.needs, strict=True) if need for size in tensor.shape]


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    (kept,) = ctx.saved_tensors
    found = iter(torch.ops.unisono.eager_backward(kept, grads[:1], ctx.call, ctx.needs, ctx.sizes))
    return [next(found) if need else None for need in ctx.needs], None, None, None


_eager.register_autograd(_backward, setup_context=_setup_context)
