"""Units: parts of a model whose parameters are gathered only while they work (ZeRO's third stage).

Between uses a parameter is this rank's shard. A unit's parameters are gathered just before its forward and freed after,
and again for its backward, whose gradients are then sent off:

    forward    gather(1) F1 free(1)  gather(2) F2 free(2)  ...            gathers run ahead by one unit
    backward   ...  gather(2) B2 free(2) send(2)  gather(1) B1 free(1) send(1)

Units are the children of the model's outermost lists (nn.Sequential, and nn.ModuleList of one class) that are called as
modules; what is not in one, or in several, belongs to the root, which works as long as the full model does.

In a pipeline units are the rank's own blocks. The full model never runs there, so what is outside the blocks is
gathered while a stage that uses it is `at_work` on a microbatch.

Note: ranks that take different ways. Gathering is collective, but a rank whose samples all leave a branch out never
calls the modules in it. So in the first step ranks announce the unit that they need next, and all gather the first of
them, in the order of the units, until each has its own; in a backward they also send zeros for it. Where all ranks went
the same way, and no value of a tensor was looked at that could send them different ways later, the announcements end
with that step, and gathers run ahead from then on. Training and evaluation are judged apart, as models may branch in
one of them only.

Note: freeing. Autograd keeps views of parameters for the backward. So a full parameter keeps one storage for life:
freeing shrinks it to nothing, gathering grows and fills it again, and the views are right once more when they are used.
Filling goes through `.data`, which autograd does not count as a change. What a unit returns is used after it was freed,
so a view of a parameter among it becomes a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from unisono.comm.communicator import Communicator
from unisono.comm.handle import Handle
from unisono.errors import UsageError
from unisono.mesh.autograd_collectives import require_eager
from unisono.parallel.blocks import is_container
from unisono.parallel.checks.value_reads import is_ours, reads_values
from unisono.parallel.layout import set_layout
from unisono.parallel.zero.shards import ShardBucket, ZeroShard
from unisono.torch_compat import at_end_of_backward, no_torch_function, no_torch_function_subclass


class Unit:
    """Parameters that are gathered and freed together."""

    def __init__(
        self, module: nn.Module, named: list[tuple[str, nn.Parameter]], stages: tuple[int, ...] | None = None
    ) -> None:
        self.module = module
        self.named = named
        self.stages = stages  # of a pipeline, that use what is outside the blocks
        self.buckets: list[ShardBucket] = []
        self.is_full = False
        self.is_in_backward = False
        self._coming: list[Handle] | None = None
        self._full: dict[str, torch.Tensor] = {}
        self._local: dict[str, torch.Tensor] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named]

    def adopt(self, bucket: ShardBucket) -> bool:
        self.buckets.append(bucket)
        return True

    def keep_shard(self, shard: ZeroShard, local: torch.Tensor) -> None:
        """From now on the parameter is this rank's shard."""
        parameter = shard.parameter
        full = torch.empty_like(parameter.data)
        full.untyped_storage().resize_(0)
        self._full[shard.name] = full
        self._local[shard.name] = local
        parameter.data = local
        set_layout(parameter, shard.layout)

    def refresh(self, shard: ZeroShard) -> None:
        """Take over what the optimizer has made of this rank's shard, where it works on a copy of it."""
        if shard.optimized is not shard.parameter:
            self._local[shard.name].copy_(shard.published())

    def start_gather(self) -> None:
        if not self.is_full and self._coming is None:
            self._coming = [
                bucket.all_gather([self._local[shard.name] for shard in bucket.shards]) for bucket in self.buckets
            ]

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the full parameters."""
        if self.is_full:
            return
        self.start_gather()
        for bucket, handle in zip(self.buckets, self._coming or (), strict=True):
            message = handle.wait()
            full_tensors = [self._full[shard.name] for shard in bucket.shards]
            for full in full_tensors:
                full.untyped_storage().resize_(full.numel() * full.element_size())
            bucket.unpack(message, full_tensors)
            for shard, full in zip(bucket.shards, full_tensors, strict=True):
                shard.parameter.data = full
        self._coming = None
        self.is_full = True

    def put_gradients_aside(self) -> None:
        """Those of earlier backwards are of this rank's shard, and come back when the new ones are added to them."""
        for shard in self._shards():
            if shard.optimized is shard.parameter and shard.parameter.grad is not None:
                shard.earlier, shard.parameter.grad = shard.parameter.grad, None

    def empty(self) -> None:
        """Give the parameters their full shapes, with nothing in them."""
        if not self.is_full:
            for shard in self._shards():
                full = self._full[shard.name]
                shard.parameter.data = full.new_zeros(()).expand(full.shape)

    def fill(self) -> None:
        """The end of `empty`."""
        if not self.is_full:
            for shard in self._shards():
                shard.parameter.data = self._local[shard.name]

    def _shards(self) -> Iterator[ZeroShard]:
        return (shard for bucket in self.buckets for shard in bucket.shards)

    def free(self) -> None:
        """Keep this rank's shard only."""
        if self._coming is not None:
            self.gather()  # came for nothing, but must be received
        if self.is_full:
            for shard in self._shards():
                shard.parameter.data = self._local[shard.name]
                self._full[shard.name].untyped_storage().resize_(0)
            self.is_full = False


