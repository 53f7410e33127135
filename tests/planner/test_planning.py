"""`unisono plan` from end to end, and a dry run of one rank of many."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.cli import main
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.errors import UsageError
from unisono.launch.spawn import spawn
from unisono.mesh.mesh import Mesh
from unisono.parallel.apply import parallelize
from unisono.parallel.pipeline.split import split
from unisono.parallel.task import Task, load_task
from unisono.plan.hardware.toml import read_hardware
from unisono.plan.plan import AXES, Plan
from unisono.plan.schedules.schedule import schedule
from unisono.planner.planner import Planner, choose
from unisono.simulate.dry_run import dry_run, run_here
from unisono.simulate.memory_meter import Meter
from unisono.simulate.rank import build_trainer, state_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
TASK = "examples/gpt.py:tiny"


def test_the_command_ranks_plans_and_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TASK, "--devices", "8", "--hardware", "h100", "--top", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["seconds"] for each in told["plans"]] == sorted(each["seconds"] for each in told["plans"])
    assert all(Plan.parse(each["plan"]).world == 8 for each in told["plans"])
    assert all(each["memory"] == pytest.approx(sum(each["memory_parts"].values())) for each in told["plans"])
    assert any(each["reason"].startswith("+") for each in told["why_not"])
    assert main(["plan", TASK, "--devices", "8", "--hardware", "h100", "--plan", "dp=4,tp=2,sp,zero=1"]) == 0
    assert "why not" in capsys.readouterr().out


def test_a_judged_plan_that_does_not_fit_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.toml"
    h100 = Path(read_hardware("h100").source).read_text()
    small.write_text(h100.replace('memory = "80 GiB"', 'memory = "1 MiB"'))
    assert main(["plan", TASK, "--devices", "2", "--hardware", str(small), "--plan", "dp=2"]) == 0
    told = capsys.readouterr().out
    assert "1 plans considered, 0 fit" in told
    assert re.search(r"the plan does not fit: it needs [0-9]{4} KiB of 942$", told, re.MULTILINE), told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "0", "--hardware", "h100"], "--devices 0: expected at least 1"),
        (["--devices", "8", "--hardware", "nowhere.toml"], "there is no file nowhere.toml"),
        (["--devices", "8", "--hardware", "h100", "--rank", "8"], "--rank 8: expected one of 0 to 7"),
        (["--devices", "8", "--hardware", "h100", "--plan", "dp=2"], "plan dp=2 needs 2 ranks"),
        (["--devices", "8", "--hardware", "h100", "--plan", "pp=8"], "the model has 2 blocks"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TASK, *words]) == 2
    assert message in capsys.readouterr().err


def test_only_plans_that_the_task_can_run_under() -> None:
    hardware = read_hardware("h100")
    planner = Planner(tasks.conv, hardware)  # BatchNorm: no microbatches; no attention: no cp
    assert "BatchNorm" in (planner.allows(Plan(dp=2, microbatches=2)) or "")
    assert planner.search(2).refusal(Plan(cp=2)) is not None
    assert choose(tasks.conv, 2, hardware).microbatches == 1
    assert Planner(tasks.gpt, hardware).allows(Plan(tp=8)) is not None  # four heads


def test_layers_that_are_not_alike_are_stages_too() -> None:
    """As parallelize cuts them: children of an nn.Sequential, or of a model without a list of blocks."""
    layers = {"first": nn.Linear(16, 32), "norm": nn.LayerNorm(32), "last": nn.Linear(32, 4)}

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = layers.values()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x)))

    for make in (lambda: nn.Sequential(*layers.values()), Named):
        task = Task(make, F.mse_loss, torch.optim.SGD, lambda seed: (torch.ones(4, 16), torch.ones(4, 4)))
        search = Planner(task, read_hardware("h100")).search(3)
        assert [sum(w.numel for w in block.weights) for block in search.profile.blocks] == [544, 64, 132]
        assert search.judged(Plan(pp=3)).footprint.parameters == 4 * 544
        assert "no list of repeated blocks" in (search.refusal(Plan(dp=3, recompute="full")) or "")


def test_a_rank_of_a_pipeline_must_hold_parameters() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    task = Task(model, F.mse_loss, torch.optim.SGD, lambda seed: (torch.ones(4, 16), torch.ones(4, 4)))
    search = Planner(task, read_hardware("h100")).search(3)
    assert search.refusal(Plan(pp=3)) == "a rank of the pipeline would hold no parameters"
    assert all(each.plan.pp == 1 for each in search.run(20).candidates)


def test_experts_are_planned_for() -> None:
    """Routing has no place in a graph: tokens are taken to visit experts in turn. ep divides experts, and talks."""
    search = Planner(tasks.moe, read_hardware("h100")).search(4)
    block = search.profile.blocks[0]
    products = [work for work in block.ops if work.kind == "matmul"]
    tokens = 16 * 2  # of a sample, each of which visits two experts
    assert sum(work.flops for work in products[-8:]) == 2 * 2 * tokens * 16 * 32  # up and down, of four experts
    assert block.expert_traffic == tokens * 16 * 4
    plain, spread = (search.judged(Plan.parse(text)) for text in ("dp=4", "dp=4,ep=4"))
    assert search.refusal(spread.plan) is None
    assert spread.footprint.parameters < plain.footprint.parameters
    assert spread.duration.tensor > plain.duration.tensor == 0
    assert any(plan.ep > 1 for plan in search.scheduled())


@pytest.mark.thorough
def test_a_dry_run_has_the_predicted_state() -> None:
    """Rank 5 of 256 in a process of its own: what it holds is what the planner says."""
    plan = Plan.parse("dp=64,tp=4,sp,zero=1")
    planner = Planner(tasks.gpt, read_hardware("h100"), batch=64)
    found = dry_run("tests/equivalence/tasks.py:gpt", plan, rank=5, batch=64, steps=1)
    search = planner.search(256)
    expected = search.memory._state(plan, search.stages(plan), 0)
    parameters, _, optimizer = expected.bytes(plan, planner.profile.optimizer)
    assert found.seconds > 0
    # Rows that 64 ranks do not divide: some hold one more than others. Adam counts its steps beside them.
    assert parameters < found.state <= parameters + optimizer + 4 * 64
    with pytest.raises(UsageError, match=r"rank 256 of plan dp=64,.*: expected one of 0 to 255"):
        run_here(tasks.gpt, plan, rank=256)


def test_a_dry_run_cuts_the_layers_that_ranks_cut() -> None:
    """Those that show by being run, though it has no values: attention by its heads."""
    said: set[str] = set()
    with traffic.counted(lambda each: said.add(each.op)):
        run_here(load_task(TASK), Plan.parse("tp=2"), 0, steps=1)
    assert "all_reduce" in said
    assert not {each for each in said if "gather" in each}


# Plans, with ranks that are tried alone. Of STATE_ALONE, real ranks hold messages too, which are not simulated.
ALONE = {"pp=4,microbatches=4": (1, 3), "pp=2,cp=2,schedule=zbv,microbatches=4": (3,)}
STATE_ALONE = {"dp=2,ep=2,pp=2,microbatches=2": (3,)}


@pytest.mark.thorough
def test_any_rank_alone_takes_what_it_takes_among_others(pools: Callable[[str, int], RankPool]) -> None:
    """Middle and last stages, both ends of a V, cp and ep: the state to the byte, the peak to 3%."""
    together = pools("gloo", 4).run(_measured_together)
    for plan, rank, state, peak in spawn(_measured_alone, 1, None, ())[0]:
        state_together, peak_together = together[rank][plan]
        assert state == state_together, (plan, rank)
        assert plan in STATE_ALONE or peak == pytest.approx(peak_together, rel=0.03), (plan, rank)


def _job(plan: str) -> Task:
    from gpt import Config, large_gpt

    return tasks.moe if "ep=" in plan else large_gpt("small", Config(512, 64, 128, 4, 4), 8, torch.float32)


def _measured_together(comm: Communicator) -> dict[str, tuple[float, float]]:
    found = {}
    for text in (*ALONE, *STATE_ALONE):
        task = _job(text)
        meter = Meter(torch.device("cpu"))
        with meter if comm.rank in ALONE.get(text, ()) else nullcontext():  # to count takes longer than to train
            given = task.batch(0)
            trainer = parallelize(
                task.model, text, loss=task.loss, optimizer=task.optimizer, example=given, rules=task.rules
            )
            trainer.step(given)
            meter.restart()
            trainer.step(given)
        found[text] = (state_of(trainer), meter.peak)
    return found


def _measured_alone() -> list[tuple[str, int, float, float]]:
    found = []
    for text, ranks in (ALONE | STATE_ALONE).items():
        runs = [run_here(_job(text), Plan.parse(text), rank, steps=1) for rank in ranks]
        found += [(text, run.rank, run.state, run.peak) for run in runs]
    return found


def test_predicted_memory_is_what_is_allocated() -> None:
    """To 2%, at every moment of a backward that could be the highest, in a process of its own."""
    for plan, predicted, allocated in spawn(_allocated, 1, None, ())[0]:
        assert predicted == pytest.approx(allocated, rel=0.05), plan


PLANS = (
    "dp=8,zero=1,microbatches=2",
    "dp=8,zero=2,recompute=full",
    "dp=2,tp=4,sp,zero=1",
    "dp=8,recompute=selective",
    "dp=2,tp=4,recompute=selective",
    "dp=2,tp=4,sp,recompute=selective",
)


def _allocated() -> list[tuple[str, float, float]]:
    from gpt import Config, large_gpt

    found = []
    for plan in map(Plan.parse, PLANS):
        task = large_gpt("small", Config(512, 64, 128, 4, 4), 2 * plan.dp * plan.microbatches, torch.float32)
        expected = Planner(task, read_hardware("h100")).search(8).judged(plan).footprint.total
        with world.simulated(0, plan.world), Meter(torch.device("cpu")) as meter:
            mesh, given = Mesh(plan.shape, AXES).connect(), task.batch(0)
            trainer = build_trainer(task, plan, mesh, given, torch.device("cpu"))
            for _ in range(2):
                trainer.step(given)
            del trainer, given
        found.append((str(plan), expected, meter.peak))
    return found


class _Uneven(nn.Module):
    """An embedding of as many parameters as four blocks, which costs next to no time."""

    def __init__(self, repeats: bool = False) -> None:
        super().__init__()
        self.repeats = repeats
        self.embedding = nn.Embedding(1024, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 16)) for _ in range(6))
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, *(self.blocks[:1] if self.repeats else ())):
            x = block(x)
        return self.head(x)


def _uneven(repeats: bool = False) -> Task:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(8, 64, dtype=torch.long), torch.zeros(8, 64, 4)

    return Task(lambda: _Uneven(repeats), F.mse_loss, torch.optim.SGD, batch)


def _pair() -> Task:
    """Layers on sequences, in no list."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    rules = {"0": "column", "2": "row"}
    return Task(model, F.mse_loss, torch.optim.SGD, lambda seed: (torch.ones(2, 8, 16), torch.ones(2, 8, 16)), rules)


