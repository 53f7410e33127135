"""F.scaled_dot_product_attention over tokens that are spread over ranks.

    with SpreadAttention(comm, "ring", tokens) as spread:
        y = block(x)            # its attention reaches the tokens of all ranks
    spread.calls                # how often it was asked for

The exchange is by name in torch.nn.functional, so nn.MultiheadAttention and everything else that looks the function up
there takes part; the fused paths of torch's transformer layers, which do not, are switched off meanwhile. Attention
dropout draws the weights' mask by global positions, from the RandomState that is active.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh import dropout
from unisono.mesh.random import Draw, RandomState
from unisono.mesh.region import Part
from unisono.parallel.partial_attention import merging_dtype
from unisono.parallel.ring_attention import Noise, ring_attention
from unisono.parallel.tokens import Tokens
from unisono.parallel.ulysses import heads_of, ulysses_attention
from unisono.plan.plan import CONTEXT

_entered: list[SpreadAttention] = []


def active() -> SpreadAttention | None:
    """The one that attention goes through at the moment."""
    return _entered[-1] if _entered else None


class SpreadAttention:
    """While it is entered, once or again within itself, attention is over the tokens of all ranks of `comm`."""

    def __init__(self, comm: Communicator, kind: str, tokens: Tokens) -> None:
        if kind not in CONTEXT:
            raise UsageError(f"context parallelism of kind {kind!r}; expected one of {', '.join(CONTEXT)}")
        self.comm, self.kind, self.tokens = comm, kind, tokens
        self.calls = 0
        self._before: list[tuple[Callable[..., torch.Tensor], bool]] = []

    def __enter__(self) -> SpreadAttention:
        self._before.append((F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()))
        F.scaled_dot_product_attention = self._attend
        _entered.append(self)
        torch.backends.mha.set_fastpath_enabled(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.pop()
        F.scaled_dot_product_attention, fast = self._before.pop()
        torch.backends.mha.set_fastpath_enabled(fast)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        self.calls += 1
        _require_torchs_own_rules(query, key, attn_mask, is_causal, enable_gqa)
        q, k, v = (_cast_as_torch_would(x) for x in (query, key, value))
        if q.dim() == 3:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        mask = None if attn_mask is None else self._of_global_positions(attn_mask)
        run = self._ring if self.kind == "ring" else self._ulysses
        out = run(q, k, v, mask, dropout_p, is_causal, scale)
        return out if query.dim() == 4 else out.squeeze(0)

    def _of_global_positions(self, mask: torch.Tensor) -> torch.Tensor:
        """The mask for the whole sequence. One that hides some of this rank's own keys is gathered from all ranks."""
        length, mine = self.tokens.length, self.tokens.count(self.comm.rank)
        queries, keys = mask.shape[-2] if mask.dim() > 1 else 1, mask.shape[-1]
        if keys in (1, length) and queries in (1, length):
            return mask
        if keys == mine and queries == 1:
            pieces = self.comm.all_gather(mask.contiguous(), uneven=True)
            return self.tokens.join(pieces, -1)
        raise UsageError(
            f"attention with a mask of shape {tuple(mask.shape)} while this rank holds {mine} of {length} tokens; "
            f"expected a mask of the whole sequence, (..., {length}, {length}): make it before the blocks, "
            "or use is_causal"
        )

    def _ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        noise = self._noise(q, dropout_p) if dropout_p > 0 else None
        return ring_attention(q, k, v, self.comm, causal, scale, self.tokens, mask, noise)

    def _noise(self, q: torch.Tensor, p: float) -> Noise:
        """The dropout's factors for any of this rank's queries and any keys, all of one draw."""
        state, tokens, rank = _random_state(p), self.tokens, self.comm.rank
        with state.sharded(2, tokens.held(rank), of=tokens.length, only="attention"):
            draw = state.draw((*q.shape[:3], tokens.length), "attention")

        def noise(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            parts = {**draw.parts, 2: Part(queries, tokens.length), 3: Part(keys, tokens.length)}
            shape = (*q.shape[:2], len(queries), len(keys))
            if p == 1:
                return q.new_zeros(shape, dtype=merging_dtype(q.dtype))
            kept = Draw(draw.identity, shape, parts).keep(p, q.device)
            return kept.to(merging_dtype(q.dtype)).mul_(1 / (1 - p))

        return noise

    def _ulysses(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        plain = self._before[0][0]
        scope: Any = contextlib.nullcontext()
        if dropout_p > 0:
            mine = heads_of(q.shape[1], self.comm)
            scope = _random_state(dropout_p).sharded(1, mine, of=q.shape[1], only="attention")
        with scope:
            return ulysses_attention(q, k, v, self.comm, causal, scale, self.tokens, mask, dropout_p, plain)


def _random_state(p: float) -> RandomState:
    state = dropout.active()
    if state is None:
        raise UsageError(
            f"attention dropout of {p} over spread tokens draws its mask by global positions; "
            "run the model within a RandomState (with state: ...)"
        )
    return state


def _require_torchs_own_rules(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, enable_gqa: bool
) -> None:
    if query.dim() not in (3, 4):
        raise UsageError(
            f"attention of {tuple(query.shape)} over spread tokens; expected (batch, heads, tokens, width)"
        )
    if mask is not None and is_causal:
        raise UsageError("scaled_dot_product_attention was given attn_mask and is_causal; pass one of them")
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise UsageError(
            f"attention of {query.shape[-3]} heads of queries to {key.shape[-3]} of keys; pass enable_gqa=True"
        )


def _cast_as_torch_would(x: torch.Tensor) -> torch.Tensor:
    """Autocast's dtype, where it is on."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
