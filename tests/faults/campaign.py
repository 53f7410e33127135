"""A campaign of random faults: jobs that are disturbed again and again must end as if nobody had disturbed them.

A job is started, disturbed by a fault of some kind (`kinds`), and left alone until a step is done again; if it ended,
it is started again with resume=True, as a scheduler would. At its end its record (`records`) has what is wrong: another
state than the undisturbed job's, a step logged twice or never, other samples than in the undisturbed job, processes or
files that are left. What the campaign itself has to know of a job is noted beside the run folder, whose disk is filled,
and at times read-only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests import warm
from tests.faults import program
from tests.faults.records import JobRecord
from tests.launch.harness import Run, is_alive
from tests.launch.namespaces import NAMES, Hosts
from unisono.launch import environment

PROGRAM = str(Path(program.__file__))
MOST_RESTARTS = "1000"
LONGEST = 600.0  # seconds for a step to be done again, on a busy machine
NOTES = program.NOTES
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Setup:
    """What a job runs on."""

    name: str
    plan: str
    backend: str = "gloo"
    hosts: int = 1
    is_peer: bool = False  # torchrun's, to compare with

    @property
    def options(self) -> list[str]:
        where = ["-n", "2"] if self.hosts == 1 else ["-H", ",".join(f"{name}:1" for name in NAMES)]
        return [*where, "--backend", self.backend, "--max-restarts", MOST_RESTARTS, "--timeout", "20"]


SETUPS = (
    Setup("gloo, ZeRO 1", "dp=2,zero=1"),
    Setup("gloo, pipeline", "pp=2,microbatches=2"),
    Setup("gloo, ZeRO 3", "dp=2,zero=3"),
    Setup("MPI, ZeRO 1", "dp=2,zero=1", "mpi"),
    Setup("MPI, pipeline", "pp=2,microbatches=2", "mpi"),
    Setup("gloo, two hosts", "dp=2,zero=1", hosts=2),
    Setup("MPI, two hosts", "dp=2,zero=1", "mpi", hosts=2),
)


@dataclass
class Job:
    """A job of a setup in a folder, started as often as it takes."""

    setup: Setup
    folder: Path
    steps: int
    pace: float  # seconds between steps, so that faults find the job running
    hosts: Hosts | None = None
    starts: int = 0
    run: Run = field(init=False)
    longest: ClassVar[float] = LONGEST

    def start(self) -> None:
        self.starts += 1
        for folder in (self.notes, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        variables = {"FAULTS_PACE": str(self.pace), NOTES: str(self.notes), "TMPDIR": str(self.temporary)}
        words = [*self.setup.options, PROGRAM, str(self.folder / "run"), self.setup.plan, "none", str(self.steps)]
        if self.hosts is None:
            self.run = Run(["run", *words], self.folder, variables)
        else:
            variables |= {"UNISONO_SSH": self.hosts.ssh, environment.HOST_TIMEOUT: "3"}
            is_mpi = self.setup.backend == "mpi"
            host = "" if is_mpi else self.hosts.namespaces[0]
            self.run = Run([], self.folder, variables, before=self.hosts.inside, host=host, anew=is_mpi)
            python = [] if is_mpi else ["--python", str(warm.write_stand_in(self.folder / "python", self.run.mark))]
            forwarded = [word for name in ("FAULTS_PACE", NOTES, "TMPDIR") for word in ("-x", name)]
            self.run.arguments = ["run", *forwarded, *python, *words]
        with (self.folder / f"output.{self.starts}").open("wb") as output:
            self.process = self.run.start(stdout=output, stderr=output, start_new_session=True)

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def output(self) -> str:
        return (self.folder / f"output.{self.starts}").read_text(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Process numbers of ranks that have done a step and are alive."""
        return {rank: pid for rank, (pid, _) in self._progress().items() if is_alive(pid)}

    def agents(self) -> list[int]:
        """The parents of ranks."""
        return sorted({_parent(pid) for pid in self.ranks().values()} - {1, self.process.pid, os.getpid()})

    def _progress(self) -> dict[int, tuple[int, int]]:
        found = {}
        for rank in range(2):
            try:
                pid, step = (self.notes / f"at.{rank}").read_text().split()
            except (OSError, ValueError):
                continue
            found[rank] = int(pid), int(step)
        return found

    def await_step(self, before: dict[int, tuple[int, int]], past: Sequence[int] = ()) -> None:
        """Until rank 0 has done another step, by another process than those that are `past`; or the job has ended well.
        One that ended otherwise is started again."""
        deadline = time.monotonic() + self.longest
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code == 0 and f"step {self.steps} done" in self.output:
                return
            now = self._progress()
            if 0 in now and now[0] != before.get(0) and now[0][0] not in past:
                return
            if code is not None:
                self.run.left_running(20)
                self.start()
            time.sleep(0.01)
        raise AssertionError(f"{self.setup.name}: no step within {self.longest:g} s:\n{self.output[-3000:]}")

    @property
    def is_over(self) -> bool:
        return self.process.poll() == 0 and f"step {self.steps} done" in self.output


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `strike` does it, and returns once it is over, with what there is to say; `ends` whether ranks
    die of it for sure; `suits` which setups it is for."""

    name: str
    strike: Callable[[Job, random.Random], str]
    ends: bool = False
    suits: Callable[[Setup], bool] = lambda setup: True
    peer: bool = False  # torchelastic restarts the job after it, too


@dataclass
class Campaign:
    """Faults of these kinds, drawn by `chance`, on jobs of a setup."""

    root: Path
    chance: random.Random
    records: list[JobRecord] = field(default_factory=list)
    seed: int = 0
    pace: float = 0.03
    steps: int = 150
    show: Callable[[str], None] = lambda text: None
    small_disks: bool = False  # each job on one host has a file system of its own, which can be filled; needs root
    deadline: float = math.inf  # of time.monotonic(), after which jobs are left alone
    peer: type[Job] = Job  # of setups that are the peer's

    def undisturbed(self, setup: Setup, hosts: Hosts | None) -> tuple[str, dict[int, str]]:
        """The state that is reached, and the samples of each step."""
        job = Job(
            setup, self.root / f"undisturbed {setup.name}".replace(", ", "-").replace(" ", "-"), self.steps, 0.0, hosts
        )
        job.start()
        job.process.wait(timeout=LONGEST)
        return digest_of(job), samples_of(job)[0]

    def disturb(
        self,
        setup: Setup,
        wanted: tuple[str, dict[int, str]] | None,
        kinds: Sequence[Kind],
        most: int,
        hosts: Hosts | None = None,
    ) -> int:
        """Run one job to its end, with as many faults as it takes, `most` of them; how many those were. `wanted`: what
        it must reach, if that is compared."""
        shared = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else set()
        kind_of_job = self.peer if setup.is_peer else Job
        job = kind_of_job(setup, self.root / f"job{len(self.records)}", self.steps, self.pace, hosts)
        record = JobRecord(setup.name, self.seed)
        with contextlib.ExitStack() as ends:
            if self.small_disks and setup.hosts == 1:
                (job.folder / "run").mkdir(parents=True)
                disk = str(job.folder / "run")
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
                ends.callback(subprocess.run, ["umount", "--lazy", disk], check=True)
            job.start()
            ends.callback(lambda: job.run.end())
            try:
                self._disturb(job, record, kinds, most)
                self._examine(job, record, wanted, shared)
            except (AssertionError, subprocess.SubprocessError) as error:
                record.wrong["end"] = str(error)
        self.records.append(record)
        for text in record.wrong.values():
            self.show(f"{setup.name}: {text}")
        return len(record.faults)

    def _disturb(self, job: Job, record: JobRecord, kinds: Sequence[Kind], most: int) -> None:
        job.await_step({})
        while not job.is_over and len(record.faults) < most and time.monotonic() < self.deadline:
            time.sleep(self.chance.uniform(0.0, 1.0))
            kind = self.chance.choice(kinds)
            before, past = job._progress(), list(job.ranks().values())
            if len(past) < 2:
                job.await_step(before)  # which starts a job again that has ended by itself
                continue
            detail = kind.strike(job, self.chance)
            struck = time.monotonic()
            job.await_step(job._progress(), past if kind.ends else ())
            seconds = time.monotonic() - struck
            record.faults.append((kind.name, round(seconds, 3)))
            self.show(f"{job.setup.name}: {kind.name}{detail and ' '}{detail}: next step after {seconds:.1f} s")
        while not job.is_over:
            job.await_step(job._progress())

    def _examine(
        self, job: Job, record: JobRecord, wanted: tuple[str, dict[int, str]] | None, shared: set[str]
    ) -> None:
        record.reruns = job.starts - 1
        outputs = [path.read_text(errors="replace") for path in job.folder.glob("output.*")]
        record.restarts = sum(len(re.findall(r"^restart \d+ of", text, re.MULTILINE)) for text in outputs)
        if wanted is not None:
            if digest_of(job) != wanted[0]:
                record.wrong["state"] = f"reached {digest_of(job)}, undisturbed {wanted[0]}"
            samples, gaps = samples_of(job)
            if samples != wanted[1] or gaps:
                record.wrong["samples"] = f"used other samples than the undisturbed job {gaps}"
            record.unlogged, fault = check_log(job)
            if fault:
                record.wrong["log"] = fault
        if left := job.run.left_running(20):
            record.wrong["processes"] = f"left processes: {left}"
        for path in job.temporary.iterdir():
            if path.name.startswith("torchinductor"):
                continue  # torch's cache
            name = "a folder of an MPI job" if "-mpi-" in path.name else re.split(r"[-_.0-9]", path.name)[0]
            record.leaks[f"tmp/{name}"] = record.leaks.get(f"tmp/{name}", 0) + 1
        for entry in set(os.listdir(SHARED_MEMORY)) - shared if SHARED_MEMORY.exists() else ():
            record.leaks[f"/dev/shm/{entry[:10]}"] = record.leaks.get(f"/dev/shm/{entry[:10]}", 0) + 1


def digest_of(job: Job) -> str:
    found = re.search(r"step (\d+) done: (\w+)", job.output)
    if found is None or int(found[1]) != job.steps:
        raise AssertionError(f"{job.setup.name}: the job did not come to its end:\n{job.output[-3000:]}")
    return found[2]


def samples_of(job: Job) -> tuple[dict[int, str], list[str]]:
    """The samples of each step, as they were used last, and what is wrong with the order of steps: a process goes from
    a step to the next, and a new one begins at most one behind the last step that was done."""
    found: dict[int, str] = {}
    gaps: list[str] = []
    last_pid, last, highest = 0, 0, 0
    for line in (job.notes / "samples").read_text().splitlines():
        match = re.fullmatch(r"(\d+) (\d+) (.*\.)", line)
        if match is None:
            continue  # its writer was killed
        pid, step = int(match[1]), int(match[2])
        if step != last + 1 if pid == last_pid else step > highest + 1:
            gaps.append(f"step {step} after {last}")
        last_pid, last, highest = pid, step, max(step, highest)
        found[step] = match[3]
    return found, gaps


def check_log(job: Job) -> tuple[int, str]:
    """How many steps the run folder's log lacks, and what is wrong with it. A run whose disk is full goes on and warns
    of the first step that it cannot log, so steps may be missing from there on."""
    logged = []
    for line in (job.folder / "run" / "steps.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # what fitted on a full disk
            logged.append(json.loads(line)["step"])
    if len(set(logged)) < len(logged) or logged != sorted(logged):
        return 0, "logged steps twice, or in another order"
    missing = sorted(set(range(1, job.steps + 1)) - set(logged))
    starts = [step for step in missing if step - 1 not in missing]
    warned = job.notes / "unlogged"
    known = {int(step) for step in warned.read_text().split()} if warned.exists() else set()
    if unknown := sorted(set(starts) - known):
        return len(missing), f"lost steps from the log without a warning, from steps {unknown[:10]} on"
    return len(missing), ""
