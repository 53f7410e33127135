"""Models with one habit each that tensor parallelism has to get right: hooks, biases by head, and more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

WIDTH, HEADS, HEAD, VOCABULARY, TOKENS = 32, 4, 8, 48, 9


class Attention(nn.Module):
    """Its variants override a step each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.projected(x)
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.mlp = attention or Attention(), mlp or Mlp()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def body(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def task(name: str, model: Callable[[], nn.Module]) -> uni.Task:
    return uni.Task(model=model, loss=loss, optimizer=adam, batch=batch, name=name)


# ---- logits that something looks at ----------------------------------------------------------------------------------


def _with_backward_hook() -> nn.Module:
    model = Model()
    model.register_full_backward_hook(lambda module, into, out: None)
    return model


class _Halved(torch.autograd.Function):
    """The identity; of its gradient, half."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] / 2


class FunctionOfLogits(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _Halved.apply(super().forward(tokens))


backward_hook = task("backward_hook", _with_backward_hook)
function_of_logits = task("function_of_logits", FunctionOfLogits)
function_in_loss = uni.Task(
    model=Model, loss=lambda logits, targets: loss(_Halved.apply(logits), targets), optimizer=adam, batch=batch
)


# ---- a bias that a block makes for its attention ---------------------------------------------------------------------


class PositionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * TOKENS, HEADS))

    def forward(self, tokens: int) -> torch.Tensor:
        positions = torch.arange(tokens, device=self.table.device)
        return self.table[positions[:, None] - positions + TOKENS].permute(2, 0, 1)[None]


class BiasedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.bias = PositionBias()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), self.bias(TOKENS))
        return x + self.mlp(self.norm2(x))


block_bias = task("block_bias", lambda: Model(BiasedBlock))


# ---- embeddings with sparse gradients --------------------------------------------------------------------------------


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


sparse_embedding = uni.Task(
    model=Sparse, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-1), batch=batch, name="sparse_embedding"
)


# ---- dropout of heads, wherever they lie -----------------------------------------------------------------------------


class LateHeads(Attention):
    """Dropout of (batch, tokens, heads, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.projected(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o(self.dropout(y).flatten(2))


class LateWeights(Attention):
    """Attention weights (batch, queries, keys, heads), with dropout."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)) for f in (self.q, self.k, self.v))
        weights = torch.einsum("bqhd,bkhd->bqkh", q, k).softmax(2)
        return self.o(torch.einsum("bqkh,bkhd->bqhd", F.dropout(weights, 0.3, self.training), v).flatten(2))


class FoldedHeads(Attention):
    """Dropout of (batch x heads, queries, keys)."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (each.flatten(0, 1) for each in self.projected(x))
        y = F.dropout((q @ k.transpose(1, 2)).softmax(-1), 0.3, self.training) @ v
        return self.o(y.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


class PackedDropout(nn.Module):
    """Dropout of gate and up, which one layer gives side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 2 * 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.dropout(self.both(x), 0.3, self.training).chunk(2, -1)
        return self.down(F.silu(gate) * up)


packed_dropout = task("packed_dropout", lambda: Model(lambda: Block(mlp=PackedDropout())))
late_heads = task("late_heads", lambda: Model(lambda: Block(LateHeads())))
late_weights = task("late_weights", lambda: Model(lambda: Block(LateWeights())))
folded_heads = task("folded_heads", lambda: Model(lambda: Block(FoldedHeads())))


# ---- classes of well-known names that compute otherwise --------------------------------------------------------------


class _Mixed(nn.Module):
    """Between c_fc and c_proj it takes a norm over all features."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.normalize(self.c_fc(x).relu(), dim=-1))


class GPT2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), _Mixed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class TransformerEncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear2(self.linear1(x).softmax(-1))


own_gpt2_block = task("own_gpt2_block", lambda: Model(GPT2Block))
own_encoder_layer = task("own_encoder_layer", lambda: Model(TransformerEncoderLayer))


# ---- attention and blocks of many kinds ------------------------------------------------------------------------------


class MultiQuery(nn.Module):
    """One head of keys and values for all queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * HEAD), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        k, v = (each.unsqueeze(1) for each in self.kv(x).chunk(2, -1))
        return self.o((q @ k.transpose(-1, -2) / HEAD**0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class ScaledHeads(Attention):
    """Learned numbers for each head: the temperature, ALiBi's slope, a sink, a gate on its output; norms of q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.sink = nn.Parameter(torch.ones(HEADS, 1, 1)), nn.Parameter(torch.zeros(HEADS))
        self.gate, self.norm_q, self.norm_k = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float())

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.projected(x)
        positions = torch.arange(x.shape[1], device=x.device)
        distance = (positions[:, None] - positions).abs()
        scores = self.norm_q(q) @ self.norm_k(k).transpose(-1, -2) * self.temperature
        scores = scores - self.slopes[:, None, None] * distance
        scores = scores.masked_fill(distance > 3, float("-inf"))
        sinks = self.sink.view(1, -1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o((weights @ v).transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class ParallelBlock(Block):
    """Attention and MLP side by side, called with keywords."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        h = self.norm1(x)
        return x + scale * (self.attention(x=h) + self.mlp(x=h))


class Shared(Model):
    """One block, run three times, with keywords."""

    def body(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for number in range(3):
            x = self.blocks[number % 2](x=x, scale=1 / (number + 1))
        return self.norm(x)


class GatedByInput(Block):
    """The block's own projection gates what its attention gives."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x).sigmoid().repeat_interleave(HEAD, -1)
        return x + gate * self.attention(self.norm1(x)) + self.mlp(self.norm2(x))


class HeadsByParity(Attention):
    """Every second head is sharper."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.projected(x)
        sharper = 1 + (torch.arange(q.shape[1], device=x.device) % 2).to(x.dtype).view(-1, 1, 1)
        return self.o(((q @ k.mT * sharper).softmax(-1) @ v).transpose(1, 2).flatten(2))


class SometimesMixed(Attention):
    """With a flag, heads add the mean of all heads' weights."""

    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.is_mixed = is_mixed

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.projected(x)
        weights = (q @ k.mT).softmax(-1)
        weights = weights + weights.mean(1, keepdim=True) if self.is_mixed else weights
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def _second_mixed() -> nn.Module:
    flags = iter((False, True))
    return Model(lambda: Block(SometimesMixed(next(flags))))


heads_by_parity = task("heads_by_parity", lambda: Model(lambda: Block(HeadsByParity())))
second_mixed = task("second_mixed", _second_mixed)
multi_query = task("multi_query", lambda: Model(lambda: Block(MultiQuery())))
scaled_heads = task("scaled_heads", lambda: Model(lambda: Block(ScaledHeads())))
parallel_block = task("parallel_block", lambda: Model(ParallelBlock))
shared_blocks = task("shared_blocks", lambda: Shared(ParallelBlock))
gated_by_input = task("gated_by_input", lambda: Model(GatedByInput))


# ---- attention that returns its weights, too -------------------------------------------------------------------------


class WithWeights(Attention):
    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        q, k, v = self.projected(x)
        weights = (q @ k.mT / HEAD**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), weights


class IgnoresWeights(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(self.norm1(x))
        x = x + attended
        return x + self.mlp(self.norm2(x))


class UsesWeights(Block):
    """The weights of all heads: a rank that has some of them would see others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, weights = self.attention(self.norm1(x))
        x = x + attended * weights.amax((1, 3))[..., None]
        return x + self.mlp(self.norm2(x))


weights_ignored = task("weights_ignored", lambda: Model(lambda: IgnoresWeights(WithWeights())))
weights_used = task("weights_used", lambda: Model(lambda: UsesWeights(WithWeights())))


# ---- convolutions and state-space models -----------------------------------------------------------------------------


class Convolutions(nn.Module):
    """A pair, one through a depthwise convolution, and one that ends in a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.widen = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 1)
        self.depthwise, self.narrow = nn.Conv2d(24, 24, 3, padding="same", groups=24), nn.Conv2d(24, 8, 1)
        self.drop, self.norm = nn.Dropout2d(0.2), nn.GroupNorm(2, 8)
        self.last, self.head = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False), nn.Linear(6 * 9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = self.norm(x + self.narrow(self.drop(F.gelu(self.depthwise(self.widen(x))))))
        return self.head(F.relu(self.last(x)).flatten(1))


class NormedBlock(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 12, 3, padding=1, bias=False), norm(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 8, 3, padding=1, bias=False), norm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True))))


