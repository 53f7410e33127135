"""Ulysses attention: for the time of an attention, ranks hold heads instead of tokens.

    (all heads, my tokens) --all-to-all--> (my heads, all tokens) --attention--> --all-to-all--> (all heads, my tokens)

Heads do not look at each other, so between the two exchanges attention is the plain one. q, k, v and the output each
cross once: 4*N*h/P elements a rank, less when k and v have fewer heads. Heads that the ranks do not divide are dealt
out unevenly; a rank that needs a key's head for some of its queries' heads gets it, also when its neighbour does too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.context.tokens import Tokens, require_fit
from unisono.parallel.expert.all_to_all import all_to_all

Attention = Callable[..., torch.Tensor]


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    comm: Communicator,
    causal: bool = False,
    scale: float | None = None,
    tokens: Tokens | None = None,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    attention: Attention | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks: (batch, heads, tokens, width), with gradients.

    `tokens` gives which positions each rank holds; by default consecutive ones, as many on every rank. `mask` is of
    global positions. `attention` is what runs on full sequences: F.scaled_dot_product_attention or one like it.
    """
    tokens = tokens or Tokens.consecutive(q.shape[2] * comm.size, comm.size)
    require_fit("ulysses", q, k, v, tokens, comm.rank, comm.size)
    if mask is not None and causal:
        raise UsageError("ulysses attention was given a mask and causal; put both into the mask")
    head_split = HeadSplit(q.shape[1], k.shape[1], comm.size)
    mine = head_split.queries[comm.rank]
    full_q, full_k, full_v = _heads_for_tokens(
        [q, k, v], [head_split.queries, head_split.keys, head_split.keys], comm, tokens
    )
    full_k, full_v = (head_split.matched(x, comm.rank) for x in (full_k, full_v))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask[..., mine.start : mine.stop, :, :]
    run = attention or F.scaled_dot_product_attention
    gqa = full_k.shape[1] != full_q.shape[1]
    if len(mine) or dropout_p:  # without heads too the draw is counted, so that later ones stay the same
        out = run(full_q, full_k, full_v, mask, dropout_p, causal, scale=scale, enable_gqa=gqa)
    else:
        out = full_v  # no heads of it either, but this rank takes part in the backward as the others do
    return _tokens_for_heads(out, head_split.queries, comm, tokens)


def heads_of(heads: int, comm: Communicator) -> range:
    """The heads that this rank has during the attention."""
    return HeadSplit(heads, heads, comm.size).queries[comm.rank]


class HeadSplit:
    """Which heads each rank gets: consecutive ones of the queries, and the ones of the keys that these use."""

    def __init__(self, heads: int, key_heads: int, ranks: int) -> None:
        self._group = heads // key_heads
        self.queries = [runs[0] for runs in Tokens.consecutive(heads, ranks).runs]
        self.keys = [
            range(part.start // self._group, (part.stop - 1) // self._group + 1) if len(part) else range(0)
            for part in self.queries
        ]

    def matched(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Keys' heads in a form that serves this rank's queries: as they are, or one for each of them."""
        mine, used = self.queries[rank], self.keys[rank]
        if len(mine) == len(used) * self._group:
            return x
        indices = torch.tensor([head // self._group - used.start for head in mine], dtype=torch.long)
        return x.index_select(1, indices.to(x.device, non_blocking=True))


def _heads_for_tokens(
    tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[range]], comm: Communicator, tokens: Tokens
) -> list[torch.Tensor]:
    """This rank's heads of all tokens, of several tensors in one exchange. heads[i][r]: rank r's of tensors[i]."""
    if comm.size == 1:
        return list(tensors)
    everyone = range(comm.size)
    parts = [[x[:, held[r].start : held[r].stop] for x, held in zip(tensors, heads, strict=True)] for r in everyone]
    shapes = [
        [
            (x.shape[0], len(held[comm.rank]), tokens.count(r), x.shape[3])
            for x, held in zip(tensors, heads, strict=True)
        ]
        for r in everyone
    ]
    arrived = _exchanged(parts, shapes, comm)
    return [tokens.join([arrived[r][i] for r in everyone], 2) for i in range(len(tensors))]


def _tokens_for_heads(out: torch.Tensor, heads: Sequence[range], comm: Communicator, tokens: Tokens) -> torch.Tensor:
    """The way back: all heads of this rank's tokens."""
    if comm.size == 1:
        return out
    everyone = range(comm.size)
    parts = [[tokens.shard(out, r, 2)] for r in everyone]
    count = tokens.count(comm.rank)
    shapes = [[(out.shape[0], len(heads[r]), count, out.shape[3])] for r in everyone]
    return torch.cat([shards[0] for shards in _exchanged(parts, shapes, comm)], 1)


def _exchanged(
    parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], comm: Communicator
) -> list[list[torch.Tensor]]:
    """parts[r] go to rank r; what comes from rank r has the shapes[r]."""
    send_sizes = [sum(part.numel() for part in of_rank) for of_rank in parts]
    recv_sizes = [sum(math.prod(shape) for shape in of_rank) for of_rank in shapes]
    flat = torch.cat([part.reshape(-1) for of_rank in parts for part in of_rank])
    arrived = all_to_all(flat, send_sizes, recv_sizes, comm)
    lengths = [math.prod(shape) for of_rank in shapes for shape in of_rank]
    shards = iter(arrived.split(lengths))
    return [[next(shards).view(shape) for shape in of_rank] for of_rank in shapes]
