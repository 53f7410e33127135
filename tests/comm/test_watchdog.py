"""A hang explains itself: real jobs that hang for real, on each backend, with and without `--check`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests import mpi_ranks
from tests.comm import hang_program
from tests.mpi_ranks import MPIEXEC
from tests.processes import run_forked
from tests.ranks import free_port
from unisono.launch import environment
from unisono.launch.outcome import failure

PROGRAM = Path(hang_program.__file__)
SOURCE = PROGRAM.read_text().splitlines()


def line(mark: str) -> str:
    (number,) = [n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# LINE: {mark}")]
    return rf"\S*hang_program\.py:{number}"


ALL = rf"ranks 0,1,2 wait in all_reduce #2 float32\[1024\] at {line('all')}"
# The odd rank's words, where every backend must come to the same report.
CERTAIN = {
    "exit": "rank 3 has exited",
    "shutdown": r"rank 3 has left the world \(uni\.shutdown\)",
    "sleep": rf"rank 3 has not entered any collective since #1 and is at {line('sleep')}",
    "raise": rf"rank 3 has raised ValueError: bad sample 17 at {line('raise')} and exited",
    "loop": rf"rank 3 has not entered any collective since #1 and is at ({line('loop')}|{line('loop body')})",
    "loader": rf"rank 3 has not entered any collective since #1 and is at {line('loader')}",
    "hook": rf"rank 3 has raised ValueError: bad sample 17 at {line('hook')} and exited",
    "backward": rf"rank 3 has raised ValueError: bad sample 17 at {line('backward')} and exited",
    "receive": rf"rank 3 is in recv from rank 0 #1 float32\[1024\] at {line('receive')}",
}
CHECKED = {
    "op": rf"rank 3 is in broadcast #2 float32\[1024\] at {line('op')}",
    "shape": rf"rank 3 is in all_reduce #2 float32\[512\] at {line('shape')}",
    "dtype": rf"rank 3 is in all_reduce #2 int32\[1024\] at {line('dtype')}",
    "order": rf"rank 3 is in barrier #2 at {line('order')}",
    "late order": rf"rank 3 is in barrier #2 at {line('order')}",
    "torch": rf"rank 3 is in torch.distributed.broadcast #2 float32\[1024\] at {line('torch')}",
    "torch shape": rf"rank 3 is in torch.distributed.all_reduce #2 float32\[512\] at {line('torch shape')}",
}


WELL = ("crossed", "busy", "left early")  # scenarios in which nothing is wrong
RAISING = ("raise", "hook", "backward")
GONE = (*RAISING, "exit", "late exit", "shape", "shutdown", "long message")  # in which one rank ends as it likes


def run(backend: str, scenario: str, folder: Path, timeout: float, odd: int = 3) -> str:
    """Everything that the job's ranks print; checks that all of them end, and none well but the one that left."""
    arguments = {"scenario": scenario, "timeout": timeout, "odd": odd}
    if backend == "mpi":
        if not MPIEXEC.exists():
            pytest.skip(f"no mpiexec at {MPIEXEC}; run make setup")
        done = mpi_ranks.run(4, functools.partial(hang_program.main, **arguments), timeout=90)
        assert (done.returncode == 0) == (scenario in WELL), done
        return done.stdout + done.stderr
    rank_info = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    rank_infos = [rank_info | {"RANK": str(rank), environment.BACKEND: backend} for rank in range(4)]
    ends = run_forked(
        [functools.partial(hang_program.main, **arguments, rank_info=each) for each in rank_infos], folder
    )
    stopped = [end.code for rank, end in enumerate(ends) if rank != odd or scenario not in GONE]
    assert set(stopped) <= ({0} if scenario in WELL else {1, failure.HANG_CODE}), ends
    return "\n".join(end.output for end in ends)


def reports(output: str) -> list[str]:
    return re.findall(r"^unisono: (.*)$", output, re.M)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("scenario", CERTAIN)
def test_a_hang_is_reported_in_one_sentence(backend: str, scenario: str, tmp_path: Path) -> None:
    output = run(backend, scenario, tmp_path, timeout=2.0)
    if backend == "mpi" and scenario in RAISING:
        assert "ValueError: bad sample 17" in output
        # MPI may end the job, with the traceback, before anyone waited for long; rank 0 and its store among the first.
        if not reports(output) or "and with it the store" in output:
            return
    (report,) = reports(output)
    assert re.fullmatch(rf"{ALL}; {CERTAIN[scenario]}", report), output


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_groups_in_opposite_order_are_reported(backend: str, tmp_path: Path) -> None:
    (report,) = reports(run(backend, "opposite", tmp_path, timeout=2.0))
    one, other = (f"in group {number} of ranks 0,1,2,3" for number in (1, 2))
    waits = rf"ranks 0,1,2 wait in all_reduce #1 float32\[1024\] at {line('opposite')} {one}"
    assert re.fullmatch(rf"{waits}; rank 3 is in all_reduce #1 float32\[8\] at {line('opposite odd')} {other}", report)


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_ranks_may_go_on_without_one_that_has_left(backend: str, tmp_path: Path) -> None:
    output = run(backend, "left early", tmp_path, timeout=20.0)
    assert output.count("gone on and well") == 3, output
    assert not reports(output), output


def test_a_wait_in_native_code_for_a_rank_that_has_left_is_reported_over_mpi(tmp_path: Path) -> None:
    """As in the backward pass of DDP. Over gloo it fails by itself when the connection breaks."""
    (report,) = reports(run("mpi", "future", tmp_path, timeout=600.0))
    waits = rf"ranks 0,1,2 are at {line('future')} \(all_reduce float32\[1024\] is under way\)"
    assert re.fullmatch(rf"{waits}; rank 3 has exited", report), report


