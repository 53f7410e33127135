"""mpiexec: which one to use, its flavour (MPICH or Open MPI), and its command line for a job."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import LaunchError, UsageError
from unisono.launch import environment
from unisono.launch.hosts import Placement

# On one host, where ranks talk by shared memory, UCX and libfabric listen at the loopback interface. Open MPI's own TCP
# transport listens on all interfaces, whatever it is told, and is left out.
_ON_ONE_HOST = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo", "OMPI_MCA_btl": "^tcp"}

MPICH = "MPICH"
OPEN_MPI = "Open MPI"


@dataclass(frozen=True)
class Mpiexec:
    path: str
    flavour: str

    def command(
        self, placements: Sequence[Placement], program: Sequence[str], interface: str | None = None
    ) -> list[str]:
        """The command that starts `program` on every rank. MPICH needs the interface that leads to other hosts."""
        n = sum(placement.count for placement in placements)
        hosts = ",".join(f"{each.host.name}:{each.count}" for each in placements)
        elsewhere = any(not each.host.is_local for each in placements)
        if self.flavour == OPEN_MPI:
            options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            # with OVERSUBSCRIBE all ranks would be placed on the first host
            options += ["--host", hosts] if elsewhere else ["--map-by", ":OVERSUBSCRIBE"]
            options += ["--bind-to", "none"]
            options += [word for name in self.exported() for word in ("-x", name)]
        else:
            options = ["-hosts", hosts] if elsewhere else []
            options += ["-iface", interface] if interface else []
        return [self.path, *options, "-n", str(n), *program]

    def variables(self, ssh: Sequence[str], folder: Path, elsewhere: bool) -> dict[str, str]:
        """Environment variables of mpiexec; folder must exist as long as the job."""
        found = {} if elsewhere else {name: _ON_ONE_HOST[name] for name in _ON_ONE_HOST if name not in os.environ}
        if tuple(ssh) != ("ssh",):
            wrapper = folder / "ssh"
            wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(ssh)} "$@"\n')
            wrapper.chmod(0o700)
            names = ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent")
            found |= dict.fromkeys(names, str(wrapper))
        return found | self._library()

    def _library(self) -> dict[str, str]:
        """mpi4py must load the library of this mpiexec: set its path for Open MPI in its own prefix."""
        if self.flavour != OPEN_MPI or "MPI4PY_LIBMPI" in os.environ:
            return {}
        libraries = sorted((Path(self.path).parent.parent / "lib").glob("libmpi.so.*"), key=lambda p: len(p.name))
        if not libraries:
            return {}
        return {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(libraries[0])}

    def exported(self) -> list[str]:
        """Open MPI forwards only these variables to other hosts; MPICH all."""
        named = [environment.CONNECT, environment.PRELOAD, "MPI4PY_MPIABI", "MPI4PY_LIBMPI", "PYTHONPATH"]
        return [name for name in named if name in os.environ or name != "PYTHONPATH"]


def find() -> Mpiexec:
    """$UNISONO_MPIEXEC, else the one beside the interpreter, else the first on PATH."""
    chosen = os.environ.get(environment.MPIEXEC)
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise UsageError(f"{environment.MPIEXEC}={chosen!r} is not an executable; check the path")
        return Mpiexec(path, _flavour(path))
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise LaunchError(
            "--backend mpi needs mpiexec, and there is none beside the interpreter or on PATH;"
            " run: pip install 'unisono[mpi]'"
        )
    return Mpiexec(path, _flavour(path))


def _flavour(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed: {error}; choose another with {environment.MPIEXEC}") from None
    output = done.stdout + done.stderr
    if "Open MPI" in output or "OpenRTE" in output or "PRRTE" in output:
        return OPEN_MPI
    if "HYDRA" in output or "MPICH" in output or "Intel(R) MPI" in output:
        return MPICH
    first = output.strip().splitlines()[0] if output.strip() else "nothing"
    raise LaunchError(
        f"{path} is neither MPICH's nor Open MPI's mpiexec (--version prints {first!r});"
        f" choose another with {environment.MPIEXEC}"
    )
