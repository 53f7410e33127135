"""ZeRO in a program: what a rank holds, what is gathered when, and that states go from stage to stage. That results are
those of one device is proved in test_program.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.graph.program.batch import tensors_in
from unisono.graph.program.executable import Executable
from unisono.graph.program.zero import GatherInBackward

Pools = Callable[[str, int], RankPool]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator).double(), torch.randint(3, (4,), generator=generator)


def _program(stage: int, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> uni.Program:
    made: uni.Program = uni.to_static(
        _net,
        example=_batch(0),
        mesh=uni.Mesh((2,), ("dp",)),
        loss=F.cross_entropy,
        optimizer=lambda parameters: optimizer(parameters, lr=0.01),
        clip=1.0,
        zero=stage,
    )
    return made


def hold(comm: Communicator) -> None:
    for stage in (0, 1, 2, 3):
        program = _program(stage)
        program(_batch(1))
        weight = dict(program.named_parameters())["0.weight"]
        state = [values["exp_avg"] for values in program.optimizer.state.values()]
        assert weight.shape == ((12, 8) if stage < 2 else (6, 8))
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        assert state[0].shape == ((12, 8) if stage == 0 else (6, 8))
        uncut = dict(program.named_parameters())["4.weight"]  # 3 rows: the first dim that two ranks can cut is the next
        assert uncut.shape == ((3, 6) if stage < 2 else (3, 3))
        assert state[5].shape == (3,)  # its bias cannot be sharded
        text = str(program)
        assert ("all_gather" in text, "reduce_scatter" in text) == ((stage > 1,) * 2)


def go_on(comm: Communicator) -> None:
    """Each stage goes on where another was, and all come to the same."""
    expected = _program(0)
    for step in range(4):
        loss = expected(_batch(step))
    program = _program(1)
    for step, stage in enumerate((1, 3, 2, 1)):
        following = _program(stage)
        following.load_state_dict(program.state_dict())
        program = following
        found = program(_batch(step))
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    state, full = program.state_dict(), expected.state_dict()
    torch.testing.assert_close(state["model"], full["model"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state["optimizer"]["state"], full["optimizer"]["state"], rtol=1e-10, atol=1e-12)


def full_weights_kept(comm: Communicator, stage: int) -> int:
    """How many gathered parameters are still full in memory between forward and backward."""
    program = _program(stage)
    noted = GatherInBackward() if program._again is None else program._again
    if program._again is None:
        program._forms.clear()
        form = Executable(program.lowered, program.shards, program.random, torch.device("cpu"), noted)
        loss = form(tensors_in(_batch(0)))[0][0]  # noted but not entered: autograd keeps what it likes
    else:
        with noted:
            loss = program._form("train", _batch(0))[0](tensors_in(_batch(0)))[0][0]
    assert len(noted._gathered) == 5  # all but the last bias, which cannot be sharded
    alive = sum(not reference.expired() for reference, _, _ in noted._gathered.values())
    assert loss is not None
    loss.backward()
    return alive


def refused(comm: Communicator) -> list[str]:
    reported = []
    for attempt in (
        lambda: _program(4),
        lambda: uni.to_static(
            _net,
            example=_batch(0),
            mesh=uni.Mesh((2,), ("mp",)),
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            zero=1,
        ),
        lambda: _program(1, torch.optim.Adafactor),
    ):
        with pytest.raises(UsageError) as caught:
            attempt()
        reported.append(str(caught.value))
    return reported


def test_what_a_rank_holds(pools: Pools) -> None:
    pools("gloo", 2).run(hold)


def test_states_go_from_stage_to_stage(pools: Pools) -> None:
    pools("gloo", 2).run(go_on)


def test_stage_3_lets_go_of_full_weights_until_the_backward(pools: Pools) -> None:
    assert (
        pools("gloo", 2).run(full_weights_kept, 2)[0] == 2
    )  # of the inner layers: the first has no gradient to pass on
    assert pools("gloo", 2).run(full_weights_kept, 3)[0] == 0


def test_what_is_refused(pools: Pools) -> None:
    stage, axis, optimizer = pools("gloo", 2).run(refused)[0]
    assert stage == "zero=4; expected one of 0, 1, 2, 3"
    assert "shards along the axis dp, which Mesh(mp=2) does not have" in axis
    assert "Adafactor uses a parameter as one tensor, but 0.weight is sharded" in optimizer
