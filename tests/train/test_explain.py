"""`explain --plan`: what it shows of a plan is what ranks do under it, byte by byte."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from examples import gpt as plain
from tests.equivalence import foreign, tasks
from tests.ranks import RankPool
from tests.train.shown import (
    GPT,
    TASKS,
    Choosing,
    Heard,
    Idle,
    Prompted,
    choosing,
    explained,
    said,
    shown,
    stack,
    with_twelve_rows,
)
from unisono.cli import main
from unisono.errors import UsageError
from unisono.graph.account import account
from unisono.graph.drawing import as_svg
from unisono.parallel.task import load_task
from unisono.train.plan_program import PlanProgram


@pytest.mark.parametrize("name", ["gathering", "t5", "vit"])
def test_a_plan_s_tp_is_shown_as_ranks_run_it(pools: Callable[[str, int], RankPool], name: str) -> None:
    told = shown(PlanProgram(TASKS[name](), uni.Plan.parse("tp=2")), 0)
    assert told
    for heard in pools("gloo", 2).run(said, name, "tp=2"):
        assert heard == told


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "pp=2,tp=2,microbatches=2"),
        ("llama", "pp=2,tp=2"),
        ("qwen2", "pp=2,tp=2"),
        ("bert", "tp=2,sp,recompute=full"),
        ("encoder", "tp=2,pp=2,sp,recompute=full"),
        ("four", "pp=2,microbatches=3,schedule=zbv,chunks=2"),
        ("t5", "dp=2,zero=1"),
        ("conv", "dp=2,zero=3"),
        ("tuned", "dp=2,tp=2,zero=1"),
        ("rows", "dp=2,tp=2,zero=2,microbatches=2"),
        ("rows", "dp=2,zero=3,microbatches=2"),
        ("gpt", "dp=2,tp=2,sp,zero=3,recompute=full"),
        ("llama", "tp=2,sp,recompute=*.mlp"),
        ("gpt", "tp=2,recompute=*.attention+*.fc2"),
        ("encoder", "dp=2,tp=2,sp,zero=2,recompute=selective"),
        ("four", "tp=2,pp=2,sp,microbatches=2,recompute=full"),
        ("gpt", "dp=2,pp=2,zero=1,microbatches=2"),
        ("four", "dp=2,pp=2,zero=2,microbatches=2,schedule=interleaved,chunks=2"),
        ("four", "dp=2,pp=2,zero=3,microbatches=2,schedule=interleaved,chunks=2"),
        ("gpt", "cp=2,recompute=*.attention"),
        ("llama", "cp=4,context=ulysses,recompute=selective,zero=2"),
        ("gpt2", "cp=2,tp=2,sp,context=ulysses,recompute=full"),
        ("images", "dp=2,cp=2,zero=1"),
        ("four", "cp=2,pp=2,microbatches=2,zero=3,recompute=full"),
        ("in turn", "dp=2,ep=2"),
        ("crowded", "dp=2,ep=2,recompute=full"),
        ("experts", "dp=4,ep=2,zero=3,microbatches=3,recompute=full"),
        ("experts", "dp=2,ep=2,tp=2,sp,zero=2"),
        ("experts", "dp=2,ep=2,pp=2,microbatches=2"),
        ("balanced", "dp=2,ep=2,cp=2,context=ulysses"),
    ],
)
def test_what_ranks_say_is_shown(pools: Callable[[str, int], RankPool], name: str, plan: str) -> None:
    program = PlanProgram(TASKS[name](), uni.Plan.parse(plan))
    for rank, heard in enumerate(pools("gloo", program.plan.world).run(said, name, plan)):
        told = shown(program, rank)
        assert told
        assert heard == told, f"rank {rank}: heard {heard - told}, shown {told - heard}"


def test_messages_of_experts_are_shown_however_tokens_choose(pools: Callable[[str, int], RankPool]) -> None:
    """What depends on numbers is how many rows are in them."""
    program = PlanProgram(TASKS["unevenly"](), uni.Plan.parse("dp=2,ep=2"))

    def without_rows(told: Heard) -> Counter[tuple[str, tuple[int, ...]]]:
        return Counter((kind, ranks) for kind, _, ranks in told.elements())

    for rank, heard in enumerate(pools("gloo", 2).run(said, "unevenly", "dp=2,ep=2")):
        told = shown(program, rank)
        assert heard != told
        assert without_rows(heard) == without_rows(told)
        assert account(program.parts(rank)[0], rank).about == [
            "experts: sizes of what is said for them are those of tokens that visit all experts alike"
        ]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Choosing(experts=5), "moe has 5 experts, which ep=2 ranks share unevenly"),
        (Idle, "moe is called in no forward"),
        (Prompted, "what moe is given at shown.py:.* does not come of the samples of each rank alone"),
        (lambda: nn.Linear(4, 4), "ep=2 spreads experts, but Linear has no uni.nn.MoE"),
    ],
)
def test_experts_that_cannot_be_shown_are_refused(model: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        explained(choosing(model), "dp=2,ep=2")


def test_a_large_model_is_shown_as_a_small_one_is() -> None:
    """Which layers are cut is found by running some of them; nobody has the memory, or the time, for all of it."""

    def said_by(vocabulary: int) -> Heard:
        task = dataclasses.replace(load_task(GPT), model=lambda: plain.GPT(plain.Config(vocabulary)))
        return shown(PlanProgram(task, uni.Plan.parse("tp=2,sp")), 0)

    assert said_by(10**10) == said_by(256)


class Unfollowed(nn.Linear):
    """Its constructor cannot be written down, though it can be run on meta."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        torch.empty(1, device="meta")
        self.unused = nn.Embedding(10**9, 5)


