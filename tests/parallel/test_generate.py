"""generate() of Hugging Face models under a plan gives the tokens of one device, with its cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build
from unisono.parallel.apply import parallelize
from unisono.parallel.trainer import Trainer

Pools = Callable[[str, int], RankPool]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )
    )  # fmt: skip


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_embd=16,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


MODELS = {"llama": llama, "gpt2": gpt2}


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def prompts() -> torch.Tensor:
    return torch.randint(3, 32, (3, 5), generator=torch.Generator().manual_seed(0))


def trainer_of(model: str, plan: str) -> Trainer:
    example = ({"input_ids": prompts(), "use_cache": False}, prompts())
    return parallelize(
        MODELS[model], plan, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), example=example,
        dtype=torch.float64,
    )  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 2.0},
}


def generates(comm: Communicator, model: str, plan: str, way: str) -> int:
    plain = build(MODELS[model], 0).double().eval()
    trainer = trainer_of(model, plan)
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, **WAYS[way]}
    torch.manual_seed(3)
    expected = plain.generate(prompts(), **options)
    trainer.model.eval()
    torch.manual_seed(3)
    got = trainer.model.generate(prompts(), **options)  # type: ignore[operator, union-attr]
    assert torch.equal(got, expected)
    trainer.model.train()
    trainer.step(({"input_ids": prompts(), "use_cache": False}, prompts()))  # training goes on after it
    return len(set(got.flatten().tolist()))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", ["tp=2", "dp=2", "dp=2,zero=3"])
def test_generate_gives_the_tokens_of_one_device(pools: Pools, model: str, plan: str) -> None:
    assert min(pools("gloo", 2).run(generates, model, plan, "greedy")) > 5


@pytest.mark.parametrize("way", ["beams", "sampled"])
def test_other_ways_to_generate(pools: Pools, way: str) -> None:
    pools("gloo", 2).run(generates, "llama", "tp=2", way)


def generates_through_a_pipeline(comm: Communicator, model: str) -> None:
    plain = build(MODELS[model], 0).double().eval()
    trainer = trainer_of(model, "pp=2,microbatches=2")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = plain.generate(prompts(), attention_mask=torch.ones(3, 5, dtype=torch.long), **options)
    assert torch.equal(trainer.generate(prompts(), **options), expected)
    for asked in ({"num_beams": 2}, {"do_sample": True}, {"streamer": 1}):
        with pytest.raises(UsageError, match="through a pipeline"):
            trainer.generate(prompts(), max_new_tokens=2, **asked)
    with pytest.raises(UsageError, match="a rank has some stages of the model only"):
        trainer.model(input_ids=prompts())
    with pytest.raises(UsageError, match="a rank has some stages of the model only"):
        trainer.model.generate(prompts())  # type: ignore[operator, union-attr]
    trainer.step(({"input_ids": prompts(), "use_cache": False}, prompts()))


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
def test_generate_through_a_pipeline(pools: Pools, model: str) -> None:
    pools("gloo", 2).run(generates_through_a_pipeline, model)


def generates_under_cp(comm: Communicator) -> None:
    plain, trainer = build(llama, 0).double().eval(), trainer_of("llama", "cp=2")
    expected = plain.generate(prompts(), max_new_tokens=6, do_sample=False)
    with pytest.raises(UsageError, match="a cache of keys and values under cp"):
        trainer.generate(prompts(), max_new_tokens=6, do_sample=False)
    assert torch.equal(trainer.generate(prompts(), max_new_tokens=6, do_sample=False, use_cache=False), expected)


def test_generate_under_cp(pools: Pools) -> None:
    pools("gloo", 2).run(generates_under_cp)
