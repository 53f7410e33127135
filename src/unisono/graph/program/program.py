"""The distributed program of a model: local ops on local shapes, explicit collectives, one train step.

    mesh = uni.Mesh((2, 4), ("dp", "mp"))
    program = uni.to_static(model, example=batch, mesh=mesh, loss=loss, optimizer=optimizer)
    for batch in batches:
        loss = program(batch)          # forward, backward, update; the loss that one device would have seen
    program.eval()
    program(batch), program.predict(inputs)
    print(program)                     # every op: placements, local shapes, collectives with their ranks

The model is traced with its loss as one graph on full tensors (trace.py), each op is assigned placements
(propagate.py), and the graph is lowered to what one rank does (lowering.py). Autograd gives the backward: every move
knows how the gradient goes back. Batches are global ones, given alike to every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world
from unisono.comm.same_data import SameBatch
from unisono.errors import UsageError
from unisono.graph.capture.trace import Loss, Trace, trace
from unisono.graph.placement.assignment import Assignment
from unisono.graph.placement.carry import carried
from unisono.graph.placement.find import find
from unisono.graph.program.batch import Signature, require_alike, require_pair, signature, tensors_in
from unisono.graph.program.executable import Executable
from unisono.graph.program.lowering import Lowered, ShardedSpec, lower
from unisono.graph.program.shards import ParameterSpec, ProgramShards
from unisono.graph.program.zero import GatherInBackward, OptimizerShards, in_shards, require_stage
from unisono.graph.render.dump import save
from unisono.graph.render.listing import listing_of
from unisono.graph.render.svg import as_svg
from unisono.graph.render.text import as_text
from unisono.mesh.deferred_init.seeded_init import build, in_dtype
from unisono.mesh.mesh import Mesh
from unisono.mesh.named_groups import GroupedOptimizer, NamedParameters
from unisono.mesh.optimizers import OptimizerScope, fused, optimizer_scope, require_elementwise_hooks
from unisono.mesh.random.state import RandomState

Model = nn.Module | Callable[[], nn.Module]

_OTHER_BATCH = (
    "rank {rank} gave the program another batch than rank {first}; expected the same global batch on every rank, of "
    "which each takes its shard: read the full batch everywhere, with the same seed, and no DistributedSampler"
)


class Program:
    """A model as one program on a mesh; made by `uni.to_static`."""

    def __init__(
        self,
        model: nn.Module,
        lowered: Lowered,
        loss: Loss,
        optimizer: Callable[[Any], Optimizer],
        example: tuple[Any, Any],
        clip: float | None = None,
        seed: int = 0,
        zero: int = 0,
    ) -> None:
        self.mesh = lowered.mesh
        self.zero = zero
        self.clip = clip
        self.steps = 0
        self.training = True
        self.norm: torch.Tensor | None = None  # of the last step's gradients, before clipping
        self.random = RandomState(seed)
        self._model = model
        self._loss = loss
        self._assignment = lowered.assignment
        self._device = world.world().device
        self.shards = ProgramShards(model, _parameter_specs(lowered), self.mesh, self._device)
        self._shares = OptimizerShards(self.shards) if zero == 1 else None
        self._again = GatherInBackward() if zero == 3 else None
        if isinstance(optimizer, GroupedOptimizer):
            optimizer.require_members(self.shards.optimized)
        self.optimizer = optimizer(NamedParameters(self.shards.optimized.values(), self.shards.optimized))
        _require_elementwise(self.optimizer, optimizer, self.shards)
        self._forms: dict[Signature, Executable] = {}
        self._example = _without_data(example)
        self._forms[signature("train", example)] = Executable(
            lowered, self.shards, self.random, self._device, self._again
        )
        self._shown = next(iter(self._forms.values()))
        self._same_batch = SameBatch(self.mesh.comm(), _OTHER_BATCH)

    # ---- training --------------------------------------------------------------------------------------------------

    def __call__(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """A step of training, or in evaluation mode the loss only, on a global batch (inputs, targets)."""
        return self.step(batch) if self.training else self.evaluate(batch)

    def step(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """Forward, backward and update on a global batch (inputs, targets); the loss on all of it."""
        self.zero_grad()
        loss = self.backward(batch)
        self.update()
        return loss

    def zero_grad(self) -> None:
        for parameter in self.shards.parameters.values():
            parameter.grad = None

    def backward(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """Forward and backward only; after it, gradients are those of the global batch, before clipping. They are added
        to those that are there, as autograd's are."""
        form, leaves = self._form("train", batch)
        before = {p: p.grad.clone() for p in self.shards.parameters.values() if p.grad is not None}
        self.zero_grad()
        self.random.step = self.steps
        with contextlib.nullcontext() if self._again is None else self._again:
            outputs, values = form(leaves)
        loss = outputs[0]
        assert loss is not None
        form.sums.begin()
        loss.backward()
        form.sums.finish()
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self._again is not None:
            self._again.forget()
        form.keep(values)
        return loss.detach()

    def update(self) -> None:
        """Clip and let the optimizer step."""
        if self.clip is not None:
            self.norm = self.shards.clip(self.clip)
        if self._shares is not None:
            self._shares.take_gradients()
        with fused(self.optimizer):
            self.optimizer.step()
        if self._shares is not None:
            self._shares.publish()
        self.steps += 1

    def train(self, mode: bool = True) -> Program:
        self.training = mode
        return self

    def eval(self) -> Program:
        return self.train(False)

    @torch.no_grad()
    def evaluate(self, batch: tuple[Any, Any]) -> torch.Tensor:
        """The loss on a global batch, in evaluation mode, without gradients."""
        form, leaves = self._form("eval", batch)
        outputs, _ = form(leaves)
        assert outputs[0] is not None
        return outputs[0]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The model's outputs for a global batch of inputs, in full, on every rank; in evaluation mode."""
        form, leaves = self._form("predict", (inputs, None))
        outputs, _ = form(leaves)
        return pytree.tree_unflatten(outputs, form.lowered.trace.output_spec)

    # ---- forms -----------------------------------------------------------------------------------------------------

    def _form(self, kind: str, batch: tuple[Any, Any]) -> tuple[Executable, list[torch.Tensor]]:
        """The graph for a kind of run and a shape of batch; traced where it is new, with parameters as they are
        placed."""
        self._same_batch.require(batch)
        key = signature(kind, batch)
        if key not in self._forms:
            require_pair(batch)
            require_alike(batch, (self._example[0], None) if kind == "predict" else self._example)
            traced = self._traced(kind, batch)
            assignment = carried(traced, self._assignment)
            lowered = lower(traced, assignment, self.mesh)
            self._forms[key] = Executable(lowered, self.shards, self.random, self._device, self._again)
        return self._forms[key], tensors_in(batch)

    def _traced(self, kind: str, batch: tuple[Any, Any]) -> Trace:
        modes = [(module, module.training) for module in self._model.modules()]
        if kind != "train":
            self._model.eval()
        try:
            loss = None if kind == "predict" else self._loss
            return trace(
                self._model, batch, loss, unpacked=bool(self._assignment.trace.packed_slices), marked=kind == "train"
            )
        finally:
            for module, mode in modes:
                module.training = mode

    # ---- state -----------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """This rank's shards, by the model's names."""
        return list(self.shards.parameters.items())

    def state_dict(self, local: bool = False) -> dict[str, Any]:
        """All that training goes on from: full tensors by name, as a Trainer's, so that either can load it. Every rank
        calls it. local: this rank's shards only, without any communication."""
        if local:
            tensors = {**self.shards.parameters, **self.shards.buffers}
            model = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            return {"model": model, "optimizer": self.optimizer.state_dict(), "steps": self.steps, "local": True}
        return {
            "model": self.shards.full_tensors(),
            "optimizer": self.shards.full_optimizer_state(self.optimizer),
            "steps": self.steps,
            "skipped": 0,
            "scaler": None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same model: full, of any program or plan, or local, of this one."""
        if state.get("local"):
            for name, tensor in {**self.shards.parameters, **self.shards.buffers}.items():
                shard = state["model"].get(name)
                if shard is None or shard.shape != tensor.shape:
                    raise UsageError(f"{name} in the local state is not this rank's shard; load a full state instead")
                tensor.copy_(shard)
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.shards.load_tensors(state["model"])
            self.shards.load_optimizer(self.optimizer, state["optimizer"])
        self.steps = state["steps"]

    # ---- showing ---------------------------------------------------------------------------------------------------

    @property
    def lowered(self) -> Lowered:
        """What the training step does, as data."""
        return self._shown.lowered

    @property
    def source(self) -> str:
        """The Python function that this rank runs forward."""
        return self._shown.source

    def __str__(self) -> str:
        return self.text()

    def text(self, rank: int | None = None) -> str:
        """The program of a rank, by default this one, beside the serial one."""
        return as_text(listing_of(self.lowered, world.rank() if rank is None else rank))

    def draw(self, path: str | Path, rank: int | None = None) -> None:
        """Write a picture (SVG) of a rank's program, collectives in colour."""
        Path(path).write_text(as_svg(listing_of(self.lowered, world.rank() if rank is None else rank)))


def to_static(
    model: Model,
    *,
    example: tuple[Any, Any],
    mesh: Mesh,
    loss: Loss,
    optimizer: Callable[[Any], Optimizer],
    search: str = "propagate",
    assignment: Assignment | None = None,
    save_graphs: str | Path | None = None,
    fully_use_devices: bool = False,
    unpack: bool = False,
    zero: int = 0,
    memory: float | None = None,
    clip: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Program:
    """A program without stages. `parallel.static.to_static`, the public function, makes those with stages too, and
    documents what the arguments are."""
    comm = world.world() if world.is_initialized() else world.init()
    if mesh.ranks.size != comm.size:
        raise UsageError(f"{mesh} has {mesh.ranks.size} ranks, but {comm.size} are running; expected a mesh of all")
    require_stage(zero, mesh)
    full = model if isinstance(model, nn.Module) else build(model, seed)
    if not isinstance(full, nn.Module):
        raise UsageError(f"to_static takes an nn.Module or a function that builds one; it gave {type(full).__name__}")
    full = full if dtype is None else in_dtype(full, dtype)
    mesh.connect()
    if isinstance(model, nn.Module):
        comm.broadcast_parameters(full)
    found = assignment
    if found is None:
        traced = trace(full, example, loss, unpacked=unpack)
        found = _found_by_one(comm, traced, mesh, lambda: find(traced, mesh, search, fully_use_devices, memory))
    if zero > 1:
        found = in_shards(found)
    found.check()
    lowered = lower(found.trace, found, mesh)
    if save_graphs is not None:
        save(lowered, Path(save_graphs), [comm.rank])
    return Program(full, lowered, loss, optimizer, example, clip, seed, zero)


def _require_elementwise(optimizer: Optimizer, make: Callable[[Any], Optimizer], shards: ProgramShards) -> None:
    """Refuse an optimizer that must see more than a rank's shards, or evaluates the model itself."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(f"{name} evaluates the model several times in a step, which a program does once; use a plan")
    sharded = [key for key in shards.parameters if shards.is_sharded(key)]
    if sharded:
        require_elementwise_hooks(optimizer)
    if sharded and optimizer_scope(optimizer, make) is not OptimizerScope.ELEMENT:
        raise UsageError(
            f"{name} uses a parameter as one tensor, but {sharded[0]} is sharded; use marks that leave them unsharded, "
            "or an optimizer that treats elements alone (if this one does, set is_elementwise = True on its class)"
        )


def _found_by_one(comm: Communicator, traced: Trace, mesh: Mesh, find: Callable[[], Assignment]) -> Assignment:
    """Rank 0 searches for all: ranks that search by themselves would take each other's cores, and might differ."""
    found_on_rank_0: tuple[Any, Any] | UsageError | None = None
    if comm.rank == 0:
        try:
            found = find()
            found_on_rank_0 = found.options, found.notes
        except UsageError as error:
            found_on_rank_0 = error
    found_on_rank_0 = comm.broadcast_object(found_on_rank_0)
    if isinstance(found_on_rank_0, UsageError):
        raise found_on_rank_0
    assert found_on_rank_0 is not None
    return Assignment(traced, mesh, *found_on_rank_0)


def _parameter_specs(lowered: Lowered) -> dict[str, ParameterSpec]:
    trace = lowered.trace
    names = {**trace.parameters, **trace.buffers}
    found = {names[node]: ParameterSpec((spec,)) for node, spec in lowered.given.items() if node in names}
    unpacked: dict[str, list[tuple[int, int, ShardedSpec]]] = {}
    for node, packed in trace.packed_slices.items():
        unpacked.setdefault(packed.parameter, []).append((packed.start, packed.dim, lowered.given[node]))
    for name, parts in unpacked.items():
        ordered = sorted(parts, key=lambda part: part[0])
        dim = ordered[0][1] % len(ordered[0][2].shape)
        found[name] = ParameterSpec(tuple(spec for _, _, spec in ordered), dim)
    return found


def _without_data(example: tuple[Any, Any]) -> Any:
    return pytree.tree_map(_shape_of, tuple(example))


def _shape_of(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf
