"""Kernels where numba can write neither beside the sources nor into a cache folder of the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

ROOT = Path(__file__).resolve().parents[1]
# As if numba could write neither beside the sources nor into the user's cache folder.
NOWHERE = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
TWICE = """
from unisono.kernel_files import kept

@kept(nogil=True)
def twice(x):
    return 2 * x
"""
CALL = "import kernel; assert kernel.twice(1.5) == 3.0; print(sum(kernel.twice._cache_hits.values()))"
KERNELS = """
from unisono.mesh.random import philox_cpu
from unisono.quantum.kernels import bind, cpu, cpu_reverse, pauli_strings_cpu
for kernel in (philox_cpu._fill, philox_cpu._compare, bind.evaluate, cpu.forward):
    print(type(kernel._cache).__name__, kernel._cache.cache_path)
"""


def run(code: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | NOWHERE | variables
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_are_kept_in_a_temporary_folder_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(TWICE)
    path = f"{tmp_path}{os.pathsep}{ROOT / 'src'}"
    assert run(CALL, TMPDIR=str(tmp_path), PYTHONPATH=path) == "0\n"
    folder = tmp_path / f"unisono-kernels-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.rglob("*.nbc"))
    assert run(CALL, TMPDIR=str(tmp_path), PYTHONPATH=path) == "1\n"  # the second process reads it


def test_all_kernels_use_it_and_one_process_compiles_for_all(tmp_path: Path) -> None:
    lines = run(KERNELS, TMPDIR=str(tmp_path)).splitlines()
    names, folders = [line.split()[0] for line in lines], {line.split()[1] for line in lines}
    assert names == ["FunctionCache", "FunctionCache", "OneCompiles", "OneCompiles"]
    assert all(folder.startswith(f"{tmp_path}/unisono-kernels-") for folder in folders)


@pytest.mark.parametrize("how", ["a link", "others may write", "a file"])
def test_a_folder_that_others_may_have_made_is_not_read(how: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / f"unisono-kernels-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if how == "a link":
        folder.symlink_to(elsewhere)
    elif how == "a file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    (tmp_path / "kernel.py").write_text(TWICE)
    assert run(CALL, TMPDIR=str(tmp_path), PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}") == "0\n"
    assert not list(tmp_path.rglob("*.nb?"))


def test_kernels_are_made_without_any_folder() -> None:
    lines = run(KERNELS, NUMBA_CACHE_LOCATOR_CLASSES="ZipCacheLocator").splitlines()  # the sources are in no archive
    assert lines == ["NullCache None"] * 4
