"""The documents' texts, their programs, and runs of these; a Row is one program with what it is compared with."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "documents"
PRELUDE = FOLDER.parent / "prelude.py"


# ---- the texts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fence:
    """A block of code in a text, with the heading that it is under."""

    heading: str
    language: str
    code: str


def fences(document: str) -> Iterator[Fence]:
    """The blocks of a document, in order."""
    heading, language, lines = "", None, []
    for line in (FOLDER / f"{document}.txt").read_text(encoding="utf-8").splitlines():
        mark = re.match(r"\s*```\s*(\w*)", line)
        if mark and language is None:
            language, lines = mark[1], []
        elif mark:
            yield Fence(heading, str(language), "\n".join(lines) + "\n")
            language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("#"):
            heading = line.strip("# ")


def program_under(document: str, section: str) -> str:
    """The Python program under the heading that begins with a section's number or name."""
    found = [each.code for each in fences(document) if each.heading.startswith(section) and each.language == "python"]
    assert len(found) == 1, f"document {document} has {len(found)} programs under {section!r}; expected one"
    return found[0]


def block_with(document: str, words: str) -> str:
    """The block of code that has these words."""
    found = [each.code for each in fences(document) if words in each.code]
    assert len(found) == 1, f"document {document} has {len(found)} blocks with {words!r}; expected one"
    return found[0]


def examples(document: str) -> list[tuple[str, str]]:
    """The programs of a text in reStructuredText, below "Example::", each with the name that it is under."""
    found, name = [], ""
    lines = (FOLDER / f"{document}.txt").read_text(encoding="utf-8").splitlines()
    for number in range(len(lines)):
        described = re.match(r"\s*\.\. py:\w+:: (?:\w+\.)*(\w+)", lines[number])
        if described:
            name = described[1]
        elif number + 1 < len(lines) and re.match(r"[=^]{4,}", lines[number + 1]):
            name = lines[number].strip()
        mark = re.match(r"(\s*)Examples?::", lines[number])
        if mark:
            body = []
            for line in lines[number + 1 :]:
                if line.strip() and len(line) - len(line.lstrip()) <= len(mark[1]):
                    break
                body.append(line)
            found.append((name, textwrap.dedent("\n".join(body)).strip() + "\n"))
    return found


Cuts = Mapping[str, str]


def cut(code: str, cuts: Cuts) -> str:
    """The program with smaller numbers; each cut must be there."""
    for old, new in cuts.items():
        assert old in code, f"{old!r} is not in the program"
        code = code.replace(old, new)
    return code


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(
    code: str,
    ranks: int,
    options: Sequence[str],
    folder: Path,
    dtype: str = "float64",
    prelude: Sequence[str] | None = None,
    show: str = "",
) -> list[str]:
    """What each rank prints; AssertionError where one fails. options: of `unisono run`. dtype: which the program's
    float32 is. prelude: a script to run it with, instead of the one that seeds. show: an expression of the program's
    names, whose value is printed at its end."""
    from tests.launch.harness import Run

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "program.py"
    path.write_text(code, encoding="utf-8")
    words = ["-n", str(ranks), *options, "--output-filename", str(folder / "out")]
    if prelude is None:
        prelude = [str(PRELUDE), *(["float64"] if dtype == "float64" else []), *([f"show={show}"] if show else [])]
    ran = Run(["run", *words, *prelude, str(path)], folder).finish(timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    written = [folder / "out" / f"rank.{rank}" for rank in range(ranks)]
    return [each.read_text(encoding="utf-8") if each.exists() else "" for each in written]  # none of one that is silent


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Of a run: epochs, batches of one card in each, and what the program's float32 is."""

    epochs: int = 2
    batches: int = 6
    dtype: str = "float64"


FULL = Size(5, 100)  # of document 002


@dataclass(frozen=True)
class Row:
    """A program. compare runs it; it says what was found, or raises AssertionError."""

    document: str
    section: str
    title: str
    compare: Callable[[Any, Size, Path], str]
    ranks: int = 2
    options: tuple[str, ...] = ()  # of `unisono run`
    cuts: Cuts = field(default_factory=dict)
    edits: int = 0  # what is changed besides: so that the program is right, or for a variant of it

    @property
    def name(self) -> str:
        return f"{self.document} {self.section} {self.title}"
