"""`explain --plan`: what it shows of a plan is what ranks do under it, byte by byte."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import unisono as uni
from tests.equivalence import foreign
from tests.explain.tasks import GPT, TASKS, Heard, choosing, communication_of, recorded, shown
from tests.ranks import RankPool
from unisono.cli import main
from unisono.errors import UsageError
from unisono.explain import plan_program
from unisono.explain.align import matched
from unisono.explain.plan_program import recorded_on_one_device, recorded_step
from unisono.graph.render.listing import Listing
from unisono.parallel.task import load_task
from unisono.simulate.rank import simulated_trainer


def explained(task: uni.Task, plan: str, rank: int = 0) -> Listing:
    return plan_program.explained(task, uni.Plan.parse(plan), rank)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gathering", "tp=2"),
        ("t5", "tp=2"),
        ("vit", "tp=2"),
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
        ("crowded", "dp=2,ep=2,recompute=full"),
        ("experts", "dp=4,ep=2,zero=3,microbatches=3,recompute=full"),
        ("experts", "dp=2,ep=2,tp=2,sp,zero=2"),
        ("experts", "dp=2,ep=2,pp=2,microbatches=2"),
        ("balanced", "dp=2,ep=2,cp=2,context=ulysses"),
    ],
)
def test_a_simulated_rank_communicates_as_real_ranks_do(
    pools: Callable[[str, int], RankPool], name: str, plan: str
) -> None:
    for rank, heard in enumerate(pools("gloo", uni.Plan.parse(plan).world).run(communication_of, name, plan)):
        listing = recorded(name, plan, rank)
        assert listing
        assert heard == listing, f"rank {rank}: only real {heard - listing}, only simulated {listing - heard}"


@pytest.mark.parametrize(("name", "plan"), [("in turn", "dp=2,ep=2"), ("unevenly", "dp=2,ep=2")])
def test_messages_of_experts_but_for_their_sizes(pools: Callable[[str, int], RankPool], name: str, plan: str) -> None:
    """How many tokens a rank receives depends on values of other ranks."""

    def without_sizes(listing: Heard) -> Counter[tuple[str, tuple[int, ...]]]:
        return Counter((kind, ranks) for kind, _, ranks in listing.elements())

    for rank, heard in enumerate(pools("gloo", 2).run(communication_of, name, plan)):
        assert without_sizes(heard) == without_sizes(recorded(name, plan, rank))
    assert any("sizes of messages between experts" in words for words in explained(TASKS[name](), plan).about)


@pytest.mark.parametrize(("name", "plan"), [("gpt", "dp=2,tp=2,sp,zero=3"), ("encoder", "tp=2,sp"), ("gpt", "cp=2")])
def test_all_communication_is_listed(name: str, plan: str) -> None:
    assert shown(explained(TASKS[name](), plan)) == recorded(name, plan, 0)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", "dp=2,tp=2,sp"),
        ("llama", "tp=2,recompute=full"),
        ("t5", "dp=2,zero=3"),
        ("vit", "tp=2"),
        ("gpt2", "cp=2"),
    ],
)
def test_every_op_of_one_device_is_found_on_a_rank(name: str, plan: str) -> None:
    task, parsed = TASKS[name](), uni.Plan.parse(plan)
    serial = recorded_on_one_device(task, parsed)
    with simulated_trainer(task, parsed, 0, task.batch(0)) as trainer:
        trainer.step(task.batch(0))
        local = recorded_step(trainer, task.batch(0))
    found = matched(serial.ops, local.ops)
    lost = {op.function for number, op in enumerate(serial.ops) if number not in found}
    assert lost <= {"view"}  # which context parallelism replaces in Hugging Face models
    assert all(serial.ops[a].function == local.ops[b].function for a, b in found.items())


@pytest.mark.parametrize(
    ("name", "plan", "rank"),
    [
        ("gpt", "dp=2,tp=2,sp,zero=3", 1),
        ("llama", "tp=2,recompute=full", 0),
        ("gpt", "cp=2", 1),
        ("encoder", "tp=2,pp=2,sp,recompute=full", 2),
        ("experts", "dp=2,ep=2", 0),
    ],
)
def test_a_large_model_is_shown_as_a_small_one_is(
    name: str, plan: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device nothing has values; ops and collectives are the same."""
    built = explained(TASKS[name](), plan, rank)
    monkeypatch.setattr(plan_program, "_SMALL", 0)
    without_memory = explained(TASKS[name](), plan, rank)
    ops = [
        [(line.serial, line.local_shapes) for line in each.lines if line.serial and line.path != "loss"]
        for each in (built, without_memory)
    ]
    if "ep=" not in plan:  # experts are all visited alike
        assert ops[0] == ops[1]
    both = [
        Counter(
            (collective.kind, collective.ranks) for line in each.lines for collective in (*line.forward, *line.backward)
        )
        for each in (built, without_memory)
    ]
    assert set(both[0]) == set(both[1])
    assert built.given == without_memory.given


