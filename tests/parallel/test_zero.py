"""ZeRO: the same results with state, gradients and parameters sharded over the replicas; and what each stage costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel import replicas
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.data.clip import clip_by_norm
from unisono.parallel.full_state import full_optimizer_state, load_full_state
from unisono.parallel.layout import Layout, Split, full_tensor_of, layout_of, local_of, set_layout
from unisono.parallel.precision import accumulate_in_float32
from unisono.parallel.share import shares
from unisono.parallel.zero.fully_sharded import zero_optimizer
from unisono.parallel.zero.zero import ShardedOptimizer

Pools = Callable[[str, int], RankPool]


def full_gradients(zero: ShardedOptimizer) -> dict[str, torch.Tensor | None]:
    optimized = dict(zero.optimized())
    missing = torch.tensor([float(tensor.grad is None) for tensor in optimized.values()])
    zero.mesh.comm().all_reduce(missing, "min")  # a rank that owns nothing of a parameter may have none
    grads: dict[str, torch.Tensor | None] = {}
    for (name, tensor), is_missing in zip(optimized.items(), missing.tolist(), strict=True):
        local = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        grads[name] = None if is_missing else full_tensor_of(local, layout_of(tensor), zero.mesh)
    return grads


def trained(comm: Communicator, name: str, stage: int, rows: int, microbatches: int = 1) -> None:
    trained_over(Mesh((comm.size,), ("dp",)), name, stage, rows, microbatches)


def trained_over(mesh: Mesh, name: str, stage: int, rows: int, microbatches: int = 1) -> None:
    trained_with(mesh, replicas.optimizers()[name], stage, rows, microbatches)


def trained_with(mesh: Mesh, make: Any, stage: int, rows: int, microbatches: int = 1) -> None:
    model = replicas.net()
    zero = zero_optimizer(model, mesh, make, stage, bucket_bytes=400)
    expected = replicas.plain(make, rows)
    losses = []
    for step in range(replicas.STEPS):
        for _, tensor in zero.optimized():  # also what the optimizer was not given
            tensor.grad = None
        losses.append(replicas.run_step(model, mesh, step, rows, microbatches, zero.hold))
        zero.finish()
        if step == replicas.STEPS - 1:
            gradients = full_gradients(zero)
        zero.optimizer.step()
    for step, (mine, theirs) in enumerate(zip(losses, expected["losses"], strict=True)):
        replicas.same(mine, theirs, f"loss {step}")
    state = full_optimizer_state(zero.optimizer, zero.optimized(), mesh)["state"]
    for key, parameter in model.named_parameters():
        replicas.same(gradients[key], expected["gradients"][key], f"gradient {key}")
        full = full_tensor_of(parameter, layout_of(parameter), mesh)
        replicas.same(full, expected["parameters"][key].detach(), f"parameter {key}")
        assert set(state[key]) == set(expected["state"][key]), key
        for entry, value in expected["state"][key].items():
            if isinstance(value, torch.Tensor):
                replicas.same(state[key][entry], value, f"state {key}.{entry}")


@pytest.mark.parametrize("name", list(replicas.optimizers()))
def test_every_optimizer(pools: Pools, name: str) -> None:
    for stage in (1, 3):
        pools("gloo", 2).run(trained, name, stage, 5)


def test_over_mpi(pools: Pools) -> None:
    for stage in (1, 3):
        pools("mpi", 2).run(trained, "adamw", stage, 5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sizes_and_microbatches(pools: Pools, stage: int) -> None:
    pools("gloo", 1).run(trained, "adamw", stage, 5, 2)
    pools("gloo", 2).run(trained, "adam", stage, 5)
    pools("gloo", 4).run(trained, "momentum", stage, 11, 2)
    pools("gloo", 4).run(trained, "adamw", stage, 3, 2)  # one rank has nothing


def trained_on_three(comm: Communicator, stage: int) -> None:
    """Three of four ranks, where nothing divides."""
    if comm.rank < 3:
        trained_over(Mesh((3,), ("dp",), [0, 1, 2]), "adamw", stage, 7)


def trained_on_mesh(comm: Communicator, stage: int) -> None:
    """Replicas along two axes, and a third along which they are not replicas of each other's data."""
    mesh = Mesh((2, 1, 2), ("dp", "ep", "cp"))
    model, reference = replicas.net(), replicas.net()
    zero = zero_optimizer(model, mesh, replicas.optimizers()["adam"], stage)
    optimizer = replicas.optimizers()["adam"](reference.parameters())
    inputs, targets = replicas.batch(0, 8)
    for _ in range(2):
        zero.optimizer.zero_grad()
        optimizer.zero_grad()
        mine = shares((inputs, targets), 4)[comm.rank].batch
        replicas.loss(model(mine[0]), mine[1]).backward()
        sum(replicas.loss(reference(part[0]), part[1]) for part, *_ in shares((inputs, targets), 4)).backward()
        zero.finish()
        zero.optimizer.step()
        optimizer.step()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        replicas.same(full_tensor_of(parameter, layout_of(parameter), mesh), expected.detach(), name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_meshes(pools: Pools, stage: int) -> None:
    pools("gloo", 4).run(trained_on_three, stage)
    pools("gloo", 4).run(trained_on_mesh, stage)


def state_moves(comm: Communicator, before: int, after: int) -> None:
    """Two steps, the state whole, another ShardedOptimizer that takes it over: as three steps in one go."""
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    zero = zero_optimizer(model, mesh, replicas.optimizers()["adamw"], before)
    for step in range(replicas.STEPS):
        if step == 2:
            state = full_optimizer_state(zero.optimizer, zero.optimized(), mesh)
            parameters = {n: full_tensor_of(p, layout_of(p), mesh) for n, p in model.named_parameters()}
            model = replicas.net(seed=9)
            model.load_state_dict(parameters, strict=False)
            zero = zero_optimizer(model, mesh, lambda p: torch.optim.AdamW(p, lr=5.0), after)
            load_full_state(zero.optimizer, zero.optimized(), mesh, state)
        zero.optimizer.zero_grad()
        replicas.run_step(model, mesh, step, 5, 1, zero.hold)
        zero.finish()
        zero.optimizer.step()
    expected = replicas.plain(replicas.optimizers()["adamw"], 5)["parameters"]
    for name, parameter in model.named_parameters():
        replicas.same(full_tensor_of(parameter, layout_of(parameter), mesh), expected[name].detach(), name)


def test_state_moves_between_stages(pools: Pools) -> None:
    pools("gloo", 2).run(state_moves, 1, 3)
    pools("gloo", 2).run(state_moves, 3, 2)


def grouped(comm: Communicator, stage: int) -> None:
    """Parameter groups, a schedule and clipping, as users have them."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.ndim > 1]
        rest = [p for p in parameters if p.ndim <= 1]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": rest, "lr": 0.1}], lr=0.02)

    mesh = Mesh((comm.size,), ("dp",))
    model, reference = replicas.net(), replicas.net()
    zero, plain = zero_optimizer(model, mesh, optimizer, stage), optimizer(list(reference.parameters()))
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (zero.optimizer, plain)]
    for step in range(3):
        for o in (zero.optimizer, plain):
            o.zero_grad()
        replicas.run_step(model, mesh, step, 5, 1, zero.hold)
        inputs, targets = replicas.batch(step, 5)
        replicas.loss(reference(inputs), targets).backward()
        zero.finish()
        norm = clip_by_norm([tensor for _, tensor in zero.optimized()], 0.1, mesh)
        replicas.same(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm")
        for o, schedule in zip((zero.optimizer, plain), schedules, strict=True):
            o.step()
            schedule.step()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        replicas.same(full_tensor_of(parameter, layout_of(parameter), mesh), expected.detach(), name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_schedules_and_clipping(pools: Pools, stage: int) -> None:
    pools("gloo", 2).run(grouped, stage)


def with_tensor_parallel_shards(comm: Communicator, stage: int) -> None:
    """A parameter that tp has sharded is sharded again, and both splits are in its layout."""
    mesh = Mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(4)
    wholes = {"columns": torch.randn(7, 3), "rows": torch.randn(4, 5), "partial": torch.randn(3)}
    layouts = {
        "columns": Layout((Split.even(("tp",), 0, 7, 2),)),
        "rows": Layout((Split.even(("tp",), 1, 5, 2),)),
        "partial": Layout(summed=("dp", "tp")),
    }
    model = Shards({name: local_of(full, layouts[name], mesh) for name, full in wholes.items()})
    for name, parameter in model.named_parameters():
        set_layout(parameter, layouts[name])
    zero = zero_optimizer(model, mesh, lambda p: torch.optim.Adam(p, lr=0.1), stage)
    references = {name: nn.Parameter(full.clone()) for name, full in wholes.items()}
    optimizer = torch.optim.Adam(references.values(), lr=0.1)
    for _ in range(2):
        zero.optimizer.zero_grad()
        (model() * (1 + mesh.index("dp"))).backward()
        zero.finish()
        # Two replicas with weights 1 and 2; `partial` is also summed over both tp ranks.
        times = {"columns": 3, "rows": 3, "partial": 6}
        for name, reference in references.items():
            reference.grad = 3 * times[name] * reference.detach() ** 2
        norm = clip_by_norm([tensor for _, tensor in zero.optimized()], 1.0, mesh)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(references.values(), 1.0).double())
        zero.optimizer.step()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full_tensor_of(parameter, layout_of(parameter), mesh), references[name].detach())
    state = full_optimizer_state(zero.optimizer, zero.optimized(), mesh)["state"]
    for name, reference in references.items():
        torch.testing.assert_close(state[name]["exp_avg"], optimizer.state[reference]["exp_avg"])


class Shards(nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self) -> torch.Tensor:
        return sum((parameter**3).sum() for parameter in self.parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_of_shards(pools: Pools, stage: int) -> None:
    pools("gloo", 4).run(with_tensor_parallel_shards, stage)


# ---- what the stages cost --------------------------------------------------------------------------------------------

WIDTH, RANKS = 16, 4
FACTS = {  # bytes a rank, of P parameters on N ranks, with mixed precision Adam; shared with the ZeRO paper
    1: lambda p, n: 4 * p + 12 * p // n,
    2: lambda p, n: 2 * p + 14 * p // n,
    3: lambda p, n: 16 * p // n,
}
FACTS_FLOAT32 = {1: lambda p, n: 8 * p + 8 * p // n, 2: lambda p, n: 4 * p + 12 * p // n, 3: lambda p, n: 16 * p // n}
ELEMENTS = {1: 2, 2: 2, 3: 3}  # communicated a step, in P


def even_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).to(dtype)


def costs(comm: Communicator, stage: int, dtype: torch.dtype) -> tuple[int, int, dict[str, int]]:
    """Parameters, bytes held when microbatches have accumulated, and elements that travel in a step."""
    mesh = Mesh((comm.size,), ("dp",))
    model = even_model(dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    zero = zero_optimizer(model, mesh, lambda p: torch.optim.Adam(p, foreach=False), stage)
    x = torch.randn(2, WIDTH, dtype=dtype)
    for _ in range(2):
        zero.optimizer.zero_grad()
        with traffic.counted() as seen:
            model(x).sum().backward()
            zero.finish()
            zero.optimizer.step()
    zero.optimizer.zero_grad()
    with zero.hold():
        model(x).sum().backward()
    for bucket in zero.buckets:
        zero._wait_for(bucket)
    bytes_held = held_bytes(model, zero)
    zero.finish()
    travelled = {
        "reduce_scatter": seen.payload["reduce_scatter"] // dtype.itemsize,
        "all_gather": seen.payload["all_gather"] * comm.size // dtype.itemsize,
    }
    return count, bytes_held, travelled


def held_bytes(model: nn.Module, zero: ShardedOptimizer) -> int:
    """All storage behind parameters, gradients, sums under way and optimizer state, each once."""
    tensors: list[torch.Tensor | None] = []
    for parameter in (*model.parameters(), *[tensor for _, tensor in zero.optimized()]):
        tensors += [parameter, parameter.grad]
        tensors += [v for v in zero.optimizer.state.get(parameter, {}).values() if torch.is_tensor(v) and v.ndim]
    tensors += [bucket.total for bucket in zero.buckets]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_and_traffic_are_those_of_the_paper(pools: Pools, stage: int) -> None:
    for dtype, facts in ((torch.bfloat16, FACTS), (torch.float32, FACTS_FLOAT32)):
        for count, held, travelled in pools("gloo", RANKS).run(costs, stage, dtype):
            assert held == facts[stage](count, RANKS)
            assert travelled["reduce_scatter"] == count
            assert sum(travelled.values()) == ELEMENTS[stage] * count
    # The paper's own table: 7.5e9 parameters on 64 ranks.
    assert round(FACTS[stage](7_500_000_000, 64) / 1e9, 1) == {1: 31.4, 2: 16.6, 3: 1.9}[stage]


def mixed(comm: Communicator, stage: int, offload: bool) -> None:
    """bfloat16 parameters follow a float32 copy: as one process with the same copy."""
    mesh = Mesh((comm.size,), ("dp",))
    model, reference = even_model(torch.bfloat16), even_model(torch.bfloat16)
    accumulate_in_float32(model.parameters())
    zero = zero_optimizer(model, mesh, lambda p: torch.optim.Adam(p, lr=0.01), stage, offload=offload)
    copies = [nn.Parameter(parameter.detach().float()) for parameter in reference.parameters()]
    optimizer = torch.optim.Adam(copies, lr=0.01)
    for step in range(3):
        x = torch.randn(comm.size, 2, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        zero.optimizer.zero_grad()
        model(x[comm.rank]).float().square().sum().backward()
        zero.finish()
        zero.optimizer.step()
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        for part in x:
            reference.zero_grad()
            reference(part).float().square().sum().backward()
            for copy, parameter in zip(copies, reference.parameters(), strict=True):
                copy.grad += parameter.grad.float()
        optimizer.step()
        for copy, parameter in zip(copies, reference.parameters(), strict=True):
            parameter.data.copy_(copy.detach())
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        full = full_tensor_of(parameter, layout_of(parameter), mesh)
        torch.testing.assert_close(full, expected.detach(), rtol=2e-2, atol=1e-3, msg=name)
    for (name, tensor), copy in zip(sorted(zero.optimized()), sorted_by_name(reference, copies), strict=True):
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(
            full_tensor_of(tensor, layout_of(tensor), mesh), copy.detach(), rtol=1e-3, atol=1e-5, msg=name
        )


def sorted_by_name(model: nn.Module, copies: list[nn.Parameter]) -> list[nn.Parameter]:
    return [copy for _, copy in sorted(zip([n for n, _ in model.named_parameters()], copies, strict=True))]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_parameters_follow_a_float32_copy(pools: Pools, stage: int) -> None:
    pools("gloo", 2).run(mixed, stage, stage == 2)


# ---- parameters that are full only while they work ------------------------------------------------------------------


class Straight(replicas.Net):
    """Without a branch that depends on values, so that parameters are gathered ahead from the second step on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.row
        for block in self.blocks:
            y = block(y)
        return self.head(y + self.rare.sum(0)) * self.temperature


def freed(comm: Communicator) -> tuple[list[int], list[int], list[int]]:
    """In each block's forward and backward of a second step: how many blocks are full, and how many gathers and
    reductions have begun."""
    mesh = Mesh((comm.size,), ("dp",))
    model = Straight(blocks=5).double()
    zero = zero_optimizer(model, mesh, lambda p: torch.optim.SGD(p, lr=0.1), 3)
    full: list[int] = []
    gathers: list[int] = []
    sums: list[int] = []

    def count(*_: object) -> None:
        full.append(sum(block.up.weight.shape[0] == 9 for block in model.blocks))
        gathers.append(seen.calls["all_gather"])
        sums.append(seen.calls["reduce_scatter"])

    for block in model.blocks:
        block.norm.register_forward_hook(count)
        block.norm.register_full_backward_hook(count)
    inputs, targets = replicas.batch(0, 4)
    for _ in range(2):
        for each in (full, gathers, sums):
            each.clear()
        zero.optimizer.zero_grad()
        with traffic.counted() as seen:
            replicas.loss(model(inputs), targets).backward()
            zero.finish()
        zero.optimizer.step()
    count()
    return full, gathers, sums


def test_only_the_working_unit_is_full_and_messages_travel_meanwhile(pools: Pools) -> None:
    for full, gathers, sums in pools("gloo", 2).run(freed):
        assert full == [1] * 10 + [0]
        # What is outside the blocks, the block at work and the next one; in the backward the same once more.
        assert gathers[:10] == [3, 4, 5, 6, 6, 9, 10, 11, 12, 12]
        assert sums[5:] == [0, 1, 2, 3, 4, 6]  # those of the block before are under way


def recomputed(comm: Communicator, use_reentrant: bool) -> None:
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    plain = replicas.plain(replicas.optimizers()["sgd"], 4, steps=1)
    zero = zero_optimizer(model, mesh, replicas.optimizers()["sgd"], 3)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)
    replicas.run_step(model, mesh, 0, 4, 1, zero.hold)
    zero.finish()
    for name, gradient in full_gradients(zero).items():
        replicas.same(gradient, plain["gradients"][name], name)


class Checkpointed(replicas.Net):
    """Recomputes full blocks, from outside them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.row
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return self.head(y) * self.temperature


def recomputed_outside(comm: Communicator) -> None:
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    model.__class__ = Checkpointed
    zero = zero_optimizer(model, mesh, replicas.optimizers()["sgd"], 3)
    replicas.run_step(model, mesh, 1, 4, 1, zero.hold)
    zero.finish()
    reference = replicas.net()
    inputs, targets = replicas.batch(1, 4)
    replicas.loss(reference(inputs), targets).backward()
    for name, gradient in full_gradients(zero).items():
        replicas.same(gradient, replicas.gradients_of(reference)[name], name)


def test_recomputation(pools: Pools) -> None:
    pools("gloo", 2).run(recomputed, False)
    pools("gloo", 2).run(recomputed, True)
    pools("gloo", 2).run(recomputed_outside)


def test_errors() -> None:
    mesh = Mesh((1,), ("dp",))
    model = replicas.net()
    with pytest.raises(UsageError, match="expected 1, 2 or 3"):
        zero_optimizer(model, mesh, replicas.optimizers()["sgd"], 4)
    with pytest.raises(UsageError, match="1 parameters that are not the model's"):
        zero_optimizer(model, mesh, lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1), 1)
