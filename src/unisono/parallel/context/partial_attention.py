"""Attention to some of the keys, and how the parts are combined.

Softmax over all keys needs all scores. But a part over the keys K_j gives an output O_j and the logarithm of its
normaliser, L_j = log sum exp(scores), and any number of parts can be merged afterwards, exactly:

    L = log sum_j exp(L_j)            O = sum_j exp(L_j - L) O_j

The backward of a part needs O and L of all parts only: with P = exp(scores - L), the weights as if all keys had been
there, and D = rowsum(dO * O),

    dV = P' dO          dS = P * (dO V' - D)          dQ = dS K          dK = dS' Q

So a part is a pair of functions, `attend` and `attend_backward`. Shapes are (batch, heads, tokens, width); keys and
values may have fewer heads, each of them serving as many queries' heads (GQA). Half-precision parts are merged in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_CHUNK = 2**24  # scores that are alive at a time in the plain form
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_WIDTH = 256


@dataclass(frozen=True)
class AttentionRules:
    """What changes the weights of a part; slices are of its queries."""

    scale: float
    causal: bool = False  # query i sees keys 0 to i; for parts with as many keys as queries
    bias: Callable[[slice], torch.Tensor] | None = None  # added to the scores; broadcasts to (batch, heads, rows, keys)
    noise: Callable[[slice], torch.Tensor] | None = None  # the weights' factors: 0 or 1/(1-p)


class MergedAttention:
    """The merged parts: `out` and `lse`, the logarithm of the normaliser, for every query."""

    def __init__(self, q: torch.Tensor, width: int) -> None:
        self._queries = q
        self._width = width
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def out(self) -> torch.Tensor:
        return self._merged()[0]

    @property
    def lse(self) -> torch.Tensor:
        return self._merged()[1]

    def _merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._taken is None:
            rows, dtype = self._queries.shape[:-1], merging_dtype(self._queries.dtype)
            nothing = torch.full(rows, -torch.inf, dtype=dtype, device=self._queries.device)
            self._taken = self._queries.new_zeros((*rows, self._width), dtype=dtype), nothing
        return self._taken

    def merge(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in a part that holds for these rows; its tensors are not used afterwards."""
        if self._taken is None and covers(rows, self._queries):
            dtype = merging_dtype(self._queries.dtype)
            self._taken = out.to(dtype), lse.to(dtype)
            return
        merged, normaliser = self._merged()
        old = normaliser[:, :, rows]
        new = torch.logaddexp(old, lse)
        # A row that has seen no key yet has -inf, and -inf - -inf is no number.
        kept = torch.where(old == -torch.inf, 0, (old - new).exp())[..., None]
        added = torch.where(lse == -torch.inf, 0, (lse - new).exp())[..., None]
        merged[:, :, rows] = kept * merged[:, :, rows] + added * out
        normaliser[:, :, rows] = new


def covers(part: slice, x: torch.Tensor) -> bool:
    """Whether that is all of the tokens of (batch, heads, tokens, width)."""
    return part.start == 0 and part.stop == x.shape[2]


def merging_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part's output and the logarithm of its normaliser."""
    flash = _flash_of(q, k, v, rules)
    if flash is not None:
        return flash.attend(q, k, v, rules)
    q, k, v = (x.to(merging_dtype(x.dtype)) for x in (q, k, v))
    outs, lses = [], []
    for rows in _chunks(q, k):
        scores = _scores(q[:, :, rows], k, rules, rows)
        lse = scores.logsumexp(-1)
        weights = _weights(scores, lse)
        if rules.noise is not None:
            weights = weights * rules.noise(rows)
        outs.append(_times(weights, v))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rules: AttentionRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part's share of the gradients of q, k and v. `grad`, `out` and `lse` are of these queries' attention to all
    keys."""
    flash = _flash_of(q, k, v, rules)
    if flash is not None:
        return flash.backward(grad, q, k, v, out, lse, rules)
    grad, q, k, v, out = (x.to(merging_dtype(x.dtype)) for x in (grad, q, k, v, out))
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows in _chunks(q, k):
        weights = _weights(_scores(q[:, :, rows], k, rules, rows), lse[:, :, rows])
        noise = 1 if rules.noise is None else rules.noise(rows)
        dout = grad[:, :, rows]
        dv += _transposed_times(weights * noise, dout, v.shape[1])
        d = (dout * out[:, :, rows]).sum(-1, keepdim=True)
        dscores = weights * (_times(dout, v.transpose(-2, -1)) * noise - d)
        dq.append(_times(dscores, k) * rules.scale)
        dk += _transposed_times(dscores, q[:, :, rows], k.shape[1]) * rules.scale
    return torch.cat(dq, 2), dk, dv


# ---- the plain form ----------------------------------------------------------------------------------------------


def _chunks(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    """Slices of the queries, so that not all scores are alive at once."""
    queries = q.shape[2]
    rows = max(1, _CHUNK // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)] or [slice(0, 0)]


def _scores(q: torch.Tensor, k: torch.Tensor, rules: AttentionRules, rows: slice) -> torch.Tensor:
    scores = _times(q, k.transpose(-2, -1)) * rules.scale
    if rules.bias is not None:
        scores = scores + rules.bias(rows)
    if rules.causal:
        indices = torch.arange(rows.start, rows.stop, device=q.device)
        later = torch.arange(k.shape[2], device=q.device) > indices[:, None]
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    lse = torch.where(lse == -torch.inf, 0, lse)  # a query that sees no key: all weights are exp(-inf), none is nan
    return (scores - lse[..., None]).exp()


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, where b has fewer heads and each serves several of a's: their rows are one after the other."""
    return (_folded(a, b.shape[1]) @ b).view(*a.shape[:-1], b.shape[-1])


