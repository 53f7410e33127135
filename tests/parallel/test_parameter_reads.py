"""Parameters that other code than their layer reads, and gradients of gradients: as on one device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.parallel.apply import parallelize
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
RULES = {"table": "vocab", "*.up": "column", "*.down": "row", "head": "column_gather"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(11, 6), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 11)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.table(tokens)))


class Regularised(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * sum(parameter.pow(2).sum() for parameter in self.parameters())


class TiedByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(self.table(tokens)), self.table.weight)


class Borrowing(Net):
    """Another module holds the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Scores()  # type: ignore[assignment]
        self.head.weight = self.table.weight


class Scores(nn.Module):
    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Penalised(Net):
    """The slope of the hidden states in the embeddings, as in gradient penalties."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = self.table(tokens)
            x = x if x.requires_grad else x.requires_grad_()
            hidden = self.hidden(x)
            (slope,) = torch.autograd.grad(hidden.pow(2).sum(), x, create_graph=True)
        return self.head(hidden) * (1 + slope.pow(2).mean((1, 2), keepdim=True))


class WithDtype(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = super().forward(tokens)
        return y.to(self.head.weight.dtype).to(next(self.parameters()).device)


class _Kernel(torch.autograd.Function):
    """As a kernel outside of torch, which its modes do not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch._C.DisableTorchFunction():
            return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight.sum(), (grads[0] * x).sum() * torch.ones_like(weight)


class Fused(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return _Kernel.apply(super().forward(tokens), self.blocks[0].up.weight)


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(11, (4, 5), generator=drawn), torch.randint(11, (4, 5), generator=drawn)


def per_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def came(comm: Communicator, build: Any, plan: str, rules: dict[str, str] | None = None) -> str:
    """ "" where the plan is equivalent, else why not."""
    task = Task(build, per_token, partial(torch.optim.AdamW, lr=0.01), tokens, rules=rules)
    try:
        verdict = verify_here(comm, task, Plan.parse(plan), 2)
    except UsageError as error:
        return str(error)
    return "" if verdict.equivalent else f"not equivalent: {verdict}"


def check_reads(comm: Communicator) -> dict[str, str]:
    without_head = {key: value for key, value in RULES.items() if key != "head"}
    with_table_full = {key: value for key, value in without_head.items() if key != "table"}
    return {
        "regularised": came(comm, Regularised, "tp=2", RULES),
        "tied": came(comm, TiedByHand, "tp=2", without_head),
        "borrowed": came(comm, Borrowing, "tp=2", without_head),
        "tied, full": came(comm, TiedByHand, "tp=2", with_table_full),
        "fused": came(comm, Fused, "tp=2", RULES),
        "dtype": came(comm, WithDtype, "tp=2", RULES),
        "zero 3": came(comm, Regularised, "dp=2,zero=3"),
        "zero 2": came(comm, WithDtype, "dp=2,zero=3"),
    }


def test_a_shard_is_not_taken_for_the_full_parameter(pools: Pools) -> None:
    for outcomes in pools("gloo", 2).run(check_reads):
        assert "Regularised reads table.weight, of which each rank holds a shard" in outcomes["regularised"]
        assert "TiedByHand reads table.weight" in outcomes["tied"]
        assert '{"table": "replicate"}' in outcomes["tied"]
        assert "Fused reads blocks.0.up.weight" in outcomes["fused"]
        assert "head (Scores) reads table.weight" in outcomes["borrowed"]
        assert "which ZeRO 3 gathers for its own module only; use zero=2 or less" in outcomes["zero 3"]
        assert outcomes["tied, full"] == outcomes["dtype"] == outcomes["zero 2"] == ""


def check_reading_loss(comm: Communicator, plan: str, rules: dict[str, str] | None) -> str:
    torch.manual_seed(0)
    model = Net()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return per_token(outputs, targets) + sum(parameter.pow(2).sum() for parameter in model.parameters())

    try:
        trainer = parallelize(model, plan, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), rules=rules)
        trainer.step(tokens(0))
    except UsageError as error:
        return str(error)
    return ""


def test_a_loss_that_reads_parameters(pools: Pools) -> None:
    for plan, rules in (("tp=2", RULES), ("dp=2,zero=3", None)):
        for reported in pools("gloo", 2).run(check_reading_loss, plan, rules):
            assert "the loss reads table.weight" in reported or "has a term of the model's parameters" in reported


def check_penalties(comm: Communicator) -> dict[str, str]:
    plans = {"tp=2": RULES, "dp=2,zero=2": None, "dp=2,zero=3": None}
    return {plan: came(comm, Penalised, plan, rules) for plan, rules in plans.items()}


def test_gradients_of_gradients(pools: Pools) -> None:
    for outcomes in pools("gloo", 2).run(check_penalties):
        refused = outcomes.pop("dp=2,zero=3")
        assert "computes gradients during the forward" in refused
        assert outcomes == dict.fromkeys(outcomes, "")


class ByRows(Net):
    """Blocks run inside vmap."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(super().hidden)(x)


def check_transforms(comm: Communicator) -> list[str]:
    without_table = {key: value for key, value in RULES.items() if key != "table"}
    return [came(comm, ByRows, "tp=2", without_table), came(comm, ByRows, "dp=2,recompute=full")]


def test_transforms_around_sharded_and_recomputed_modules_are_refused(pools: Pools) -> None:
    for sharded, recomputed in pools("gloo", 2).run(check_transforms):
        assert "a sharded layer runs inside a transform of torch.func" in sharded
        assert "a recomputed module runs inside a transform of torch.func" in recomputed
