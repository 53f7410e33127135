"""The watch: one thread a rank that notices when ranks wait for each other in vain, and says why.

Note: how a hang is told. All ranks share a key-value store. A rank that has been blocked too long, has lost a peer or
disagrees with the others sounds the alarm there. Every watch that hears it writes down its rank's state: its last
operations and where its main thread stands. The rank that sounded the alarm first collects the states, makes the one
report (comm/hang.py) and publishes it; then every rank stops. The main threads need not take part: they hang.
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

from unisono.comm import blackbox, hang
from unisono.comm.blackbox import BlackBox
from unisono.comm.check import Check
from unisono.comm.comparison import Comparison, Difference
from unisono.comm.departures import Departures, is_of_one_root
from unisono.comm.log import Log, describe, frame_place
from unisono.comm.origin import is_of_a_backend, origin_of
from unisono.errors import CommError, HangError, MessageError, UnisonoError
from unisono.launch import failure
from unisono.launch.stack import frames_of

if TYPE_CHECKING:
    from unisono.comm.mpi_work import Operation  # imports mpi4py

ANSWER_TIME = 5.0  # seconds that ranks get to tell their state
MARGIN = 60.0  # seconds by which torch's own timeout comes later than the watch's, which can say more
PARTING = 3.0  # seconds that a rank keeps the store for others that leave after it
LOST_TIME = 1.0  # seconds that ranks may stay blocked after another has gone
ARRIVAL_TIME = 2.0  # seconds that ranks on their way to a collective get to come to it when it fails, and be told there

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(torch.__file__),
    sysconfig.get_paths()["stdlib"],
    "<frozen",
)
_NO_ANSWER = "do not answer (killed, or busy in native code)"
_TORCH_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")


class Watch:
    """Keeps the logs of this rank's groups and stops the job when it hangs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, check: bool) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.check = Check(self._clone(store, "check"), self.disagreed) if check and size > 1 else None
        self._store = self._clone(store, "watch")
        self.group_logs: dict[object, Log] = {}  # by process group
        self._logs: list[Log] = []
        self._comparison = Comparison(self._store, rank, size, self._logs)
        self._departures = Departures(self._store, rank, size)
        self._blocked: dict[object, tuple[object, float]] = {}
        self._held: FrameType | None = None
        self._stopping = threading.Event()
        self._told = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends_the_store = False
        self._main = threading.main_thread().ident
        self.box: BlackBox | None = None

    @staticmethod
    def _clone(store: dist.Store, name: str) -> dist.Store:
        # A connection of its own: the main thread may block in the store, and the watch must not.
        with contextlib.suppress(RuntimeError):
            store = store.clone()  # type: ignore[attr-defined]
        return dist.PrefixStore(f"unisono/{name}", store)

    def new_log(self, group: str, ranks: tuple[int, ...]) -> Log:
        log = Log(group, ranks)
        self._logs.append(log)
        return log

    def start(self, backend: str, ends_the_store: bool = False) -> None:
        """`ends_the_store`: whether that is gone once this rank is."""
        self._ends_the_store = ends_the_store
        if self.size > 1:
            if backend == "gloo":  # the others never kill a process, and are too quick for it
                self.box = BlackBox()
            self._departures.give_address(self.box.address() if self.box else blackbox.address_of())
            self._thread = threading.Thread(target=self._keep_watch, name="unisono-watch", daemon=True)
            self._thread.start()
            atexit.register(self._say_goodbye)
            self._hook_exceptions()
            if not faulthandler.is_enabled():
                faulthandler.enable()  # gloo aborts a rank that is sent more than it expects: show where it was

    def stop(self) -> None:
        """End the watch of a world that is shut down in order. HangError where ranks turn out to have differed."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self._say_goodbye)
            found = self._leave("have left the world (uni.shutdown)")
            if found is not None:
                self._discard_box()
                raise HangError(self._sound_alarm(found.dispute, found.report))
            if self.box is not None:
                self.box.close()
                self.box = None
        self.group_logs.clear()  # or a communicator that a user still has would keep all groups and their threads

    # ---- what the communicator calls -----------------------------------------------------------------------------

    def waiter(self, log: Log) -> Callable[[Callable[[], None]], None]:
        """For the handle of the operation that was just begun: blocks in it, visibly."""
        number = log.count

        def wait(block: Callable[[], None]) -> None:
            log.awaited = number
            try:
                block()
            except MessageError:
                raise
            except RuntimeError as error:
                raise self.explained(error) from error
            finally:
                log.awaited = 0

        return wait

    def explained(self, error: RuntimeError) -> UnisonoError:
        """What to raise in place of a backend's error amid an operation: the report on who waits for whom.

        An error that is not the backend's, such as that of a DataLoader's handler of signals, is raised as it is.
        """
        if not is_of_a_backend(error):
            raise error
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if self._thread is None:
            return CommError(f"communication failed on rank {self.rank}: {text}")
        return HangError(f"{self._sound_alarm(awaited_at=self._state().collective)} ({text})")

    def disagreed(self, group: str, number: int) -> HangError:
        """What to raise when this rank's next collective, of that group and number, differs from the others'."""
        return HangError(self._sound_alarm((group, number)))

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _keep_watch(self) -> None:
        tick = min(0.5, self.timeout / 4) + self.size / 2000  # a thousand ranks ask their store at a calm pace
        while not self._stopping.wait(min(tick, self._comparison.seconds_left)):
            try:
                if self._store.check(["alarm"]):
                    self._answer_alarm()
                self._departures.miss_neighbour()
                found = self._comparison.difference()
                blocked_for = self._blocked_for()
                is_in_vain = blocked_for >= LOST_TIME and self._waits_for_one_that_left()
            except RuntimeError:
                if not self._stopping.is_set():
                    self._store_is_lost()
                return
            if found is not None:
                self._sound_alarm(found.dispute, found.report)
                self._stop_job()
            if is_in_vain or blocked_for >= self.timeout:
                self._sound_alarm()
                self._stop_job()

    def _waits_for_one_that_left(self) -> bool:
        underway = _underway()
        is_awaited = underway is not None and "underway" in self._blocked and not is_of_one_root(underway.name)
        awaited = underway.ranks if underway is not None and is_awaited else ()
        return self._departures.concern(self._logs, self._torch_frame(), awaited)

    def _blocked_for(self) -> float:
        """For how many seconds this rank has been blocked in one and the same operation."""
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
        """Another rank has sounded the alarm: say where this one stands, then stop as well."""
        with self._told:
            self._come_to_the_others()
            self._tell_state()
            self._answered()
        self._stop_job()

    def _come_to_the_others(self) -> None:
        """Ranks that share a core may still be leaving the collective before the one that the alarm is about."""
        _, number, group = self._store.get("alarm").decode().split(" ", 2)
        deadline = time.monotonic() + ARRIVAL_TIME
        logs = [log for log in self._logs if log.group == group]
        while any(log.count < int(number) for log in logs) and time.monotonic() < deadline:
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

    def _report_alone(self) -> str:
        """What can be said without the store: rank 0 holds it, where no agent does."""
        states = {self.rank: self._state()}
        if self.rank == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return f"{hang.report(states, {})}; the store through which ranks meet is gone"
        return hang.report(states, {0: "has exited, and with it the store through which ranks meet"})

    # ---- the alarm -----------------------------------------------------------------------------------------------

    def _sound_alarm(
        self, dispute: hang.Dispute | None = None, if_past: str = "", awaited_at: hang.Dispute | None = None
    ) -> str:
        """Bring about the report on all ranks, and return it; `if_past` is the one where nobody waits in the disputed
        operation any more. Ranks on their way to the dispute, or to where they are awaited, are told there."""
        with self._told:
            try:
                group, number = dispute or awaited_at or ("", 0)
                alarm = f"{self.rank} {number} {group}"
                first = self._store.compare_set("alarm", "", alarm).decode()
                self._tell_state()
                if first != alarm:
                    return self._answered()
                report = self._collect_report(dispute, if_past)
            except RuntimeError:
                report = self._report_alone()
                self._publish(report)
                return report
            self._publish(report)  # before the others read it and leave: mpiexec kills all when one has left
            with contextlib.suppress(RuntimeError):
                self._store.set("report", report)
                self._linger()
            return report

    def _collect_report(self, dispute: hang.Dispute | None, if_past: str) -> str:
        deadline = time.monotonic() + ANSWER_TIME
        missing = set(range(self.size)) - {self.rank}
        states, absent = {self.rank: self._state()}, {}
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"state/{rank}"]):
                    states[rank] = hang.State.from_json(json.loads(self._store.get(f"state/{rank}")))
                    missing.discard(rank)
                elif (words := self._departures.words_of(rank)) is not None:
                    absent[rank] = words
                    missing.discard(rank)
                elif (told := self._departures.fate(rank)) is not None and told.startswith(blackbox.SILENT):
                    absent[rank] = told
                    missing.discard(rank)
            time.sleep(0.02)
        absent |= {rank: self._departures.fate(rank) or _NO_ANSWER for rank in missing}
        if if_past and not any(state.waiting == dispute for state in states.values()):
            return if_past
        return hang.report(states, absent, dispute)

    def _discard_box(self) -> None:
        if self.box is not None:
            self.box.discard()

    def _answered(self) -> str:
        """The report that another rank makes."""
        report = self._published_report()
        failure.record(failure.Failure.now(self.rank, failure.PEER, report))
        self._linger()
        return report

    def _published_report(self) -> str:
        deadline = time.monotonic() + 2 * ANSWER_TIME
        while time.monotonic() < deadline:
            if self._store.check(["report"]):
                return self._store.get("report").decode()
            time.sleep(0.02)
        return "the job hangs, and the rank that noticed it has gone before it could say why"

    def _linger(self) -> None:
        """Rank 0 may hold the store: it stays until the others have read the report."""
        self._store.set(f"read/{self.rank}", "1")
        deadline = time.monotonic() + ANSWER_TIME
        readers = [rank for rank in range(self.size) if self.rank == 0 and self._store.check([f"state/{rank}"])]
        while time.monotonic() < deadline and not all(self._store.check([f"read/{rank}"]) for rank in readers):
            time.sleep(0.02)

    def _publish(self, report: str) -> None:
        taken = failure.record(failure.Failure.now(self.rank, failure.HANG, report))
        if not taken:  # nobody above will show it
            print(f"unisono: {report}", file=sys.stderr, flush=True)

    def _stop_job(self) -> None:
        self._discard_box()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.HANG_CODE)

    # ---- what this rank says of itself ---------------------------------------------------------------------------

    def _tell_state(self) -> None:
        self._store.set(f"state/{self.rank}", json.dumps(self._state().as_json()))

    def _state(self) -> hang.State:
        underway = _underway()
        what = ", ".join(describe(each.shape, each.dtype) for each in underway.outputs[:1]) if underway else ""
        note = f" ({underway.name} {what} is under way)" if underway else ""
        return hang.State.of(self.rank, self._place() + note, self._torch_call(), self._logs)

    def _place(self) -> str:
        frames = frames_of(self._main)
        for frame in frames:
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                return frame_place(frame)
        return frame_place(frames[0]) if frames else "its end"

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
        return f"torch.distributed.{frame.f_code.co_name}{what} at {self._place()}"

    # ---- leaving -------------------------------------------------------------------------------------------------

    def _say_goodbye(self, words: str = "have exited", is_well: bool = True) -> None:
        """As this process ends. One that fails anyway says so, and does not ask whether its results were right."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread is not None and is_well:
            self._thread.join(ANSWER_TIME)
            found = self._leave(words)
            if found is not None:
                self._sound_alarm(found.dispute, found.report)
                self._stop_job()
        else:
            with contextlib.suppress(RuntimeError):
                self._departures.announce(words, self._logs)
        self._discard_box()

    def _leave(self, words: str) -> Difference | None:
        """Let the others know that this rank is gone, for they may be waiting for it; and hold what it has run beside
        what those have that left before it. Nothing is known where the store is gone."""
        with contextlib.suppress(RuntimeError):
            found = self._comparison.last_difference()
            if found is None:
                self._departures.announce(words, self._logs)
                if self._ends_the_store:
                    self._departures.await_others(PARTING)
            return found
        return None

    def _hook_exceptions(self) -> None:
        earlier = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, HangError):
                return  # the report has been shown, once for all ranks
            self._say_goodbye(f"have raised {kind.__name__}: {error}{origin_of(trace)} and exited", False)
            earlier(kind, error, trace)

        sys.excepthook = hook


def _underway() -> Operation | None:
    """A collective that torch has begun over MPI and waits for in native code, as in the backward pass of DDP."""
    mpi_work = sys.modules.get("unisono.comm.mpi_work")
    found: Operation | None = None if mpi_work is None else mpi_work.PROGRESS.oldest()
    return found
