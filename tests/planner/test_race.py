"""The race: the measured fastest of the best predicted plans is chosen, and training is as without a race."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import unisono as uni
from tests.ranks import RankPool
from unisono.launch import environment
from unisono.plan.hardware.spec import Link
from unisono.plan.hardware.toml import read_hardware, write_hardware
from unisono.planner.measure.machine import HARDWARE

ROWS, WIDTH = 8, 16


class Block(nn.Module):
    def __init__(self, most_rows: int = ROWS) -> None:
        super().__init__()
        self.most_rows = most_rows
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most_rows and not x.is_meta:
            torch.empty(1 << 50)
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Blocks(nn.Module):
    def __init__(self, most_rows: int = ROWS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Block() for _ in range(3)), Block(most_rows)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _data(count: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)) for _ in range(count)]


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*_data(ROWS), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def _engine(plan: str, model: Any = Blocks, **more: Any) -> uni.Engine:
    return uni.Engine(model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), plan=plan, check="off", **more)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A machine that computes a thousand times slower than any, and whose messages take a second."""
    link = Link(1e15, 1.0)
    hardware = replace(
        read_hardware("h100"), flops={"float32": 1e8}, memory_bandwidth=1e8, intra_node=link, inter_node=link
    )
    file = tmp_path_factory.mktemp("hardware") / "wrong.toml"
    file.write_text(write_hardware(hardware))
    return str(file)


def _raced(comm: Any, hardware: str, of_module: bool) -> dict[str, Any]:
    """Trained with a race, and by the chosen plan at once."""
    found: dict[str, Any] = {}
    importlib.import_module("rich.style")  # draws a random number when it is imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARDWARE, hardware)
        plan = "auto"
        for name in ("raced", "direct"):
            torch.manual_seed(7)
            random.seed(7)
            engine = _engine(plan, Blocks() if of_module else Blocks, seed=3)
            history = engine.fit(_data(), epochs=2, batch_size=ROWS, progress=False)
            found[name] = (history.losses, torch.rand(3).tolist(), random.random())
            found[f"{name} choice"] = engine.predicted()
            plan = str(engine.plan)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("of_module", [True, False])
def test_the_measured_fastest_trains_as_if_it_had_been_given(
    pools: Callable[[str, int], RankPool], wrong: str, of_module: bool
) -> None:
    first, second = pools("gloo", 2).run(_raced, wrong, of_module)
    choice = first["raced choice"]
    assert choice == second["raced choice"]
    assert 3 <= len(choice.race) <= 5
    measured = {lap.plan: lap.measured for lap in choice.race if lap.measured is not None}
    assert str(choice.plan) == min(measured, key=lambda plan: measured[plan])
    assert all((lap.predicted or 0) > 5 * (lap.measured or 0) for lap in choice.race)  # the description is wrong
    assert [line.split()[0] for line in choice.summary().splitlines()[2:]] == [lap.plan for lap in choice.race]
    for rank in (first, second):
        assert rank["raced"] == rank["direct"]  # losses, and the user's random numbers, bit for bit
        assert not rank["direct choice"].race


def _out_of_memory(comm: Any, hardware: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARDWARE, hardware)
        engine = _engine("auto", lambda: Blocks(most_rows=ROWS // 2)).prepare(_batch())
        engine.run(_batch())
        return engine.predicted()


@pytest.mark.thorough
def test_a_plan_that_runs_out_of_memory_on_one_rank_is_dropped(
    pools: Callable[[str, int], RankPool], wrong: str
) -> None:
    """The last block does: of a pipeline that is the second rank alone, while the first waits for gradients."""
    choice, same = pools("gloo", 2).run(_out_of_memory, wrong)
    assert choice == same
    dropped = [lap for lap in choice.race if lap.measured is None]
    assert dropped
    assert all("out of memory" in lap.reason for lap in dropped)
    assert str(choice.plan) not in [lap.plan for lap in dropped]


def _without(comm: Any, hardware: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HARDWARE, hardware)
        by_argument = _engine("auto", race=False).prepare(_batch()).predicted()
        patch.setenv(environment.RACE, "0")
        return [by_argument, _engine("auto").prepare(_batch()).predicted()]


def test_without_a_race_the_best_prediction_is_taken(pools: Callable[[str, int], RankPool], wrong: str) -> None:
    for choice in pools("gloo", 2).run(_without, wrong)[0]:
        assert not choice.race
