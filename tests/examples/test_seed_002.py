"""Document 002: every way to train its network gives what one device gives, and what is said of the ways is true."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.runner import run_example
from tests.ranks import RankPool
from unisono import cli
from unisono.comm.communicator import Communicator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "seeds" / "002_paddle"
FILES = (
    "seeds/002_paddle/changes.py",
    "seeds/002_paddle/engine_auto.py",
    "seeds/002_paddle/engine_dp.py",
    "seeds/002_paddle/engine_group_sharded.py",
    "seeds/002_paddle/engine_mp.py",
    "seeds/002_paddle/engine_pp.py",
    "seeds/002_paddle/manual_dp.py",
    "seeds/002_paddle/manual_group_sharded.py",
    "seeds/002_paddle/manual_mp.py",
    "seeds/002_paddle/manual_pp.py",
    "seeds/002_paddle/semi_dp.py",
    "seeds/002_paddle/semi_group_sharded.py",
    "seeds/002_paddle/semi_mp.py",
    "seeds/002_paddle/semi_pp.py",
    "seeds/002_paddle/single.py",
    "seeds/002_paddle/single_static.py",
    "seeds/002_paddle/static_dp.py",
    "seeds/002_paddle/static_group_sharded.py",
    "seeds/002_paddle/static_mp.py",
    "seeds/002_paddle/static_pp.py",
    "seeds/002_paddle/table.py",
)
PROGRAMS = [Path(file).stem for file in FILES if Path(file).stem not in ("table", "changes")]

Pools = Callable[[str, int], RankPool]


def _module(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def _rows(comm: Communicator) -> Any:
    size = _module("simple_net").Size(inner=48, batches=3, batch_size=8, dtype=torch.float64)
    initial = _module("simple_net").SimpleNet(size).linear2.bias
    trained = _module("single").train(size)
    assert not torch.allclose(trained.parameters["linear2.bias"], initial), "nothing was trained"
    return _module("table").rows(size, comm.size)


def test_the_table(pools: Pools) -> None:
    table = _module("table")
    found = [row for ranks in (1, 2) for row in pools("gloo", ranks).run(_rows)[0]]
    assert [row.way for row in found] == [way for way in table.WAYS if way.ranks == 1] + [
        way for way in table.WAYS if way.ranks == 2
    ]
    for row in found:
        assert row.loss < 1e-12, row
        assert row.parameters < 1e-12, row
    printed = table.text(found)
    assert "worst deviation from one device: " in printed
    assert {way.file for way in table.WAYS} == set(PROGRAMS)  # no program that the table leaves out
    assert {path.name for path in FOLDER.glob("*.py")} == {Path(file).name for file in FILES} | {"simple_net.py"}


def test_every_program_says_its_section_and_its_command() -> None:
    sections = {way.file: way for way in _module("table").WAYS}
    for name in PROGRAMS:
        opening = (FOLDER / f"{name}.py").read_text()
        way = sections[name]
        start = "python" if way.ranks == 1 else f"unisono run -n {way.ranks}"
        assert opening.startswith(f'"""Section {way.section}: ')
        assert f"\n{start} examples/seeds/002_paddle/{name}.py\n" in opening


def test_programs_run_by_their_commands() -> None:
    """Those of other sections differ from these in `train` alone, which the table runs."""
    alone = run_example("seeds/002_paddle/single.py", "--batches", "2").text
    losses = [line for line in alone.splitlines() if line.startswith("[batch")]
    assert len(losses) == 2
    for name, more in (("static_group_sharded", ["--stage", "1"]), ("manual_mp", [])):
        printed = run_example(f"seeds/002_paddle/{name}.py", "--batches", "2", *more).ranks[0]
        assert [line for line in printed.splitlines() if line.startswith("[batch")] == losses


def test_the_summary_tables_are_those_of_the_programs() -> None:
    changes = _module("changes")
    stale = "docs/seeds/002.md is stale; run python examples/seeds/002_paddle/changes.py --write"
    assert changes.PAGE.read_text() == changes.page(), stale
    assert {row.file for rows in changes.TABLES.values() for row in rows} == set(PROGRAMS)


def test_what_the_summary_tables_say() -> None:
    changes = _module("changes")
    cells = {name: changes.cells(name) for name in PROGRAMS}
    untouched = [name for name in PROGRAMS if cells[name][:2] == ("no", "no")]
    assert set(PROGRAMS) - set(untouched) == {"manual_mp", "manual_pp"}
    assert cells["single"] == ("no", "no", "no", "no", "no", "ordinary")
    assert cells["manual_mp"] == ("**yes**", "no", "`uni.init`", "no", "no", "ordinary")
    assert cells["semi_mp"] == ("no", "no", "mesh, 3 marks", "`uni.apply_marks`", "no", "`trainer.step(batch)`")
    assert cells["static_pp"][2:] == ("mesh, 2 marks, microbatches", "`uni.to_static`", "no", "`program(batch)`")
    assert changes.changed_lines("single") == (0, 0)


def test_a_change_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program whose forward or loop differs is told apart, so the tables cannot say what is not so."""
    changes = _module("changes")
    for name in ("single", "simple_net", "manual_mp"):
        (tmp_path / f"{name}.py").write_text((FOLDER / f"{name}.py").read_text())
    mended = (tmp_path / "manual_mp.py").read_text().replace("return self.relu(x)", "return self.relu(x) * 2")
    (tmp_path / "manual_mp.py").write_text(mended.replace("optimizer.zero_grad()", "optimizer.zero_grad(True)"))
    monkeypatch.setattr(changes, "HERE", tmp_path)
    assert changes.cells("manual_mp")[1] == "**yes**"
    assert changes.cells("manual_mp")[5] != "ordinary"


def test_the_memory_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits of section 2.2.3.5, printed by the command that the page shows."""
    monkeypatch.chdir(ROOT)
    command = ["plan", "examples/gpt.py:gpt3_with_dropout", "--devices", "8", "--activations"]
    assert cli.main([*command, "--hardware", "examples/seeds/002_paddle/a100_2022.toml"]) == 0
    printed = capsys.readouterr().out
    assert printed == _module("changes").MEMORY
    cells = [line.split() for line in printed.splitlines()[2:7]]
    layers = [next(int(a) for a, b in itertools.pairwise(row) if b == "MiB") for row in cells]
    totals = [next(float(a) for a, b in itertools.pairwise(row) if b == "GiB") for row in cells]
    assert layers == [2736, 552, 342, 102, 48]
    assert totals == [256.5, 51.75, 32.06, 9.56, 4.5]  # of 32.0625 and 9.5625
    assert "2.7%" in printed
