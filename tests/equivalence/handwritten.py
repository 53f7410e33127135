"""Language models as people write them, under names and with habits of their own: tp finds how to shard them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

WIDTH, HEADS, HEAD, VOCABULARY = 32, 4, 8, 64


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Vnimanie(nn.Module):
    """Separate projections under Russian names; the number of heads is left to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.zapros, self.klyuch = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.znachenie, self.vyhod = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, -1, HEAD).transpose(1, 2) for f in (self.zapros, self.klyuch, self.znachenie))
        return self.vyhod(causal(q, k, v).transpose(1, 2).reshape(b, t, c))


class WrittenOut(Vnimanie):
    """Softmax by hand; heads under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.golov = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.golov, -1).transpose(1, 2) for f in (self.zapros, self.klyuch, self.znachenie))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(torch.ones(t, t, device=x.device).tril() == 0, float("-inf"))
        return self.vyhod((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, c))


@dataclass
class Settings:
    n_head: int = HEADS
    dim: int = WIDTH


SETTINGS = Settings()


class FromSettings(Vnimanie):
    """Reads its sizes off an object that all modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SETTINGS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        heads, head = self.settings.n_head, self.settings.dim // self.settings.n_head
        q, k, v = (f(x).view(b, t, heads, head).transpose(1, 2) for f in (self.zapros, self.klyuch, self.znachenie))
        return self.vyhod(causal(q, k, v).transpose(1, 2).reshape(b, t, self.settings.dim))


class Constants(Vnimanie):
    """No attribute holds the number of heads: it is in the code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, HEAD).transpose(1, 2) for f in (self.zapros, self.klyuch, self.znachenie))
        return self.vyhod(causal(q, k, v).transpose(1, 2).reshape(b, t, WIDTH))


class Fused(nn.Module):
    """One projection for queries, keys and values, split by their width."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        scores = F.softmax(scores.masked_fill(torch.ones(t, t, device=x.device).tril() == 0, float("-inf")), dim=-1)
        return self.c_proj((self.drop(scores) @ v).transpose(1, 2).contiguous().view(b, t, c))


class FiveDims(nn.Module):
    """One projection, reshaped to queries, keys and values as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lookers = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.lookers, c // self.lookers).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(causal(q, k, v).transpose(1, 2).reshape(b, t, c))


class Grouped(nn.Module):
    """Fewer keys than queries, norms of single heads, rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.nq, self.nkv = HEAD, HEADS, HEADS // 2
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)
        angles = torch.outer(torch.arange(32.0), 10000 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self._turned(self.q_norm(self.wq(x).view(b, t, self.nq, self.head)).transpose(1, 2))
        k = self._turned(self.k_norm(self.wk(x).view(b, t, self.nkv, self.head)).transpose(1, 2))
        v = self.wv(x).view(b, t, self.nkv, self.head).transpose(1, 2)
        k, v = (
            y[:, :, None].expand(b, self.nkv, self.nq // self.nkv, t, self.head).reshape(b, self.nq, t, self.head)
            for y in (k, v)
        )
        return self.wo(causal(q, k, v).transpose(1, 2).reshape(b, t, -1))


class GroupedInOne(nn.Module):
    """Queries and fewer keys and values from one projection, split by sizes in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.all_three, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.all_three(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (y.view(b, t, -1, HEAD).transpose(1, 2) for y in (q, k, v))
        y = causal(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return self.back(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vverh, self.vniz = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vniz(F.gelu(self.vverh(x)))


class Gated(nn.Module):
    """Gate and value from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, is_parallel: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.second, self.is_parallel = attention, mlp, is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_parallel:
            y = self.norm1(x)
            return x + self.first(y) + self.second(y)
        x = x + self.first(self.norm1(x))
        return x + self.second(self.norm2(x))


class OneForward(nn.Module):
    """A block without modules for attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.h = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.u, self.d = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, t, self.h, c // self.h).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(causal(q, k, v).transpose(1, 2).reshape(b, t, c))
        return x + self.d(F.relu(self.u(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], is_tied: bool = False) -> None:
        super().__init__()
        self.slova, self.mesta = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(12, WIDTH)
        self.bloki = nn.ModuleList(block() for _ in range(2))
        self.norma, self.golova = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.golova.weight = self.slova.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.slova(tokens) + self.mesta(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.bloki:
            x = block(x)
        return self.golova(self.norma(x))


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _task(name: str, block: Callable[[], nn.Module], is_tied: bool = False) -> uni.Task:
    return uni.Task(model=lambda: Model(block, is_tied), loss=_loss, optimizer=_adam, batch=_batch, name=name)


minus_one = _task("minus_one", lambda: Block(Vnimanie(), Mlp()))
written_out = _task("written_out", lambda: Block(WrittenOut(), plain_mlp()))
from_settings = _task("from_settings", lambda: Block(FromSettings(), Mlp()))
constants = _task("constants", lambda: Block(Constants(), Mlp()))
fused = _task("fused", lambda: Block(Fused(), Mlp()), is_tied=True)
five_dims = _task("five_dims", lambda: Block(FiveDims(), plain_mlp()))
grouped = _task("grouped", lambda: Block(Grouped(), Gated()))
grouped_in_one = _task("grouped_in_one", lambda: Block(GroupedInOne(), Gated(), is_parallel=True))
one_forward = _task("one_forward", OneForward)
