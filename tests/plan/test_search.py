"""The search: what it finds, how it says why not, and that its quick forms agree with playing schedules."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.amounts import format_count, shortfall
from unisono.errors import UsageError
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import Plan
from unisono.plan.profile.model_profile import ModelProfile, OpCost, Segment, Weight
from unisono.plan.search.balance import balanced, quickly_balanced
from unisono.plan.search.neighbours import neighbours
from unisono.plan.search.search import Search, choose
from unisono.plan.search.why_not import why_not

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
H100 = read_hardware("h100")


def profile(layers: int = 24, width: int = 4096, batch: int = 256) -> ModelProfile:
    """A GPT in figures: a block of two regions, 12 width^2 parameters."""
    tokens, h = 2048, width
    hidden = 2.0 * tokens * h
    mlp = 2.0 * tokens * 12 * h * h
    ops = (
        OpCost("norm", "memory", moved=2 * hidden, saved=hidden),
        OpCost("column", "matmul", flops=0.6 * mlp, moved=5 * hidden, weights=14.0 * h * h, saved=hidden,
             is_sharded=True, saved_is="gathered"),
        OpCost("core", "attention", flops=4.0 * tokens**2 * h, moved=4 * hidden, saved=4 * hidden,
             is_sharded=True, saved_is="sharded", is_core=True, core_saved=hidden / 64),
        OpCost("row", "matmul", flops=0.4 * mlp, moved=5 * hidden, weights=10.0 * h * h, saved=5 * hidden,
             is_sharded=True, saved_is="sharded"),
    )  # fmt: skip
    block = Segment(
        ops, (Weight("up", (8 * h, h), 2, 0), Weight("down", (h, 4 * h), 2, 1)), (hidden,) * 2, (hidden,) * 2
    )
    before = Segment((OpCost("embed", "memory", moved=hidden),), (Weight("tokens", (50000, h), 2, 0),), in_blocks=False)
    head = OpCost("head", "matmul", flops=2.0 * tokens * h * 50000, moved=hidden, saved=tokens * 50000 * 2.0,
                  is_sharded=True, saved_is="sharded")  # fmt: skip
    after = Segment((head,), (Weight("head", (50000, h), 2, 0),), in_blocks=False)
    return ModelProfile("figures", batch, before, (block,) * layers, after, hidden, "bfloat16", length=tokens)


def test_a_model_that_fits_one_device_is_replicated() -> None:
    plan = choose(profile(layers=12, width=1024, batch=64), 8, H100)
    assert (plan.dp, plan.tp, plan.pp, plan.cp) == (8, 1, 1, 1)


@pytest.mark.thorough
def test_a_larger_model_is_cut_and_fits() -> None:
    search = Search(profile(layers=48, width=8192), 64, H100)
    result = search.run(5)
    assert all(each.fits and each.plan.world == 64 for each in result.candidates)
    assert result.best.plan.tp * result.best.plan.pp > 1 or result.best.plan.zero == 3
    assert result.candidates == sorted(result.candidates, key=lambda each: each.seconds)
    told = {each.change: each.reason for each in why_not(search, result.best)}
    assert any("needs" in reason and "GiB of 74" in reason for reason in told.values())
    assert any(reason.startswith("+") and "(" in reason for reason in told.values())


def test_tp_across_nodes_loses_and_says_so() -> None:
    search = Search(profile(layers=48, width=8192), 64, H100)
    best = search.judged(Plan(tp=8, dp=8, zero=1, sequence=True, microbatches=8), played=True)
    told = {each.change: each.reason for each in why_not(search, best)}
    assert told["tp=16"].startswith("+")
    assert told["tp=16"].endswith("(tp crosses nodes)")


def test_nothing_fits() -> None:
    tight = replace(H100, memory=4 * 2**30)
    with pytest.raises(UsageError, match=r"none of .* plans for 8 devices fits figures: the smallest, .* GiB of 3\.7"):
        choose(profile(layers=48, width=8192), 8, tight)


def test_what_the_job_does_not_allow_is_not_chosen() -> None:
    search = Search(profile(), 16, H100, lambda plan: "no tp here" if plan.tp > 1 else None)
    result = search.run(20)
    assert all(each.plan.tp == 1 for each in result.candidates)
    assert "cannot: no tp here" in [each.reason for each in why_not(search, result.best)]


def test_quick_forms_agree_with_played_schedules() -> None:
    search = Search(profile(), 16, H100)
    for text in (
        "dp=4,pp=4,microbatches=16",
        "dp=4,pp=4,microbatches=16,schedule=interleaved,chunks=2",
        "dp=4,pp=4,microbatches=16,schedule=zb1p",
        "dp=2,pp=8,microbatches=64",
        "dp=4,pp=4,microbatches=4",
    ):
        plan = Plan.parse(text)
        quick, played = (search.judged(plan, played=each).seconds for each in (False, True))
        assert quick == pytest.approx(played, rel=0.06), text


def test_quick_balance_has_the_lowest_peak() -> None:
    for costs, stages in (
        ([1.5, 1, 1, 1, 1, 1, 3], 3),
        ([1] * 12, 5),
        ([3, 1, 1, 1, 1, 1, 1, 4], 4),
        ([1, 9, 1, 1], 2),
    ):
        assert _peak(costs, quickly_balanced(costs, stages)) == _peak(costs, balanced(costs, stages))


def _peak(costs: list[float], starts: tuple[int, ...]) -> float:
    ends = (*starts[1:], len(costs))
    return max(sum(costs[low:high]) for low, high in zip(starts, ends, strict=True))


def test_a_plan_carries_boundaries() -> None:
    plan = Plan.parse("pp=3,microbatches=3,boundaries=0+5+9")
    assert plan.boundaries == (0, 5, 9)
    assert Plan.parse(str(plan)) == plan
    with pytest.raises(UsageError, match=r"boundaries=1\+5; expected the first block of each stage, rising from 0"):
        Plan.parse("pp=2,boundaries=1+5")
    with pytest.raises(UsageError, match="but pp=1"):
        Plan.parse("boundaries=0+5")


def test_boundaries_and_stages_that_the_model_has_not() -> None:
    search = Search(profile(layers=4, width=256), 2, H100)
    for boundaries in ((0, 4), (0, 1, 2)):
        with pytest.raises(UsageError, match="first block of each of 2 stages, rising from 0 to at most 3"):
            search.judged(Plan(pp=2, boundaries=boundaries))
    without = Search(replace(profile(layers=4, width=256), blocks=()), 2, H100)
    with pytest.raises(UsageError, match="has only 0 blocks to share out"):
        without.judged(Plan(pp=2))


def test_a_block_that_costs_nothing_does_not_unbalance_the_others() -> None:
    job = profile(layers=8, width=1024)
    idle = Segment((), ())
    even = Search(job, 2, H100).partitioner.evened(Plan(pp=2)).starts
    longer = Search(replace(job, blocks=(idle, *job.blocks)), 2, H100)
    assert longer.partitioner.evened(Plan(pp=2)).starts == (0, even[1] + 1)


def test_ranks_take_turns_on_cores() -> None:
    """Four ranks on two cores compute half as fast, unless a pipeline leaves cores idle anyway."""
    job = profile(layers=8, width=1024, batch=16)
    enough, few = (replace(H100, cores=cores, overlap=0.0, asynchronous=False) for cores in (4, 2))
    apart, sharing = (Search(job, 4, hardware) for hardware in (enough, few))
    plan = Plan(dp=4)
    ours, theirs = sharing.judged(plan).duration, apart.judged(plan).duration
    assert ours.compute == pytest.approx(2 * theirs.compute)
    assert ours.optimizer == pytest.approx(2 * theirs.optimizer)
    assert ours.total > 1.9 * theirs.compute
    idle = Plan(pp=4)  # one rank computes at a time
    assert sharing.judged(idle, played=True).duration.bubble < apart.judged(idle, played=True).duration.bubble
    assert sharing.judged(idle, played=True).seconds < 1.2 * apart.judged(idle, played=True).seconds
    busy = Plan(pp=4, microbatches=16)
    busy = busy.but(boundaries=apart.partitioner.evened(busy).starts)  # of stages that take equally long
    assert sharing.judged(busy, played=True).seconds > 1.45 * apart.judged(busy, played=True).seconds


def test_a_ring_costs_its_hops_and_its_visits() -> None:
    """Keys and values make P - 1 hops forward and again backward, and as many what others add to their gradients."""
    job = profile(layers=4, width=1024, batch=8)
    still = replace(H100, asynchronous=False, op_overhead=0.0)
    curve = ((1.0, 1e-3), (1e12, 1e-3))
    for ranks in (2, 4):
        timed = replace(still, intra_node=replace(still.intra_node, ranks=ranks, measured=(("exchange", curve),)))
        plan = Plan(cp=ranks)
        search = Search(job, ranks, timed)
        assert search.judged(plan).duration.tensor == pytest.approx(4 * 3 * (ranks - 1) * 1e-3)
        called = Search(job, ranks, replace(timed, op_overhead=1e-6)).judged(plan).duration
        assert called.compute - search.judged(plan).duration.compute >= 4 * ranks * 50e-6


def test_zero_copies_rows_and_its_third_stage_sends_block_by_block() -> None:
    """... twice gathered and once scattered for each microbatch: as many messages as there are blocks, and the root."""
    job = profile(layers=4, width=1024, batch=8)
    curve = tuple((name, ((1.0, 1e-3),)) for name in ("all_gather", "reduce_scatter"))
    still = replace(H100, asynchronous=False, overlap=0.0, memory_bandwidth=1e30, op_overhead=0.0)
    timed = replace(still, intra_node=replace(still.intra_node, ranks=2, measured=curve), flops={"bfloat16": 1e30})
    size = 2.0 * job.parameters
    for plan, messages, copied in (
        (Plan(dp=2, zero=1), 2, 2 + 3),
        (Plan(dp=2, zero=2, microbatches=2), 3, 2 * 2 + 3),
        (Plan(dp=2, zero=3, microbatches=2), 2 * 3 * (4 + 1), 2 * (2 * 3 + 2)),
    ):
        travel = Search(job, 2, timed).judged(plan).duration.gradients
        assert travel == pytest.approx(messages * 1e-3)
        slow = Search(job, 2, replace(timed, memory_bandwidth=1e9, memory_efficiency=1.0)).judged(plan)
        added = 3 / 2 * (plan.microbatches - 1) if plan.zero > 1 else 0.0  # to the shard of the microbatches before
        assert slow.duration.gradients - travel == pytest.approx((copied + added) * size / 1e9)


def test_a_first_stage_is_played_with_its_backward_whole() -> None:
    """Where its weights had theirs later, a V of as many microbatches as ranks would end later."""
    job = profile(layers=8, width=1024, batch=8)
    search = Search(job, 4, replace(H100, asynchronous=False))
    plan = Plan(pp=4, microbatches=4, schedule="zbv", chunks=2)
    costs = search.time.stage_costs(plan, search.stages(plan))
    quick = search.time._played(plan, search.stages(plan), costs)
    costs[0] = replace(costs[0], inputs=0.0, weights=costs[0].backward)
    assert search.time._played(plan, search.stages(plan), costs) == pytest.approx(quick)


def test_ulysses_costs_two_all_to_alls_each_way() -> None:
    job = profile(layers=4, width=1024, batch=8)
    still = replace(H100, asynchronous=False, op_overhead=0.0)
    curve = ((1.0, 1e-3), (1e12, 1e-3))
    timed = replace(still, intra_node=replace(still.intra_node, ranks=2, measured=(("all_to_all", curve),)))
    plan = Plan(cp=2, context="ulysses")
    assert Search(job, 2, timed).judged(plan).duration.tensor == pytest.approx(4 * 4 * 1e-3)


def test_neighbours_divide_the_devices_and_keep_microbatches_or_their_size() -> None:
    job = profile(layers=8, width=1024)
    of_three = dict(neighbours(Plan(dp=3), 3, job))
    assert {plan.tp for plan in of_three["tp=3"]} == {3}
    found = dict(neighbours(Plan(dp=4, pp=2, microbatches=8, schedule="interleaved", chunks=4), 8, job))
    assert {(plan.dp, plan.microbatches, plan.chunks) for plan in found["pp=4"]} == {(2, 8, 2), (2, 16, 2)}
    assert [(plan.dp, plan.schedule, plan.chunks) for plan in found["pp=1"]] == [(8, "1f1b", 1), (8, "1f1b", 1)]
    assert {plan.context for plan in dict(neighbours(Plan(cp=8), 8, job))["context=ulysses"]} == {"ulysses"}


def test_no_neighbour_is_faster_than_the_best() -> None:
    """One sample: a pipeline's ranks wait for each other, less where the halves of a backward are apart."""
    search = Search(
        profile(layers=4, width=1024, batch=1), 2, H100, lambda plan: "no" if plan.tp * plan.cp > 1 else None
    )
    best = search.run(5).best
    assert best.plan.pp == 2
    assert all(each.seconds is None or each.seconds > best.seconds * 0.995 for each in why_not(search, best))


def test_needs_are_told_to_the_digit_that_tells_them_apart() -> None:
    assert shortfall(91 * 2**30, 80 * 2**30) == "needs 91 GiB of 80"
    assert shortfall(74.04 * 2**30, 73.6 * 2**30) == "needs 74.0 GiB of 73.6"
    assert shortfall(3 * 2**20, 2 * 2**20) == "needs 3 MiB of 2"


def test_counts_that_round_up_get_the_next_unit() -> None:
    numbers = (0, 999, 999.6, 999_499, 999_500, 175e9, 2e12)
    words = ["0", "999", "1 thousand", "999 thousand", "1 million", "175 billion", "2 trillion"]
    assert [format_count(number) for number in numbers] == words