@pytest.mark.parametrize("smallest", [2 * 10**8, 0])  # built, and on the meta device
def test_weights_that_are_gathered_in_halves(smallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_program, "_SMALL", smallest)
    task = dataclasses.replace(load_task(GPT), precision="bf16")
    listing = explained(task, "dp=2,zero=3")
    given = {each.name: each for each in listing.given}
    weight, norm = given["blocks.0.fc1.weight"], given["blocks.0.norm1.weight"]
    assert (weight.full, norm.full) == ("bf16[256,64]", "f32[64]")
    assert weight.kept.endswith("bf16[128,64], master weights f32[128,64]")
    block = [each for name, each in given.items() if name.startswith("blocks.0.")]
    sizes = [2 * each.full.startswith("bf16") + 4 * each.full.startswith("f32") for each in block]
    shapes = [math.prod(map(int, each.full.partition("[")[2][:-1].split(","))) for each in block]
    expected = sum(size * elements for size, elements in zip(sizes, shapes, strict=True))
    gathers = [each for each in (*listing.forward, *listing.backward) if each.kind == "all_gather"]
    assert expected // 2 in {2 * math.prod(each.before) for each in gathers}  # this rank's half, in elements of bf16


def test_a_plan_that_would_be_refused_is_refused() -> None:
    with pytest.raises(UsageError, match=r"ep=2 shards experts, but Linear has no uni.nn.MoE"):
        explained(choosing(lambda: nn.Linear(4, 4)), "dp=2,ep=2")
    with pytest.raises(UsageError, match="rank 2 of plan tp=2"):
        explained(load_task(GPT), "tp=2", rank=2)


def test_dp_and_tp_together_split_both_ways() -> None:
    listing = explained(load_task(GPT), "dp=2,tp=2", rank=3)
    first = next(each for each in listing.given if each.name == "blocks.0.fc1.weight")
    assert (first.full, first.local, first.placements) == ("f32[256,64]", "f32[128,64]", "[R,S0]")
    assert first.summed == ("dp",)
    groups = {collective.axes: collective.ranks for collective in (*listing.forward, *listing.backward)}
    assert groups[("tp",)] == (2, 3)
    assert groups[("dp",)] == (1, 3)


def test_keys_go_round_a_ring() -> None:
    """Each rank sends to the next and receives from the one before."""
    listing = explained(load_task(GPT), "cp=4", rank=1)
    ring = [line for line in listing.lines if line.path == "blocks.0.attention" and line.forward]
    assert [(collective.kind, collective.axes, collective.ranks) for line in ring for collective in line.forward] == [
        ("send", ("cp",), (2,)),
        ("recv", ("cp",), (0,)),
    ] * 3
    assert {line.forward[0].before for line in ring} == {(2 * 8 * 8 * 64,)}  # keys and values of 8 samples, 8 tokens
    assert next(each for each in listing.given if each.kind == "target").local == "i64[8,8]"


def test_shards_of_uneven_size() -> None:
    listing = explained(foreign.llama, "tp=2")
    embedding = next(each for each in listing.given if each.name == "model.embed_tokens.weight")
    assert (embedding.full, embedding.local) == ("f32[37,16]", "f32[19,16]")


def test_a_pipeline_shows_its_own_ops_and_its_order() -> None:
    first, last = (explained(load_task(GPT), "pp=2,microbatches=2", rank=rank) for rank in (0, 1))
    paths = [{line.path for line in listing.lines if line.serial} for listing in (first, last)]
    assert "positions" in paths[0]
    assert "positions" not in paths[1]
    assert "loss" in paths[1]
    assert first.order == "0F0 0F1 0B0 0B1"
    assert last.order == "1F0 1B0 1F1 1B1"
    assert "2 microbatches" in first.about[0]


def test_what_a_collective_s_backward_does_stands_beside_it() -> None:
    listing = explained(load_task(GPT), "tp=2,sp")
    gathers = [line for line in listing.lines if line.path.endswith("attention") and line.forward]
    assert [(line.forward[0].kind, line.backward[0].kind) for line in gathers[:2]] == [
        ("all_gather", "reduce_scatter"),
        ("all_gather", "reduce_scatter"),
    ]


def test_recomputed_ops_are_noted() -> None:
    listing = explained(load_task(GPT), "dp=2,recompute=full")
    notes = {line.note for line in listing.lines if line.path == "blocks.0.fc1"}
    assert notes == {"runs again in the backward (recompute)"}


def test_text_page_and_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", GPT, "--plan", "dp=2,zero=1"]) == 0
    assert "optimizer state of f32[128,64]" in capsys.readouterr().out
    page, drawing = tmp_path / "gpt.html", tmp_path / "gpt.svg"
    folder = tmp_path / "graphs"
    given = ["--html", str(page), "--svg", str(drawing), "--save-graphs", str(folder)]
    assert main(["explain", GPT, "--plan", "tp=2", "--rank", "1", *given]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {file}" for file in (page, drawing, folder)]
    assert "linear(" in page.read_text()
    assert ">all_reduce<" in drawing.read_text()
    assert {file.parent.name for file in folder.glob("*/program.txt")} == {"rank_0", "rank_1"}
