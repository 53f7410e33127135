"""What ranks that are started again would import again: the agent imports it once, and forks them with it.

A training loop draws in far more of torch than `import torch` does, for seconds on every rank. The first ranks note
what they have loaded; an agent that has to start others loads the same beforehand. Only torch's own modules and
unisono's: they compute nothing when they are imported, while a user's may do anything. Not where torch is built for
CUDA: a module that only asks for the number of devices would leave forked ranks without them.
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
_NOT = ("torch.utils.tensorboard", "torch.testing")  # draw in what others have installed


def note() -> None:
    """In a rank: tell the launcher, if there is one, what is loaded by now. For after the first step."""
    path = os.environ.get(environment.FAILURE_FILE)
    if path and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        names = [name for name in list(sys.modules) if name.startswith(_OWN) and not name.startswith(_NOT)]
        aside = Path(f"{path}.{os.getpid()}")
        aside.write_text("\n".join(names))
        aside.replace(_noted(Path(path)))


def load(records: Iterable[Path]) -> None:
    """In the agent, before it forks: load what ranks with these records have noted."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is not None:
        return
    for record in records:
        try:
            names = _noted(record).read_text().splitlines()
        except OSError:
            continue  # it did not come that far
        for name in names:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # a rank that needs it will tell why it cannot be had
                    importlib.import_module(name)
        gc.collect()
        gc.freeze()  # keeps the ranks from copying pages that the collector would touch
        return


def _noted(record: Path) -> Path:
    return Path(f"{record}.modules")
