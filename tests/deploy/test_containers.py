"""Dockerfile and devcontainer: no Docker here, so what they copy and run is compared with the repository."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_dockerfile_installs_what_make_setup_installs() -> None:
    text = (ROOT / "Dockerfile").read_text()
    makefile = (ROOT / "Makefile").read_text()
    torch = re.search(r"torch==[\d.]+", makefile)
    assert torch is not None
    assert torch[0] in text
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert {"constraints.txt", "pyproject.toml", "src", "examples"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= set(copied)
    extras = re.search(r'"\.\[([\w,]+)\]"', text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert re.search(r"^CMD \[\"unisono\", ", text, re.MULTILINE)


def test_the_devcontainer_runs_a_target_of_the_makefile() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    program, target = settings["postCreateCommand"].split()
    assert program == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
