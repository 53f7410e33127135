"""VQNet's tensors; `tensor.tensor` is where VQNet keeps the same functions."""

from __future__ import annotations

from unisono.compat.vqnet.tensor import tensor as tensor
from unisono.compat.vqnet.tensor.qtensor import QTensor as QTensor
from unisono.compat.vqnet.tensor.qtensor import plain as plain
from unisono.compat.vqnet.tensor.qtensor import wrapped as wrapped
from unisono.compat.vqnet.tensor.tensor import arange as arange
from unisono.compat.vqnet.tensor.tensor import argmax as argmax
from unisono.compat.vqnet.tensor.tensor import broadcast_to as broadcast_to
from unisono.compat.vqnet.tensor.tensor import concatenate as concatenate
from unisono.compat.vqnet.tensor.tensor import flatten as flatten
from unisono.compat.vqnet.tensor.tensor import full as full
from unisono.compat.vqnet.tensor.tensor import mean as mean
from unisono.compat.vqnet.tensor.tensor import no_grad as no_grad
from unisono.compat.vqnet.tensor.tensor import ones as ones
from unisono.compat.vqnet.tensor.tensor import ones_like as ones_like
from unisono.compat.vqnet.tensor.tensor import reshape as reshape
from unisono.compat.vqnet.tensor.tensor import stack as stack
from unisono.compat.vqnet.tensor.tensor import sums as sums
from unisono.compat.vqnet.tensor.tensor import to_tensor as to_tensor
from unisono.compat.vqnet.tensor.tensor import zeros as zeros
from unisono.compat.vqnet.tensor.tensor import zeros_like as zeros_like
