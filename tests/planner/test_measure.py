"""This machine, measured: once, and read from the cache by the next job."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankPool
from unisono.cli import main
from unisono.plan.hardware.spec import Hardware
from unisono.plan.hardware.toml import read_hardware
from unisono.planner.measure import machine
from unisono.planner.measure.machine import CACHE, HARDWARE, forget, hardware_here

CPU = torch.device("cpu")


def _twice(comm: Any, folder: str) -> tuple[Hardware, Hardware, int, list[str], float]:
    """Measured, read, and how often it was measured; with a file that the user names, neither."""
    count = 0
    measured_by = machine.measured_by

    def counting(*given: Any) -> Hardware:
        nonlocal count
        count += 1
        return measured_by(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.delenv(HARDWARE, raising=False)
        patch.setattr(machine, "measured_by", counting)
        torch.manual_seed(5)
        drawn = torch.rand(1).item()
        torch.manual_seed(5)
        first = hardware_here(comm, CPU)
        assert torch.rand(1).item() == drawn
        again = hardware_here(comm, CPU)
        comm.barrier()
        files = sorted(each.name for each in Path(folder).iterdir())
        patch.setenv(HARDWARE, "h100")
        named = hardware_here(comm, CPU).memory
        comm.barrier()
        patch.delenv(HARDWARE)
        forget(comm, CPU)
        comm.barrier()
        assert not list(Path(folder).iterdir())
    return first, again, count, files, named


@pytest.mark.thorough
def test_a_machine_is_measured_once(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    (first, again, count, files, named), other = pools("gloo", 2).run(_twice, str(tmp_path / "cache"))
    assert (first, again) == other[:2]
    assert count == 1
    assert len(files) == 1
    assert files[0].startswith("hardware-gloo-2-")
    assert named == read_hardware("h100").memory
    assert again.flops["float32"] == pytest.approx(first.flops["float32"], rel=1e-3)
    assert 0 < again.memory_efficiency <= 1
    assert 0 < again.op_overhead < 0.1
    assert {name for name, _ in again.intra_node.measured} >= {"all_reduce", "all_gather", "send"}


def _damaged(comm: Any, folder: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr(machine, "measured_by", lambda *given: read_hardware("h100"))
        if comm.rank == 0:
            file = machine._cache_file(comm, CPU)
            file.parent.mkdir(parents=True)
            file.write_text("name = ")
        comm.barrier()
        return hardware_here(comm, CPU) == read_hardware("h100")


def test_a_file_that_cannot_be_read_is_measured_again(pools: Callable[[str, int], RankPool], tmp_path: Path) -> None:
    assert all(pools("gloo", 2).run(_damaged, str(tmp_path / "cache")))


def test_the_command_prints_its_file_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measure", lambda *given: read_hardware("h100"))
    assert main(["bench", "hardware", "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert main(["bench", "hardware"]) == 0
    assert tables == tomllib.loads(capsys.readouterr().out)
    assert tables["machine"]["devices_per_node"] == 8


def test_the_command_names_the_file_that_it_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "measure", lambda *given: read_hardware("h100"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "hardware", "-o", "here.toml"]) == 0
    assert capsys.readouterr().out == "wrote here.toml\n"
    assert read_hardware("here.toml").memory == read_hardware("h100").memory
    assert main(["bench", "hardware", "--json", "--quiet", "-o", "here.json"]) == 0
    assert json.loads(Path("here.json").read_text()) == tomllib.loads(Path("here.toml").read_text())
    assert capsys.readouterr() == ("", "")
    for words, reason in (["--quiet"], "no file is named; add -o"), (["-o", "no/x"], "the folder does not exist"):
        assert main(["bench", "hardware", *words]) == 2
        assert reason in capsys.readouterr().err
