"""The tokens of a sequence that is sharded over ranks: which positions each rank holds.

    Tokens.consecutive(8, 2)     rank 0: 0 1 2 3      rank 1: 4 5 6 7
    Tokens.zigzag(8, 2)          rank 0: 0 1 6 7      rank 1: 2 3 4 5

Under a causal mask a token looks at all tokens before it, so consecutive shards would leave the first rank idle while
the last one works. The zigzag splits the sequence into twice as many chunks as there are ranks and gives rank r the
chunks r and 2P-1-r: an early and a late one, together as much work on every rank.

Any length goes: chunks differ by one token at most, and may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from unisono.errors import UsageError


@dataclass(frozen=True)
class Tokens:
    """`runs[r]` are the positions of rank r: runs of consecutive ones, in rising order."""

    length: int
    runs: tuple[tuple[range, ...], ...]

    @classmethod
    def consecutive(cls, length: int, ranks: int) -> Tokens:
        return cls(length, tuple((chunk,) for chunk in _chunks(length, ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> Tokens:
        chunks = _chunks(length, 2 * ranks)
        return cls(length, tuple((chunks[rank], chunks[-1 - rank]) for rank in range(ranks)))

    @property
    def ranks(self) -> int:
        return len(self.runs)

    def count(self, rank: int) -> int:
        """How many tokens a rank holds."""
        return sum(len(run) for run in self.runs[rank])

    @property
    def counts(self) -> list[int]:
        return [self.count(rank) for rank in range(self.ranks)]

    def positions(self, rank: int) -> torch.Tensor:
        """The positions of a rank's tokens in the sequence."""
        return self._positions[rank]

    def held(self, rank: int) -> range | torch.Tensor:
        """The same, as a range where they are one."""
        return self.runs[rank][0] if len(self.runs[rank]) == 1 else self._positions[rank]

    @cached_property
    def _positions(self) -> list[torch.Tensor]:
        return [torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in self.runs]

    @cached_property
    def in_order(self) -> bool:
        """Whether the ranks' tokens, one rank after the other, are the sequence."""
        return bool((torch.cat(self._positions) == torch.arange(self.length)).all())

    def shard(self, full: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """A rank's tokens of a tensor whose `dim` is the sequence; differentiable."""
        shards = [full.narrow(dim, run.start, len(run)) for run in self.runs[rank]]
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim)

    def join(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The full tensor of all ranks' shards; differentiable."""
        return self.ordered(torch.cat(list(shards), dim), dim)

    def ordered(self, joined: torch.Tensor, dim: int) -> torch.Tensor:
        """The full tensor of one that has the ranks' tokens one rank after the other; differentiable."""
        if self.in_order:
            return joined
        return joined.index_select(dim, torch.cat(self._positions).argsort().to(joined.device, non_blocking=True))

    def seen(self, rank: int, by: int, causal: bool) -> list[tuple[slice, slice]]:
        """Which tokens of `rank` those of another rank `by` may look at: pairs of (slice of by's, slice of rank's).

        All tokens of the first slice see all of the second, so no mask is needed within a pair. The zigzag gives one
        pair for any two ranks, half of each other's work.
        """
        if not causal:
            return [(slice(0, self.count(by)), slice(0, self.count(rank)))]
        found: list[tuple[slice, slice]] = []
        start = 0
        for run in self.runs[by]:
            visible = sum(len(other) for other in self.runs[rank] if other.start < run.start)
            rows = slice(start, start + len(run))
            start += len(run)
            if not len(run) or not visible:
                continue
            if found and found[-1][1].stop == visible:
                found[-1] = (slice(found[-1][0].start, rows.stop), found[-1][1])
            else:
                found.append((rows, slice(0, visible)))
        return found


def require_fit(
    kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: Tokens, rank: int, ranks: int
) -> None:
    """Whether these can be a rank's queries, keys and values in an attention over sharded tokens."""
    if q.dim() != 4 or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1] or q.shape[0] != k.shape[0]:
        raise UsageError(
            f"{kind} attention of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected "
            "(batch, heads, tokens, width), alike but for the heads of k and v and the width of v"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise UsageError(
            f"{kind} attention: {q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys; "
            "expected a divisor of the former"
        )
    if tokens.ranks != ranks:
        raise UsageError(f"{kind} attention: tokens are sharded over {tokens.ranks} ranks, but {ranks} take part")
    if not q.shape[2] == k.shape[2] == tokens.count(rank):
        raise UsageError(
            f"{kind} attention: rank {rank} has {q.shape[2]} queries and {k.shape[2]} keys, but of a sequence of "
            f"{tokens.length} sharded into {tokens.counts} it holds {tokens.count(rank)}; expected its own tokens in "
            "both"
        )


def _chunks(length: int, count: int) -> list[range]:
    """Consecutive shards as torch.tensor_split gives them."""
    small, extra = divmod(length, count)
    stops = [(i + 1) * small + min(i + 1, extra) for i in range(count)]
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
