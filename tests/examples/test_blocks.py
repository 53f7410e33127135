"""Every code block of README and docs runs, and prints what its page says it prints. `tools/blocks.py` has the rules.

They run on the stage of all examples, so that torch is imported once; each page is a test of its own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.examples.runner import run_by_a_page, stage
from tools.blocks import ROOT, Block, Runs, blocks_of, commands_of, matches, pages
from tools.commands import job_of

PAGES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_the_page_says(page: str) -> None:
    fault = stage().page(ROOT / page)["fault"]
    assert not fault, fault


def words_of(command: str) -> list[str]:
    return shlex.split(command.removeprefix(".venv/bin/"), comments=True)


def shell_of(block: Block) -> list[str]:
    return [] if block.language == "python" else commands_of(block)


SPARED = [(page, block) for page in PAGES for block in blocks_of(ROOT / page) if "not run" in block.notes]


def test_what_is_not_run_says_which_test_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for page, block in SPARED:
            print(f"\n{page}:{block.first} is not run: {block.notes['not run']}", end="")
    for page, block in SPARED:
        named = re.findall(r"(?:tests/[\w/]+\.py|\.ci/run)", block.notes["not run"])
        assert named, f"{page}:{block.first}: no test is named"
        assert all((ROOT / each).is_file() for each in named), f"{page}:{block.first}: {named}"


def test_what_is_not_run_is_well_formed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Jobs are read by the launcher's own parser, and what make would do is looked up."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "hello.py", "stuck.py"):
        (tmp_path / name).touch()
    (tmp_path / "hosts").write_text("node0 slots=4\nnode1 slots=4\n")
    for page, block in SPARED:
        for words in map(words_of, shell_of(block)):
            if words[:2] == ["unisono", "run"]:
                job = job_of(words)
                hosts = sorted(host.name for host in job.hosts)
                assert job.group or words[-1] == "&" or hosts in (["node0", "node1"], ["a", "b"]), page
            elif words[0] == "make":
                made_by(words[1])


def test_what_make_does_is_run() -> None:
    """The demo's commands by pages, with fewer ranks and steps; those of the checks by CI, which calls make itself."""
    for command in made_by("demo"):
        assert run_by_a_page(words_of(command)), f"no page runs {command}"
    assert [" ".join(words_of(each)[:2]) for each in made_by("test")] == [
        "ruff check",
        "ruff format",
        "mypy",
        "python tools/imports.py",
        "python -m",
    ]
    assert (ROOT / ".ci" / "run").read_text().endswith("\nmake test-all\n")


def made_by(target: str) -> list[str]:
    """The commands of the environment that make would run for a target; installing it is not among them."""
    made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line for line in made.splitlines() if line.startswith(".venv/bin/") and " pip " not in line]


def test_dots_stand_for_anything() -> None:
    assert matches("a ... z\n...\nend", "a b c z\n1\n2\nend\n")
    assert matches("loss 0.5  ", "loss 0.5\n")
    assert not matches("loss 0.5", "loss 0.51")
    assert not matches("...end", "end!")


def test_a_page_that_lies_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong output, a block that fails, an unclosed one, and a language that nobody knows. Not among the pages of the
    repository, at which other tests look meanwhile."""
    monkeypatch.setattr("tools.blocks.ROOT", tmp_path)
    page = tmp_path / "docs" / "liar.md"
    page.parent.mkdir()
    page.write_text("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n")
    assert "docs/liar.md:6: the page says\n2\nbut the block printed\n1" in _fault(page)
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x / 0)\n```\n")
    reported = _fault(page)
    assert "docs/liar.md:5: ended with 1:" in reported
    assert 'File "docs/liar.md", line 6' in reported
    page.write_text("```bash\nexit 3\n```\n")
    assert "docs/liar.md:1: ended with 3:" in _fault(page)
    page.write_text("```python\n")
    with pytest.raises(ValueError, match="not closed"):
        blocks_of(page)
    page.write_text("```pyhton\n```\n")
    with pytest.raises(ValueError, match="language 'pyhton'"):
        blocks_of(page)


def _fault(page: Path) -> str:
    """Run in a fork of this process, for there is nothing of torch in the page."""
    fault: str = Runs().of(page)["fault"]
    return fault
