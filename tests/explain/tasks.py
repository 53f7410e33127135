"""Tasks to be explained; what real ranks, simulated ranks and the listing communicate in a step under a plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

import unisono as uni
from tests.equivalence import foreign, tasks
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.explain.plan_program import recorded_step
from unisono.graph.render.listing import Listing
from unisono.parallel.task import load_task
from unisono.simulate.rank import simulated_trainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPT = f"{EXAMPLES / 'gpt.py'}:tiny"
VOCABULARY = 40
GATHERING = {"0.0": "column_gather", "1.0": "column", "2.0": "row", "3.0": "row_split", "4": "column_gather"}


class Encoder(nn.Module):
    """Of torch's own layers, which pack queries, keys and values and join samples and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(tokens)))


def _sentences(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCABULARY, (4, 6), generator=generator) for _ in range(2))  # type: ignore[return-value]


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def with_twelve_rows(task: uni.Task) -> uni.Task:
    """A batch that ranks and microbatches can share evenly."""

    def batch(seed: int) -> Any:
        return tree_map_only(torch.Tensor, lambda leaf: leaf[torch.arange(12) % len(leaf)], task.batch(seed))

    return dataclasses.replace(task, batch=batch)


def _visiting_all_experts(**options: Any) -> uni.Task:
    """How many rows travel does not depend on numbers."""

    def model() -> nn.Module:
        made = tasks.moe.model()
        for block in made.blocks:
            block[1].moe = uni.nn.MoE(16, 32, experts=4, top_k=4, **options)
        return made

    return with_twelve_rows(dataclasses.replace(tasks.moe, model=model, clip=0.5))


class Choosing(nn.Module):
    """Its experts are given the batch itself, whose tokens choose one each: the one that their largest number says."""

    def __init__(self, experts: int = 4, **options: Any) -> None:
        super().__init__()
        self.moe = uni.nn.MoE(4, 8, experts, top_k=1, **options)
        self.last = nn.Linear(4, 4)
        with torch.no_grad():
            self.moe.router.weight.copy_(10 * torch.eye(experts, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(x))


class Idle(Choosing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class Prompted(Choosing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) + self.moe(self.last.weight).mean(0)


def choosing(model: Callable[[], nn.Module], in_turn: bool = True) -> uni.Task:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = (
            torch.eye(4).repeat(12, 1) if in_turn else torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
        )
        return tokens.view(8, 6, 4), torch.zeros(8, 6, 4)

    return uni.Task(model, F.mse_loss, lambda parameters: torch.optim.SGD(parameters, 1e-3), batch)


def stack(rules: dict[str, str] | None, *between: nn.Module) -> uni.Task:
    """Linear layers, with something between each two."""

    def model() -> nn.Module:
        pairs = [nn.Sequential(nn.Linear(8, 8), each) for each in between]
        return nn.Sequential(*pairs, nn.Linear(8, 8))

    def batch(seed: int) -> Any:
        return torch.zeros(4, 8), torch.zeros(4, 8)

    return uni.Task(model, F.mse_loss, lambda parameters: torch.optim.SGD(parameters, 0.1), batch, rules=rules)


TASKS: dict[str, Callable[[], uni.Task]] = {
    "gpt": lambda: load_task(GPT),
    "encoder": lambda: uni.Task(Encoder, _loss, lambda parameters: torch.optim.SGD(parameters, 0.1), _sentences),
    "llama": lambda: foreign.llama,
    "gpt2": lambda: foreign.gpt2,
    "vit": lambda: foreign.vit,
    "bert": lambda: with_twelve_rows(foreign.bert),
    "qwen2": lambda: foreign.qwen2,
    "four": lambda: with_twelve_rows(tasks.gpt),
    "conv": lambda: with_twelve_rows(tasks.conv),
    "t5": lambda: with_twelve_rows(foreign.t5),
    "images": lambda: with_twelve_rows(foreign.vit),
    "rows": lambda: with_twelve_rows(foreign.llama),
    "tuned": lambda: with_twelve_rows(tasks.tuned),
    "experts": _visiting_all_experts,
    "balanced": lambda: _visiting_all_experts(aux_weight=0.1),
    "in turn": lambda: choosing(lambda: Choosing(capacity_factor=0.75)),
    "unevenly": lambda: choosing(Choosing, in_turn=False),
    "crowded": lambda: _visiting_all_experts(capacity_factor=1.0, aux_weight=0.1, gated=True, bias=False),
    "gathering": lambda: stack(GATHERING, nn.Identity(), nn.ReLU(), nn.ReLU(), nn.ReLU()),
}


Heard = Counter[tuple[str, int, tuple[int, ...]]]


class Counted:
    """Counts collectives and messages: kind, elements of this rank's tensor, and the group or the other rank. Without
    those of a loss' counts and value."""

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.rank, self.ranks = rank, ranks
        self.heard: Heard = Counter()

    def add(self, kind: str, dtype: torch.dtype, shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        elements = torch.Size(shape).numel()
        is_norm = kind == "all_reduce" and dtype == torch.float64 and ranks == self.ranks and not shape
        is_of_loss = dtype == torch.float64 or elements == 1
        if is_norm or (not is_of_loss and ranks != (self.rank,)):
            self.heard[kind, elements, ranks] += 1


def communication_of(comm: Communicator, name: str, plan: str) -> Heard:
    """Of a step on a real rank."""
    task = TASKS[name]()
    batch = task.batch(0)
    trainer = uni.parallelize(
        task.model, plan, loss=task.loss, optimizer=task.optimizer, rules=task.rules, example=batch, clip=task.clip
    )
    counted = Counted(comm.rank, comm.ranks)

    def hear(each: traffic.CommRecord) -> None:
        assert each.tensor is not None
        kind = each.op.removeprefix("i").removesuffix("_into")
        counted.add(kind, each.tensor.dtype, tuple(each.tensor.shape), each.ranks)

    trainer.step(batch)  # in the first, ranks also compare what they were given
    with traffic.counted(hear):
        trainer.step(batch)
    return counted.heard


def recorded(name: str, plan: str, rank: int) -> Heard:
    """Of a step on a simulated rank."""
    task = TASKS[name]()
    parsed = uni.Plan.parse(plan)
    with simulated_trainer(task, parsed, rank, task.batch(0)) as trainer:
        trainer.step(task.batch(0))
        record = recorded_step(trainer, task.batch(0))
    counted = Counted(rank, tuple(range(parsed.world)))
    for each in record.communication:
        assert each.tensor is not None
        counted.add(each.kind, each.tensor.dtype, each.tensor.shape, each.ranks)
    return counted.heard


def shown(listing: Listing) -> Heard:
    """Of a step with one microbatch, as it is shown."""
    counted = Counted(listing.rank, tuple(int(rank) for rank in listing.mesh.ranks.flatten()))
    lines = [collective for line in listing.lines for collective in (*line.forward, *line.backward)]
    for collective in (*lines, *listing.sums, *listing.updates):
        is_number = collective.detail in ("loss", "elements that the loss counts", "norm of the gradients")
        counted.add(collective.kind, torch.float64 if is_number else torch.float32, collective.before, collective.ranks)
    return counted.heard
