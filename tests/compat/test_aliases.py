"""`unisono run --as NAME`: a program of another framework runs with its own imports, and only ranks see them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.launch.harness import Run, write_script
from unisono.compat.aliases import ALIASES

PROGRAM = """
import sys
import pyvqnet
import pyvqnet.distributed.pp
from pyvqnet.distributed import CommController
from pyvqnet.utils import set_random_seed
from pyvqnet.tensor import tensor
import unisono.compat.vqnet.distributed

assert pyvqnet is sys.modules["unisono.compat.vqnet"] and pyvqnet.__name__ == "unisono.compat.vqnet"
assert pyvqnet.distributed.CommController is CommController is unisono.compat.vqnet.distributed.CommController
try:
    import pyvqnet.nowhere
except ModuleNotFoundError as error:
    print(error.name, flush=True)
comm = CommController("gloo")
x = tensor.QTensor([1.0])
comm.allreduce(x, "sum")
print(x.item())
"""


def test_imports_find_unisonos_names(tmp_path: Path) -> None:
    script = write_script(tmp_path, PROGRAM)
    done = Run(["run", "-n", "2", "--as", "pyvqnet", str(script)], tmp_path).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pyvqnet.nowhere") == done.stdout.count("2.0") == 2
    assert "pyvqnet" not in sys.modules


def test_without_it_the_names_are_not_there(tmp_path: Path) -> None:
    done = Run(["run", "-n", "1", str(write_script(tmp_path, PROGRAM))], tmp_path).finish()
    assert done.returncode == 1
    assert "No module named 'pyvqnet'" in done.stderr


def test_a_name_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unisono import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "-n", "1", "--as", "pyvqnett", "program.py"])
    assert ended.value.code == 2
    assert "did you mean pyvqnet?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ALIASES)
def test_what_stands_for_a_name_is_there(name: str) -> None:
    for target in ALIASES[name].values():
        assert importlib.util.find_spec(target) is not None
