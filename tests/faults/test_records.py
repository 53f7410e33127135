"""What a campaign takes for wrong in a job's notes and logs, and how records of several campaigns add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import records
from tests.faults.campaign import SETUPS, Job, check_log, samples_of
from tests.faults.records import JobRecord

STEPS = 6


def job(folder: Path, logged: str, unlogged: str = "", samples: str = "") -> Job:
    made = Job(SETUPS[0], folder, STEPS, 0.0)
    for each in (folder / "run", made.notes):
        each.mkdir(exist_ok=True)
    (folder / "run" / "steps.jsonl").write_text(logged)
    (made.notes / "unlogged").write_text(unlogged)
    (made.notes / "samples").write_text(samples)
    return made


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


def test_steps_may_be_missing_from_the_log_only_after_a_warning(tmp_path: Path) -> None:
    assert check_log(job(tmp_path, lines(1, 2, 3, 4, 5, 6))) == (0, "")
    full_at_three = lines(1, 2) + '{"ste\n' + lines(5, 6)
    assert check_log(job(tmp_path, full_at_three, "3\n")) == (2, "")
    missing, fault = check_log(job(tmp_path, full_at_three, "4\n"))
    assert (missing, fault) == (2, "lost steps from the log without a warning, from steps [3] on")
    for logged in ((1, 2, 3, 3, 4, 5, 6), (1, 2, 4, 3, 5, 6)):
        assert "twice, or in another order" in check_log(job(tmp_path, lines(*logged)))[1]


@pytest.mark.parametrize(
    ("samples", "gaps"),
    [
        ("7 1 4 2.\n7 2 1 3.\n9 2 1 3.\n9 3 0 5.\n", []),  # killed after step 2, and gone on from step 1
        ("7 1 4 2.\n7 3 0 5.\n", ["step 3 after 1"]),
        ("7 1 4 2.\n9 3 0 5.\n", ["step 3 after 1"]),
        ("7 1 4 2.\n7 1 4 2.\n", ["step 1 after 1"]),
    ],
)
def test_a_step_that_is_left_out_or_done_again_is_found(tmp_path: Path, samples: str, gaps: list[str]) -> None:
    assert samples_of(job(tmp_path, "", samples=samples))[1] == gaps


def test_records_of_several_campaigns_add_up(tmp_path: Path) -> None:
    file = tmp_path / "campaign.jsonl"
    records.append(file, [JobRecord("gloo, ZeRO 1", 1, [("SIGKILL to a rank", 2.0), ("a full disk", 9.0)], restarts=2)])
    peers = [
        JobRecord(records.PEER, 1, [("SIGKILL to a rank", 7.0)], wrong=wrong) for wrong in ({}, {"end": "no step"})
    ]
    peers[1].faults.clear()
    records.append(file, peers)
    other = JobRecord("MPI, ZeRO 1", 2, [("SIGKILL to a rank", 4.0)], reruns=1, unlogged=3, leaks={"tmp/x": 1})
    other.wrong["processes"] = "left processes: [5]"
    records.append(file, [other])
    text = "\n".join(records.summary(records.read(file), ["SIGKILL to a rank"]))
    assert "3 faults of 2 kinds in 2 jobs, seeds [1, 2]; 2 restarts by the launcher, 1 jobs started again" in text
    assert "SIGKILL to a rank: 2 faults, median 3.0 s, worst 4.0 s" in text
    assert "unisono 1 faults, median 2.0 s, worst 2.0 s, torchelastic, DDP 1 faults, median 7.0 s, worst 7.0 s" in text
    assert "torchelastic, DDP: 1 of 2 jobs made no step for two minutes and were given up" in text
    assert "processes left: 1 of 2 jobs" in text
    assert "bit for bit: 0 of 2 jobs" in text
    assert "as the run reported: 3" in text
    assert text.endswith("tmp/x: 1\n  MPI, ZeRO 1: left processes: [5]")
