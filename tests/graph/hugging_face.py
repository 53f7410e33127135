"""The seven Hugging Face models, tiny, from a config, as they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "use_cache": False}
NAMES = ("llama", "qwen2", "gpt2", "bert", "vit", "mixtral", "t5")


def model(name: str, **sizes: Any) -> nn.Module:
    import transformers as hf

    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED | sizes))
    if name == "qwen2":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED | sizes))
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED | {"num_local_experts": 4} | sizes))
    if name == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES | {"use_cache": False} | sizes))
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**SIZES | sizes))
    if name == "vit":
        kept = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        shape = {"image_size": 12, "patch_size": 4, "num_labels": 4, "hidden_dropout_prob": 0.1}
        return hf.ViTForImageClassification(hf.ViTConfig(**kept | shape, num_attention_heads=4))
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def batch(name: str, rows: int = 4, length: int = 8) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        images = torch.randn(rows, 3, 12, 12, generator=generator)
        return {"pixel_values": images}, torch.randint(4, (rows,), generator=generator)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = -100
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens.flip(1)} if name == "t5" else {}), targets


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, -2), targets.flatten())
