"""Document 002: every way to train its network gives what one device gives, and what is said of the ways is true."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.runner import commands, examples_in, run_example
from tools.commands import is_plain, job_of
from unisono import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "seeds" / "002_paddle"
FILES = examples_in("seeds/002_paddle")
PROGRAMS = [Path(file).stem for file in FILES if Path(file).stem not in ("table", "changes")]


def _module(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def _rows(printed: str) -> list[list[str]]:
    """The cells of the table, without its titles and its last line."""
    return [re.split(r"  +", line.strip()) for line in printed.splitlines()[1:-1]]


def _deviation(cell: str) -> float:
    return 0.0 if cell == "none" else float(cell)


@pytest.mark.thorough
def test_the_table() -> None:
    """By its own command, two batches instead of four: every program's training, on ranks, against one device."""
    ways = _module("table").WAYS
    printed = run_example("seeds/002_paddle/table.py", "--batches", "2").text
    rows = _rows(printed)
    assert [(row[0], row[1], row[3]) for row in rows] == [(way.section, way.title, str(way.ranks)) for way in ways]
    assert len({row[4] for row in rows}) == 1  # the losses
    assert len(rows[0][4].split()) == 2
    assert max(map(_deviation, [cell for row in rows for cell in row[5:]])) < 1e-12
    assert re.fullmatch(r"worst deviation from one device: \de-1\d", printed.splitlines()[-1])
    assert {way.file for way in ways} == set(PROGRAMS)  # no program that the table leaves out


def test_what_the_table_compares_with_is_trained() -> None:
    size = _module("simple_net").Size(inner=16, batches=2, batch_size=4)
    trained = _module("single").train(size).parameters
    torch.manual_seed(0)
    initial = _module("simple_net").SimpleNet(size).state_dict()
    for name, value in trained.items():
        step = float((value - initial[name]).abs().max())
        assert 0 < step < 0.2, (name, step)


@pytest.mark.thorough
def test_the_table_at_the_documents_width() -> None:
    """`--full`, of which one way and one batch have to do here."""
    ran = run_example("seeds/002_paddle/table.py", "--ways", "manual_mp", "--batches", "1", number=1)
    (row,) = _rows(ran.text)
    assert row[:4] == ["2.2.4.1.3", "manual MP", "2 ranks share linear1 and linear2", "2"]
    assert max(map(_deviation, row[5:])) < 1e-5
    with pytest.raises(AssertionError, match=r"(?s)ended with 2:.*no way has 'manually' in its program's name"):
        run_example("seeds/002_paddle/table.py", "--ways", "manually")


def test_every_program_says_its_section_and_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command starts the program and the ranks that the table has for it, and nothing else."""
    monkeypatch.chdir(ROOT)
    sections = {way.file: way for way in _module("table").WAYS}
    for name in PROGRAMS:
        way = sections[name]
        file = f"examples/seeds/002_paddle/{name}.py"
        assert (ROOT / file).read_text().startswith(f'"""Section {way.section}: ')
        (words,) = commands(file.removeprefix("examples/"))
        if way.ranks == 1:
            assert words == ["python", file]
        else:
            job = job_of(words)
            assert is_plain(job)
            assert (job.program.target, job.program.args, job.world, job.backend) == (file, (), way.ranks, None)


@pytest.mark.thorough
def test_programs_run_by_their_commands() -> None:
    """Those of other sections differ from these in `train` alone, which the table runs."""
    alone = run_example("seeds/002_paddle/single.py", "--batches", "2").text
    losses = [line for line in alone.splitlines() if line.startswith("[batch")]
    assert len(losses) == 2
    for name, more, literally in (("static_group_sharded", ["--stage", "1"], False), ("manual_mp", [], True)):
        printed = run_example(f"seeds/002_paddle/{name}.py", "--batches", "2", *more, literally=literally).ranks[0]
        assert [line for line in printed.splitlines() if line.startswith("[batch")] == losses


def test_the_summary_tables_are_those_of_the_programs() -> None:
    changes = _module("changes")
    assert run_example("seeds/002_paddle/changes.py").text.strip() == changes.page().strip()
    stale = "docs/seeds/002.md is stale; run python examples/seeds/002_paddle/changes.py --write"
    assert changes.PAGE.read_text() == changes.page(), stale
    assert changes.CHINESE_PAGE.read_text() == changes.chinese_page(), stale
    written = run_example("seeds/002_paddle/changes.py", number=1).text
    assert written == "docs/seeds/002.md is up to date\ndocs/zh/seeds/002.md is up to date\n"
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
    """A program whose forward or loop differs is distinguished, so the tables cannot say what is not so."""
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
