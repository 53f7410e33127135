"""The package as it is published: the wheel's files and commands, the bill of materials, the release workflow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tools import sbom

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = ("run", "verify", "plan", "explain", "attach", "report", "doctor", "qsim", "bench", "completion")


def test_the_bill_of_materials_names_every_package_and_what_it_needs() -> None:
    bill = sbom.bill()
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", bill["metadata"]["timestamp"])
    assert bill["metadata"]["component"]["name"] == PROJECT["name"]
    components = {each["name"]: each for each in bill["components"]}
    needed = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert needed | {"sympy"} <= set(components)  # torch's sympy: requirements of requirements are there, too
    for name, each in components.items():
        assert each["type"] == "library"
        assert each["version"] == metadata.version(name)
        assert each["purl"] == each["bom-ref"] == f"pkg:pypi/{name}@{each['version']}"
        assert set(each) <= {"type", "bom-ref", "name", "version", "purl", "description", "licenses"}
    references = {each["bom-ref"] for each in [*bill["components"], bill["metadata"]["component"]]}
    assert {each["ref"] for each in bill["dependencies"]} == references
    for each in bill["dependencies"]:
        assert set(each["dependsOn"]) <= references
    assert "pytest" not in components
    assert {"mpi4py", "mpich"} <= {each["name"] for each in sbom.bill(frozenset({"mpi"}))["components"]}


def test_the_release_workflow_runs_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    lines = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = [word for line in lines if line.startswith("make ") for word in line.split()[1:]]
    assert {"test", "test-torch", "wheel", "sbom"} <= set(targets)
    for target in [word for word in targets if re.fullmatch("[a-z-]+", word)]:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert re.search(r'^version = "[\d.]+"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert set(workflow["jobs"]["build"]["needs"]) == {"test", "torch"}


def test_another_torch_comes_from_the_given_index_or_with_a_warning() -> None:
    """With an index of CPU builds, torch is installed first and alone, so that no dependency brings another build."""

    def dry(*given: str) -> subprocess.CompletedProcess[str]:
        words = ["make", "--dry-run", "test-torch", *given]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    printed = dry("VERSION=2.12.0", "TORCH_INDEX=cpu-builds", "TESTS=tests/comm").stdout
    assert "install --quiet --no-deps --index-url cpu-builds torch==2.12.0\n" in printed
    assert re.search(r"\.venv-torch-2\.12\.0/bin/python -m pytest -n \d+ tests/comm \|\| ", printed)
    assert "install --quiet --no-deps  torch==2.12.0\n" in dry("VERSION=2.12.0").stdout
    for given in (
        ["VERSION="],
        ["VERSION=2.12.0", "PYTHON=false", "OTHER=no-such-folder"],
    ):  # ends before anything is installed
        ended = subprocess.run(["make", "test-torch", *given], cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode != 0
        expected = (
            "no TORCH_INDEX=URL: torch from pip's default index" if given[0][8:] else "which torch? make test-torch"
        )
        assert ended.stderr.startswith(expected)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves its work beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in [*listed.stdout.split(), "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), "."]
    environment = {**os.environ, "UNISONO_REPOSITORY": "https://forge.example/team/unisono"}
    subprocess.run([sys.executable, "-m", "pip", *words], cwd=folder / "source", env=environment, check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.thorough
def test_the_wheel_has_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        files = {name for name in opened.namelist() if name.startswith("unisono/")}
    listed = subprocess.run(["git", "ls-files", "src/unisono"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name.removeprefix("src/") for name in listed.stdout.split() if (ROOT / name).exists()}
    assert files == tracked


@pytest.mark.thorough
def test_the_wheel_says_where_the_project_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
        lines = opened.read(name).decode().splitlines()
    assert "Project-URL: Source, https://forge.example/team/unisono" in lines
    assert "Project-URL: Issues, https://forge.example/team/unisono/issues" in lines


@pytest.mark.thorough
def test_the_wheel_in_a_clean_environment_gives_every_command(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are lent by this environment: by their folder alone, so that no editable install counts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"}
    installed = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *installed], env=environment, check=True)
    site = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def output_of(*words: str) -> str:
        program = [str(python.parent / words[0]), *words[1:]]
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    where = output_of("python", "-c", "import unisono; print(unisono.__file__)")
    assert where.strip() == str(site / "unisono" / "__init__.py")
    assert PROJECT["version"] in output_of("unisono", "--version")
    for command in COMMANDS:
        assert command in output_of("unisono", command, "--help")
    assert "vqnetrun" in output_of("vqnetrun", "--help")
    (tmp_path / "hello.py").write_text("import unisono as uni\nprint(uni.init().size)\n")
    assert sorted(output_of("unisono", "run", "-n", "2", "hello.py").splitlines()) == ["[0] 2", "[1] 2"]
