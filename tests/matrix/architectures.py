"""Hugging Face architectures, small, from configs with random weights: each as its library builds it by default.

`task(name)` is the training job of one of them. Models are built as a user would build them: attention, experts and
dropout are what the config's defaults say, only the sizes are small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

Batch = tuple[dict[str, Any], Any]

SAMPLES = 4
LENGTH = 8
VOCABULARY = 48
CLASSES = 3
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = BASE | {"num_key_value_heads": 2, "head_dim": 4}
EXPERTS = GROUPED | {"num_experts_per_tok": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
DECODER = "decoders"
ENCODER = "encoders"
MIXTURE = "mixtures of experts"
PAIRED = "encoder-decoders"
IMAGES = "vision"
AUDIO = "audio"
STATE_SPACE = "state space"


# ---- batches and losses ----------------------------------------------------------------------------------------------


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, length), generator=generator)


def _partly_ignored(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    targets = _tokens(generator, length)
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return targets


def sentences(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "use_cache": False}, _partly_ignored(generator)


def padded_sentences(generator: torch.Generator) -> Batch:
    """For encoders: sentences of different lengths, with the mask that a tokenizer gives."""
    tokens, targets = _tokens(generator), _partly_ignored(generator)
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}, targets.masked_fill(mask == 0, -100)


def unpadded_sentences(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator)}, _partly_ignored(generator)


def labelled_sentences(generator: torch.Generator) -> Batch:
    """As `Trainer` passes them: the model computes the loss itself."""
    return {"input_ids": _tokens(generator), "labels": _partly_ignored(generator), "use_cache": False}, None


def translations(generator: torch.Generator) -> Batch:
    inputs = {"input_ids": _tokens(generator), "decoder_input_ids": _tokens(generator), "use_cache": False}
    return inputs, _partly_ignored(generator)


def images(generator: torch.Generator, size: int = 16) -> Batch:
    pixels = torch.randn(SAMPLES, 3, size, size, generator=generator)
    return {"pixel_values": pixels}, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def captioned_images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    tokens = _tokens(generator)
    tokens[:, -1] = 2
    return {"pixel_values": pixels, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, torch.zeros(
        SAMPLES
    )


def waves(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(SAMPLES, 400, generator=generator)}, torch.randint(
        CLASSES, (SAMPLES,), generator=generator
    )


def spectrograms(generator: torch.Generator) -> Batch:
    sounds = torch.randn(SAMPLES, 8, 32, generator=generator)
    inputs = {"input_features": sounds, "decoder_input_ids": _tokens(generator), "use_cache": False}
    return inputs, _partly_ignored(generator)


def token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def class_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)


def own_loss(outputs: Any, _: Any) -> torch.Tensor:
    return outputs.loss  # type: ignore[no-any-return]


def contrastive_loss(outputs: Any, _: Any) -> torch.Tensor:
    logits = outputs.logits_per_text
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


# ---- the architectures -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    kind: str
    config: str  # names in transformers
    model: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Any], torch.Tensor]
    nested: dict[str, dict[str, Any]] = field(default_factory=dict)  # configs inside of the config, as dictionaries

    def build(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**self.sizes, **self.nested)
        return getattr(transformers, self.model)(config)  # type: ignore[no-any-return]


def _decoder(name: str, sizes: dict[str, Any], kind: str = DECODER, head: str = "ForCausalLM") -> Architecture:
    return Architecture(kind, f"{name}Config", f"{name}{head}", SPECIAL | sizes, sentences, token_loss)


def _encoder(name: str, sizes: dict[str, Any]) -> Architecture:
    return Architecture(ENCODER, f"{name}Config", f"{name}ForMaskedLM", SPECIAL | sizes, padded_sentences, token_loss)


def _pair(name: str, model: str, sizes: dict[str, Any]) -> Architecture:
    special = SPECIAL | {"decoder_start_token_id": 1}
    return Architecture(PAIRED, f"{name}Config", model, special | sizes, translations, token_loss)


def _image(name: str, sizes: dict[str, Any]) -> Architecture:
    classes = {"num_labels": CLASSES}
    return Architecture(IMAGES, f"{name}Config", f"{name}ForImageClassification", sizes | classes, images, class_loss)


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _encoder("Bert", BASE),
    "roberta": _encoder("Roberta", BASE),
    "deberta": _encoder("Deberta", BASE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta-v2": _encoder("DebertaV2", BASE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "electra": _encoder("Electra", BASE | {"embedding_size": 8}),
    "albert": _encoder("Albert", BASE | {"embedding_size": 8}),
    "distilbert": _encoder(
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 4}
        | {"max_position_embeddings": 32},
    ),
    "modernbert": _encoder("ModernBert", BASE | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}),
    "gpt2": _decoder("GPT2", GPT, head="LMHeadModel"),
    "gpt-neo": _decoder(
        "GPTNeo",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 4}
        | {"max_position_embeddings": 32, "attention_types": [[["global", "local"], 1]]},
    ),
    "gpt-neox": _decoder("GPTNeoX", BASE),
    "gptj": _decoder("GPTJ", GPT | {"rotary_dim": 4}),
    "llama": _decoder("Llama", GROUPED),
    "llama-labels": Architecture(
        DECODER, "LlamaConfig", "LlamaForCausalLM", SPECIAL | GROUPED, labelled_sentences, own_loss
    ),
    "mistral": _decoder("Mistral", GROUPED | {"sliding_window": 4}),
    "qwen2": _decoder("Qwen2", BASE | {"num_key_value_heads": 2}),
    "qwen3": _decoder("Qwen3", GROUPED),
    "gemma": _decoder("Gemma", GROUPED),
    "gemma2": _decoder("Gemma2", GROUPED | {"sliding_window": 4, "query_pre_attn_scalar": 4}),
    "gemma3": Architecture(
        DECODER,
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        SPECIAL | GROUPED | {"sliding_window": 4},
        sentences,
        token_loss,
    ),
    "phi": _decoder("Phi", BASE),
    "phi3": _decoder("Phi3", BASE | {"num_key_value_heads": 2}),
    "olmo2": _decoder("Olmo2", BASE | {"num_key_value_heads": 2}),
    "glm4": _decoder("Glm4", GROUPED),
    "falcon": _decoder(
        "Falcon", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    ),
    "opt": _decoder(
        "OPT",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"max_position_embeddings": 32, "word_embed_proj_dim": 16},
    ),
    "bloom": _decoder("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "mixtral": _decoder("Mixtral", EXPERTS | {"num_local_experts": 4}, MIXTURE),
    "qwen3-moe": _decoder("Qwen3Moe", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}, MIXTURE),
    "deepseek-v3": _decoder(
        "DeepseekV3",
        BASE
        | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
        MIXTURE,
    ),
    "gpt-oss": _decoder("GptOss", EXPERTS | {"num_local_experts": 4, "sliding_window": 4}, MIXTURE),
    "t5": _pair(
        "T5",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4},
    ),
    "bart": _pair("Bart", "BartForConditionalGeneration", SEQ2SEQ),
    "marian": _pair("Marian", "MarianMTModel", SEQ2SEQ),
    "vit": _image("ViT", VISION),
    "beit": _image("Beit", VISION | {"use_relative_position_bias": True}),
    "swin": _image(
        "Swin",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "resnet": _image("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}),
    "mobilenet-v2": _image("MobileNetV2", {"image_size": 16}),  # its last BatchNorms normalise four values each
    "convnext": _image("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 2}),
    "clip": Architecture(
        IMAGES,
        "CLIPConfig",
        "CLIPModel",
        {"projection_dim": 8},
        captioned_images,
        contrastive_loss,
        {"text_config": SPECIAL | BASE, "vision_config": VISION},
    ),
    "wav2vec2": Architecture(
        AUDIO,
        "Wav2Vec2Config",
        "Wav2Vec2ForSequenceClassification",
        BASE
        | {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
        | {"num_labels": CLASSES, "mask_time_prob": 0.0, "layerdrop": 0.0},
        waves,
        class_loss,
    ),
    "whisper": Architecture(
        AUDIO,
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        SPECIAL
        | {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
        | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "decoder_start_token_id": 1}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
        spectrograms,
        token_loss,
    ),
    "mamba": Architecture(
        STATE_SPACE,
        "MambaConfig",
        "MambaForCausalLM",
        SPECIAL | {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        sentences,
        token_loss,
    ),
    "mamba2": Architecture(
        STATE_SPACE,
        "Mamba2Config",
        "Mamba2ForCausalLM",
        SPECIAL
        | {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4}
        | {"head_dim": 8, "n_groups": 2, "chunk_size": 4},
        sentences,
        token_loss,
    ),
}


@functools.cache
def task(name: str) -> uni.Task:
    architecture = ARCHITECTURES[name]

    def batch(seed: int) -> Batch:
        return architecture.batch(torch.Generator().manual_seed(seed))

    return uni.Task(architecture.build, architecture.loss, adam, batch, clip=1.0, name=name)
