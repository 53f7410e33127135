"""Replicas: gradients of the global batch, by the reference, in buckets and by torch's own wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.parallel import replicas
from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.data.data_parallel import DataParallel, sum_gradients
from unisono.parallel.layout import Layout, set_layout
from unisono.parallel.share import share, shares

Pools = Callable[[str, int], RankPool]


# ---- cutting a batch -------------------------------------------------------------------------------------------------


def test_shares_cover_the_batch_in_order() -> None:
    full = {"x": torch.arange(14).view(7, 2), "more": [torch.arange(7), "a word", None, torch.tensor(3.0)]}
    for count in (1, 2, 3, 7, 9):
        parts = shares(full, count)
        assert torch.equal(torch.cat([part.batch["x"] for part in parts]), full["x"])
        assert [row for part in parts for row in part.positions] == list(range(7))
        assert all(part.of == 7 and part.batch["more"][1:3] == ["a word", None] for part in parts)
        sizes = [len(part.positions) for part in parts]
        assert sizes == [len(shard) for shard in torch.arange(7).tensor_split(count)]
        assert all(len(part.batch["more"][0]) == size for part, size in zip(parts, sizes, strict=True))
        assert all(part.batch["more"][3] == 3.0 for part in parts)
    assert torch.equal(share(torch.arange(5), 1, 2).batch, torch.tensor([3, 4]))
    first, second = share((torch.zeros(5, 2), torch.zeros(5)), 0, 2).batch
    assert first.shape == (3, 2)
    assert second.shape == (3,)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch\[0\] has 3 along dim 0, batch\[1\] has 4 along dim 0"):
        share((torch.zeros(3), torch.zeros(4)), 0, 2)
    with pytest.raises(UsageError, match="without tensors"):
        share({"words": "text"}, 0, 2)
    with pytest.raises(UsageError, match="part 2 of 2"):
        share(torch.zeros(3), 2, 2)


# ---- summing gradients -----------------------------------------------------------------------------------------------


def trained(comm: Communicator, name: str, rows: int, microbatches: int, bucket_bytes: int, every: bool) -> None:
    """`every`: gradients travel in every microbatch, not only in the last."""
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    data = DataParallel(model, mesh, bucket_bytes)
    optimizer = replicas.optimizers()[name](model.parameters())
    expected = replicas.plain(replicas.optimizers()[name], rows)
    for step in range(replicas.STEPS):
        optimizer.zero_grad()
        hold = contextlib.nullcontext if every else data.hold
        value = replicas.run_step(model, mesh, step, rows, microbatches, hold)
        data.finish()
        replicas.same(value, expected["losses"][step], f"loss {step}")
        if step == replicas.STEPS - 1:
            gradients = replicas.gradients_of(model)
        optimizer.step()
    for key, parameter in model.named_parameters():
        replicas.same(gradients[key], expected["gradients"][key], f"gradient {key}")
        replicas.same(parameter.detach(), expected["parameters"][key].detach(), f"parameter {key}")


def test_buckets(pools: Pools) -> None:
    pools("gloo", 1).run(trained, "momentum", 5, 2, 400, False)
    pools("gloo", 2).run(trained, "adamw", 5, 1, 10**9, False)
    pools("gloo", 2).run(trained, "momentum", 7, 3, 400, False)
    pools("gloo", 4).run(trained, "momentum", 7, 2, 700, True)
    pools("gloo", 4).run(trained, "adamw", 3, 1, 1, False)  # one rank has nothing; one parameter a bucket


def held_to_the_end(comm: Communicator) -> None:
    """A runtime that holds every backward, as a pipeline does, still gets sums at finish."""
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    data = DataParallel(model, mesh, 400)
    expected = replicas.plain(replicas.optimizers()["sgd"], 5, steps=1)
    with data.hold():
        replicas.run_step(model, mesh, 0, 5, 2, contextlib.nullcontext)
    data.finish()
    for key, gradient in replicas.gradients_of(model).items():
        replicas.same(gradient, expected["gradients"][key], key)


def set_by_hand(comm: Communicator) -> None:
    """Gradients that no hook has seen, as those of a backward that is split in two."""
    mesh = Mesh((comm.size,), ("dp",))
    model = nn.Linear(2, 2)
    data = DataParallel(model, mesh)
    model.weight.grad = torch.ones_like(model.weight)
    data.finish()
    assert (model.weight.grad == comm.size).all()
    assert model.bias.grad is None


def by_reference(comm: Communicator) -> None:
    mesh = Mesh((comm.size,), ("dp",))
    model = replicas.net()
    expected = replicas.plain(replicas.optimizers()["sgd"], 5, steps=1)["gradients"]
    replicas.run_step(model, mesh, 0, 5, 2, contextlib.nullcontext)
    sum_gradients(model, mesh)
    for key, gradient in replicas.gradients_of(model).items():
        missing = torch.zeros_like(gradient)
        replicas.same(gradient, missing if expected[key] is None else expected[key], key)


def test_other_ways_to_the_same_sums(pools: Pools) -> None:
    for way in (held_to_the_end, set_by_hand, by_reference):
        pools("gloo", 2).run(way)


def by_layout(comm: Communicator) -> None:
    """Each parameter is summed over the axes of its own layout."""
    mesh = Mesh((2, 2), ("dp", "tp"))
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("replica", "partial", "alone")})
    set_layout(model["partial"], Layout(summed=("dp", "ep", "cp", "tp")))
    set_layout(model["alone"], Layout(summed=()))
    data = DataParallel(model, mesh)
    sum((parameter * (10.0**comm.rank)).sum() for parameter in model.values()).backward()
    data.finish()
    assert model["partial"].grad.tolist() == [1111.0] * 2
    assert model["alone"].grad.tolist() == [10.0**comm.rank] * 2
    assert model["replica"].grad.tolist() == [[101.0] * 2, [1010.0] * 2][mesh.index("tp")]


def test_layouts_say_what_is_summed(pools: Pools) -> None:
    pools("gloo", 4).run(by_layout)


def overlapped(comm: Communicator) -> tuple[int, int, int, float]:
    """Buckets that had left before the backward reached the first layer, calls, elements in them, and elements sent."""
    mesh = Mesh((comm.size,), ("dp",))
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    data = DataParallel(model, mesh, bucket_bytes=8 * 8 * 4)
    left = []
    model[0].register_full_backward_pre_hook(lambda *_: left.append(seen.calls["all_reduce"]))
    with traffic.counted() as seen:
        model(torch.ones(1, 8)).sum().backward()
        data.finish()
    flags = 4  # a number for each parameter says how many ranks have a gradient
    return left[0], seen.calls["all_reduce"], seen.payload["all_reduce"] // 4 - flags, seen.sent / 4


def test_buckets_leave_during_the_backward(pools: Pools) -> None:
    ranks, parameters, flags = 2, 4 * 64, 4
    for early, calls, elements, sent in pools("gloo", ranks).run(overlapped):
        assert early == 3
        assert calls == 4
        assert elements == parameters
        # The paper's 2P of plain data parallelism: each element is sent on to be summed, and once more as a sum.
        assert sent == 2 * (parameters + flags) * (ranks - 1) / ranks


def twice(comm: Communicator) -> None:
    model = nn.Linear(2, 2)
    data = DataParallel(model, Mesh((comm.size,), ("dp",)), bucket_bytes=1)
    sparse = nn.Embedding(3, 2, sparse=True)
    other = DataParallel(sparse, Mesh((comm.size,), ("dp",)))
    with pytest.raises(UsageError, match=r"weight has a sparse gradient; use nn\.Embedding\(sparse=False\)"):
        sparse(torch.tensor([1])).sum().backward()
    data.remove()
    other.remove()
    model(torch.ones(1, 2)).sum().backward()
    with traffic.counted() as seen:
        model(torch.ones(1, 2)).sum().backward()
    assert not seen.calls


def test_errors_and_removal(pools: Pools) -> None:
    pools("gloo", 2).run(twice)
