"""The wrappers train to what one process gets: pipelines, ZeRO and shared layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono as uni
from tests.ranks import RankPool
from unisono.compat.vqnet import nn, optim, tensor
from unisono.compat.vqnet.distributed import (
    ColumnParallelLinear,
    CommController,
    PipelineParallelTrainingWrapper,
    RowParallelLinear,
    ZeroModelInitial,
)
from unisono.compat.vqnet.distributed.pp import _with_output_first
from unisono.errors import UsageError

Pools = Callable[[str, int], RankPool]

# In float64, as `unisono verify` does: what differs there is a fault, not rounding.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return (
        torch.randn(count, 6, generator=draw, dtype=torch.float64),
        torch.randint(0, 4, (count, 1), generator=draw),
    )


def layers() -> list[Any]:
    torch.manual_seed(3)
    widths = [(6, 10), (10, 8), (8, 4)]
    linear = [nn.Linear(*each, dtype=7) for each in widths]
    return [linear[0], torch.tanh, linear[1], lambda x: x * 0.5, nn.activation.ReLu(), linear[2]]


def plain_steps(model: Any, optimizer: torch.optim.Optimizer, batches: Any, clip: float | None = None) -> list[float]:
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(labels, model(x))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- pipelines ------------------------------------------------------------------------------------------------------


class Samples:
    def __init__(self) -> None:
        self.x, self.labels = samples(26)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return tensor.QTensor(self.x[index]), tensor.QTensor(self.labels[index])


SETTINGS: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "pipeline_parallel_size": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "steps": 4,  # more than an epoch, which has three full batches
    "seed": 11,
    "gradient_clipping": 0.05,
    "loss": nn.CrossEntropyLoss(),
}


def pipeline(comm: Any) -> tuple[dict[int, float], dict[str, torch.Tensor], str]:
    wrapper = PipelineParallelTrainingWrapper(SETTINGS, layers(), Samples())
    wrapper.train_batch()
    last = wrapper.train_batch()
    assert last == wrapper.loss_dict[8]
    return wrapper.loss_dict, wrapper.trainer.state_dict()["model"], str(wrapper.plan)


def bad_pipelines(comm: Any) -> None:
    for changes, reported in (
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 does not divide the 4 ranks"),
        ({"train_micro_batch_size_per_gpu": 3}, "train_batch_size=8 is no multiple of .*=3 times 2 pipelines"),
    ):
        with pytest.raises(UsageError, match=reported):
            PipelineParallelTrainingWrapper({**SETTINGS, **changes}, layers(), Samples())
    with pytest.raises(UsageError, match="layer 1 is a int; expected a module or a function"):
        PipelineParallelTrainingWrapper(SETTINGS, [nn.Linear(2, 2), 7], Samples())  # type: ignore[list-item]
    with pytest.raises(UsageError, match="trainset of type int"):
        PipelineParallelTrainingWrapper(SETTINGS, layers(), 7)
    with pytest.raises(UsageError, match="join_layers have no parameters to train"):
        PipelineParallelTrainingWrapper(SETTINGS, [nn.activation.ReLu()] * 2, Samples())
    with pytest.raises(UsageError, match="loss is the class CrossEntropyLoss; expected"):
        PipelineParallelTrainingWrapper({**SETTINGS, "loss": nn.CrossEntropyLoss}, layers(), Samples())


def test_two_pipelines_of_two_stages_train_as_one_process(pools: Pools) -> None:
    alone = torch.nn.Sequential(*[each if isinstance(each, torch.nn.Module) else Call(each) for each in layers()])
    loader = uni.Loader(Samples(), 8, seed=11, drop_last=True)
    batches = [tensor.plain(batch) for _ in range(3) for batch, *_ in loader][:8]
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05, weight_decay=0.1)
    expected = plain_steps(alone, optimizer, batches, clip=0.05)
    pool = pools("gloo", 4)
    for losses, parameters, plan in pool.run(pipeline):
        assert plan == "dp=2,pp=2,microbatches=2"
        assert list(losses) == [*range(1, 9)]
        torch.testing.assert_close(list(losses.values()), expected, **CLOSE)
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(parameters[name], value, **CLOSE)
    pool.run(bad_pipelines)


def test_torchs_own_losses_take_the_output_first() -> None:
    for loss in (torch.nn.functional.cross_entropy, torch.nn.CrossEntropyLoss()):
        assert _with_output_first(loss) is loss
    logits, labels = torch.randn(3, 4), torch.tensor([[1], [0], [3]])
    vqnets = _with_output_first(nn.CrossEntropyLoss())
    assert vqnets(logits, labels) == torch.nn.functional.cross_entropy(logits, labels[:, 0])


class Call(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


# ---- ZeRO -----------------------------------------------------------------------------------------------------------


def classifier(norm: bool) -> torch.nn.Module:
    torch.manual_seed(4)
    between = torch.nn.BatchNorm1d(9, dtype=torch.float64) if norm else nn.activation.Tanh()
    return nn.Sequential(nn.Linear(6, 9, dtype=7), between, nn.Linear(9, 4, dtype=7))


def zero(comm: Any, stage: int, same: bool) -> list[torch.Tensor]:
    """Three steps, in each of which ranks are given the same batch, or parts of it of sizes 5 and 3."""
    x, labels = samples(24)
    model = classifier(norm=not same)
    if comm.rank:
        torch.nn.init.zeros_(next(model.parameters()))  # rank 0's count
    args = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "gradient_clipping": 0.3,
    }
    engine = ZeroModelInitial(args, model, optim.Adam(model.parameters(), lr=0.01) if same else None)
    with pytest.raises(UsageError, match="step\\(\\) without backward"):
        engine.step()
    engine.eval()  # so that BatchNorm sees none of it
    engine(tensor.QTensor(x[:2]))
    for no_loss in (1.0, torch.tensor(1.0)):
        with pytest.raises(UsageError, match=r"backward of .*1.*; expected a loss that was computed from the outputs"):
            engine.backward(no_loss)  # type: ignore[arg-type]
    engine.train()
    for step in range(3):
        rows = slice(8 * step, 8 * step + 8)
        if not same:
            rows = slice(8 * step, 8 * step + 5) if comm.rank == 0 else slice(8 * step + 5, 8 * step + 8)
        outputs = engine(tensor.QTensor(x[rows]))
        assert outputs.size == outputs.numel()
        loss = nn.CrossEntropyLoss()(tensor.QTensor(labels[rows]), outputs)
        engine.backward(loss)
        with pytest.raises(UsageError, match="each once"):
            engine.backward(loss)
        engine.step()
    engine.eval()
    return [engine(x).as_subclass(torch.Tensor).detach()]


@pytest.mark.parametrize(("stage", "same"), [(1, True), (1, False), (2, False), (3, False)])
def test_zero_trains_as_one_process(pools: Pools, stage: int, same: bool) -> None:
    x, labels = samples(24)
    alone = classifier(norm=not same)
    make: Any = torch.optim.Adam if same else torch.optim.SGD
    optimizer = make(alone.parameters(), **({"lr": 0.01} if same else {"lr": 0.1, "momentum": 0.9}))
    plain_steps(alone, optimizer, zip(x.split(8), labels.split(8), strict=True), clip=0.3)
    alone.eval()
    for (found,) in pools("gloo", 2).run(zero, stage, same):
        torch.testing.assert_close(found, alone(x).detach(), **CLOSE)


def two_forwards(comm: Any) -> None:
    """The second is not trained on. Where all ranks count as much in either, nothing is left open."""
    args = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD"}}
    engine = ZeroModelInitial(args, nn.Linear(6, 4))
    x, _ = samples(8)
    x = x.float()
    for first, second, is_open in ((x[:2], x, False), (x[: 2 + comm.rank], x, True)):
        loss = engine(first).sum()
        engine(second)
        if is_open:
            reported = r"different numbers of samples \(rank 0 on 2 to 8; rank 1 on 3 to 8\).*no_grad"
            with pytest.raises(UsageError, match=reported):
                engine.backward(loss)
        else:
            engine.backward(loss)
            engine.step()
    comm.barrier()


def goes_on(comm: Any, steps_before: int) -> torch.Tensor:
    """Four steps, of which the first are the plain model's."""
    x, _ = samples(8)
    model = nn.Linear(6, 4, dtype=7)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    engine = ZeroModelInitial({"train_batch_size": 8, "zero_optimization": {"stage": 1}}, model, optimizer)
    for _ in range(4 - steps_before):
        engine.backward(engine(tensor.QTensor(x)).square().mean())
        engine.step()
    return engine(x).as_subclass(torch.Tensor).detach()


