"""What ranks would each import, imported once by the process from which they are forked.

A rank that trains imports the Engine and torch._dynamo: 1,300 modules, 95 MiB, more than a second of CPU time. Forked
ranks share those of their agent, also after a restart. Whether a program trains is read off its text, so that one which
only communicates starts as before; a program whose text does not say so imports them in each rank.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Mapping

from unisono.launch.job import MODULE, SCRIPT, Entrypoint

_MODULES = ("unisono.train.engine", "unisono.verify.self_check", "torch._dynamo")
_LIBRARY, _TRAINS = re.compile(rb"\bunisono\b"), re.compile(rb"\b(?:Engine|parallelize)\b")
_SETTINGS = re.compile(rb"\b(?:TORCH(?:DYNAMO|INDUCTOR|_LOGS|_COMPILE|_TRACE)|SYMPY)")  # variables read at the import
_LONGEST = 1 << 20  # bytes of a program that are looked at


def is_wanted(program: Entrypoint, variables: Mapping[str, str]) -> bool:
    """Whether ranks of this program train, and with settings that this process has, too. `variables`: the ranks'."""
    own = {name for name, value in variables.items() if os.environ.get(name) != value}
    if any(_SETTINGS.match(name.encode(errors="replace")) for name in own):
        return False
    try:
        with open(_path(program), "rb") as file:
            text = file.read(_LONGEST)
    except (OSError, ValueError):
        return False
    named = _LIBRARY.search(text)
    return named is not None and bool(_TRAINS.search(text, named.end())) and not _SETTINGS.search(text)


def _path(program: Entrypoint) -> str:
    if program.kind not in (SCRIPT, MODULE):
        raise ValueError(f"a {program.kind} has no text")
    file = program.target.replace(".", os.sep) + ".py" if program.kind == MODULE else program.target
    return os.path.join(program.directory, file)


def load() -> None:
    """What cannot be imported is left to the ranks, which report it where they need it."""
    with contextlib.suppress(Exception):
        for name in _MODULES:
            importlib.import_module(name)
