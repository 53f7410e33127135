"""The models that every plan must leave as they are: small, but with everything that plans tend to break."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
import unisono.nn as unn
from unisono import quantum as uq

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Config


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(MLPBlock(16) for _ in range(4))
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class MLPBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.fc2(F.relu(self.fc1(x))))


def _vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(13, 12, generator=generator), torch.randint(5, (13,), generator=generator)


mlp = uni.Task(
    model=MLP,
    loss=F.cross_entropy,
    optimizer=_momentum,
    batch=_vectors,
    rules={"blocks.*.fc1": "column", "blocks.*.fc2": "row"},
    clip=0.5,
    name="mlp",
)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


def _images(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(11, 3, 8, 8, generator=generator), torch.randint(4, (11,), generator=generator)


conv = uni.Task(model=ConvNet, loss=F.cross_entropy, optimizer=_momentum, batch=_images, name="conv")


def _tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (9, 16), generator=generator)
    targets = torch.randint(32, (9, 16), generator=generator)
    targets[torch.rand(9, 16, generator=generator) < 0.3] = -100  # padding: other shares of it on every rank
    return tokens, targets


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt(layers: int = 4) -> nn.Module:
    return GPT(Config(vocabulary=32, context=16, width=16, heads=4, layers=layers, dropout=0.1))


GPT_RULES = {
    "blocks.*.attention": "heads:heads",
    "blocks.*.attention.qkv": "column:qkv",
    "blocks.*.attention.out": "row",
    "blocks.*.fc1": "column",
    "blocks.*.fc2": "row",
}

gpt = uni.Task(model=_gpt, loss=_token_loss, optimizer=_adam, batch=_tokens, rules=GPT_RULES, clip=0.3, name="gpt")
short = replace(gpt, model=partial(_gpt, layers=2), name="short")  # for plans that need no more than two stages


def _odd_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = _tokens(seed)
    return tokens % 31, torch.where(targets < 0, targets, targets % 31)


def _odd_gpt() -> nn.Module:
    return GPT(Config(vocabulary=31, context=16, width=16, heads=4, layers=2, dropout=0.1))


def _unlike_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sees logits in ways that need them in full."""
    chosen = logits.log_softmax(-1).flatten(0, 1).gather(1, targets.clamp(min=0).flatten()[:, None])[:, 0]
    counted = (targets != -100).flatten()
    return -(chosen * counted).sum() / counted.sum() + 1e-2 * (logits**2).mean()


def _reshaped_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As one predicts the next token, with the vocabulary's size written out."""
    shifted = logits[:, :-1, :].contiguous().view(-1, 31)
    return F.cross_entropy(shifted.float(), targets[:, 1:].reshape(-1), label_smoothing=0.1)


# The embedding and the tied head are shared by ranks that do not divide the vocabulary; logits stay in shards.
vocabulary = uni.Task(
    model=_odd_gpt,
    loss=_token_loss,
    optimizer=_adam,
    batch=_odd_tokens,
    rules=GPT_RULES | {"tokens": "vocab", "head": "column_gather"},
    clip=0.3,
    name="vocabulary",
)
vocabulary_reshaped = replace(vocabulary, loss=_reshaped_loss)
vocabulary_full = replace(vocabulary, loss=_unlike_cross_entropy)


def _even_vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = _vectors(seed)
    return inputs[:12], targets[:12]


mlp2 = uni.Task(model=MLP, loss=F.cross_entropy, optimizer=_momentum, batch=_even_vectors, rules=mlp.rules, name="mlp2")


class Tuned(MLP):
    """As models are fine-tuned: a part is frozen, one layer is not used, and one parameter is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


tuned = uni.Task(
    model=Tuned,
    loss=F.cross_entropy,
    optimizer=_momentum,
    batch=_vectors,
    rules={**mlp.rules, "unused": "column_gather"},
    clip=0.5,
    name="tuned",
)


class MoEBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.moe = unn.MoE(width, 2 * width, experts=4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


class MoEGPT(nn.Module):
    """A GPT whose every second layer is a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        config = Config(vocabulary=32, context=16, width=16, heads=4, layers=1, dropout=0.1)
        self.tokens = nn.Embedding(32, 16)
        self.positions = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(GPT(config).blocks[0], MoEBlock(16)) for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


moe = uni.Task(model=MoEGPT, loss=_token_loss, optimizer=_adam, batch=_tokens, name="moe")


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def _llama_batch(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    tokens, targets = _tokens(seed)
    return {"input_ids": tokens, "use_cache": False}, targets


def _llama_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return _token_loss(outputs.logits, targets)


llama = uni.Task(model=_llama, loss=_llama_loss, optimizer=_adam, batch=_llama_batch, name="llama")


def _circuit_net() -> nn.Module:
    """A circuit that measures in the middle, whose outputs and gradients are estimated from shots."""
    circuit = uq.Circuit(2, bits=1).ry(0, uq.feature(0)).cnot(0, 1).rx(1, uq.weight(0) + uq.feature(1)).measure(0, 0)
    circuit.apply("ry", 1, uq.weight(1), condition={0: 1}).rx(0, uq.weight(2))
    layer = uq.Layer(circuit, ["Z0", "X1"], dtype=torch.complex128, kernel="reference", shots=40)
    return nn.Sequential(nn.Linear(12, 2), layer, nn.Linear(2, 5))


circuit = uni.Task(model=_circuit_net, loss=F.cross_entropy, optimizer=_adam, batch=_vectors, name="circuit")
