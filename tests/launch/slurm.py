"""A real Slurm on one machine: munged, slurmctld and a slurmd for each of two nodes, in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.launch.harness import COMMAND

ROOT = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
KillWait=60
GresTypes=gpu
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:8
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:8
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None when it may."""
    if os.geteuid() != 0:
        return "its daemons need root"
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(program, path=_PATH) is None:
            return f"there is no {program} (packages slurm-wlm and munge)"
    return None


@dataclass(frozen=True)
class Slurm:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """That of a user who has activated the environment where unisono is installed."""
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD_SIZE"))
        }
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        return own | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *words: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "timeout": timeout, "env": self.environment}
        return subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload,no-any-return]

    def do(self, *words: str) -> str:
        done = self.run(*words, cwd=self.folder)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """A field of a job, such as JobState."""
        found = re.search(rf"\b{name}=(\S+)", self.do("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def await_field(self, job: str, name: str, wanted: str, patience: float = 180) -> None:
        deadline = time.monotonic() + patience
        while (found := self.field(job, name)) != wanted:
            assert time.monotonic() < deadline, f"job {job}: {name} is {found}, not {wanted}"
            time.sleep(0.2)

    def await_idle(self, patience: float = 180) -> None:
        """Until no node has a process of any job."""
        deadline = time.monotonic() + patience
        while (found := _idle_nodes(self)) != len(NODES):
            assert time.monotonic() < deadline, f"{found} of {len(NODES)} nodes are idle"
            time.sleep(0.2)

    def await_end(self, job: str, patience: float = 180) -> None:
        deadline = time.monotonic() + patience
        while (state := self.field(job, "JobState")) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            assert time.monotonic() < deadline, f"job {job} is still {state}"
            time.sleep(0.2)


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """A Slurm that answers, or RuntimeError with the reason."""
    slurm, daemons = Slurm(folder), []
    _write_config(folder)
    start = [["munged", "--foreground", "--force", *_munge_files(folder)], ["slurmctld", "-D", "-c"]]
    start += [["slurmd", "-D", "-N", node] for node in NODES]
    try:
        for number, words in enumerate(start):
            program = shutil.which(words[0], path=_PATH)
            assert program is not None
            with (folder / f"output.{number}").open("wb") as log:
                daemons.append(
                    subprocess.Popen([program, *words[1:]], stdout=log, stderr=log, env=slurm.environment, cwd=folder)
                )
            if number == 0:
                _until(lambda: (folder / "munge.socket").exists(), folder, "munged")
        _until(lambda: _idle_nodes(slurm) == len(NODES), folder, "slurmctld and slurmd")
        yield slurm
    finally:
        subprocess.run(["scancel", "--user=root"], env=slurm.environment, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _write_config(folder: Path) -> None:
    folder.chmod(0o755)  # munged insists on folders that only their owner writes to
    (folder / "state").mkdir()
    (folder / "bin").mkdir()
    command = folder / "bin" / "unisono"  # this tree's, whatever is installed
    command.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    text = _CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=ports, nodes=NODES)
    (folder / "slurm.conf").write_text(text)
    for number in range(8):  # in the place of devices, for jobs to ask for
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")


def _munge_files(folder: Path) -> list[str]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder}/munge.{name}" for option, name in files.items()]


def _idle_nodes(slurm: Slurm) -> int:
    done = slurm.run("sinfo", "--noheader", "--Node", "--format=%t", cwd=slurm.folder)
    return done.stdout.split().count("idle")


def _until(is_up: object, folder: Path, what: str, patience: float = 30) -> None:
    deadline = time.monotonic() + patience
    while not is_up():  # type: ignore[operator]
        if time.monotonic() > deadline:
            logs = [*folder.glob("output.*"), *folder.glob("*.log")]
            last = "; ".join(line for log in logs for line in log.read_text(errors="replace").splitlines()[-1:])
            raise RuntimeError(f"{what} did not come up: {last}")
        time.sleep(0.1)
