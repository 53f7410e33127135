"""UnisonoTrainer on two ranks: losses, weights, metrics and checkpoints are those of one transformers.Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import RankPool
from tests.train.test_hugging_face import llama, pad, texts
from unisono.errors import UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

Pools = Callable[[str, int], RankPool]
TOLERANCE = 1e-5  # of float32 sums in another order
STEPS = 12
ROOT = Path(__file__).parents[2]


def arguments(folder: str | Path, **options: Any) -> Any:
    """A schedule with warm-up, accumulation of batches of different lengths, clipping, evaluation and checkpoints."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_steps": STEPS,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 6,
        "seed": 5,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    return transformers.TrainingArguments(str(folder), **given | options)


def accuracy(predicted: Any) -> dict[str, float]:
    """Of the next token; and how much was predicted, so that a sample more or less shows."""
    logits, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[counted].mean()), "tokens": float(counted.sum())}


def model() -> Any:
    torch.manual_seed(0)
    return llama()


def made(kind: Any, folder: str | Path, network: Any = None, args: dict[str, Any] | None = None, **options: Any) -> Any:
    """19 samples: the last batch of an epoch has one, for two ranks."""
    given: dict[str, Any] = {"train_dataset": texts(19), "eval_dataset": texts(7), "data_collator": pad}
    given |= {"compute_metrics": accuracy} | options
    return kind(network or model(), arguments(folder, **args or {}), **given)


def figures(trainer: Any) -> list[dict[str, float]]:
    """What was logged, without measured times."""
    kept = ("loss", "grad_norm", "learning_rate", "step", "epoch", "eval_loss", "eval_accuracy", "eval_tokens")
    return [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history]


