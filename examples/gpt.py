"""A small GPT in plain PyTorch: the model does not know that it will run on many ranks. `tiny` is a task to prove.

unisono verify examples/gpt.py:tiny --plan dp=2,tp=2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def complete(model: GPT, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0) -> str:
    """Continue a text, byte by byte."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -model.config.context :])[0, -1] / temperature
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)[None]], 1)
    return bytes(tokens[0].tolist()).decode("utf-8", "replace")


def _sentence(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tiny() -> uni.Task:
    """unisono verify examples/gpt.py:tiny --plan dp=2,tp=2"""
    return uni.Task(
        model=lambda: GPT(Config(dropout=0.1)),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        batch=_sentence,
        clip=1.0,
    )


# Which layers tensor parallelism cuts; logits and the tied embedding are shared too.
RULES = {
    "blocks.*.attention": "heads:heads",
    "blocks.*.attention.qkv": "column:qkv",
    "blocks.*.attention.out": "row",
    "blocks.*.fc1": "column",
    "blocks.*.fc2": "row",
    "tokens": "vocab",
    "head": "column_gather",
}


def large_gpt(name: str, config: Config, batch: int, dtype: torch.dtype = torch.bfloat16) -> uni.Task:
    """A task to plan for: in bfloat16, and never allocated (`unisono plan` builds it on the meta device)."""

    def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.randint(config.vocabulary, (1, config.context + 1), generator=torch.Generator().manual_seed(seed))
        return made[:, :-1].expand(batch, -1), made[:, 1:].expand(batch, -1)

    return uni.Task(
        model=lambda: GPT(config).to(dtype),
        loss=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=tokens,
        rules=RULES,
        clip=1.0,
        name=name,
    )


def gpt3_175b() -> uni.Task:
    """unisono plan examples/gpt.py:gpt3_175b --devices 1024 --hardware h100"""
    return large_gpt("gpt3_175b", Config(51200, 2048, 12288, 96, 96), batch=1536)


def gpt3_with_dropout() -> uni.Task:
    """As in 2022, dropout everywhere; its table of activations is in docs/seeds/002.md."""
    return large_gpt("gpt3_with_dropout", Config(51200, 2048, 12288, 96, 96, dropout=0.1), batch=8)


def gpt_1t() -> uni.Task:
    """unisono plan examples/gpt.py:gpt_1t --devices 8192 --hardware h100"""
    return large_gpt("gpt_1t", Config(51200, 2048, 25600, 160, 128), batch=3072)
