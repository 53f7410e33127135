"""What code keeps between its calls, beside parameters and buffers, and what mixes samples in the backward alone: right
or refused, and left as it was by trial runs."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.side_effects import no_side_effects
from unisono.parallel.apply import parallelize
from unisono.parallel.checks.samples import find_samples
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.training_record import plain_record
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
SGD = partial(torch.optim.SGD, lr=0.1)
WIDTH = 6


def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, 4, generator=generator)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hidden(x))


# ---- a model that keeps something from one forward pass to the next --------------------------------------------------


class RunningMean(Net):
    """Centres by a mean of the batches before, which is an attribute and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        centred = hidden - self.mean.to(hidden)
        self.mean = 0.9 * self.mean.to(hidden) + 0.1 * hidden.detach().mean(0)
        return self.last(centred)


class RunningMeanInPlace(RunningMean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        centred = hidden - self.mean.to(hidden)
        self.mean.lerp_(hidden.detach().mean(0).to(self.mean), 0.1)
        return self.last(centred)


class Queue(Net):
    """Attends to the last samples of the batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[torch.Tensor] = deque(maxlen=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        seen = torch.stack([*self.queue]) if self.queue else hidden.new_zeros(1, WIDTH)
        self.queue.extend(hidden.detach()[-2:])
        return self.last(hidden + (hidden @ seen.t()).softmax(1) @ seen)


class Annealed(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Recurrent(Net):
    """Goes on from the hidden state that each sample's place in the batch had before."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x) if self.state is None else self.hidden(x) + 0.5 * self.state
        self.state = hidden.detach()
        return self.last(hidden)


class Showing(Net):
    """Keeps its activations to be looked at, and does not look at them itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.hidden(x)
        return self.last(self.seen)


@pytest.mark.parametrize("model", [RunningMean, RunningMeanInPlace, Queue])
def test_state_of_the_samples_is_refused(model: type[Net]) -> None:
    with pytest.raises(UsageError, match=rf"the forward pass keeps {model.__name__}\.(mean|queue) from one call"):
        find_samples(model(), vectors(0))


def test_state_of_the_calls_is_refused_where_there_are_more_of_them() -> None:
    for model, attribute in ((Annealed(), "Annealed.calls"), (Recurrent(), "Recurrent.state")):
        assert find_samples(model, vectors(0)) is not None
        with pytest.raises(UsageError, match=f"every forward pass changes {attribute} and depends on"):
            find_samples(model, vectors(0), microbatches=2)
    assert find_samples(Showing(), vectors(0), microbatches=2) is not None


def equivalent(comm: Communicator, model: Callable[[], nn.Module], loss: Any, plan: str) -> bool:
    return verify_here(comm, Task(model, loss, SGD, vectors), Plan.parse(plan), 2).equivalent


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(AnnealedLayer(), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class AnnealedLayer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


def check_models(comm: Communicator) -> None:
    for model in (Annealed, Recurrent, Showing):
        assert equivalent(comm, model, F.mse_loss, "dp=2")
    assert equivalent(comm, Blocks, F.mse_loss, "dp=2,recompute=full")
    for model in (RunningMean, RunningMeanInPlace):
        with pytest.raises(UsageError, match="the forward pass keeps"):
            equivalent(comm, model, F.mse_loss, "dp=2")
        comm.barrier()


def test_models_that_keep_something_are_right_or_refused(pools: Pools) -> None:
    pools("gloo", 2).run(check_models)


def test_a_trial_run_leaves_tensors_in_attributes_as_they_were() -> None:
    model = RunningMeanInPlace()
    for _ in range(2):
        with no_side_effects(model) as changed:
            assert not changed()
            model(vectors(0)[0])
            assert changed() == {"RunningMeanInPlace.mean"}
        assert not model.mean.any()


# ---- a loss that does ------------------------------------------------------------------------------------------------


class AnnealedLoss:
    def __init__(self, rate: float) -> None:
        self.calls, self.rate = 0, rate

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(outputs, targets) + self.rate * self.calls * outputs.square().mean()


class Head(nn.Module):
    """With logits that tp leaves in shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(self.up(x).tanh()))


def steps(comm: Communicator, plan: str, rate: float) -> list[float]:
    torch.manual_seed(0)
    batch = vectors(0)
    rules = {"up": "column", "down": "row", "head": "logits"} if "tp" in plan else None
    trainer = parallelize(Head(), plan, loss=AnnealedLoss(rate), optimizer=SGD, example=batch, rules=rules)
    return [float(trainer.step(batch)) for _ in range(2)]