def test_ranks_on_their_way_when_another_loses_its_peer_are_reported_where_they_come_to(tmp_path: Path) -> None:
    """gloo tells the first at once, when others may still be leaving the collective before."""
    (report,) = reports(run("gloo", "late exit", tmp_path, timeout=20.0))
    assert re.fullmatch(rf"{ALL}; rank 3 has exited( \(.*\))?", report), report


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("scenario", CHECKED)
def test_with_check_a_difference_is_reported_at_once(
    backend: str, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CHECK, "1")
    output = run(backend, scenario, tmp_path, timeout=600.0)
    (report,) = reports(output)
    assert re.fullmatch(rf"{ALL}; {CHECKED[scenario]}", report), output


def test_with_check_groups_that_differ_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CHECK, "1")
    (report,) = reports(run("gloo", "split", tmp_path, timeout=600.0))
    for lists in (r"\(\[\[0, 1\], \[2, 3\]\]\)", r"\(\[\[0, 1, 2\], \[3\]\]\)"):
        assert re.search(rf"split{lists} #2 at {line('split')}", report), report


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_with_check_calls_may_cross_between_groups(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CHECK, "1")
    output = run(backend, "crossed", tmp_path, timeout=20.0)
    assert output.count("crossed and well") == 4, output
    assert not reports(output), output


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_with_check_a_difference_in_one_of_two_groups_is_reported_with_the_group(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CHECK, "1")
    output = run(backend, "group", tmp_path, timeout=600.0)
    (report,) = reports(output)
    group = "in group 2 of ranks 0,1,2,3"
    assert re.search(rf"all_reduce #1 float32\[1024\] at {line('group')} {group}", report), output
    assert re.search(rf"rank 3 \S+ .*all_reduce #1 float32\[512\] at {line('group odd')} {group}", report), output


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_ranks_that_are_always_in_some_call_of_torch_do_not_hang(backend: str, tmp_path: Path) -> None:
    output = run(backend, "busy", tmp_path, timeout=2.0)
    assert output.count("busy and well") == 4, output


@pytest.mark.parametrize(
    ("backend", "scenario"), [("gloo", "op"), ("gloo", "torch"), ("mpi", "order"), ("mpi", "torch")]
)
def test_without_check_the_timeout_reports_the_odd_rank(backend: str, scenario: str, tmp_path: Path) -> None:
    """What the ranks wait in then is the backend's business; that rank 3 is named, and where it was, is ours."""
    output = run(backend, scenario, tmp_path, timeout=2.0)
    (report,) = reports(output)
    odd = re.search(r"rank 3 .*", report)
    assert odd, output
    assert re.search(line(scenario), odd[0]), output


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("gloo", rf"has died; last began all_reduce #2 float32\[512\] at {line('shape')}"),
        ("mpi", r"(is past|has begun) all_reduce #2 float32\[512\].*"),
    ],
)
def test_without_check_another_shape_is_reported_also_of_a_rank_that_it_killed(
    backend: str, words: str, tmp_path: Path
) -> None:
    output = run(backend, "shape", tmp_path, timeout=2.0)
    (report,) = reports(output)
    assert re.fullmatch(rf"{ALL}; rank 3 {words}", report.partition(" (")[0]), output
    if backend == "gloo":  # which aborts the rank
        (number,) = re.findall(r"\d+$", line("shape"))
        assert re.search(rf'hang_program.py", line {number} in main', output), output


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_without_check_another_dtype_of_the_same_size_is_reported(backend: str, tmp_path: Path) -> None:
    """No backend notices: the ranks go on with wrong numbers."""
    (report,) = reports(run(backend, "dtype", tmp_path, timeout=600.0))
    assert re.fullmatch(
        rf"ranks 0,1,2 have run all_reduce #2 float32\[1024\] at {line('all')}; "
        rf"rank 3 has run all_reduce #2 int32\[1024\] at {line('dtype')}: their results are wrong",
        report,
    )


def test_without_check_a_difference_that_mpi_lets_pass_is_reported(tmp_path: Path) -> None:
    """MPICH's collectives lose what is too long and report success; the ranks go on with wrong numbers."""
    output = run("mpi", "longer", tmp_path, timeout=600.0)
    (report,) = reports(output)
    at = {mark: rf"( at {line(mark)})?" for mark in ("all", "longer")}  # of one that was over at once it is not kept
    assert re.fullmatch(
        rf"ranks 0,1,2 have run all_reduce #2 float32\[1024\]{at['all']}; "
        rf"rank 3 has run all_reduce #2 float32\[1500\]{at['longer']}: their results are wrong",
        report,
    ), output


@pytest.mark.parametrize("scenario", ["brief", "brief shutdown"])
def test_a_difference_that_mpi_lets_pass_is_reported_also_of_a_job_that_is_over_at_once(
    scenario: str, tmp_path: Path
) -> None:
    (report,) = reports(run("mpi", scenario, tmp_path, timeout=600.0))
    assert re.search(r"rank 3 has run all_reduce #2 float32\[1500\].*: their results are wrong", report), report


def test_of_a_rank_that_a_long_message_has_killed_is_reported_what_it_received(tmp_path: Path) -> None:
    (report,) = reports(run("gloo", "long message", tmp_path, timeout=20.0))
    assert re.search(rf"rank 3 has died; last began recv from rank 0 float32\[1024\] at {line('receive')}", report)


def test_the_rank_that_holds_the_store_may_be_the_one_that_leaves(tmp_path: Path) -> None:
    output = run("gloo", "exit", tmp_path, timeout=2.0, odd=0)
    found = reports(output)
    assert found, output
    assert all("rank 0 has exited" in report for report in found), output
