"""ZeRO's third stage: a rank keeps its shard of every parameter; units gather them where they are used (units.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.mesh.bucket import buckets_of
from unisono.mesh.mesh import Mesh
from unisono.parallel.layout import set_layout, summed_parameters
from unisono.parallel.zero.shards import ShardBucket, ZeroShard
from unisono.parallel.zero.units import Units
from unisono.parallel.zero.zero import ShardedOptimizer
from unisono.plan.plan import REPLICAS


class FullyShardedOptimizer(ShardedOptimizer):
    """As ShardedOptimizer, with parameters sharded, too. A bucket is what a unit gathers at once."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        units: list[nn.Module] | None = None,
        users: Mapping[str, tuple[int, ...]] | None = None,
        **options: Any,
    ) -> None:
        """`units`: of a pipeline, the blocks here; else the model's own. Only one parameter at a time is filled."""
        comm = mesh.comm(*(axis for axis in REPLICAS if axis in mesh.names))
        self._make_units = lambda: Units(model, units, users, comm)
        super().__init__(model, mesh, optimizer, 3, users=users, **options)
        self._units.start(self._send, self._end_of_units)

    def _make_buckets(
        self, named: list[tuple[str, nn.Parameter]], users: Mapping[str, tuple[int, ...]] | None, bucket_bytes: int
    ) -> list[ShardBucket]:
        self._units = self._make_units()
        buckets = [
            (unit, each)
            for unit in self._units
            for each in buckets_of(summed_parameters(unit.named, self.mesh), self.mesh, 2**62, self._bucket)
        ]
        return [bucket for unit, bucket in buckets if unit.adopt(bucket)]

    def _make_optimized(self, shard: ZeroShard) -> None:
        local = shard.own(shard.parameter.data)
        if self._needs_copy(shard.name, shard.parameter):
            shard.optimized = self._copy(shard.parameter, local)
        set_layout(shard.optimized, shard.layout)
        self._round(shard)
        self._units.keep_shard(shard, shard.own(shard.parameter.data).clone())

    @property
    def units(self) -> Units:
        return self._units

    @contextlib.contextmanager
    def at_work(self, stage: int, kind: str) -> Iterator[None]:
        if kind == "W":
            yield
        else:
            with self._units.at_work(stage, is_backward=kind != "F"):
                yield

    def _end_of_units(self) -> None:
        if self.is_own:
            self.finish()

    def _complete(self) -> None:
        """Every backward has sent all it made."""

    def finish(self) -> None:
        super().finish()
        self._units.settle()

    @torch.no_grad()
    def publish(self) -> None:
        self._masters.publish()
        self._units.refresh(self.shards.values())
        self._versions.remember()


def zero_optimizer(
    model: nn.Module,
    mesh: Mesh,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    stage: int,
    *,
    units: list[nn.Module] | None = None,
    **options: Any,
) -> ShardedOptimizer:
    """The optimizer of a ZeRO stage."""
    if stage not in (1, 2, 3):
        raise UsageError(f"zero: stage {stage!r}; expected 1, 2 or 3")
    if stage == 3:
        return FullyShardedOptimizer(model, mesh, optimizer, units=units, **options)
    return ShardedOptimizer(model, mesh, optimizer, stage, **options)
