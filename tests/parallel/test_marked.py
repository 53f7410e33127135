"""Marks instead of a plan: the plan that follows from them, and that training under it gives what one device
gives; and the same stages as a static program."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.pipeline.traced import TracedStages
from unisono.parallel.static.marked import plan_of_marks
from unisono.verify.mesh_program import ProgramSpec
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks in no list, with something beside them that is made of the inputs alone, and a residual round them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.first = Block(8)
        self.second = Block(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean(1, keepdim=True)
        y = self.first(self.enter(x), scale)
        return self.head(self.second(y, scale))


def _net(width: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator).double(), torch.randint(4, (8,), generator=generator)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def _marked() -> nn.Module:
    return _staged(Mesh.describe((2, 2), ("pp", "dp")))


TASK = uni.Task(model=_marked, loss=F.cross_entropy, optimizer=_adam, batch=_batch, clip=0.3)
JOB: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": _adam, "example": _batch(0)}


def _expected(steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    net = _net()
    optimizer = _adam(net.parameters())
    losses = []
    for step in range(steps):
        inputs, targets = _batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def _proved(step: Callable[[Any], torch.Tensor], state: Callable[[], dict[str, Any]]) -> None:
    losses, parameters = _expected()
    assert [step(_batch(number)).item() for number in range(3)] == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(state()["model"], dict(parameters), rtol=1e-9, atol=1e-11)


def _shared(mesh: Mesh) -> nn.Module:
    """One mark a block; the other layers follow."""
    net = _net()
    full = [uni.Replicate()] * (mesh.ndim - 1)
    for name in ("first", "second"):
        uni.mark(net, f"{name}.up.weight", mesh, [*full, uni.Shard(0)])
    return net


def _staged(mesh: Mesh) -> nn.Module:
    net = _net()
    uni.mark(net, "second", mesh.at(pp=1))
    return net


def train(comm: Communicator) -> list[str]:
    plans = []
    for mesh, net, more in (
        (uni.Mesh((2, 2), ("dp", "mp")), _shared, {"zero": 1}),
        (uni.Mesh((2, 2), ("pp", "dp")), _staged, {"zero": 2, "microbatches": 2, "schedule": "f-then-b"}),
    ):
        trainer = uni.apply_marks(net(mesh), mesh=mesh, **JOB, **more)
        plans.append(str(trainer.plan))
        _proved(trainer.step, trainer.state_dict)
    program = uni.to_static(_staged(mesh), mesh=mesh, **JOB, zero=1, microbatches=2)
    _proved(program, program.state_dict)
    _shown_and_asked(program)
    return plans


def verified(comm: Communicator, words: str) -> None:
    verdict = verify_here(comm, TASK, ProgramSpec.parse(words), 2)
    assert verdict.equivalent, verdict


def _shown_and_asked(program: uni.StagedProgram) -> None:
    first, last = program.text(0), program.text(2)
    assert "send to rank 2: " in first
    assert "recv from rank 2 the gradients" in first
    assert "recv from rank 0: " in last
    assert "order: 1F0 1B0 1F1 1B1" in last
    inputs, targets = _batch(9)
    plain = _net()
    plain.load_state_dict(program.state_dict()["model"])
    torch.testing.assert_close(program.predict(inputs), plain(inputs).detach(), rtol=1e-9, atol=1e-11)
    loss = program.eval()((inputs, targets))
    assert loss.item() == pytest.approx(F.cross_entropy(plain(inputs), targets).item(), rel=1e-9)


def test_the_result_of_one_device(pools: Pools) -> None:
    plans = pools("gloo", 4).run(train)[0]
    assert plans == ["dp=2,tp=2,zero=1", "dp=2,pp=2,zero=2,microbatches=2,schedule=f-then-b,boundaries=0+2"]


@pytest.mark.parametrize("words", ["pp=2,dp=2,zero=1,microbatches=2", "pp=2,dp=2,microbatches=2"])
def test_verify_takes_marked_stages(pools: Pools, words: str) -> None:
    pools("gloo", 4).run(verified, words)


def test_what_the_axes_do() -> None:
    mesh = Mesh.describe((2, 2, 2), ("pp", "dp", "mp"))
    net = _shared(Mesh.describe((2,), ("mp",)))
    uni.mark(net, "enter", mesh.at(pp=0))
    uni.mark(net, "head", mesh.at(pp=1))
    plan, rules = plan_of_marks(net, mesh, F.cross_entropy, _batch(0))
    assert str(plan) == "dp=2,tp=2,pp=2,boundaries=0+3"
    assert rules == {f"{block}.{layer}": kind for block in ("first", "second") for layer, kind in _KINDS.items()}


_KINDS = {"up": "column", "down": "row"}


def test_a_parameter_that_is_marked_in_the_forward_is_marked() -> None:
    """The form of Paddle's programs: what the mark returns is not used."""
    mesh = Mesh.describe((2,), ("mp",))

    class Marked(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            uni.shard_tensor(self.first.up.weight, mesh, [uni.Shard(0)])
            uni.shard_tensor(self.second.up.weight, mesh, [uni.Shard(0)])
            return super().forward(x)

    _, rules = plan_of_marks(Marked().double(), mesh, F.cross_entropy, _batch(0))
    assert rules is not None
    assert rules["second.down"] == "row"


def test_stages_that_are_marked_in_the_forward() -> None:
    """The form of Paddle's programs: shard_op(self.linear3, mesh[1])(x)."""
    mesh = Mesh.describe((2,), ("pp",))

    class Marked(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.mean(1, keepdim=True)
            y = self.first(uni.shard_op(self.enter, mesh.at(pp=0))(x), scale)
            return uni.shard_op(self.head, mesh.at(pp=1))(self.second(y, scale))

    net = Marked().double()
    plan, _ = plan_of_marks(net, mesh, F.cross_entropy, _batch(0))
    assert str(plan) == "pp=2,boundaries=0+3"
    inputs = _batch(0)[0]
    staged = TracedStages(net, {"enter": 0, "head": 1}, 2)
    torch.testing.assert_close(staged(inputs), net(inputs))  # and without ranks it is the model
    assert [len(segment.ops) for segment in staged.splits.of(inputs, True).segments][1] == 1
    with pytest.raises(UsageError, match="has no placements of inputs or outputs"):
        uni.shard_op(torch.matmul, mesh)


def _refusal(attempt: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        attempt()
    return str(caught.value)


def test_marks_that_make_no_plan() -> None:
    mesh = Mesh.describe((2,), ("pp",))
    batch = _batch(0)
    net = _net()
    for act in (uni.apply_marks, uni.to_static):
        bad: dict[str, Any] = {**JOB, "example": None}
        assert "example is NoneType; expected a global batch" in _refusal(
            lambda act=act, bad=bad: act(net, mesh=mesh, **bad)
        )
    assert "has no module 'third'" in _refusal(lambda: uni.mark(net, "third", mesh.at(pp=1)))
    assert "pp=2 is off the mesh" in _refusal(lambda: mesh.at(pp=2))
    uni.mark(net, "first.up", mesh.at(pp=1))
    reported = _refusal(lambda: plan_of_marks(net, mesh, F.cross_entropy, batch))
    assert "first.up is marked as a stage's first, but blocks are enter, first, second, head" in reported
    other = _net()
    uni.mark(other, "second", Mesh.describe((4,), ("pp",)).at(pp=3))
    assert "expected a submesh of Mesh(pp=2)" in _refusal(lambda: plan_of_marks(other, mesh, F.cross_entropy, batch))
    three = Mesh.describe((3,), ("pp",))
    short = _net()
    uni.mark(short, "second", three.at(pp=1))
    assert "pp=3 needs as many stages" in _refusal(lambda: plan_of_marks(short, three, F.cross_entropy, batch))
    nothing = _refusal(lambda: plan_of_marks(_net(), Mesh.describe((2,), ("mp",)), F.cross_entropy, batch))
    assert "nothing is marked along mp" in nothing
    turned = Mesh.describe((2, 2), ("mp", "dp"))
    marked = _shared(Mesh.describe((2,), ("mp",)))
    assert "come in the order dp, tp" in _refusal(lambda: plan_of_marks(marked, turned, F.cross_entropy, batch))


def test_what_a_static_pipeline_leaves_to_others() -> None:
    mesh = Mesh.describe((2, 2), ("pp", "mp"))
    staged = _staged(mesh)
    assert "mp of Mesh(pp=2, mp=2) would be in it too" in _refusal(lambda: uni.to_static(staged, mesh=mesh, **JOB))
    mesh = Mesh.describe((2,), ("pp",))
    staged = _staged(mesh)
    reported = _refusal(lambda: uni.to_static(staged, mesh=mesh, **JOB, unpack=True))
    assert "lay out tensors, but this program is made of marked stages" in reported
    reported = _refusal(lambda: uni.to_static(_net(), mesh=mesh, **JOB, microbatches=2))
    assert "is for a pipeline, but no stage is marked" in reported
    turned = Mesh.describe((2, 2), ("dp", "pp"))
    staged = _staged(turned)
    assert "come in the order pp, dp" in _refusal(lambda: uni.to_static(staged, mesh=turned, **JOB))


def test_graphs_that_are_no_static_pipeline() -> None:
    noisy = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 4)).double()
    inputs = _batch(0)[0]
    assert "draws random numbers" in _refusal(lambda: TracedStages(noisy, {"2": 1}, 2)(inputs))
    back = TracedStages(_net(), {"first": 1, "second": 0}, 2)
    assert "is marked for stage 0, but runs after an op of stage 1" in _refusal(lambda: back(inputs))
    assert "no op runs on stage 1 of 2" in _refusal(lambda: TracedStages(_net(), {"enter": 0}, 2)(inputs))


def test_traced_stages_are_the_model() -> None:
    net = _net()
    staged = TracedStages(copy.deepcopy(net), {"first": 1, "head": 2}, 3)
    assert list(staged.state_dict()) == list(net.state_dict())
    for rows in (8, 3):
        inputs = _batch(0)[0][:rows]
        torch.testing.assert_close(staged(inputs), net(inputs))


class Numbered(nn.Module):
    """Makes tensors of its own in both stages: positions, and a mask, each where torch puts tensors by default."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x) + torch.arange(8, dtype=x.dtype)
        return self.head(y * torch.ones(x.shape[0], 8, dtype=x.dtype).tril()) + torch.zeros(4, dtype=x.dtype)


def test_tensors_made_in_a_stage_are_made_where_it_runs() -> None:
    """A trace has no device, a stage has: here torch's meta device, which no op lets mix with the CPU."""
    net = Numbered().double()
    staged = TracedStages(copy.deepcopy(net), {"head": 1}, 2)
    inputs = _batch(0)[0]
    torch.testing.assert_close(staged(inputs), net(inputs), rtol=0, atol=0)
    elsewhere = staged.to("meta")(inputs.to("meta"))
    assert (elsewhere.device.type, elsewhere.shape) == ("meta", (8, 4))
    elsewhere.sum().backward()


class Sharing(nn.Module):
    """Marks its inputs in the forward, as Paddle's users do, and a parameter when it is built."""

    def __init__(self, mesh: Mesh, mark: bool = False) -> None:
        super().__init__()
        self.mesh, self.net = mesh, _net()
        if mark:
            uni.shard_tensor(self.net.enter.weight, mesh, [uni.Shard(0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = uni.shard_tensor(x, self.mesh, [uni.Shard(0)])
        return self.net(x)


def marked_inputs(comm: Communicator) -> None:
    mesh = uni.Mesh((2,), ("dp",))
    trainer = uni.apply_marks(Sharing(mesh), mesh=mesh, **JOB)
    loss = trainer.step(_batch(0))
    inputs, targets = _batch(0)
    assert loss.item() == pytest.approx(F.cross_entropy(_net()(inputs), targets).item(), rel=1e-9)


def test_inputs_may_be_marked_in_the_forward(pools: Pools) -> None:
    pools("gloo", 2).run(marked_inputs)


def marked_and_called(comm: Communicator) -> list[str]:
    mesh = uni.Mesh((2,), ("mp",))
    model = Sharing(mesh, mark=True).net
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        for _ in range(2):
            model(_batch(0)[0])
    return [str(warning.message) for warning in reported]


def test_a_mark_that_nothing_acts_on_warns_once(pools: Pools) -> None:
    for reported in pools("gloo", 2).run(marked_and_called):
        assert len(reported) == 1
        assert "weight of Linear is marked" in reported[0]
        assert "uni.apply_marks" in reported[0]
