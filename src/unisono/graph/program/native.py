"""The quickest way to call an op from Python.

A traced op is an overload such as aten.linear.default. Called as such it takes several microseconds more than torch's
own bindings of the same op, which a plain model uses; on small tensors that is as much as the op itself. The ops below
have a binding that takes the overload's arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.torch_compat import NN_FUNCTIONS

_IN_TORCH = (
    "relu layer_norm embedding add.Tensor sub.Tensor mul.Tensor div.Tensor matmul mm bmm addmm transpose.int permute t "
    "reshape flatten.using_ints unsqueeze squeeze.dim select.int unbind.int cat stack "
    "mean.dim mean sum.dim_IntList sum pow.Tensor_Scalar rsqrt sqrt neg cos sin exp log tanh sigmoid softmax.int "
    "log_softmax.int conv2d.default conv1d.default batch_norm clamp where.self eq.Tensor eq.Scalar ne.Scalar lt.Scalar "
    "gt.Scalar le.Tensor ge.Scalar logical_not bitwise_and.Tensor masked_fill.Scalar tril triu clone rms_norm "
    "group_norm argmax topk cumsum rsub.Scalar abs square erf index_select gather"
)
_IN_NN = (
    "linear gelu silu scaled_dot_product_attention"  # not losses: their bindings have another default for reduction
)
_OF_TENSORS = "view.default expand contiguous"


def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {}
    for names, home in ((_IN_TORCH, torch), (_IN_NN, NN_FUNCTIONS), (_OF_TENSORS, torch.Tensor)):
        for name in names.split():
            op, _, overload = name.partition(".")
            target = getattr(getattr(torch.ops.aten, op), overload or "default")
            table[target] = getattr(home, op)
    return table


_NATIVE = _table()


def native(target: Any) -> Callable[..., Any]:
    """What to call for an op of the graph."""
    return _NATIVE.get(target, target)
