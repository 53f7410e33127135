"""The mesh: ranks in a grid whose axes have names.

    mesh = Mesh((2, 4), ("dp", "tp"))       # ranks 0..7; tp runs fastest
    mesh.size("tp"), mesh.index("tp")       # 4, and this rank's index on that axis
    mesh.comm("tp")                         # the Communicator of the ranks that differ from this one in tp only
    mesh.comm("dp", "tp")                   # ... in dp and tp: the two axes as one group
    mesh["tp"], mesh["dp", "tp"]            # the sub-mesh of those axes that this rank is in
    mesh.at(pp=1)                           # the ranks at that index of an axis, whichever rank asks

A mesh is a description until a group is asked for: a plan for 1,024 ranks can be made where one process runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world as worlds
from unisono.errors import UsageError

# The groups of a world by their ranks, so that meshes over the same ranks share them.
_groups: weakref.WeakKeyDictionary[Communicator, dict[tuple[int, ...], Communicator]] = weakref.WeakKeyDictionary()


class Mesh:
    """A grid of ranks with one name an axis. Equal meshes (shape, names, ranks) are interchangeable.

    Args:
        shape: Sizes of the axes.
        names: Of the axes.
        ranks: The world's ranks in the grid, of that shape or flat; default: all of the world in order.
    """

    def __init__(self, shape: Sequence[int], names: Sequence[str], ranks: Any = None) -> None:
        sizes, axis_names = _checked(shape, names)
        if ranks is None:
            _require_fit(sizes, axis_names)
            ranks = np.arange(math.prod(sizes))
        self._set(axis_names, _grid(ranks, sizes))

    @classmethod
    def describe(cls, shape: Sequence[int], names: Sequence[str], ranks: Any = None) -> Mesh:
        """A mesh of any size, whether or not that many ranks are running: to plan with, not to communicate over.

        ranks: in order, if they are not the first ones."""
        sizes, axis_names = _checked(shape, names)
        grid = np.arange(math.prod(sizes)) if ranks is None else np.asarray(ranks)
        return cls._made(axis_names, grid.reshape(sizes))

    @classmethod
    def of(cls, device_mesh: DeviceMesh) -> Mesh:
        """The mesh of a torch DeviceMesh, for tensors that were made with torch's own functions."""
        grid = device_mesh.mesh.numpy()
        names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(grid.ndim))
        mesh = cls._made(_checked(grid.shape, names)[1], grid)
        mesh._device_mesh = weakref.ref(worlds.world()), device_mesh
        return mesh

    @classmethod
    def _made(cls, names: tuple[str, ...], grid: np.ndarray, root: Mesh | None = None) -> Mesh:
        mesh = cls.__new__(cls)
        mesh._set(names, grid, root)
        return mesh

    def _set(self, names: tuple[str, ...], grid: np.ndarray, root: Mesh | None = None) -> None:
        grid = np.array(grid, dtype=np.int64)
        grid.flags.writeable = False
        self.names = names
        self.ranks = grid
        self.shape: tuple[int, ...] = tuple(grid.shape)
        self._root = root
        self._device_mesh: tuple[weakref.ref[Communicator], DeviceMesh] | None = None
        self._key = (self.shape, names, grid.tobytes())
        self._coordinates: dict[int, tuple[int, ...]] = {}  # a step asks hundreds of times

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))
        return f"Mesh({axes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    # ---- the grid ------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.names)

    def size(self, *names: str) -> int:
        """How many ranks are along these axes together; with no name, in the full mesh."""
        return math.prod(self.shape[self.axis(name)] for name in names or self.names)

    def axis(self, name: str) -> int:
        """The number of the axis of that name."""
        if name not in self.names:
            raise UsageError(f"this mesh has no axis {name!r}; its axes are {', '.join(self.names)}")
        return self.names.index(name)

    def __contains__(self, rank: int) -> bool:
        return bool((self.ranks == rank).any())

    def coordinate(self, rank: int | None = None) -> tuple[int, ...]:
        """The coordinate of a rank of the world (by default this one)."""
        rank = worlds.rank() if rank is None else rank
        if rank not in self._coordinates:
            indices = np.argwhere(self.ranks == rank)
            if not len(indices):
                raise UsageError(f"rank {rank} is not in {self}, whose ranks are {self._shown()}")
            self._coordinates[rank] = tuple(int(index) for index in indices[0])
        return self._coordinates[rank]

    def index(self, *names: str, rank: int | None = None) -> int:
        """The index of a rank (by default this one) along these axes, the last one running fastest."""
        coordinate = self.coordinate(rank)
        index = 0
        for name in names or self.names:
            axis = self.axis(name)
            index = index * self.shape[axis] + coordinate[axis]
        return index

    def rank_at(self, **indices: int) -> int:
        """The rank at a coordinate: mesh.rank_at(dp=0, tp=3). Axes that are not named stay at this rank's own index."""
        coordinate = list(self.coordinate()) if len(indices) < self.ndim else [0] * self.ndim
        for name, index in indices.items():
            axis = self.axis(name)
            if not 0 <= index < self.shape[axis]:
                raise UsageError(f"{name}={index} is off the mesh: expected 0 to {self.shape[axis] - 1}")
            coordinate[axis] = index
        return int(self.ranks[tuple(coordinate)])

    def along(self, *names: str, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from `rank` (by default this one) in these axes only, the last one running fastest."""
        return tuple(int(member) for member in self._slab(names, rank).reshape(-1))

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """All groups that these axes split the mesh into, each as `along` gives it."""
        axes = self._axes(names)
        rest = [axis for axis in range(self.ndim) if axis not in axes]
        rows = self.ranks.transpose(*rest, *axes).reshape(-1, self.size(*names))
        return [tuple(int(rank) for rank in row) for row in rows]

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """The sub-mesh of these axes that this rank is in."""
        names = (names,) if isinstance(names, str) else tuple(names)
        return Mesh._made(names, self._slab(names, None), self._root or self)

    def at(self, **indices: int) -> Mesh:
        """The ranks at these indices, as a mesh of the same axes, of which those named have one rank: mesh.at(pp=0)."""
        selected: list[Any] = [slice(None)] * self.ndim
        for name, index in indices.items():
            axis = self.axis(name)
            if not 0 <= index < self.shape[axis]:
                raise UsageError(f"{name}={index} is off the mesh: expected 0 to {self.shape[axis] - 1}")
            selected[axis] = slice(index, index + 1)
        return Mesh._made(self.names, self.ranks[tuple(selected)])

    def flatten(self, names: Sequence[str], name: str | None = None) -> Mesh:
        """The mesh with these axes made one, instead of the first of them; called a_b unless named."""
        axes = self._axes(tuple(names))
        merged = name or "_".join(names)
        order = [axis for axis in range(self.ndim) if axis not in axes]
        index = sum(axis < axes[0] for axis in order)
        new_names = [self.names[axis] for axis in order]
        new_names.insert(index, merged)
        shape = [self.shape[axis] for axis in order]
        shape.insert(index, self.size(*names))
        order[index:index] = axes
        return Mesh(shape, new_names, self.ranks.transpose(order))

    def _axes(self, names: tuple[str, ...]) -> tuple[int, ...]:
        axes = tuple(self.axis(name) for name in names or self.names)
        if len(set(axes)) != len(axes):
            raise UsageError(f"axes {', '.join(names)} of {self}: an axis is named twice")
        return axes

    def _slab(self, names: tuple[str, ...], rank: int | None) -> np.ndarray:
        axes = self._axes(names)
        coordinate = self.coordinate(rank)
        selected: Any = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(self.ndim))
        kept = sorted(axes)
        return self.ranks[selected].transpose([kept.index(axis) for axis in axes])

    def _shown(self) -> str:
        flat = self.ranks.reshape(-1).tolist()
        return ", ".join(map(str, flat)) if len(flat) <= 16 else f"{flat[0]} to {flat[-1]} ({len(flat)} ranks)"

    # ---- the groups ----------------------------------------------------------------------------------------------

    def comm(self, *names: str) -> Communicator:
        """The communicator of the ranks along these axes (with no name: of the full mesh).

        Its ranks are ordered as in the world; along a single axis that is the order of the axis. The group is made
        at the first call, in which all its ranks must take part.
        """
        return _group(self.along(*names))

    def connect(self) -> Mesh:
        """Make the groups of all axes now. All ranks of the mesh call it; returns the mesh."""
        for name in self.names:
            self.comm(name)
        return self

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same grid for torch's own functions (DTensor, fully_shard, ...), over the same groups.

        Sub-meshes give slices of their parent's, as torch wants them. The first use makes the parent's groups, so all
        ranks of the parent take part; `connect` beforehand makes that harmless.
        """
        world = worlds.world()
        if self._device_mesh is None or self._device_mesh[0]() is not world:
            self._device_mesh = weakref.ref(world), self._new_device_mesh(world)
        return self._device_mesh[1]

    def _new_device_mesh(self, world: Communicator) -> DeviceMesh:
        parent = self._root
        if parent is not None and list(self.names) == [name for name in parent.names if name in self.names]:
            return parent.device_mesh[self.names]
        groups = [self.comm(name).group for name in self.names]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], world.device.type, mesh_dim_names=self.names)
        grid = torch.tensor(self.ranks.tolist(), dtype=torch.int)
        return DeviceMesh.from_group(groups, world.device.type, mesh=grid, mesh_dim_names=self.names)


