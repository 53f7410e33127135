"""Programs of models that are written in odd ways, and train as they do on one device: buffers that change under
no_grad, slices that are written to, dropouts of channels, random ops that no rule knows, gradients that add up."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.graph.capture.trace import trace
from unisono.parallel.task import Task
from unisono.verify.compare import Verdict
from unisono.verify.mesh_program import ProgramSpec
from unisono.verify.verify import parsed, verify_here

Pools = Callable[[str, int], RankPool]


class Odd(nn.Module):
    scale: torch.Tensor
    norm: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 4)
        self.channels, self.alpha = nn.Dropout2d(0.3), nn.AlphaDropout(0.3)
        self.instances = nn.InstanceNorm2d(4, track_running_stats=True)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("norm", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = self.channels(y + self.instances(y))
        with torch.no_grad():
            self.scale.mul_(0.9).add_(y.square().mean((0, 2, 3)), alpha=0.1)
            torch.mul(self.norm, 0.5, out=self.norm)
        z = self.alpha(y.mean((2, 3)) / self.scale * self.norm)
        z[:, 0] = z[:, 1]
        z[0] += 1
        z[z > 1.5] = 0.5
        return self.head(z)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 2, 5, 5, generator=generator), torch.randint(4, (8,), generator=generator)


def prove_odd(comm: Communicator) -> list[Verdict]:
    task = Task(model=Odd, loss=F.cross_entropy, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2), batch=batch)
    return [verify_here(comm, task, ProgramSpec.parse(words), 2) for words in ("dp=2", "mp=2,full")]


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(rows))


def prove_sparse(comm: Communicator) -> list[Verdict]:
    def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([1, 1, 3, 5]) + seed % 2, torch.tensor([0, 1, 2, 3])

    task = Task(model=Looked, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=rows)
    return [verify_here(comm, task, ProgramSpec.parse("dp=2"), 2)]


def made(model: Callable[[], nn.Module], axis: str, example: Any) -> uni.Program:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    program: uni.Program = uni.to_static(
        model, example=example, mesh=uni.Mesh((2,), (axis,)), loss=F.cross_entropy, optimizer=sgd
    )
    return program


def add_up(comm: Communicator) -> None:
    """Two backwards before an update, with an embedding whose gradients torch would keep sparse."""
    batches = [(torch.tensor([1, 1, 3, 5]) + k, torch.tensor([0, 1, 2, 3])) for k in range(2)]
    program = made(Looked, "dp", batches[0])
    torch.manual_seed(0)
    model = Looked()
    model.load_state_dict(program.state_dict()["model"])
    for inputs, targets in batches:
        program.backward((inputs, targets))
        F.cross_entropy(model(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = program.shards.full(name, dict(program.named_parameters())[name].grad)
        torch.testing.assert_close(found, parameter.grad.to_dense())


class Noisy(nn.Module):
    """Draws for each sample, as variational models and stochastic depth do, and by a Gumbel softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.slopes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = self.inner(x), self.head(x)
        torch.rand(4), F.dropout(mean)  # what nothing depends on is drawn all the same
        y = mean + torch.randn_like(mean) * scale.exp() + torch.rand(len(x), 4) + x.new_empty(len(x), 4).normal_(1, 2)
        y = y * x.new_empty(len(x), 1).bernoulli_(0.5).div_(0.5) + torch.bernoulli(x.sigmoid())
        y = y * F.gumbel_softmax(self.slopes(y)) + Normal(mean, scale.exp(), validate_args=False).rsample()
        return y + torch.randn_like(self.head.bias) + torch.randint(1, 9, (len(x), 1)).to(y.dtype)


