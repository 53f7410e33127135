"""Steps as a CUDA graph: the same numbers as eager steps, dropout's among them, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from unisono.errors import UsageError
from unisono.parallel.compile.cuda_graph import WARM_UP
from unisono.parallel.trainer import Trainer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(
        self, dropout: float = 0.0, counts: bool = False, reads: bool = False, draws_on_host: bool = False
    ) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32, bias=False), nn.Linear(32, 8), nn.BatchNorm1d(32)
        self.dropout, self.counts, self.reads, self.calls = dropout, counts, reads, 0
        self.draws_on_host = draws_on_host

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        h = self.norm(self.first(x)).relu()
        if self.reads and h.sum().item() > 1e9:
            h = h * 2
        if self.draws_on_host and float(torch.rand(())) < 0.5:
            h = h * 2
        return self.second(F.dropout(h, self.dropout, self.training))


def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=-1)


def _batch(seed: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 16, generator=drawn)
    targets = inputs[:, :8].argmax(1).masked_fill(torch.rand(size, generator=drawn) < 0.2, -1)
    return inputs.to(DEVICE), targets.to(DEVICE)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}
STILL = {"still": lambda p: torch.optim.SGD(p, lr=0.0)}


def _trainer(kind: str = "adamw", plan: str = "dp=1", *, cudagraph: bool = True, **options: Any) -> Trainer:
    settings = {name: options.pop(name) for name in ("dropout", "counts", "reads", "draws_on_host") if name in options}
    torch.manual_seed(0)
    model = Net(**settings).to(DEVICE)
    optimizer = {**OPTIMIZERS, **STILL}[kind]
    return uni.parallelize(model, plan, loss=_loss, optimizer=optimizer, cudagraph=cudagraph, clip=0.5, **options)


def _trained(trainer: Trainer) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Losses, norms and parameters after 12 steps under a scheduler, two of them of another batch size."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, 12)
    losses, norms = [], []
    for step in range(12):
        losses.append(trainer.step(_batch(step, 17 if step in (6, 9) else 32)))
        norms.append(trainer.norm)
        scheduler.step()
    assert trainer.steps == 12
    return (
        [float(x) for x in losses],
        [float(x) for x in norms],
        [p.detach().clone() for p in trainer.model.parameters()],
    )


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,compile"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.gpu
@needs_gpu
def test_steps_are_those_of_eager_ones(kind: str, plan: str) -> None:
    trainer = _trainer(kind, plan)
    losses, norms, parameters = _trained(trainer)
    assert trainer.cuda_graph is not None
    assert trainer.cuda_graph._captured is not None
    assert trainer.cuda_graph._captures == 1
    assert trainer.compilation is None or not trainer.compilation.failures
    expected = _trained(_trainer(kind, plan, cudagraph=False))
    assert losses == pytest.approx(expected[0], rel=1e-4)
    assert norms == pytest.approx(expected[1], rel=1e-3)
    torch.testing.assert_close(parameters, expected[2], rtol=1e-3, atol=1e-4)
    assert min(losses[6:]) < losses[0] - 0.1
    assert all(isinstance(group["lr"], float) for group in trainer.optimizer.param_groups)


@pytest.mark.gpu
@needs_gpu
def test_settings_that_change_are_seen() -> None:
    def trained(*, cudagraph: bool) -> list[float]:
        trainer = _trainer(cudagraph=cudagraph)
        losses = []
        for step in range(12):
            if step == 6:
                trainer.optimizer.param_groups[0]["weight_decay"] = 0.5
                trainer.optimizer.param_groups[0]["betas"] = (0.5, 0.6)
            if step == 8:
                trainer.model.norm.eval()  # type: ignore[operator,union-attr]
            if step == 10:
                trainer.model.first.weight.requires_grad_(False)  # type: ignore[operator,union-attr]
            losses.append(float(trainer.step(_batch(0))))
        if trainer.cuda_graph is not None:
            assert trainer.cuda_graph._captures == 4
        return losses

    assert trained(cudagraph=True) == pytest.approx(trained(cudagraph=False), rel=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_state_that_is_loaded_is_trained_on(dropout: float) -> None:
    def trained(*, cudagraph: bool) -> list[float]:
        trainer = _trainer(cudagraph=cudagraph, dropout=dropout)
        for step in range(6):
            trainer.step(_batch(step))
        state = trainer.state_dict()
        for step in range(3):
            trainer.step(_batch(20 + step))
        trainer.load_state_dict(state)
        again = _trainer(cudagraph=cudagraph, dropout=dropout)
        again.load_state_dict(state)
        return [float(each.step(_batch(step))) for each in (trainer, again) for step in range(6, 12)]

    losses = trained(cudagraph=True)
    assert losses == pytest.approx(trained(cudagraph=False), rel=1e-4)
    assert losses[:6] == pytest.approx(losses[6:], rel=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["dp=1", "dp=1,compile"])
def test_dropout_is_that_of_eager_steps(plan: str, precision: str) -> None:
    """At a learning rate of 0, and on one batch, losses depend on nothing but the masks."""

    def trained(*, cudagraph: bool) -> list[float]:
        trainer = _trainer("still", plan, cudagraph=cudagraph, dropout=0.3, precision=precision)
        losses = []
        for step in range(10):
            losses.append(trainer.step(_batch(0, 17 if step in (6, 7) else 32)))
            if step in (2, 5):
                trainer.evaluate(_batch(1))
        assert trainer.compilation is None or not trainer.compilation.failures
        if trainer.cuda_graph is not None:
            assert trainer.cuda_graph._captured is not None
            assert trainer.cuda_graph._captures == 1
        return [float(loss) for loss in losses]

    losses = trained(cudagraph=True)
    assert losses == pytest.approx(trained(cudagraph=False), rel=1e-6)
    assert len(set(losses)) == len(losses)


@pytest.mark.gpu
@needs_gpu
def test_a_rate_of_dropout_that_changes_is_seen() -> None:
    def trained(*, cudagraph: bool) -> list[float]:
        trainer = _trainer("still", cudagraph=cudagraph, dropout=0.3)
        losses = []
        for step in range(8):
            if step == 6:
                trainer.model.dropout = 0.0  # type: ignore[assignment]
            losses.append(float(trainer.step(_batch(0))))
        return losses

    losses = trained(cudagraph=True)
    assert losses == pytest.approx(trained(cudagraph=False), rel=1e-6)
    assert losses[6] == losses[7]


@pytest.mark.gpu
@needs_gpu
def test_random_numbers_of_the_host_are_refused() -> None:
    with pytest.raises(UsageError, match="the model draws random numbers on cpu, which a replayed step would not"):
        _trainer(draws_on_host=True).step(_batch(0))


@pytest.mark.gpu
@needs_gpu
def test_an_engine_replays_its_steps() -> None:
    data = torch.utils.data.TensorDataset(*(part.cpu() for part in _batch(0, 256)))

    def trained(*, cudagraph: bool) -> tuple[list[float], uni.Engine]:
        torch.manual_seed(0)
        model, options = Net(dropout=0.2).to(DEVICE), {"plan": "dp=1", "check": "off", "cudagraph": cudagraph}
        engine = uni.Engine(model, _loss, OPTIMIZERS["adamw"], **options)
        return engine.fit(data, epochs=1, batch_size=32, progress=False).losses, engine

    losses, engine = trained(cudagraph=True)
    assert engine.ready.cuda_graph is not None
    assert engine.ready.cuda_graph._captured is not None
    assert losses == pytest.approx(trained(cudagraph=False)[0], rel=1e-4)
    with pytest.raises(UsageError, match=r"nonfinite='skip'\) with cudagraph=True"):
        engine.fit(data, epochs=2, batch_size=32, nonfinite="skip", progress=False)


@pytest.mark.gpu
@needs_gpu
def test_a_checkpoint_that_is_loaded_is_trained_on(tmp_path: Path) -> None:
    """Loading replaces the optimizer's state, which the graph has in memory of its own."""

    def trained(folder: Path, *, cudagraph: bool) -> list[float]:
        trainer = _trainer(cudagraph=cudagraph, dropout=0.2)
        for step in range(6):
            trainer.step(_batch(step))
        uni.Checkpoints(folder).save(trainer, 6)
        for step in range(3):
            trainer.step(_batch(20 + step))
        uni.Checkpoints(folder).load(trainer)
        return [float(trainer.step(_batch(step))) for step in range(6, 12)]

    losses = trained(tmp_path / "graph", cudagraph=True)
    assert losses == pytest.approx(trained(tmp_path / "eager", cudagraph=False), rel=1e-4)