def same_figures(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(expected, rel=TOLERANCE), expected


def same_weights(folder: str | Path, expected: str | Path) -> None:
    ours, theirs = (load_file(Path(each) / "model.safetensors") for each in (folder, expected))
    names = ours.keys() | theirs.keys()
    tied = {"lm_head.weight"}  # of which one file may keep either name
    assert (ours.keys() ^ theirs.keys()) <= tied
    for name in names - tied:
        torch.testing.assert_close(ours[name], theirs[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """The folder and the figures of one process of transformers.Trainer."""
    folder = tmp_path_factory.mktemp("plain")
    trainer = made(transformers.Trainer, folder)
    trainer.train()
    trainer.save_model()
    losses = [row["loss"] for row in figures(trainer) if "loss" in row]
    assert len(losses) == STEPS
    assert min(losses) < 0.9 * losses[0], "it learns, so that a difference would grow"
    return str(folder), figures(trainer)


# ---- training --------------------------------------------------------------------------------------------------------


def trained(comm: Any, plan: str, folder: str, expected: str, theirs: list[dict[str, float]]) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    network, seen = model(), set()
    network.lm_head.register_forward_pre_hook(lambda _, given: seen.add(given[0].shape[:2].numel()))
    held = sum(each.numel() for each in network.parameters())
    trainer = made(UnisonoTrainer, folder, network, plan=plan, check="off")
    trainer.train()
    if "dp=2" in plan:
        assert max(seen) <= 2 * 8, "a rank computes two of four samples at most, of up to eight tokens"
    if plan != "dp=2":
        assert sum(each.numel() for _, each in trainer.parallel.optimized()) < 0.7 * held, "and has its shards"
    same_figures(figures(trainer), theirs)
    trainer.save_model()
    same_weights(folder, expected)
    found = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(expected)
    batch = {name: value for name, value in pad(texts(7)).items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(found(**batch).logits, reference(**batch).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=3",
        pytest.param("dp=2", marks=pytest.mark.thorough),
        pytest.param("tp=2", marks=pytest.mark.thorough),
        pytest.param("dp=2,zero=1", marks=pytest.mark.thorough),
        pytest.param("dp=2,zero=2,microbatches=2", marks=pytest.mark.thorough),
        pytest.param("tp=2,sp", marks=pytest.mark.thorough),
    ],
)
def test_losses_and_weights_are_those_of_transformers_trainer(
    plan: str, pools: Pools, plain: tuple[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    pools("gloo", 2).run(trained, plan, str(tmp_path), *plain)


SCRIPT = """
import sys
from tests.integrations.test_hf import figures, made, same_figures
from unisono.integrations.hf import UnisonoTrainer

args = {"gradient_accumulation_steps": 1, "dataloader_num_workers": 1}
trainer = made(UnisonoTrainer, sys.argv[1], plan="dp=2", args=args)
trainer.train()
trainer.save_model()
assert trainer.parallel.proof.startswith("plan dp=2 proved"), trainer.parallel.proof
print("steps", trainer.state.global_step, "saves", trainer.args.should_save)
"""


@pytest.mark.thorough  # the page huggingface.md runs such a script, too
def test_a_script_under_unisono_run(tmp_path: Path) -> None:
    """There accelerate would join the ranks by itself."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "train.py", "ours"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # the script takes models of this file
    given = {**os.environ, "PYTHONPATH": paths.rstrip(os.pathsep)}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, env=given)
    assert ran.returncode == 0, ran.stderr
    assert f"[0] steps {STEPS} saves True" in ran.stdout
    assert f"[1] steps {STEPS} saves False" in ran.stdout
    assert "[1] {" not in ran.stdout, "one rank logs"
    trainer = made(transformers.Trainer, tmp_path / "plain", args={"gradient_accumulation_steps": 1})
    trainer.train()
    trainer.save_model()
    same_weights(tmp_path / "ours", tmp_path / "plain")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(comm: Any, folder: str, expected: str, theirs: list[dict[str, float]]) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    trainer = made(UnisonoTrainer, folder, plan="dp=2,zero=3", check="off")
    trainer.train(resume_from_checkpoint=f"{expected}/checkpoint-6")  # of transformers.Trainer
    same_figures(figures(trainer), theirs)
    same_weights(f"{folder}/checkpoint-{STEPS}", expected)

    trainer = made(UnisonoTrainer, folder, plan="tp=2", check="off", args={"max_steps": STEPS + 2})
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}")  # of another plan
    trainer.save_model(f"{folder}/continued")


@pytest.mark.thorough
def test_checkpoints_are_those_of_transformers_trainer(
    pools: Pools, plain: tuple[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    pools("gloo", 2).run(resumed, str(tmp_path), *plain)
    trainer = made(transformers.Trainer, tmp_path / "plain", args={"max_steps": STEPS + 2})
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))  # ours, read by transformers.Trainer
    trainer.save_model()
    same_weights(tmp_path / "continued", tmp_path / "plain")


def best(comm: Any, folder: str, expected: float) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    trainer = made(UnisonoTrainer, folder, plan="dp=2,zero=3", check="off", args=BEST)
    before = trainer.evaluate()  # without the plan, on every rank
    trainer.train()
    assert trainer.state.best_metric < before["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert trainer.predict(texts(7)).metrics["test_loss"] == pytest.approx(expected, rel=TOLERANCE)
    logits = trainer.predict([{key: row[key] for key in row if key != "labels"} for row in texts(7)]).predictions
    assert logits.shape == (7, 8, 37)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_steps": 4, "save_total_limit": 1}


@pytest.mark.thorough
def test_the_best_model_is_loaded(pools: Pools, tmp_path: Path) -> None:
    trainer = made(transformers.Trainer, tmp_path / "plain", args=BEST)
    trainer.train()
    pools("gloo", 2).run(best, str(tmp_path / "ours"), trainer.evaluate()["eval_loss"])


# ---- losses ----------------------------------------------------------------------------------------------------------


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own: by the number of labels in all batches that are accumulated."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def with_own_loss(kind: Any) -> Any:
    class Own(kind):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = summed(outputs, labels, num_items_in_batch or (labels[:, 1:] != -100).sum())
            return (loss, outputs) if return_outputs else loss

    return Own


LOSSES: dict[str, dict[str, Any]] = {
    "compute_loss_func": {"compute_loss_func": summed},
    "label_smoothing": {"args": {"label_smoothing_factor": 0.1}},
    "compute_loss": {"args": {"dataloader_drop_last": True}},
}


def loss_given(comm: Any, name: str, plan: str, folder: str, theirs: list[dict[str, float]]) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    kind = with_own_loss(UnisonoTrainer) if name == "compute_loss" else UnisonoTrainer
    trainer = made(kind, folder, plan=plan, check="off", **LOSSES[name])
    trainer.train()
    same_figures(figures(trainer), theirs)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("compute_loss", "dp=2", marks=pytest.mark.thorough),
        pytest.param("compute_loss_func", "dp=2", marks=pytest.mark.thorough),
        pytest.param("label_smoothing", "dp=2", marks=pytest.mark.thorough),
        pytest.param("compute_loss", "dp=2,zero=3", marks=pytest.mark.thorough),
        pytest.param("compute_loss_func", "dp=2,zero=3", marks=pytest.mark.thorough),
    ],
)
def test_losses_of_ones_own(name: str, plan: str, pools: Pools, tmp_path: Path) -> None:
    kind = with_own_loss(transformers.Trainer) if name == "compute_loss" else transformers.Trainer
    trainer = made(kind, tmp_path / "plain", **LOSSES[name])
    trainer.train()
    pools("gloo", 2).run(loss_given, name, plan, str(tmp_path / "ours"), figures(trainer))


# ---- habits ----------------------------------------------------------------------------------------------------------


class Tagger(torch.nn.Module):
    """No model of transformers: its loss is a mean over the batch, and it takes no num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(37, 8), torch.nn.Linear(8, 37)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def classifier() -> Any:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
        )
    )  # fmt: skip


def classified(samples: list[Any]) -> Any:
    batch = pad(samples)
    return {**batch, "labels": batch["input_ids"][:, 0] % 3}


def adapted() -> Any:
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def with_own_optimizer(network: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))}


def habit(name: str, kind: Any, folder: str | Path, **options: Any) -> Any:
    """A trainer of this kind, as some users make it."""
    torch.manual_seed(0)
    networks = {"tagger": Tagger, "classifier": classifier, "adapters": adapted}
    network = networks.get(name, llama)()
    if name in ("classifier", "tagger"):
        options |= {"compute_metrics": None}
    if name == "classifier":
        options |= {"data_collator": classified}
    if name == "optimizers":
        options |= with_own_optimizer(network)
    args = {
        "checkpointing": {"gradient_checkpointing": True},
        "no clipping": {"max_grad_norm": 0.0, "lr_scheduler_type": "linear"},
    }
    return made(kind, folder, network, args=args.get(name), **options)


def as_users_do(comm: Any, name: str, plan: str, folder: str, theirs: list[dict[str, float]]) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    trainer = habit(name, UnisonoTrainer, folder, plan=plan, check="off")
    trainer.train()
    same_figures(figures(trainer), theirs)
    trainer.save_model()
    saved = "adapter_model.safetensors" if name == "adapters" else "model.safetensors"
    assert (Path(folder) / saved).is_file()


HABITS = ("tagger", "classifier", "adapters", "optimizers", "checkpointing", "no clipping")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("plan", "name"), [*((plan, name) for plan in ("dp=2", "dp=2,zero=3") for name in HABITS), ("tp=2", "adapters")]
)
def test_habits(name: str, plan: str, pools: Pools, tmp_path: Path) -> None:
    if name == "adapters":
        pytest.importorskip("peft", reason="peft is not installed")
    trainer = habit(name, transformers.Trainer, tmp_path / "plain")
    trainer.train()
    pools("gloo", 2).run(as_users_do, name, plan, str(tmp_path / "ours"), figures(trainer))


