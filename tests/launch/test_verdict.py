from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from unisono import cli
from unisono.launch.outcome import failure, verdict
from unisono.launch.outcome.monitor import Outcome
from unisono.launch.outcome.verdict import RankFailure


def _failed(rank: int, kind: str, age: float, code: int = 1, text: str = "") -> RankFailure:
    return RankFailure(rank, kind, text, age, code)


def test_the_oldest_failure_is_first() -> None:
    failures = [_failed(0, failure.EXCEPTION, 0.1), _failed(1, failure.EXCEPTION, 0.3)]
    assert verdict.first(failures).rank == 1


def test_a_broken_connection_is_never_first_while_anything_else_failed() -> None:
    failures = [_failed(0, failure.PEER, 0.5), _failed(1, verdict.EXIT, 0.1, code=3)]
    assert verdict.first(failures).rank == 1
    assert verdict.first(failures[:1]).rank == 0


def test_a_killed_rank_comes_before_the_reports_of_those_that_noticed() -> None:
    failures = [_failed(0, failure.HANG, 0.5), _failed(3, verdict.SIGNAL, 0.1, code=-signal.SIGKILL)]
    assert verdict.first(failures).rank == 3


def test_an_abort_may_be_a_consequence_so_time_decides() -> None:
    failures = [_failed(0, failure.EXCEPTION, 0.5), _failed(3, verdict.SIGNAL, 0.1, code=-signal.SIGABRT)]
    assert verdict.first(failures).rank == 0


def test_words() -> None:
    raised = _failed(3, failure.EXCEPTION, 0, text="Traceback\n  ...\nValueError: boom\n")
    reported = "rank 3 failed on host node1 (exit code 1):\nTraceback\n  ...\nValueError: boom"
    assert verdict.describe(raised, "node1") == reported
    assert verdict.summary(raised, None) == "rank 3 failed (exit code 1): ValueError: boom"
    silent = "rank 2 failed (exit code 7); it reported no error, as after os._exit or an exit in native code"
    assert verdict.describe(_failed(2, verdict.EXIT, 0, code=7), None) == silent
    killed = _failed(2, verdict.SIGNAL, 0, code=-signal.SIGKILL)
    assert verdict.describe(killed, None).startswith("rank 2 was killed by SIGKILL (")
    assert killed.exit_code == 137
    assert verdict.describe(_failed(0, failure.HANG, 0, text="ranks 0,1 wait\n"), "a") == "ranks 0,1 wait"
    assert verdict.describe(_failed(1, verdict.SIGNAL, 0, code=-70), None) == "rank 1 was killed by signal 70"


def test_of_a_rank_that_aborted_is_reported_what_it_and_the_others_began_last() -> None:
    aborted = _failed(2, verdict.SIGNAL, 0, code=-signal.SIGABRT)
    last = dict.fromkeys((0, 1), "all_reduce #2 float32[1024] at a.py:7")
    alike = verdict.describe(aborted, None, {**last, 2: last[0]}).splitlines()
    assert alike[1:] == ["ranks 0,1,2 last began all_reduce #2 float32[1024] at a.py:7"]
    differ = verdict.describe(aborted, None, {**last, 2: "all_reduce #2 float32[512] at a.py:10"}).splitlines()
    assert differ[1] == (
        "rank 2 last began all_reduce #2 float32[512] at a.py:10; "
        "ranks 0,1 last began all_reduce #2 float32[1024] at a.py:7"
    )
    assert "--check" in differ[2]
    assert len(verdict.describe(aborted, None, last).splitlines()) == 1  # nothing is known of the rank itself


def test_that_collectives_differ_is_said_only_where_they_do_and_where_it_crashes_ranks() -> None:
    last = dict.fromkeys((0, 1), "all_reduce #2 float32[1024] at a.py:7")

    def reported(signum: int, words: str) -> str:
        return verdict.describe(_failed(2, verdict.SIGNAL, 0, code=-signum), None, {**last, 2: words})

    assert "--check" in reported(signal.SIGSEGV, "all_reduce #2 float32[512] at a.py:10")
    assert "--check" not in reported(signal.SIGKILL, "all_reduce #2 float32[512] at a.py:10")
    assert "--check" not in reported(signal.SIGSEGV, "all_reduce #1 float32[512] at a.py:6")  # it has not come so far
    assert "--check" not in reported(signal.SIGABRT, "barrier #2 at a.py:9 in the group of ranks 1,2")
    received = reported(signal.SIGABRT, "recv from rank 0 float32[16] at a.py:9").splitlines()
    assert received[1].startswith("rank 2 last began recv from rank 0 float32[16] at a.py:9; ranks 0,1 last began")
    assert received[2] == "(gloo aborts a rank that is sent more elements than the receiving tensor holds)"


def test_the_pages_exit_codes_are_those_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text()
    rows = re.findall(r"^\| (\d+|128 \+ N|others) \| (.*) \| .* \|$", page, re.M)
    table = dict(rows)
    assert len(table) == len(rows)
    assert table.pop(str(Outcome().code)).startswith("all ranks")
    assert "exception" in table.pop(str(_failed(0, failure.EXCEPTION, 0).exit_code))
    assert "wrong use" in table.pop(str(_code_of("run", "--nonsense")))
    again = table.pop(str(failure.HANG_CODE))
    assert failure.RESUMABLE == failure.HANG_CODE
    assert "a rendezvous that failed" in again
    assert "has saved" in again
    assert set(table) > {"128 + N", "others"}
    for code, meaning in table.items():
        for name in re.findall(r"SIG[A-Z]+", meaning):
            killed = _failed(0, verdict.SIGNAL, 0, code=-signal.Signals[name])
            assert f"{killed.exit_code}" in (code, *re.findall(rf"(\d+) (?:is )?{name}", meaning))


def _code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code