@pytest.mark.gpu
@needs_gpu
def test_what_the_host_counts_is_refused() -> None:
    trainer = _trainer(counts=True)
    for step in range(WARM_UP):
        trainer.step(_batch(step))
    with pytest.raises(UsageError, match="the model's forward changes calls, a number of Python"):
        trainer.step(_batch(WARM_UP))


@pytest.mark.gpu
@needs_gpu
def test_hooks_are_refused() -> None:
    trainer = _trainer()
    trainer.model.first.register_forward_hook(lambda *_: None)  # type: ignore[operator,union-attr]
    with pytest.raises(UsageError, match="module first has a hook"):
        trainer.step(_batch(0))


@pytest.mark.gpu
@needs_gpu
def test_a_model_that_reads_values_runs_eagerly() -> None:
    trainer = _trainer(reads=True)
    with pytest.warns(UserWarning, match="steps run eagerly from now on"):
        losses = [float(trainer.step(_batch(step))) for step in range(8)]
    torch.randn(2, device="cuda")  # the generator has left the capture, too
    eager = _trainer(cudagraph=False, reads=True)
    assert losses == pytest.approx([float(eager.step(_batch(step))) for step in range(8)], rel=1e-4)


@pytest.mark.gpu
@needs_gpu
def test_other_optimizers_are_refused() -> None:
    with pytest.raises(UsageError, match="Adagrad, which has no capturable= option; use AdamW or SGD"):
        uni.parallelize(Net().cuda(), "dp=1", loss=_loss, optimizer=lambda p: torch.optim.Adagrad(p), cudagraph=True)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="cudagraph=True with a model on cpu; leave cudagraph out, or use a CUDA dev"):
        uni.parallelize(Net(), "dp=1", loss=_loss, optimizer=OPTIMIZERS["sgd"], cudagraph=True)


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the plan is .*microbatches=2; leave cudagraph out, or use dp=1"):
        uni.parallelize(nn.Linear(16, 8), "microbatches=2", loss=_loss, optimizer=OPTIMIZERS["sgd"], cudagraph=True)
    with pytest.raises(UsageError, match='captures steps that are never skipped, but precision="fp16"'):
        uni.parallelize(Net(), "dp=1", loss=_loss, optimizer=OPTIMIZERS["sgd"], precision="fp16", cudagraph=True)
    with pytest.raises(UsageError, match=r"Engine\(cudagraph='yes'\): expected True or False"):
        uni.Engine(Net(), _loss, OPTIMIZERS["sgd"], cudagraph="yes")  # type: ignore[arg-type]
