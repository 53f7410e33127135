"""What the documentation names exists: names of unisono, options of the command, files, pictures."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unisono as uni
from tools import drawings, site
from tools.blocks import ROOT, blocks_of, pages
from unisono import cli
from unisono import quantum as uq
from unisono.comm.communicator import Communicator
from unisono.mesh.mesh import Mesh
from unisono.quantum.circuit.circuit import Circuit
from unisono.quantum.state import State

# What a word before a dot stands for in the pages. The other words (dist, qml, engine of DeepSpeed, ...) are not ours.
OWNERS = {
    "uni": uni,
    "uq": uq,
    "comm": Communicator,
    "mesh": Mesh,
    "circuit": Circuit,
    "state": State,
    "trainer": uni.Trainer,
    "checkpoints": uni.Checkpoints,
    "program": uni.Program,
}
INSTANCE = {
    "comm": {"rank", "size", "backend", "local_rank"},
    "state": {"local"},
}
FILE = re.compile(r"`((?:tests|examples|tools|benchmarks|parallel|plan|graph|comm|quantum|train)/[\w/.]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#([^)]+))?\)")
NAME = re.compile(r"(?<![\w./\"])(" + "|".join(OWNERS) + r")(?!\.(?:md|py|svg|qasm)\b)((?:\.[A-Za-z_]\w*)+)")


def _named(text: str) -> set[tuple[str, str]]:
    return {(owner, path[1:]) for owner, path in NAME.findall(text)}


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in pages()])
def test_every_name_exists(page: str) -> None:
    named = sorted(_named((ROOT / page).read_text(encoding="utf-8")))
    assert not [f"{owner}.{path}" for owner, path in named if not _exists(owner, path.split("."))]


def _exists(owner: str, path: list[str]) -> bool:
    found: Any = OWNERS[owner]
    if owner not in ("uni", "uq"):
        fields = getattr(found, "__dataclass_fields__", {})
        return hasattr(found, path[0]) or path[0] in fields or path[0] in INSTANCE.get(owner, ())
    for name in path:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_the_tables_of_names_are_looked_at() -> None:
    named = _named((ROOT / "docs" / "coming.md").read_text(encoding="utf-8"))
    assert len([path for owner, path in named if owner in ("uni", "uq")]) > 30
    assert not _exists("uni", ["nn", "NoSuchLayer"])
    assert not _exists("comm", ["no_such_call"])


def test_every_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = ""
    words = ["run", "verify", "plan", "explain", "attach", "report", "doctor", "qsim", "bench comm", "bench hardware"]
    for command in words:
        with pytest.raises(SystemExit):
            cli.main([*command.split(), "--help"])
        shown = capsys.readouterr().out
        assert {"--json", "--quiet"} <= set(re.findall(r"--[a-z-]+", shown)), command  # every command has both
        known += shown
    text = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    for option in sorted(set(re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", text)) - {"--help"}):
        assert re.search(rf"{option}\b", known), f"docs/command.md: {option}"


def test_every_file_exists() -> None:
    """Files of the repository that pages name in backticks."""
    for page in pages():
        for path in set(FILE.findall(page.read_text(encoding="utf-8"))):
            assert any((ROOT / folder / path).exists() for folder in ("", "src/unisono")), f"{page.name}: {path}"


def test_every_link_leads_somewhere() -> None:
    for page in pages():
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for path, _, anchor in set(LINK.findall(prose)):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.relative_to(ROOT)}: {path}"
            assert not anchor or anchor in _anchors(target), f"{page.relative_to(ROOT)}: {path}#{anchor}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def test_translations_have_the_same_blocks() -> None:
    """So that they run once, and cannot fall behind."""
    pairs = [(folder / "README.md", folder / "README.zh.md") for folder in (ROOT, ROOT / "examples" / "seeds")]
    chinese = ROOT / "docs" / "zh"
    pairs += [(ROOT / "docs" / page.relative_to(chinese), page) for page in sorted(chinese.rglob("*.md"))]
    assert len(pairs) > 10
    for page, translation in pairs:
        ours, theirs = ([(b.language, b.title, b.text) for b in blocks_of(each)] for each in (page, translation))
        assert ours == theirs, f"{translation.relative_to(ROOT)} differs from {page.relative_to(ROOT)}"


def test_chinese_pages_are_chinese_and_can_be_searched() -> None:
    config = SimpleNamespace(theme={})
    for source, language in (("zh/index.md", "zh"), ("index.md", "en")):
        site.on_page_context({}, SimpleNamespace(file=SimpleNamespace(src_uri=source)), config, None)
        assert config.theme["language"] == language
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "hooks: [tools/site.py]" in settings
    separator = re.search(r"separator: '(.+)'", settings)
    assert separator is not None
    found = [word for word in re.split(separator[1], "按列切，tensor-parallel 张量") if word]
    assert found == ["按", "列", "切", "tensor", "parallel", "张", "量"]


def test_every_strategy_is_drawn_and_measured() -> None:
    found = sorted((ROOT / "docs" / "strategies").glob("*.md"))
    assert len(found) == 10
    for page in found:
        text = page.read_text(encoding="utf-8")
        assert "examples/measure.py" in text, page.name
        assert page.name == "index.md" or "../images/" in text, page.name


def test_drawings_are_up_to_date() -> None:
    assert list(drawings.stale()) == [], "run python tools/drawings.py"
    assert "program" in drawings.PICTURES  # README's, by the command that it names
