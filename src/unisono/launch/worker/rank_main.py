"""The main program of a forked rank: `enter` sets up the process, `run` runs the user's program, `perform` ends it.

The rank was forked from a process that had imported torch but computed nothing and never initialised CUDA.
"""

from __future__ import annotations

import ast
import atexit
import base64
import builtins
import contextlib
import faulthandler
import importlib
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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from unisono.errors import HangError, UsageError
from unisono.launch import environment as variables
from unisono.launch import process_threads
from unisono.launch.job import CALL, COMMAND, MODULE, Entrypoint
from unisono.launch.outcome import failure
from unisono.launch.outcome.failure import Failure
from unisono.launch.store import program_rendezvous
from unisono.launch.transport import job_folder
from unisono.launch.worker import aliases, process_tree, stacks

# Errors of c10d when a peer has died: a consequence of another failure.
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|got 0 bytes|remote process exited|connectFullMesh failed"
    r"|Application timeout caused pair closure|Connection was likely closed"
)

_STDLIB = sysconfig.get_paths()["stdlib"]
_LAUNCH_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


exit_words = ""  # how and where the program has called sys.exit, for reports

at_entry: list[Callable[[], None]] = []  # called by every forked rank, to forget state of the process it comes from


def enter(
    streams: Mapping[str, int], environment: Mapping[str, str], keep: set[int], close: set[int], parent: int
) -> None:
    """Set up the forked process: its own session, streams and environment, independent of its parent's.

    `keep`: file descriptors that stay open; `close`: pipes of the launcher, which do not.
    """
    os.setsid()
    process_tree.die_with_parent(parent)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.update(environment)
    _redirect(streams, keep, close)
    _limit_threads()
    _set_scheduling()
    _reseed()
    faulthandler.enable(file=2, all_threads=True)
    program_rendezvous.install()
    stacks.offer()
    for forget in at_entry:
        forget()


