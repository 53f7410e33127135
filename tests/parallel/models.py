"""Small models for the pipeline, each with something that is awkward to cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, Config
from unisono.parallel.pipeline.layers import LayerSpec, TiedSpec


def mlp(width: int = 6, depth: int = 9) -> nn.Sequential:
    """Layers of several kinds and sizes, one of which changes its input in place."""
    layers: list[nn.Module] = [nn.Linear(4, width)]
    for _ in range(depth - 2):
        layers += [nn.ReLU(inplace=True), nn.Linear(width, width)]
    return nn.Sequential(*layers[: depth - 1], nn.Linear(width, 3))


class Split(nn.Module):
    """Gives two tensors, a number and None for one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return {"left": self.left(x), "right": (self.right(x), 0.5, None)}


class Mix(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        right, factor, nothing = x["right"]
        return {"left": x["left"] + factor * torch.tanh(self.mix(right)), "right": (x["left"] * right, factor, nothing)}


class Join(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x["left"] * x["right"][0]


def structured(width: int = 4) -> nn.Sequential:
    """A Sequential whose layers pass dicts and tuples to each other."""
    return nn.Sequential(Split(width), Mix(width), Mix(width), Mix(width), Join(), nn.Linear(width, 3))


def gpt(layers: int = 4, dropout: float = 0.0) -> GPT:
    return GPT(Config(vocabulary=17, context=8, width=8, heads=2, layers=layers, dropout=dropout))


class Pair(NamedTuple):
    hidden: torch.Tensor
    total: torch.Tensor


class Carrier(nn.Module):
    """A block that takes two states, the first embedding, a mask and plain values, and gives a named tuple."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.kind = name
        self.fc = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(
        self, state: Pair, first: torch.Tensor, *, mask: torch.Tensor, power: int, mode: str, counts: torch.Tensor
    ) -> tuple[Pair, torch.Tensor]:
        hidden = torch.tanh(self.fc(state.hidden) * self.gain + (first if mode == "add" else 0) ** power)
        counts = counts + (hidden > 0).sum(-1)
        return Pair(hidden * mask, state.total + hidden.mean(-1, keepdim=True)), counts


class Relay(nn.Module):
    """Blocks in a list, called by keyword with what the model makes of its inputs, and a parameter used in between."""

    def __init__(self, width: int = 5, depth: int = 5) -> None:
        super().__init__()
        self.depths = nn.Parameter(torch.linspace(0.5, 1.5, depth))
        self.embed = nn.Linear(3, width)
        self.steps = nn.ModuleList(Carrier(width, ("add", "none")[i % 2]) for i in range(depth))
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, power: int = 1) -> dict[str, torch.Tensor]:
        first = self.embed(x)
        mask = (x.sum(-1, keepdim=True) > -1).to(x.dtype)
        state = Pair(first, first.new_zeros(*first.shape[:-1], 1))
        counts = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
        for number, step in enumerate(self.steps):
            state = Pair(state.hidden * self.depths[number], state.total)
            state, counts = step(state, first, mask=mask, power=power, mode=step.kind, counts=counts)
        return {"out": self.norm(state.hidden) + self.bias, "total": state.total * (1 + counts.unsqueeze(-1))}


class AroundBlocks(nn.Module):
    """The sum goes round the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class TwoTimes(nn.Module):
    """A block that uses one weight twice, one after the other, so that halves of a backward have to agree on it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.9))
        self.table = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.fc(x)) * self.scale
        y = self.fc(y) * self.scale + torch.sin(self.table)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 1.5)
        return y


def two_times(width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(TwoTimes(width) for _ in range(4)), nn.Linear(width, 3))


def _as_head(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, layer.weight)  # type: ignore[arg-type]


def tied_layers(width: int = 6) -> list[LayerSpec]:
    embedding = TiedSpec("words", nn.Embedding, 11, width)
    body = [LayerSpec(nn.Linear, width, width, bias=bool(i % 2)) for i in range(5)]
    return [
        embedding,
        *body,
        LayerSpec(nn.LayerNorm, width),
        TiedSpec("words", nn.Embedding, 11, width, forward=_as_head),
    ]


def llama(**options: Any) -> nn.Module:
    """Hugging Face's own, as it is: keyword arguments, rotary tables, masks, a cache, grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2, **options))