def check_losses(comm: Communicator) -> None:
    torch.manual_seed(0)
    model, loss = Head(), AnnealedLoss(0.1)
    optimizer, expected = SGD(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model(vectors(0)[0]), vectors(0)[1])
        value.backward()
        optimizer.step()
        expected.append(float(value))
    assert steps(comm, "tp=2", 0.1) == pytest.approx(expected, rel=1e-5)
    for rate in (0.1, 1e-5):
        with pytest.raises(UsageError, match=r"AnnealedLoss keeps AnnealedLoss\.calls from one call to the next"):
            steps(comm, "dp=2", rate)
        comm.barrier()


def test_a_loss_that_counts_its_calls_is_right_or_refused(pools: Pools) -> None:
    pools("gloo", 2).run(check_losses)


# ---- a backward that mixes samples -----------------------------------------------------------------------------------


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - gradient.mean(0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.3 * gradient


class CentredGradients(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return Centred.apply(self.first(x))


class NormedGradients(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: gradient / gradient.norm())  # not where there is no gradient
        return hidden


class ReversedGradients(Net):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = Reversed.apply(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return hidden


class Routing(Net):
    """Tokens come to the experts by their routes: what an expert puts out has no samples one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        routes = hidden.detach().sum(1).argsort()
        return hidden.new_zeros(hidden.shape).index_copy(0, routes, self.act(hidden[routes]))


def test_a_backward_by_routes_is_none_that_mixes_samples() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        assert find_samples(Routing(), vectors(seed), looks_back=True) is not None


@pytest.mark.parametrize("model", [CentredGradients, NormedGradients])
def test_a_backward_that_mixes_samples_is_refused(model: type[Net]) -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=r"the gradient of the output of first \(Linear\) for a sample depends on"):
        find_samples(model(), vectors(0), looks_back=True)


def check_backwards(comm: Communicator) -> None:
    assert equivalent(comm, ReversedGradients, F.mse_loss, "dp=2")
    for model in (CentredGradients, NormedGradients):
        with pytest.raises(UsageError, match="mixes them in the backward"):
            equivalent(comm, model, F.mse_loss, "dp=2")
        comm.barrier()
        trainer = parallelize(model(), "dp=2", loss=F.mse_loss, optimizer=SGD)
        with pytest.raises(UsageError, match="mixes them in the backward"):
            trainer.model(vectors(0)[0])
        comm.barrier()


def test_a_backward_that_mixes_samples_is_refused_with_and_without_an_example(pools: Pools) -> None:
    pools("gloo", 2).run(check_backwards)


# ---- a model whose copy is not what it is ----------------------------------------------------------------------------


class Penalised(Net):
    """Collects a penalty by a hook whose closure holds the model."""

    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[torch.Tensor] = []
        self.first.register_forward_hook(lambda *call: self.penalties.append(call[2].square().mean()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.penalties.clear()
        return super().forward(x), sum(self.penalties)


def penalised(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[0], targets) + outputs[1]


def check_hooks(comm: Communicator) -> None:
    for plan in ("dp=2", "dp=2,zero=3"):
        with pytest.raises(UsageError, match=r"the model's output\[1\] is of shape \(\)"):
            equivalent(comm, Penalised, penalised, plan)
        comm.barrier()


def test_a_hook_that_holds_the_model_is_tried_on_the_model(pools: Pools) -> None:
    pools("gloo", 2).run(check_hooks)


# ---- torch.func ------------------------------------------------------------------------------------------------------


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(WIDTH, 4)

    def one(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.one)(x)


def check_transforms(comm: Communicator) -> None:
    assert equivalent(comm, Mapped, F.mse_loss, "dp=2")
    with pytest.raises(UsageError, match=r"ZeRO 3 gathers runs inside a transform of torch\.func"):
        equivalent(comm, Mapped, F.mse_loss, "dp=2,zero=3")
    comm.barrier()


def test_transforms_of_torch_func(pools: Pools) -> None:
    pickle.dumps(plain_record(Task(Mapped, F.mse_loss, SGD, vectors), 1, torch.float64))  # as the command does
    pools("gloo", 2).run(check_transforms)


# ---- constructors that draw outside torch ----------------------------------------------------------------------------


class Routed(Net):
    """Chooses by Python's generator which of its inputs it looks at."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.first.weight[:, random.randrange(WIDTH)] = 0.0


def check_constructors(comm: Communicator) -> None:
    options = {"loss": F.mse_loss, "optimizer": SGD, "example": vectors(0)}
    for plan in ("dp=2", "dp=2,zero=3"):
        random.seed(comm.rank)
        with pytest.raises(UsageError, match="draws from Python's random, which is in another state on every rank"):
            parallelize(Routed, plan, **options)  # type: ignore[arg-type]
        random.seed(7)
        parallelize(Routed, plan, **options).step(vectors(0))  # type: ignore[arg-type]


def test_constructors_that_draw_outside_torch_must_draw_alike(pools: Pools) -> None:
    pools("gloo", 2).run(check_constructors)
