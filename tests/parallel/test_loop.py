"""A loop of the user's own on a planned model gives, for any loss, what it gives on one device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

import unisono as uni
from examples import gan
from tests.equivalence import tasks
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.random.active import active_state
from unisono.mesh.random.state import RandomState
from unisono.parallel.apply import parallelize
from unisono.parallel.expert.expert import collect_aux
from unisono.parallel.inputs import call
from unisono.parallel.layout import full_tensor_of, layout_of
from unisono.parallel.task import Task
from unisono.parallel.trainer import Trainer
from unisono.verify.float64 import Float64Mode

Pools = Callable[[str, int], RankPool]
Job = Any  # a Trainer, or what a plain model has of one
Loop = Callable[[Job, Task, Any, Any], torch.Tensor]
STEPS = 3


# ---- loops, each of them written once for one device and for ranks ---------------------------------------------------


def plain(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.optimizer.zero_grad()
    loss = task.loss(call(job.model, x), y)
    aux = collect_aux(job.model)
    loss = loss if aux is None else loss + aux
    loss.backward()
    job.optimizer.step()
    return loss


def clipped(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.model.zero_grad()
    loss = task.loss(call(job.model, x), y)
    loss.backward()
    job.clip_grad_norm_(0.05)
    job.optimizer.step()
    return loss


def two_backwards(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.model.zero_grad()
    first = task.loss(call(job.model, x), y)
    first.backward()
    second = (call(job.model, x).sum(0) ** 2).mean()  # one that mixes samples
    second.backward()
    job.optimizer.step()
    return first + second


def two_losses(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.optimizer.zero_grad()
    outputs = call(job.model, x)
    first, second = task.loss(outputs, y), outputs.pow(2).sum()
    first.backward(retain_graph=True)
    second.backward()
    job.optimizer.step()
    return first + second


def accumulated(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.optimizer.zero_grad()
    with job.no_sync():
        first = task.loss(call(job.model, x[:5]), y[:5])
        first.backward()
    second = task.loss(call(job.model, x[5:]), y[5:])
    second.backward()
    job.optimizer.step()
    return first + second


def held_back_to_the_step(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.optimizer.zero_grad()
    with job.no_sync():
        loss = task.loss(call(job.model, x), y)
        loss.backward()
    job.optimizer.step()
    return loss


def regularized(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    job.optimizer.zero_grad()
    loss = task.loss(call(job.model, x), y)
    loss = loss + 1e-2 * sum(parameter.pow(2).sum() for parameter in job.model.parameters())
    loss.backward()
    job.optimizer.step()
    return loss


def penalized(job: Job, task: Task, x: Any, y: Any) -> torch.Tensor:
    """By the gradient of the inputs, which is differentiated again."""
    job.optimizer.zero_grad()
    x = x.clone().requires_grad_()
    outputs = call(job.model, x)
    slope = torch.autograd.grad(outputs.sum(), x, create_graph=True)[0]
    loss = task.loss(outputs, y) + (slope.norm(dim=1) - 1).pow(2).mean()
    loss.backward()
    job.optimizer.step()
    return loss + x.grad.pow(2).sum()


LOOPS = {
    each.__name__: each
    for each in (
        plain, clipped, two_backwards, two_losses, accumulated, held_back_to_the_step, regularized, penalized
    )
}  # fmt: skip


class NoDropout(nn.Module):
    """Smooth, so that it can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


smooth = Task(NoDropout, F.cross_entropy, tasks.mlp.optimizer, tasks.mlp.batch)
TASKS = {"smooth": smooth} | {name: getattr(tasks, name) for name in ("mlp", "conv", "gpt", "moe", "llama")}


# ---- one device, and ranks -------------------------------------------------------------------------------------------


def batch_of(task: Task, step: int) -> Any:
    x, y = task.batch(step)
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, y


def on_one_device(task: Task, loop: Loop) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(task.model, 0).double()
    random = RandomState(0)
    random.name_modules(model)
    optimizer = task.optimizer(list(model.parameters()))

    def clip(norm: float) -> Any:
        return clip_grad_norm_(model.parameters(), norm)

    job = SimpleNamespace(model=model, optimizer=optimizer, no_sync=contextlib.nullcontext, clip_grad_norm_=clip)
    losses = []
    for step in range(STEPS):
        random.step = step
        with random, Float64Mode(torch.float64):
            losses.append(loop(job, task, *batch_of(task, step)).item())
    return losses, dict(model.named_parameters()) | dict(model.named_buffers())


