"""Where samples lie: models that do not have them first, that mix them, or that have tensors without any."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.random.state import RandomState, SampleDim
from unisono.parallel.apply import parallelize
from unisono.parallel.checks.samples import find_samples
from unisono.parallel.checks.separable import require_separable
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.train.engine import Engine
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
SGD = partial(torch.optim.SGD, lr=0.1)


def tokens(seed: int, time_major: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(11, (2, 4, 6), generator=generator)
    inputs, targets = drawn.transpose(1, 2).contiguous() if time_major else drawn
    return inputs, targets


def vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator), torch.randint(4, (4,), generator=generator)


def by_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


class LanguageModel(nn.Module):
    """As in PyTorch's tutorial: activations are (seq, batch, width); so are tokens, unless `transposes`."""

    def __init__(self, transposes: bool) -> None:
        super().__init__()
        self.transposes = transposes
        self.table, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(6, 1, 8))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 11)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.3) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x.t() if self.transposes else x) * math.sqrt(8) + self.positions
        x = self.drop(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.transpose(0, 1) if self.transposes else x)


class Positions(nn.Module):
    """As in DeBERTa: dropout of a table whose length is the batch's by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(4, 8))
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, positions = self.drop(self.table(x)), self.drop(self.positions)
        return self.head(hidden @ positions.t() @ positions + hidden)


class Folded(nn.Module):
    """Drops and adds noise where samples share a dim with tokens, first or last, and where they are second."""

    def __init__(self, alternates: bool) -> None:
        super().__init__()
        self.alternates = alternates
        self.table, self.drop, self.head = nn.Embedding(11, 8), nn.Dropout(0.4), nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.table(x)
        samples, length = x.shape
        if self.alternates:
            hidden = self.drop(hidden.transpose(0, 1).reshape(-1, 8)).view(length, samples, 8).transpose(0, 1)
        else:
            hidden = self.drop(hidden.reshape(-1, 8)).view(samples, length, 8)
        noise = torch.randn(length, samples, 8).transpose(0, 1) + torch.rand(samples, 1, 8) + torch.rand(8)
        return self.head(hidden + noise.to(hidden.dtype) * torch.bernoulli(torch.full_like(hidden, 0.5)))


LANGUAGE = Task(partial(LanguageModel, True), by_token, SGD, tokens)
TIME_MAJOR = Task(partial(LanguageModel, False), by_token, SGD, partial(tokens, time_major=True), batch_dim=1)
POSITIONS = Task(Positions, by_token, SGD, tokens)
FOLDED = [Task(partial(Folded, alternates), by_token, SGD, tokens) for alternates in (False, True)]


def prove(comm: Communicator, task: Task, plan: str) -> None:
    verdict = verify_here(comm, task, Plan.parse(plan), 2)
    assert verdict.equivalent, f"{plan}: {verdict}"


def refusal(comm: Communicator, task: Task, plan: str) -> str:
    try:
        prove(comm, task, plan)
    except UsageError as error:
        comm.barrier()
        return str(error)
    return ""


def check_random_numbers(comm: Communicator, plan: str) -> None:
    for task in (LANGUAGE, TIME_MAJOR, *([POSITIONS, *FOLDED] if plan.startswith("dp") else [])):
        prove(comm, task, plan)


@pytest.mark.parametrize("plan", ["dp=2,microbatches=2,zero=3", "pp=2,microbatches=2", "dp=2", "tp=2,microbatches=2"])
def test_random_numbers_follow_the_samples_wherever_they_lie(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(check_random_numbers, plan)


def check_first_step(comm: Communicator) -> str:
    """Without an example the first step finds out."""
    torch.manual_seed(0)
    model = Mixing(lambda x: x - x.mean(0))
    trainer = parallelize(model, "dp=2", loss=F.cross_entropy, optimizer=SGD)
    try:
        trainer.step(vectors(0))
    except UsageError as error:
        comm.barrier()
        return str(error)
    return ""


def test_the_first_step_finds_out_without_an_example(pools: Pools) -> None:
    for output in pools("gloo", 2).run(check_first_step):
        assert "it shows first in the input of last" in output


def check_engine(comm: Communicator) -> None:
    """The engine's loader makes time-major batches; predictions have samples where the model's outputs have them."""
    samples = [tuple(pair) for pair in zip(*(each.t() for each in tokens(0, time_major=True)), strict=True)]
    inputs, targets = tokens(0, time_major=True)
    torch.manual_seed(0)
    model, random = LanguageModel(False).double(), RandomState(0)
    random.name_modules(model)
    with random:
        expected = by_token(model(inputs), targets).item()
    torch.manual_seed(0)
    engine = Engine(LanguageModel(False).double(), by_token, SGD, plan="dp=2", batch_dim=1)
    history = engine.fit(samples, batch_size=4, shuffle=False, progress=False)
    assert history.losses[0] == pytest.approx(expected, rel=1e-12)
    predicted = engine.predict(inputs, batch_size=2)
    model.load_state_dict(engine.ready.state_dict()["model"])
    with torch.no_grad():
        torch.testing.assert_close(predicted, model.eval()(inputs))


def test_an_engine_trains_on_time_major_batches(pools: Pools) -> None:
    pools("gloo", 2).run(check_engine)


# ---- models that mix samples -----------------------------------------------------------------------------------------


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.mix = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mix(self.norm(self.first(x))))


MIXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "max": lambda x: x - x.max(0).values,
    "softmax": lambda x: x * x.softmax(0),
    "attention": lambda x: (x @ x.t()).softmax(-1) @ x,
    "size": lambda x: x / x.shape[0],
    "neighbour": lambda x: x + x.roll(1, 0),
}


@pytest.mark.parametrize("name", MIXES)
def test_samples_that_are_mixed_are_found(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="it shows first in the input of last"):
        find_samples(Mixing(MIXES[name]), vectors(0))


def test_batch_statistics_are_no_mixing() -> None:
    found = find_samples(Mixing(torch.tanh), vectors(0))
    assert found is not None
    assert found.outputs == (SampleDim(2, 0),)


def test_a_model_is_left_as_it_was() -> None:
    model = Mixing(torch.tanh)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    find_samples(model, vectors(0))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_time_major_inputs_are_recognised() -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="pass batch_dim=1"):
        find_samples(LanguageModel(False), tokens(0, time_major=True))


def test_without_values_shapes_are_enough() -> None:
    with torch.device("meta"):
        model = LanguageModel(True)
    found = find_samples(model, tokens(0))
    assert found is not None
    assert found.draws[("drop", 0)] == SampleDim(3, 1)
    assert found.draws[("layers.0.self_attn", 0)] == SampleDim(4, 0)


class Counting(nn.Module):
    """Keeps statistics of its inputs, or counts its forward passes, in a buffer."""

    seen: torch.Tensor

    def __init__(self, by_samples: bool) -> None:
        super().__init__()
        self.by_samples, self.last = by_samples, nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.mean(0) if self.by_samples else 1
        return self.last(x)


def test_buffers_that_depend_on_samples_are_found() -> None:
    with pytest.raises(UsageError, match="writes the buffer seen, with values that depend on the samples"):
        find_samples(Counting(True), vectors(0))
    assert find_samples(Counting(False), vectors(0)) is not None
    with pytest.raises(UsageError, match="every forward pass changes the buffer seen"):
        find_samples(Counting(False), vectors(0), microbatches=2)


class Renormalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.embedding(x, self.table, max_norm=0.5)


def test_parameters_that_are_written_are_found() -> None:
    with pytest.raises(UsageError, match="writes the parameter table"):
        find_samples(Renormalising(), tokens(0))


LOOKUPS = [nn.Embedding(9, 8, max_norm=1.0), nn.EmbeddingBag(9, 8, max_norm=1.0)]
COUNTED = [nn.Embedding(9, 8, scale_grad_by_freq=True), nn.EmbeddingBag(9, 8, scale_grad_by_freq=True)]


@pytest.mark.parametrize("plan", ["dp=2", "microbatches=2", "tp=2", "dp=2,zero=3"])
def test_lookups_that_depend_on_other_ids_are_refused(plan: str) -> None:
    for layer, word in [*((each, "max_norm") for each in LOOKUPS), *((each, "scale_grad") for each in COUNTED)]:
        with pytest.raises(UsageError, match=rf"0 \({type(layer).__name__}\) has {word}"):
            require_separable(nn.Sequential(layer), Plan.parse(plan))
    require_separable(nn.Sequential(*LOOKUPS, *COUNTED), Plan())


@pytest.mark.parametrize("plan", ["microbatches=2", "recompute=full"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norms_are_refused_where_forward_passes_repeat(norm: Any, plan: str) -> None:
    with pytest.raises(UsageError, match="has a spectral norm that goes on"):
        require_separable(nn.Sequential(norm(nn.Linear(4, 4))), Plan.parse(plan))


def check_layers_with_hooks(comm: Communicator) -> None:
    for norm in (nn.utils.spectral_norm, nn.utils.weight_norm):
        task = Task(
            lambda norm=norm: nn.Sequential(norm(nn.Linear(6, 6)), nn.Linear(6, 4)), F.cross_entropy, SGD, vectors
        )
        prove(comm, task, "dp=2")
    prove(comm, task, "dp=2,microbatches=2,recompute=full")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_norms_by_hooks_are_right_where_forward_passes_do_not_repeat(pools: Pools) -> None:
    pools("gloo", 2).run(check_layers_with_hooks)


# ---- what has no samples ---------------------------------------------------------------------------------------------


class TwoTasks(nn.Module):
    """Returns, beside logits, learned log-variances of its tasks: 0 at first."""

    def __init__(self, copies: bool = False) -> None:
        super().__init__()
        self.copies = copies
        self.one, self.two, self.weights = nn.Linear(6, 4), nn.Linear(6, 4), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.one(x), self.two(x), self.weights.clone() if self.copies else self.weights


def weighed(outputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> torch.Tensor:
    one, two, weights = outputs
    losses = F.cross_entropy(one, targets), F.cross_entropy(two, targets, reduction="sum")
    return sum(((-w).exp() * loss + w for loss, w in zip(losses, weights, strict=True)), weights.square().mean())


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.last(x)
        return logits, logits.square().mean()


def with_auxiliary(outputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], targets) + outputs[1]


def without_auxiliary(outputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], targets)


class Graph(nn.Module):
    """Takes edges between features beside samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).index_add(1, edges[1], x[:, edges[0]]))