class Units:
    """All units of a model, what is outside its modules first."""

    def __init__(
        self,
        model: nn.Module,
        chosen: list[nn.Module] | None = None,
        users: Mapping[str, tuple[int, ...]] | None = None,
        comm: Communicator | None = None,
    ) -> None:
        """`comm`: the ranks that the parameters are sharded over. `users`: in a pipeline, the stages here that use a
        parameter; `chosen` are then the blocks here."""
        modules = listed_units(model) if chosen is None else chosen
        units_of: dict[int, list[nn.Module]] = {}
        for module in modules:
            for parameter in module.parameters():
                units_of.setdefault(id(parameter), []).append(module)
        named: dict[int, list[tuple[str, nn.Parameter]]] = {id(module): [] for module in modules}
        outside: dict[tuple[int, ...] | None, list[tuple[str, nn.Parameter]]] = {} if users else {None: []}
        for name, parameter in model.named_parameters():
            modules_of = units_of.get(id(parameter), [])
            if len(modules_of) == 1 and modules_of[0] is not model:
                named[id(modules_of[0])].append((name, parameter))
            else:
                outside.setdefault(users[name] if users else None, []).append((name, parameter))
        self.roots = [Unit(model, members, stages) for stages, members in outside.items()]
        self._units = [*self.roots, *[Unit(m, named[id(m)]) for m in modules if m is not model and named[id(m)]]]
        self._unit_of = {name: unit for unit in self._units for name, _ in unit.named}
        self._stage: int | None = None  # of a pipeline: the one at work
        self._orders: dict[int | None, list[Unit]] = {}  # of the forward, as far as it is known
        self._is_running = False
        self._is_pipeline = users is not None
        self._model, self._comm = model, comm
        self._unit_order_in: dict[
            tuple[bool, bool], UnitOrder
        ] = {}  # of training or evaluation, with or without gradients
        self._unit_order = self._unit_order_now()

    def _unit_order_now(self) -> UnitOrder:
        mode = (self._model.training, torch.is_grad_enabled())
        return self._unit_order_in.setdefault(mode, UnitOrder(self._comm))

    @property
    def _order(self) -> list[Unit]:
        return self._orders.setdefault(self._stage, [])

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def keep_shard(self, shard: ZeroShard, local: torch.Tensor) -> None:
        self._unit_of[shard.name].keep_shard(shard, local)

    @torch.no_grad()
    def refresh(self, shards: Iterable[ZeroShard]) -> None:
        for shard in shards:
            self._unit_of[shard.name].refresh(shard)

    def start(self, send: Callable[[ShardBucket], None], ended: Callable[[], None] = lambda: None) -> None:
        """Put hooks on the units' modules and parameters; `send` takes a bucket's gradients off, and `ended` is called
        when a backward has."""
        self._send, self._ended = send, ended
        for unit in self._units:
            if unit.stages is None:
                unit.module.register_forward_pre_hook(self._before_forward(unit), prepend=True)
                unit.module.register_forward_hook(self._after_forward(unit), with_kwargs=True, always_call=True)
            for bucket in unit.buckets:
                for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                    parameter.register_post_accumulate_grad_hook(self._arrived(unit, name))

    @contextlib.contextmanager
    def at_work(self, stage: int, is_backward: bool) -> Iterator[None]:
        """In the block, a stage of a pipeline runs forward or backward on one microbatch.

        A stage runs the model's own forward, also over what it has no use for: that must have the right shape only.
        """
        self._stage = stage
        elsewhere = [root for root in self.roots if stage not in (root.stages or ())]
        for root in elsewhere:
            root.empty()
        for root in self.roots:
            if root not in elsewhere:
                root.is_in_backward = is_backward
                root.gather()
        self._unit_order = self._unit_order_now()
        self._unit_order.is_backward = is_backward
        self._start_first(-1 if is_backward else 1)
        with self._unit_order.watched():
            yield
        self._end_of_backward()
        self._gather_in_order(None)
        for root in elsewhere:
            root.fill()
        self._stage = None

    # ---- forward -------------------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit) -> Any:
        def hook(_: nn.Module, args: Any) -> None:
            for given in tree_leaves(args):
                require_eager(given, "a module whose parameters ZeRO 3 gathers runs")
            if unit in self.roots and not unit.is_in_backward:
                self._unit_order = self._unit_order_now()
                self._unit_order.start_watching()
            self._gather_in_order(unit)
            unit.gather()
            if not unit.is_in_backward:
                self._ahead(unit, 1)

        return hook

    def _after_forward(self, unit: Unit) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
            outputs = without_views(outputs, unit.parameters)
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            with no_torch_function_subclass():
                others = {id(each) for leaf in given for each in (leaf, leaf._base)}  # of another unit, handed on
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in others:
                    on_gradient(leaf, self._before_backward(unit, self._unit_order), others)
            if unit.is_in_backward:  # a recomputation: the backward that follows needs the parameters
                return outputs
            unit.free()
            if unit in self.roots:
                self._gather_in_order(None)
                self._unit_order.stop_watching()
                for other in self._units:
                    other.free()
                if not torch.is_grad_enabled():
                    self._unit_order.settle()
            return outputs

        return hook

    def _gather_in_order(self, unit: Unit | None) -> None:
        """Gather what other ranks need before this unit, or before the end of the pass."""
        if not self._unit_order.are_announced or (unit is not None and (unit.is_full or unit in self.roots)):
            return
        mine = len(self._units) if unit is None else self._units.index(unit)
        while (first := self._unit_order.first(mine)) != mine:
            other = self._units[first]
            was_full = other.is_full
            other.free()
            other.gather()
            if self._unit_order.is_backward:
                for bucket in other.buckets:
                    self._send(bucket)
            if not was_full:
                other.free()

    def settle(self) -> None:
        """The end of a step."""
        self._unit_order.settle()

    def _start_first(self, direction: int) -> None:
        if self._unit_order.are_announced:
            return
        for first in self._order[:1] if direction > 0 else self._order[-1:]:
            first.start_gather()

    def _ahead(self, unit: Unit, direction: int) -> None:
        """Begin to gather the unit that comes next, if the order is known."""
        if unit in self.roots:
            self._start_first(direction)
        elif unit in self._order:
            if self._unit_order.are_announced:
                return
            position = self._order.index(unit) + direction
            for other in self._order[max(position, 0) : position + 1]:
                other.start_gather()
        else:
            self._order.append(unit)

    # ---- backward ------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit, order: UnitOrder) -> Any:
        def hook(_gradient: torch.Tensor) -> None:
            refuse_create_graph()
            if not self._is_running:
                self._is_running = True
                self._unit_order = order
                self._unit_order.is_backward = True
                at_end_of_backward(self._after_backward)
            if unit.is_in_backward:
                return
            if unit not in self.roots:
                # The unit after this one in the model is done: autograd has come down to this one's outputs.
                for other in self._units:
                    if other.is_in_backward and other not in self.roots:
                        self._done(other)
            self._gather_in_order(unit)
            unit.is_in_backward = True
            unit.put_gradients_aside()
            unit.gather()
            self._ahead(unit, -1)

        return hook

    def _arrived(self, unit: Unit, name: str) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            if not unit.is_in_backward:
                raise UsageError(
                    f"{name} got a gradient after the backward of its module was over: something outside the module "
                    "uses it; pass units= without that module"
                )

        return hook

    def _done(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            self._send(bucket)
        unit.free()
        unit.is_in_backward = False

    def _after_backward(self) -> None:
        self._end_of_backward()
        self._ended()

    def _end_of_backward(self) -> None:
        is_running, self._is_running = self._is_running, False
        for unit in self._units:
            if unit.is_in_backward and unit not in self.roots:
                self._done(unit)
        if is_running and not self._is_pipeline:
            self._gather_in_order(None)
            self._unit_order.is_backward = False
        for root in self.roots:
            if root.is_in_backward:
                self._done(root)
        for unit in self._units:
            unit.free()


def on_gradient(tensor: torch.Tensor, hook: Callable[[Any], None], others: Collection[int] = frozenset()) -> None:
    """Call `hook` when autograd comes to the tensor, perhaps twice. others: ids of tensors that are not hooked.

    A view that is written to loses its own hooks; what it is a view of keeps its node of the graph.
    """
    tensor.register_hook(hook)
    with no_torch_function_subclass():  # a shard of the logits is not gathered for this
        base = tensor._base
    if base is not None and base.grad_fn is not None and id(base) not in others:
        base.grad_fn.register_prehook(hook)


def without_views(value: Any, parameters: Iterable[nn.Parameter]) -> Any:
    """`value` with a copy instead of every tensor that is in a parameter's memory."""
    memory = {parameter.untyped_storage()._cdata for parameter in parameters}

    def is_view(leaf: Any) -> bool:
        is_plain = type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided
        return is_plain and leaf.untyped_storage()._cdata in memory

    if not any(map(is_view, tree_leaves(value))):
        return value
    return tree_map(lambda leaf: leaf.clone() if is_view(leaf) else leaf, value)


def refuse_create_graph() -> None:
    """In a backward."""
    if torch.is_grad_enabled():
        raise UsageError(
            "zero=3: a backward with create_graph=True, as a gradient penalty runs, keeps parameters for a second "
            "backward, but those of other ranks are freed after the first; use zero=2"
        )


class UnitOrder:
    """Announcements of the unit that each rank needs next."""

    def __init__(self, comm: Communicator | None) -> None:
        self.are_announced = comm is not None and comm.size > 1
        self.is_backward = False
        self._comm = comm
        self._may_differ = False  # ranks have needed other units, or one has looked at values: known to all of them
        self._values = _ValueReads()
        self._watching: contextlib.ExitStack | None = None

    def first(self, mine: int) -> int:
        """The first unit that some rank needs."""
        wanted = self._of_all_ranks(mine)
        self._may_differ |= len(set(wanted)) > 1
        return min(wanted)

    def settle(self) -> None:
        """End the announcements if no rank has a reason for them; all ranks end them together."""
        if self.are_announced and not self._may_differ:
            self.are_announced = self._may_differ = any(self._of_all_ranks(int(self._values.were_seen)))

    def _of_all_ranks(self, number: int) -> list[int]:
        assert self._comm is not None
        with no_torch_function():  # these values are not the model's
            announced = torch.empty(self._comm.size, dtype=torch.int64, device=self._comm.device)
            self._comm.all_gather_into(announced, torch.tensor([number], device=self._comm.device))
            numbers: list[int] = announced.tolist()
        return numbers

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In the block a forward runs; values that it looks at are noticed until it is known that ranks may differ."""
        self.start_watching()
        try:
            yield
        finally:
            self.stop_watching()

    def start_watching(self) -> None:
        if self.are_announced and not self._may_differ and self._watching is None:
            self._watching = contextlib.ExitStack()
            self._watching.enter_context(self._values)

    def stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.close()
            self._watching = None


class _ValueReads(TorchFunctionMode):
    """Notices whether the user's code sees values, on which it may branch."""

    def __init__(self) -> None:
        super().__init__()
        self.were_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.were_seen = self.were_seen or (reads_values(func, args, kwargs) and not is_ours())
        return func(*args, **(kwargs or {}))


def listed_units(model: nn.Module) -> list[nn.Module]:
    """The children with parameters of the outermost lists."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        children = list(module.children())
        is_list = isinstance(module, nn.ModuleList) and len({type(child) for child in children}) == 1
        if children and (is_list or isinstance(module, nn.Sequential)) and not any(map(is_container, children)):
            found.extend(child for child in children if any(True for _ in child.parameters()))
            return
        for child in children:
            walk(child)

    walk(model)
    return list({id(module): module for module in found}.values())
