"""`with alone():` makes this rank a world of one, for a computation that must not depend on how many ranks run.

The reference of `verify` is what one device computes. Where it is computed by a process that is one of many ranks, a
model, a loss or an optimizer that reads the rank or the world size would see the job's. In the block it sees

- in torch.distributed, as in a plain script, no default group: `is_initialized()` is False; where it is not asked, rank
  0 of 1, and collectives that return what the rank puts in;
- in unisono, a process that has not joined: `uni.rank()` is 0 and `uni.world_size()` is 1;
- in the environment, no variable of a launcher.

Other threads see the same. The other ranks do not know of it, and wait in their next collective.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from unisono.comm.rendezvous import world
from unisono.torch_patches import patched

_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the block this process is no rank of any job. May be nested, and entered where no world was joined."""
    with _without_launcher_variables(), _without_unisono_world(), _in_a_group_of_one():
        yield


@contextlib.contextmanager
def _without_launcher_variables() -> Iterator[None]:
    names = [name for name in os.environ if name in _TORCHRUN or name.startswith(_PREFIXES)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextlib.contextmanager
def _without_unisono_world() -> Iterator[None]:
    joined, watchdog = world._world, world._watchdog
    calls = watchdog.torch_calls if watchdog is not None else None
    world._world = None
    if calls is not None:
        calls.unwrap()  # they would be compared with those of the other ranks
    try:
        yield
    finally:
        world._world = joined
        if calls is not None:
            calls.wrap()


@contextlib.contextmanager
def _in_a_group_of_one() -> Iterator[None]:
    state = distributed_c10d._world
    joined = state.default_pg
    group = _group_of_one()
    state.default_pg = group
    try:
        with patched(dist, "is_initialized", lambda: False, why="one device has no process group"):
            yield
    finally:
        state.default_pg = joined
        for known in (state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config):
            known.pop(group, None)


def _group_of_one() -> dist.ProcessGroup:
    """With torch's "fake" backend, which sends nothing: of one member that is right. It opens no sockets or threads."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore  # registers the backend

    store = FakeStore()
    group = dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    backend = FakeProcessGroup._create_internal(0, 1)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    state = distributed_c10d._world
    state.pg_map[group] = (dist.Backend.FAKE, store)
    state.pg_names[group] = dist.GroupName("unisono/alone")
    state.pg_group_ranks[group] = {0: 0}
    state.pg_backend_config[group] = dist.Backend.FAKE
    return group
