"""Runs the code blocks of pages, and compares what they print with what the pages say they print.

    python tools/blocks.py                             every page
    python tools/blocks.py README.md docs/index.md     these
    python tools/blocks.py --write docs/index.md       and put what was printed into the page

```python                   runs; the blocks of a page are one script, in order
```python title="x.py"      is written to x.py in the page's folder, as is any block with a title
```bash                     runs, in the page's folder, a line after the other
```console                  the same for the lines that begin with $; the others are what they print
```text                     is not run (nor is toml, json, mermaid)
<!-- output -->             before a text block: it is what the block before it prints; ... stands for anything, and a
                            deviation such as 9.7e-14 for any other that small
<!-- output: any order -->  the same, but ranks print when they like: lines are compared in any order
<!-- exit: 75 -->           before a block that ends with that code; `any`: with any but 0
<!-- not run: REASON -->    before a block that is not run

Blocks run in forks of this process (`tools/commands.py`). A page's folder has links to the repository's examples and
tests.
"""

from __future__ import annotations

import argparse
import json
import linecache
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
from tools import commands
from tools.commands import ROOT

RUN, SHOWN = ("python", "bash", "console"), ("text", "toml", "json", "mermaid", "yaml")
LIMIT = 400  # seconds a page may take
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>.*)$")
_NOTE = re.compile(r"^ *<!-- (?P<word>not run|exit|output)(?:: (?P<message>.*?))? -->$")
_PROOF = re.compile(r"unisono verify examples/[\w.:/]+( --?\w+ [\w=,-]+)*")
_DEVIATION = re.compile(r"(?:\\ )*\d(?:\\\.\d)?e\\-\d\d")  # in an escaped text, with the spaces before it
_ANY_DEVIATION = r" *(?:\d(?:\.\d)?e-\d\d|bit for bit)"


@dataclass
class Block:
    """A fenced block: where its text stands in the page, and what is said about it."""

    language: str
    title: str
    text: str
    first: int  # line of the page, from 0, of its first line of text
    last: int  # the line after its last
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.language in RUN and not self.title and "not run" not in self.notes

    def ends_well_with(self, code: int) -> bool:
        """Whether that is the exit code that the page says it ends with."""
        wanted = self.notes.get("exit", "0")
        return code != 0 if wanted == "any" else code == int(wanted)


def pages() -> list[Path]:
    seeds = ROOT / "examples" / "seeds"
    named = [ROOT / "README.md", ROOT / "README.zh.md", seeds / "README.md", seeds / "README.zh.md"]
    return [page for page in named if page.is_file()] + sorted((ROOT / "docs").rglob("*.md"))


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page. ValueError, with the line, where one is not closed or has no language we know."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    notes: dict[str, str] = {}
    number = 0
    while number < len(lines):
        fence, note = _FENCE.match(lines[number]), _NOTE.match(lines[number])
        if note:
            notes[note["word"]] = note["message"] or ""
        elif fence:
            indent, ticks = fence["indent"], fence["ticks"]
            end = next((n for n in range(number + 1, len(lines)) if lines[n].strip() == ticks), None)
            if end is None:
                raise ValueError(f"{page.name}:{number + 1}: the block is not closed")
            language, _, rest = fence["info"].strip().partition(" ")
            if language not in RUN + SHOWN:
                raise ValueError(f"{page.name}:{number + 1}: language {language!r}; known are {', '.join(RUN + SHOWN)}")
            title = re.search(r'title="([^"]+)"', rest)
            text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
            found.append(Block(language, title[1] if title else "", text, number + 1, end, notes))
            notes, number = {}, end
        elif lines[number].strip():
            notes = {}
        number += 1
    return found


# ---- running -----------------------------------------------------------------------------------------------------


def run_page(page: Path, folder: Path, proofs: Path) -> list[str]:
    """Run the blocks in `folder`; what each printed. AssertionError where one ends otherwise than it should."""
    for name in ("examples", "tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in blocks_of(page):
        if block.title and "not run" not in block.notes:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text + "\n", encoding="utf-8")
        if block.runs:
            with _Caught() as caught:
                code = _run_python(block, page, names) if block.language == "python" else _run_shell(block, proofs)
            where = f"{page.relative_to(ROOT)}:{block.first}"
            assert block.ends_well_with(code), f"{where}: ended with {code}:\n{caught.text}"
            printed.append(caught.text)
    return printed


class _Caught:
    """What is written to standard output and error meanwhile, by this process and those it starts."""

    def __enter__(self) -> _Caught:
        self.text = ""
        self._file = tempfile.TemporaryFile()
        self._kept = _flushed(os.dup(1)), os.dup(2)
        for number in (1, 2):
            os.dup2(self._file.fileno(), number)
        return self

    def __exit__(self, *_: object) -> None:
        for saved, number in zip(self._kept, (1, 2), strict=True):
            os.dup2(_flushed(saved), number)
            os.close(saved)
        self._file.seek(0)
        self.text = self._file.read().decode("utf-8", "replace")
        self._file.close()


