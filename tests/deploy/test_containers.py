"""Dockerfile and devcontainer: no Docker here, so the Dockerfile's lines are run in order, in a folder and an
environment of their own, without an index of packages: what they would install is lent by this environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, as (name, the rest of the line)."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_is_well_formed() -> None:
    found = instructions()
    assert {name for name, _ in found} <= {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}
    start = [name for name, _ in found].index("FROM")
    assert {name for name, _ in found[:start]} <= {"ARG"}
    declared = {rest.partition("=")[0] for name, rest in found[start:] if name == "ARG"}  # FROM forgets those before
    used = {word for name, rest in found[start:] if name == "RUN" for word in re.findall(r"\$\{?(\w+)", rest)}
    assert used <= declared
    for name, rest in found:
        if name == "COPY":
            *sources, target = rest.split()
            assert len(sources) == 1 or target.endswith("/"), rest


@pytest.mark.thorough
def test_the_lines_of_the_dockerfile_give_the_command(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    programs, workspace = tmp_path / "venv" / "bin", tmp_path / "workspace"
    (programs / "pip").write_text(f'#!/bin/sh\nexec {programs}/python -m pip "$@"\n')
    (programs / "pip").chmod(0o755)
    site = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "TORCH_INDEX": ""}
    environment |= {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # 0: not isolated

    def run(*words: str, code: int | None = 0) -> str:
        done = subprocess.run(words, cwd=workspace, env=environment, capture_output=True, text=True, timeout=400)
        assert code in (done.returncode, None), f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    workspace.mkdir()
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():
                    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
                    shutil.copytree(ROOT / source, workspace / target, ignore=leave)
                else:
                    shutil.copy(ROOT / source, workspace / target)
        elif name == "RUN":
            run("/bin/sh", "-c", rest)
        elif name == "CMD":
            report = run(*json.loads(rest), code=None)  # 1: MPI's library is not beside this interpreter
            assert re.search(r"✓ torch +2", report), report
            assert re.search(r"✓ \[quantum\]", report), report
    (path,) = run("python", "-P", "-c", "import unisono; print(unisono.__file__)").splitlines()
    assert path == str(site / "unisono" / "__init__.py")
    assert sorted(each.name for each in (workspace / "examples").glob("*.py"))


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


def test_nothing_that_is_generated_here_goes_into_the_image() -> None:
    """What git ignores, Docker is told to ignore, too; its patterns begin at the top, git's anywhere."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".git" in ignored
    for line in (ROOT / ".gitignore").read_text().split():
        name = line.strip("/")
        inside = name in ("__pycache__", "*.egg-info")  # they lie beside the sources; the others at the top
        assert (f"**/{name}" if inside else name) in ignored, line


def test_the_devcontainer_runs_a_target_of_the_makefile() -> None:
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    kinds = {"name": str, "image": str, "runArgs": list, "postCreateCommand": str, "customizations": dict}
    assert {name: type(value) for name, value in settings.items()} == kinds  # as in the specification of containers.dev
    program, target = settings["postCreateCommand"].split()
    assert program == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
