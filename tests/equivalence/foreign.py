"""Tiny Hugging Face models as they are, as tasks: norms, rotary tables, routers and softmaxes round to float32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni

VOCABULARY = 37
LENGTH = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "attn_implementation": "sdpa",
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 2}


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=True))


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**GROUPED))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**GROUPED, **experts))


def _qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **experts, experts_implementation="eager"))


def _deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts: Any = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2}
    experts |= {"topk_group": 1, "first_k_dense_replace": 1, "experts_implementation": "eager"}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    sizes = GROUPED | {"num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **experts, **heads))


def _gpt_oss() -> nn.Module:
    """Its attention has sinks, which SDPA has not; its experts have biases and transposed weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "experts_implementation": "eager"}
    sizes = GROUPED | {"attn_implementation": "eager"}
    return GptOssForCausalLM(GptOssConfig(**sizes, **experts))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**SIZES))  # with its dropouts of 0.1


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES))


def _bert_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"image_size": 12, "patch_size": 4, "num_labels": 3}
    kept = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return ViTForImageClassification(
        ViTConfig(**kept, **shape, num_attention_heads=4, attn_implementation="sdpa", hidden_dropout_prob=0.1)
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dropout=0.1,
        attention_dropout=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return BartForConditionalGeneration(config)


def _sentences(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (5, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (5, LENGTH), generator=generator)
    targets[torch.rand(5, LENGTH, generator=generator) < 0.3] = -100
    return {"input_ids": tokens}, targets


def _pairs_of_sentences(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, targets = _sentences(seed)
    return inputs | {"decoder_input_ids": inputs["input_ids"].flip(1)[:, :9], "use_cache": False}, targets[:, :9]


def _padded_pairs_of_sentences(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, targets = _pairs_of_sentences(seed)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, LENGTH - 4 :] = 0
    return inputs | {"attention_mask": mask}, targets


def _labelled_sentences(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, targets = _sentences(seed)
    return inputs, targets[:, 0].clamp(min=0) % 3


def _images(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(5, 3, 12, 12, generator=generator)}, torch.randint(3, (5,), generator=generator)


def _token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def _label_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits, targets)


def _of_tokens(name: str, model: Any, **options: Any) -> uni.Task:
    def batch(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
        inputs, targets = _sentences(seed)
        return inputs | options, targets

    return uni.Task(model=model, loss=_token_loss, optimizer=_adam, batch=batch, clip=0.5, name=name)


llama = _of_tokens("llama", _llama, use_cache=False)
qwen2 = _of_tokens("qwen2", _qwen2, use_cache=False)
mixtral = _of_tokens("mixtral", _mixtral, use_cache=False)
qwen3_moe = _of_tokens("qwen3_moe", _qwen3_moe, use_cache=False)
deepseek_v3 = _of_tokens("deepseek_v3", _deepseek_v3, use_cache=False)
gpt_oss = _of_tokens("gpt_oss", _gpt_oss, use_cache=False)
gpt2 = _of_tokens("gpt2", _gpt2, use_cache=False)
bert = _of_tokens("bert", _bert)
bert_classifier = uni.Task(
    model=_bert_classifier, loss=_label_loss, optimizer=_adam, batch=_labelled_sentences, name="bert_classifier"
)
vit = uni.Task(model=_vit, loss=_label_loss, optimizer=_adam, batch=_images, name="vit")
t5 = uni.Task(model=_t5, loss=_token_loss, optimizer=_adam, batch=_pairs_of_sentences, name="t5")
bart = uni.Task(model=_bart, loss=_token_loss, optimizer=_adam, batch=_padded_pairs_of_sentences, name="bart")


def _next_token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def _first_tokens_ignored(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, targets = _sentences(seed)
    targets[:, :3] = -100
    return inputs | {"use_cache": False}, targets


next_token = uni.Task(_llama, _next_token_loss, _adam, _first_tokens_ignored)