class ResidualNet(nn.Module):
    """As ResNets are built: a norm between the convolutions of each block."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.BatchNorm2d, partial(nn.GroupNorm, 2), partial(nn.InstanceNorm2d, affine=True)
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.ModuleList(map(NormedBlock, norms))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """Mamba as one writes it by hand: all layers are called, the state is kept in a loop over tokens."""

    def __init__(self, inner: int = 48, state: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.inner, self.state, self.rank = inner, state, rank
        self.in_proj, self.conv = nn.Linear(WIDTH, 2 * inner), nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.a, self.d = nn.Parameter(torch.rand(inner, state)), nn.Parameter(torch.ones(inner))
        self.out_proj, self.drop = nn.Linear(inner, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(x).split([self.rank, self.state, self.state], -1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(-dt[..., None] * self.a)
        added = (dt * x)[..., None] * b[:, :, None]
        state, found = torch.zeros_like(added[:, 0]), []
        for token in range(x.shape[1]):
            state = decay[:, token] * state + added[:, token]
            found.append((state * c[:, token, None]).sum(-1))
        return self.out_proj(self.drop((torch.stack(found, 1) + self.d * x) * F.silu(gate)))


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mixer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


def _images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(10, (4,), generator=generator)


convolutions = uni.Task(model=Convolutions, loss=F.cross_entropy, optimizer=adam, batch=_images, name="convolutions")
residual_net = uni.Task(model=ResidualNet, loss=F.cross_entropy, optimizer=adam, batch=_images, name="residual_net")
state_space = task("state_space", lambda: Model(MixerBlock))
