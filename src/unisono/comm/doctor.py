"""`unisono doctor`: what of this machine unisono can use, and how to fix what it cannot."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import unisono.errors
from unisono.amounts import format_bytes

GOOD, BAD, ABSENT = "good", "bad", "absent"  # absent: not there, and not needed either
_MARKS = {GOOD: "[green]✓[/]", BAD: "[red]✗[/]", ABSENT: "[yellow]–[/]"}

NEWEST_TORCH = [2, 13]  # of .github/workflows/release.yml
_FOR_DEVELOPERS = ("dev", "docs", "peers", "peers-quantum")


@dataclass(frozen=True)
class Finding:
    what: str
    state: str
    text: str
    fix: str = ""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="check backends, MPI, GPUs, ports, ssh and versions")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quiet", action="store_true", help="print only what has to be fixed")
    parser.set_defaults(handler=run)


def run(chosen: argparse.Namespace) -> int:
    """Print every finding; 1 when something is bad."""
    if chosen.json:
        found = list(examine())
        print(json.dumps([asdict(each) for each in found], indent=1))
        return int(any(each.state == BAD for each in found))
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    bad = 0
    for finding in examine():
        bad += finding.state == BAD
        if chosen.quiet and finding.state != BAD:
            continue
        console.print(f" {_MARKS[finding.state]} [bold]{escape(f'{finding.what:<14}')}[/] {escape(finding.text)}")
        if finding.fix:
            console.print(f"   {'':14} → {escape(finding.fix)}")
    if chosen.quiet:
        return 1 if bad else 0
    console.print("all good" if not bad else f"{bad} to fix")
    return 1 if bad else 0


def examine() -> Iterator[Finding]:
    yield from _versions()
    yield from _cores()
    yield from _gpus()
    yield _gloo()
    yield _mpi()
    yield _mpiexec()
    yield _loopback()
    yield _host_name()
    yield _ssh()
    yield _shared_memory()
    yield from _extras()


def _extras() -> Iterator[Finding]:
    """The optional dependencies of each extra of the installed package, but for its developers' own."""
    try:
        metadata = importlib.metadata.metadata("unisono")
    except importlib.metadata.PackageNotFoundError:
        return
    needs: dict[str, list[str]] = {}
    for line in metadata.get_all("Requires-Dist") or ():
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
        if extra is not None and not requirement.startswith("unisono["):
            needs.setdefault(extra[1], []).append(requirement.strip())
    for name, requirements in needs.items():
        if name not in _FOR_DEVELOPERS:
            lacking = [each for each in requirements if not _is_met(each)]
            fix = f"pip install 'unisono[{name}]'" if lacking else ""
            text = f"without {', '.join(lacking)}" if lacking else ", ".join(requirements)
            yield Finding(f"[{name}]", ABSENT if lacking else GOOD, text, fix)


def _is_met(requirement: str) -> bool:
    found = re.match(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?", requirement)
    if found is None:
        return False
    try:
        version = importlib.metadata.version(found[1])
    except importlib.metadata.PackageNotFoundError:
        return False
    return _numbers(version) >= _numbers(found[2] or "0")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]


def _versions() -> Iterator[Finding]:
    import torch

    python = platform.python_version()
    fits = sys.version_info >= (3, 11)
    yield Finding("python", GOOD if fits else BAD, f"{python} at {sys.executable}", "" if fits else "use Python 3.11+")
    yield _torch(torch.__version__)
    yield Finding("unisono", GOOD, unisono.__version__)


def _torch(version: str) -> Finding:
    numbers = _numbers(version)[:2]
    if numbers < [2, 11]:
        return Finding("torch", BAD, version, "pip install 'torch>=2.11'")
    if numbers > NEWEST_TORCH:
        newest = ".".join(map(str, NEWEST_TORCH))
        return Finding("torch", GOOD, f"{version}: newer than {newest}, the newest that unisono is tested with")
    return Finding("torch", GOOD, version)