def test_what_ranks_would_not_do_is_refused() -> None:
    """A layer that gets pieces where it should not, and one that nobody can try out."""
    with pytest.raises(UsageError, match=r"would have to talk about linear \(0.0\) on its way .* cannot be shown"):
        explained(stack({"0.0": "column", "1": "row"}, nn.Softmax(-1)), "tp=2")
    with pytest.raises(UsageError, match="are layers that tp cuts, one straight after the other"):
        explained(stack({"0.0": "column_gather", "1": "row_split"}, nn.Identity()), "tp=2")
    large = dataclasses.replace(stack(None, nn.ReLU()), model=Unfollowed)
    with pytest.raises(UsageError, match=r"5,000,000,\d+ parameters, .* cannot be written down; give the task rules"):
        explained(large, "tp=2")
    wide = dataclasses.replace(load_task(GPT), model=lambda: plain.GPT(plain.Config(width=8192)))
    with pytest.raises(UsageError, match=r"a block of it has 805,\d+,\d+ parameters; give the task rules"):
        explained(wide, "tp=2")


def test_dp_and_tp_together_cut_both_ways() -> None:
    told = explained(load_task(GPT), "dp=2,tp=2", rank=3)
    first = next(each for each in told.given if each.name == "blocks.0.fc1.weight")
    assert (first.whole, first.local, first.placements) == ("f32[256,64]", "f32[128,64]", "[R,S0]")
    assert first.summed == ("dp",)
    groups = {talk.axes: talk.ranks for talk in (*told.forward, *told.backward)}
    assert groups[("tp",)] == (2, 3)
    assert groups[("dp",)] == (1, 3)


def test_keys_go_round_a_ring() -> None:
    """Each rank sends to the next and hears the one before; keys and values of 8 samples, 8 tokens and 64 features."""
    told = explained(load_task(GPT), "cp=4", rank=1)
    ring = next(line for line in told.lines if line.local.startswith("ring over cp"))
    assert [(talk.kind, talk.ranks) for talk in ring.forward] == [("send", (2,)), ("recv", (0,))] * 3
    assert {talk.before for talk in (*ring.forward, *ring.backward)} == {(2 * 8 * 8 * 64,)}
    assert len(ring.backward) == 2 * len(ring.forward)
    assert next(each for each in told.given if each.kind == "target").local == "i64[8,8]"


def test_packed_weights_are_cut_part_by_part() -> None:
    told = explained(TASKS["encoder"](), "tp=2")
    parts = [each for each in told.given if each.name.startswith("layers.layers.0.self_attn.in_proj_weight")]
    assert [each.name.rpartition(" ")[2] for each in parts] == ["0", "16", "32"]
    assert {each.local for each in parts} == {"f32[8,16]"}