def _redirect(streams: Mapping[str, int], keep: set[int], close: set[int]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(streams["out"], 1)
    os.dup2(streams["err"], 2)
    keep = keep | {0, 1, 2} | {fd for name, fd in streams.items() if name not in ("out", "err")}
    for fd in open_descriptors() - keep:
        if fd in close or not _may_belong_to_a_library(fd):
            os.close(fd)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _line_stream(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_stream(2, "backslashreplace")  # type: ignore[misc]


def _may_belong_to_a_library(fd: int) -> bool:
    """Whether a native library may have opened it and refer to it by number.

    libuv, which serves torch's stores, has a pipe that it closes by number and opens again in every forked process. If
    it were closed here, a child of the rank (such as a DataLoader worker) would close an unrelated descriptor with
    those numbers. Sockets and epolls are those of the launcher's store.
    """
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def open_descriptors() -> set[int]:
    """The open file descriptors of this process."""
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
    """Ranks share the cores of a node: one thread each by default, as with torchrun."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = "1"
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    torch = sys.modules.get("torch")
    if torch is not None and wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


def _set_scheduling() -> None:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if hasattr(os, "sched_getaffinity") and ranks > len(os.sched_getaffinity(0)):
        process_threads.use_batch_scheduling()


def _reseed() -> None:
    """Reseed NumPy's global generator, which is the same in every rank after a fork; Python reseeds its own."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def run(program: Entrypoint, results: int | None = None) -> int:
    """Run the program as `python` would; return the exit code. An uncaught exception is recorded for the launcher."""
    return perform(lambda: _run(program, results))


def _run(program: Entrypoint, results: int | None) -> None:
    os.chdir(program.directory)
    aliases.install(os.environ.get(variables.AS, ""))
    if module := os.environ.get(variables.COMPAT):
        importlib.import_module(module).install()
    if program.kind == CALL:
        _call(program, results)
    elif program.kind == COMMAND:
        os.execvp(program.target, [program.target, *program.args])
    elif program.kind == MODULE:
        _run_module(program)
    else:
        _run_script(program)


def perform(body: Callable[[], object]) -> int:
    """Run body, then the exit handlers of a Python process; return the exit code."""
    is_inherited = _has_mpi()  # initialized by the process that this one was forked from, which will finalize it
    code = _guarded(body)
    code = _guarded(_run_exit_handlers) or code
    if code and not is_inherited and _has_mpi():
        remove_files(mpi_segments())  # nobody will finalize MPI, and the agent may not have seen them
    if code or is_inherited:
        return code
    return _guarded(_finalize_mpi)  # last: it waits for ranks that may still wait for this one


def attempt(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Call function, in a process that goes on after it: (exit code, result). An exception is recorded."""
    results: list[Any] = []
    code = _guarded(lambda: results.append(function(*args)))
    return code, results[0] if results else None


def _guarded(body: Callable[[], object]) -> int:
    try:
        try:
            body()
        except BaseException as error:
            return _record(error)
    except BaseException as error:  # raised by a signal handler, such as a DataLoader's, during _record
        return _record(error)
    return 0


def _record(error: BaseException) -> int:
    """Record the failure for the launcher; return the exit code."""
    if isinstance(error, SystemExit):
        return _exit_code(error)
    kind = _kind_of(error)
    text = str(error) if kind == failure.HANG else _traceback_of(error)
    code = {KeyboardInterrupt: 130, HangError: failure.HANG_CODE}.get(type(error), 1)
    failure.record(Failure.now(_own_rank(), kind, text, code))
    return code


def _finalize_mpi() -> None:
    """As mpi4py does at interpreter exit, which os._exit skips. Not after a failure, where it may block."""
    if _has_mpi() and sys.modules["mpi4py"].rc.finalize is not False:
        sys.modules["mpi4py.MPI"].Finalize()


def _has_mpi() -> bool:
    """Whether MPI is initialized in this process, and not finalized."""
    library = sys.modules.get("mpi4py.MPI")
    return library is not None and library.Is_initialized() and not library.Is_finalized()


def mpi_segments(pid: int | str = "self") -> set[str]:
    """Files of the memory that MPICH's ranks on this host share. They outlive ranks that end without MPI_Finalize;
    ranks that still use them keep them when they are removed."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        return {line.split()[5] for line in maps if job_folder.SEGMENT in line}
    return set()


def remove_files(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _run_exit_handlers() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _run_script(program: Entrypoint) -> None:
    path = os.path.abspath(program.target)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None, __cached__=None)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        source = file.read()
    code = compile(source, path, "exec", dont_inherit=True)
    sys.argv = [program.target, *_local_rank(source, program.args), *program.args]
    exec(code, main.__dict__)


def _local_rank(source: bytes, args: tuple[str, ...]) -> list[str]:
    """`--local-rank=N` for a script that parses it, as torch.distributed.launch passes it."""
    spellings = ("--local-rank", "--local_rank")
    if os.environ.get(variables.USE_ENV) == "1" or any(arg.startswith(spellings) for arg in args):
        return []
    if not any(spelling.encode() in source for spelling in spellings):
        return []
    parsed = {
        given.value
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"
        for given in call.args
        if isinstance(given, ast.Constant)
    }
    return next(([f"{each}={os.environ['LOCAL_RANK']}"] for each in spellings if each in parsed), [])


def _run_module(program: Entrypoint) -> None:
    sys.argv = [program.target, *program.args]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(program.target, run_name="__main__", alter_sys=True)


def _call(program: Entrypoint, results: int | None) -> None:
    from multiprocessing import spawn

    call: dict[str, Any] = pickle.loads(base64.b64decode(program.target))
    spawn.prepare(call["preparation"])
    function, args = pickle.loads(call["function"])
    send_result(function(*args), results)


def send_result(value: object, results: int | None) -> None:
    """Send a function's result to the launcher."""
    if results is None:
        return
    try:
        data = pickle.dumps(value)
    except Exception as error:
        raise UsageError(
            f"the result is a {type(value).__name__} that cannot be pickled ({error}); return plain data or tensors"
        ) from None
    with os.fdopen(results, "wb") as stream:
        stream.write(data)


def _exit_code(request: SystemExit) -> int:
    global exit_words
    code = 0 if request.code is None else request.code & 0xFF if isinstance(request.code, int) else 1
    exit_words = f"sys.exit({code}){_exit_location(request.__traceback__)}"
    if code:
        text = exit_words if isinstance(request.code, int) else str(request.code)
        failure.record(Failure.now(_own_rank(), failure.EXCEPTION, text, code))
    return code


def _exit_location(trace: types.TracebackType | None) -> str:
    """The line of the user's code that called sys.exit, if known."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    own = [(path, line) for path, line in frames if not _is_launcher_code(path) and not path.startswith(_STDLIB)]
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
    if is_peer_failure(error):
        return failure.PEER
    return failure.USAGE if isinstance(error, UsageError) else failure.EXCEPTION


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is one that c10d raises when another rank has died."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and _PEER_LOST.search(str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _traceback_of(error: BaseException) -> str:
    """The traceback without the frames of the launcher and of runpy."""
    frame = error.__traceback__
    while frame is not None and _is_launcher_code(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def _is_launcher_code(filename: str) -> bool:
    return filename.startswith((_LAUNCH_FOLDER, "<frozen")) or filename == runpy.__file__