def _group(ranks: tuple[int, ...]) -> Communicator:
    world = worlds.world()
    if max(ranks) >= world.size:
        raise UsageError(f"a group of ranks up to {max(ranks)} was asked for, but only {world.size} ranks are running")
    members = tuple(sorted(ranks))
    if members == world.ranks:
        return world
    known = _groups.setdefault(world, {})
    if members not in known:
        known[members] = world.subgroup(members)
    return known[members]


def _checked(shape: Sequence[int], names: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if isinstance(names, str):
        names = (names,)
    sizes, axis_names = tuple(shape), tuple(names)
    if len(sizes) != len(axis_names) or not sizes:
        raise UsageError(f"mesh shape {sizes} has {len(sizes)} axes and names {axis_names}; expected one name an axis")
    if any(not isinstance(size, int | np.integer) or size < 1 for size in sizes):
        raise UsageError(f"mesh shape {sizes}: expected whole numbers of at least 1")
    if any(not isinstance(name, str) or not name.isidentifier() for name in axis_names):
        raise UsageError(f"mesh axis names {axis_names}: expected words such as dp or tp")
    if len(set(axis_names)) != len(axis_names):
        raise UsageError(f"mesh axis names {axis_names}: a name is used twice")
    return tuple(int(size) for size in sizes), axis_names


def _grid(ranks: Any, sizes: tuple[int, ...]) -> np.ndarray:
    grid = np.array(ranks)
    if grid.size != math.prod(sizes) or grid.dtype.kind not in "iu":
        raise UsageError(f"a mesh of shape {sizes} needs {math.prod(sizes)} ranks, but got {grid.tolist()}")
    grid = grid.reshape(sizes)
    if grid.min() < 0 or len(np.unique(grid)) != grid.size:
        raise UsageError(f"mesh ranks {grid.tolist()}: expected different ranks of at least 0")
    for axis in range(grid.ndim):
        # Groups order their ranks as the world does: an axis in another order would disagree with its communicator.
        if (np.diff(grid, axis=axis) < 0).any():
            raise UsageError(f"mesh ranks {grid.tolist()} do not rise along axis {axis}; reorder them so that they do")
    return grid


def _require_fit(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    """The mesh must hold every rank that is running; while none is, any mesh is a description."""
    if not worlds.is_initialized() or math.prod(sizes) == worlds.world_size():
        return
    running, needed = worlds.world_size(), math.prod(sizes)
    fits = []
    for axis, name in enumerate(names):
        rest = needed // sizes[axis]
        if running % rest == 0:
            fits.append(f"{name}={running // rest}")
    shown = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    advice = f"use {' or '.join(fits)}, or start {needed}" if fits else f"start {needed}"
    raise UsageError(
        f"mesh {shown} needs {needed} ranks, but {running} are running; {advice}, "
        "or pass ranks= for a mesh over some of them"
    )