def trainer_of(task: Task, plan: str, **options: Any) -> Trainer:
    x, y = batch_of(task, 0)
    return parallelize(
        task.model, plan, loss=task.loss, optimizer=task.optimizer, example=(x, y), rules=task.rules,
        dtype=torch.float64, **options,
    )  # fmt: skip


def agrees(comm: Communicator, name: str, plan: str, style: str) -> None:
    task, loop = TASKS[name], LOOPS[style]
    losses, expected = comm.broadcast_object(on_one_device(task, loop) if comm.rank == 0 else None)
    trainer = trainer_of(task, plan)
    with Float64Mode(torch.float64):
        for step in range(STEPS):
            loss = loop(trainer, task, *batch_of(task, step)).item()
            assert loss == pytest.approx(losses[step], rel=1e-9), f"the loss of step {step}"
    assert trainer.steps == STEPS
    compare(trainer.state_dict()["model"], expected)


def compare(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in got.items():
        worst = (tensor.double() - expected[name].double()).abs().max() / expected[name].abs().max().clamp(min=1e-3)
        assert worst < 1e-9, f"{name} is off by {worst:.1e}"


@pytest.mark.parametrize(
    ("task", "plan", "style"),
    [
        ("mlp", "dp=2", "plain"),
        ("mlp", "dp=2,zero=1", "plain"),
        ("mlp", "dp=2,zero=2", "plain"),
        ("mlp", "dp=2,zero=3", "plain"),
        ("mlp", "tp=2", "plain"),
        ("conv", "dp=2", "plain"),
        ("gpt", "cp=2", "plain"),
        ("gpt", "cp=2,context=ulysses", "plain"),
        ("gpt", "dp=2,recompute=full", "plain"),
        ("gpt", "tp=2,sp", "two_backwards"),
        ("moe", "dp=2,ep=2", "plain"),
        ("moe", "dp=2,ep=2", "two_losses"),
        ("llama", "dp=2,zero=3", "plain"),
        *(("mlp", plan, style) for plan in ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2")
          for style in ("clipped", "two_backwards", "two_losses", "accumulated", "held_back_to_the_step")),
        ("mlp", "dp=2", "regularized"),
        ("mlp", "dp=2,zero=2", "regularized"),
        ("smooth", "dp=2", "penalized"),
        ("smooth", "dp=2,zero=2", "penalized"),
    ],
)  # fmt: skip
def test_own_loop_agrees_with_one_device(pools: Pools, task: str, plan: str, style: str) -> None:
    pools("gloo", 2).run(agrees, task, plan, style)


@pytest.mark.parametrize(("task", "plan"), [("gpt", "dp=2,cp=2"), ("moe", "dp=4,ep=2"), ("gpt", "dp=2,tp=2,zero=1,sp")])
def test_own_loop_on_four_ranks(pools: Pools, task: str, plan: str) -> None:
    pools("gloo", 4).run(agrees, task, plan, "two_losses" if task == "gpt" else "plain")


# ---- batches of a rank's own -----------------------------------------------------------------------------------------


def local_of(batch: tuple[Any, Any], counts: list[int], rank: int) -> tuple[Any, Any]:
    first = sum(counts[:rank])
    return batch[0][first : first + counts[rank]], batch[1][first : first + counts[rank]]


def local_loop_agrees(comm: Communicator, plan: str) -> None:
    """The mean of the losses of equally many samples is the loss of all of them."""
    task = Task(tasks.mlp.model, F.cross_entropy, tasks.mlp.optimizer, even_vectors, rules=tasks.mlp.rules)
    losses, expected = on_one_device(task, plain)
    trainer = trainer_of(task, plan, batch="local")
    data = trainer.mesh.comm("dp")
    for step in range(STEPS):
        with Float64Mode(torch.float64):
            local = local_of(batch_of(task, step), [12 // data.size] * data.size, data.rank)
            mine = plain(trainer, task, *local).detach()
        assert float(data.all_reduce(mine.clone())) / data.size == pytest.approx(losses[step], rel=1e-9)
    compare(trainer.state_dict()["model"], expected)


def even_vectors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = tasks.mlp.batch(seed)
    return x[:12], y[:12]


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_local_batches_in_an_own_loop(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(local_loop_agrees, plan)


def local_steps_agree(comm: Communicator, plan: str, counts: list[int]) -> None:
    """Of local batches of any sizes, as of the global batch that they make up."""
    task = tasks.gpt
    one, other = trainer_of(task, plan), trainer_of(task, plan, batch="local")
    for step in range(STEPS):
        batch = batch_of(task, step)
        local = local_of(batch, counts, one.mesh.comm("dp").rank)
        assert float(other.step(local)) == pytest.approx(float(one.step(batch)), rel=1e-9)
    assert float(other.evaluate(local)) == pytest.approx(float(one.evaluate(batch)), rel=1e-9)
    compare(other.state_dict()["model"], one.state_dict()["model"])
    compare({"outputs": other.predict(local[0])}, {"outputs": one.predict(batch[0])})


@pytest.mark.parametrize(
    ("plan", "counts"),
    [("dp=2,zero=2", [7, 2]), ("tp=2", [9]), ("pp=2,microbatches=2", [9]), ("dp=2,microbatches=3", [4, 5])],
)
def test_steps_on_local_batches(pools: Pools, plan: str, counts: list[int]) -> None:
    pools("gloo", 2).run(local_steps_agree, plan, counts)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Summary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).pow(2).mean()


def asks_autograd(trainer: Trainer, comm: Communicator) -> None:
    x, y = batch_of(smooth, 0)
    torch.autograd.grad(F.cross_entropy(trainer.model(x), y), list(trainer.model.parameters()))


def clips_with_torch(trainer: Trainer, comm: Communicator) -> None:
    x, y = batch_of(smooth, 0)
    F.cross_entropy(trainer.model(x), y).backward()
    clip_grad_norm_(trainer.model.parameters(), 1.0)


def clips_values_with_torch(trainer: Trainer, comm: Communicator) -> None:
    x, y = batch_of(smooth, 0)
    F.cross_entropy(trainer.model(x), y).backward()
    torch.nn.utils.clip_grad_value_(trainer.model.parameters(), 1.0)


def scales_with_torch(trainer: Trainer, comm: Communicator) -> None:
    x, y = batch_of(smooth, 0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(F.cross_entropy(trainer.model(x), y)).backward()
    shard = next(each for _, each in trainer.optimized() if each.grad is not None and each.numel())
    if comm.rank:  # an overflow in the shard of one rank
        shard.grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(trainer.optimizer)


def has_another_optimizer(trainer: Trainer, comm: Communicator) -> None:
    x, y = batch_of(smooth, 0)
    F.cross_entropy(trainer.model(x), y).backward()
    torch.optim.SGD(trainer.model.parameters(), lr=0.1).step()


def gives_other_batches(trainer: Trainer, comm: Communicator) -> None:
    trainer.model(batch_of(smooth, comm.rank)[0])


def gives_other_batches_to_step(trainer: Trainer, comm: Communicator) -> None:
    trainer.step(batch_of(smooth, comm.rank))


def gives_other_batches_to_predict(trainer: Trainer, comm: Communicator) -> None:
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(batch_of(smooth, comm.rank)[0])


def gives_uneven_batches(trainer: Trainer, comm: Communicator) -> None:
    x, y = batch_of(smooth, 0)
    F.cross_entropy(trainer.model(x[comm.rank :]), y[comm.rank :]).backward()


def runs(trainer: Trainer, comm: Communicator) -> None:
    trainer.model(batch_of(smooth, 0)[0])


TP = {"rules": {"blocks.0": "column", "blocks.2": "row"}}
REFUSALS: list[tuple[str, Any, str, dict[str, Any], str]] = [
    ("dp=2", asks_autograd, "smooth", {}, "torch.autograd.grad of a parameter gives this rank's part"),
    ("tp=2", clips_with_torch, "smooth", TP, "use trainer.clip_grad_norm_"),
    ("dp=2,zero=1", clips_with_torch, "smooth", {}, "use trainer.clip_grad_norm_"),
    ("dp=2,zero=2", clips_values_with_torch, "smooth", {}, "trainer.clip_grad_value_"),
    ("dp=2,zero=1", scales_with_torch, "smooth", {}, "not whether others overflow"),
    ("tp=2", scales_with_torch, "smooth", TP, "not whether others overflow"),
    ("dp=2,zero=1", has_another_optimizer, "smooth", {}, "only the trainer's own optimizer gets"),
    ("dp=2", gives_other_batches, "smooth", {}, "rank 1 was given another batch than rank 0"),
    ("tp=2", gives_other_batches, "smooth", TP, "rank 1 was given another batch than rank 0"),
    ("tp=2", gives_other_batches_to_predict, "smooth", TP, "rank 1 was given another batch than rank 0"),
    ("dp=2", gives_other_batches_to_step, "smooth", {}, 'use batch="local"'),
    ("tp=2", gives_other_batches_to_step, "smooth", TP, "rank 1 was given another batch than rank 0"),
    ("tp=2", gives_other_batches_to_step, "smooth", TP | {"batch": "local"}, "rank 1 was given another batch"),
    ("dp=2", gives_uneven_batches, "smooth", {"batch": "local"}, "ranks had between 12 and 13"),
    ("dp=2", runs, "summary", {}, "expected one row a sample"),
    ("dp=2", runs, "smooth", {"precision": "fp16"}, "only trainer.step does"),
]


def refused(comm: Communicator, plan: str, act: Callable[..., None], model: str, options: dict[str, Any]) -> str:
    dtype = torch.float64 if "precision" not in options else None
    built = NoDropout if model == "smooth" else Summary
    trainer = parallelize(built, plan, loss=F.cross_entropy, optimizer=smooth.optimizer, dtype=dtype, **options)
    try:
        act(trainer, comm)
    except UsageError as error:
        comm.barrier()
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize(("plan", "act", "model", "options", "reason"), REFUSALS)
def test_loops_that_cannot_be_right_are_refused(
    pools: Pools, plan: str, act: Callable[..., None], model: str, options: dict[str, Any], reason: str
) -> None:
    for words in pools("gloo", 2).run(refused, plan, act, model, options):
        assert reason in words


def other_things_work(comm: Communicator) -> None:
    """torch's clipping where gradients are full; clip= of the plan; a second optimizer; steps between."""
    x, y = batch_of(smooth, 0)
    model = build(NoDropout, 0).double()
    trainer = trainer_of(smooth, "dp=2", clip=0.05)
    for each in (model, trainer.model):
        F.cross_entropy(each(x), y).backward()
    close = {"rel": 1e-9}
    assert float(clip_grad_norm_(trainer.model.parameters(), 0.1)) == pytest.approx(
        float(clip_grad_norm_(model.parameters(), 0.1)), **close
    )
    trainer.optimizer.step()
    assert float(trainer.norm) == pytest.approx(0.1, rel=1e-4)  # type: ignore[arg-type]
    assert trainer.steps == 1
    other = torch.optim.SGD(trainer.model.blocks[0].parameters(), lr=0.1)  # type: ignore[union-attr, index]
    before = trainer.model.blocks[0].weight.clone()  # type: ignore[union-attr, index]
    other.step()
    assert not torch.equal(before, trainer.model.blocks[0].weight)  # type: ignore[union-attr, index, arg-type]
    trainer.step((x, y))
    trainer.zero_grad()
    F.cross_entropy(trainer.model(x), y).backward()
    trainer.optimizer.step()
    assert trainer.steps == 3


def test_what_torch_does_with_full_gradients(pools: Pools) -> None:
    pools("gloo", 2).run(other_things_work)


def a_plan_is_proved_for_local_batches(comm: Communicator) -> None:
    task = tasks.mlp
    example = local_of(task.batch(0), [6, 7], comm.rank)
    trainer = uni.parallelize(
        task.model, "dp=2", loss=task.loss, optimizer=task.optimizer, example=example, batch="local"
    )
    assert "proved on your model" in trainer.proof
    one, other = uni.parallelize(task.model, "dp=2", loss=task.loss, optimizer=task.optimizer), trainer
    assert float(other.step(example)) == pytest.approx(float(one.step(task.batch(0))), rel=1e-5)


def test_the_self_check_with_local_batches(pools: Pools) -> None:
    pools("gloo", 2).run(a_plan_is_proved_for_local_batches)


# ---- one global batch, wherever one is expected ----------------------------------------------------------------------


def batches_that_differ(comm: Communicator, kind: str) -> str:
    task = tasks.mlp
    options: dict[str, Any] = {"loss": task.loss, "optimizer": task.optimizer}
    try:
        if kind == "engine":
            uni.Engine(task.model, plan="dp=2", **options).run(task.batch(comm.rank))
        else:
            mesh = uni.Mesh((2,), ("dp",))
            model = build(task.model, 0)
            program = uni.to_static(model, example=even_vectors(0), mesh=mesh, **options)
            program(even_vectors(comm.rank))
    except UsageError as error:
        comm.barrier()
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.parametrize("kind", ["engine", "program"])
def test_batches_that_differ_are_refused(pools: Pools, kind: str) -> None:
    for words in pools("gloo", 2).run(batches_that_differ, kind):
        assert "another batch than rank 0" in words


def an_engine_on_local_batches(comm: Communicator) -> None:
    task = tasks.mlp
    options: dict[str, Any] = {"loss": task.loss, "optimizer": task.optimizer, "plan": "dp=2"}
    one, other = uni.Engine(task.model, **options), uni.Engine(task.model, batch="local", **options)
    for step in range(STEPS):
        batch = task.batch(step)
        local = local_of(batch, [7, 6], comm.rank)
        assert float(other.run(local)) == pytest.approx(float(one.run(batch)), rel=1e-5)
    with pytest.raises(UsageError, match=r"is for run\(batch\)"):
        other.evaluate([batch])


def test_an_engine_on_local_batches(pools: Pools) -> None:
    pools("gloo", 2).run(an_engine_on_local_batches)


# ---- where samples lie in the outputs --------------------------------------------------------------------------------


class Tasks(nn.Module):
    """For a data rank's two samples, everything that it returns is of shape (2, ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.weights = nn.Linear(3, 2), nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        return y, self.weights, y.t()


class Centred(Tasks):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x - x.mean(0))


def of_tasks(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    out, weights, turned = outputs
    return (weights.exp() * (out - y).pow(2).mean(0) - weights).sum() + turned.pow(2).sum(0).mean()


def tasks_agree(comm: Communicator, plan: str, has_example: bool) -> None:
    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(seed)
        samples = 1 if seed == STEPS - 1 else 4  # of the last batch, one rank has none
        x, y = (torch.randn(samples, size, generator=g, dtype=torch.float64) for size in (3, 2))
        return x, y

    task = Task(Tasks, of_tasks, smooth.optimizer, batch)
    losses, expected = on_one_device(task, plain)
    options: dict[str, Any] = {"loss": of_tasks, "optimizer": task.optimizer, "dtype": torch.float64}
    example = batch(0) if has_example else None
    trainer = parallelize(Tasks, plan, example=example, **options)
    got = [float(plain(trainer, task, *batch(step)).detach()) for step in range(STEPS)]
    assert got == pytest.approx(losses, rel=1e-9)
    compare(trainer.state_dict()["model"], expected)
    trainer = parallelize(Centred, plan, **options)
    with pytest.raises(UsageError, match="depend on the other samples"):
        trainer.model(batch(0)[0])


@pytest.mark.parametrize("has_example", [True, False])
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3"])
def test_outputs_are_gathered_where_samples_lie(pools: Pools, plan: str, has_example: bool) -> None:
    pools("gloo", 2).run(tasks_agree, plan, has_example)


# ---- exceptions ------------------------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a gradient that cannot be taken")


class FailsOnce(nn.Sequential):
    is_failing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        return self[1](Fails.apply(x) if self.is_failing else x)


def backward_fails(comm: Communicator, plan: str) -> None:
    drawn_by = torch.rand
    rules = {"0": "column", "1": "row"} if plan == "tp=2" else None
    trainer = parallelize(
        lambda: FailsOnce(nn.Linear(4, 4), nn.Linear(4, 4)),
        plan,
        loss=F.mse_loss,
        optimizer=torch.optim.SGD,
        rules=rules,
    )
    x = torch.ones(4, 4)
    with pytest.raises(ArithmeticError):
        trainer.model(x).sum().backward()
    assert active_state() is None
    assert torch.rand is drawn_by
    if plan == "dp=2":
        with pytest.raises(UsageError, match="the last backward ended with an error"):
            trainer.model(x)
        return
    trainer.model.is_failing = False  # type: ignore[assignment]
    trainer.optimizer.zero_grad()
    trainer.model(x).sum().backward()
    trainer.optimizer.step()
    assert active_state() is None


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_random_functions_are_restored_after_a_backward_that_fails(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(backward_fails, plan)


# ---- several models --------------------------------------------------------------------------------------------------


def plain_job(build_model: Callable[[], nn.Module], seed: int) -> Any:
    model = build(build_model, seed).double()
    random = RandomState(seed)
    random.name_modules(model)

    def before(*_: Any) -> None:
        random.__enter__()

    model.register_forward_pre_hook(before)
    model.register_forward_hook(lambda *_: random.__exit__())
    job = SimpleNamespace(model=model, optimizer=gan.adam(list(model.parameters())))

    def count(*_: Any) -> None:
        random.step += 1

    job.optimizer.register_step_post_hook(count)
    return job


def gan_agrees(comm: Communicator, plan: str, is_tp: bool) -> None:
    g, d = plain_job(gan.generator, 1), plain_job(gan.discriminator, 2)
    with Float64Mode(torch.float64):
        expected = list(gan.train(g, d, 6))
    options: dict[str, Any] = {"loss": F.mse_loss, "optimizer": gan.adam, "dtype": torch.float64}
    jobs = ((gan.generator, 1, {"0": "column", "2": "row"}), (gan.discriminator, 2, {"0": "column", "3": "row"}))
    trainers = [
        parallelize(each, plan, seed=seed, rules=rules if is_tp else None, **options) for each, seed, rules in jobs
    ]
    with Float64Mode(torch.float64):
        got = list(gan.train(*trainers, 6))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    for trainer, job in zip(trainers, (g, d), strict=True):
        compare(trainer.state_dict()["model"], dict(job.model.named_parameters()))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2"])
def test_a_gan(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(gan_agrees, plan, plan == "tp=2")


def a_step_through_another_model(comm: Communicator, plan: str) -> None:
    """The loss of one trainer's step calls the model of another, which gets gradients too."""
    options: dict[str, Any] = {"optimizer": gan.adam, "dtype": torch.float64}
    d = parallelize(NoDropout, plan, loss=F.mse_loss, seed=2, **options)
    loss = lambda fake, y: F.cross_entropy(d.model(fake), y)  # noqa: E731
    g = parallelize(lambda: nn.Linear(4, 12), plan, loss=loss, seed=1, **options)
    plain_d, plain_g = plain_job(NoDropout, 2), plain_job(lambda: nn.Linear(4, 12), 1)
    for step in range(STEPS):
        noise, y = torch.randn(7, 4, generator=torch.Generator().manual_seed(step)).double(), torch.arange(7) % 5
        for job in (plain_d, plain_g):
            job.optimizer.zero_grad()
        expected = F.cross_entropy(plain_d.model(plain_g.model(noise)), y)
        expected.backward()
        d.zero_grad()
        assert float(g.step((noise, y))) == pytest.approx(float(expected), rel=1e-9)
        gradients = {name: parameter.grad for name, parameter in d.optimized() if parameter.grad is not None}
        for name, parameter in plain_d.model.named_parameters():
            full = full_tensor_of(gradients[name], layout_of(dict(d.optimized())[name]), d.mesh)
            compare({name: full}, {name: parameter.grad})
        d.optimizer.step()
        plain_d.optimizer.step()
        plain_g.optimizer.step()
    compare(g.state_dict()["model"], dict(plain_g.model.named_parameters()))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2"])
def test_a_step_through_another_model(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(a_step_through_another_model, plan)
