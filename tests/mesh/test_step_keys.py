"""Streams in a table: those of any step, without drawing its numbers in Python."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unisono.errors import UsageError
from unisono.mesh.random import step_keys
from unisono.mesh.random.draw import Draw
from unisono.mesh.random.philox import PhiloxStream
from unisono.mesh.random.state import RandomState
from unisono.mesh.random.step_keys import StepKeys

CPU = torch.device("cpu")


class Net(nn.Module):
    """Draws on two sites, one of which draws twice, by all kinds of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)) + self.second(x)
        return x + torch.randn_like(x) * torch.rand(x.shape, dtype=torch.float64, device=x.device)


def _state() -> tuple[RandomState, Net]:
    state, net = RandomState(seed=7), Net()
    state.name_modules(net)
    return state, net


def _drawn(state: RandomState, *, step: int, monkeypatch: pytest.MonkeyPatch, device: torch.device = CPU) -> list[Draw]:
    """The draws of a step, whose numbers are not taken."""
    made: list[Draw] = []
    draw = RandomState.draw
    with monkeypatch.context() as patch:
        patch.setattr(RandomState, "draw", lambda *args, **more: made.append(draw(*args, **more)) or made[-1])
        patch.setattr(Draw, "words", lambda draw, device, lane=0: torch.zeros(draw.shape, dtype=torch.int32))
        net = Net()
        state.name_modules(net)
        state.step = step
        with state:
            net(torch.ones(4, 8, device=device))
    return made


def test_the_table_has_the_streams_of_the_step_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = _state()
    plain = {step: _drawn(state, step=step, monkeypatch=monkeypatch) for step in (0, 1, 9)}
    keys = StepKeys(state, CPU)
    with keys.used(0):
        first = _drawn(state, step=0, monkeypatch=monkeypatch)
    assert len(first) == len(plain[0]) == 5
    rows = {lane: [draw.stream(lane).row for draw in first] for lane in (0, 1)}
    seen = set()
    for step in (0, 9, 1, 0):
        keys.write(step)
        for lane in (0, 1):
            found = [row.tolist() for row in rows[lane] if row is not None]
            assert found == [draw.stream(lane).words for draw in plain[step]]
            seen |= {tuple(words) for words in found}
    assert len(seen) == 3 * 2 * len(first)
    assert state.keys is None
    assert all(draw.stream().row is None for draw in plain[0])


def test_the_seed_is_that_of_the_state_when_a_step_is_written() -> None:
    state = RandomState(seed=1)
    keys = StepKeys(state, CPU)
    row = keys.stream(1, 0, "site", 0, 0).row
    assert row is not None
    assert row.tolist() == PhiloxStream.of(1, 0, "site", 0, 0).words
    state.seed = 2
    keys.write(3)
    assert row.tolist() == PhiloxStream.of(2, 3, "site", 0, 0).words


def test_many_calls_have_several_tables() -> None:
    state = RandomState(seed=1)
    keys = StepKeys(state, CPU)
    rows = [keys.stream(1, 0, "site", call).row for call in range(1200)]
    keys.write(5)
    for call in (0, 511, 512, 1199):
        row = rows[call]
        assert row is not None
        assert row.tolist() == PhiloxStream.of(1, 5, "site", call).words


def test_a_captured_step_allocates_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay may write to what its capture allocated, before the kernels that read it: after the host has."""
    keys = StepKeys(RandomState(seed=1), CPU)
    with keys.used(0):
        keys.stream(1, 0, "site", 0)
    held = {table.data_ptr() for table in keys._tables}
    monkeypatch.setattr(step_keys, "_is_captured", lambda device: True)
    rows = [keys.stream(1, 1, "other", call).row for call in range(512)]
    assert {row.untyped_storage().data_ptr() for row in rows if row is not None} <= held
    for call in range(1024 - 1 - 512):
        keys.stream(1, 1, "third", call)
    with pytest.raises(RuntimeError, match="512 calls more"):
        keys.stream(1, 1, "fourth")
    keys.write(2)
    assert [row.tolist() for row in rows if row is not None] == [
        PhiloxStream.of(1, 2, "other", call).words for call in range(512)
    ]


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_numbers_of_the_host_are_refused(p: float) -> None:
    state, _ = _state()
    keys = StepKeys(state, CPU)
    with state, keys.used(0), pytest.raises(UsageError, match="draws random numbers on cpu, which a replayed step"):
        F.dropout(torch.ones(8), p)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_replayed_forward_draws_the_numbers_of_its_step(dtype: torch.dtype) -> None:
    state, net = _state()
    gpu = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(64, 33, device=gpu, dtype=dtype)

    def run(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        state.step = step
        with state:
            out = net(leaf)
            out.sum().backward()
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    expected = [run(step) for step in range(6)]
    keys, graph = StepKeys(state, gpu), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(2):
            with keys.used(step):
                found = run(step)
            assert all(torch.equal(*pair) for pair in zip(found, expected[step], strict=True))
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side), keys.used(2):
        replayed = run(2)
    for step in (2, 3, 5, 4):
        keys.write(step)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(replayed, expected[step], strict=True)), step
