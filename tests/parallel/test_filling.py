"""A model that a function builds: ranks hold its initial values bit for bit, and no rank ever has more than its own."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono.nn as unn
from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build
from unisono.parallel.apply import parallelize
from unisono.parallel.layout import layout_of, local_of
from unisono.parallel.trainer import Trainer
from unisono.plan.plan import Plan

WIDTH, HIDDEN, BLOCKS = 512, 2048, 10
LARGEST = WIDTH * HIDDEN * 4
FULL = 2 * BLOCKS * LARGEST


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Attending(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0])


class Choosing(Block):
    """Where the numbers tell it to, as a router of the user's own would: it cannot be run without."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.up(x).mean(-1) > 0
        out = x.clone()
        out[chosen] = super().forward(x[chosen])
        return out


class Mixing(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.experts = unn.MoE(WIDTH, hidden // 2, experts=2, top_k=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x)


class Insisting(Block):
    """On memory of its own: no stand-in will do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.up.weight.untyped_storage().device.type == "meta":
            raise RuntimeError("load me first")
        return super().forward(x)


KINDS: dict[str, type[nn.Module]] = {each.__name__: each for each in (Block, Attending, Choosing, Mixing, Insisting)}


def big(kind: str = "Block", hidden: int = HIDDEN) -> nn.Module:
    model = nn.Sequential(*(KINDS[kind](hidden) for _ in range(BLOCKS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def _peak(profile: torch.profiler.profile) -> int:
    """The most bytes that tensors had at once, beyond what they had at the start."""
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
    return max(held)


def _trained(make: Any, plan: str, loss: Any, targets: torch.Tensor | None = None) -> Trainer:
    return parallelize(
        make,
        plan,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example=(torch.ones(4, 4, WIDTH), torch.zeros(4, 4, WIDTH) if targets is None else targets),
        rules={"*.up": "column", "*.down": "row"},
    )


def peak_of_building(comm: Communicator, kind: str, plan: str) -> tuple[int, int, str]:
    """The most memory that building took, what is held afterwards, in bytes, and why it was built in full."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer = _trained(lambda: big(kind), plan, F.mse_loss)
    peak = _peak(profile)
    held = sum(parameter.untyped_storage().nbytes() for parameter in trainer.model.parameters())
    return peak, held, trainer.note


@pytest.mark.parametrize(
    ("kind", "plan", "more"),
    [
        ("Block", "tp=2", 0),
        ("Block", "dp=2,zero=3", 0),
        ("Mixing", "pp=2,microbatches=2", BLOCKS * WIDTH * 2 * 4 // 2),  # the routers
        ("Choosing", "pp=2,microbatches=2", 0),
        ("Attending", "cp=2,pp=2,microbatches=2", 0),
    ],
)
def test_a_rank_never_has_more_than_its_own_and_a_tensor_more(
    pools: Callable[[str, int], RankPool], kind: str, plan: str, more: int
) -> None:
    for peak, held, note in pools("gloo", Plan.parse(plan).world).run(peak_of_building, kind, plan):
        assert not note
        assert held == FULL / 2 + more
        assert peak < FULL / 2 + 3 * LARGEST < FULL


def differing(comm: Communicator, name: str, plan: str) -> tuple[list[str], str]:
    """The parameters and buffers here that are not a part of what one process has, and why it was built in full."""
    task = getattr(tasks, name)
    trainer = parallelize(
        task.model,
        plan,
        loss=task.loss,
        optimizer=task.optimizer,
        example=task.batch(0),
        rules=task.rules,
        seed=5,
    )
    full = build(task.model, 5)
    expected = {**dict(full.named_parameters()), **dict(full.named_buffers())}
    held = {**dict(trainer.model.named_buffers()), **dict(trainer.optimized())}
    wrong = [
        key
        for key, tensor in held.items()
        if not torch.equal(tensor, local_of(expected[key], layout_of(tensor), trainer.mesh))
    ]
    trainer.step(task.batch(0))
    return wrong, trainer.note


PLANS = [
    ("mlp", "tp=2"),
    ("gpt", "dp=2,pp=2,microbatches=2,zero=3"),
    ("gpt", "dp=2,tp=2,sp,zero=3"),
    ("gpt", "cp=2,pp=2,microbatches=2"),
    ("moe", "dp=2,ep=2,pp=2,microbatches=2"),
    ("conv", "dp=4,zero=3"),
]
if importlib.util.find_spec("transformers"):
    PLANS += [("llama", "pp=2,tp=2,microbatches=2")]


@pytest.mark.parametrize(("task", "plan"), PLANS)
def test_values_are_those_of_one_process(pools: Callable[[str, int], RankPool], task: str, plan: str) -> None:
    for wrong, note in pools("gloo", Plan.parse(plan).world).run(differing, task, plan):
        assert not wrong
        assert not note


def mistakes(comm: Communicator) -> list[str]:
    """What is refused before training, of a model that is not there yet."""
    reported = []
    for loss, targets in (
        (lambda outputs, targets: outputs, None),
        (F.cross_entropy, torch.zeros(4, 3, dtype=torch.long)),
    ):
        try:
            _trained(lambda: big(hidden=2), "tp=2", loss, targets)
        except UsageError as error:
            reported.append(str(error))
    return reported


def test_a_loss_that_does_not_fit_is_refused_all_the_same(pools: Callable[[str, int], RankPool]) -> None:
    for reported in pools("gloo", 2).run(mistakes):
        assert "expected one number" in reported[0]
        assert "cross_entropy" in reported[1]


class Anchored(torch.optim.Optimizer):
    """Pulls parameters back to where they began, which it notes when it is made."""

    is_elementwise = True

    def __init__(self, parameters: Any, kept: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        given = [parameter for group in self.param_groups for parameter in group["params"]]
        if kept == "state":
            for parameter in given:
                self.state[parameter]["start"] = parameter.data.clone()
        elif kept == "attribute":
            self.starts = [parameter.detach().clone() for parameter in given]
        else:
            for parameter in given:
                parameter.data.mul_(2)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data += self.state[parameter]["start"] - parameter.data - 0.1 * parameter.grad


def anchored(comm: Communicator) -> tuple[list[str], list[str]]:
    """The parameters that differ from one process' after two steps, and what is refused."""
    batch = tasks.mlp.batch(0)
    job: dict[str, Any] = {"loss": F.cross_entropy, "example": batch, "seed": 5, "dtype": torch.float64}
    batch = batch[0].double(), batch[1]

    def parallel(make: Any, plan: str, kept: str) -> Trainer:
        return parallelize(make, plan, optimizer=lambda parameters: Anchored(parameters, kept), **job)

    full = build(lambda: tasks.MLP().double(), 5)
    one = Anchored(full.parameters(), "state")
    planned = parallel(tasks.MLP, "dp=2,zero=3", "state")
    for model in (planned.model, full):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    for _ in range(2):
        one.zero_grad()
        F.cross_entropy(full(batch[0]), batch[1]).backward()
        one.step()
        planned.step(batch)
    expected, found = dict(full.named_parameters()), planned.state_dict()["model"]
    wrong = [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)]
    reported = []
    for kept in ("attribute", "parameter"):
        try:
            parallel(tasks.MLP, "dp=2,zero=3", kept)
        except UsageError as error:
            reported.append(str(error))
    return wrong, reported


def test_an_optimizer_that_looks_at_values_when_it_is_made_sees_them(pools: Callable[[str, int], RankPool]) -> None:
    for wrong, reported in pools("gloo", 2).run(anchored):
        assert not wrong
        assert "keeps a tensor of a parameter's shape in its attribute starts" in reported[0]
        assert "changes first.weight while it is made" in reported[1]


def insisted(comm: Communicator) -> tuple[str, float]:
    trainer = _trained(lambda: big("Insisting", 2), "pp=2,microbatches=2", F.mse_loss)
    return trainer.note, float(trainer.step((torch.ones(4, 4, WIDTH), torch.zeros(4, 4, WIDTH))))


def test_a_pipeline_of_a_model_that_takes_no_stand_ins_is_built_full(pools: Callable[[str, int], RankPool]) -> None:
    for note, loss in pools("gloo", 2).run(insisted):
        assert "cannot be run tensor by tensor" in note
        assert loss > 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def recurrent_share(comm: Communicator, plan: str) -> tuple[str, int, float]:
    """Why it was built in full, the weights of a rank, and the loss of the second step."""
    batch = torch.ones(6, 3, 8), torch.zeros(6, 3, 8)
    trainer = parallelize(Recurrent, plan, loss=F.mse_loss, optimizer=torch.optim.SGD, example=batch)
    trainer.step(batch)
    return trainer.note, sum(each.numel() for each in trainer.model.parameters()), float(trainer.step(batch))


def test_recurrent_layers_are_built_in_part(pools: Callable[[str, int], RankPool]) -> None:
    full = sum(each.numel() for each in Recurrent().parameters())
    _, _, expected = pools("gloo", 1).run(recurrent_share, "dp=1")[0]
    for plan in ("dp=2,zero=3", "pp=2,microbatches=2"):
        for note, held, loss in pools("gloo", 2).run(recurrent_share, plan):
            assert note == ""
            assert held < 0.7 * full
            assert loss == pytest.approx(expected, rel=1e-5)
