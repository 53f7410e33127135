"""Where a program diverges from the plain model: the first op whose shard on some rank is not the part it should be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.amounts import parse_bytes
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.graph.placement.assignment import replicated
from unisono.graph.placement.find import SEARCHES
from unisono.graph.program.binding import bind
from unisono.graph.program.codegen import generate
from unisono.graph.program.executable import fed
from unisono.graph.program.lowering import Compute, Lowered, lower
from unisono.graph.program.program import Program
from unisono.graph.rules import tensors_of
from unisono.mesh.deferred_init.seeded_init import build
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Partial, Replicate, local_slice
from unisono.mesh.reshard import move
from unisono.parallel.static.to_static import StagedProgram, to_static
from unisono.parallel.task import Task
from unisono.verify.float64 import Float64Mode
from unisono.verify.training_record import TrainingRecord, batch_of, flat_state, leave_out, trainer_record

PREFIX = "program "


@dataclass(frozen=True)
class ProgramSpec:
    """The axes of a mesh in order, and how placements are searched for: program dp=2,mp=4,search=exact.

    zero: what the ranks of the axis dp share out. microbatches: where the model marks stages. memory: bytes that a rank
    may hold, for a search."""

    axes: tuple[tuple[str, int], ...]
    search: str = "propagate"
    fully_use_devices: bool = False
    unpack: bool = False
    zero: int = 0
    microbatches: int = 1
    memory: int | None = None

    @classmethod
    def parse(cls, text: str) -> ProgramSpec:
        """Parse settings such as dp=2,mp=4; search=... and full may be among them."""
        axes: list[tuple[str, int]] = []
        search, numbers, flags = "propagate", {"zero": 0, "microbatches": 1}, {"full": False, "unpack": False}
        memory = None
        for setting in text.removeprefix(PREFIX).replace(" ", "").split(","):
            name, equals, value = setting.partition("=")
            if name == "search" and value in SEARCHES:
                search = value
            elif name in numbers and value.isdecimal() and 0 < int(value) <= (3 if name == "zero" else 10**6):
                numbers[name] = int(value)
            elif name == "memory" and (found := parse_bytes(value)):
                memory = round(found)
            elif setting in flags:
                flags[setting] = True
            elif (
                equals
                and name.isidentifier()
                and name not in (*numbers, "memory")
                and value.isdecimal()
                and int(value) > 0
            ):
                axes.append((name, int(value)))
            else:
                raise UsageError(
                    f"mesh {text!r}: {setting!r} is no axis; expected words such as dp=2,mp=4 "
                    f"(and search={'|'.join(SEARCHES)}, memory=2GiB, zero=1|2|3, microbatches=M, full, unpack)"
                )
        if not axes:
            raise UsageError(f"mesh {text!r} has no axes; expected words such as dp=2,mp=4")
        made = cls(tuple(axes), search, flags["full"], flags["unpack"], **numbers, memory=memory)
        made.described()  # names and sizes are checked there
        return made

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def options(self) -> dict[str, Any]:
        """What `to_static` takes."""
        finding: dict[str, Any] = {"search": self.search, "fully_use_devices": self.fully_use_devices}
        finding |= {"unpack": self.unpack, "memory": self.memory}
        return {**finding, "zero": self.zero, "microbatches": self.microbatches}

    def __str__(self) -> str:
        settings = [f"{name}={size}" for name, size in self.axes]
        settings += [f"search={self.search}"] if self.search != "propagate" else []
        settings += [f"memory={self.memory}B"] if self.memory else []
        settings += ["full"] if self.fully_use_devices else []
        settings += ["unpack"] if self.unpack else []
        settings += [f"zero={self.zero}"] if self.zero else []
        settings += [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        return PREFIX + ",".join(settings)

    def mesh(self) -> Mesh:
        """Over the ranks that are running."""
        return Mesh([size for _, size in self.axes], [name for name, _ in self.axes])

    def described(self) -> Mesh:
        """Whether or not any rank is running."""
        return Mesh.describe([size for _, size in self.axes], [name for name, _ in self.axes])

    def fit(self, ranks: int) -> ProgramSpec:
        if self.world != ranks:
            raise UsageError(f"{self} needs {self.world} ranks, but there are {ranks}; use -n {self.world}")
        return self


Tensors = dict[str, torch.Tensor]


def program_record(
    task: Task,
    mesh: Mesh,
    steps: int,
    dtype: torch.dtype,
    seed: int = 0,
    prepare: Callable[[Any], None] | None = None,
    rounding: float = 0.0,
    **options: Any,
) -> TrainingRecord:
    """The steps of a task as a program on a mesh; every rank calls it and gets the full record.

    options: how `to_static` finds placements.
    """
    program = made_program(task, mesh, dtype, seed, **options)
    if isinstance(program, StagedProgram):
        return trainer_record(program.trainer, task, steps, dtype, prepare, rounding)
    shards = program.shards
    record = TrainingRecord(initial=_full(program, dict(shards.parameters)))
    if prepare is not None:
        prepare(program)
    for step in range(steps):
        batch = batch_of(task, step, dtype)
        program.zero_grad()
        with Float64Mode(dtype):
            record.losses.append(program.backward(batch).item())
        found = {name: parameter.grad for name, parameter in shards.parameters.items() if parameter.grad is not None}
        record.gradients.append(_full(program, found))
        leave_out(rounding, shards.parameters.values())
        program.update()
        record.scales.append(1.0)
    record.parameters = _full(program, dict(shards.parameters))
    record.buffers = _full(program, shards.buffers)
    record.optimizer = flat_state(shards.full_optimizer_state(program.optimizer)["state"])
    return record


def made_program(task: Task, mesh: Mesh, dtype: torch.dtype, seed: int = 0, **options: Any) -> Program | StagedProgram:
    full, example = (
        build(task.model, seed),
        batch_of(task, 0, dtype),
    )  # the user's own dtypes, so not within Float64Mode
    with Float64Mode(dtype):
        made: Program | StagedProgram = to_static(
            lambda: full,
            example=example,
            mesh=mesh,
            loss=task.loss,
            optimizer=task.optimizer,
            clip=task.clip,
            seed=seed,
            dtype=dtype,
            **options,
        )
    return made


def _full(program: Program, tensors: dict[str, Any]) -> Tensors:
    return {name: program.shards.full(name, tensor).cpu() for name, tensor in tensors.items()}


Values = dict[str, Any]


@torch.no_grad()
def program_divergence(comm: Communicator, program: Program, batch: tuple[Any, Any], tolerance: float) -> str:
    """Runs the training forward of a batch on shards and, on every rank, on full tensors; compares value by value."""
    lowered = program.lowered
    serial = lower(lowered.trace, replicated(lowered.trace, lowered.mesh), lowered.mesh)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    full = {**program.shards.full_tensors(), **dict(zip(fed(lowered), leaves, strict=True))}
    program.random.step = program.steps
    plain = _values(serial, program, full, is_full=True)
    mine = _values(lowered, program, full, is_full=False)
    found = None
    for order, compute in enumerate(lowered.computes):
        deviation = _deviation(compute, lowered, plain[compute.name], mine[compute.name])
        if found is None and deviation > tolerance:
            found = order, compute.name, deviation
    everyone = [(each, rank) for rank, each in enumerate(comm.all_gather_object(found)) if each is not None]
    if not everyone:
        return "forward values agree: the fault is in the backward pass, the sums of gradients or the update"
    (_, name, deviation), rank = min(everyone, key=lambda item: item[0][0])
    op = next(op for op in lowered.trace.ops if op.name == name)
    where = " ".join(part for part in (op.path, op.line) if part)
    return f"{name} ({where}) on rank {rank}: deviation {deviation:.2g}"


def _values(lowered: Lowered, program: Program, full: dict[str, torch.Tensor], is_full: bool) -> Values:
    """What every op gives on this rank."""
    values: Values = {}

    def noting(name: str, callee: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            values[name] = callee(*args, **kwargs)
            return values[name]

        return note

    callees = bind(lowered, program.random)
    computed = {compute.name for compute in lowered.computes}
    wrapped = {name: noting(name, callee) if name in computed else callee for name, callee in callees.items()}
    names = {**lowered.trace.parameters, **lowered.trace.buffers}
    given = []
    for node, spec in lowered.given.items():
        tensor = lowered.trace.constants[node] if node in lowered.trace.constants else full[names.get(node, node)]
        if node in lowered.trace.packed_slices:
            shard = lowered.trace.packed_slices[node]
            tensor = tensor.narrow(shard.dim, shard.start, shard.length)
        given.append((tensor if is_full else local_slice(tensor, lowered.mesh, spec.placements)).clone())
    generate(lowered, wrapped)[0](*given)
    for compute in lowered.computes:
        if compute.is_item:
            values[compute.name] = values[compute.inputs[0]][compute.node.args[1]]
    return values


def _deviation(compute: Compute, lowered: Lowered, plain: Any, mine: Any) -> float:
    """The deviation of this rank's shards from those of the full tensors, relative to the largest value. All ranks call
    it."""
    worst = 0.0
    for spec, full, shard in zip(compute.outputs, tensors_of(plain), tensors_of(mine), strict=True):
        summed = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
        shard = move(shard, lowered.mesh, spec.shape, spec.placements, summed)
        expected = local_slice(full, lowered.mesh, summed)
        if not shard.numel() or not shard.dtype.is_floating_point:
            worst = max(worst, 0.0 if torch.equal(shard, expected) else float("inf"))
            continue
        scale = max(float(full.abs().nan_to_num(posinf=0.0).max()), 1e-300)
        gap = (shard - expected).abs().nan_to_num(nan=0.0, posinf=0.0)
        worst = max(worst, float(gap.max()) / scale)
    return worst
