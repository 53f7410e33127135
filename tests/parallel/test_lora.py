"""Models with LoRA adapters of peft under tensor parallelism: base weights and adapters are sharded, and train as on
one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.layout import layout_of
from unisono.parallel.rules.sharded_dims import sharded_dims
from unisono.parallel.task import Task
from unisono.parallel.tensor.coverage import coverage
from unisono.parallel.tensor.tensor_parallel import fitting_rules, require_shareable
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

Pools = Callable[[str, int], RankPool]
VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = SIZES | {"num_key_value_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def tied_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=4))


def gpt2() -> Any:
    """Has Conv1D layers, with queries, keys and values in one, and no published plan."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **NO_DROPOUT))


def bert() -> Any:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **options))


def deepseek() -> Any:
    options: dict[str, Any] = {
        "kv_lora_rank": 6, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
        "n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "experts_implementation": "eager",
    }  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **options))


def mixtral() -> Any:
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, **options))


def adapted(build: Callable[[], Any], targets: Any = "all-linear", **options: Any) -> Any:
    """B is not zero, or A would have no gradient; no tp divides r."""
    config = {"r": 3, "lora_alpha": 7, "init_lora_weights": False, "target_modules": targets} | options
    return peft.get_peft_model(build(), peft.LoraConfig(**config))


