"""Which failure was the first, and its description for the user.

When a rank dies, its peers fail within milliseconds because their connections break, and are often noticed first. So
order in time is not enough: a broken connection counts as a consequence as long as anything else has failed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unisono.amounts import ranks_in_words
from unisono.launch.outcome import failure

EXIT = "exit"  # ended with a code and without a failure record
SIGNAL = "signal"  # killed

# No action of a peer ends a process with one of these: the rank that received it is the origin.
_OWN_FAULT = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
_HINTS = {
    signal.SIGKILL: "the kernel does this when memory runs out; see dmesg",
    signal.SIGSEGV: "segmentation fault in native code; its Python stack, if known, is in the rank's output",
    signal.SIGBUS: "bus error; a full /dev/shm does this",
    signal.SIGABRT: "native code aborted; its message is in the rank's output",
}

NO_RECORD = "it reported no error, as after os._exit or an exit in native code"
_DIFFER = "(ranks whose collectives differ can crash like this: --check reports the first difference before it runs)"
_TOO_LONG = "(gloo aborts a rank that is sent more elements than the receiving tensor holds)"
# The last operation as in the crash note. Point-to-point operations have no number: each rank counts its own.
_COLLECTIVE = re.compile(r"(?P<what>.*?#(?P<number>\d+).*?) at \S+?:\d+(?P<group>.*)")
_RECEIVING = ("recv ", "irecv ", "exchange ")


@dataclass(frozen=True)
class RankFailure:
    rank: int
    kind: str
    text: str
    age: float  # seconds before the report was made: clocks of hosts differ
    code: int  # exit code; minus the signal's number when killed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code or 1

    @property
    def is_consequence(self) -> bool:
        return self.kind == failure.PEER

    @property
    def could_follow_a_loss(self) -> bool:
        """Whether ranks fail like this when another host is lost."""
        return self.kind in (failure.PEER, failure.HANG)


def first(failures: Iterable[RankFailure]) -> RankFailure:
    return min(failures, key=lambda each: (_order(each), -each.age, each.rank))


def _order(each: RankFailure) -> int:
    if each.is_consequence:
        return 2
    return 0 if each.kind == SIGNAL and -each.code in _OWN_FAULT else 1


def describe(each: RankFailure, host: str | None, last: Mapping[int, str] | None = None) -> str:
    """The message for the user. host: None if there is only one; last: the last operation of each rank."""
    if each.kind == failure.HANG:
        return each.text.rstrip("\n")
    where = f" on host {host}" if host else ""
    if each.kind == SIGNAL:
        name = signal_name(-each.code)
        hint = _HINTS.get(-each.code)  # type: ignore[call-overload]
        head = f"rank {each.rank} was killed by {name}{where}" + (f" ({hint})" if hint else "")
        return head + _last_operations(each.rank, last or {}, -each.code)
    head = f"rank {each.rank} failed{where} (exit code {each.exit_code})"
    if each.text.strip():
        return f"{head}:\n{each.text.rstrip()}"
    return f"{head}; {NO_RECORD}{_last_operations(each.rank, last or {})}"


def _last_operations(dead: int, last: Mapping[int, str], signum: int = 0) -> str:
    """The last operation of the dead rank, then of the others, and an explanation if it fits the signal."""
    if dead not in last:
        return ""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(last, key=lambda rank: (rank != dead, rank)):
        ranks_at.setdefault(last[rank], []).append(rank)
    lines = [f"{ranks_in_words(sorted(ranks))} last began {operation}" for operation, ranks in ranks_at.items()]
    return "\n" + "; ".join(lines) + _explanation(dead, last, signum)


def _explanation(dead: int, last: Mapping[int, str], signum: int) -> str:
    if signum not in (signal.SIGABRT, signal.SIGSEGV):
        return ""
    if last[dead].startswith(_RECEIVING) and signum == signal.SIGABRT:
        return f"\n{_TOO_LONG}"
    return f"\n{_DIFFER}" if any(_differ(last[dead], other) for other in last.values()) else ""


def _differ(one: str, other: str) -> bool:
    """Whether they are different collectives with the same number in the same group."""
    mine, theirs = _COLLECTIVE.fullmatch(one), _COLLECTIVE.fullmatch(other)
    if mine is None or theirs is None or mine["group"] != theirs["group"]:
        return False
    return mine["number"] == theirs["number"] and mine["what"] != theirs["what"]


def summary(each: RankFailure, host: str | None) -> str:
    """One line: the first, and the last of the traceback if there is one."""
    lines = describe(each, host).splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
