"""Which tests run side by side, when pytest is given workers (`make test` gives it one for each core, up to four).

A worker runs the tests of a file in their order, so that what a file shares (a launch of mpiexec, a record of the plain
model) is made once. Tests of circuits are one worker's, so that numba compiles each kernel once. Long files come first,
or one worker would be left alone with one of them at the end.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = "tests/quantum/"
FIRST = ("equivalence", "quantum", "comm", "launch", "parallel")  # folders with long files


class FilesScheduling(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the order is that of `turn`

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else nodeid.split("::", 1)[0]


def turn(path: PurePath) -> int:
    """The sooner, the lower."""
    folder = path.parent.name
    return FIRST.index(folder) if folder in FIRST else len(FIRST)
