"""A campaign of random faults: jobs that are disturbed again and again must end as if nobody had disturbed them.

A job is started, disturbed by a fault of some kind (`kinds`), and left alone until a step is done again; if it ended,
it is started again with resume=True, as a scheduler would. At its end, `Report` has what is wrong: another state than
the undisturbed job's, a step logged twice or never, other samples than in the undisturbed job, processes or files that
are left.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import warm
from tests.faults import program
from tests.launch.harness import Run, is_alive
from tests.launch.namespaces import NAMES, Hosts
from unisono.launch import environment

PROGRAM = str(Path(program.__file__))
MOST_RESTARTS = "1000"
LONGEST = 240.0  # seconds for a step to be done again, on a busy machine
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Setup:
    """What a job runs on."""

    name: str
    plan: str
    backend: str = "gloo"
    hosts: int = 1

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

    def start(self) -> None:
        self.starts += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        self.temporary.mkdir(exist_ok=True)
        variables = {"FAULTS_PACE": str(self.pace), "TMPDIR": str(self.temporary)}
        words = [*self.setup.options, PROGRAM, str(self.folder / "run"), self.setup.plan, "none", str(self.steps)]
        if self.hosts is None:
            self.run = Run(["run", *words], self.folder, variables)
        else:
            variables |= {"UNISONO_SSH": self.hosts.ssh, environment.HOST_TIMEOUT: "3"}
            is_mpi = self.setup.backend == "mpi"
            host = "" if is_mpi else self.hosts.namespaces[0]
            self.run = Run([], self.folder, variables, before=self.hosts.inside, host=host, anew=is_mpi)
            python = [] if is_mpi else ["--python", str(warm.write_stand_in(self.folder / "python", self.run.mark))]
            forwarded = [word for name in ("FAULTS_PACE", "TMPDIR") for word in ("-x", name)]
            self.run.arguments = ["run", *forwarded, *python, *words]
        with (self.folder / f"output.{self.starts}").open("wb") as output:
            self.process = self.run.start(stdout=output, stderr=output, start_new_session=True)

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
                pid, step = (self.folder / "run" / f"at.{rank}").read_text().split()
            except (OSError, ValueError):
                continue
            found[rank] = int(pid), int(step)
        return found

    def await_step(self, before: dict[int, tuple[int, int]], past: Sequence[int] = ()) -> None:
        """Until rank 0 has done another step, by another process than those that are `past`; or the job has ended well.
        One that ended otherwise is started again."""
        deadline = time.monotonic() + LONGEST
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
        raise AssertionError(f"{self.setup.name}: no step within {LONGEST:g} s:\n{self.output[-3000:]}")

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


@dataclass
class Report:
    """What a campaign has found."""

    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by kind: from the fault's end to the next step
    jobs: int = 0
    restarts: int = 0
    reruns: int = 0
    wrong: list[str] = field(default_factory=list)
    leaks: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        every = sorted(each for times in self.seconds.values() for each in times)
        found = [
            f"{sum(self.faults.values())} faults of {len(self.faults)} kinds in {self.jobs} jobs; {self.restarts} "
            f"restarts by the launcher, {self.reruns} jobs started again after they had ended"
        ]
        for name, count in sorted(self.faults.items()):
            times = self.seconds[name]
            found.append(
                f"  {name}: {count}; next step after {statistics.median(times):.1f} s, worst {max(times):.1f} s"
            )
        if every:
            found.append(f"next step: median {statistics.median(every):.1f} s, worst {every[-1]:.1f} s")
        left = ", ".join(f"{name}: {count}" for name, count in sorted(self.leaks.items()))
        found.append(f"left behind: {left or 'nothing'}")
        found.append(f"wrong: {len(self.wrong)}")
        return found + [f"  {each}" for each in self.wrong]


@dataclass
class Campaign:
    """Faults of these kinds, drawn by `chance`, on jobs of a setup."""

    root: Path
    chance: random.Random
    report: Report = field(default_factory=Report)
    pace: float = 0.03
    steps: int = 150
    show: Callable[[str], None] = lambda text: None
    small_disks: bool = False  # each job on one host has a file system of its own, which can be filled; needs root
    deadline: float = math.inf  # of time.monotonic(), after which jobs are left alone

    def undisturbed(self, setup: Setup, hosts: Hosts | None) -> tuple[str, dict[int, str]]:
        """The state that is reached, and the samples of each step."""
        job = Job(
            setup, self.root / f"undisturbed {setup.name}".replace(", ", "-").replace(" ", "-"), self.steps, 0.0, hosts
        )
        job.start()
        job.process.wait(timeout=LONGEST)
        return digest_of(job), samples_of(job)

    def disturb(
        self,
        setup: Setup,
        wanted: tuple[str, dict[int, str]],
        kinds: Sequence[Kind],
        most: int,
        hosts: Hosts | None = None,
    ) -> int:
        """Run one job to its end, with as many faults as it takes, `most` of them; how many those were."""
        shared = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.exists() else set()
        job = Job(setup, self.root / f"job{self.report.jobs}", self.steps, self.pace, hosts)
        with contextlib.ExitStack() as ends:
            if self.small_disks and setup.hosts == 1:
                (job.folder / "run").mkdir(parents=True)
                disk = str(job.folder / "run")
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], check=True)
                ends.callback(subprocess.run, ["umount", "--lazy", disk], check=True)
            job.start()
            ends.callback(lambda: job.run.end())
            return self._disturb(job, wanted, shared, kinds, most)

    def _disturb(
        self, job: Job, wanted: tuple[str, dict[int, str]], shared: set[str], kinds: Sequence[Kind], most: int
    ) -> int:
        job.await_step({})
        done = 0
        while not job.is_over and done < most and time.monotonic() < self.deadline:
            time.sleep(self.chance.uniform(0.0, 1.0))
            kind = self.chance.choice(kinds)
            before, past = job._progress(), list(job.ranks().values())
            if len(past) < 2:
                if job.process.poll() is None:
                    job.await_step(before)
                continue
            detail = kind.strike(job, self.chance)
            struck = time.monotonic()
            done += 1
            self.report.faults[kind.name] += 1
            job.await_step(job._progress(), past if kind.ends else ())
            seconds = time.monotonic() - struck
            self.report.seconds.setdefault(kind.name, []).append(seconds)
            self.show(f"{job.setup.name}: {kind.name}{detail and ' '}{detail}: next step after {seconds:.1f} s")
        while not job.is_over:
            job.await_step(job._progress())
        self._examine(job, wanted, shared)
        return done

    def _examine(self, job: Job, wanted: tuple[str, dict[int, str]], shared: set[str]) -> None:
        report, name = self.report, f"job {self.report.jobs} ({job.setup.name})"
        report.jobs += 1
        report.reruns += job.starts - 1
        outputs = [path.read_text(errors="replace") for path in job.folder.glob("output.*")]
        report.restarts += sum(len(re.findall(r"^restart \d+ of", text, re.MULTILINE)) for text in outputs)
        digest, samples = wanted
        if digest_of(job) != digest:
            report.wrong.append(f"{name} reached {digest_of(job)}, undisturbed {digest}")
        if samples_of(job) != samples:
            report.wrong.append(f"{name} used other samples than the undisturbed job")
        logged = (job.folder / "run" / "steps.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in logged]
        if steps != list(range(1, self.steps + 1)):
            report.wrong.append(f"{name} logged steps twice or not at all")
        if left := job.run.left_running(20):
            report.wrong.append(f"{name} left processes: {left}")
        for path in job.temporary.glob("unisono-*"):
            report.leaks[
                "temporary folders of MPI jobs" if "-mpi-" in path.name else "temporary folders of agents"
            ] += 1
        for entry in set(os.listdir(SHARED_MEMORY)) - shared if SHARED_MEMORY.exists() else ():
            report.leaks[f"/dev/shm/{entry[:10]}"] += 1


def digest_of(job: Job) -> str:
    found = re.search(r"step (\d+) done: (\w+)", job.output)
    if found is None or int(found[1]) != job.steps:
        raise AssertionError(f"{job.setup.name}: the job did not come to its end:\n{job.output[-3000:]}")
    return found[2]


def samples_of(job: Job) -> dict[int, str]:
    """The samples of each step, as they were used last."""
    found = {}
    for line in (job.folder / "run" / "samples").read_text().splitlines():
        step, _, ids = line.partition(" ")
        if step.isdigit() and ids.endswith("."):
            found[int(step)] = ids
    return found
