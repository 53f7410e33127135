"""UnisonoStrategy on two ranks: losses, weights, metrics and checkpoints are those of one lightning.Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.ranks import RankPool
from unisono.errors import UsageError

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
import torchmetrics  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

Pools = Callable[[str, int], RankPool]
TOLERANCE = 1e-5  # of float32 sums in another order
STEPS = 12


class Module(lightning.LightningModule):
    """One network, called by its name; a schedule, a metric, and what is logged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.samples = torchmetrics.SumMetric()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        outputs = self(x)
        self.accuracy(outputs, y)
        self.samples(len(y))
        self.log("val_loss", nn.functional.cross_entropy(outputs, y), sync_dist=True)
        self.log("accuracy", self.accuracy)
        self.log("samples", self.samples)

    def configure_optimizers(self) -> Any:
        decayed = [each for each in self.parameters() if each.ndim > 1]
        others = [each for each in self.parameters() if each.ndim < 2]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=2e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-2, total_steps=STEPS + 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Parts(Module):
    """Several networks, called by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = self.net[:2], self.net[2:]
        del self.net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return loss


class Direct(Parts):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.encoder(x)), y)


def data(count: int, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), **options)


def fitted(module: Any, folder: str | Path, ckpt_path: str | None = None, **options: Any) -> Any:
    """Shuffled batches, the last one of an epoch with fewer samples; accumulation and clipping."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    given: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    given |= {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "callbacks": [saves]}
    given |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(**given | options)
    torch.manual_seed(3)
    trainer.fit(module, data(47, batch_size=9, shuffle=True), data(13, batch_size=4), ckpt_path=ckpt_path)
    return trainer


def figures(trainer: Any, module: Any) -> dict[str, Any]:
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return values | {"losses": module.losses, "lr": trainer.optimizers[0].param_groups[0]["lr"]}


def same_figures(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert ours[name] == pytest.approx(expected, rel=TOLERANCE), name


def same_checkpoint(ours: Path, theirs: Path) -> None:
    mine, expected = (torch.load(path, weights_only=False) for path in (ours, theirs))
    assert mine["state_dict"].keys() == expected["state_dict"].keys()
    for name, tensor in expected["state_dict"].items():
        torch.testing.assert_close(mine["state_dict"][name], tensor, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    (state,), (wanted,) = mine["optimizer_states"], expected["optimizer_states"]
    assert state["param_groups"] == wanted["param_groups"]
    for number, entries in wanted["state"].items():
        for key, tensor in entries.items():
            torch.testing.assert_close(state["state"][number][key], tensor, rtol=1e-4, atol=TOLERANCE, msg=key)


Plain = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """The folder and the figures of one process of lightning.Trainer."""
    folder, module = tmp_path_factory.mktemp("plain"), Module()
    trainer = fitted(module, folder)
    found = figures(trainer, module)
    assert len(found["losses"]) >= 2 * STEPS - 2
    assert found["samples"] == 13
    assert found["losses"][-1] < 0.8 * found["losses"][0], "it learns, so that a difference would grow"
    return str(folder), found


def fitted_under(comm: Any, plan: str, folder: str, expected: str, theirs: dict[str, Any]) -> None:
    from unisono.integrations.lightning import UnisonoStrategy

    module, seen = Module(), set()
    module.net[0].register_forward_pre_hook(lambda _, given: seen.add(len(given[0])) if module.training else None)
    held = sum(each.numel() for each in module.parameters())
    trainer = fitted(module, folder, strategy=UnisonoStrategy(plan, rules={"0": "column", "2": "row"}))
    assert max(seen) <= (5 if "dp=2" in plan else 9), "a rank computes its samples"
    if plan != "dp=2":
        assert sum(each.numel() for _, each in trainer.strategy.parallel.optimized()) < 0.7 * held, "and has its shards"
    same_figures(figures(trainer, module), theirs)
    name = f"step={STEPS}.ckpt"
    same_checkpoint(Path(folder) / name, Path(expected) / name)
    again = trainer.validate(module, data(13, batch_size=4), ckpt_path=str(Path(expected) / name), verbose=False)
    assert again[0]["val_loss"] == pytest.approx(theirs["val_loss"], rel=TOLERANCE)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2,zero=3",
        pytest.param("dp=2", marks=pytest.mark.thorough),
        pytest.param("tp=2", marks=pytest.mark.thorough),
        pytest.param("dp=2,zero=1", marks=pytest.mark.thorough),
        pytest.param("dp=2,zero=2", marks=pytest.mark.thorough),
    ],
)
def test_losses_and_weights_are_those_of_lightnings_trainer(
    plan: str, pools: Pools, plain: Plain, tmp_path: Path
) -> None:
    pools("gloo", 2).run(fitted_under, plan, str(tmp_path), *plain)


