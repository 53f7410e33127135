"""Document 003: the quickstart of sharding propagation, on eight ranks, against the same network on one device."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as uni
from tests.ranks import RankPool
from unisono.comm.communicator import Communicator

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "seeds" / "003_mindspore"
FILES = ("seeds/003_mindspore/net.py", "seeds/003_mindspore/single.py")

Pools = Callable[[str, int], RankPool]


def _module(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def _quickstart(comm: Communicator, folder: str) -> tuple[list[float], str]:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(uni, "init", lambda: comm, raising=False)  # the pool's ranks have joined already
        patch.setattr(uni, "shutdown", lambda: None, raising=False)
        losses = _module("net").train(Path(folder))
    return losses, printed.getvalue()


def test_the_quickstart(pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = pools("gloo", 8).run(_quickstart, str(tmp_path))
    losses, printed = answers[0]
    expected = _single()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert all(other == losses for other, _ in answers[1:])  # the loss is on every rank
    assert "epoch: 5 step: 4, loss is " in printed
    _has_what_the_document_shows(printed)
    _is_saved(tmp_path, answers)
    assert {path.name for path in FOLDER.glob("*.py")} == {Path(file).name for file in FILES} | {"quickstart_net.py"}


def _single() -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        spec = importlib.util.spec_from_file_location("single_of_003", FOLDER / "single.py")
        assert spec is not None
        assert spec.loader is not None
        _module("quickstart_net")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        found: list[float] = made.train()
    return found


def _has_what_the_document_shows(printed: str) -> None:
    """step_parallel_begin: strategies and whole shapes. execute: local shapes and the group of the sum."""
    pieces = " ".join(printed.split())
    for shown in (
        "matmul = matmul(input_0, p_weight) strategy ((2,4),(4,1))",
        "f32[16,32] f32[32,16] -> f32[16,16] | f32[8,8] f32[8,16] -> f32[8,16]",
        "reduce_scatter over mp (0,1,2,3): (8,16) -> (8,4)",  # an AllReduce and a StridedSlice there: twice the bytes
        "relu = relu(matmul_moved) strategy ((2,4))",
        "f32[8,4] -> f32[8,4]",
        "matmul_1 = matmul(relu, p_weight2) strategy ((2,4),(4,1))",
        "f32[8,4] f32[4,16] -> f32[8,16]",
    ):
        assert shown in pieces, shown


def _is_saved(folder: Path, answers: list[Any]) -> None:
    for rank in range(len(answers)):
        graphs = folder / "saved_graph" / f"rank_{rank}"
        assert "strategy ((2,4),(4,1))" in (graphs / "2_propagation.txt").read_text()
        assert "f32[8,4] f32[4,16] -> f32[8,16]" in (graphs / "3_local.txt").read_text()
        saved = torch.load(folder / "device" / str(rank) / "net.pt", weights_only=True)
        assert tuple(saved["model"]["weight2"].shape) == (4, 16)