def graphs(seed: int) -> tuple[Any, torch.Tensor]:
    inputs, targets = vectors(seed)
    return {"x": inputs, "edges": torch.tensor([[0, 1, 2], [3, 3, 5]])}, targets


GRAPH = Task(Graph, F.cross_entropy, SGD, graphs)
MARKED = Task(Graph, F.cross_entropy, SGD, graphs, batch_dim=({"x": 0, "edges": None}, 0))


def check_outputs(comm: Communicator) -> list[str]:
    for plan in ("dp=2", "dp=2,microbatches=2", "microbatches=2,tp=2"):
        prove(comm, Task(TwoTasks, weighed, SGD, vectors), plan)
    for copies in (True, False):
        prove(comm, Task(partial(TwoTasks, copies=copies), weighed, SGD, vectors), "dp=2,zero=3")
    prove(comm, Task(Auxiliary, without_auxiliary, SGD, vectors), "dp=2")
    for plan in ("dp=2", "dp=2,microbatches=2"):
        prove(comm, MARKED, plan)
    prove(comm, GRAPH, "tp=2")
    return [
        refusal(comm, Task(Auxiliary, with_auxiliary, SGD, vectors), "dp=2"),
        refusal(comm, GRAPH, "dp=2"),
    ]


def test_tensors_without_samples_count_once_or_are_refused(pools: Pools) -> None:
    for auxiliary, graph in pools("gloo", 2).run(check_outputs):
        assert "the model's output[1] is of shape () for any number of samples" in auxiliary
        assert "batch_dim=" in graph


class DrawnOutside(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 3), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 + self.draw())


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's random"), (numpy.random.rand, "numpy.random")])
def test_draws_outside_torch_are_refused(draw: Callable[[], float], name: str) -> None:
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with pytest.raises(UsageError, match=f"draws numbers with {name}, of which every rank"):
        find_samples(DrawnOutside(draw), batch, 0, F.cross_entropy, 1)
    random.seed(0)
    state = random.getstate()
    assert find_samples(DrawnOutside(lambda: 0.5), batch, 0, F.cross_entropy, 1) is not None
    assert random.getstate() == state
