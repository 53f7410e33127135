"""What happens inside a freshly forked rank: take the place of a process of its own, run the program, end.

The rank was forked from a process that had imported torch but computed nothing and never touched CUDA.
"""

from __future__ import annotations

import atexit
import base64
import builtins
import faulthandler
import io
import os
import pickle
import re
import runpy
import signal
import stat
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from unisono.errors import HangError, UsageError
from unisono.launch import failure, proctree, turns
from unisono.launch.failure import Failure
from unisono.launch.job import CALL, MODULE, Program

# What c10d says when a peer is gone. A rank that fails with this is debris of another failure.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|got 0 bytes|remote process exited|connectFullMesh failed"
    r"|Application timeout caused pair closure|Connection was likely closed"
)

_STDLIB = sysconfig.get_paths()["stdlib"]


def enter(
    streams: Mapping[str, int], environment: Mapping[str, str], keep: set[int], close: set[int], parent: int
) -> None:
    """Make the forked process a rank: own session, own streams, own environment, nothing of its parent's.

    `keep` are descriptors that stay open; `close` are pipes of the launcher's, which do not.
    """
    os.setsid()
    proctree.die_with_parent(parent)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.update(environment)
    _connect(streams, keep, close)
    _limit_threads()
    _share_cores()
    _reseed()
    faulthandler.enable(file=2, all_threads=True)


def _connect(streams: Mapping[str, int], keep: set[int], close: set[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(streams["out"], 1)
    os.dup2(streams["err"], 2)
    keep = keep | {0, 1, 2} | {fd for name, fd in streams.items() if name not in ("out", "err")}
    for fd in open_descriptors() - keep:
        if fd in close or not _may_be_a_librarys(fd):
            os.close(fd)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _line_stream(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_stream(2, "backslashreplace")  # type: ignore[misc]


def _may_be_a_librarys(fd: int) -> bool:
    """Whether a native library may have opened it and go by its number.

    libuv, which serves torch's stores, has a pipe that it closes by number and opens anew in every process that is
    forked. Were it closed here, a child of the rank (a worker of its DataLoader, say) would lose whatever has come to
    have those numbers. Sockets and epolls are those of the launcher's store.
    """
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def open_descriptors() -> set[int]:
    """Those of this process, without the one by which they are listed."""
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _line_stream(fd: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)


def _limit_threads() -> None:
    """Ranks share the cores of a node: one thread each, as with torchrun, unless the user says otherwise."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = "1"
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    torch = sys.modules.get("torch")
    if torch is not None and wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


def _share_cores() -> None:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if hasattr(os, "sched_getaffinity") and ranks > len(os.sched_getaffinity(0)):
        turns.give_way()


def _reseed() -> None:
    """NumPy's global generator would be the same in every rank after a fork; Python's reseeds itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def run(program: Program, results: int | None = None) -> int:
    """Run the program as `python` would; the exit code. An uncaught exception goes to the launcher."""
    return perform(lambda: _run(program, results))


def _run(program: Program, results: int | None) -> None:
    os.chdir(program.directory)
    if program.kind == CALL:
        _call(program, results)
    elif program.kind == MODULE:
        _run_module(program)
    else:
        _run_script(program)


def perform(body: Callable[[], object]) -> int:
    """Run body and everything that a Python process does at its end; the exit code."""
    code = _guarded(body)
    code = _guarded(_finish) or code
    return code or _guarded(_finalize_mpi)  # last: it waits for ranks that may wait for this one's farewell


def _guarded(body: Callable[[], object]) -> int:
    try:
        try:
            body()
        except BaseException as error:
            return _told(error)
    except BaseException as error:  # of a handler of signals, such as a DataLoader's, while the first was being told
        return _told(error)
    return 0


def _told(error: BaseException) -> int:
    """The exit code that comes of it; the launcher learns why."""
    if isinstance(error, SystemExit):
        return _exit_code(error)
    kind = _kind_of(error)
    text = str(error) if kind == failure.HANG else _traceback_of(error)
    failure.record(Failure.now(_own_rank(), kind, text))
    return {KeyboardInterrupt: 130, HangError: failure.HANG_CODE}.get(type(error), 1)


def _finalize_mpi() -> None:
    """As mpi4py does when the interpreter ends, which it does not here. Not after a failure: it may wait."""
    mpi4py, library = sys.modules.get("mpi4py"), sys.modules.get("mpi4py.MPI")
    if mpi4py is None or library is None or mpi4py.rc.finalize is False:
        return
    if library.Is_initialized() and not library.Is_finalized():
        library.Finalize()


def _finish() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _run_script(program: Program) -> None:
    path = os.path.abspath(program.target)
    sys.argv = [program.target, *program.args]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _run_module(program: Program) -> None:
    sys.argv = [program.target, *program.args]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(program.target, run_name="__main__", alter_sys=True)


def _call(program: Program, results: int | None) -> None:
    from multiprocessing import spawn

    call: dict[str, Any] = pickle.loads(base64.b64decode(program.target))
    spawn.prepare(call["preparation"])
    function, args = pickle.loads(call["function"])
    answer(function(*args), results)


def answer(value: object, results: int | None) -> None:
    """Send a function's result to the launcher."""
    if results is None:
        return
    with os.fdopen(results, "wb") as stream:
        stream.write(pickle.dumps(value))


def _exit_code(request: SystemExit) -> int:
    code = 0 if request.code is None else request.code & 0xFF if isinstance(request.code, int) else 1
    if code:
        is_number = isinstance(request.code, int)
        said = f"sys.exit({code}){_asked_at(request.__traceback__)}" if is_number else str(request.code)
        failure.record(Failure.now(_own_rank(), failure.EXCEPTION, said))
    return code


def _asked_at(trace: types.TracebackType | None) -> str:
    """Where the user's own code asked for the end, as far as that is known."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    own = [(path, line) for path, line in frames if not _is_scaffold(path) and not path.startswith(_STDLIB)]
    if not own:
        return ""
    path, line = own[-1]
    relative = os.path.relpath(path)
    return f" at {path if relative.startswith('..') else relative}:{line}"


def _own_rank() -> int:
    return int(os.environ["RANK"])


def _kind_of(error: BaseException) -> str:
    if isinstance(error, HangError):
        return failure.HANG
    if is_of_a_lost_peer(error):
        return failure.PEER
    return failure.USAGE if isinstance(error, UsageError) else failure.EXCEPTION


def is_of_a_lost_peer(error: BaseException) -> bool:
    """Whether it, or what it came of, is what c10d raises when another rank is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and _PEER_IS_GONE.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _traceback_of(error: BaseException) -> str:
    """The traceback from the user's own code on: frames of the launcher and of runpy are cut off the top."""
    frame = error.__traceback__
    while frame is not None and _is_scaffold(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def _is_scaffold(filename: str) -> bool:
    own = os.path.dirname(filename) == os.path.dirname(__file__)
    return own or filename == runpy.__file__ or filename.startswith("<frozen")
