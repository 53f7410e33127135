"""F.scaled_dot_product_attention over tokens that are sharded over ranks.

    with ShardedAttention(comm, "ring", tokens) as attention:
        y = block(x)            # its attention reaches the tokens of all ranks
    attention.calls             # how often it was asked for

It is a handler of the attention dispatcher (torch_patches.py), so nn.MultiheadAttention and everything else that looks
the function up in torch.nn.functional takes part; the fused paths of torch's transformer layers, which do not, are off.
Keys that are not as many as this rank's tokens are those of a second sequence, which every rank has all of: no rank
needs another's. Where ranks hold different numbers of tokens, or one, shapes seen on one rank do not distinguish a
sharded dim from a broadcast or replicated one, so ranks decide by the shapes of all (`_AttentionCall`). Attention
dropout draws the weights' mask by global positions, from the RandomState that is active.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.autograd_collectives import gather_to_use
from unisono.mesh.global_index import Part
from unisono.mesh.random.active import active_state
from unisono.mesh.random.draw import Draw
from unisono.mesh.random.state import RandomState
from unisono.parallel.context.partial_attention import merging_dtype
from unisono.parallel.context.ring_attention import Noise, ring_attention
from unisono.parallel.context.tokens import Tokens
from unisono.parallel.context.ulysses import heads_of, ulysses_attention
from unisono.plan.plan import CONTEXT
from unisono.torch_patches import attention, without_fused_attention

Attention = Callable[..., torch.Tensor]  # F.scaled_dot_product_attention, or what is to run instead
_CHECKS = 100  # calls in which ranks compare the keys of a second sequence

_entered: list[ShardedAttention] = []


def active() -> ShardedAttention | None:
    """The active one."""
    return _entered[-1] if _entered else None


@dataclass(frozen=True)
class _AttentionCall:
    """What one rank was asked: counts of keys, rows and columns of the mask (-1 where there is none), is_causal."""

    keys: int
    rows: int
    columns: int
    causal: int

    @classmethod
    def of(cls, k: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> _AttentionCall:
        if mask is None:
            return cls(k.shape[2], -1, -1, int(causal))
        return cls(k.shape[2], mask.shape[-2] if mask.dim() > 1 else 1, mask.shape[-1], int(causal))


class ShardedAttention:
    """While it is entered, once or again within itself, attention is over the tokens of all ranks of `comm`."""

    def __init__(self, comm: Communicator, kind: str, tokens: Tokens) -> None:
        if kind not in CONTEXT:
            raise UsageError(f"context parallelism of kind {kind!r}; expected one of {', '.join(CONTEXT)}")
        self.comm, self.kind, self.tokens = comm, kind, tokens
        self.calls = 0
        self._checks_left = _CHECKS
        self._scopes: list[contextlib.ExitStack] = []

    def __enter__(self) -> ShardedAttention:
        scope = contextlib.ExitStack()
        scope.enter_context(attention.handled("context parallelism", self._attend))
        scope.enter_context(without_fused_attention())
        self._scopes.append(scope)
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.pop()
        self._scopes.pop().close()

    def _attend(
        self,
        attend: Attention,
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
        calls = self._calls_of_all_ranks(_AttentionCall.of(k, attn_mask, is_causal), k.is_meta)
        if all(call.keys == count for call, count in zip(calls, self.tokens.counts, strict=True)):
            out = self._own_tokens(attend, q, k, v, attn_mask, dropout_p, is_causal, scale, calls)
        else:
            self._require_same_keys(k, v)
            out = self._second_sequence(attend, q, k, v, attn_mask, dropout_p, is_causal, scale)
        return out if query.dim() == 4 else out.squeeze(0)

    def _calls_of_all_ranks(self, mine: _AttentionCall, is_meta: bool) -> list[_AttentionCall]:
        """By rank. Ranks with equally many tokens, two at least, are asked the same."""
        counts = self.tokens.counts
        if len(set(counts)) == 1 and (counts[0] > 1 or self.tokens.length == 1):
            return [mine] * len(counts)
        if self.comm.is_simulated or is_meta:
            held = self.tokens.count(self.comm.rank)

            def of(size: int, count: int) -> int:  # what another rank would see, if equal sizes are sharded alike
                return count if size == held else size

            return [
                _AttentionCall(of(mine.keys, count), mine.rows, of(mine.columns, count), mine.causal)
                for count in counts
            ]
        numbers = torch.tensor(astuple(mine), device=self.comm.device)
        return [_AttentionCall(*each.tolist()) for each in self.comm.all_gather(numbers)]

    def _require_same_keys(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """UsageError where keys other than this rank's tokens differ between ranks, which shows that they are made of
        its tokens. Compared in the first calls."""
        if not self._checks_left or self.comm.is_simulated or k.is_meta:
            return
        self._checks_left -= 1
        doubles = [x.detach().double() for x in (k, v)]
        sums = [float(each) for x in doubles for each in (x.sum(), x.abs().sum())]
        mine = torch.tensor([k.shape[2], *sums], dtype=torch.float64, device=self.comm.device)
        all_ranks = torch.stack(list(self.comm.all_gather(mine)))
        scale = all_ranks[:, [0, 2, 2, 4, 4]].abs().amax(0)
        if ((all_ranks - all_ranks[0]).abs() > 1e-4 * scale).any():
            raise UsageError(
                f"attention to {k.shape[2]} keys that differ between ranks, while this rank holds "
                f"{self.tokens.count(self.comm.rank)} of {self.tokens.length} tokens; expected its own tokens as keys, "
                "or a second sequence that does not depend on them: use a plan with cp=1"
            )

    def _own_tokens(
        self,
        attend: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
        calls: list[_AttentionCall],
    ) -> torch.Tensor:
        masked = [rank for rank, call in enumerate(calls) if call.columns >= 0]
        if masked and len(masked) < len(calls):
            raise UsageError(
                f"attention with a mask on ranks {masked} and without one on the others, which hold "
                f"{list(self.tokens.counts)} of {self.tokens.length} tokens under cp={self.comm.size}; expected a mask "
                "on all: use longer sequences, or a plan with a smaller cp"
            )
        mask = None if attn_mask is None else self._of_global_positions(attn_mask, calls)
        causal = self._is_causal(calls) if mask is None else causal
        if self.kind == "ulysses":
            return self._ulysses(attend, q, k, v, mask, dropout_p, causal, scale)
        if mask is None or not mask.requires_grad:
            return self._ring(q, k, v, mask, dropout_p, causal, scale)
        # The ring's backward makes no gradient of a mask; torch's attention to the keys of all ranks does.
        keys, values = (self.tokens.ordered(gather_to_use(x, 2, self.tokens.counts, self.comm), 2) for x in (k, v))
        return self._second_sequence(attend, q, keys, values, mask, dropout_p, causal, scale)

    def _is_causal(self, calls: list[_AttentionCall]) -> bool:
        """What is_causal is where there are several tokens: models leave it out where they see one query, as a rank
        with a single token of the sequence does."""
        tokens = self.tokens
        flags = [bool(call.causal) for call in calls]
        of_several = [flag for flag, count in zip(flags, tokens.counts, strict=True) if count > 1]
        if of_several or all(flags) or tokens.length == 1 or self.comm.is_simulated:
            return all(flags) or any(of_several)
        raise UsageError(
            f"attention without a mask and without is_causal to a sequence of {tokens.length} tokens under "
            f"cp={self.comm.size}: models leave is_causal out for one query, and no rank has more; use longer "
            "sequences, or a plan with a smaller cp"
        )

    def _second_sequence(
        self,
        attend: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Attention of this rank's queries to keys that every rank has all of."""
        tokens, rank = self.tokens, self.comm.rank
        mine = tokens.count(rank)
        if q.shape[2] != mine or causal:
            what = "is_causal" if q.shape[2] == mine else f"{q.shape[2]} queries"
            raise UsageError(
                f"attention with {what} to {k.shape[2]} keys while this rank holds {mine} of {tokens.length} tokens; "
                f"expected its {mine} as queries, and a mask instead of is_causal, or use a plan with cp=1"
            )
        rows = mask.shape[-2] if mask is not None and mask.dim() > 1 else 1
        if mask is not None and rows == tokens.length != mine:
            mask = tokens.shard(mask, rank, mask.dim() - 2)
        elif rows not in (1, mine):
            raise UsageError(
                f"attention to {k.shape[2]} keys with a mask of {rows} rows while this rank holds {mine} of "
                f"{tokens.length} tokens; expected a row for each of either, or use a plan with cp=1"
            )
        scope: Any = contextlib.nullcontext()
        if dropout_p > 0:
            held = tokens.held(rank)
            scope = _random_state(dropout_p).sharded(2, held, of=tokens.length, only="attention")
        with scope:
            gqa = k.shape[1] != q.shape[1]
            return attend(q, k, v, mask, dropout_p, scale=scale, enable_gqa=gqa)

    def _of_global_positions(self, mask: torch.Tensor, calls: list[_AttentionCall]) -> torch.Tensor:
        """The mask for the full sequence. One that hides some of this rank's own keys is gathered from all ranks."""
        tokens, length = self.tokens, self.tokens.length
        if all(c.columns == count and c.rows == 1 for c, count in zip(calls, tokens.counts, strict=True)):
            if mask.requires_grad:
                dim = mask.dim() - 1
                return tokens.ordered(gather_to_use(mask, dim, tokens.counts, self.comm), dim)
            return tokens.join(self.comm.all_gather(mask.contiguous(), uneven=True), -1)
        if all(c.columns in (1, length) and c.rows in (1, length) for c in calls):
            return mask
        mine = tokens.count(self.comm.rank)
        raise UsageError(
            f"attention with a mask of shape {tuple(mask.shape)} while this rank holds {mine} of {length} tokens; "
            f"expected a mask of the full sequence, (..., {length}, {length}): make it before the blocks, "
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
            kept = Draw(draw.identity, shape, parts, draw.keys).keep(p, q.device)
            return kept.to(merging_dtype(q.dtype)).mul_(1 / (1 - p))

        return noise

    def _ulysses(
        self,
        attend: Attention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        scope: Any = contextlib.nullcontext()
        if dropout_p > 0:
            mine = heads_of(q.shape[1], self.comm)
            scope = _random_state(dropout_p).sharded(1, mine, of=q.shape[1], only="attention")
        with scope:
            return ulysses_attention(q, k, v, self.comm, causal, scale, self.tokens, mask, dropout_p, attend)


def _random_state(p: float) -> RandomState:
    state = active_state()
    if state is None:
        raise UsageError(
            f"attention dropout of {p} over sharded tokens draws its mask by global positions; "
            "run the model within a RandomState (with state: ...)"
        )
    return state


def _require_torchs_own_rules(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, enable_gqa: bool
) -> None:
    if query.dim() not in (3, 4):
        raise UsageError(
            f"attention of {tuple(query.shape)} over sharded tokens; expected (batch, heads, tokens, width)"
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
