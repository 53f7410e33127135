"""BatchNorm with the statistics of the global batch, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.mesh.mesh import Mesh
from unisono.parallel.checks.batch_statistics import require_full_batch_norms
from unisono.parallel.data.batchnorm import convert, has_batchnorm
from unisono.parallel.data.data_parallel import sum_gradients
from unisono.parallel.task import Task
from unisono.plan.plan import Plan
from unisono.verify.verify import verify_here

Pools = Callable[[str, int], RankPool]
SHAPES = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 2), nn.BatchNorm3d: (3, 2, 2, 3)}


def equal(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def normed(comm: Communicator, sizes: list[int], options: dict[str, Any]) -> None:
    """Three steps and an evaluation, where rank r has sizes[r] samples."""
    mesh = Mesh((comm.size,), ("dp",))
    for cls, shape in SHAPES.items():
        torch.manual_seed(2)
        reference = nn.Sequential(nn.Identity(), cls(3, **options)).double()
        if options.get("affine", True):
            nn.init.normal_(reference[1].weight)
        model = copy.deepcopy(reference)
        assert convert(model, mesh) is model
        assert model.state_dict().keys() == reference.state_dict().keys()
        assert isinstance(model[1], cls)
        for _ in range(3):
            full = (torch.randn(sum(sizes), *shape, dtype=torch.float64) + 50.0).requires_grad_()
            weights = torch.randn_like(full)
            part = full.detach().split(sizes)[comm.rank].clone().requires_grad_()
            expected = reference(full)
            (expected * weights).sum().backward()
            output = model(part)
            (output * weights.split(sizes)[comm.rank]).sum().backward()
            equal(output, expected.split(sizes)[comm.rank])
            equal(part.grad, full.grad.split(sizes)[comm.rank])
        sum_gradients(model, mesh)
        for name, parameter in model.named_parameters():
            equal(parameter.grad, reference.get_parameter(name).grad)
        for name, buffer in model.named_buffers():
            equal(buffer, reference.get_buffer(name))
        if options.get("track_running_stats", True):
            equal(model.eval()(part), reference.eval()(full).split(sizes)[comm.rank])


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False, "eps": 0.1}]
)
def test_as_one_process(pools: Pools, options: dict[str, Any]) -> None:
    pools("gloo", 2).run(normed, [3, 3], options)
    pools("gloo", 4).run(normed, [3, 1, 0, 2], options)


class Centred(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input - input.mean(0)


class Synced(nn.SyncBatchNorm):
    pass


class Activated(nn.BatchNorm1d):
    """As timm's are: a copy of torch's forward, and an activation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        x = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum or 0.0,
            self.eps,
        )  # fmt: skip
        return F.relu(x)


class Doubled(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def subclasses(comm: Communicator, plan: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), Activated(6), nn.Linear(6, 6), Doubled(6), nn.Linear(6, 3))

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return torch.randn(6, 4, generator=drawn), torch.randint(3, (6,), generator=drawn)

    task = Task(model, F.cross_entropy, partial(torch.optim.SGD, lr=0.1), batch)
    verdict = verify_here(comm, task, Plan.parse(plan), 2)
    assert verdict.equivalent, verdict


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=3", "tp=2"])
def test_subclasses_keep_their_forward(pools: Pools, plan: str) -> None:
    pools("gloo", 2).run(subclasses, plan)


def odd_cases(comm: Communicator) -> None:
    mesh = Mesh((comm.size,), ("dp",))
    tiny = convert(nn.BatchNorm1d(2), mesh)
    with pytest.raises(UsageError, match="more than one value a channel"):
        tiny(torch.ones(int(comm.rank == 0), 2))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        tiny(torch.ones(2, 2, 2, 2))
    assert convert(tiny, mesh) is tiny  # once more changes nothing

    with pytest.raises(UsageError, match=r"0 is a Centred, whose forward does not call F.batch_norm"):
        convert(nn.Sequential(Centred(2)), mesh)(torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"a subclass of SyncBatchNorm; use nn.BatchNorm"):
        convert(nn.Sequential(Synced(2)), mesh)
    half = convert(nn.BatchNorm1d(2).half(), mesh)
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(comm.rank)).half()
    assert half(x).dtype == torch.float16
    synced = convert(nn.SyncBatchNorm(2), mesh)
    everyone = torch.stack(comm.all_gather(x.float())).flatten(0, 1)
    expected = nn.BatchNorm1d(2)(everyone).split(64)[comm.rank]
    torch.testing.assert_close(synced(x.float()), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half(x).float(), expected, rtol=1e-2, atol=1e-2)
    synced.eval()(x.float())


def test_odd_cases(pools: Pools) -> None:
    pools("gloo", 2).run(odd_cases)


def test_has_batchnorm() -> None:
    assert has_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert not has_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval())
    assert has_batchnorm(nn.BatchNorm1d(2, track_running_stats=False).eval())
    assert not has_batchnorm(nn.LayerNorm(2))


class Ghost(nn.Module):
    """Normalises a few samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.norm(some) for some in self.first(x).split(4)]))


def test_batchnorm_on_a_part_of_the_batch_is_refused() -> None:
    example = (torch.randn(8, 6), torch.zeros(8))
    with pytest.raises(UsageError, match=r"norm \(BatchNorm\) is run on 4 rows of a batch of 8 samples at a time"):
        require_full_batch_norms(Ghost(), Plan(dp=2), example)
    require_full_batch_norms(Ghost(), Plan(dp=2), (torch.randn(4, 6), torch.zeros(4)))
    frames = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(6))
    require_full_batch_norms(frames, Plan(dp=2), (torch.randn(8, 3, 6), torch.zeros(8)))
