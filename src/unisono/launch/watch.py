"""A running job as the launcher sees it: output passed on, the first failure found, everything ended."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from unisono.launch import failure, verdict
from unisono.launch.console import Console
from unisono.launch.job import Job
from unisono.launch.link import Link, Links
from unisono.launch.verdict import RankFailure
from unisono.launch.wire import Message

STOP = 8.0  # seconds that agents have to end their ranks: twice what they take before they do it by force
_SETTLE = 0.1  # after a failure, how long other agents may still report an earlier one
_SETTLE_DEBRIS = 1.0  # the same while only broken connections are known


@dataclass
class Outcome:
    code: int = 0
    told: str = ""  # the first failure in words; "" when all went well
    results: dict[int, bytes] = field(default_factory=dict)
    in_one_line: str = ""  # the first failure without its traceback
    is_hopeless: bool = False  # a restart would meet the same failure
    gone: dict[str, str] = field(default_factory=dict)  # hosts that do not answer any more, and what is known of it
    attempt: int = 0  # how often the job had been restarted when it ended


class Interrupted(Exception):
    """A signal to the launcher ended the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Watch:
    def __init__(
        self,
        job: Job,
        links: Links,
        console: Console,
        words_of: Callable[[Link], str] | None = None,
        attempt: int = 0,
    ) -> None:
        """`words_of` gives what an agent wrote on stderr, where that is not in its link; `attempt` is the first."""
        self._words_of = words_of or (lambda link: link.errors.decode(errors="replace"))
        self._job = job
        self._links = links
        self._console = console
        self._failures: dict[int, list[RankFailure]] = {}  # by attempt
        self._since: dict[int, float] = {}
        self._told: set[int] = set()
        self._restarting = False
        self._results: dict[int, bytearray] = {}
        self._codes: dict[int, int | None] = {}
        self._lost: str = ""
        self._gone_hosts: dict[str, str] = {}
        self._problem = ""  # what made an agent give up, and when: a lost host explains it, if there is one
        self._problem_since = 0.0
        self._attempt = attempt
        self._is_stopping = False
        self._patience = 0.0  # seconds that ranks want to end by themselves
        self._last: dict[int, str] = {}  # what ranks began last

    def until_end(self) -> Outcome:
        """Until the job has ended by itself or failed for good."""
        began = time.monotonic()
        for link in self._links:
            if link.gone:  # since the preflight, which had nothing to ask it any more
                self._gone(link)
        while any(link.ended is None for link in self._links) and not self._lost:
            self._listen(0.1)
            self._enforce_limit(time.monotonic() - began)
            if self._problem and time.monotonic() - self._problem_since > _SETTLE_DEBRIS:
                break
            if self._console.is_unread:
                raise Interrupted(signal.SIGPIPE)
            attempt = self._settled()
            if attempt is None:
                continue
            if not self._restarting:
                break
            self._tell_restart(attempt)
        self.stop()
        return replace(self._outcome(), gone=self._gone_hosts, attempt=self._attempt)

    def _enforce_limit(self, seconds: float) -> None:
        limit = self._job.time_limit
        late = [_ranks(link) for link in self._links if link.ended is None]
        if limit is not None and seconds > limit and late and not self._failures:
            self._lost = f"rank {', '.join(late)} still ran after the timeout of {limit:g} s; all were ended"

    def stop(self, signum: int | None = None) -> None:
        """End all ranks. Their agents say when they are done; those that do not are killed."""
        self._is_stopping = True
        if signum is not None:
            for link in self._links:
                link.wire.send({"do": "stop", "signal": signum})
        self._links.hang_up()
        began = time.monotonic()
        while time.monotonic() < began + self._patience + STOP and any(not link.gone for link in self._links):
            self._listen(0.1)
        self._links.kill()

    def close(self) -> None:
        self._links.close()

    def _listen(self, timeout: float) -> None:
        for link, message in self._links.receive(timeout):
            self._hear(link, message)

    def _hear(self, link: Link, message: Message) -> None:
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
            case "patience":
                self._patience = max(self._patience, message["seconds"])
            case "ended":
                link.ended = message
                self._codes |= dict(message["codes"])
                if message["problem"] and not self._problem:
                    self._problem = f"the agent on host {link.host} failed:\n{message['problem'].rstrip()}"
                    self._problem_since = time.monotonic()
            case "gone":
                self._gone(link)

    def _output(self, rank: int, stream: str, data: str) -> None:
        if stream == "result":
            self._results.setdefault(rank, bytearray()).extend(base64.b64decode(data))
        else:
            self._console.write(rank, stream, data)

    def _failed(self, message: Message) -> None:
        attempt = message["attempt"]
        self._since.setdefault(attempt, time.monotonic())
        already = self._restarting or attempt not in self._failures
        self._restarting = message["restarting"] and already  # nobody restarts where one node does not
        self._last |= dict(message["last"])
        for told in message["failures"]:
            each = RankFailure(**told)
            self._failures.setdefault(attempt, []).append(each)
            self._console.to_file(each.rank, _for_file(each))

    def _gone(self, link: Link) -> None:
        if link.ended is None:
            link.ended = {}
            if self._is_stopping:  # it was told to go
                return
            self._gone_hosts[link.host] = "its agent was lost"
            self._console.mute(set(range(self._job.world)))  # what the others say now comes of it
            said = self._words_of(link).strip()
            if not self._lost:
                self._lost = f"the agent on host {link.host} was lost; its ranks are {_ranks(link)}" + (
                    f":\n{said}" if said else ""
                )

    def _settled(self) -> int | None:
        """The attempt whose first failure can be named now."""
        for attempt, failures in self._failures.items():
            if attempt in self._told:
                continue
            patience = _SETTLE_DEBRIS if _may_come_of_a_loss(failures) else _SETTLE
            alone = len(self._links.all) == 1
            if alone or time.monotonic() - self._since[attempt] >= patience:
                return attempt
        return None

    def _tell_restart(self, attempt: int) -> None:
        self._told.add(attempt)
        first = verdict.first(self._failures[attempt])
        cause = verdict.in_one_line(first, self._host(first.rank))
        self._console.say(f"restart {attempt + 1} of {self._job.max_restarts}: {cause}")

    def _outcome(self) -> Outcome:
        results = {rank: bytes(data) for rank, data in self._results.items()}
        open_attempts = [attempt for attempt in self._failures if attempt not in self._told]
        failures = self._failures[open_attempts[-1]] if open_attempts else []
        if not failures or (self._lost and _may_come_of_a_loss(failures)):
            told = self._lost or self._problem
            return Outcome(1 if told else 0, told, results, told.partition("\n")[0])
        first = verdict.first(failures)
        told = verdict.tell(first, self._host(first.rank), self._last) + self._note(first, failures)
        brief = verdict.in_one_line(first, self._host(first.rank))
        return Outcome(first.exit_code, told, results, brief, is_hopeless=first.kind == failure.USAGE)

    def _note(self, first: RankFailure, failures: list[RankFailure]) -> str:
        if first.is_debris:
            finished = sorted(rank for rank, code in self._codes.items() if code == 0)
            return f"\n(rank {', '.join(map(str, finished))} had already ended, code 0)" if finished else ""
        others = {each.rank for each in failures if not each.is_debris and each.kind != failure.HANG}
        others -= {first.rank}
        return f"\n({len(others)} more failed after it)" if others else ""

    def _host(self, rank: int) -> str | None:
        return self._job.placement_of(rank).host.name if self._job.several_hosts else None


@contextmanager
def ending(watch: Watch) -> Iterator[None]:
    """However the job ends, its agents end."""
    signum = None
    try:
        yield
    except Interrupted as interrupted:
        signum = interrupted.signum
        raise
    finally:
        watch.stop(signum)
        watch.close()


def _may_come_of_a_loss(failures: Sequence[RankFailure]) -> bool:
    return all(each.may_come_of_a_loss for each in failures)


def _for_file(each: RankFailure) -> str:
    """A rank's own file gets its own words, whoever failed first."""
    return each.text if each.text.endswith("\n") or not each.text else each.text + "\n"


def _ranks(link: Link) -> str:
    return ", ".join(map(str, link.ranks))
