"""Models that compute the loss themselves, from labels among their inputs, as tasks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.equivalence.foreign import GROUPED, LENGTH, SIZES, VOCABULARY, _adam

SAMPLES = 6


def own_loss(outputs: Any, targets: Any) -> torch.Tensor:
    return outputs.loss


def _labelled(seed: int) -> tuple[dict[str, Any], None]:
    """Labels of which samples, and so ranks and microbatches, have different numbers that count."""
    tokens = torch.randint(2, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    for sample in range(SAMPLES):
        labels[sample, : 2 * sample % 7] = -100
    return {"input_ids": tokens, "labels": labels}, None


def _with_targets(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, _ = _labelled(seed)
    return inputs, inputs["labels"]


def _sentences(seed: int) -> tuple[dict[str, Any], None]:
    inputs, _ = _labelled(seed)
    return inputs | {"labels": inputs["input_ids"][:, 3] % 3}, None


def _scores(seed: int) -> tuple[dict[str, Any], None]:
    inputs, _ = _labelled(seed)
    return inputs | {"labels": inputs["input_ids"][:, 3].float() / 10}, None


def _spans(seed: int) -> tuple[dict[str, Any], None]:
    inputs, _ = _labelled(seed)
    tokens = inputs["input_ids"]
    return {"input_ids": tokens, "start_positions": tokens[:, 1] % 9, "end_positions": tokens[:, 2] % 9}, None


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**GROUPED, use_cache=False))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def _bert_of(head: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**SIZES, **options))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, **sizes, pad_token_id=0, decoder_start_token_id=0, use_cache=False)
    )


def _mixtral(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**GROUPED, **experts, use_cache=False, **options))


class Nano(nn.Module):
    """In the style of small GPTs written by hand: forward(tokens, targets) gives logits and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.logits(tokens)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class DividedByHand(Nano):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        summed = F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return None, summed / len(targets)


class Counting(Nano):
    """Divides by a count that it makes of another input."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        losses = F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        kept = (tokens > 5).flatten()
        return None, (losses * kept).sum() / kept.sum()


class Reading(Nano):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        summed = F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return None, summed / (labels != -100).sum().item()


class WithoutLabels(Nano):
    def forward(self, tokens: torch.Tensor) -> Any:  # type: ignore[override]
        return None, self.logits(tokens).square().mean()


def _second(outputs: Any, targets: Any) -> torch.Tensor:
    return outputs[1]


def _pair(seed: int) -> tuple[tuple[torch.Tensor, ...], None]:
    inputs, _ = _labelled(seed)
    return (inputs["input_ids"], inputs["labels"]), None


def _tokens(seed: int) -> tuple[torch.Tensor, None]:
    return _labelled(seed)[0]["input_ids"], None


def _lengths(seed: int) -> tuple[dict[str, Any], None]:
    """Batches of another length in every step."""
    inputs, _ = _labelled(seed)
    return {name: tensor[:, : LENGTH - 2 * seed] for name, tensor in inputs.items()}, None


lengths = uni.Task(_llama, own_loss, _adam, _lengths)
llama = uni.Task(_llama, own_loss, _adam, _labelled)
llama_with_targets = uni.Task(_llama, own_loss, _adam, _with_targets)
gpt2 = uni.Task(_gpt2, own_loss, _adam, _labelled)
bert = uni.Task(lambda: _bert_of("MaskedLM"), own_loss, _adam, _labelled)
classifier = uni.Task(lambda: _bert_of("SequenceClassification", num_labels=3), own_loss, _adam, _sentences)
regression = uni.Task(lambda: _bert_of("SequenceClassification", num_labels=1), own_loss, _adam, _scores)
answers = uni.Task(lambda: _bert_of("QuestionAnswering"), own_loss, _adam, _spans)
t5 = uni.Task(_t5, own_loss, _adam, _labelled)
mixtral = uni.Task(_mixtral, own_loss, _adam, _labelled)
router = uni.Task(lambda: _mixtral(output_router_logits=True, router_aux_loss_coef=0.5), own_loss, _adam, _labelled)
nano = uni.Task(Nano, _second, _adam, _pair)
divided_by_hand = uni.Task(DividedByHand, _second, _adam, _pair)
counting = uni.Task(Counting, _second, _adam, _pair)
reading = uni.Task(Reading, _second, _adam, _labelled)
without_labels = uni.Task(WithoutLabels, _second, _adam, _tokens)
