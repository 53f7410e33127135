"""A linear layer whose weight gradient can wait, so that it is computed while its input's gradient travels.

The backward of a layer sharded by columns makes two things: the input's gradient, which the ranks must sum, and the
weight's, which nobody waits for. Autograd would make both and then begin to communicate. Here they are nodes of their
own:

    x -- wait -- start -- linear -- y                backward:   linear   dx = dy W
                            |                                    start    begins to sum dx
    weight, bias -- late ---'                                    late     dW = dy' x
                                                                 wait     for the sum

Autograd runs, of the nodes that are ready, the one with the highest sequence number; so `late` takes one between those
of `start` and `wait` (see autograd_collectives). Where it cannot, the order is another and the result the same. Layers
of several blocks that share an input (an encoder's output) share its sum too, which begins when autograd is done with
all of them: only those of the first block wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from unisono.mesh.autograd_collectives import before_start, unlinked
from unisono.torch_compat import will_run


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear on what a tensor-parallel region is entered with."""
    if not (torch.is_grad_enabled() and weight.requires_grad and x.requires_grad):
        return F.linear(x, weight, bias)
    index = before_start(x)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    kept: _Kept = []
    token = _Late.apply(weight, bias, kept)
    if index is not None:
        token.grad_fn._set_sequence_nr(index)
    return _Linear.apply(x, token, weight.detach(), None if bias is None else bias.detach(), kept, (weight,))


_Kept = list[tuple[torch.Tensor, torch.Tensor]]  # from a backward of _Linear to that of _Late: dy and x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kept: _Kept,
        source: tuple[torch.Tensor],
    ) -> torch.Tensor:
        ctx.kept, ctx.source = kept, source
        ctx.save_for_backward(x, weight)
        return unlinked(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the input's gradient depends on the weight itself
            weight = ctx.source[0]
        (towards_x, _), (towards_token, _), *_ = ctx.next_functions
        dx = grad @ weight.conj() if _is_wanted(towards_x) else None
        if _is_wanted(towards_token):
            ctx.kept.append((grad, x))
        return dx, grad.new_zeros(()), None, None, None, None


class _Late(torch.autograd.Function):
    """Gives a token instead of weight and bias: `_Linear` signals along it that their gradients can be made."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bias: torch.Tensor | None, kept: _Kept) -> torch.Tensor:
        ctx.kept = kept
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        grad, x = ctx.kept.pop()
        grad, x = _samples(grad), _samples(x)
        dw = grad.t() @ x.conj()
        return dw, grad.sum(0) if ctx.needs_input_grad[1] else None, None


def _samples(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _is_wanted(node: Any) -> bool:
    """Whether this backward goes on to a node: the halves of a pipeline's backward go one way each."""
    return node is not None and will_run(node)
