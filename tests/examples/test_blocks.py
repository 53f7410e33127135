"""Every code block of README and docs runs, and prints what its page says it prints. `tools/blocks.py` has the rules.

One process runs all pages, so that torch is imported once; each page is a test of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.blocks import ROOT, blocks_of, matches, pages, run_all

PAGES = [str(page.relative_to(ROOT)) for page in pages()]


class Runs:
    """What the pages printed, as it comes."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "blocks.py"), "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def of(self, page: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        while page not in self._told:
            line = self.process.stdout.readline()
            assert line, f"tools/blocks.py ended with {self.process.wait()} before {page}"
            told = json.loads(line)
            self._told[told["page"]] = told
        return self._told[page]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    made = Runs()
    yield made
    made.process.terminate()
    made.process.wait()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_the_page_says(page: str, runs: Runs) -> None:
    fault = runs.of(page)["fault"]
    assert not fault, fault


def test_what_is_not_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    spared = [
        (page, block.first, block.notes["not run"])
        for page in PAGES
        for block in blocks_of(ROOT / page)
        if "not run" in block.notes
    ]
    with capsys.disabled():
        for page, line, reason in spared:
            print(f"\n{page}:{line} is not run: {reason}", end="")
    assert all(reason for _, _, reason in spared)


def test_dots_stand_for_anything() -> None:
    assert matches("a ... z\n...\nend", "a b c z\n1\n2\nend\n")
    assert matches("loss 0.5  ", "loss 0.5\n")
    assert not matches("loss 0.5", "loss 0.51")
    assert not matches("...end", "end!")


def test_a_page_that_lies_is_found() -> None:
    """A wrong output, a block that fails, an unclosed one, and a language that nobody knows."""
    page = ROOT / "docs" / "liar.md"
    assert not page.exists()
    try:
        page.write_text("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n")
        assert "docs/liar.md:6: the page says\n2\nbut the block printed\n1" in _fault(page)
        page.write_text("```python\nx = 1\n```\n\n```python\nprint(x / 0)\n```\n")
        told = _fault(page)
        assert "docs/liar.md:5: ended with 1:" in told
        assert 'File "docs/liar.md", line 6' in told
        page.write_text("```bash\nexit 3\n```\n")
        assert "docs/liar.md:1: ended with 3:" in _fault(page)
        page.write_text("```python\n")
        with pytest.raises(ValueError, match="not closed"):
            blocks_of(page)
        page.write_text("```pyhton\n```\n")
        with pytest.raises(ValueError, match="language 'pyhton'"):
            blocks_of(page)
    finally:
        page.unlink()


def _fault(page: Path) -> str:
    """Run in a fork of this process, for there is nothing of torch in the page."""
    ((_, told),) = run_all([page])
    fault: str = told["fault"]
    return fault
