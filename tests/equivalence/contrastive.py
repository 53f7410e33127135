"""Losses that compare all samples of a batch with each other, as tasks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.equivalence.foreign import SIZES, VOCABULARY, _adam

SAMPLES = 7


class Towers(nn.Module):
    """Two encoders and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def embeddings(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return *self.embeddings(x, y), self.scale.exp()


class Compared(Towers):
    """Compares the samples itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        left, right = self.embeddings(x, y)
        return self.scale.exp() * left @ right.T


class ComparedInAnotherWay(Towers):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.einsum("id,jd->ij", *self.embeddings(x, y))


def _pairs(seed: int) -> tuple[Any, None]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 8, generator=generator)), None


def _with_classes(seed: int) -> tuple[Any, torch.Tensor]:
    return _pairs(seed)[0], torch.arange(SAMPLES) % 3


def _both_ways(logits: torch.Tensor, targets: Any = None) -> torch.Tensor:
    right = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def info_nce(outputs: Any, targets: Any) -> torch.Tensor:
    left, right, scale = outputs
    return _both_ways(scale * left @ right.T)


def supervised(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Samples of one class attract each other."""
    left, right, scale = outputs
    alike = (targets[:, None] == targets[None]).to(left.dtype)
    return -((scale * left @ right.T).log_softmax(-1) * alike).sum() / alike.sum()


def _own(outputs: Any, targets: Any) -> torch.Tensor:
    return outputs.loss


def _dual(model: str, config: str) -> nn.Module:
    import transformers

    sizes: Any = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    sizes |= {"num_attention_heads": 4}
    text = sizes | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
    made = getattr(transformers, config)(
        text_config=text | {"pad_token_id": 1},
        vision_config=sizes | {"image_size": 12, "patch_size": 4},
        **({"projection_dim": 8} if "CLIP" in config else {}),
        attn_implementation="sdpa",
    )
    return getattr(transformers, model)(made)


def _images(seed: int) -> tuple[dict[str, Any], None]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (SAMPLES, 9), generator=generator)
    pixels = torch.randn(SAMPLES, 3, 12, 12, generator=generator)
    return {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}, None


towers = uni.Task(Towers, uni.BatchLoss(info_nce), _adam, _pairs)
classes = uni.Task(Towers, uni.BatchLoss(supervised), _adam, _with_classes)
compared = uni.Task(Compared, uni.BatchLoss(_both_ways), _adam, _pairs)
otherwise = uni.Task(ComparedInAnotherWay, uni.BatchLoss(_both_ways), _adam, _pairs)
plain = uni.Task(Towers, info_nce, _adam, _pairs)
clip = uni.Task(lambda: _dual("CLIPModel", "CLIPConfig"), uni.BatchLoss(_own), _adam, _images)
siglip = uni.Task(lambda: _dual("SiglipModel", "SiglipConfig"), uni.BatchLoss(_own), _adam, _images)
