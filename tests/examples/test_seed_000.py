"""Every program of document 000 runs by the commands in its docstring, and checks its own result."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from typing import Any

import pytest

from tests.examples.runner import EXAMPLES, commands, examples_in, printed_in, run_example
from tests.ranks import RankPool
from tools.commands import is_plain, job_of

Pools = Callable[[str, int], RankPool]

NAMES = examples_in("seeds/000_vqnet")


def perform(comm: Any, names: list[str]) -> None:
    for name in names:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        comm.barrier()


# What the document describes, section by section.
DOCUMENTED = [
    "getRank",
    "getSize",
    "getLocalRank",
    "barrier",
    "get_device_num",
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "send",
    "recv",
    "split_group",
    "allreduce_group",
    "reduce_group",
    "broadcast_group",
    "allgather_group",
    "all_gather_group",
    "broadcast_model_params",
    "get_host_name",
    "split_data",
    "get_local_rank",
    "get_rank",
    "init_group",
    "PipelineParallelTrainingWrapper",
    "train_batch",
    "loss_dict",
    "ZeroModelInitial",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "DistributeQMachine",
    "set_just_defined",
    "set_save_op_history_flag",
    "set_qr_config",
    "reset_states",
    "MeasureAll",
    "DistQuantumLayerAdjoint",
]


def test_all_that_the_document_describes_is_used() -> None:
    text = "\n".join((EXAMPLES / name).read_text() for name in NAMES)
    assert [name for name in DOCUMENTED if not re.search(rf"\b{name}\(|\.{name}\b", text)] == []


@pytest.mark.parametrize(("path", "number"), printed_in("seeds/000_vqnet"))
def test_a_command(path: str, number: int) -> None:
    """Those of launch.py with more flags than -n start the launcher itself."""
    assert commands(path)[number][0] == "vqnetrun"
    ran = run_example(path, number=number)
    assert any(ran.ranks), ran.text  # of its result, which it has checked, a program tells
    if path.endswith("launch.py"):
        reported = [re.findall(r"rank: (\d), size 2\nLocalRank (\d) hosts name \S+", printed) for printed in ran.ranks]
        assert reported == [[("0", "0")], [("1", "1")]]


def test_a_command_that_is_run_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    plain, with_flags = (job_of(words) for words in commands("seeds/000_vqnet/launch.py"))
    assert is_plain(plain)
    assert not is_plain(with_flags)
    assert (with_flags.program, with_flags.world, with_flags.verbose) == (plain.program, plain.world, True)


def test_collectives_on_mpi(pools: Pools) -> None:
    """The document's own backend for CPUs. Training differs in nothing that these do not use, and circuits on it are
    in tests/compat/test_quantum.py, where their kernels are compiled for all."""
    others = ("pipeline.py", "zero.py", "tensor_parallel.py", "quantum.py")
    on_two = [name for name in NAMES if "-n 2 " in " ".join(commands(name)[0]) and not name.endswith(others)]
    assert len(on_two) == len(NAMES) - len(others) - 2
    pools("mpi", 2).run(perform, on_two)
