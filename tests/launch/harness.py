"""Running the real command in tests, and looking for what it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from tests.warm import Warm

Address = IPv4Address | IPv6Address
MARK = "UNISONO_TEST_MARK"
COMMAND = (sys.executable, "-P", "-m", "unisono")  # -P: as the installed script, cwd is not on sys.path


@dataclass
class Run:
    """A run of the command; all that it starts carries a mark, in its environment or, where it was forked, as its name.

    The command and its agent are forked from a process that has imported torch, unless `anew`: where the start of their
    interpreters is tested, or words that come `before` the command bring it elsewhere, and not to a network namespace
    that is named as its `host` as well.
    """

    arguments: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    host: str = ""
    anew: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex[:15])  # as much as the kernel keeps of a name

    @property
    def variables(self) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return {**base, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.mark}

    @property
    def words(self) -> list[str]:
        return [*self.before, *COMMAND, *self.arguments]

    def start(self, **options: Any) -> subprocess.Popen[Any]:
        """Options as of subprocess.Popen."""
        options = {"stdin": subprocess.DEVNULL, "cwd": self.directory, "env": self.variables, **options}
        if self.anew or (self.before and not self.host):
            return subprocess.Popen(self.words, **options)
        return Warm(["unisono", *self.arguments], name=self.mark, host=self.host, **options)

    def finish(self, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        with self.start(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        assert self.left_running() == []
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        process = self.start(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            yield process
        finally:
            self.end()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def end(self) -> None:
        """Kill all that is left of it."""
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def running(self) -> list[int]:
        """Living processes with this run's mark."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                inherited = wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                marked = inherited or Path(f"/proc/{name}/comm").read_text().strip() == self.mark
            except OSError:
                continue
            if marked and is_alive(int(name)):
                found.append(int(name))
        return found

    def left_running(self, patience: float = 10) -> list[int]:
        """The marked processes that do not end by themselves within patience."""
        deadline = time.monotonic() + patience
        while (found := self.running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


def is_alive(pid: int) -> bool:
    """Whether it has not ended; whoever has to ask for its end may not have done so yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def await_end(pid: int, patience: float = 60) -> None:
    deadline = time.monotonic() + patience
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.02)


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def wait_for(path: Path, process: subprocess.Popen[str], patience: float = 60) -> None:
    """Until a file that the ranks write is there."""
    deadline = time.monotonic() + patience
    while not path.exists():
        assert process.poll() is None, f"ended early: {process.communicate()}"
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


def listening(pid: int) -> dict[str, Address]:
    """The addresses at which TCP sockets of the process listen, by inode."""
    sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    found: dict[str, Address] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found[fields[9]] = ip_address(address)
    return found