def batch(seed: int, samples: int = 2) -> tuple[Any, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (samples, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens}, tokens


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def task_of(build: Callable[[], nn.Module], samples: int = 2, **options: Any) -> Task:
    return Task(build, loss, partial(torch.optim.AdamW, lr=1e-2), partial(batch, samples=samples), **options)


def proved(comm: Communicator, build: Callable[[], nn.Module], plan: str) -> None:
    samples = 4 if "dp" in plan or "microbatches" in plan else 2
    verdict = verify_here(comm, task_of(build, samples), Plan.parse(plan), 2)
    assert verdict.equivalent, verdict


def sharded(model: nn.Module) -> dict[str, int]:
    """The dims along which tp=2 shards parameters."""
    styles = require_shareable(model, 2, fitting_rules(model, 2, None, batch(0)))
    return {name: each.dim for name, each in sharded_dims(model, styles).items()}


DROPPED = {"lora_dropout": 0.3}
QV = ["q_proj", "v_proj"]
CONV1D = {"fan_in_fan_out": True}


def several() -> Any:
    """Two adapters that are active, of which one is on some layers only, and a third that is not."""
    model = adapted(llama, **DROPPED)
    for name in ("second", "third"):
        model.add_adapter(name, peft.LoraConfig(r=2, target_modules=QV, init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


TRAINED = {
    "attention tp": (partial(adapted, llama, QV), "tp=2"),
    "all-linear tp": (partial(adapted, llama, **DROPPED), "tp=2"),
    "all-linear sp": (partial(adapted, llama, **DROPPED), "tp=2,sp"),
    "attention sp": (partial(adapted, llama, QV, **DROPPED), "tp=2,sp"),
    "zero": (partial(adapted, llama, **DROPPED), "dp=2,tp=2,zero=3"),
    "pipeline": (partial(adapted, tied_llama, **DROPPED), "pp=2,tp=2,microbatches=2"),
    "dp": (partial(adapted, qwen3, **DROPPED), "dp=2,tp=2"),
    "recomputation": (partial(adapted, qwen3, **DROPPED), "tp=2,sp,recompute=full"),
    "gpt2 attention": (partial(adapted, gpt2, ["c_attn"], **DROPPED, **CONV1D), "tp=2"),
    "gpt2 sp": (partial(adapted, gpt2, lora_bias=True, **DROPPED, **CONV1D), "tp=2,sp"),
    "bert": (partial(adapted, bert, bias="all", lora_bias=True, **DROPPED), "tp=2"),
    "several adapters": (several, "tp=2"),
    "saved modules": (partial(adapted, llama, ["v_proj"], modules_to_save=["q_proj", "lm_head"]), "tp=2"),
    "embedding": (partial(adapted, tied_llama, ["q_proj", "embed_tokens"]), "tp=2"),
    "head": (partial(adapted, llama, ["q_proj", "lm_head"], use_rslora=True, **DROPPED), "tp=2"),
    "latent attention": (partial(adapted, deepseek, ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], **DROPPED), "tp=2"),
    "DoRA": (partial(adapted, llama, QV, use_dora=True), "tp=2"),
    "trained tokens": (partial(adapted, tied_llama, QV, trainable_token_indices=[1, 5]), "tp=2"),
    "experts": (partial(adapted, mixtral, ["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]), "tp=2"),
}


THOROUGH = ("attention sp", "zero", "pipeline", "recomputation", "embedding", "head")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in TRAINED]
)
def test_trains_as_the_plain_model(pools: Pools, name: str) -> None:
    build, plan = TRAINED[name]
    pools("gloo", Plan.parse(plan).world).run(proved, build, plan)


# ---- what is sharded -------------------------------------------------------------------------------------------------


def of_layers(dims: dict[str, int], *layers: str) -> dict[str, int]:
    """Those of a layer of the second block, by the names of their parts."""
    return {
        name.partition(f".1.{layer}.")[2]: dim
        for layer in layers
        for name, dim in dims.items()
        if f".1.{layer}." in name
    }


@pytest.mark.parametrize("build", [llama, tied_llama, qwen3])
def test_published_plans_are_for_models_with_adapters(build: Callable[[], Any]) -> None:
    model, plain = adapted(build), sharded(build())
    dims = sharded(model)
    column = {"base_layer.weight": 0, "lora_B.default.weight": 0}
    row = {"base_layer.weight": 1, "lora_A.default.weight": 1}
    for layer in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert of_layers(dims, layer) == column, layer
    for layer in ("self_attn.o_proj", "mlp.down_proj"):
        assert of_layers(dims, layer) == row, layer
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): dim for name, dim in dims.items()}
    assert {name: dim for name, dim in base.items() if "lora" not in name} == plain


def test_layers_that_no_plan_names_are_inferred_with_their_adapters() -> None:
    dims = sharded(adapted(gpt2, lora_bias=True, **CONV1D))
    assert of_layers(dims, "attn.c_attn", "mlp.c_fc") == {
        "base_layer.weight": 1, "base_layer.bias": 0, "lora_B.default.weight": 0, "lora_B.default.bias": 0
    }  # fmt: skip
    assert of_layers(dims, "attn.c_proj", "mlp.c_proj") == {"base_layer.weight": 0, "lora_A.default.weight": 1}


def test_the_share_that_is_reported_is_that_of_all_parameters() -> None:
    model = adapted(llama)
    covered = coverage(model, require_shareable(model, 2), 2, batch(0))
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    full = [
        name for name in sizes
        if "norm" in name or ("lora_A" in name and not ("o_proj" in name or "down_proj" in name))
        or ("lora_B" in name and ("o_proj" in name or "down_proj" in name))
    ]  # fmt: skip
    assert covered.parameters == pytest.approx(1 - sum(sizes[name] for name in full) / sum(sizes.values()))
    assert covered.parameters > 0.85
    assert "largest module left replicated" in str(covered)
    assert "the factor of an adapter that every rank needs in full" in str(covered)


def test_a_layer_with_an_adapter_that_is_left_replicated_is_named_with_the_reason() -> None:
    model = adapted(llama, ["q_proj", "lm_head"])
    covered = coverage(model, require_shareable(model, 2, {"*.lm_head": "replicate"}), 2, None)
    assert "lm_head.base_layer" in covered.largest
    assert covered.reason == 'its rule is "replicate"'


def merged() -> Any:
    model = adapted(llama)
    model.merge_adapter()
    return model


def hooked() -> Any:
    model = adapted(llama)
    model.base_model.model.model.layers[1].mlp.up_proj.lora_A["default"].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("build", [partial(adapted, llama, use_dora=True), merged], ids=["DoRA", "merged"])
def test_other_adapters_are_not_sharded_by_the_plan_of_the_base_model(build: Callable[[], Any]) -> None:
    model = build()
    with pytest.raises(UsageError, match="q_proj has an adapter that is not sharded, and no layers are left"):
        require_shareable(model, 2)


def test_a_hook_on_a_part_of_an_adapter_keeps_the_layer_full() -> None:
    """It is written for full tensors. The other block is sharded as ever."""
    styles = require_shareable(hooked(), 2)
    assert any(".layers.0.mlp.up_proj" in name for name in styles)
    assert not any(".layers.1.mlp" in name for name in styles)


# ---- what is trained -------------------------------------------------------------------------------------------------


def frozen(comm: Communicator, plan: str, precision: str) -> list[float]:
    model = partial(adapted, llama, **DROPPED)
    torch.manual_seed(0)
    before = model().state_dict()
    engine = uni.Engine(model, loss=loss, optimizer=partial(torch.optim.AdamW, lr=1e-2), plan=plan, precision=precision)
    data = [({"input_ids": row}, row) for row in batch(3, 8)[1]]
    losses = engine.fit(data, batch_size=4, epochs=2, shuffle=False, progress=False).losses
    named = dict(engine.ready.model.named_parameters())
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    assert trained == {name for name in before if "lora_" in name}
    assert len(engine.ready.optimizer.state) == len(trained)
    for name, parameter in named.items():
        mine = before[name]
        for split in layout_of(parameter).splits:
            mine = mine.index_select(split.dim, torch.tensor(list(split.held[comm.rank])))
        assert name in trained or torch.equal(parameter, mine), f"{name} was frozen, and differs"
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_alone_are_trained(pools: Pools, precision: str) -> None:
    expected = pools("gloo", 1).run(frozen, "dp=1", precision)[0]
    losses = pools("gloo", 2).run(frozen, "tp=2", precision)[0]
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.02)
    assert losses[:2] != losses[2:]  # of the same batches