def _transposed_times(a: torch.Tensor, b: torch.Tensor, heads: int) -> torch.Tensor:
    """a' @ b, summed over the heads that share one of `heads`."""
    return _folded(a, heads).transpose(-2, -1) @ _folded(b, heads)


def _folded(x: torch.Tensor, heads: int) -> torch.Tensor:
    group = x.shape[1] // heads
    return x.reshape(x.shape[0], heads, group * x.shape[2], x.shape[3])


# ---- torch's fused kernels, which give lse too --------------------------------------------------------------------


@dataclass(frozen=True)
class _Flash:
    forward_op: Callable[..., tuple[Any, ...]]
    backward_op: Callable[..., tuple[Any, ...]]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        alike = _Alike(q, k, rules.causal)
        out, lse = self.forward_op(alike.of_queries(q), alike.of_keys(k), alike.of_keys(v), rules)
        return out.reshape(q.shape).to(merging_dtype(q.dtype)), lse.reshape(q.shape[:-1])

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        rules: AttentionRules,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        alike = _Alike(q, k, rules.causal)
        dq, dk, dv = self.backward_op(
            *(alike.of_queries(x) for x in (grad, q)),
            *(alike.of_keys(x) for x in (k, v)),
            alike.of_queries(out),
            alike.of_queries(lse[..., None]).squeeze(-1),
            rules,
        )
        return dq.reshape(q.shape), alike.summed(dk), alike.summed(dv)


class _Alike:
    """Brings q, k and v to the same count of heads.

    Without a causal mask the queries of all heads that share a key's head are simply more queries. With one, the keys
    are repeated.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
        self._heads = k.shape[1]
        self._group = q.shape[1] // k.shape[1]
        self._repeats = causal and self._group > 1

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self._repeats else _folded(x, self._heads)).contiguous()

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self._group, 1) if self._repeats else x.contiguous()

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.unflatten(1, (self._heads, self._group)).sum(2) if self._repeats else grad


def _flash_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules) -> _Flash | None:
    """The fused kernel for this part, where there is one."""
    width = q.shape[-1]
    if rules.bias is not None or rules.noise is not None or v.shape[-1] != width:
        return None
    if not (q.numel() and k.numel()) or k.shape[2] == 0:
        return None
    if q.device.type == "cpu":
        return _CPU
    if q.is_cuda and q.dtype in _HALF and width % 8 == 0 and width <= _MAX_FLASH_WIDTH:
        return _CUDA
    return None


def _cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules) -> tuple[Any, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, rules.causal, scale=rules.scale)


def _cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rules: AttentionRules,
) -> tuple[Any, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, rules.causal, scale=rules.scale
    )


def _cuda_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: AttentionRules) -> tuple[Any, ...]:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, rules.causal, False, scale=rules.scale)[:2]


def _cuda_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rules: AttentionRules,
) -> tuple[Any, ...]:
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        rules.causal,
        no_seed,
        no_seed[0],
        scale=rules.scale,
    )


_CPU = _Flash(_cpu_forward, _cpu_backward)
_CUDA = _Flash(_cuda_forward, _cuda_backward)
