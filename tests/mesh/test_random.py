"""Numbers that do not depend on the plan: masks of parts are parts of the full tensor's mask, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import local_slice
from unisono.mesh.random import draw as draws
from unisono.mesh.random import dropout
from unisono.mesh.random.state import RandomState

Pools = Callable[[str, int], RankPool]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def full_mask(*shape: int, p: float = 0.5) -> torch.Tensor:
    with RandomState(1):
        return F.dropout(ones(*shape), p)


# ---- parts of a whole --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_split_of_any_dim(dim: int) -> None:
    shape = (6, 5, 7)
    full = full_mask(*shape)
    size = shape[dim]
    for splits in ([0, 2, size], [0, 1, 1, 4, size], list(range(size + 1))):
        shards = []
        for start, stop in itertools.pairwise(splits):
            state = RandomState(1)
            local = [stop - start if d == dim % 3 else n for d, n in enumerate(shape)]
            with state, state.sharded(dim, range(start, stop), of=size):
                shards.append(F.dropout(ones(*local)))
        assert torch.equal(torch.cat(shards, dim), full)


def test_splits_of_several_dims_and_any_order_of_positions() -> None:
    full = full_mask(8, 6, 5)
    state, zigzag = RandomState(1), torch.tensor([0, 5, 2, 3])
    with state, state.sharded(0, range(1, 8, 2), of=8), state.sharded(1, zigzag, of=6):
        mask = F.dropout(ones(4, 4, 5))
    assert torch.equal(mask, full[1::2][:, zigzag])


def test_microbatches_within_data_parallel() -> None:
    """Two dropouts a pass; three microbatches, unequal, of a rank's half."""
    with RandomState(1):
        first, second = F.dropout(ones(12, 3)), F.dropout(ones(12, 3))
    state = RandomState(1)
    with state, state.sharded(0, range(6, 12), of=12):
        for rows in (range(2), range(2, 5), range(5, 6)):
            with state.microbatch(rows, of=6):
                drawn = F.dropout(ones(len(rows), 3)), F.dropout(ones(len(rows), 3))
            mine = slice(6 + rows.start, 6 + rows.stop)
            assert torch.equal(drawn[0], first[mine])
            assert torch.equal(drawn[1], second[mine])


def test_a_draw_after_the_microbatches_is_another_call() -> None:
    with RandomState(1):
        masks = [F.dropout(ones(4, 4)) for _ in range(2)]
    state = RandomState(1)
    with state:
        for rows in (range(2), range(2, 4)):
            with state.microbatch(rows, of=4):
                F.dropout(ones(2, 4))
        assert torch.equal(F.dropout(ones(4, 4)), masks[1])


def test_batch_and_sequence_folded_into_one_dim() -> None:
    full = full_mask(4 * 6, 3)
    for rows in (range(2, 4), range(1, 4, 2), torch.tensor([3, 0])):
        state = RandomState(1)
        with state, state.sharded(0, rows, of=4):
            mask = F.dropout(ones(len(rows) * 6, 3))
        assert torch.equal(mask, full.view(4, 6, 3)[torch.tensor(list(rows))].view(-1, 3))


def test_full_inside_a_part() -> None:
    state = RandomState(1)
    with state, state.sharded(0, range(2), of=4), state.unsharded():
        assert torch.equal(F.dropout(ones(3, 5)), full_mask(3, 5))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.data(),
    st.sampled_from(["dropout", "uniform", "uniform64", "normal", "bernoulli"]),
)
def test_random_boxes(shape: list[int], data: st.DataObject, what: str) -> None:
    def draw(state: RandomState, size: list[int]) -> torch.Tensor:
        if what == "dropout":
            return state.dropout(ones(*size), 0.3)
        if what == "bernoulli":
            return state.bernoulli(*size, p=0.3)
        if what == "normal":
            return state.normal(*size)
        return state.uniform(*size, dtype=torch.float64 if what == "uniform64" else torch.float32)

    full, state = draw(RandomState(5), shape), RandomState(5)
    local = list(shape)
    with contextlib.ExitStack() as scopes:
        for dim, size in enumerate(shape):
            start = data.draw(st.integers(0, size - 1))
            stop = data.draw(st.integers(start + 1, size))
            full, local[dim] = full.narrow(dim, start, stop - start), stop - start
            scopes.enter_context(state.sharded(dim, range(start, stop), of=size))
        assert torch.equal(draw(state, local), full)


# ---- which call --------------------------------------------------------------------------------------------------