def _cores() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    yield Finding("cores", GOOD, f"{usable} usable of {os.cpu_count()}, {platform.machine()}")


def _gpus() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        built = torch.version.cuda
        text = "none visible" if built else "none: this torch is a CPU build"
        yield Finding("gpu", ABSENT, text)
        yield Finding("nccl", ABSENT, "needs a GPU")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("gpu", GOOD, f"{len(names)}: {', '.join(sorted(set(names)))}")
    if dist.is_nccl_available():
        yield Finding("nccl", GOOD, ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("nccl", BAD, "not in this build of torch", "install a CUDA build of torch from its own site")


def _gloo() -> Finding:
    import torch.distributed as dist

    if dist.is_gloo_available():
        return Finding("gloo", GOOD, "built in")
    return Finding("gloo", BAD, "not in this build of torch", "pip install --force-reinstall torch")


def _mpi() -> Finding:
    """Asked in a process of its own: loading a broken MPI library can take the process down."""
    if importlib.util.find_spec("mpi4py") is None:
        return Finding("mpi", ABSENT, "mpi4py is not installed", "pip install 'unisono[mpi]'")
    probe = (
        "import mpi4py; from unisono.comm.mpi import library; MPI = library.load();"
        "print(MPI.Get_library_version().splitlines()[0].replace('\\t', ' ').split(', package')[0]);"
        "print(mpi4py.__version__, MPI.Query_thread() == MPI.THREAD_MULTIPLE)"
    )
    try:
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return Finding("mpi", BAD, "the MPI library hangs when it starts", "check the site's MPI, or use the wheel")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Finding("mpi", BAD, f"mpi4py finds no MPI library: {last}", "pip install mpich, or set MPI4PY_LIBMPI")
    library, rest = done.stdout.strip().splitlines()[:2]
    version, multiple = rest.split()
    text = f"{' '.join(library.split())}, mpi4py {version}"
    if multiple != "True":
        return Finding("mpi", BAD, f"{text}, without THREAD_MULTIPLE", "use an MPI built with MPI_THREAD_MULTIPLE")
    return Finding("mpi", GOOD, text)


def _mpiexec() -> Finding:
    from unisono.launch.transport import mpiexec

    if importlib.util.find_spec("mpi4py") is None:
        return Finding("mpiexec", ABSENT, "not needed without mpi4py")
    try:
        found = mpiexec.find()
    except unisono.errors.UnisonoError as error:
        return Finding("mpiexec", BAD, str(error), "pip install mpich")
    return Finding("mpiexec", GOOD, f"{found.flavour} at {found.path}")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            return Finding("ports", GOOD, "free ports on loopback can be opened and reached")
    except OSError as error:
        return Finding("ports", BAD, f"loopback does not work: {error}", "bring it up: ip link set lo up")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        text = f"{name!r} does not resolve: other hosts could not find rank 0"
        return Finding("host name", BAD, text, f"add '127.0.1.1 {name}' to /etc/hosts")
    return Finding("host name", GOOD, f"{name} is {address}")


def _ssh() -> Finding:
    path = shutil.which("ssh")
    if path is None:
        return Finding("ssh", ABSENT, "not installed; only needed for several hosts", "install openssh-client")
    keys = [key for key in Path.home().glob(".ssh/id_*") if not key.name.endswith(".pub")]
    agent = bool(os.environ.get("SSH_AUTH_SOCK"))
    if not keys and not agent:
        return Finding("ssh", ABSENT, f"{path}, but no key; only needed for several hosts", "ssh-keygen, ssh-copy-id")
    return Finding("ssh", GOOD, f"{path}, {len(keys)} keys{', and an agent' if agent else ''}")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", BAD, "missing: MPI and data loaders exchange data there", "mount a tmpfs there")
    text = f"{format_bytes(free)} free"
    if free < 64 << 20:
        return Finding("/dev/shm", BAD, f"{text}: MPI and data loaders need more", "in a container: --shm-size=1g")
    return Finding("/dev/shm", GOOD, text)
