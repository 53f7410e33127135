"""Monitor: a running job as the launcher sees it. Forwards output, finds the first failure, ends everything."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from unisono.launch.console import Console
from unisono.launch.job import LaunchJob
from unisono.launch.outcome import failure, verdict
from unisono.launch.outcome.heartbeat import Heartbeat
from unisono.launch.outcome.verdict import RankFailure
from unisono.launch.transport.link import AgentLink, AgentLinks
from unisono.launch.transport.wire import Message

STOP = 8.0  # seconds in which agents must end their ranks: twice agent.connection.HARD_STOP
_SETTLE = 0.1  # seconds after a failure in which other agents may report an earlier one
_SETTLE_PEER = 1.0  # the same while only broken connections are known


@dataclass
class Outcome:
    code: int = 0
    error: str = ""  # describes the first failure; "" on success
    results: dict[int, bytes] = field(default_factory=dict)
    summary: str = ""  # the error in one line, without its traceback
    is_permanent: bool = False  # a restart would fail in the same way
    lost_hosts: dict[str, str] = field(default_factory=dict)  # hosts that do not answer any more: why
    has_returned: bool = False  # the job was stopped to take back a host that had been lost
    attempt: int = 0  # restarts before the job ended
    failed_rank: int | None = None  # the first that failed, if one did


class Interrupted(Exception):
    """A signal to the launcher ended the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.attempt = 0  # restarts before it