def test_plans_that_ranks_would_refuse_are_not_found() -> None:
    """sp where there is no list of blocks, and a pipeline where a block runs twice."""
    for task, text, words in ((_pair(), "tp=2,sp", "no list of blocks"), (_uneven(True), "pp=2", "run once each")):
        search = Planner(task, read_hardware("h100")).search(2)
        plan = Plan.parse(text)
        assert words in (search.refusal(plan) or "")
        assert all(search.refusal(each.plan) is None for each in search.run(30).candidates)
        with pytest.raises(UsageError):
            run_here(task, plan, rank=1, steps=1)


def test_a_plan_is_judged_by_the_stages_that_ranks_make_of_it() -> None:
    """Without boundaries ranks balance parameters; the search balances time, and then says so in its plan."""
    for task in (_uneven(), tasks.gpt, tasks.mlp):
        search = Planner(task, read_hardware("h100")).search(2)
        ran = split(task.model(), schedule("1f1b", 2, 1), 0, example=task.batch(0)[0]).boundaries
        assert search.stages(Plan(pp=2)).starts == ran, task.name
    search = Planner(_uneven(), read_hardware("h100")).search(2)
    found = search.settled(Plan(pp=2, microbatches=4))
    assert search.stages(Plan(pp=2)).starts == (0, 1)
    assert found.plan.boundaries == (0, 3)
    assert found.seconds < 0.8 * search.judged(Plan(pp=2, microbatches=4), played=True).seconds


