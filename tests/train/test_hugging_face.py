"""Hugging Face models as people train them: batches of named inputs, the model's own loss, folders of weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import unisono as uni
from tests.ranks import RankPool
from tools.blocks import blocks_of
from unisono.errors import UsageError
from unisono.mesh.deferred_init.deferred_model import defer_init, tensors_in
from unisono.parallel.rules.rules import known

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Pools = Callable[[str, int], RankPool]
ROOT = Path(__file__).resolve().parents[2]
Sample = dict[str, list[int]]
TOLERANCE = 1e-5  # of float32 sums in another order
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options))


@cache
def texts(count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    ids = [torch.randint(1, 37, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]


def pad(samples: list[Sample]) -> Any:
    """As DataCollatorWithPadding makes batches, of which it returns a mapping that is no dict."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    rows = {key: [each[key] + [fill[key]] * (longest - len(each[key])) for each in samples] for key in samples[0]}
    return transformers.BatchEncoding({key: torch.tensor(row) for key, row in rows.items()})


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def alone(model: Any, batches: Iterable[Any]) -> list[float]:
    """The losses of an ordinary loop."""
    optimizer, losses = adam(model.train().parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def built() -> Any:
    torch.manual_seed(0)
    return llama()


# ---- batches ---------------------------------------------------------------------------------------------------------


def without_labels(batch: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def fitted(comm: Any, plan: str) -> None:
    """No loss, samples of different lengths, a last batch of one sample for two ranks or microbatches."""
    engine = uni.Engine(lambda: llama(), optimizer=adam, plan=plan, collate=pad, check="off")
    history = engine.fit(texts(9), batch_size=4, shuffle=False, progress=False, validation=texts(1))
    plain = built()
    assert history.losses == pytest.approx(alone(plain, DataLoader(texts(9), 4, collate_fn=pad)), rel=TOLERANCE)
    with torch.no_grad():
        batch = pad(texts(5))
        assert engine.evaluate(texts(5), 5)["loss"] == pytest.approx(plain(**batch).loss.item(), rel=TOLERANCE)
        expected = plain(**without_labels(batch)).logits
        for given in (batch, without_labels(batch), texts(5)):
            outputs = engine.predict(given)
            assert isinstance(outputs, transformers.utils.ModelOutput)
            torch.testing.assert_close(outputs.logits, expected, rtol=1e-4, atol=1e-4)
        one = pad(texts(1))
        assert engine.evaluate(texts(1))["loss"] == pytest.approx(plain(**one).loss.item(), rel=TOLERANCE)
        assert history.values[-1]["validation_loss"] == engine.evaluate(texts(1))["loss"]
        expected = plain(**without_labels(one)).logits
        torch.testing.assert_close(engine.predict(one).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2", "tp=2", "dp=2,zero=3"])
def test_batches_of_named_inputs_and_the_loss_of_the_model(plan: str, pools: Pools) -> None:
    pools("gloo", 2).run(fitted, plan)


def with_own_loaders(comm: Any, folder: str) -> None:
    def own(count: int = 12, **options: Any) -> DataLoader[Any]:
        return DataLoader(texts(count), collate_fn=pad, **options)  # type: ignore[arg-type]

    def engine(batch: str = "global") -> uni.Engine:
        return uni.Engine(lambda: llama(), optimizer=adam, plan="dp=2", batch=batch, check="off")

    shuffled = [own(11, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    expected = alone(built(), [batch for _ in range(2) for batch in shuffled[0]])
    losses = engine().fit(shuffled[1], epochs=2, progress=False).losses
    assert losses == pytest.approx(expected, rel=TOLERANCE), "global batches, in the order of a plain DataLoader"

    sampler = DistributedSampler(texts(12), num_replicas=2, rank=comm.rank, shuffle=False)  # type: ignore[arg-type]
    local = engine("local")
    losses = local.fit(own(batch_size=2, sampler=sampler), progress=False).losses
    order = [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11]]  # of both ranks' samples
    plain = built()
    batches = [pad([texts(12)[index] for index in batch]) for batch in order]
    assert losses == pytest.approx(alone(plain, batches), rel=TOLERANCE)
    with torch.no_grad():
        mean = sum(plain(**batch).loss.item() for batch in batches) / 3
    assert local.evaluate(own(batch_size=2, sampler=sampler))["loss"] == pytest.approx(mean, rel=TOLERANCE)
    with pytest.raises(UsageError, match="6 batches on rank 1 and 12 on rank 0; expected equally many"):
        local.fit(own(batch_size=1 + comm.rank), progress=False)

    loader = own(batch_size=3, shuffle=True)  # drawn from torch's default generator, in the same order on all ranks
    full = engine().fit(loader, epochs=2, progress=False).losses
    torch.manual_seed(comm.rank)
    first = engine().fit(loader, epochs=2, max_steps=3, save=folder, progress=False).losses
    rest = engine().fit(loader, epochs=2, save=folder, resume=True, progress=False).losses
    assert first + rest == full, "resumed in mid-epoch"
    with pytest.raises(UsageError, match="order and batches are the loader's"):
        engine().fit(loader, shuffle=True)


@pytest.mark.thorough
def test_dataloaders_of_ones_own(pools: Pools, tmp_path: Path) -> None:
    pools("gloo", 2).run(with_own_loaders, str(tmp_path / "run"))


def rows(datasets: Any, count: int) -> Any:
    """A datasets.Dataset of lists of equal length, with a column that no model takes."""
    ids = torch.randint(1, 37, (count, 6), generator=torch.Generator().manual_seed(2)).tolist()
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids, "text": ["words"] * count})


def with_datasets(comm: Any, plan: str) -> None:
    """datasets.Dataset, plain, as torch's tensors, mapped, streamed and split: without a collator, as with one."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    given = rows(datasets, 10)

    def engine(**options: Any) -> uni.Engine:
        return uni.Engine(lambda: llama(), optimizer=adam, plan=plan, check="off", **options)

    ids = torch.tensor(given["input_ids"])
    batches = [{"input_ids": part, "labels": part} for part in ids.split(4)]
    plain = built()
    expected = alone(plain, batches)
    streamed = given.to_iterable_dataset(num_shards=2)
    mapped = given.map(lambda row: row, batched=True).with_format("torch")
    for dataset in (streamed, mapped, given):
        trained, order = engine(), {} if dataset is streamed else {"shuffle": False}
        losses = trained.fit(dataset, batch_size=4, progress=False, **order).losses
        assert losses == pytest.approx(expected, rel=TOLERANCE), dataset
    with torch.no_grad():
        logits = plain(input_ids=ids).logits
        torch.testing.assert_close(trained.predict(given).logits, logits, rtol=2e-3, atol=2e-3)
        assert trained.evaluate(given, 5)["loss"] == pytest.approx(plain(ids, labels=ids).loss.item(), rel=TOLERANCE)
    halves = given.train_test_split(0.5, shuffle=False)
    with pytest.raises(UsageError, match=r"DatasetDict with the splits train, test .* as dataset\['train'\]"):
        trained.fit(halves, progress=False)
    ragged = datasets.Dataset.from_list(texts(4))
    with pytest.raises(UsageError, match="a function that pads them as collate="):
        trained.fit(ragged, batch_size=4, progress=False)
    padded = engine(collate=pad)
    losses = padded.fit(datasets.Dataset.from_list(texts(8)), batch_size=4, shuffle=False, progress=False).losses
    assert losses == pytest.approx(alone(built(), DataLoader(texts(8), 4, collate_fn=pad)), rel=TOLERANCE)


def test_datasets_of_hugging_face(pools: Pools) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    pools("gloo", 2).run(with_datasets, "dp=2,zero=3")


def block(page: str, title: str) -> str:
    return next(each.text for each in blocks_of(ROOT / page) if each.title == title)


@pytest.mark.thorough
def test_the_first_program_of_the_readme(tmp_path: Path) -> None:
    """With a local model and local texts in place of the Hub's, and two ranks in place of eight."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    source = block("README.md", "finetune.py")
    stories = 'load_dataset("text", data_files="stories.txt", split="train")'
    changes = {'"Qwen/Qwen3-0.6B"': '"tiny-llama"', "dp=8": "dp=2", "epochs=1, batch_size=64": "epochs=4, batch_size=8"}
    changes |= {'load_dataset("roneneldan/TinyStories", split="train[:1%]")': stories, "lr=1e-5": "lr=1e-2"}
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "finetune.py").write_text(source)
    (tmp_path / "hub.py").write_text(block("docs/huggingface.md", "hub.py"))
    (tmp_path / "stories.txt").write_text("<s> the cat sat on the mat . </s>\n<s> a dog ran over the log . </s>\n" * 9)
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    for words in ([sys.executable, "hub.py"], [sys.executable, "-m", "unisono", "run", "-n", "2", "finetune.py"]):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "tiny-llama")("<s> the cat sat", return_tensors="pt")
    losses = []
    for name in ("tiny-llama", "tuned"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        losses.append(model(ids["input_ids"], labels=ids["input_ids"]).loss.item())
    assert losses[1] < losses[0] - 0.5


def mask(samples: list[Sample]) -> Any:
    """As DataCollatorForLanguageModeling hides tokens at random."""
    batch = pad(samples)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 0)
    return batch


