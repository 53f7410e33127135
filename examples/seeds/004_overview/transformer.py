"""What the programs here share: a small transformer in plain PyTorch, and one device that trains it.

Each program trains the same model under its strategy and asks `deviation` how far it is from that one device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

STEPS, BATCH, LENGTH, WIDTH, HEADS, WORDS, LAYERS = 2, 8, 16, 32, 4, 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def under(plan: str) -> uni.Trainer:
    """The transformer under a plan, in float64, where what differs is no rounding."""
    return uni.parallelize(
        Transformer, plan, loss=loss, optimizer=optimizer, example=batch(0), dtype=torch.float64, seed=0
    )


@cache
def one_device() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the parameters in the end of an ordinary loop on one device."""
    torch.manual_seed(0)
    model = Transformer().double()
    stepping, losses = optimizer(model.parameters()), []
    for step in range(STEPS):
        tokens, targets = batch(step)
        stepping.zero_grad()
        value = loss(model(tokens), targets)
        value.backward()
        stepping.step()
        losses.append(value.item())
    return losses, model.state_dict()


def deviation(trainer: uni.Trainer) -> float:
    """Train, then the worst difference in any loss or parameter from one device; more than rounding is an error."""
    losses = [trainer.step(batch(step)).item() for step in range(STEPS)]
    parameters = trainer.state_dict()["model"]
    wanted_losses, wanted = one_device()
    worst = max(abs(loss - want) for loss, want in zip(losses, wanted_losses, strict=True))
    assert parameters.keys() == wanted.keys()
    worst = max(worst, *((parameters[name] - wanted[name]).abs().max().item() for name in wanted))
    assert worst < 1e-9, f"{trainer.plan} deviates by {worst:.1e} from one device"
    return worst
