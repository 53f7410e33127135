"""The watchdog: one thread per rank that notices when ranks wait for each other in vain, and reports why.

Note: how a hang is reported. All ranks share a key-value store. A rank that has been blocked too long, has lost a peer
or disagrees with the others raises the alarm there. Every watchdog that sees it publishes its rank's state: its last
operations and where its main thread stands. The rank that raised the alarm first collects the states, makes the one
report (watchdog/report.py) and publishes it; then every rank stops. The main threads need not take part: they hang.

A process that holds the store may be stopped, or its host be lost: requests then never return. So a second thread looks
at the first, and reports alone where that one waits for the store and the main thread for longer than the timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from unisono.comm.watchdog import crash_note, report
from unisono.comm.watchdog.consistency import Consistency, Mismatch, TorchCalls
from unisono.comm.watchdog.crash_note import CrashNote
from unisono.comm.watchdog.exits import Exits, is_of_one_root
from unisono.comm.watchdog.op_log import OpLog, caller, describe, frame_location, shown
from unisono.errors import CommError, HangError, MessageError, UnisonoError
from unisono.launch.outcome import failure
from unisono.launch.process_threads import frames_of
from unisono.launch.store import program_rendezvous
from unisono.launch.worker import rank_main, stacks

if TYPE_CHECKING:
    from unisono.comm.mpi.work import MPIOperation  # imports mpi4py

ANSWER_TIME = 5.0  # seconds that ranks get to report their state
MARGIN = 60.0  # seconds by which torch's own timeout comes later than the watchdog's, whose report has more
EXIT_GRACE = 3.0  # seconds that a rank keeps the store for others that leave after it
LOST_TIME = 1.0  # seconds that ranks may stay blocked after another has gone
STORE_TIME = 5.0  # seconds without an answer of the store after which a rank decides alone
ARRIVAL_TIME = 2.0  # seconds that ranks get to reach a collective that has failed on another, before the report is made

_UNISONO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = (_UNISONO, os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"], "<frozen")
_BACKENDS = (_UNISONO, os.path.dirname(dist.__file__))
_TORCH_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")


class Watchdog:
    """Keeps the operation logs of this rank's groups and stops the job when it hangs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, check: bool) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.checks = check and size > 1  # whether collectives are compared before they start
        self.torch_calls = TorchCalls(self._log_of_group, self._agree) if self.checks else None
        self._check_store = self._clone(store, "check")
        self._store = self._clone(store, "watchdog")
        self.group_logs: dict[object, OpLog] = {}  # by process group
        self._groups_of: dict[tuple[int, ...], int] = {}
        self._logs: list[OpLog] = []
        self._consistency = Consistency(self._store, rank, size, self._logs, self._disagreed)
        self._exits = Exits(self._store, rank, size)
        self._blocked: dict[object, tuple[object, float]] = {}
        self._held: FrameType | None = None
        self._stopping = threading.Event()
        self._alarm = threading.Lock()
        self._looking = threading.Lock()
        self._due = 0.0  # when the thread should have had its answers of the store
        self._left = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends_the_store = False
        self._main = threading.main_thread().ident
        self._note: CrashNote | None = None

    @staticmethod
    def _clone(store: dist.Store, name: str) -> dist.Store:
        # A connection of its own: the main thread may block in the store, and the watchdog must not.
        with contextlib.suppress(RuntimeError):
            store = store.clone()  # type: ignore[attr-defined]
        return dist.PrefixStore(f"unisono/{name}", store)

    def new_log(self, group: str, ranks: tuple[int, ...]) -> OpLog:
        log = OpLog(group, ranks)
        self._logs.append(log)
        return log

    def _log_of_group(self, group: dist.ProcessGroup) -> OpLog:
        """For the user's own calls, which are numbered together with a communicator's on the same group."""
        if group not in self.group_logs:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups_of[ranks] = number = self._groups_of.get(ranks, 0) + 1
            self.group_logs[group] = self.new_log(f"torch/{','.join(map(str, ranks))}#{number}", ranks)
        return self.group_logs[group]

    def start(self, backend: str, ends_the_store: bool = False) -> None:
        """`ends_the_store`: whether that is gone once this rank is."""
        self._ends_the_store = ends_the_store
        if self.size > 1:
            if backend == "gloo":  # the others do not abort a process
                self._note = CrashNote()
            self._exits.give_address(self._note.address() if self._note else crash_note.address_of())
            self._thread = threading.Thread(target=self._run, name="unisono-watchdog", daemon=True)
            self._due = time.monotonic() + STORE_TIME
            self._thread.start()
            threading.Thread(target=self._watch_the_store, name="unisono-store-watchdog", daemon=True).start()
            atexit.register(self._exit)
            self._hook_exceptions()
            if not faulthandler.is_enabled():
                faulthandler.enable()  # gloo aborts a rank that is sent more than it expects: show where it was
            if self.torch_calls is not None:
                self.torch_calls.wrap()

    def stop(self) -> None:
        """End the watchdog of a world that is shut down in order. HangError where ranks have differed."""
        if self.torch_calls is not None:
            self.torch_calls.unwrap()
        self._due = time.monotonic() + self.timeout + 2 * ANSWER_TIME
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._exit)
            found = self._leave("have left the world (uni.shutdown)")
            self._left.set()
            if found is not None:
                self._discard_note()
                raise HangError(self._raise_alarm(found.dispute, found.report))
            if self._note is not None:
                self._note.close()
                self._note = None
        self.group_logs.clear()  # or a communicator that a user still has would keep all groups and their threads

    # ---- what the communicator calls -----------------------------------------------------------------------------

    def begin(self, log: OpLog, op: str, detail: str, tensor: torch.Tensor | None) -> None:
        """Log an operation that is about to start; with `--check`, HangError where other ranks are at another one."""
        frame = caller()
        log.enter(op, detail, tensor, frame)
        if self._note is not None:
            self._note.write(log, op, detail, tensor, frame)
        if self.checks and not log.is_p2p:
            try:
                self._agree(log)
            except HangError:
                log.left = log.entered
                raise

    def _agree(self, log: OpLog) -> None:
        self._consistency.agree(log, self._check_store)

    def guarded(self, block: Callable[[], None]) -> None:
        """Run what blocks in a backend; raise the report instead of the backend's error."""
        try:
            block()
        except MessageError:
            raise
        except RuntimeError as error:
            raise self.explained(error) from error

    def waiter(self, log: OpLog) -> Callable[[Callable[[], None]], None]:
        """For the handle of the operation that was just begun: blocks in it, visibly."""
        number = log.entered

        def wait(block: Callable[[], None]) -> None:
            log.awaited = number
            try:
                self.guarded(block)
            finally:
                log.awaited = 0

        return wait

    def explained(self, error: RuntimeError) -> UnisonoError:
        """What to raise instead of a backend's error in an operation: the report on who waits for whom.

        An error that is not the backend's, such as that of a DataLoader's signal handler, is raised as it is.
        """
        if not _is_of_a_backend(error):
            raise error
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if self._thread is None:
            return CommError(f"communication failed on rank {self.rank}: {text}")
        return HangError(f"{self._raise_alarm(awaited_at=self._state().collective)} ({text})")

    def _disagreed(self, group: str, number: int) -> HangError:
        """What to raise when this rank's next collective, of that group and number, differs from the others'."""
        return HangError(self._raise_alarm((group, number)))

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        tick = min(0.5, self.timeout / 4) + self.size / 2000  # a thousand ranks must not crowd their store
        while not self._stopping.wait(min(tick, self._consistency.seconds_left)):
            self._due = time.monotonic() + STORE_TIME
            try:
                if self._store.check(["alarm"]):
                    self._answer_alarm()
                self._exits.check_neighbour()
                found = self._consistency.difference()
                blocked_for = self._blocked_for()
                is_in_vain = blocked_for >= LOST_TIME and self._waits_for_one_that_left()
            except RuntimeError:
                if not self._stopping.is_set():
                    self._store_is_lost()
                return
            if found is not None:
                self._raise_alarm(found.dispute, found.report)
                self._stop_job()
            if is_in_vain or blocked_for >= self.timeout:
                self._raise_alarm()
                self._stop_job()

    def _watch_the_store(self) -> None:
        """In a thread of its own, as requests to a store whose process is stopped never return."""
        stacks.answer(None)
        asked = stacks.asked()
        while not self._left.wait(min(0.5, self.timeout / 4)):
            if stacks.asked() != asked:  # by `unisono attach`
                asked = stacks.asked()
                stacks.answer(self._state().as_json())
            if time.monotonic() < self._due:
                continue
            if self._stopping.is_set() or self._blocked_for() >= self.timeout:
                self._publish(self._report_alone(is_silent=True))
                self._stop_job()

    def _waits_for_one_that_left(self) -> bool:
        underway = _underway()
        is_awaited = underway is not None and "underway" in self._blocked and not is_of_one_root(underway.name)
        awaited = underway.ranks if underway is not None and is_awaited else ()
        return self._exits.concern(self._logs, self._torch_frame(), awaited)

    def _blocked_for(self) -> float:
        """For how many seconds this rank has been blocked in one and the same operation."""
        with self._looking:
            return self._longest_block()

    def _longest_block(self) -> float:
        now = time.monotonic()
        longest = 0.0
        frame = self._torch_frame()
        signs: dict[object, object] = {id(log): log.pending for log in self._logs if log.pending}
        if frame is not None:
            signs["torch"] = (id(frame), frame.f_lasti)
        elif (underway := _underway()) is not None and (frames := frames_of(self._main)):
            signs["underway"] = (underway.begun, id(frames[0].f_code), frames[0].f_lasti)
        # A call seen twice is held until the next look: no later one can have its identity while it lives.
        self._held = frame if signs.get("torch", 0) == self._blocked.get("torch", (None, now))[0] else None
        for key, sign in signs.items():
            before, since = self._blocked.get(key, (None, now))
            if before != sign:
                since = now
            self._blocked[key] = (sign, since)
            longest = max(longest, now - since)
        self._blocked = {key: seen for key, seen in self._blocked.items() if key in signs}
        return longest

    def _answer_alarm(self) -> None:
        """Another rank has raised the alarm: publish where this one stands, then stop as well."""
        self._due = time.monotonic() + 4 * ANSWER_TIME
        with self._alarm:
            self._reach_collective()
            self._publish_state()
            self._await_report()
        self._stop_job()

    def _reach_collective(self) -> None:
        """Ranks that share a core may still be leaving the collective before the one that the alarm is about."""
        _, number, group = self._store.get("alarm").decode().split(" ", 2)
        deadline = time.monotonic() + ARRIVAL_TIME
        logs = [log for log in self._logs if log.group == group]
        while any(log.entered < int(number) for log in logs) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _store_is_lost(self) -> None:
        """The rank that holds the store is gone, and with it the means to ask the others."""
        deadline = time.monotonic() + LOST_TIME
        while time.monotonic() < deadline:
            if self._stopping.wait(0.05):
                return
            if not self._blocked_for():
                deadline = time.monotonic() + LOST_TIME
        self._publish(self._report_alone())
        self._stop_job()

    def _report_alone(self, is_silent: bool = False) -> str:
        """The report without the store: rank 0 holds it, where no agent does. `is_silent`: it does not answer."""
        own = report.report({self.rank: self._state()}, {})
        if self._stopping.is_set():
            own = f"rank {self.rank} is done and about to exit"
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or program_rendezvous.address() is not None
        if self.rank == 0 or is_agents:
            became = "does not answer (is the agent that holds it stopped?)" if is_silent else "is gone"
            return f"{own}; the rendezvous store {became}"
        became = report.report({}, {0: self._exits.fate_of_first()}) if is_silent else "rank 0 has exited"
        return f"{own}; {became}, and with it the rendezvous store"

    # ---- the alarm -----------------------------------------------------------------------------------------------

    def _raise_alarm(
        self, dispute: report.Dispute | None = None, if_past: str = "", awaited_at: report.Dispute | None = None
    ) -> str:
        """Bring about the report on all ranks, and return it; `if_past` is the one where nobody waits in the disputed
        operation any more. Ranks on their way to the dispute, or to `awaited_at`, get time to come there."""
        self._due = time.monotonic() + 4 * ANSWER_TIME
        with self._alarm:
            try:
                group, number = dispute or awaited_at or ("", 0)
                alarm = f"{self.rank} {number} {group}"
                first = self._store.compare_set("alarm", "", alarm).decode()
                self._publish_state()
                if first != alarm:
                    return self._await_report()
                text = self._collect_report(dispute, if_past)
            except RuntimeError:
                text = self._report_alone()
                self._publish(text)
                return text
            self._publish(text)  # before the others read it and leave: mpiexec kills all when one has left
            with contextlib.suppress(RuntimeError):
                self._store.set("report", text)
                self._linger()
            return text

    def _collect_report(self, dispute: report.Dispute | None, if_past: str) -> str:
        deadline = time.monotonic() + ANSWER_TIME
        missing = set(range(self.size)) - {self.rank}
        states, absent = {self.rank: self._state()}, {}
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"state/{rank}"]):
                    states[rank] = report.RankState.from_json(json.loads(self._store.get(f"state/{rank}")))
                    missing.discard(rank)
                elif (words := self._exits.words_of(rank)) is not None:
                    absent[rank] = words
                    missing.discard(rank)
                elif (fate := self._exits.fate(rank)) is not None and fate.startswith(crash_note.SILENT):
                    absent[rank] = fate
                    missing.discard(rank)
            time.sleep(0.02)
        absent |= {rank: self._fate(rank) for rank in missing}
        if if_past and not any(state.waiting == dispute for state in states.values()):
            return if_past
        return report.report(states, absent, dispute)

    def _fate(self, rank: int) -> str:
        """What became of a rank that does not answer, with its line where it runs on."""
        fate = self._exits.fate(rank) or crash_note.NO_ANSWER
        own = (
            [f for f in self._exits.stack(rank) if not f.file.startswith(_LIBRARIES)] if crash_note.BUSY in fate else []
        )
        return (
            fate.replace(crash_note.BUSY, f"{crash_note.BUSY} at {shown(own[-1].file)}:{own[-1].line}") if own else fate
        )

    def _discard_note(self) -> None:
        if self._note is not None:
            self._note.discard()

    def _await_report(self) -> str:
        """The report that another rank makes."""
        deadline = time.monotonic() + 2 * ANSWER_TIME
        text = "the job hangs, and the rank that noticed it has gone before it could report why"
        while time.monotonic() < deadline:
            if self._store.check(["report"]):
                text = self._store.get("report").decode()
                break
            time.sleep(0.02)
        failure.record(failure.Failure.now(self.rank, failure.PEER, text))
        self._linger()
        return text

    def _linger(self) -> None:
        """Rank 0 may hold the store: it stays until the others have read the report."""
        self._store.set(f"read/{self.rank}", "1")
        deadline = time.monotonic() + ANSWER_TIME
        readers = [rank for rank in range(self.size) if self.rank == 0 and self._store.check([f"state/{rank}"])]
        while time.monotonic() < deadline and not all(self._store.check([f"read/{rank}"]) for rank in readers):
            time.sleep(0.02)

    def _publish(self, text: str) -> None:
        is_recorded = failure.record(failure.Failure.now(self.rank, failure.HANG, text))
        if not is_recorded:  # no launcher will show it
            print(f"unisono: {text}", file=sys.stderr, flush=True)

    def _stop_job(self) -> None:
        self._discard_note()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.HANG_CODE)

    # ---- this rank's state ---------------------------------------------------------------------------------------

    def _publish_state(self) -> None:
        self._store.set(f"state/{self.rank}", json.dumps(self._state().as_json()))

    def _state(self) -> report.RankState:
        underway = _underway()
        what = ", ".join(describe(each.shape, each.dtype) for each in underway.outputs[:1]) if underway else ""
        note = f" ({underway.name} {what} is under way)" if underway else ""
        return report.RankState.of(self.rank, self._location() + note, self._torch_call(), self._logs)

    def _location(self) -> str:
        frames = frames_of(self._main)
        for frame in frames:
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                return frame_location(frame)
        return frame_location(frames[0]) if frames else "its end"

    def _torch_frame(self) -> FrameType | None:
        """The frame of the torch.distributed collective that the user's own code is in, if any."""
        for frame in frames_of(self._main):
            if frame.f_code.co_filename.endswith(_TORCH_COLLECTIVES) and not frame.f_code.co_name.startswith("_"):
                return frame
        return None

    def _torch_call(self) -> str:
        frame = self._torch_frame()
        if frame is None:
            return ""
        tensors = [value for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]
        what = f" {describe(tensors[0].shape, tensors[0].dtype)}" if tensors else ""
        return f"torch.distributed.{frame.f_code.co_name}{what} at {self._location()}"

    # ---- leaving -------------------------------------------------------------------------------------------------

    def _exit(self, words: str = "", is_well: bool = True) -> None:
        """As this process ends. One that fails anyway announces that, and does not compare its operations."""
        words = words or "have exited" + (f" by {rank_main.exit_words}" if rank_main.exit_words else "")
        if self._stopping.is_set():
            return
        self._due = time.monotonic() + self.timeout + 2 * ANSWER_TIME
        self._stopping.set()
        if self._thread is not None and is_well:
            self._thread.join(ANSWER_TIME)
            found = self._leave(words)
            if found is not None:
                self._raise_alarm(found.dispute, found.report)
                self._stop_job()
        else:
            with contextlib.suppress(RuntimeError):
                self._exits.announce(words, self._logs)
        self._left.set()
        self._discard_note()

    def _leave(self, words: str) -> Mismatch | None:
        """Announce that this rank is gone, for others may be waiting for it, after a last comparison of its operations
        with those of ranks that left before it. None where the store is gone."""
        with contextlib.suppress(RuntimeError):
            found = self._consistency.last_difference()
            if found is None:
                self._exits.announce(words, self._logs)
                if self._ends_the_store:
                    self._exits.await_others(EXIT_GRACE)
            return found
        return None

    def _hook_exceptions(self) -> None:
        earlier = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, HangError):
                return  # the report has been shown, once for all ranks
            innermost = _innermost(trace)
            where = f" at {frame_location(innermost.tb_frame)}" if innermost else ""
            self._exit(f"have raised {kind.__name__}: {error}{where} and exited", False)
            earlier(kind, error, trace)

        sys.excepthook = hook


def _underway() -> MPIOperation | None:
    """A collective that torch has begun over MPI and waits for in native code, as in the backward pass of DDP."""
    work = sys.modules.get("unisono.comm.mpi.work")
    found: MPIOperation | None = None if work is None else work.PROGRESS.oldest()
    return found


def _is_of_a_backend(error: RuntimeError) -> bool:
    """Whether it comes out of native code that was called here or in torch.distributed, or out of mpi4py.

    Python runs signal handlers in the middle of whatever is going on: the error of one (a DataLoader's, when a worker
    has died) shows up in a collective and has nothing to do with it.
    """
    innermost = _innermost(error.__traceback__)
    path = innermost.tb_frame.f_code.co_filename if innermost else ""
    return path.startswith(_BACKENDS) or not os.path.isabs(path)


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
