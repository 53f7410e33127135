"""A simulated rank runs every operation of a Communicator at once, and records it as real ranks do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool
from unisono.comm import traffic
from unisono.comm.communicator import Communicator
from unisono.comm.rendezvous import world


def test_messages_are_recorded_with_their_peers() -> None:
    records: list[traffic.CommRecord] = []
    x, y = torch.ones(3), torch.full((3,), torch.nan)
    with world.simulated(1, 4) as comm, traffic.counted(records.append) as seen:
        pair = comm.subgroup([1, 3])
        pair.send(x, 1)
        pair.irecv(y, 1).wait()
        comm.exchange([(x, 2)], [(y, 0)])
        comm.exchange([(x, 2)], [(y, 0)], async_op=True).wait()
        comm.recv(y)
    shown = [(record.op, record.ranks) for record in records]
    both = [("send", (2,)), ("recv", (0,))]
    assert shown == [("send", (3,)), ("recv", (3,)), *both, *both, ("recv", (2,))]
    assert seen.calls["send"] == 3
    assert seen.sent == 3 * x.nbytes
    assert y.isfinite().all()


def test_collectives_take_the_others_to_have_the_same() -> None:
    with world.simulated(2, 4) as comm:
        assert comm.is_simulated
        assert comm.split([[0, 1], [2, 3]]).is_simulated  # type: ignore[union-attr]
        x = torch.arange(4.0)
        assert comm.all_reduce(x.clone()).tolist() == [0, 4, 8, 12]
        assert [each.tolist() for each in comm.all_gather(x)] == [x.tolist()] * 4
        assert comm.reduce_scatter(x).tolist() == [2]
        assert comm.all_to_all(x).tolist() == [2] * 4
        assert comm.all_to_all(x, [0, 1, 2, 1]).shape == (8,)
        assert comm.gather(x, root=2, out=torch.empty(4, 4)).tolist() == [x.tolist()] * 4
        assert comm.scatter(torch.empty(4), torch.eye(4), root=2).tolist() == [0, 0, 1, 0]
        assert comm.scatter(torch.empty(4)).isfinite().all()
        assert comm.all_gather_object("x") == ["x"] * 4
        comm.barrier(async_op=True).wait()


def test_meta_tensors_take_part() -> None:
    with world.simulated(0, 2) as comm:
        x = torch.ones(4, 2, device="meta")
        assert comm.all_reduce(x) is x
        assert comm.reduce_scatter(x, async_op=True).wait().shape == (2, 2)
        assert comm.all_gather_into(torch.empty(8, 2, device="meta"), x).shape == (8, 2)
        [came] = comm.exchange([(x, 1)], [(torch.empty_like(x), 1)])
        assert came.is_meta


def _beside_a_joined_world(comm: Communicator) -> list[float]:
    both = comm.subgroup([0, 1])
    with world.simulated(3, 4) as simulated:
        assert (simulated.rank, dist.get_rank(), dist.get_world_size()) == (3, 3, 4)
        assert simulated.subgroup([1, 3]).all_reduce(torch.ones(1)).item() == 2
    with pytest.raises(RuntimeError, match="inside"), world.simulated(0, 2):
        raise RuntimeError("inside")
    assert world.world() is comm
    assert dist.get_world_size() == 2
    x = torch.full((1,), comm.rank + 1.0)
    return [each.all_reduce(x.clone()).item() for each in (comm, both, comm.subgroup([0, 1]))]


def test_a_joined_world_is_set_aside(pools: Callable[[str, int], RankPool]) -> None:
    assert pools("gloo", 2).run(_beside_a_joined_world) == [[3.0] * 3] * 2