def masked(comm: Any) -> list[float]:
    torch.manual_seed(comm.rank)  # does not matter
    engine = uni.Engine(lambda: llama(), optimizer=adam, plan=f"dp={comm.size}", collate=mask, check="off")
    return engine.fit(texts(8), batch_size=4, epochs=2, progress=False).losses


def test_a_collator_that_draws(pools: Pools) -> None:
    expected = pools("gloo", 1).run(masked)[0]
    for losses in pools("gloo", 2).run(masked):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_what_cannot_be_trained_without_a_loss() -> None:
    engine = uni.Engine(lambda: llama(), optimizer=adam, plan="dp=1", check="off")
    with pytest.raises(UsageError, match=r"no loss= was given, and the model's output .* has no loss"):
        engine.run(without_labels(pad(texts(2))))
    with pytest.raises(UsageError, match="Engine without optimizer=; expected a function"):
        uni.Engine(lambda: llama())


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    engine = uni.Engine(llama(attention_dropout=0.5).eval(), optimizer=adam, plan="dp=1", check="off")
    engine.run(pad(texts(2)))
    assert engine.model.training


# ---- folders of weights ----------------------------------------------------------------------------------------------


def mixture() -> Any:
    """Its experts are stacked to one tensor, from one for each of them in the file."""
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, experts_implementation="eager"))