def test_what_cannot_be_shown_is_noted() -> None:
    told = explained(foreign.llama, "tp=2")
    embedding = next(each for each in told.given if each.name == "model.embed_tokens.weight")
    assert (embedding.whole, embedding.local) == ("f32[37,16]", "f32[19,16]")
    with pytest.raises(UsageError, match=r"EncDecAttention .* looks at several tokens at once.* cannot be shown"):
        explained(TASKS["t5"](), "cp=2")
    with pytest.raises(UsageError, match=r"sequences of 32 tokens cannot be shared evenly.* a multiple of 3"):
        explained(load_task(GPT), "cp=3")
    with pytest.raises(UsageError, match=r"unused.weight is used by no op .* not show which stage holds it"):
        PlanProgram(with_twelve_rows(tasks.tuned), uni.Plan.parse("dp=2,pp=2,zero=1,microbatches=2")).parts(1)


def test_marks_go_before_rules() -> None:
    """A model whose marks say what tp cuts is cut so, and in no other way."""
    mesh = uni.Mesh.describe((2,), ("tp",))

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        uni.mark(made, "0.weight", mesh, [uni.Shard(1)])
        return made

    def batch(seed: int) -> Any:
        return torch.zeros(4, 8), torch.zeros(4, 8)

    task = uni.Task(model, F.mse_loss, lambda parameters: torch.optim.SGD(parameters, 0.1), batch)
    told = {each.name: each.placements for each in explained(task, "tp=2").given}
    assert told["0.weight"] == "[S1]"
    assert told["2.weight"] == "[R]"


def test_what_ranks_say_inside_an_op_is_shown() -> None:
    """The samples that count are counted by all ranks, in the midst of the loss."""
    (part,) = PlanProgram(load_task(GPT), uni.Plan.parse("dp=2")).parts(0)
    told = account(part)
    loss = next(line for line in told.lines if line.serial.startswith("cross_entropy"))
    assert [(talk.kind, talk.axes, talk.detail) for talk in loss.forward] == [
        ("all_reduce", ("dp",), "sum, inside the op")
    ]
    assert as_svg(part).count(">all_reduce<") == 3  # the legend, this one, and the sum of what ranks have of the loss


def test_an_op_without_a_rule_is_noted_in_text_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "odd.py"
    source.write_text(
        "import torch\nimport unisono as uni\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.weight = torch.nn.Parameter(torch.ones(4))\n"
        "    def forward(self, x):\n        return torch.linalg.matrix_exp(x) * self.weight\n"
        "task = uni.Task(Odd, torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, 0.1),\n"
        "                lambda seed: (torch.zeros(8, 4, 4), torch.zeros(8, 4, 4)))\n"
    )
    assert main(["explain", f"{source}:task", "--plan", "dp=2"]) == 0
    assert (
        "note: no rule for aten.linalg_matrix_exp.default: each rank does all of it for its samples"
        in capsys.readouterr().out
    )
    page = tmp_path / "odd.html"
    assert main(["explain", f"{source}:task", "--plan", "dp=2", "--html", str(page)]) == 0
    assert "<b>note:</b> no rule for aten.linalg_matrix_exp.default" in page.read_text()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


@pytest.mark.parametrize("soft", [False, True])
def test_what_is_said_inside_losses_of_any_kind(soft: bool) -> None:
    """Weights of classes have no gradient, and targets may be shares of classes."""
    weight = torch.rand(6)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets) if soft else F.cross_entropy(logits, targets, weight)

    def batch(seed: int) -> Any:
        return torch.zeros(8, 5), torch.zeros(8, 6) if soft else torch.zeros(8, dtype=torch.int64)

    task = uni.Task(Normed, loss, lambda parameters: torch.optim.SGD(parameters, 0.1), batch)
    told = explained(task, "dp=2")
    inside = [line for line in told.lines if line.serial and line.forward]
    assert [len(line.forward) for line in inside if line.backward] == [1]  # the norm's, and in its backward one
    assert any(line.serial.startswith("cross_entropy") for line in inside) == (not soft)
