"""Which tests run side by side, when pytest is given workers (`make test` gives it one for each core and one more).

A worker runs the tests of a file in their order, so that what a file shares (a launch of mpiexec, a record of the plain
model) is made once. Tests of circuits are one worker's, so that numba compiles each kernel once; so are those that run
examples, from one process that has imported what they need.

Every second worker begins with files whose tests mostly wait (for processes to end, for a timeout to pass), beside
others that compute: two that wait would leave cores idle, two that compute would share them. Long files come first, or
one worker would be left alone with one of them at the end.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = {"tests/quantum/": "quantum", "tests/examples/": "examples", "tests/compat/test_vqnetrun.py": "examples"}
WAITING = ("tests/launch/", "tests/faults/", "tests/deploy/", "tests/comm/test_watchdog.py", "tests/comm/test_world.py")
LONG = (  # the longest files, longest first, those that wait among them
    "equivalence/test_foreign.py",
    "explain/test_plan_program.py",
    "equivalence/test_plans.py",
    "comm/test_watchdog.py",
    "quantum/",
    "examples/",
    "launch/test_remote.py",
    "launch/test_slurm.py",
    "launch/test_encrypt.py",
    "deploy/",
    "planner/test_planning.py",
    "parallel/test_loop.py",
    "graph/test_program.py",
    "launch/test_failures.py",
    "launch/test_ending.py",
    "comm/test_mpi_programs.py",
    "equivalence/",
    "faults/",
    "mesh/test_reshard.py",
    "parallel/test_zero.py",
    "parallel/test_hugging_face.py",
    "parallel/test_context_models.py",
    "parallel/test_pipeline.py",
    "comm/",
    "launch/",
    "parallel/",
    "graph/",
)


class FilesScheduling(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # the order is that of `turn`

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((scope for start, scope in TOGETHER.items() if file.startswith(start)), file)

    def _assign_work_unit(self, node: Any) -> None:
        """The next file of the kind that the worker prefers, or else the next."""
        takes_waiting = int(node.gateway.id.removeprefix("gw")) % 2 == 1
        preferred = (scope for scope in self.workqueue if scope.startswith(WAITING) == takes_waiting)
        scope = next(preferred, None)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def turn(path: PurePath) -> int:
    """The sooner, the lower."""
    name = f"{path.parent.name}/{path.name}"
    return next((index for index, start in enumerate(LONG) if name.startswith(start)), len(LONG))
