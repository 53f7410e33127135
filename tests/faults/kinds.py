"""The kinds of faults of a campaign: signals, disks, damaged files, memory, clocks, networks, other jobs."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.campaign import Job, Kind, Setup
from tests.launch.harness import is_alive
from tests.launch.namespaces import Hosts

_CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of version 1 and 2


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _rank(job: Job, chance: random.Random) -> int:
    return chance.choice(list(job.ranks().values()) or [job.process.pid])


def _agent(job: Job, chance: random.Random) -> int:
    return chance.choice(job.agents() or [job.process.pid])


def _launcher(job: Job, chance: random.Random) -> int:
    return job.process.pid


Target = Callable[[Job, random.Random], int]


def _signal(target: Target, signum: int) -> Callable[[Job, random.Random], str]:
    def strike(job: Job, chance: random.Random) -> str:
        _send(target(job, chance), signum)
        return ""

    return strike


def _pause(target: Target) -> Callable[[Job, random.Random], str]:
    def strike(job: Job, chance: random.Random) -> str:
        pid, seconds = target(job, chance), chance.uniform(0.2, 3.0)
        _send(pid, signal.SIGSTOP)
        time.sleep(seconds)
        _send(pid, signal.SIGCONT)
        return f"for {seconds:.1f} s"

    return strike


# ---- disks -----------------------------------------------------------------------------------------------------------


def _read_only(job: Job, chance: random.Random) -> str:
    """What is opened for writing in the run folder from now on is refused."""
    folder, beside, seconds = job.folder / "run", job.folder / "beside", chance.uniform(0.3, 2.0)
    beside.mkdir(exist_ok=True)
    with contextlib.ExitStack() as mounts:
        _do("mount", "--bind", str(folder), str(beside))
        mounts.callback(_do, "umount", "--lazy", str(beside))
        _do("mount", "-o", "remount,bind,ro", str(beside))
        _do("mount", "--bind", str(beside), str(folder))
        mounts.callback(_do, "umount", "--lazy", str(folder))
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


def _full(job: Job, chance: random.Random) -> str:
    """The run folder's file system, which is a small one of its own (Campaign.small_disks), is filled for a while."""
    filler, seconds = job.folder / "run" / "filler", chance.uniform(0.3, 2.0)
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(seconds)
    finally:
        filler.unlink(missing_ok=True)
    return f"for {seconds:.1f} s"


def _slow(job: Job, chance: random.Random) -> str:
    """Every fsync of the ranks takes a second longer."""
    flag = job.notes / "slow"
    flag.touch()
    time.sleep(chance.uniform(0.5, 2.0))
    flag.unlink(missing_ok=True)
    return ""


def _damage(how: str) -> Callable[[Job, random.Random], str]:
    def strike(job: Job, chance: random.Random) -> str:
        """Some file of the newest checkpoint; then a rank is killed, so that it is read."""
        found = sorted((job.folder / "run" / "checkpoints").glob("step-*"))
        detail = "no checkpoint yet"
        if len(found) > 1:
            with contextlib.suppress(OSError, IndexError):
                path = chance.choice(sorted(found[-1].iterdir()))
                _spoil(path, how, chance)
                detail = f"{path.parent.name}/{path.name}"
        _send(_rank(job, chance), signal.SIGKILL)
        return detail

    return strike


def _spoil(path: Path, how: str, chance: random.Random) -> None:
    if how == "gone":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[chance.randrange(len(content)) :]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


# ---- memory, clocks, other jobs --------------------------------------------------------------------------------------


def _cgroup() -> Path | None:
    """Where the kernel can be told how much memory a process may have."""
    for root in _CGROUPS:
        probe = root / f"uniprobe{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        is_there = any((probe / name).exists() for name in ("memory.limit_in_bytes", "memory.max"))
        probe.rmdir()
        if is_there:
            return root
    return None


def _leak(job: Job, chance: random.Random) -> str:
    """A rank takes memory until the kernel kills it."""
    rank, pid = chance.choice(sorted(job.ranks().items()) or [(0, job.process.pid)])
    root = _cgroup()
    assert root is not None
    group = root / f"unifaults{pid}"
    group.mkdir()
    is_first_version = (group / "memory.limit_in_bytes").exists()
    (group / ("memory.limit_in_bytes" if is_first_version else "memory.max")).write_text(str(64 << 20))
    flag = job.notes / f"leak.{rank}"
    try:
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid))
            flag.touch()
        deadline = time.monotonic() + 60
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        flag.unlink(missing_ok=True)
        _send(pid, signal.SIGKILL)
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
    return f"rank {rank}"


