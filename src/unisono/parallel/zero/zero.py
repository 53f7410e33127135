"""ZeRO: replicas stop keeping the same things many times.

Data-parallel ranks all hold the same parameters, gradients and optimizer state. No rank needs a full copy of any of
them all the time. With P parameters on N ranks, and Adam in mixed precision (2 bytes a parameter, 2 a gradient, 12 for
the float32 copy and two moments), a rank holds

    stage 0   everything                                         16 P          2 P elements communicated a step
    stage 1   1/N of the optimizer state                    4 P + 12 P / N     reduce-scatter P + all-gather P
    stage 2   ... and of the gradients                      2 P + 14 P / N     reduce-scatter P + all-gather P
    stage 3   ... and of the parameters                         16 P / N       all-gather 2 P + reduce-scatter P

The step: gradients are summed by reduce-scatter, so that each rank gets the sum for its own shard (shards.py); the
optimizer, which sees that shard only, updates it; the ranks gather each other's shards. Stage 1 keeps full gradients
while microbatches accumulate; stage 2 sends them off bucket by bucket in every backward; stage 3 also gathers
parameters only where they are used (units.py). In a pipeline a backward is that of one stage on one microbatch.

With `shard=M` a group of M data ranks holds one copy of everything, and there are N / M such groups (HSDP): the
reduce-scatter and the all-gathers stay within a group, and each rank's sum is then summed over the groups.

An optimizer that treats every element alone (SGD, Adam, ...) does to a shard exactly what it would do to full
parameters. Others (Muon, Adafactor, ...) get full parameters, distributed to the ranks (mesh/optimizers.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UsageError
from unisono.mesh.bucket import BUCKET_BYTES, Spare, buckets_of, gradient_dtype
from unisono.mesh.mesh import Mesh
from unisono.mesh.named_groups import NamedParameters
from unisono.parallel.checks.optimizer_scope import OptimizerScope, require_full_parameters
from unisono.parallel.data.reducer import Reducer
from unisono.parallel.layout import set_layout, summed_axes, summed_parameters
from unisono.parallel.master_weights import MasterWeights, Versions, copy_of, hand_over, take_changes
from unisono.parallel.precision import HALF_DTYPES, round_parameter
from unisono.parallel.zero.shards import ShardBucket, ZeroShard, assigned_evenly, assigned_in_full
from unisono.parallel.zero.units import Units
from unisono.plan.plan import COPIES

_MESSAGES = 2  # of gradients that may be on their way while the next is filled, where gradients are sharded


class ShardedOptimizer(Reducer[ShardBucket]):
    """A model's optimizer, with its state (stage 1) and gradients (2) sharded over the replicas.

    zero = ShardedOptimizer(model, mesh, lambda parameters: torch.optim.AdamW(parameters, lr=3e-4), stage=2)
    loss(...).backward()
    zero.finish()                    # each rank has the gradients of its shard: zero.shards[name].optimized.grad
    zero.optimizer.step()            # an ordinary torch optimizer, for schedulers too; parameters are up to date after
    zero.optimizer.zero_grad()

    Half parameters get a float32 copy of this rank's shard, which is what the optimizer updates: its master weights.
    Without `masters` the optimizer updates half parameters themselves. Float32 parameters that the forward only reads
    in a half dtype can be `rounded` to it: ranks then keep float32 of their own shards only, and gather halves. With
    `offload` the optimizer's shard and state are in host memory, and are updated there.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        stage: int,
        *,
        offload: bool = False,
        rounded: Mapping[str, torch.dtype] | None = None,
        reduce_dtype: torch.dtype | None = None,
        masters: bool = True,
        emulated: bool = False,
        users: Mapping[str, tuple[int, ...]] | None = None,
        tied: Collection[str] = (),
        fill: Callable[[str, nn.Parameter], None] = lambda name, parameter: None,
        materialized: contextlib.AbstractContextManager[Any] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """rounded: the dtypes of parameters, by name, that become half. reduce_dtype: in which float32 gradients travel
        and are summed. emulated: rounded parameters keep their dtype, with rounded values.

        Of a pipeline: `users` are the stages here that use a parameter, and `tied` the parameters that other ranks
        of the pipeline hold too. `fill` gives a parameter its values before it is sharded; in `materialized` parameters
        without values have some to look at."""
        self.stage = stage
        self.mesh = mesh
        with materialized or contextlib.nullcontext():
            self.optimizer = optimizer(NamedParameters.of(model))
        _require_parameters_of(model, self.optimizer)
        scope = require_full_parameters(self.optimizer, optimizer, model, is_sharded=True)
        self._is_elementwise = scope is OptimizerScope.ELEMENT
        self._loads: dict[int, list[int]] = {}
        self._spare = Spare()  # one for all buckets: what ZeRO saves is not to be spent on messages
        self.shards: dict[str, ZeroShard] = {}
        self._offload = offload
        self._has_masters, self._is_emulated = masters, emulated
        self._rounded, self._reduce_dtype = rounded or {}, reduce_dtype
        self._tied = frozenset(tied)
        self._of_stage: dict[int, list[ShardBucket]] = {}  # of a pipeline, in stage 2: sent in each of its backwards
        self._is_pipeline = users is not None
        self._running: list[ShardBucket] = []
        self._kept: set[int] = set()  # what the optimizer sees, that had gradients before the last backward
        named = list(model.named_parameters())
        buckets = self._make_buckets(named, users, bucket_bytes)
        self.alone = {name: p for name, p in named if p.requires_grad and not summed_axes(p, mesh)}
        copied = {name: p for name, p in self.alone.items() if self._needs_copy(name, p)}
        emulates = next(iter(self._rounded.values()), None) if emulated else None
        self._masters = MasterWeights(copied, lambda each: self._copy(each, each.data), emulates)
        for bucket in buckets:
            for shard in bucket.shards:
                fill(shard.name, shard.parameter)
                self._make_optimized(shard)
        self._hand_over()
        super().__init__(buckets, watch=stage == 1 or (stage == 2 and not self._is_pipeline))
        self._copied = {name: each for name, each in self.shards.items() if self._needs_copy(name, each.parameter)}
        self._versions = Versions({name: each.parameter for name, each in self._copied.items()})
        self._load_in_float32(model)
        self.optimizer.register_step_pre_hook(lambda *_: self.take_values())
        self.optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _make_buckets(
        self, named: list[tuple[str, nn.Parameter]], users: Mapping[str, tuple[int, ...]] | None, bucket_bytes: int
    ) -> list[ShardBucket]:
        """In stage 2 of a pipeline by stage: gradients of what several stages here use stay until the end of the step,
        and travel once."""
        if self.stage == 1 or users is None:
            return buckets_of(summed_parameters(named, self.mesh), self.mesh, bucket_bytes, self._bucket)
        groups: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            groups.setdefault(users[name], []).append((name, parameter))
        buckets = []
        for stages, members in groups.items():
            made = buckets_of(summed_parameters(members, self.mesh), self.mesh, bucket_bytes, self._bucket)
            buckets += made
            if len(stages) == 1:
                self._of_stage[stages[0]] = made
        return buckets

    def _bucket(self, names: Any, parameters: Any, comm: Communicator) -> ShardBucket:
        everyone, axes = comm, summed_axes(parameters[0], self.mesh)
        if COPIES in axes:  # this rank's group holds all of them, and so do the others
            axes = tuple(axis for axis in axes if axis != COPIES)
            comm = self.mesh.comm(*axes)
        load = self._loads.setdefault(id(comm), [0] * comm.size)
        assign = assigned_evenly if self._is_elementwise else assigned_in_full
        shards = []
        for name, parameter in zip(names, parameters, strict=True):
            # All ranks of a pipeline that hold a parameter shard it alike, whatever else they hold.
            held = assign(parameter.shape, [0] * comm.size if name in self._tied else load)
            shards.append(ZeroShard(name, parameter, held, axes, comm.rank))
        self.shards.update({shard.name: shard for shard in shards})
        bucket = ShardBucket(names, parameters, comm, shards)
        bucket.spare, bucket.everyone = self._spare, everyone
        bucket.reduce_in(self._reduce_dtype)
        return bucket

    def _make_optimized(self, shard: ZeroShard) -> None:
        """Make what the optimizer will see of a parameter."""
        local = shard.own(shard.parameter.data)
        if self._needs_copy(shard.name, shard.parameter):
            shard.optimized = self._copy(shard.parameter, local)
        else:
            shard.optimized = nn.Parameter(local)  # a view: what the optimizer writes is in the parameter
            shard.optimized.grad_dtype = gradient_dtype(shard.parameter)
        set_layout(shard.optimized, shard.layout)
        self._round(shard)

    def _needs_copy(self, name: str, parameter: nn.Parameter) -> bool:
        is_on_device = self._offload and parameter.device.type != "cpu"
        is_half = parameter.dtype in HALF_DTYPES and self._has_masters
        is_rounded = name in self._rounded and (name in self.shards or self._is_emulated)
        return is_on_device or is_half or is_rounded

    def _round(self, shard: ZeroShard) -> None:
        """Give a parameter the dtype in which the forward reads it."""
        if shard.name in self._rounded and self._is_emulated:
            shard.emulates = self._rounded[shard.name]
            shard.parameter.data.copy_(shard.parameter.data.to(shard.emulates))
        elif shard.name in self._rounded:
            round_parameter(shard.parameter, self._rounded[shard.name])

    def _load_in_float32(self, model: nn.Module) -> None:
        """Let model.load_state_dict give this rank's shard of a rounded parameter the values that are not rounded."""
        shards = {id(each.parameter): each for each in self._copied.values() if each.name in self._rounded}

        def before(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
            for name, parameter in module._parameters.items():
                shard, value = shards.get(id(parameter)), state.get(prefix + name)
                if shard is not None and isinstance(value, torch.Tensor) and value.shape == shard.shape:
                    with torch.no_grad():
                        shard.optimized.copy_(shard.own(value))

        for module in model.modules():
            if any(id(parameter) in shards for parameter in module._parameters.values()):
                module.register_load_state_dict_pre_hook(before)

    def _copy(self, parameter: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
        """What the optimizer has of a parameter that is half, or on a device with little memory."""
        dtype = torch.float32 if parameter.dtype in HALF_DTYPES and self._has_masters else parameter.dtype
        return copy_of(parameter, local, dtype, "cpu" if self._offload else parameter.device)

    def _hand_over(self) -> None:
        """Let the optimizer see shards instead of parameters, and shard the state that it has already."""
        shards: dict[torch.Tensor, ZeroShard] = {shard.parameter: shard for shard in self.shards.values()}

        def own(parameter: torch.Tensor, value: Any) -> Any:
            is_sharded = parameter in shards and isinstance(value, torch.Tensor)
            return shards[parameter].own(value) if is_sharded and value.shape == shards[parameter].shape else value

        copies = {parameter: shard.optimized for parameter, shard in shards.items()} | self._masters.replacing
        hand_over(self.optimizer, copies, own)

    @property
    def has_copies(self) -> bool:
        """Whether the optimizer updates other tensors than the model's parameters."""
        return True

    @property
    def units(self) -> Units | None:
        """What is gathered and freed together, in stage 3."""
        return None

    # ---- gradients -----------------------------------------------------------------------------------------------

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """As Reducer.hold in stage 1. Later stages have no room for full gradients: every backward sends its own."""
        return super().hold() if self.stage == 1 else contextlib.nullcontext()

    @contextlib.contextmanager
    def at_work(self, stage: int, kind: str) -> Iterator[None]:
        """Around an action of a pipeline: F, B, or the halves I and W of a backward."""
        yield
        if kind in ("B", "W"):
            for bucket in self._of_stage.get(stage, ()):
                self._send(bucket)

    def _complete(self) -> None:
        if self.stage == 2 and self._is_pipeline:
            sent = {id(bucket) for buckets in self._of_stage.values() for bucket in buckets}
            for bucket in self.buckets:
                if id(bucket) not in sent:
                    self._send(bucket)
        else:
            super()._complete()

    def _reduce_async(self, bucket: ShardBucket) -> Handle:
        if self.stage > 1:  # or finished messages would use up the memory that the stage saves
            self._running = [other for other in self._running if other.handle is not None]
            while len(self._running) >= _MESSAGES:
                self._wait_for(self._running.pop(0))
            self._running.append(bucket)
        bucket.sent = bucket.message()
        if bucket.everyone is bucket.comm:
            return bucket.comm.reduce_scatter(bucket.sent, async_op=True)
        return self.mesh.comm(COPIES).all_reduce(bucket.comm.reduce_scatter(bucket.sent), async_op=True)

    def _wait_for(self, bucket: ShardBucket) -> None:
        super()._wait_for(bucket)
        if bucket.sent is not None:
            self._spare.put(bucket.sent)
            bucket.sent = None

    def _store_gradients(self, bucket: ShardBucket, total: torch.Tensor) -> None:
        for shard, gradient in zip(bucket.shards, bucket.mine_in(total), strict=True):
            if shard.earlier is not None and self.is_own:
                shard.optimized.grad = shard.earlier
            shard.earlier = None
            self._store_gradient(shard.optimized, gradient)

    def _store_gradient(self, optimized: nn.Parameter, gradient: torch.Tensor) -> None:
        gradient = gradient.to(optimized.device, gradient_dtype(optimized))
        if self.is_own and optimized.grad is not None:
            self._kept.add(id(optimized))
            optimized.grad = optimized.grad + gradient
        else:
            optimized.grad = gradient

    def _drop(self, name: str, parameter: nn.Parameter) -> None:
        if id(self.shards[name].optimized) not in self._kept:
            self.shards[name].optimized.grad = None

    def complete(self) -> None:
        super().complete()
        self._masters.take_gradients()

    def finish(self) -> None:
        """Wait until all gradients are summed; then each rank has those of its shards."""
        self._kept.clear()
        super().finish()
        self._masters.take_gradients()
        if not self._is_elementwise:  # whoever owns nothing of a parameter has nothing to optimize
            for shard in self.shards.values():
                if not len(shard.mine):
                    shard.optimized.grad = None

    # ---- parameters ----------------------------------------------------------------------------------------------

    def take_values(self) -> None:
        """Before the optimizer's tensors are used: take over what the user has changed in the parameters."""
        self._masters.take_values()
        for name in self._versions.changed():
            shard = self._copied[name]
            take_changes(shard.optimized, shard.published(), shard.own_of_parameter())
        self._versions.remember()

    def _after_step(self) -> None:
        self._masters.versions.require_unchanged()
        self._versions.require_unchanged()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer's step: bring everybody's parameters up to date."""
        self._masters.publish()
        handles = [
            bucket.all_gather([shard.published() for shard in bucket.shards], self._spare) for bucket in self.buckets
        ]
        for bucket, handle in zip(self.buckets, handles, strict=True):
            message = handle.wait()
            # Where the optimizer's shards are views of the parameters, it has written this rank's already.
            are_views = not any(self._needs_copy(shard.name, shard.parameter) for shard in bucket.shards)
            bucket.unpack(message, [parameter.data for parameter in bucket.parameters], has_own=are_views)
            self._spare.put(message)
        self._versions.remember()

    def optimized(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer sees, by name: shards, and parameters that have no replicas. Layouts give their
        placements."""
        self.take_values()
        for name, shard in self.shards.items():
            yield name, shard.optimized
        for name, parameter in self.alone.items():
            yield name, self._masters.copies.get(name, parameter)


def _require_parameters_of(model: nn.Module, optimizer: Optimizer) -> None:
    names = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise UsageError(f"the optimizer has {foreign} parameters that are not the model's; build it from those given")
    shapes = {parameter.shape for parameter in model.parameters()}
    for index, value in _beside_state(optimizer):
        if value.numel() > 1 and value.shape in shapes and id(value) not in names:
            raise UsageError(
                f"{type(optimizer).__name__} keeps a tensor of a parameter's shape in {index}, where ZeRO cannot shard "
                "it with the parameter; keep it in its state, as self.state[parameter]['...'], or use zero=0"
            )


def _beside_state(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that an optimizer holds, but for its parameters in their groups and its state."""
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    for index, tree in [*((f"its attribute {name}", value) for name, value in kept.items()), ("its groups", groups)]:
        yield from ((index, leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
