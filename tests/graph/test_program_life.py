"""A program through its life: steps, evaluation, prediction, states, batches of other sizes, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.graph.program.executable import Executable
from unisono.graph.program.lowering import Compute
from unisono.graph.program.program import Program
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.random.state import RandomState
from unisono.parallel.task import Task
from unisono.verify.compare import compared
from unisono.verify.mesh_program import ProgramSpec, program_record
from unisono.verify.training_record import plain_record
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]


class Net(nn.Module):
    """With a buffer that counts, dropout, and a branch that only evaluation takes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        if self.training:
            self.seen.mul_(0.5).add_(x.mean())
        hidden = self.drop(F.gelu(self.norm(self.first(x))))
        logits = self.last(hidden)
        return {"logits": logits if self.training else logits * 2, "hidden": (hidden, None)}


def loss(outputs: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"], targets)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (rows,), generator=generator)


TASK = Task(model=Net, loss=loss, optimizer=adam, batch=batch, clip=0.1)


def make(mesh: uni.Mesh, model: Any = Net, optimizer: Any = adam, **options: Any) -> Program:
    return uni.to_static(
        model, example=batch(0), mesh=mesh, loss=loss, optimizer=optimizer, clip=0.1, dtype=torch.float64, **options
    )


def sharded_net() -> Net:
    """Whose layers the ranks of mp share, by columns and then by rows."""
    net, mesh = Net(), uni.Mesh((2,), ("mp",))
    uni.mark(net, "first.weight", mesh, [uni.Shard(0)])
    uni.mark(net, "last.weight", mesh, [uni.Shard(1)])
    return net


def plain_steps(sizes: list[int]) -> tuple[Net, list[float]]:
    """One process, as a plain loop has it."""
    model = build(Net, 0).to(torch.float64)
    random = RandomState(0)
    random.name_modules(model)
    optimizer = adam(model.parameters())
    losses = []
    for step, rows in enumerate(sizes):
        x, y = batch(step, rows)
        random.step = step
        with random:
            value = loss(model(x), y)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(value.item())
    return model, losses  # type: ignore[return-value]


def live(comm: Communicator) -> None:
    """Steps with batches of several sizes, one of which the ranks cannot share; then evaluation and prediction."""
    sizes = [8, 4, 7, 8]
    model, losses = plain_steps(sizes)
    program = make(uni.Mesh((2,), ("dp",)))
    got = [program(batch(step, rows)).item() for step, rows in enumerate(sizes)]
    assert got == pytest.approx(losses, rel=1e-9)
    model.eval()
    program.eval()
    with torch.no_grad():
        x, y = batch(9)
        assert program((x, y)).item() == pytest.approx(loss(model(x), y).item(), rel=1e-9)
        predicted, expected = program.predict(x[:5]), model(x[:5])
        torch.testing.assert_close(predicted["logits"], expected["logits"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(predicted["hidden"][0], expected["hidden"][0], rtol=1e-9, atol=1e-12)
        assert predicted["hidden"][1] is None
    state = program.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state["model"][name], tensor, rtol=1e-9, atol=1e-12)


def go_on(comm: Communicator) -> None:
    """A state goes from a program to another on another mesh, to a trainer, and back, as if nothing had happened."""
    losses = plain_steps([8] * 6)[1]
    first = make(uni.Mesh((2,), ("dp",)))
    got = [first(batch(step)).item() for step in range(2)]
    second = make(uni.Mesh((2,), ("mp",)), sharded_net)
    assert dict(second.named_parameters())["last.weight"].shape == (4, 4)
    second.load_state_dict(first.state_dict())
    got += [second(batch(step)).item() for step in range(2, 4)]
    local = second.state_dict(local=True)
    rules = {"first": "column_gather"}  # under dp a rank would not see all samples that the buffer counts
    trainer = uni.parallelize(Net, "tp=2", rules=rules, loss=loss, optimizer=adam, clip=0.1, dtype=torch.float64)
    trainer.load_state_dict(second.state_dict())
    got.append(trainer.step(batch(4)).item())
    first.load_state_dict(trainer.state_dict())
    got.append(first(batch(5)).item())
    assert got == pytest.approx(losses, rel=1e-9)
    second.load_state_dict(local)
    assert second(batch(4)).item() == pytest.approx(losses[4], rel=1e-9)


def find_faults(comm: Communicator) -> list[tuple[bool, str]]:
    """Whether a proof notices a gradient that is not summed, a mask that is drawn as if full, a lost buffer."""
    plain = plain_record(TASK, 2, torch.float64)
    mesh = uni.Mesh((2,), ("dp",))

    def no_sums(program: Program) -> None:
        program._shown.sums._summed = []

    def other_masks(program: Program) -> None:
        program.random.seed = 1

    def no_buffers(program: Program) -> None:
        program._shown.keep = lambda values: None  # type: ignore[method-assign]

    for prepare in (no_sums, other_masks, no_buffers):
        planned = program_record(TASK, mesh, 2, torch.float64, prepare=prepare)
        assert not compared("faulty", plain, planned, "float64").equivalent, prepare

    def wrong_rank(program: Program) -> None:
        """Rank 1 draws other numbers for its dropout."""
        for index, each in enumerate(program.lowered.instructions):
            if comm.rank == 1 and isinstance(each, Compute) and "draw" in each.node.meta:
                node = fx.Graph().node_copy(each.node, lambda given: given)
                node.meta = {**each.node.meta, "draw": ("elsewhere", 0)}
                program.lowered.instructions[index] = replace(each, node=node)
        program._shown = Executable(program.lowered, program.shards, program.random, torch.device("cpu"))
        program._forms[next(iter(program._forms))] = program._shown

    verdicts = [verify_here(comm, TASK, ProgramSpec.parse("dp=2"), 2, prepare=p) for p in (None, no_sums, wrong_rank)]
    return [(verdict.equivalent, verdict.first_divergence) for verdict in verdicts]


def refused(comm: Communicator) -> list[str]:
    reported = []
    for attempt in (
        lambda: make(uni.Mesh((4,), ("dp",), range(4))),
        lambda: uni.to_static(
            Net, example=batch(0, 7), mesh=uni.Mesh((2,), ("dp",)), loss=loss, optimizer=adam, dtype=torch.float64
        ),
        lambda: make(uni.Mesh((2,), ("dp",)), search="magic"),
        lambda: make(uni.Mesh((2,), ("dp",)))((batch(0)[0].float(), batch(0)[1])),
        lambda: make(uni.Mesh((2,), ("dp",)))(batch(0)[0]),  # type: ignore[arg-type]
        lambda: make(uni.Mesh((2,), ("mp",)), sharded_net, torch.optim.Adafactor),
    ):
        with pytest.raises(UsageError) as caught:
            attempt()
        reported.append(str(caught.value))
    return reported


def test_steps_evaluation_and_prediction(pools: Pools) -> None:
    pools("gloo", 2).run(live)


def test_states_go_anywhere(pools: Pools) -> None:
    pools("gloo", 2).run(go_on)


def test_faults_are_found(pools: Pools) -> None:
    full, no_sums, masks = pools("gloo", 2).run(find_faults)[0]
    assert full == (True, "")
    assert not no_sums[0]
    assert no_sums[1].startswith("forward values agree")
    assert not masks[0]
    assert re.match(r"dropout \(drop test_program_life.py:\d+\) on rank 1: deviation", masks[1])


def test_what_is_refused(pools: Pools) -> None:
    mesh, rows, search, dtype, no_pair, optimizer = pools("gloo", 2).run(refused)[0]
    assert "has 4 ranks, but 2 are running" in mesh
    assert "7 samples, which dp=2 cannot share evenly" in rows
    assert "expected one of propagate" in search
    assert "float32" in dtype
    assert "expected (inputs, targets)" in no_pair
    assert "Adafactor uses a parameter as one tensor, but" in optimizer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dp=2,tp", "'tp' is no axis"),
        ("search=exact,dp=x", "is no axis"),
        ("full", "has no axes"),
        ("dp=0", "no axis"),
        ("dp=2,zero=4", "'zero=4' is no axis"),
        ("dp=2,memory=much", "'memory=much' is no axis"),
    ],
)
def test_words_of_a_mesh_that_make_no_sense(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProgramSpec.parse(words)


def test_words_of_a_mesh() -> None:
    parsed = ProgramSpec.parse("dp=2,mp=4,full")
    assert (parsed.world, str(parsed), str(parsed.described())) == (8, "program dp=2,mp=4,full", "Mesh(dp=2, mp=4)")
    limited = ProgramSpec.parse("mp=2,search=exact,memory=1.5MiB")
    assert limited.options["memory"] == 3 * 2**19
    assert ProgramSpec.parse(str(limited)) == limited
    with pytest.raises(UsageError, match="needs 8 ranks, but there are 4"):
        parsed.fit(4)
