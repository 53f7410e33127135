"""Ranks that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.mpi_ranks import MPIEXEC
from tests.ranks import RankPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What jobs measure of this machine is shared by a run of the suite, and stays out of the user's cache.
os.environ.setdefault("UNISONO_CACHE", tempfile.mkdtemp(prefix="unisono-cache-"))
# The cases that hypothesis draws are the same in every run, and may take as long as a busy machine needs.
settings.register_profile(
    "same everywhere", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored under nohup, which what is started here would inherit
gc.disable()  # half a million objects are imported, which the collector would go through over and over


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests marked thorough, as make test-all does")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The matrix takes minutes: it is run where it is asked for (`make test-all`)."""
    is_asked_for = any("tests/matrix" in str(argument) for argument in config.invocation_params.args)
    return True if collection_path == Path(__file__).parent / "matrix" and not is_asked_for else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.scheduling import FilesScheduling

    return FilesScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_thorough(config, items)
    if hasattr(config, "workerinput"):
        from tests.scheduling import turn

        items.sort(key=lambda item: turn(item.path))


def _leave_out_thorough(config: pytest.Config, items: list[pytest.Item]) -> None:
    """See thorough.py. With --all, and where tests are asked for by name, all run."""
    from tests.thorough import left_out, unknown

    is_full = config.args == config.getini("testpaths") and not config.getoption(
        "lf", False
    )  # --last-failed skips other files
    if is_full and (names := unknown(items)):
        raise pytest.UsageError(f"tests/thorough.py names {', '.join(names)}, which are no tests")
    if config.option.all or any("::" in argument for argument in config.args):
        _late.update(item.nodeid for item in left_out(items))
        return
    gone = left_out(items)
    if gone:
        config.hook.pytest_deselected(items=gone)
        kept = {id(item) for item in items} - {id(item) for item in gone}
        items[:] = [item for item in items if id(item) in kept]


_late: set[str] = set()  # the tests that may be left out for want of time


def pytest_runtest_setup(item: pytest.Item) -> None:
    """UNISONO_TESTS_UNTIL, in seconds since the epoch: what `make test` would leave out is not begun afterwards. A CI
    that ends every run after some time learns more from what did run than from nothing."""
    until = float(os.environ.get("UNISONO_TESTS_UNTIL", "inf"))
    if time.time() > until and (item.nodeid in _late or item.nodeid.startswith("tests/matrix/")):
        pytest.skip("there was no time left for it (UNISONO_TESTS_UNTIL)")


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A test that joins a world in this process leaves it, for those after it to start ranks from here."""
    yield
    from unisono.comm.rendezvous import world

    if world.is_initialized():
        world.shutdown()


_started: dict[tuple[str, int], RankPool] = {}


@pytest.fixture(scope="module", autouse=True)
def no_groups_are_left() -> Iterator[None]:
    """The groups that a file's tests made are not kept for the next's."""
    yield
    for pool in _started.values():
        pool.shed_groups()


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str, int], RankPool]]:
    """pools(backend, size): a pool of ranks, started at first use and kept."""

    def get(backend: str, size: int) -> RankPool:
        if (backend, size) not in _started or _started[backend, size].closed:
            if backend == "mpi" and not MPIEXEC.exists():
                pytest.skip(f"no mpiexec at {MPIEXEC}; run make setup")
            _started[backend, size] = RankPool(size, backend)
        return _started[backend, size]

    yield get
    for pool in _started.values():
        pool.close()


@pytest.fixture(params=["gloo", "mpi"])
def ranks4(request: pytest.FixtureRequest, pools: Callable[[str, int], RankPool]) -> RankPool:
    """Four ranks, on each CPU backend in turn."""
    return pools(request.param, 4)
