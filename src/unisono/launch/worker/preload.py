"""Imports for restarted ranks: the agent imports once what they need, and forks them afterwards.

A training loop imports far more of torch than `import torch` does, for seconds on every rank. The first ranks record
the modules that they have loaded; an agent that restarts ranks imports the same before it forks. Only modules of torch
and unisono: their import has no side effects, while a user's may. Not if torch is built for CUDA: a module that merely
queries the number of devices would make CUDA unusable in forked ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from unisono.launch import environment

_OWN = ("torch.", "unisono.")
_NOT = ("torch.utils.tensorboard", "torch.testing")  # import third-party packages


def record_modules() -> None:
    """In a rank, after the first step: record the loaded modules, if the launcher may restart ranks."""
    path = os.environ.get(environment.FAILURE_FILE)
    if path and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        names = [name for name in list(sys.modules) if name.startswith(_OWN) and not name.startswith(_NOT)]
        temporary = Path(f"{path}.{os.getpid()}")
        temporary.write_text("\n".join(names))
        temporary.replace(_modules_of(Path(path)))


def import_recorded(records: Iterable[Path]) -> None:
    """In the agent, before it forks: import what the ranks with these failure records have recorded."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is not None:
        return
    for record in records:
        try:
            names = _modules_of(record).read_text().splitlines()
        except OSError:
            continue  # the rank ended before its first step
        for name in names:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # a rank that needs it will report the error
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # ranks do not copy the pages that the collector would write to
        return


def _modules_of(record: Path) -> Path:
    return Path(f"{record}.modules")