def _flushed(descriptor: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return descriptor


def _run_python(block: Block, page: Path, names: dict[str, Any]) -> int:
    name = str(page.relative_to(ROOT))
    source = "\n" * block.first + block.text + "\n"  # so that a traceback tells the line of the page
    linecache.cache[name] = (len(source), None, page.read_text(encoding="utf-8").splitlines(keepends=True), name)
    try:
        exec(compile(source, name, "exec"), names)
    except SystemExit as ending:
        return int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def commands_of(block: Block) -> list[str]:
    """Lines that a backslash continues are one."""
    joined = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    return [line for line in joined if line.strip() and not line.startswith("#")]


def _run_shell(block: Block, proofs: Path) -> int:
    for command in commands_of(block):
        if block.language == "console" and len(commands_of(block)) > 1:
            print(f"$ {command}", flush=True)
        code = _run_proof(command, proofs) if _PROOF.fullmatch(command) else commands.run(command)
        if code:
            return code
    return 0


def _run_proof(command: str, proofs: Path) -> int:
    """A proof of one of the repository's examples, which is the same wherever it is shown: run once."""
    kept = proofs / re.sub(r"[^\w.,=-]", "_", command)
    if not kept.exists():
        with _Caught() as caught:
            code = commands.run(command)
        kept.write_text(json.dumps([code, caught.text]))
    code, text = json.loads(kept.read_text())
    print(text, end="", flush=True)
    return int(code)


# ---- what pages say ----------------------------------------------------------------------------------------------


def matches(message: str, printed: str) -> bool:
    """Whether the text is what was printed, `...` standing for anything; trailing spaces do not count."""
    parts = [_DEVIATION.sub(lambda _: _ANY_DEVIATION, re.escape(part)) for part in _trimmed(message).split("...")]
    return re.fullmatch(".*".join(parts), _trimmed(printed), re.DOTALL) is not None


def _sorted(text: str) -> str:
    return "\n".join(sorted(text.splitlines()))


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def shown_of(page: Path, printed: list[str]) -> Iterator[tuple[Block, str, str]]:
    """The blocks that show output, with what they say and what was printed."""
    outputs = iter(printed)
    output = ""
    for block in blocks_of(page):
        if block.runs:
            output = next(outputs)
        if "output" in block.notes:
            is_sorted = block.notes["output"] == "any order"
            yield block, _sorted(block.text) if is_sorted else block.text, _sorted(output) if is_sorted else output
        elif block.language == "console" and block.runs:
            is_many = len(commands_of(block)) > 1
            lines = block.text.replace("\\\n", " ").splitlines()
            yield block, "\n".join(line for line in lines if is_many or not line.startswith("$ ")), output


def faults_of(page: Path, printed: list[str]) -> list[str]:
    """Where the page says otherwise than its blocks printed."""
    return [
        f"{page.relative_to(ROOT)}:{block.first}: the page says\n{message}\nbut the block printed\n{output}"
        for block, message, output in shown_of(page, printed)
        if not matches(message, output)
    ]


def write(page: Path, printed: list[str]) -> None:
    """Put what blocks printed into the text blocks that show it, except where they leave something out by `...`."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block, message, output in reversed(list(shown_of(page, printed))):
        if block.language != "console" and "..." not in message:
            lines[block.first : block.last] = _trimmed(output).splitlines()
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- all pages ---------------------------------------------------------------------------------------------------


def reported_by(page: Path, proofs: Path) -> dict[str, Any]:
    """Run a page in a process of its own: what its blocks printed, or why it failed. proofs: a folder to keep them."""
    if not any(block.runs or block.title for block in blocks_of(page)):
        return {"printed": [], "fault": "", "seconds": 0.0}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unisono-page-") as scratch:
        answer, folder = Path(scratch) / "answer.json", Path(scratch) / "page"
        folder.mkdir()
        commands.alone(lambda: _answer(page, folder, answer, proofs), folder, LIMIT)
        reported: dict[str, Any] = {"printed": [], "fault": f"not done in {LIMIT} s"}
        if answer.is_file():
            reported = json.loads(answer.read_text())
    reported["seconds"] = round(time.monotonic() - started, 1)
    return reported


def _answer(page: Path, folder: Path, answer: Path, proofs: Path) -> int:
    reported: dict[str, Any] = {"printed": [], "fault": ""}
    try:
        reported["printed"] = run_page(page, folder, proofs)
    except BaseException as error:
        reported["fault"] = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
    answer.write_text(json.dumps(reported))
    return 0


class Runs:
    """Pages with equal blocks, as translations have, run once; so does a proof of an example that several show."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        self._proofs = tempfile.TemporaryDirectory(prefix="unisono-proofs-")

    def of(self, page: Path, is_written: bool = False) -> dict[str, Any]:
        """What the page's blocks printed, and where that is not what it says."""
        blocks = [block for block in blocks_of(page) if block.runs or block.title]
        key = json.dumps([(block.language, block.title, block.text, block.notes.get("exit")) for block in blocks])
        reported = (
            {**self._told[key], "seconds": 0.0} if key in self._told else reported_by(page, Path(self._proofs.name))
        )
        self._told[key] = reported
        fault = reported["fault"]
        if not fault:
            if is_written:
                write(page, reported["printed"])
            fault = "\n".join(faults_of(page, reported["printed"]))
        return {**reported, "fault": fault}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the code blocks of pages.")
    parser.add_argument("page", nargs="*", type=Path, help="default: README and all of docs/")
    parser.add_argument("--write", action="store_true", help="put what was printed into the pages")
    chosen = parser.parse_args()
    commands.prepare()
    runs, failed = Runs(), False
    for page in [page.resolve() for page in chosen.page] or pages():
        reported = runs.of(page, chosen.write)
        failed = failed or bool(reported["fault"])
        print(f"{page.relative_to(ROOT)}: {reported['seconds']} s {reported['fault'] or 'ok'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