def test_an_optimizer_that_has_stepped_keeps_what_it_has_learned(pools: Pools) -> None:
    torch.testing.assert_close(*(pools("gloo", 2).run(goes_on, before)[1] for before in (0, 3)), **CLOSE)


def test_zero_does_not_guess_which_samples_count(pools: Pools) -> None:
    pools("gloo", 2).run(two_forwards)


# ---- shared layers --------------------------------------------------------------------------------------------------


def shared_layers(comm: Any) -> list[Any]:
    """A row layer, a column layer and a row layer of sizes that do not divide; then the same on one process."""
    controller = CommController("mpi")
    torch.manual_seed(comm.rank)  # ranks take shards of what rank 0 draws
    model = torch.nn.Sequential(
        RowParallelLinear(6, 7, tp_comm=controller, dtype=7),
        torch.nn.Tanh(),
        ColumnParallelLinear(7, 5, tp_comm=controller, dtype=7, bias_initializer=torch.nn.init.ones_),
        RowParallelLinear(
            5,
            4,
            weight_initializer=lambda shape: torch.arange(20, dtype=torch.float64).reshape(shape) / 9,
            use_bias=False,
            dtype=7,
        ),
    )
    assert model[3].bias is None
    wholes = []
    for sharded in (model[0], model[2], model[3]):
        full = torch.nn.Linear(
            sharded.in_features, sharded.out_features, bias=sharded.bias is not None, dtype=torch.float64
        )
        by_columns = isinstance(sharded, ColumnParallelLinear)
        shards = comm.all_gather(sharded.weight.detach(), uneven=True)
        full.weight.data = torch.cat(shards, 0 if by_columns else 1)
        if sharded.bias is not None:
            biases = comm.all_gather(sharded.bias.detach(), uneven=True)
            full.bias.data = torch.cat(biases) if by_columns else biases[0].clone()
        wholes.append(full)
    assert wholes[1].bias.tolist() == [1.0] * 5
    assert wholes[2].weight[1].tolist() == [each / 9 for each in (1, 5, 9, 13, 17)]  # A is (inputs, outputs)
    alone = torch.nn.Sequential(wholes[0], torch.nn.Tanh(), wholes[1], wholes[2])
    start = copy.deepcopy(alone.state_dict())
    x, labels = samples(24)
    batches = [*zip(tensor.QTensor(x).split(8), labels.split(8), strict=True)]
    losses = [plain_steps(each, optim.Adam(each.parameters(), lr=0.05), batches) for each in (model, alone)]
    with pytest.raises(UsageError, match="the input is 4 wide; expected"):
        model[0](torch.ones(1, 4, dtype=torch.float64))
    return [*losses, start]


def test_shared_layers_train_as_one_process(pools: Pools) -> None:
    answers = pools("gloo", 2).run(shared_layers)
    for together, alone, start in answers:
        torch.testing.assert_close(together, alone, **CLOSE)
        torch.testing.assert_close(start, answers[0][2], rtol=0, atol=0)
