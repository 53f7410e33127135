"""A job's secret: what its launcher, agents and ranks know and nobody else does.

The launcher draws it. It travels over pipes, or over ssh, and lies in a file that the user alone can read, whose path
is in the ranks' environment: neither a command line nor a variable has the secret itself. Ranks that no launcher of
ours has started share one where the user names such a file.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from unisono.errors import UsageError
from unisono.launch import environment
from unisono.regular_files import open_regular

_LEAST = 16  # bytes of a file that a user has made
_MOST = 1 << 16


def draw() -> bytes:
    return secrets.token_bytes(32)


def write(folder: Path, secret: bytes) -> Path:
    """Write it to a new file in a folder, which should be readable by this user only, as the file is."""
    path = folder / "secret"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(secret.hex().encode())
    return path


def of_job(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret of the job that this process is part of; None where there is none."""
    path = environ.get(environment.SECRET_FILE)
    return key_in(path) if path else None


def key_in(path: str | Path) -> bytes:
    """The key that a file stands for. UsageError if others may read or have written it."""
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            content = (file.read(_MOST) or b"").strip()
    except OSError as error:
        raise UsageError(
            f"{environment.SECRET_FILE}={path} cannot be read ({error.strerror}); name a file with the job's secret"
        ) from None
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (0, os.geteuid()):
        raise UsageError(f"{environment.SECRET_FILE}={path} is open to other users; run: chmod 600 {path}")
    if len(content) < _LEAST:
        raise UsageError(
            f"{environment.SECRET_FILE}={path} has {len(content)} bytes; expected {_LEAST} at least, "
            f"as made by: (umask 077; openssl rand -hex 32 > {path})"
        )
    return hashlib.sha256(content).digest()


def key_of(secret: bytes) -> bytes:
    """The key that a file written by `write` stands for."""
    return hashlib.sha256(secret.hex().encode()).digest()