def test_seed_step_and_call_matter() -> None:
    def masks(seed: int, step: int) -> list[torch.Tensor]:
        with RandomState(seed, step):
            return [F.dropout(ones(500)) for _ in range(2)]

    drawn = [*masks(1, 0), *masks(1, 1), *masks(2, 0)]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert 150 < int((one == other).sum()) < 350
    assert torch.equal(masks(1, 0)[1], drawn[1])
    state = RandomState(1)
    with state:
        F.dropout(ones(500))
        state.step = 1
        assert torch.equal(F.dropout(ones(500)), drawn[2])


class Block(nn.Module):
    """Draws in a child, twice with one child, and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(self.drop(x))) + F.dropout(x, 0.3, self.training)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def test_a_rank_with_the_last_layers_only() -> None:
    model, x = blocks(), torch.randn(6, 8, dtype=torch.float64)
    state = RandomState(1)
    state.name_modules(model)
    with state:
        middle = model[:2](x)
        end = model[2:](middle)
    stage = RandomState(1)
    stage.name_modules(copy.deepcopy(model))  # other modules do not matter
    stage.name_modules(model[2], "2")
    stage.name_modules(model[3], "3")
    with stage:
        assert torch.equal(model[2:](middle), end)
    unnamed = RandomState(1)
    with unnamed:
        assert not torch.equal(model[2:](middle), end)


def test_names_survive_wrapping() -> None:
    model, x = blocks(), torch.randn(6, 8, dtype=torch.float64)
    state = RandomState(1)
    state.name_modules(model)
    with state:
        plain = model(x)
        state.step = 0
        wrapped = nn.Sequential(nn.Identity(), nn.ModuleDict({"inner": model})["inner"])(x)
    assert torch.equal(plain, wrapped)


# ---- recomputation -----------------------------------------------------------------------------------------------


def gradients(model: nn.Sequential, x: torch.Tensor, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list:
    model.zero_grad()
    state = RandomState(1)
    state.name_modules(model)
    with state:
        outputs = []
        for rows in (range(4), range(4, 6)):  # two passes in flight, as in a pipeline
            with state.microbatch(rows, of=6):
                y = x[rows.start : rows.stop]
                for block in model:
                    y = run(block, y)
                outputs.append(y)
        for y in outputs:
            (y**2).sum().backward()
    return [torch.cat([y.detach() for y in outputs]), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same(reentrant: bool) -> None:
    model, x = blocks(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    plain = gradients(model, x, lambda block, y: block(y))
    again = gradients(model, x, lambda block, y: checkpoint(block, y, use_reentrant=reentrant))
    function = gradients(model, x, lambda block, y: checkpoint(lambda z: block(z), y, use_reentrant=reentrant))
    for one, two, three in zip(plain, again, function, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_recomputation_without_rng_state_is_refused() -> None:
    model, x = blocks(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UsageError, match="preserve_rng_state=True"):
        gradients(model, x, lambda b, y: checkpoint(b, y, use_reentrant=False, preserve_rng_state=False))


# ---- behind torch ------------------------------------------------------------------------------------------------


def test_torch_is_left_as_it_was() -> None:
    before = [getattr(F, name) for name in dropout._own]
    with RandomState(1):
        assert F.dropout is not before[0]
        with RandomState(2):
            inner = F.dropout(ones(100))
        outer = F.dropout(ones(100))
    assert not torch.equal(inner, outer)
    assert torch.equal(outer, full_mask(100))
    assert [getattr(F, name) for name in dropout._own] == before
    with pytest.raises(RuntimeError, match="stop here"), RandomState(1):
        raise RuntimeError("stop here")
    assert F.dropout is before[0]


def test_dropout_means_what_torch_means() -> None:
    x = torch.randn(1000, 20, dtype=torch.float64)
    with RandomState(1):
        y = F.dropout(x, 0.2)
        kept = y != 0
        torch.testing.assert_close(y[kept], x[kept] / 0.8)
        assert abs(float(kept.double().mean()) - 0.8) < 5 * math.sqrt(0.16 / x.numel())
        assert F.dropout(x, 0.2, training=False) is x or torch.equal(F.dropout(x, 0.2, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(F.dropout(x, 1.0), torch.zeros_like(x))
        z = x.clone()
        assert F.dropout(z, 0.5, inplace=True) is z
        assert 0.4 < float((z == 0).double().mean()) < 0.6
        assert nn.Dropout(0.5).eval()(x) is x
        with pytest.raises(ValueError, match="probability"):
            F.dropout(x, 1.5)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert F.dropout(x.to(dtype)).dtype == dtype


def test_dropout_is_differentiable() -> None:
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return RandomState(3).dropout(x, 0.4)

    assert torch.autograd.gradcheck(dropped, x)
    assert torch.autograd.gradgradcheck(dropped, x)


@pytest.mark.parametrize(
    ("function", "shape", "channel_dims"),
    [
        (F.dropout1d, (8, 30, 5), 2),
        (F.dropout1d, (240, 5), 1),
        (F.dropout2d, (8, 30, 5, 2), 2),
        (F.dropout2d, (8, 30, 5), 2),
        (F.dropout3d, (8, 30, 2, 3, 2), 2),
        (F.dropout3d, (240, 2, 3, 2), 1),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout")
def test_full_channels(function: Callable[..., torch.Tensor], shape: tuple[int, ...], channel_dims: int) -> None:
    with RandomState(1):
        y = getattr(F, function.__name__)(ones(*shape), 0.5)
    channels = y.flatten(channel_dims)
    assert torch.equal(channels, channels[..., :1].expand_as(channels))
    assert set(channels.unique().tolist()) == {0.0, 2.0}
    assert 80 < int((channels[..., 0] == 0).sum()) < 160


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with RandomState(1):
        for p in (0.1, 0.5):
            y = F.alpha_dropout(x, p, training=True)
            assert abs(float(y.mean())) < 0.02
            assert abs(float(y.std()) - 1) < 0.02
        z = F.feature_alpha_dropout(x.view(100, 20, 100), 0.5, training=True)
        low = z.amax(-1) == z.amin(-1)
        assert 800 < int(low.sum()) < 1200


def test_distributions() -> None:
    state, count = RandomState(1), 200_000
    for dtype, resolution in [(torch.float64, 0), (torch.float32, 0), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)]:
        u = state.uniform(count, dtype=dtype).double()
        assert 0 <= float(u.min()) <= float(u.max()) < 1
        assert abs(float(u.mean()) + resolution / 2 - 0.5) < 5 / math.sqrt(12 * count)
        assert abs(float(u.var()) - 1 / 12) < 0.002
    n = state.normal(count, dtype=torch.float64)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs(float((n**power).mean()) - moment) < 5 * math.sqrt(variance / count)
    assert 3.5 < float(n.abs().max()) < 6
    b = state.bernoulli(count, p=0.3).double()
    assert abs(float(b.mean()) - 0.3) < 5 * math.sqrt(0.21 / count)
    assert state.bernoulli(5, p=1.0).all()
    assert not state.bernoulli(5, p=0.0).any()


# ---- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"mask": "bool"}, {"mask": "float"}]
)
def test_attention_without_the_dropped_weights_is_torchs(options: dict) -> None:
    torch.manual_seed(0)
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = (torch.randn(2, n, s, 8, dtype=torch.float64) for n, s in [(4, 5), (heads, 6), (heads, 6)])
    options = dict(options)
    mask = options.pop("mask", None)
    if mask == "bool":
        options["attn_mask"] = torch.rand(5, 6) > 0.4
        options["attn_mask"][2] = False
    elif mask == "float":
        options["attn_mask"] = torch.randn(2, 1, 5, 6, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    with RandomState(1):
        tiny = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **options)
        none = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(tiny, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(none, expected)


def test_attention_dropout_by_heads_batch_and_queries() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 6, 5, 8, dtype=torch.float64) for _ in range(3))
    with RandomState(1):
        full = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    state = RandomState(1)
    with (
        state,
        state.sharded(0, range(2, 4), of=4),
        state.sharded(1, range(1, 3), of=6, only="attention"),
        state.sharded(2, range(1, 4), of=5, only="attention"),
        state.sharded(1, range(9), of=99, only="dropout"),
    ):
        local = F.scaled_dot_product_attention(q[2:, 1:3, 1:4], k[2:, 1:3], v[2:, 1:3], dropout_p=0.4)
    torch.testing.assert_close(local, full[2:, 1:3, 1:4], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_of_half_a_batch(need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True, dtype=torch.float64)
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    with RandomState(1):
        full = layer(x, x, x, need_weights=need_weights)[0]
    state, rows = RandomState(1), slice(2, 4)
    with state, state.sharded(0, range(2, 4), of=6):
        local = layer(x[rows], x[rows], x[rows], need_weights=need_weights)[0]
    torch.testing.assert_close(local, full[rows], rtol=1e-12, atol=1e-12)


def test_a_transformer_layer_of_half_a_batch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True, dtype=torch.float64)
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    with RandomState(1):
        full = layer(x)
    state = RandomState(1)
    with state, state.sharded(0, range(3, 6), of=6):
        local = layer(x[3:])
    torch.testing.assert_close(local, full[3:], rtol=1e-12, atol=1e-12)


# ---- ranks -------------------------------------------------------------------------------------------------------


def check_dtensors(comm: Communicator) -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    full = full_mask(7, 5)
    for placements in [(Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(1), Shard(1)), (Replicate(), Replicate())]:
        placed = uni.shard_tensor(ones(7, 5).requires_grad_(), mesh, placements)
        with RandomState(1):
            dropped = F.dropout(placed)
        assert torch.equal(dropped.to_local(), local_slice(full, mesh, placements))
        dropped.to_local().sum().backward()
        assert torch.equal(placed.grad.to_local(), local_slice(full, mesh, placements))
    with pytest.raises(UsageError, match="none is Partial"), RandomState(1):
        F.dropout(uni.shard_tensor(ones(7, 5), mesh, [uni.Partial(), Replicate()]))


def test_dtensors_know_their_part(pools: Pools) -> None:
    pools("gloo", 4).run(check_dtensors)


# ---- the rest ----------------------------------------------------------------------------------------------------


def test_complaints() -> None:
    with pytest.raises(UsageError, match="seed"):
        RandomState("x")  # type: ignore[arg-type]
    state = RandomState(1)
    with pytest.raises(UsageError, match="at least 0"):
        state.step = -1
    with pytest.raises(UsageError, match=r"state\.unsharded\(\)"), state.sharded(0, range(4), of=8):
        state.uniform(7, 3)
    with pytest.raises(UsageError, match="no dim 2"), state.sharded(2, range(4), of=8):
        state.uniform(7, 3)
    with pytest.raises(UsageError, match="only"), state.sharded(0, range(4), of=8, only="mlp"):
        pass
    with pytest.raises(UsageError, match="probability"):
        state.dropout(ones(3), 2.0)
    with pytest.raises(UsageError, match="random numbers of"):
        state.uniform(3, dtype=torch.int32)


def test_compiled_words_take_over_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    kinds = [(dtype, p) for dtype in (torch.float32, torch.float64, torch.bfloat16) for p in (0.1, 0.37, 0.999999)]

    def drawn() -> list[torch.Tensor]:
        with RandomState(5):
            return [full_mask(50, 31), *(F.dropout(torch.ones(33, 7, dtype=dtype), p) for dtype, p in kinds)]

    monkeypatch.setattr(draws, "_seconds_drawn", 0.0)
    before = drawn()
    assert draws._seconds_drawn > 0
    draws.draw_fast()
    monkeypatch.setattr(draws, "torch_words", None)
    assert all(map(torch.equal, drawn(), before))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_draws_the_same() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        cpu, gpu = RandomState(1), RandomState(1)
        for shape, part in [((64, 33), None), ((63, 5, 7), range(3, 8))]:
            with (
                cpu.sharded(1, part, of=11) if part else cpu.unsharded(),
                gpu.sharded(1, part, of=11) if part else gpu.unsharded(),
            ):
                assert torch.equal(
                    gpu.uniform(*shape, dtype=dtype, device="cuda").cpu(), cpu.uniform(*shape, dtype=dtype)
                )
                # A GPU fuses multiply and add, so normal numbers agree to rounding only; uniform ones to the bit.
                torch.testing.assert_close(
                    gpu.normal(*shape, dtype=dtype, device="cuda").cpu(), cpu.normal(*shape, dtype=dtype)
                )
                x = torch.rand(*shape).add(1).to(dtype)  # never 0, so that zeros are what was dropped
                there = x.cuda().requires_grad_()
                dropped = gpu.dropout(there, 0.3)
                here = cpu.dropout(x, 0.3)
                assert torch.equal(dropped.cpu() == 0, here == 0)
                torch.testing.assert_close(dropped.cpu(), here, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
                dropped.sum().backward()
                assert torch.equal(there.grad.cpu() == 0, here == 0)


def test_numbers_that_may_be_of_sharded_tokens_are_refused_in_another_shape() -> None:
    """Of (samples * tokens, experts), as routers have them, no dim is that of tokens, but one may be as long."""
    state = RandomState(seed=3)
    with state, state.sharded(1, range(4, 8), of=8, only="dropout", num_samples=2):
        assert torch.rand(2, 4, 6).shape == (2, 4, 6)
        torch.rand(3)  # without tokens: the same on every rank
        torch.empty(2, 1, 1).uniform_()
        for shape in ((8, 4), (8, 6), (4, 6)):
            with pytest.raises(UsageError, match="expected samples along dim 0 and tokens along dim 1"):
                torch.rand(shape)
            with pytest.raises(UsageError, match="expected samples along dim 0 and tokens along dim 1"):
                F.dropout(torch.ones(shape), 0.5)