def test_what_is_not_trained_has_neither_gradients_nor_state() -> None:
    def model() -> nn.Module:
        made = tasks.gpt.model()
        made.blocks.requires_grad_(False)
        return made

    task = replace(tasks.gpt, model=model)
    trained = sum(p.numel() for p in model().parameters() if p.requires_grad)
    every = sum(p.numel() for p in model().parameters())
    search = Planner(task, read_hardware("h100")).search(4)
    for text in ("dp=4", "dp=4,zero=1", "dp=4,zero=3"):
        plan = Plan.parse(text)
        state = search.memory._state(plan, search.stages(plan), 0)
        parameters, gradients, _ = state.bytes(plan, search.profile.optimizer)
        assert gradients == 4 * (trained if plan.zero < 2 else state.sharded)
        assert parameters == 4 * (every if plan.zero < 3 else every - trained + state.sharded)
    with world.simulated(1, 4):
        plan = Plan.parse("dp=4,zero=3")
        trainer = build_trainer(task, plan, _mesh(plan), task.batch(0), torch.device("cpu"))
        held = sum(p.untyped_storage().nbytes() for p in trainer.model.parameters())
    assert held <= search.memory._state(plan, search.stages(plan), 0).bytes(plan, search.profile.optimizer)[0]
    assert held > 4 * (every - trained)


def test_halves_stay_halves_where_the_loss_has_no_parameters() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(torch.bfloat16)

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.bfloat16)

    search = Planner(Task(model, F.mse_loss, torch.optim.SGD, batch), read_hardware("h100")).search(1)
    assert search.judged(Plan()).footprint.parameters == 2 * (16 * 32 + 32 + 32 * 4 + 4)


def test_a_model_without_parameters_is_refused() -> None:
    task = Task(nn.Identity, F.mse_loss, torch.optim.SGD, lambda seed: (torch.ones(4, 2), torch.ones(4, 2)))
    with pytest.raises(UsageError, match="Identity has no parameters to train"):
        Planner(task, read_hardware("h100"))


def _mesh(plan: Plan) -> Mesh:
    mesh = Mesh(plan.shape, AXES)
    mesh.connect()
    return mesh