def classifier() -> Any:
    """Its head is not in the file of a language model: from_pretrained initializes it."""
    config = transformers.LlamaConfig(**SIZES | {"num_labels": 3, "pad_token_id": 0})
    return transformers.LlamaForSequenceClassification(config)


FOLDERS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "tied": (llama, "AutoModelForCausalLM", {}),
    "bf16, in several files": (lambda: llama(tie_word_embeddings=False).bfloat16(), "AutoModelForCausalLM", {}),
    "bf16 read as float32": (lambda: llama().bfloat16(), "AutoModelForCausalLM", {"dtype": torch.float32}),
    "experts": (mixture, "AutoModelForCausalLM", {}),
    "a new head": (classifier, "AutoModelForSequenceClassification", {}),
    "another head": (llama, "AutoModelForSequenceClassification", {"num_labels": 5}),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_weights_of_a_folder_are_read_tensor_by_tensor(case: str, tmp_path: Path) -> None:
    build, kind, options = FOLDERS[case]
    build().save_pretrained(tmp_path, max_shard_size="20KB")

    def pretrained() -> Any:
        return getattr(transformers, kind).from_pretrained(tmp_path, **options)

    deferred = defer_init(pretrained, seed=4)
    assert deferred.is_deferred, deferred.note
    torch.manual_seed(4)
    expected = dict(tensors_in(pretrained()))
    assert {name for name, _ in tensors_in(deferred.model)} == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(deferred.value(name), tensor, rtol=0, atol=0)