def resumed(comm: Any, folder: str, expected: str) -> None:
    from unisono.integrations.lightning import UnisonoStrategy

    fitted(Module(), folder, f"{expected}/step=6.ckpt", strategy=UnisonoStrategy("dp=2,zero=3"), max_steps=STEPS + 2)


def test_checkpoints_are_those_of_lightnings_trainer(pools: Pools, plain: Plain, tmp_path: Path) -> None:
    """From one of lightning.Trainer on, and then from ours with it."""
    pools("gloo", 2).run(resumed, str(tmp_path / "ours"), plain[0])
    name = f"step={STEPS}.ckpt"
    fitted(Module(), tmp_path / "plain", f"{plain[0]}/step=6.ckpt", max_steps=STEPS + 2)
    same_checkpoint(tmp_path / "ours" / name, tmp_path / "plain" / name)
    fitted(Module(), tmp_path / "continued", str(tmp_path / "ours" / name), max_steps=STEPS + 3)


def several(comm: Any, plan: str, folder: str, theirs: list[float]) -> None:
    from unisono.integrations.lightning import UnisonoStrategy

    module = Parts()
    fitted(module, folder, strategy=UnisonoStrategy(plan))
    assert module.losses == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.parametrize("plan", [pytest.param("dp=2", marks=pytest.mark.thorough), "dp=2,zero=3"])
def test_several_networks(plan: str, pools: Pools, tmp_path: Path) -> None:
    module = Parts()
    fitted(module, tmp_path / "plain")
    pools("gloo", 2).run(several, plan, str(tmp_path / "ours"), module.losses)


def in_bfloat16(comm: Any, plan: str, folder: str, theirs: list[float]) -> None:
    from unisono.integrations.lightning import UnisonoStrategy

    module, dtypes = Module(), set()
    module.net[0].register_forward_hook(
        lambda _, given, outputs: dtypes.add(outputs.dtype) if module.training else None
    )
    fitted(module, folder, strategy=UnisonoStrategy(plan), precision="bf16-mixed")
    assert dtypes == {torch.bfloat16}
    assert module.losses == pytest.approx(theirs, rel=0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_mixed_precision(plan: str, pools: Pools, tmp_path: Path) -> None:
    module = Module()
    fitted(module, tmp_path / "plain", precision="bf16-mixed")
    pools("gloo", 2).run(in_bfloat16, plan, str(tmp_path / "ours"), module.losses)


def refused(comm: Any, folder: str) -> None:
    from unisono.integrations.lightning import UnisonoStrategy

    with pytest.raises(UsageError, match="use a plan with pp=1, cp=1"):
        UnisonoStrategy("pp=2,microbatches=2")
    with pytest.raises(UsageError, match=r"training_step called self\.encoder under plan dp=2"):
        fitted(Direct(), folder, strategy=UnisonoStrategy("dp=2"))
    with pytest.raises(UsageError, match="expected one of '32-true', 'bf16-mixed'"):
        fitted(Module(), folder, strategy=UnisonoStrategy("dp=2"), precision="64-true")
    trainer = fitted(Module(), folder, strategy=UnisonoStrategy("dp=2"), max_steps=1)
    with pytest.raises(UsageError, match="fit was called a second time"):
        trainer.fit(trainer.lightning_module, data(47, batch_size=9))
    sampler = DistributedSampler(data(8).dataset, num_replicas=2, rank=comm.rank)
    trainer = lightning.Trainer(strategy=UnisonoStrategy("dp=2"), accelerator="cpu", logger=False, max_steps=1)
    with pytest.raises(UsageError, match="leave out the sampler"):
        trainer.fit(Module(), data(8, sampler=sampler))


def test_refusals(pools: Pools, tmp_path: Path) -> None:
    pools("gloo", 2).run(refused, str(tmp_path))
