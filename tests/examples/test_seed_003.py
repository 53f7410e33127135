"""Document 003: the quickstart of sharding propagation, on eight ranks, against the same network on one device."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

from tests.examples.runner import EXAMPLES, commands, printed_in, run_example, run_mpiexec
from tools.commands import is_plain, job_of

RANKS = 8


def _losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"epoch: \d step: \d, loss is (\S+)", printed)]


def _is_right(printed: str) -> None:
    losses = _losses(printed)
    assert len(losses) == 20
    assert losses == pytest.approx(_losses_of_one_device(), rel=1e-5)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    _has_what_the_document_shows(printed)


@functools.cache
def _losses_of_one_device() -> list[float]:
    return _losses(run_example("seeds/003_mindspore/single.py").text)


def test_the_quickstart(tmp_path: Path) -> None:
    ran = run_example("seeds/003_mindspore/net.py", "--folder", str(tmp_path))
    _is_right(ran.ranks[0])
    _is_saved(tmp_path)


def test_the_documents_script(tmp_path: Path) -> None:
    """Over MPI, and as the document says: the log in device/train.log, each rank's model in device/N."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    run_mpiexec("examples/seeds/003_mindspore/run_with_mpi.sh", RANKS, tmp_path)
    folder = tmp_path / "runs" / "quickstart"
    _is_right((folder / "device" / "train.log").read_text())
    _is_saved(folder)


def test_the_commands_are_those_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's mpiexec has the program, the ranks and the backend of the second command of net.py."""
    monkeypatch.chdir(EXAMPLES.parent)
    program = "examples/seeds/003_mindspore/net.py"
    by_gloo, by_mpi = (job_of(words) for words in commands("seeds/003_mindspore/net.py"))
    assert is_plain(by_gloo)
    assert (by_mpi.program, by_mpi.world, by_mpi.backend) == (by_gloo.program, RANKS, "mpi")
    assert by_mpi.program.target == program
    script = (EXAMPLES / "seeds/003_mindspore/run_with_mpi.sh").read_text()
    assert f"\nmpiexec -n {RANKS} python {program} >" in script
    assert len(printed_in("seeds/003_mindspore")) == 3


def _has_what_the_document_shows(printed: str) -> None:
    """step_parallel_begin: strategies and full shapes. execute: local shapes and the group of the sum."""
    shards = " ".join(printed.split())
    for shown in (
        "matmul = matmul(input_0, p_weight) strategy ((2,4),(4,1))",
        "f32[16,32] f32[32,16] -> f32[16,16] | f32[8,8] f32[8,16] -> f32[8,16]",
        "reduce_scatter over mp (0,1,2,3): (8,16) -> (8,4)",  # an AllReduce and a StridedSlice there: twice the bytes
        "relu = relu(matmul_moved) strategy ((2,4))",
        "f32[8,4] -> f32[8,4]",
        "matmul_1 = matmul(relu, p_weight2) strategy ((2,4),(4,1))",
        "f32[8,4] f32[4,16] -> f32[8,16]",
    ):
        assert shown in shards, shown


def _is_saved(folder: Path) -> None:
    for rank in range(RANKS):
        graphs = folder / "saved_graph" / f"rank_{rank}"
        assert "strategy ((2,4),(4,1))" in (graphs / "2_propagation.txt").read_text()
        assert "f32[8,4] f32[4,16] -> f32[8,16]" in (graphs / "3_local.txt").read_text()
        saved = torch.load(folder / "device" / str(rank) / "net.pt", weights_only=True)
        assert tuple(saved["model"]["weight2"].shape) == (4, 16)
