"""ProcessMesh, placements, and the marks of semi-automatic parallelism.

A mark in a forward counts when the layer is called: the plan that all marks make together is applied (binding.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from unisono.compat.language import say
from unisono.compat.paddle.distributed.environment import comm
from unisono.compat.paddle.nn.layer import MarkFound, is_waiting_for_marks, marked_parameters
from unisono.compat.paddle.tensor import plain
from unisono.errors import UsageError
from unisono.graph.marks import api
from unisono.graph.marks.recorder import recorder
from unisono.graph.marks.sharded import shard_op as mark_op
from unisono.mesh.mesh import Mesh
from unisono.mesh.placement import Partial as Partial
from unisono.mesh.placement import Placement, checked
from unisono.mesh.placement import Replicate as Replicate
from unisono.mesh.placement import Shard as Shard


class ProcessMesh:
    """Ranks in a grid: ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"]). mesh[0] has the ranks at index 0 of the
    first dim. All ranks of the job are in it."""

    def __init__(
        self,
        mesh: Any = None,
        dim_names: Sequence[str] | None = None,
        shape: Sequence[int] | None = None,
        process_ids: Sequence[int] | None = None,
    ) -> None:
        grid = np.array(mesh if mesh is not None else np.reshape(process_ids, shape))  # type: ignore[arg-type]
        names = [f"d{number}" for number in range(grid.ndim)] if dim_names is None else list(dim_names)
        ranks = comm().size
        if sorted(grid.reshape(-1).tolist()) != list(range(ranks)):
            raise UsageError(
                say(
                    f"ProcessMesh({grid.tolist()}) in a job of {ranks} ranks: Paddle would wait for ranks that are not "
                    "there, or leave some out; here a mesh has all ranks of the job, and mesh[0] a part of them: start "
                    f"the job with unisono run -n {grid.size}",
                    f"ProcessMesh({grid.tolist()})，而作业有 {ranks} 个进程：飞桨会等待不存在的进程，或漏掉一些进程；"
                    f"这里的 mesh 须包含作业的全部进程，mesh[0] 为其一部分：请用 unisono run -n {grid.size} 启动",
                )
            )
        self._set(Mesh(grid.shape, names, grid), self)

    def _set(self, mesh: Mesh, root: ProcessMesh) -> None:
        self.inner = mesh
        self.root = root  # of which this is a part

    @property
    def shape(self) -> list[int]:
        return list(self.inner.shape)

    @property
    def ndim(self) -> int:
        return self.inner.ndim

    @property
    def dim_names(self) -> list[str]:
        return list(self.inner.names)

    @property
    def mesh(self) -> np.ndarray:
        return self.inner.ranks

    @property
    def process_ids(self) -> list[int]:
        return [int(rank) for rank in self.inner.ranks.reshape(-1)]

    def get_dim_size(self, dim_name: str) -> int:
        return self.inner.size(dim_name)

    def __getitem__(self, index: Any) -> ProcessMesh:
        """The ranks at an index of the first dim, such as a stage of a pipeline."""
        if isinstance(index, bool) or not isinstance(index, int | np.integer) or not 0 <= index < self.shape[0]:
            raise UsageError(
                say(
                    f"{self!r}[{index!r}]: Paddle also takes slices; here give an index of the first dim, 0 to "
                    f"{self.shape[0] - 1}",
                    f"{self!r}[{index!r}]：飞桨还接受切片；这里请给出第一维的下标，0 到 {self.shape[0] - 1}",
                )
            )
        part = ProcessMesh.__new__(ProcessMesh)
        part._set(self.inner.at(**{self.inner.names[0]: int(index)}), self.root)
        return part

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessMesh) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def __repr__(self) -> str:
        return f"ProcessMesh({self.inner.ranks.tolist()}, dim_names={self.dim_names})"


def placements_of(mesh: Mesh, given: Sequence[Any], dims: int) -> tuple[Placement, ...]:
    """Placements, one for each dim of the mesh, or a dims_mapping: the name of a mesh dim, or None, for each dim of the
    tensor."""
    if any(isinstance(each, Placement) for each in given):
        return checked(list(given), mesh, dims)
    if len(given) != dims or any(each is not None and each not in mesh.names for each in given):
        raise UsageError(
            say(
                f"{list(given)!r} for a tensor of {dims} dims on {mesh}: as in Paddle, give placements such as "
                f"[Shard(0)], one for each dim of the mesh, or for each dim of the tensor None or one of "
                f"{list(mesh.names)}",
                f"{list(given)!r} 用于 {mesh} 上的 {dims} 维张量：与飞桨相同，请给出与 mesh 各维对应的 [Shard(0)] 等，"
                f"或与张量各维对应的 None 或 {list(mesh.names)} 之一",
            )
        )
    found: list[Placement] = [Replicate() for _ in mesh.names]
    for dim, name in enumerate(given):
        if name is not None:
            found[mesh.axis(name)] = Shard(dim)
    return checked(found, mesh, dims)


def _has_counted() -> bool:
    """Whether a forward runs under the plan that its marks made."""
    return api.is_applied() and recorder() is None


def shard_tensor(
    data: Any, mesh: ProcessMesh, placements: Sequence[Any], dtype: Any = None, stop_gradient: bool | None = None
) -> Any:
    """A mark: how a tensor is placed. Of a parameter it counts for the layer that has it; outside of layers, the tensor
    becomes one of which each rank has its part."""
    if is_waiting_for_marks():
        raise MarkFound(mesh.root)
    if _has_counted():
        return data
    tensor = plain(data) if isinstance(data, torch.Tensor) else torch.as_tensor(np.asarray(data))
    found = placements_of(mesh.inner, placements, tensor.dim())
    if recorder() is None and isinstance(tensor, nn.Parameter):
        api.mark_parameter(tensor, mesh.inner, found)
        marked_parameters[tensor] = mesh.root
        return tensor
    return api.shard_tensor(tensor, mesh.inner, found)


def reshard(dist_tensor: torch.Tensor, mesh: ProcessMesh, placements: Sequence[Any]) -> torch.Tensor:
    """The tensor, placed otherwise."""
    if is_waiting_for_marks():
        raise MarkFound(mesh.root)
    if _has_counted():
        return dist_tensor
    tensor = plain(dist_tensor)
    return api.reshard(tensor, mesh.inner, placements_of(mesh.inner, placements, tensor.dim()))


def dtensor_from_fn(fn: Callable[..., Any], mesh: ProcessMesh, placements: Sequence[Any], *args: Any, **kw: Any) -> Any:
    return shard_tensor(fn(*args, **kw), mesh, placements)


class _MarkedOp:
    """A function whose tensors are marked; without marks of tensors, the first layer of a stage."""

    def __init__(self, op: Callable[..., Any], mesh: ProcessMesh, inputs: Any, outputs: Any) -> None:
        self._op, self._mesh, self._inputs, self._outputs = op, mesh, inputs, outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_waiting_for_marks():
            raise MarkFound(self._mesh.root)
        if _has_counted():
            return self._op(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        mesh = self._mesh.inner
        inputs = _specs(mesh, self._inputs, [each.dim() for each in tensors])
        outputs = _specs(mesh, self._outputs, None)
        return mark_op(self._op, mesh, inputs, outputs)(*args, **kwargs)


def _specs(mesh: Mesh, given: Any, dims: list[int] | None) -> list[Any]:
    found = list(given or ())
    if dims is not None and found and len(found) != len(dims):
        raise UsageError(
            say(
                f"shard_op has marks for {len(found)} inputs, but was called with {len(dims)} tensors; as in Paddle, "
                "give one for each",
                f"shard_op 标记了 {len(found)} 个输入，而调用时有 {len(dims)} 个张量；与飞桨相同，请逐一给出",
            )
        )
    return [
        None if each is None else list(placements_of(mesh, each, dims[number] if dims else len(each)))
        for number, each in enumerate(found)
    ]


def shard_op(
    op: Callable[..., Any],
    process_mesh: ProcessMesh,
    in_shard_specs: Sequence[Any] | None = None,
    out_shard_specs: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The function with its tensors marked. A layer without specs, on a part of a mesh, is the first of a stage."""
    if not callable(op):
        raise UsageError(
            say(
                f"shard_op({op!r}): as in Paddle, give a function or a layer",
                f"shard_op({op!r})：与飞桨相同，请给出函数或层",
            )
        )
    return _MarkedOp(op, process_mesh, in_shard_specs, out_shard_specs)
