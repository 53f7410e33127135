"""Models whose layers nobody wrote rules for, under names that unisono does not know: tp searches their graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni


class Tower(nn.Module):
    """No blocks; a parameter between two layers, dropout between two others, a layer that no ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Linear(12, 24), nn.Linear(24, 12)
        self.gamma, self.delta = nn.Linear(12, 16), nn.Linear(16, 8)
        self.tilt = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.odd = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.beta(F.dropout(F.gelu(self.alpha(x)), 0.2, self.training))
        return self.odd(torch.tanh(self.delta(self.gamma(x) * self.tilt)))


class Looker(nn.Module):
    """Attention whose heads are counted under a name of its own, and a gated part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.three, self.back = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.calm = nn.LayerNorm(16)
        self.left, self.right, self.home = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)
        self.guess = nn.Linear(16, 32)
        self.lookers = 4

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        q, k, v = (z.unflatten(-1, (self.lookers, 4)).transpose(1, 2) for z in self.three(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.back(seen.transpose(1, 2).flatten(2))
        y = self.calm(x)
        return self.guess(x + self.home(F.silu(self.left(y)) * self.right(y)))


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 12, generator=generator), torch.randint(3, (8,), generator=generator)


def _tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


tower = uni.Task(model=Tower, loss=F.cross_entropy, optimizer=_adam, batch=_vectors, clip=0.5, name="tower")
looker = uni.Task(model=Looker, loss=_loss, optimizer=_adam, batch=_tokens, name="looker")
