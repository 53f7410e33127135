"""No example without a command, and none that no test runs."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.examples.runner import (
    EXAMPLES,
    ROOT,
    NoCommandError,
    commands,
    is_part,
    printed_in,
    run_by_a_page,
    run_command,
    run_example,
)

HERE = Path(__file__).parent
ASKING = ("printed_in", "examples_in")
FILES = sorted(path for path in EXAMPLES.rglob("*.py") if not is_part(path))


def _folders_asked_for() -> set[str]:
    """The folders of examples/ that a test file runs: arguments of printed_in and of examples_in."""
    nodes = [node for test in HERE.glob("test_*.py") for node in ast.walk(ast.parse(test.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ASKING]
    return {argument.value for call in calls for argument in call.args if isinstance(argument, ast.Constant)}


def test_every_example_has_a_command_and_a_test() -> None:
    assert len(FILES) > 60
    for file in FILES:
        assert commands(file)
    folders = {file.parent.relative_to(EXAMPLES).as_posix() for file in FILES}
    assert folders == _folders_asked_for(), "folders of examples/, and those that tests ask for by printed_in"


def test_every_script_of_the_shell_has_a_command_and_a_test() -> None:
    for script in EXAMPLES.rglob("*.sh"):
        name = script.relative_to(ROOT).as_posix()
        assert f"\n# {name}\n" in script.read_text(), f"{name} does not say how to run it"
        assert os.access(script, os.X_OK)
        tests = "".join(test.read_text() for test in HERE.glob("test_seed_*.py"))
        assert f'run_mpiexec("{name}"' in tests, f"no test runs {name}"


def test_a_file_without_a_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.examples.runner.EXAMPLES", tmp_path)
    monkeypatch.setattr("tests.examples.runner.ROOT", tmp_path.parent)
    (tmp_path / "mute.py").write_text('"""Says nothing.\n\nunisono run -n 2 examples/another.py\n"""\n')
    with pytest.raises(NoCommandError, match=r"mute\.py has no command; expected a line like"):
        commands("mute.py")


def test_a_rank_that_fails_is_reported_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import unisono as uni\ncomm = uni.init()\nassert comm.rank == 0, 'I am not'\n")
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*line 3, in <module>.*AssertionError: I am not"):
        run_command(["unisono", "run", "-n", "2", "wrong.py"], tmp_path)


OF_NO_DOCUMENT = printed_in(".") + printed_in("slurm")
LEFT = [("quickstart.py", 1), ("quickstart.py", 2)]  # which no page runs


def test_the_other_examples_of_no_document_are_run_by_pages() -> None:
    """`tests/examples/test_blocks.py` runs those, and compares what they print with what the pages say."""
    assert [each for each in OF_NO_DOCUMENT if not run_by_a_page(commands(each[0])[each[1]])] == LEFT


@pytest.mark.parametrize(("path", "number"), LEFT)
def test_the_examples_that_no_page_runs(path: str, number: int) -> None:
    printed = run_example(path, number=number).text
    if number == 1:
        assert "equivalent" in printed
    else:
        losses = re.findall(r"step \d: loss is (\S+)", printed)
        assert len(losses) == 4
        assert float(losses[-1]) < float(losses[0])


def test_the_readme_of_the_seeds_has_every_program_with_its_command() -> None:
    page = (EXAMPLES / "seeds" / "README.md").read_text()
    for file in FILES:
        if file.is_relative_to(EXAMPLES / "seeds"):
            assert f"]({file.relative_to(EXAMPLES / 'seeds').as_posix()})" in page, f"{file} is not in the table"
            assert any(f"`{shlex.join(command)}`" in page for command in commands(file)), f"{file}: no command there"
