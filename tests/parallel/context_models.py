"""Models for the tests of context parallelism: plain PyTorch, none of them knows of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 17
WIDTH = 16
HEADS = 4


class RotaryBlock(nn.Module):
    """As in Llama: rotary tables and the mask come as arguments, keys have fewer heads."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.key_heads = key_heads
        width = WIDTH // HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * key_heads * width)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(
        self, x: torch.Tensor, *, rotary: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        batch, length, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(batch, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, self.key_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, *rotary), rotated(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x), None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


class Rotary(nn.Module):
    def __init__(self, masked: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.recompute = recompute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        width = WIDTH // HEADS
        angles = torch.arange(length)[:, None] / 10 ** (torch.arange(width // 2) / width)
        angles = torch.cat([angles, angles], -1)[None].double()
        rotary = angles.cos(), angles.sin()
        mask = None
        if self.masked:  # causal, and a padding token hides itself
            mask = torch.ones(length, length, dtype=torch.bool).tril() & (tokens != 0)[:, None, None, :]
            mask = mask | torch.eye(length, dtype=torch.bool)
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.recompute:
                x, _ = checkpoint(layer, x, rotary=rotary, mask=mask, use_reentrant=False)
            else:
                x, _ = layer(x, rotary=rotary, mask=mask)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own layers, with padding."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
            return self.head(self.encoder(x, mask=mask, is_causal=True))
        padding = tokens == 0
        padding[:, 0] = False
        return self.head(self.encoder(x, src_key_padding_mask=padding))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Rotary()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens).mean(1)


class Reshaping(nn.Module):
    """After its blocks it counts on the length of the input, as GPT-2 does in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rotary()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens).view(*tokens.shape, VOCABULARY)


class Counting(nn.Module):
    """After its blocks it mixes tokens: no rank can do that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rotary()
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mix(self.inner(tokens).transpose(1, 2)).transpose(1, 2)


class HandWritten(nn.Module):
    """Attention without torch's function: it cannot be carried over ranks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + (q @ k.transpose(-2, -1)).softmax(-1) @ v

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(self.Block(), self.Block())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.embedding(tokens))
