"""Context parallelism against plain attention on one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import RankPool, RemoteError
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.context.context import attention
from unisono.parallel.context.ring_attention import ring_attention
from unisono.parallel.context.sharded_attention import ShardedAttention
from unisono.parallel.context.tokens import Tokens, require_fit
from unisono.parallel.context.ulysses import ulysses_attention

Pools = Callable[[str, int], RankPool]

ORDERS = {"zigzag": Tokens.zigzag, "consecutive": Tokens.consecutive}
KINDS: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}


# ---- tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 16, 23])
def test_tokens(order: str, ranks: int, length: int) -> None:
    tokens = ORDERS[order](length, ranks)
    held = torch.cat([tokens.positions(rank) for rank in range(ranks)])
    assert sorted(held.tolist()) == list(range(length))
    full = torch.randn(2, length, 3)
    shards = [tokens.shard(full, rank, 1) for rank in range(ranks)]
    assert [chunk.shape[1] for chunk in shards] == tokens.counts
    for rank, chunk in enumerate(shards):
        assert torch.equal(chunk, full[:, tokens.positions(rank)])
    assert torch.equal(tokens.join(shards, 1), full)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (3, 7), (4, 5), (4, 21)])
def test_pairs_that_see_each_other(order: str, ranks: int, length: int) -> None:
    tokens = ORDERS[order](length, ranks)
    for by in range(ranks):
        for rank in range(ranks):
            if by == rank:
                continue
            expected = tokens.positions(rank) <= tokens.positions(by)[:, None]
            seen = torch.zeros_like(expected)
            for rows, columns in tokens.seen(rank, by, causal=True):
                assert not seen[rows, columns].any()
                seen[rows, columns] = True
            assert torch.equal(seen, expected)


def test_zigzag_balances() -> None:
    def work(tokens: Tokens, by: int) -> int:
        pairs = [pair for rank in range(4) if rank != by for pair in tokens.seen(rank, by, causal=True)]
        return sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in pairs)

    assert len({work(Tokens.zigzag(64, 4), rank) for rank in range(4)}) == 1
    assert len({work(Tokens.consecutive(64, 4), rank) for rank in range(4)}) == 4


# ---- attention ---------------------------------------------------------------------------------------------------


def shapes(length: int, heads: int, key_heads: int, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, count, length, width, dtype=torch.float64, generator=generator)
        for count in (heads, key_heads, key_heads, heads)
    ]


def plain(full: list[torch.Tensor], causal: bool, scale: float | None, mask: torch.Tensor | None) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in full[:3])
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    out.backward(full[3])
    return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[list-item]


def check_attention(
    comm: Communicator,
    kind: str,
    tokens: Tokens,
    heads: tuple[int, int],
    causal: bool,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> None:
    full = shapes(tokens.length, *heads)
    expected = plain(full, causal, scale, mask)
    mine = [tokens.shard(x, comm.rank, 2) for x in full]
    q, k, v = (x.clone().requires_grad_() for x in mine[:3])
    out = KINDS[kind](q, k, v, comm, causal, scale, tokens, mask)
    out.backward(mine[3])
    for name, found, full_one in zip(["out", "dq", "dk", "dv"], [out, q.grad, k.grad, v.grad], expected, strict=True):
        torch.testing.assert_close(
            found,
            tokens.shard(full_one, comm.rank, 2),
            rtol=1e-10,
            atol=1e-12,
            msg=lambda text, name=name: name + text,
        )


def pool_of(pools: Pools, ranks: int) -> tuple[RankPool, int]:
    """Three ranks sit in a pool of four, as a group of their own."""
    return pools("gloo", 4 if ranks == 3 else ranks), ranks


def on_some(comm: Communicator, ranks: int, check: Callable[..., Any], *args: Any) -> Any:
    if ranks == comm.size:
        return check(comm, *args)
    group = comm.split([list(range(ranks))])
    return check(group, *args) if group is not None else None


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(pools: Pools, kind: str, causal: bool, ranks: int) -> None:
    pool, ranks = pool_of(pools, ranks)
    for length, heads in [(16, (4, 4)), (13, (4, 2)), (5, (6, 1)), (2, (2, 2))]:
        for order in ORDERS.values():
            pool.run(on_some, ranks, check_attention, kind, order(length, ranks), heads, causal, 0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_masks(pools: Pools, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = Tokens.zigzag(11, 4)
    masks = [
        torch.rand(11, 11, generator=generator) > 0.3,
        torch.rand(2, 1, 1, 11, generator=generator) > 0.3,
        torch.randn(4, 11, 11, generator=generator, dtype=torch.float64),
    ]
    masks[0].fill_diagonal_(True)
    masks[1][..., 0] = True
    for mask in masks:
        pools("gloo", 4).run(check_attention, kind, tokens, (4, 2), False, None, mask)


def check_one_token_a_rank(comm: Communicator, kind: str, length: int) -> None:
    """As Hugging Face's models call it: a single query needs no mask."""
    tokens = ORDERS["consecutive"](length, comm.size)
    full = shapes(length, 4, 4)
    expected = plain(full, True, None, None)[0]
    q, k, v = (tokens.shard(x, comm.rank, 2) for x in full[:3])
    with attention(comm, kind, tokens):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    torch.testing.assert_close(out, tokens.shard(expected, comm.rank, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_with_one_token_attends_as_the_others(pools: Pools, kind: str) -> None:
    for length in (5, 7):
        pools("gloo", 4).run(check_one_token_a_rank, kind, length)
    with pytest.raises(RemoteError, match="models leave is_causal out for one query, and no rank has more"):
        pools("gloo", 4).run(check_one_token_a_rank, kind, 3)


def check_learned_bias(comm: Communicator, kind: str) -> None:
    tokens = ORDERS["zigzag"](9, comm.size)
    full = shapes(9, 4, 4)
    bias = torch.randn(1, 4, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for parts in (full, [tokens.shard(x, comm.rank, 2) for x in full]):
        learned, q, k, v = (x.clone().requires_grad_() for x in (bias, *parts[:3]))
        with attention(comm, kind, tokens) if parts is not full else contextlib.nullcontext():
            F.scaled_dot_product_attention(q, k, v, learned).backward(parts[3])
        gradients.append([x.grad for x in (learned, q, k, v)])
    comm.all_reduce(gradients[1][0])
    torch.testing.assert_close(gradients[1][0], gradients[0][0], rtol=1e-10, atol=1e-12)
    for found, expected in zip(gradients[1][1:], gradients[0][1:], strict=True):
        torch.testing.assert_close(found, tokens.shard(expected, comm.rank, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_learned_biases(pools: Pools, kind: str) -> None:
    pools("gloo", 2).run(check_learned_bias, kind)


def test_over_mpi(pools: Pools) -> None:
    for kind in KINDS:
        pools("mpi", 2).run(check_attention, kind, Tokens.zigzag(9, 2), (4, 2), True)


# ---- what is sent ------------------------------------------------------------------------------------------------


def count_elements(comm: Communicator, kind: str, length: int, heads: int) -> tuple[float, float, float]:
    """Elements sent in the forward; in the payload of all-to-alls; sent in the backward."""
    tokens = Tokens.zigzag(length, comm.size)
    q, k, v, grad = (tokens.shard(x, comm.rank, 2).requires_grad_() for x in shapes(length, heads, heads))
    with traffic.counted() as seen:
        out = KINDS[kind](q, k, v, comm, True, None, tokens)
    with traffic.counted() as seen_backward:
        out.backward(grad)
    return seen.sent / 8, seen.payload["all_to_all"] / 8, seen_backward.sent / 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_elements_sent(pools: Pools, ranks: int) -> None:
    batch, length, heads, width = 2, 16, 4, 8
    hidden = heads * width
    for sent, _, sent_backward in pools("gloo", ranks).run(count_elements, "ring", length, heads):
        assert sent == 2 * batch * length * hidden * (ranks - 1) / ranks
        # The keys and values again, and their gradients, which set out one hop later and come home with the last.
        assert sent_backward == 2 * sent
    for sent, payload, sent_backward in pools("gloo", ranks).run(count_elements, "ulysses", length, heads):
        assert payload == 4 * batch * length * hidden / ranks
        assert sent == sent_backward == payload * (ranks - 1) / ranks


# ---- half precision ----------------------------------------------------------------------------------------------


def check_half(comm: Communicator, dtype: torch.dtype) -> None:
    tokens = Tokens.zigzag(24, comm.size)
    full = shapes(24, 4, 2, 16)
    expected = plain(full, True, None, None)
    mine = [tokens.shard(x, comm.rank, 2).to(dtype) for x in full]
    q, k, v = (x.requires_grad_() for x in mine[:3])
    out = ring_attention(q, k, v, comm, True, None, tokens)
    out.backward(mine[3])
    for found, full_one in zip([out, q.grad, k.grad, v.grad], expected, strict=True):
        assert found is not None
        assert found.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found.double(), tokens.shard(full_one, comm.rank, 2), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(pools: Pools, dtype: torch.dtype) -> None:
    pools("gloo", 2).run(check_half, dtype)


def test_errors() -> None:
    x = torch.zeros(2, 4, 6, 8)
    tokens = Tokens.zigzag(6, 1)
    with pytest.raises(UsageError, match="divisor"):
        require_fit("ring", x, x[:, :3], x[:, :3], tokens, 0, 1)
    with pytest.raises(UsageError, match="expected its own tokens"):
        require_fit("ring", x, x[:, :, :5], x[:, :, :5], tokens, 0, 1)
    with pytest.raises(UsageError, match=r"expected \(batch, heads, tokens, width\)"):
        require_fit("ring", x[0], x[0], x[0], tokens, 0, 1)


# ---- masks where ranks hold different numbers of tokens, or one --------------------------------------------------


def masks(length: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(length)
    padding = torch.randn(2, 1, 1, length, dtype=torch.float64, generator=generator)
    return {
        "keys": padding,
        "whole": torch.randn(length, length, dtype=torch.float64, generator=generator),
        "broadcast": padding[..., :1],
        "second sequence": None,
    }


def attend_with_masks(comm: Communicator, length: int, kind: str) -> None:
    q, k, v, wanted = shapes(length, 4, 4)
    tokens = Tokens.zigzag(length, comm.size)
    for name, mask in masks(length).items():
        other = shapes(2, 4, 4)[1:3] if name == "second sequence" else None
        for learned in (False, True) if name == "keys" else (False,):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            added = None if mask is None else mask.clone().requires_grad_(learned)
            serial = F.scaled_dot_product_attention(leaves[0], *(other or leaves[1:]), attn_mask=added)
            (serial * wanted).sum().backward()
            mine = [tokens.shard(x, comm.rank, 2).requires_grad_() for x in (q, k, v)]
            part = None if mask is None else (tokens.shard(mask, comm.rank, 3) if name == "keys" else mask.clone())
            part = None if part is None else part.requires_grad_(learned)
            with ShardedAttention(comm, kind, tokens):
                out = F.scaled_dot_product_attention(mine[0], *(other or mine[1:]), attn_mask=part)
            (out * tokens.shard(wanted, comm.rank, 2)).sum().backward()
            torch.testing.assert_close(out, tokens.shard(serial, comm.rank, 2), msg=lambda why, name=name: name + why)
            for leaf, shard in zip(leaves, mine, strict=True):
                if leaf.grad is not None:
                    torch.testing.assert_close(shard.grad, tokens.shard(leaf.grad, comm.rank, 2))
            if learned:
                assert added is not None
                assert part is not None
                torch.testing.assert_close(part.grad, tokens.shard(added.grad, comm.rank, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [4, 6, 7, 10])
def test_masks_of_ranks_with_few_tokens(pools: Pools, length: int, kind: str) -> None:
    pools("gloo", 4).run(attend_with_masks, length, kind)


def mask_on_some_ranks(comm: Communicator) -> None:
    tokens = Tokens.zigzag(6, comm.size)
    q, k, v = (tokens.shard(x, comm.rank, 2) for x in shapes(6, 4, 4)[:3])
    mask = torch.zeros(6, 6, dtype=torch.float64) if tokens.count(comm.rank) > 1 else None
    with ShardedAttention(comm, "ring", tokens), pytest.raises(UsageError, match="a mask on ranks"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_mask_on_some_ranks_only_is_refused_by_all(pools: Pools) -> None:
    pools("gloo", 4).run(mask_on_some_ranks)
