"""Hugging Face models under tensor and sequence parallelism, from their own plans or by their classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.training import check_training
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.rules import published as published_rules
from unisono.parallel.rules.rules import published
from unisono.parallel.task import Task
from unisono.parallel.tensor.rule_checks import require_sound
from unisono.parallel.tensor.tensor_parallel import fitting_rules, styles_of
from unisono.plan.plan import Plan
from unisono.verify.float64 import Float64Mode
from unisono.verify.verify import verify_here

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Pools = Callable[[str, int], RankPool]
VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 16,
    "attn_implementation": "sdpa",
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 4}
EAGER = {"attn_implementation": "eager"}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def tied_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True))


def qwen2() -> nn.Module:
    """Has biases on queries, keys and values."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED))


def qwen3() -> nn.Module:
    """Has norms of single heads, whose gradients are computed in parts."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=4))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **GROUPED, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )
    return transformers.MixtralForCausalLM(config)


def gemma() -> nn.Module:
    """Its embedding is a class of its own, which scales what it looks up; the head is tied to it."""
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**GROUPED, head_dim=4))


def gemma2() -> nn.Module:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GROUPED | EAGER, head_dim=4))


def gemma3() -> nn.Module:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GROUPED, head_dim=4))


def gpt2() -> nn.Module:
    """Has Conv1D layers, queries, keys and values in one, and a tied head."""
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **options))


def bert() -> nn.Module:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **options))


def sentences() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 9))


def next_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    options = {} if "Bert" in type(model).__name__ else {"use_cache": False}
    with Float64Mode():
        logits = model(input_ids=tokens, **options).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


MODELS = [llama, tied_llama, qwen2, qwen3, mixtral, gemma, gemma2, gemma3, gpt2, bert]
SHARDED = {
    llama: ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"],
    tied_llama: ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"],
    qwen2: ["model.layers.0.self_attn.q_proj.bias"],
    qwen3: ["model.layers.0.self_attn.q_proj.weight"],
    mixtral: ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"],
    gemma: ["model.embed_tokens.weight"],
    gemma2: ["model.embed_tokens.weight"],
    gemma3: ["model.embed_tokens.weight"],
    gpt2: ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight"],
    bert: ["bert.encoder.layer.0.attention.self.query.bias", "bert.encoder.layer.1.output.dense.weight"],
}


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("build", MODELS)
def test_trains_as_the_plain_model(pools: Pools, build: Callable[[], nn.Module], sequence: bool) -> None:
    found = pools("gloo", 4).run(check_training, build, sentences, next_tokens, None, sequence)[0]
    assert set(SHARDED[build]) <= set(found["sharded"])
    if "model.embed_tokens" in (published(build()) or {}):  # transformers 5.17's plan leaves Llama's whole, 5.22's not
        assert "model.embed_tokens.weight" in found["sharded"]


LATENT: dict[str, Any] = {
    "kv_lora_rank": 6, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "n_group": 2,
    "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "experts_implementation": "eager",
}  # fmt: skip


def deepseek_v2() -> nn.Module:
    """Latent attention: a key that all heads share goes past the layers that are sharded."""
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**SIZES, **LATENT))


def deepseek_v3() -> nn.Module:
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **LATENT))


def llama4() -> nn.Module:
    """Expert weights (experts, inputs, outputs), gate and up in one."""
    options = {"intermediate_size_mlp": 20, "num_local_experts": 4, "head_dim": 4, "experts_implementation": "eager"}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**GROUPED, **options))


SHARDED_BY_TWO = {
    deepseek_v2: ["model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"],
    deepseek_v3: ["model.layers.1.mlp.experts.gate_up_proj"],
    llama4: ["model.layers.1.feed_forward.experts.gate_up_proj", "model.layers.1.feed_forward.experts.down_proj"],
}


@pytest.mark.parametrize("build", SHARDED_BY_TWO)
def test_mixtures_and_latent_attention(pools: Pools, build: Callable[[], nn.Module]) -> None:
    found = pools("gloo", 2).run(check_training, build, sentences, next_tokens)[0]
    assert set(SHARDED_BY_TWO[build]) <= set(found["sharded"])


def test_heads_that_tp_does_not_divide() -> None:
    model = llama()
    with pytest.raises(UsageError, match="k_proj has 4 heads of 4, which tp=8 does not divide"):
        require_sound(model, styles_of(model, 8), 8)


def test_a_plan_that_is_not_known() -> None:
    model = llama()
    model._tp_plan = {"model.layers.*.self_attn.q_proj": "all_reduce"}
    with pytest.raises(UsageError, match=r"own tensor-parallel plan has 'all_reduce' for .* pass rules"):
        styles_of(model, 2)


# ---- plans that leave something out, or do not hold ------------------------------------------------------------------


def test_a_plan_that_is_not_known_gives_way_to_inferred_rules() -> None:
    model = llama()
    model._tp_plan = {"model.layers.*.mlp": "all_reduce"}
    rules = fitting_rules(model, 2, None, ({"input_ids": sentences(), "use_cache": False}, sentences()))
    assert rules is not None
    assert rules["model.layers.*.mlp.down_proj"] == rules["model.layers.*.self_attn.o_proj"] == "row"


class LearnedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) + self.slope * x


def with_a_learned_activation() -> nn.Module:
    """As Apertus has it: between layers of the published plan, which does not name it."""
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = LearnedActivation()
    return model


def doge() -> nn.Module:
    """Its attention adds a mask that it makes of the values of all heads."""
    return transformers.DogeForCausalLM(transformers.DogeConfig(**GROUPED))


def proved(comm: Communicator, build: Callable[[], nn.Module], plan: str) -> None:
    def batch(seed: int) -> tuple[Any, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "use_cache": False}, tokens

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    task = Task(build, loss, partial(torch.optim.AdamW, lr=1e-2), batch)
    verdict = verify_here(comm, task, Plan.parse(plan), 2)
    assert verdict.equivalent, verdict


def mimo() -> nn.Module:
    """Its plan shards a number for each head, the attention's sinks."""
    options = {
        "head_dim": 4,
        "v_head_dim": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    }
    return transformers.MiMoV2FlashForCausalLM(transformers.MiMoV2FlashConfig(**GROUPED | EAGER | options))


