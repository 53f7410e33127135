"""Ranks as actors of a real Ray: a cluster of two nodes on this machine, in a process of its own (ray_jobs.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.integrations.ray_jobs import FAILS_AT, STEPS, dataset
from unisono.errors import MissingPackageError, UsageError

pytest.importorskip("ray", reason="ray is not installed")

_MARK = "UNISONO_TEST_OF_RAY"  # in the environment of all processes of the cluster
_LIMIT = 1500  # seconds: not a claim, only an end


def left_behind(mark: str) -> list[str]:
    """The processes that still run with this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            except OSError:  # it has ended, or is another user's
                continue
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The outcome of every job of ray_jobs.py, and what was left behind ("left") and printed ("output")."""
    folder = tmp_path_factory.mktemp("ray")
    session = tempfile.mkdtemp(prefix="ray-")  # names of Ray's sockets must be short
    mark = uuid.uuid4().hex
    variables = (
        dict(os.environ)
        | {
            _MARK: mark,
            "RAY_TMPDIR": session,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # a busy machine is no reason to kill ranks
            "RAY_worker_niceness": "0",  # Ray's 15 would starve ranks beside other tests
            "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path[1:]]),
        }
    )
    for name in ("RAY_ADDRESS", "RANK", "WORLD_SIZE"):
        variables.pop(name, None)
    output = folder / "output"
    with output.open("w") as sink:
        command = [sys.executable, "-m", "tests.integrations.ray_jobs", str(folder)]
        subprocess.run(command, env=variables, stdout=sink, stderr=subprocess.STDOUT, timeout=_LIMIT, check=False)
    deadline = time.monotonic() + 60
    while (left := left_behind(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    text = output.read_text(errors="replace")
    assert (folder / "outcomes.json").exists(), text[-8000:]
    yield json.loads((folder / "outcomes.json").read_text()) | {"left": left, "output": text, "folder": str(folder)}
    shutil.rmtree(session, ignore_errors=True)


thorough = [pytest.mark.thorough, pytest.mark.timeout(_LIMIT + 120)]


def losses_of_one_process() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = dataset().tensors
    losses = []
    for inputs, targets in zip(x.split(8), y.split(8), strict=True):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def results(jobs: dict[str, Any], name: str) -> list[Any]:
    assert "error" not in jobs[name], jobs[name]["traceback"]
    return jobs[name]["results"]


def error(jobs: dict[str, Any], name: str, kind: str) -> str:
    assert jobs[name].get("kind") == kind, jobs[name]
    return jobs[name]["error"]


class TestJobs:
    pytestmark = thorough

    def test_losses_are_those_of_one_process(self, jobs: dict[str, Any]) -> None:
        ranks = results(jobs, "equal")
        for rank in ranks:
            assert rank["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
        places = [(rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"], rank["GROUP_RANK"]) for rank in ranks]
        assert places == [("0", "0", "1", "0"), ("1", "0", "1", "1")]  # a node each
        assert ranks[0]["UNISONO_HOST"] != ranks[1]["UNISONO_HOST"]

    def test_plain_torch_finds_its_ranks_too(self, jobs: dict[str, Any]) -> None:
        assert results(jobs, "plain torch") == [2.0, 2.0]

    def test_a_killed_rank_is_started_again_and_resumes(self, jobs: dict[str, Any]) -> None:
        self._resumed(jobs, "killed")
        assert "restart 1 of 1: rank 1 failed on host" in jobs["output"]

    def test_a_lost_node_is_replaced(self, jobs: dict[str, Any]) -> None:
        self._resumed(jobs, "lost")
        head, lost = jobs["nodes"]
        nodes = {rank["node"] for rank in results(jobs, "lost")}
        assert len(nodes) == 2
        assert head in nodes
        assert lost not in nodes

    def _resumed(self, jobs: dict[str, Any], name: str) -> None:
        for rank in results(jobs, name):
            assert int(rank["UNISONO_ATTEMPT"]) >= 1
            assert 1 <= rank["first_step"] <= FAILS_AT  # the last checkpoint that was complete
            assert rank["losses"] == pytest.approx(losses_of_one_process()[rank["first_step"] :], rel=1e-5)
            assert rank["first_step"] + len(rank["losses"]) == STEPS

    def test_without_restarts_a_killed_rank_is_named(self, jobs: dict[str, Any]) -> None:
        text = error(jobs, "killed for good", "LaunchError")
        assert text.startswith("rank 1 failed on host ")
        assert "its process has died; Ray: The actor is dead because" in text

    def test_an_exception_ends_all_ranks_and_is_shown(self, jobs: dict[str, Any]) -> None:
        text = error(jobs, "raises", "LaunchError")
        assert text.startswith("rank 1 failed on host ")
        assert text.endswith("ValueError: no such sample on 1")
        assert "integrations/ray.py" not in text

    def test_a_rank_that_others_wait_for_in_vain_is_named(self, jobs: dict[str, Any]) -> None:
        text = error(jobs, "leaves", "LaunchError")
        assert text.startswith("rank 0 waits in barrier #1 at ")
        assert text.endswith("rank 1 has left the world (uni.shutdown)")

    def test_exit_codes(self, jobs: dict[str, Any]) -> None:
        assert error(jobs, "exits", "LaunchError").startswith("rank 0 failed (exit code 3):\nsys.exit(3)")

    def test_misuse_is_not_tried_again(self, jobs: dict[str, Any]) -> None:
        assert error(jobs, "misuses", "LaunchError").endswith("batch_size=0: expected at least 1")
        assert {each.name[-1] for each in Path(jobs["folder"], "misuses").iterdir()} == {"0"}  # the first attempt

    def test_what_cannot_run_is_refused(self, jobs: dict[str, Any]) -> None:
        text = error(jobs, "room", "UsageError")
        assert text.startswith("ranks=3 with 1 CPU each do not fit: Ray's cluster has room for 2 (1 on ")
        assert "cannot be pickled (TypeError: cannot pickle '_thread.lock' object)" in error(
            jobs, "pickle", "UsageError"
        )
        assert "called inside rank 0 of 1" in error(jobs, "nested", "LaunchError")

    def test_no_process_is_left(self, jobs: dict[str, Any]) -> None:
        assert not jobs["left"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "at least 1, not 0"),
        ({"ranks": 2, "args": "abc"}, "args='abc'; expected a tuple"),
        ({"ranks": 2, "backend": "mpi"}, "backend 'mpi'; use gloo or nccl"),
        ({"ranks": 2, "placement": "pack"}, "placement='pack'; expected one of PACK, SPREAD"),
        ({"ranks": 2, "cpus_per_rank": -1}, "cpus_per_rank=-1; expected a number of at least 0"),
        ({"ranks": 2, "cpus_per_rank": 0}, "are both 0"),
        ({"ranks": 2, "max_restarts": 0.5}, "max_restarts=0.5; expected a whole number"),
        ({"ranks": 2, "start_timeout": 0}, "start_timeout=0 must be"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    from unisono.integrations.ray import run

    with pytest.raises(UsageError) as raised:
        run(print, **options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "unisono.integrations.ray", raising=False)
    with pytest.raises(MissingPackageError, match=r"pip install 'unisono\[ray\]'"):
        import unisono.integrations.ray  # noqa: F401
