"""The backends: what each one is called, when it is chosen, and what it can do natively.

No backend can do everything on every dtype. What one cannot do is done here in terms of what it can, so that the
answer is the same on all of them: see `plan_wire`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.reduction import HALF_DTYPES, INTEGERS, Reduction, plan_reduction
from unisono.comm.rendezvous import launcher_env
from unisono.errors import CommError, MissingPackageError, UsageError

NAMES = ("gloo", "nccl", "mpi")

_ARITHMETIC = frozenset({"sum", "product", "min", "max"})
_BITWISE = frozenset({"band", "bor", "bxor"})
_PLAIN = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_FOLDS: dict[str, Any] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@dataclass(frozen=True)
class Library:
    """What a library can do natively with tensors of one device type."""

    name: str
    takes_cuda: bool
    moves: frozenset[torch.dtype]
    reduces: frozenset[torch.dtype]
    ops: frozenset[str]

    def knows(self, op: str, dtype: torch.dtype) -> bool:
        return dtype in self.reduces and op in self.ops and (op not in _BITWISE or dtype in INTEGERS)


# Stock gloo also claims halves and complex numbers, but not for every collective, and rounds halves at every hop.
GLOO = Library("gloo", False, _PLAIN | HALF_DTYPES, _PLAIN, _ARITHMETIC | _BITWISE)
NCCL = Library("nccl", True, _PLAIN | HALF_DTYPES, _PLAIN | HALF_DTYPES, _ARITHMETIC)


@dataclass(frozen=True)
class WirePlan:
    """How one reduction is carried out by one library."""

    reduction: Reduction
    wire_dtype: torch.dtype
    gathers: bool  # the library cannot reduce this at all: gather everything and fold locally, in rank order
    is_plain: bool  # the tensor travels as it is and arrives finished

    def to_wire(self, tensor: torch.Tensor, factor: float | complex | torch.Tensor | None) -> torch.Tensor:
        return self.reduction.to_wire(tensor, factor).to(self.wire_dtype)

    def from_wire(self, wire: torch.Tensor, out: torch.Tensor, size: int) -> None:
        self.reduction.from_wire(wire, out, size)

    @property
    def wire_op(self) -> dist.ReduceOp.RedOpType:
        return REDUCE_OPS[self.reduction.wire_op]

    def fold(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.fold_into_first([tensors[0].clone(), *tensors[1:]])

    def fold_into_first(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return folded(tensors, self.reduction.wire_op)


def folded(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The chunks reduced to one, in their order, which replaces the first."""
    for tensor in tensors[1:]:
        _FOLDS[op](tensors[0], tensor, out=tensors[0])
    return tensors[0]


@cache
def plan_wire(library: Library, op: str, dtype: torch.dtype) -> WirePlan:
    """How `library` reduces `dtype` by `op`. UsageError where that has no meaning on any backend."""
    reduction = plan_reduction(op, dtype)
    if dtype in HALF_DTYPES and dtype in library.reduces:
        reduction = Reduction(op, dtype, dtype, reduction.wire_op)
    wire_dtype = reduction.wire_dtype
    if wire_dtype == torch.int16 and not library.knows(reduction.wire_op, wire_dtype):
        wire_dtype = torch.int32  # wraps around to the same int16 on the way back
    gathers = not library.knows(reduction.wire_op, wire_dtype)
    return WirePlan(reduction, wire_dtype, gathers, reduction.is_plain and wire_dtype == dtype and not gathers)


def movable(library: Library, tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as the library moves it: itself, or its bytes."""
    return tensor if tensor.dtype in library.moves else tensor.reshape(-1).view(torch.uint8)


def moved_elements(library: Library, dtype: torch.dtype) -> int:
    """How many elements `movable` makes of one."""
    return 1 if dtype in library.moves else dtype.itemsize


def choose(given: str | None, requested: str | None, how: str, local_size: int) -> str:
    """The backend for this world: what the caller gave, else what the launcher asked for, else what suits."""
    name = given or requested
    if name in (None, "auto"):
        return _suitable(how, local_size)
    if name not in NAMES:
        raise UsageError(f"backend {name!r} is unknown; use one of {', '.join(NAMES)} or leave it out")
    _require(name, how)
    return name


def _suitable(how: str, local_size: int) -> str:
    if torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_size:
        return "nccl"
    if how == launcher_env.MPIEXEC and importlib.util.find_spec("mpi4py") is not None:
        return "mpi"
    return "gloo"


def _require(name: str, how: str) -> None:
    if name == "nccl":
        if not dist.is_nccl_available():
            raise CommError("backend nccl: this build of PyTorch has no NCCL; use gloo or mpi, or a CUDA build")
        if not torch.cuda.is_available():
            raise CommError("backend nccl: no CUDA device is visible here; use gloo or mpi")
    if name == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            raise MissingPackageError("mpi4py", "backend mpi", "mpi")
        if how not in (launcher_env.MPIEXEC, launcher_env.SRUN, launcher_env.ALONE):
            raise CommError(
                "backend mpi: this process was not started by mpiexec, so MPI knows only itself; "
                "use `unisono run --backend mpi` or mpiexec"
            )