@pytest.mark.parametrize("build", [with_a_learned_activation, doge, mimo])
def test_a_published_plan_is_tried(pools: Pools, build: Callable[[], nn.Module]) -> None:
    pools("gloo", 2).run(proved, build, "tp=2")


def test_a_learned_activation_in_a_large_model_is_found_by_its_data_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = with_a_learned_activation(), ({"input_ids": sentences(), "use_cache": False}, sentences())
    by_trial = fitting_rules(model, 2, None, example)
    assert by_trial is not None
    assert by_trial["model.layers.1.mlp.act_fn.slope"] == "summed"
    monkeypatch.setattr(published_rules, "_FLOPS", 0)
    assert fitting_rules(model, 2, None, example) == by_trial


@pytest.mark.parametrize("build", [llama, qwen3, gemma2, mixtral])
@pytest.mark.parametrize("caches", [True, False])
def test_a_plan_that_holds_is_used_as_it_is(build: Callable[[], nn.Module], caches: bool) -> None:
    """Eager attention (gemma2) returns its weights as well; a cache is written to whenever a module runs."""
    assert fitting_rules(build(), 2, None, ({"input_ids": sentences(), "use_cache": caches}, sentences())) is None


def deepseek_v4() -> nn.Module:
    """Its first layers choose experts by the ids of all tokens."""
    options = {"head_dim": 8, "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 12}
    return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**SIZES | EAGER | options))


def refusal(comm: Communicator, build: Callable[[], nn.Module], plan: str) -> str:
    try:
        proved(comm, build, plan)
    except UsageError as error:
        return str(error)
    return ""


def test_a_block_that_fails_on_a_share_of_the_tokens_is_refused(pools: Pools) -> None:
    for text in pools("gloo", 2).run(refusal, deepseek_v4, "tp=2,sp"):
        assert "sp: block model.layers.0 fails where this rank has some of the 9 tokens" in text
        assert "leave sp out" in text