class Shuffled(nn.Module):
    """Draws for the full batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.slopes = nn.Linear(4, 4), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.slopes(x[:, torch.randperm(4)]) + x[torch.randperm(len(x))]
        return self.head(x[torch.multinomial(torch.ones(len(x)), len(x), replacement=True)])


def prove_draws(comm: Communicator) -> list[Verdict]:
    torch.manual_seed(comm.rank)  # ranks draw alike, whatever torch would

    def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)), torch.tensor([0, 1, 2, 3])

    def proved(model: Callable[[], nn.Module], words: str) -> Verdict:
        task = Task(model=model, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=rows)
        return verify_here(comm, task, parsed(words), 2)

    found = [proved(Noisy, words) for words in ("program dp=2", "program mp=2,full", "dp=2", "dp=2,microbatches=2")]
    found += [proved(Shuffled, words) for words in ("program dp=2", "program mp=2,full")]
    return found


class MarkedInTraining(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.relu = uni.shard(F.relu, ((2, 1),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(super().forward(x)) if self.training else super().forward(x)


def evaluate_unmarked(comm: Communicator) -> None:
    batch = torch.ones(4, 4), torch.tensor([0, 1, 2, 3])
    program = made(MarkedInTraining, "dp", batch)
    program.eval()
    model = nn.Linear(4, 4)
    model.load_state_dict(program.state_dict()["model"])
    torch.testing.assert_close(program(batch), F.cross_entropy(model(batch[0]), batch[1]).detach())


def test_marks_of_training_are_not_asked_for_in_evaluation(pools: Pools) -> None:
    pools("gloo", 2).run(evaluate_unmarked)


def test_gradients_add_up(pools: Pools) -> None:
    pools("gloo", 2).run(add_up)


@pytest.mark.parametrize("prove", [prove_odd, prove_sparse, prove_draws])
def test_the_result_of_one_device(pools: Pools, prove: Callable[[Communicator], list[Verdict]]) -> None:
    for verdict in pools("gloo", 2).run(prove)[0]:
        assert verdict.equivalent, verdict


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Past(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        with torch.no_grad():
            y.mul_(2)
        return y


class Average(nn.Linear):
    """Follows what it sees, as `follow` does it."""

    seen: torch.Tensor

    def __init__(self, follow: Callable[[Average, torch.Tensor], Any]) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.ones(4))
        self.follow = follow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow(self, x)
        return super().forward(x * self.seen)


def assign(model: Average, x: torch.Tensor) -> None:
    model.seen = model.seen + x.mean(0)


class OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * 3


class Then(nn.Linear):
    """A layer whose result goes through a function of the model and its result."""

    def __init__(self, then: Callable[[Then, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(4, 4)
        self.then, self.runs, self.last, self.cache = then, 0, torch.ones(4), None
        self.table: dict[int, torch.Tensor] = {}
        self.own = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, super().forward(x))


def with_hook(model: Then, y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda gradient: gradient * 2)
    return y


def count(model: Then, y: torch.Tensor) -> torch.Tensor:
    model.runs += 1
    return y * 0.5**model.runs


def remember(model: Then, y: torch.Tensor) -> torch.Tensor:
    y = y + model.last
    model.last = y.detach().mean(0)
    return y


def fill(model: Then, y: torch.Tensor) -> torch.Tensor:
    y = y if model.cache is None else y + model.cache[0]
    model.cache = (y.detach(),)  # type: ignore[assignment]
    return y


def create(model: Then, y: torch.Tensor) -> torch.Tensor:
    y = y + getattr(model, "new", 0)
    model.new = y.detach()
    return y


def tabulate(model: Then, y: torch.Tensor) -> torch.Tensor:
    """Makes once what is always the same, and notes what nothing depends on."""
    if len(y) not in model.table:
        model.table[len(y)] = torch.arange(4.0).cos()
    model.seen = y.detach()
    return y * model.table[len(y)]


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda module, given, made: None)
    return model


def parameter_hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return model


LOST: dict[str, Callable[[], nn.Module]] = {
    r"at test_program_odd.py:\d+ OwnGradient computes gradients of its own": lambda: Then(
        lambda model, y: OwnGradient.apply(y)  # type: ignore[no-any-return,no-untyped-call]
    ),
    r"at test_program_odd.py:\d+ CheckpointFunction .*use_reentrant=False": lambda: Then(
        lambda model, y: checkpoint(torch.tanh, y, use_reentrant=True)
    ),
    r"at test_program_odd.py:\d+ a hook is put on a gradient": lambda: Then(with_hook),
    "the model changes self.runs as it runs, and its ops depend on it": lambda: Then(count),
    "replaces self.last as it runs, and its ops depend": lambda: Then(remember),
    "the model changes self.cache as it runs, and its ops depend on it": lambda: Then(fill),
    "the model changes self.new as it runs, and its ops depend on it": lambda: Then(create),
    "0 has a backward hook": hooked,
    "weight has a hook for its gradient": parameter_hooked,
}


DRAWN: tuple[Callable[[Then, torch.Tensor], torch.Tensor], ...] = (
    lambda model, y: y * random.random(),
    lambda model, y: y * random.choice([1, 2]),
    lambda model, y: y if numpy.random.rand() < 2 else -y,
    lambda model, y: y * vars(model).setdefault("dice", numpy.random.default_rng(0)).normal(),
)


def test_draws_that_are_not_torch_s_are_refused_with_their_line() -> None:
    example = torch.zeros(4, 4), None
    for draw in DRAWN:
        model = Then(draw)
        model.dice = numpy.random.default_rng(0)
        (reported,) = trace(model, example).lost
        assert f"at test_program_odd.py:{draw.__code__.co_firstlineno} the model draws from Python's random" in reported
    before = random.getstate()
    model = Then(tabulate)
    assert trace(model, example).lost == ()
    assert random.getstate() == before
    assert not hasattr(model, "seen")
    assert not model.table


def lose(comm: Communicator) -> list[str]:
    reported = []
    for model in LOST.values():
        with pytest.raises(UsageError) as caught:
            made(model, "dp", (torch.zeros(4, 4), torch.zeros(4).long()))
        reported.append(str(caught.value))
    return reported


def test_what_ops_do_not_tell_is_refused(pools: Pools) -> None:
    for reported, expected in zip(pools("gloo", 2).run(lose)[0], LOST, strict=True):
        assert re.search(expected, reported)
        assert "which a program would lose; use a plan" in reported


REFUSED: tuple[Callable[[], nn.Module], ...] = (
    lambda: Clamped(4, 4),
    lambda: Past(4, 4),
    lambda: Average(assign),
    lambda: Average(lambda model, x: model.seen.data.copy_(x.mean(0))),
    lambda: Then(lambda model, y: torch.poisson(y.exp())),
    lambda: Then(lambda model, y: y * torch.rand(4, generator=model.own)),
)


def refused(comm: Communicator) -> list[str]:
    reported = []
    for model in REFUSED:
        with pytest.raises(UsageError) as caught:
            made(model, "dp", (torch.zeros(4, 4), torch.zeros(4).long()))
        reported.append(str(caught.value))
    return reported


def test_what_a_graph_cannot_hold_is_refused(pools: Pools) -> None:
    clamped, past, assigned, data, drawn, own = pools("gloo", 2).run(refused)[0]
    assert "changes its parameter weight in its forward" in clamped
    assert "in place and under no_grad, a tensor that has gradients" in past
    assert "replaces its buffer seen" in assigned
    assert "the .data of one" in data
    assert re.search(r"at test_program_odd.py:\d+ the model draws random numbers by aten.poisson", drawn)
    # torch 2.11 traces less
    assert re.search("the model gives aten.rand.generator an object that is neither|the model cannot be traced at", own)
    assert re.search(r"at test_program_odd.py:\d+", own)
