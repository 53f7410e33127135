"""No example without a command, and none that no test runs."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

from tests.examples.runner import (
    EXAMPLES,
    ROOT,
    NoCommandError,
    commands,
    examples_in,
    is_part,
    run_command,
    run_example,
)

FILES = sorted(path for path in EXAMPLES.rglob("*.py") if not is_part(path))


def _words_of(test: Path) -> set[str]:
    """Every string written in a test file, and the examples of each folder that it asks for by name."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value.partition(":")[0].removeprefix("examples/"))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "examples_in":
            folders = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            words |= {each for folder in folders for each in examples_in(str(folder))}
    return words


def _is_named(example: Path, words: set[str]) -> bool:
    """By its path in examples/, or by its folder's and its own name."""
    path = example.relative_to(EXAMPLES)
    return path.as_posix() in words or (
        any(word.endswith(path.parent.name) for word in words if path.parent.name)
        and bool({path.name, path.stem} & words)
    )


def test_every_example_has_a_command_and_a_test() -> None:
    tests = [_words_of(test) for test in sorted((ROOT / "tests").rglob("*.py"))]
    assert FILES
    for file in FILES:
        assert commands(file)
        assert any(_is_named(file, words) for words in tests), f"no test names {file}; add it to one in tests/examples/"


def test_a_file_without_a_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.examples.runner.EXAMPLES", tmp_path)
    monkeypatch.setattr("tests.examples.runner.ROOT", tmp_path.parent)
    (tmp_path / "mute.py").write_text('"""Says nothing.\n\nunisono run -n 2 examples/another.py\n"""\n')
    with pytest.raises(NoCommandError, match=r"mute\.py has no command; expected a line like"):
        commands("mute.py")


def test_a_rank_that_fails_is_told_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import unisono as uni\ncomm = uni.init()\nassert comm.rank == 0, 'I am not'\n")
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*line 3, in <module>.*AssertionError: I am not"):
        run_command(["unisono", "run", "-n", "2", "wrong.py"], tmp_path)


def test_the_gpt_is_proved() -> None:
    assert "equivalent" in run_example("gpt.py").text


def test_the_quickstart_learns() -> None:
    printed = run_example("quickstart.py", number=2).ranks[0].splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in printed if line.startswith("step")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_demo_trains() -> None:
    ran = run_example("demo.py", "--steps", "4")
    assert "what it has learned of Python" in ran.ranks[0]


def test_the_readme_of_the_seeds_has_every_program_with_its_command() -> None:
    page = (EXAMPLES / "seeds" / "README.md").read_text()
    for file in FILES:
        if file.is_relative_to(EXAMPLES / "seeds"):
            assert f"]({file.relative_to(EXAMPLES / 'seeds').as_posix()})" in page, f"{file} is not in the table"
            assert any(f"`{shlex.join(command)}`" in page for command in commands(file)), f"{file}: no command there"