class Monitor:
    def __init__(
        self,
        job: LaunchJob,
        links: AgentLinks,
        console: Console,
        stderr_of: Callable[[AgentLink], str] | None = None,
        attempt: int = 0,
        has_returned: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stderr_of` returns the stderr of an agent that its link does not have; `attempt` is the first attempt. The
        ranks are asked to save and to stop when a lost host `has_returned`."""
        self._stderr_of = stderr_of or (lambda link: link.errors.decode(errors="replace"))
        self._has_returned = has_returned
        self._job = job
        self._links = links
        self._console = console
        self._failures: dict[int, list[RankFailure]] = {}  # by attempt
        self._since: dict[int, float] = {}
        self._reported: set[int] = set()  # attempts whose failure was shown
        self._restarting = False
        self._results: dict[int, bytearray] = {}
        self._codes: dict[int, int | None] = {}
        self._lost = ""  # describes the first lost agent
        self._lost_code = 1
        self._heartbeat = Heartbeat(job, links, console.message)
        self._lost_hosts: dict[str, str] = {}
        self._problem = ""  # error of an agent; a lost host, if there is one, is its cause
        self._problem_since = 0.0
        self._stopped: tuple[int, str] | None = None  # exit code and reason of a job that was asked to stop
        self._stopped_since = 0.0
        self._must_end = False  # ranks of other agents would wait for those that were stopped
        self._attempt = attempt
        self._is_stopping = False
        self._is_returning = False  # stopped to be started again with a host that is back
        self._grace = 0.0  # seconds that ranks have requested after SIGTERM
        self._last: dict[int, str] = {}  # last operation of each rank

    @property
    def attempt(self) -> int:
        """Restarts so far."""
        return self._attempt

    def until_end(self) -> Outcome:
        """Wait until the job has ended by itself or failed for good."""
        began = time.monotonic()
        for link in self._links:
            if link.is_closed:  # lost after the preflight
                self._lose(link)
        while any(link.ended is None for link in self._links) and not self._lost:
            self._listen(0.1)
            self._enforce_limit(time.monotonic() - began)
            if not self._lost and (silent := self._heartbeat.silent()):
                self._lost, self._lost_code = silent, failure.HANG_CODE
            if self._problem and time.monotonic() - self._problem_since > _SETTLE_PEER:
                break
            if self._must_end and time.monotonic() - self._stopped_since > _SETTLE_PEER:
                break
            if self._console.is_unread:
                raise Interrupted(signal.SIGPIPE)
            attempt = self._settled()
            if attempt is None:
                if not self._failures.keys() - self._reported and self._has_returned():
                    return self._stopped_for_return()
                continue
            if not self._restarting:
                break
            self._report_restart(attempt)
        self.stop()
        return replace(self._outcome(), lost_hosts=self._lost_hosts, attempt=self._attempt)

    def _stopped_for_return(self) -> Outcome:
        """End the ranks as SIGTERM to the launcher does; the job may have finished meanwhile."""
        self._is_returning = True
        self.stop(signal.SIGTERM)
        codes = [self._codes.get(rank) for rank in range(self._job.world)]
        if self._stopped is None and not any(code != 0 for code in codes):
            return replace(self._outcome(), attempt=self._attempt)
        return Outcome(has_returned=True, attempt=self._attempt)

    def _enforce_limit(self, seconds: float) -> None:
        limit = self._job.time_limit
        late = [_ranks(link) for link in self._links if link.ended is None]
        if limit is not None and seconds > limit and late and not self._failures:
            self._lost = f"rank {', '.join(late)} still ran after the timeout of {limit:g} s; all ranks were ended"

    def stop(self, signum: int | None = None) -> None:
        """End all ranks. Agents that do not close their connection in time are killed."""
        self._is_stopping = True
        if self._may_restart(signum):
            for link in self._links:
                link.wire.send({"do": "keep"})
        if signum is not None:
            for link in self._links:
                link.wire.send({"do": "stop", "signal": signum})
        self._links.close_sending()
        began = time.monotonic()
        while time.monotonic() < began + self._grace + STOP and any(not link.is_closed for link in self._links):
            self._listen(0.1)
        self._links.kill()

    def _may_restart(self, signum: int | None) -> bool:
        """Whether new agents may go on from what ranks have saved in memory."""
        if self._is_returning:
            return True
        is_failed = bool(self._failures) if self._job.backend == "mpi" else bool(self._lost_hosts)
        return signum is None and is_failed and self._attempt < self._job.max_restarts + self._job.returns

    def close(self) -> None:
        self._links.close()

    def _listen(self, timeout: float) -> None:
        for link, message in self._links.receive(timeout):
            self._handle(link, message)

    def _handle(self, link: AgentLink, message: Message) -> None:
        match message["event"]:
            case "output":
                self._output(message["rank"], message["stream"], message["data"])
            case "started":
                self._attempt = max(self._attempt, message["attempt"])
                self._console.unmute(set(link.ranks))
            case "failing":
                self._console.mute(set(range(self._job.world)) - set(message["ranks"]))
            case "failed":
                self._failed(message)
            case "refused":
                self._console.message(
                    f"a connection from {message['from']} to the job's store was closed: it did not prove that it "
                    "belongs to the job; others are counted"
                )
            case "pong":
                self._heartbeat.answered(link)
            case "grace":
                self._grace = max(self._grace, message["seconds"])
            case "ended":
                link.ended = message
                self._codes |= dict(message["codes"])
                if message.get("refused", 0) > 1:
                    self._console.message(
                        f"{message['refused']} connections to the job's store were closed that did not belong to it"
                    )
                if message["stopped"] and (self._stopped is None or (message["stopped"][2] and not self._must_end)):
                    code, reason, self._must_end = message["stopped"]
                    self._stopped, self._stopped_since = (code, reason), time.monotonic()
                if message["problem"] and not self._problem:
                    problem = message["problem"].rstrip()
                    is_sentence = not problem.startswith("Traceback")
                    self._problem = problem if is_sentence else f"the agent on host {link.host} failed:\n{problem}"
                    self._problem_since = time.monotonic()
            case "closed":
                self._lose(link)

    def _output(self, rank: int, stream: str, data: str) -> None:
        if stream == "result":
            self._results.setdefault(rank, bytearray()).extend(base64.b64decode(data))
        else:
            self._console.write(rank, stream, data)

    def _failed(self, message: Message) -> None:
        attempt = message["attempt"]
        self._since.setdefault(attempt, time.monotonic())
        already = self._restarting or attempt not in self._failures
        self._restarting = message["restarting"] and already  # all nodes restart, or none
        self._last |= dict(message["last"])
        for fields in message["failures"]:
            each = RankFailure(**fields)
            self._failures.setdefault(attempt, []).append(each)
            self._console.to_file(each.rank, _with_newline(each.text))

    def _lose(self, link: AgentLink) -> None:
        if link.ended is None:
            link.ended = {}
            if self._is_stopping:  # as requested
                return
            self._lost_hosts[link.host] = "its agent was lost"
            self._console.mute(set(range(self._job.world)))  # output of the others is a consequence
            stderr = self._stderr_of(link).strip()
            if not self._lost:
                self._lost = f"the agent on host {link.host} was lost; its ranks are {_ranks(link)}" + (
                    f":\n{stderr}" if stderr else ""
                )

    def _settled(self) -> int | None:
        """The attempt whose first failure is known by now."""
        for attempt, failures in self._failures.items():
            if attempt in self._reported:
                continue
            settle = _SETTLE_PEER if _could_follow_a_loss(failures) else _SETTLE
            if len(self._links.all) == 1 or time.monotonic() - self._since[attempt] >= settle:
                return attempt
        return None

    def _report_restart(self, attempt: int) -> None:
        self._reported.add(attempt)
        first = verdict.first(self._failures[attempt])
        cause = verdict.summary(first, self._host(first.rank))
        counted = attempt + 1 - self._job.returns
        self._console.message(f"restart {counted} of {self._job.max_restarts}: {cause}")

    def _outcome(self) -> Outcome:
        results = {rank: bytes(data) for rank, data in self._results.items()}
        open_attempts = [attempt for attempt in self._failures if attempt not in self._reported]
        failures = self._failures[open_attempts[-1]] if open_attempts else []
        if not failures or ((self._lost or self._stopped) and _could_follow_a_loss(failures)):
            if self._stopped is not None:
                code, reason = self._stopped
                if (
                    self._lost_hosts
                ):  # the ranks of an agent that has lost its launcher are stopped, and the others see it
                    reason = f"{self._lost.partition(chr(10))[0]}; {reason}"
                return Outcome(code, reason, results, reason, is_permanent=True)
            error = self._lost or self._problem
            return Outcome(self._lost_code if error else 0, error, results, error.partition("\n")[0])
        first = verdict.first(failures)
        error = verdict.describe(first, self._host(first.rank), self._last) + self._note(first, failures)
        summary = verdict.summary(first, self._host(first.rank))
        is_permanent = first.kind == failure.USAGE
        return Outcome(first.exit_code, error, results, summary, is_permanent, failed_rank=first.rank)

    def _note(self, first: RankFailure, failures: list[RankFailure]) -> str:
        if first.is_consequence:
            finished = sorted(rank for rank, code in self._codes.items() if code == 0)
            return f"\n(rank {', '.join(map(str, finished))} had already ended with code 0)" if finished else ""
        others = {each.rank for each in failures if not each.is_consequence and each.kind != failure.HANG}
        others -= {first.rank}
        return f"\n({len(others)} more failed after it)" if others else ""

    def _host(self, rank: int) -> str | None:
        if self._job.group is not None and self._job.several_hosts:
            return self._job.group.host
        return self._job.placement_of(rank).host.name if self._job.several_hosts else None


@contextmanager
def ending(monitor: Monitor) -> Iterator[None]:
    """End the agents of the job, however the block ends."""
    signum = None
    try:
        yield
    except Interrupted as interrupted:
        signum = interrupted.signum if interrupted.signum != signal.SIGQUIT else signal.SIGINT  # ranks dump no core
        interrupted.attempt = monitor.attempt
        raise
    finally:
        monitor.stop(signum)
        monitor.close()


def _could_follow_a_loss(failures: Sequence[RankFailure]) -> bool:
    return all(each.could_follow_a_loss for each in failures)


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") or not text else text + "\n"


def _ranks(link: AgentLink) -> str:
    return ", ".join(map(str, link.ranks))