def _raise(job: Job, chance: random.Random) -> str:
    rank, pid = chance.choice(sorted(job.ranks().items()) or [(0, job.process.pid)])
    flag = job.notes / f"raise.{rank}"
    flag.touch()
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    flag.unlink(missing_ok=True)
    return f"rank {rank}"


def _clock(job: Job, chance: random.Random) -> str:
    """The ranks' clock is years ahead or behind from now on, until it jumps again."""
    offset = chance.choice((-1, 1)) * chance.uniform(1e3, 1e9)
    flag = job.notes / "clock"
    beside = flag.with_suffix(".new")
    beside.write_text(f"{offset:.0f}")
    beside.replace(flag)
    return f"by {offset:.0f} s"


def _second_job(job: Job, chance: random.Random) -> str:
    """Another job with the same folder; it is ended after some seconds if it was not refused."""
    other = Job(job.setup, job.folder, job.steps, job.pace, job.hosts, starts=job.starts + 1000)
    other.start()
    try:
        code = other.process.wait(timeout=chance.uniform(5.0, 20.0))
        return f"ended with code {code}"
    except subprocess.TimeoutExpired:
        return "was not refused in time"
    finally:
        _send(other.process.pid, signal.SIGTERM)  # killed with all its processes, it could leave files
        for pid in other.run.left_running(240):
            _send(pid, signal.SIGKILL)
        other.run.left_running(10)
        (job.folder / f"output.{other.starts}").unlink()


# ---- networks --------------------------------------------------------------------------------------------------------


def _partition(job: Job, chance: random.Random) -> str:
    assert job.hosts is not None
    seconds = chance.uniform(0.5, 6.0)
    _cut(job.hosts, seconds)
    return f"for {seconds:.1f} s"


def _loss(job: Job, chance: random.Random) -> str:
    """What is sent in many short moments is lost."""
    assert job.hosts is not None
    for _ in range(10):
        _cut(job.hosts, chance.uniform(0.01, 0.3))
        time.sleep(chance.uniform(0.01, 0.3))
    return ""


def _cut(hosts: Hosts, seconds: float) -> None:
    hosts.cut_cable()
    time.sleep(seconds)
    hosts.mend_cable()


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _one_host(setup: Setup) -> bool:
    return setup.hosts == 1


def _two_hosts(setup: Setup) -> bool:
    return setup.hosts == 2


SIGNALS = (
    Kind("SIGKILL to a rank", _signal(_rank, signal.SIGKILL), ends=True, peer=True),
    Kind("SIGTERM to a rank", _signal(_rank, signal.SIGTERM), ends=True, peer=True),
    Kind("SIGSTOP of a rank, SIGCONT", _pause(_rank)),
    Kind("SIGKILL to an agent", _signal(_agent, signal.SIGKILL), ends=True),
    Kind("SIGTERM to an agent", _signal(_agent, signal.SIGTERM), ends=True),
    Kind("SIGSTOP of an agent, SIGCONT", _pause(_agent)),
    Kind("SIGKILL to the launcher", _signal(_launcher, signal.SIGKILL), ends=True),
    Kind("SIGTERM to the launcher", _signal(_launcher, signal.SIGTERM), ends=True),
    Kind("SIGSTOP of the launcher, SIGCONT", _pause(_launcher)),
)
FILES = (
    Kind("a slow disk", _slow),
    Kind("a checkpoint's bit flipped", _damage("flipped"), ends=True),
    Kind("a checkpoint's file truncated", _damage("truncated"), ends=True),
    Kind("a checkpoint's file gone", _damage("gone"), ends=True),
)
OTHERS = (
    Kind("an exception in a rank", _raise, ends=True, peer=True),
    Kind("the clock jumps", _clock),
    Kind("a second job with the folder", _second_job),
)
MOUNTS = (Kind("a full disk", _full, suits=_one_host), Kind("a read-only disk", _read_only, suits=_one_host))
NETWORKS = (Kind("a partition", _partition, suits=_two_hosts), Kind("lost packets", _loss, suits=_two_hosts))
MEMORY = (Kind("a leak, and the OOM killer", _leak, ends=True, suits=_one_host),)


def available() -> tuple[Kind, ...]:
    """The kinds that this machine can do: some need root."""
    found = [*SIGNALS, *FILES, *OTHERS]
    if os.geteuid() == 0 and shutil.which("mount"):
        found += [*MOUNTS, *NETWORKS]
    if _cgroup() is not None:
        found += MEMORY
    return tuple(found)