def in_bfloat16(comm: Any, plan: str, folder: str, theirs: list[dict[str, float]]) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    network, dtypes = model(), set()
    network.lm_head.register_forward_hook(lambda _, given, outputs: dtypes.add(outputs.dtype))
    trainer = made(UnisonoTrainer, folder, network, plan=plan, check="off", args={"bf16": True})
    trainer.train()
    trainer.save_model()
    assert torch.bfloat16 in dtypes
    assert load_file(Path(folder) / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    for mine, expected in zip(figures(trainer), theirs, strict=True):
        assert mine.get("loss", 0) == pytest.approx(expected.get("loss", 0), rel=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_mixed_precision(plan: str, pools: Pools, tmp_path: Path) -> None:
    trainer = made(transformers.Trainer, tmp_path / "plain", args={"bf16": True})
    trainer.train()
    pools("gloo", 2).run(in_bfloat16, plan, str(tmp_path / "ours"), figures(trainer))


def dropped(comm: Any, plan: str, folder: str) -> list[dict[str, float]]:
    from unisono.integrations.hf import UnisonoTrainer

    torch.manual_seed(0)
    trainer = made(UnisonoTrainer, folder, llama(attention_dropout=0.3), plan=plan, check="off")
    trainer.train()
    return figures(trainer)


@pytest.mark.thorough
def test_dropout_does_not_depend_on_the_plan(pools: Pools, tmp_path: Path) -> None:
    found = [pools("gloo", 2).run(dropped, plan, str(tmp_path)) for plan in ("dp=2", "tp=2", "dp=2,zero=3")]
    same_figures(found[1][0], found[0][0])
    same_figures(found[2][0], found[0][0])


# ---- what cannot be right --------------------------------------------------------------------------------------------


def refused(comm: Any, folder: str) -> None:
    from unisono.integrations.hf import UnisonoTrainer

    def refuses(match: str, plan: Any = "dp=2", **options: Any) -> None:
        with pytest.raises(UsageError, match=match):
            made(UnisonoTrainer, folder, plan=plan, check="off", **options)

    refuses("pp=2; use a plan with pp=1", plan="pp=2,microbatches=2")
    refuses("uni.Engine searches", plan="auto")
    refuses("needs 4 ranks", plan="dp=4")
    refuses("use bf16=True", args={"fp16": True})
    refuses("give per_device_train_batch_size", args={"auto_find_batch_size": True})
    refuses("put it into the plan", args={"torch_compile": True})

    class Inside(UnisonoTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)  # with labels: the mean over a rank's tokens
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    with pytest.raises(UsageError, match="compute losses and means outside the model"):
        made(Inside, folder, plan="dp=2", check="off").train()
    small = made(
        with_own_loss(UnisonoTrainer), folder, plan="dp=2", check="off", args={"per_device_train_batch_size": 1}
    )
    with pytest.raises(UsageError, match="a batch with 1 samples for 2 data ranks"):
        small.train()


def test_refusals(pools: Pools, tmp_path: Path) -> None:
    pools("gloo", 2).run(refused, str(tmp_path))