def tuned(comm: Any, plan: str, base: str, out: str) -> None:
    """Fine-tuned from one folder into another, which holds what one device would have saved."""

    def checkpointed() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        model.gradient_checkpointing_enable()
        return model

    engine = uni.Engine(checkpointed, optimizer=adam, plan=plan, collate=pad, check="off")
    engine.fit(texts(8), batch_size=4, shuffle=False, progress=False)
    assert not engine.ready.note, "built shard by shard"
    engine.save_pretrained(out, max_shard_size="20KB")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    alone(plain, DataLoader(texts(8), 4, collate_fn=pad))  # type: ignore[arg-type]
    saved = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert saved.config.architectures == ["LlamaForCausalLM"]
    assert saved.generation_config.max_new_tokens == 5
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert saved.dtype == plain.dtype
    close = {"rtol": 1e-3, "atol": 1e-4} if plain.dtype == torch.float32 else {"rtol": 0.0, "atol": 0.03}
    torch.testing.assert_close(saved.state_dict(), plain.state_dict(), **close)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ("dp=2", torch.float32),
        ("dp=2,zero=3", torch.bfloat16),
        ("tp=2", torch.bfloat16),
        ("pp=2,microbatches=2", torch.float32),
        pytest.param("dp=2,zero=3", torch.float32, marks=pytest.mark.thorough),
        pytest.param("tp=2", torch.float32, marks=pytest.mark.thorough),
        pytest.param("pp=2,microbatches=2", torch.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_a_folder_is_tuned_into_another(plan: str, dtype: torch.dtype, pools: Pools, tmp_path: Path) -> None:
    base = built().to(dtype)
    base.generation_config.max_new_tokens = 5
    base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    pools("gloo", 2).run(tuned, plan, str(tmp_path / "base"), str(tmp_path / "out"))
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= written
    assert "model.safetensors" not in written


def adapted(comm: Any, plan: str, targets: Any, base: str, out: str) -> None:
    import peft  # type: ignore[import-not-found, unused-ignore]

    def with_lora() -> Any:
        config = peft.LoraConfig(
            r=3, target_modules=targets, lora_dropout=0.0, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)

    engine = uni.Engine(with_lora, optimizer=adam, plan=plan, collate=pad, check="off")
    losses = engine.fit(texts(9), batch_size=4, shuffle=False, progress=False).losses
    assert not engine.ready.note
    engine.save_pretrained(out)
    torch.manual_seed(0)
    plain = with_lora()
    assert losses == pytest.approx(alone(plain, DataLoader(texts(9), 4, collate_fn=pad)), rel=TOLERANCE)  # type: ignore[arg-type]
    saved = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), out)
    torch.testing.assert_close(saved.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("plan", "targets"),
    [
        ("tp=2", "all-linear"),
        *(
            pytest.param(plan, ["q_proj", "v_proj"], marks=pytest.mark.thorough)
            for plan in ("dp=2,zero=3", "tp=2", "tp=2,sp", "pp=2,microbatches=2")
        ),
    ],
)
def test_adapters(plan: str, targets: Any, pools: Pools, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    built().save_pretrained(tmp_path / "base")
    pools("gloo", 2).run(adapted, plan, targets, str(tmp_path / "base"), str(tmp_path / "out"))
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= written


def test_rules_of_a_class_hold_only_together() -> None:
    """GPT2 with adapters on its fused projection that cannot be sharded: heads were divided, and the projection under
    them was not."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    models = [transformers.GPT2LMHeadModel(config) for _ in range(3)]
    for model, use_dora in zip(models, (False, True), strict=False):
        adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=use_dora)
        peft.get_peft_model(model, adapters)
    have_heads = [any(text.startswith("heads") for text in known(model).values()) for model in models]
    assert have_heads == [True, False, True]  # LoRA, DoRA, no adapters


def test_what_is_no_hugging_face_model_has_no_folder(tmp_path: Path) -> None:
    engine = uni.Engine(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, adam, plan="dp=1", check="off")
    engine.prepare((torch.zeros(2, 2), torch.zeros(2, 1)))
    with pytest.raises(UsageError, match="save_pretrained of a Linear, which has no config of transformers"):
        engine.save_pretrained(tmp_path)
