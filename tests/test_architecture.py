"""docs/architecture.md: its map is that of the imports, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

from tools.architecture import drawing, page_with
from tools.imports import SOURCE, circles

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def test_the_map_is_that_of_the_imports() -> None:
    assert PAGE.read_text() == page_with(drawing()), "run python tools/architecture.py"


def test_named_files_exist() -> None:
    source = ROOT / "src" / "unisono"
    named = re.findall(r"`((?:[a-z0-9_]+/)*[a-z0-9_]+(?:\.py|/))`", PAGE.read_text())
    known = {path.as_posix() + ("/" if path.is_dir() else "") for path in source.rglob("*")}
    missing = [name for name in named if not (ROOT / name).exists() and not any(k.endswith(f"/{name}") for k in known)]
    assert named
    assert not missing


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_a_folder_is_seen_at_a_glance() -> None:
    folders = [path.parent for path in SOURCE.rglob("__init__.py")]
    assert [str(each) for each in folders if not (each / "__init__.py").read_text().startswith('"""')] == []
    assert [str(each) for each in folders if len(list(each.glob("*.py"))) > 16] == []  # with __init__.py
