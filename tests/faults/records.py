"""What campaigns of faults have found: a record of each job, a file of them that several campaigns add to, the totals.

A record is a line of JSON, so that runs of 20 minutes on several machines add up to one campaign.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

PEER = "torchelastic, DDP"  # the setup of jobs that torchrun starts
CHECKS = {  # by their names in `JobRecord.wrong`
    "end": "jobs that hung or ended with an error",
    "state": "other parameters or optimizer state than undisturbed, bit for bit",
    "samples": "samples lost, doubled, or other than undisturbed",
    "log": "steps logged twice, or lost from the log without a warning",
    "processes": "processes left",
}


@dataclass
class JobRecord:
    setup: str
    seed: int
    faults: list[tuple[str, float]] = field(default_factory=list)  # kind, seconds from its end to the next step
    restarts: int = 0  # by the launcher
    reruns: int = 0  # starts after the job had ended
    unlogged: int = 0  # steps of which the run reported that they could not be logged
    wrong: dict[str, str] = field(default_factory=dict)
    leaks: dict[str, int] = field(default_factory=dict)  # what is left in /dev/shm and in the temporary folder


def append(path: Path, records: Iterable[JobRecord]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(asdict(record)) + "\n")


def read(path: Path) -> list[JobRecord]:
    found = [JobRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in found:
        record.faults = [(kind, seconds) for kind, seconds in record.faults]
    return found


def summary(records: Sequence[JobRecord], peer_kinds: Sequence[str] = ()) -> list[str]:
    """The totals as lines; `peer_kinds`: the faults for which torchelastic's time to resume stands beside ours."""
    ours = [record for record in records if record.setup != PEER]
    faults = [fault for record in ours for fault in record.faults]
    seeds = sorted({record.seed for record in ours})
    lines = [
        f"{len(faults)} faults of {len({kind for kind, _ in faults})} kinds in {len(ours)} jobs, seeds {seeds}; "
        f"{sum(record.restarts for record in ours)} restarts by the launcher, "
        f"{sum(record.reruns for record in ours)} jobs started again after they had ended",
        "seconds from the fault's end to the next step:",
    ]
    lines += [
        f"  {kind}: {_times([seconds for name, seconds in faults if name == kind])}"
        for kind in sorted({kind for kind, _ in faults})
    ]
    for setup in sorted({record.setup for record in ours}):
        there = [record for record in ours if record.setup == setup]
        times = [seconds for record in there for _, seconds in record.faults]
        lines.append(f"  {setup}, {len(there)} jobs: {_times(times)}")
    lines += _beside_peer(records, peer_kinds)
    for check, words in CHECKS.items():
        lines.append(f"{words}: {sum(check in record.wrong for record in ours)} of {len(ours)} jobs")
    unlogged = sum(record.unlogged for record in ours)
    lines.append(f"steps that were not logged while the disk was full, as the run reported: {unlogged}")
    leaks: Counter[str] = Counter()
    for record in ours:
        leaks.update(record.leaks)
    left = ", ".join(f"{name}: {count}" for name, count in sorted(leaks.items()))
    lines.append(f"left in /dev/shm and in the temporary folder: {left or 'nothing'}")
    return lines + [f"  {record.setup}: {text}" for record in ours for text in record.wrong.values()]


def _beside_peer(records: Sequence[JobRecord], kinds: Sequence[str]) -> list[str]:
    """The time to resume of jobs on one host over gloo beside torchelastic's, for the faults that both were given."""
    lines = []
    for kind in kinds:
        times: dict[str, list[float]] = {"unisono": [], PEER: []}
        for record in records:
            if record.setup == PEER or (record.setup.startswith("gloo") and "hosts" not in record.setup):
                name = PEER if record.setup == PEER else "unisono"
                times[name] += [seconds for each, seconds in record.faults if each == kind]
        if all(times.values()):
            beside = ", ".join(f"{name} {_times(values)}" for name, values in times.items())
            lines.append(f"  {kind}, one host, gloo: {beside}")
    peers = [record for record in records if record.setup == PEER]
    if peers:
        given_up = sum("end" in record.wrong for record in peers)
        lines.append(f"  {PEER}: {given_up} of {len(peers)} jobs made no step for two minutes and were given up")
    return lines


def _times(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{len(values)} faults, median {statistics.median(values):.1f} s, worst {max(values):.1f} s"
