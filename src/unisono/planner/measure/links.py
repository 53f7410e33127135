"""Measures the links between ranks: seconds of messages by their size.

Note: amid work. Messages that follow each other find threads awake and caches warm, and take half of what they take in
a step or less. There ranks come to them from computing, one after the other. So each is timed after some milliseconds
of work, unless ranks share cores: they would count the work of the others too.

Note: turns. The thread that moves a message has its turn on a core that computes, now and then only at the next tick of
the clock, some milliseconds later. One message of ten that takes four times as long is no noise to be left out: a step
has many of them. So means count. A pipeline's sender computes on while its message travels, and so do senders here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from unisono.comm.communicator import Communicator

Points = list[tuple[float, float]]  # (bytes, seconds)
_Kind = TypeVar("_Kind")
_SIDE = 256  # rows and columns of the products between messages


class Care(NamedTuple):
    """How long to measure."""

    rounds: int
    seconds: float  # that one round lasts at least
    messages: tuple[int, ...]  # bytes
    in_a_round: int  # messages, where ranks compute between them
    work: int  # products between two, some milliseconds: the longer ranks compute, the further apart they come


CAREFUL = Care(9, 0.02, (2**10, 2**14, 2**17, 2**20, 2**23, 2**25), in_a_round=8, work=3)
BRIEF = Care(3, 0.002, (2**10, 2**17, 2**21), in_a_round=3, work=2)


def links(
    comm: Communicator,
    care: Care,
    timed: Callable[[Callable[[], Any]], float],
    have_cores: bool,
    device: torch.device | None = None,
) -> dict[str, Points]:
    """Of all collectives, for tensors on the device. `timed` gives the seconds of a call that is made over and over;
    `have_cores`: each rank has one of its own, and computes on it between messages."""
    seconds = {}
    sized = [(name, size) for size in care.messages for name in _COLLECTIVES]
    if have_cores:
        amid = _AmidWork(comm, care)
        seconds = _usual(care, {(name, size): partial(amid.one, name, size) for name, size in sized})
    else:
        for name, size in sized:
            seconds[name, size] = timed(_COLLECTIVES[name](comm, *_messages(comm, size, device)))
    return {name: _rising([(float(size), seconds[name, size]) for size in care.messages]) for name in _COLLECTIVES}


def of_ranks(name: str, measured: list[Points]) -> Points:
    """Of several ranks. Who comes first to a collective and waits is another each time; of a send, the receiver."""
    chosen = max if name == "send" else statistics.mean
    return [(point[0][0], chosen([seconds for _, seconds in point])) for point in zip(*measured, strict=True)]


def _rising(points: Points) -> Points:
    """No message takes longer than a larger one: those that seem to, and the larger ones, are given their mean."""
    pools: list[list[tuple[float, float]]] = []
    for point in points:
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [(size, _mean(pool)) for pool in pools for size, _ in pool]


def _mean(points: Points) -> float:
    return statistics.mean(seconds for _, seconds in points)


def _usual(care: Care, kinds: dict[_Kind, Callable[[], float]]) -> dict[_Kind, float]:
    """Seconds of each kind by its usual turn; within a turn, means: all messages of a step count. Kinds take turns, so
    that what else goes on here for a while falls on few turns of each."""
    turns: dict[_Kind, list[float]] = {kind: [] for kind in kinds}
    for _ in range(1 + care.rounds):
        for kind, one in kinds.items():
            turns[kind].append(statistics.mean(one() for _ in range(care.in_a_round)))
    return {kind: statistics.median(taken[1:]) for kind, taken in turns.items()}


class _AmidWork:
    """Times calls between computations."""

    def __init__(self, comm: Communicator, care: Care) -> None:
        self._weights = [torch.randn(_SIDE, _SIDE) for _ in range(care.work)]
        self._calls: dict[tuple[str, int], Callable[[], Any]] = {}
        self._posts = {}
        for size in care.messages:
            messages = _messages(comm, size)
            self._posts[size] = _Post(comm, *messages)
            for name, made in _COLLECTIVES.items():
                self._calls[name, size] = made(comm, *messages)

    def one(self, name: str, size: int) -> float:
        if name == "send":
            return self._posts[size].one()
        _compute(self._weights)
        start = time.perf_counter()
        self._calls[name, size]()
        return time.perf_counter() - start


class _Post:
    """Times messages between two ranks of which one waits, and the other has sent and computes on.

    A message goes there and another comes back. The ranks' clocks need not agree: the second message brings along how
    long its sender had the first.
    """

    def __init__(self, comm: Communicator, x: torch.Tensor, y: torch.Tensor) -> None:
        self._comm = comm
        self._x, self._y = x, y
        self._peer = comm.rank ^ 1
        # One product more before a send than after it: the other waits by then, but has only just said so.
        self._after = [torch.randn(_SIDE, _SIDE) for _ in range(2)]
        self._before = [torch.randn(_SIDE, _SIDE) for _ in range(3)]

    def one(self) -> float:
        """Seconds between a rank's sending and the other's having it; known to one of the two."""
        if self._peer >= self._comm.size:
            return 0.0
        return self._answered() if self._comm.rank % 2 else self._asked()

    def _asked(self) -> float:
        _compute(self._before)
        start = time.perf_counter()
        sent = self._comm.isend(self._x, self._peer)
        _compute(self._after)
        self._comm.irecv(self._y, self._peer).wait()
        taken = time.perf_counter() - start
        sent.wait()
        return (taken - self._y[0].item()) / 2

    def _answered(self) -> float:
        self._comm.irecv(self._y, self._peer).wait()
        start = time.perf_counter()
        _compute(self._before)
        self._x[0] = time.perf_counter() - start
        sent = self._comm.isend(self._x, self._peer)
        _compute(self._after)
        sent.wait()
        return 0.0


def _compute(weights: list[torch.Tensor]) -> None:
    x = weights[0]
    for weight in weights:
        x = torch.tanh(x @ weight)


# ---- the calls -------------------------------------------------------------------------------------------------------

_Made = Callable[[Communicator, torch.Tensor, torch.Tensor], Callable[[], Any]]


def _messages(comm: Communicator, size: int, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One to give, and one to get."""
    count = size // 4 // comm.size * comm.size
    return torch.ones(count, device=device), torch.zeros(count, device=device)


def _send(comm: Communicator, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """One way, between neighbours; a turn goes there and back."""

    def there() -> None:
        if comm.rank ^ 1 < comm.size:
            if comm.rank % 2:
                comm.recv(y, comm.rank ^ 1)
            else:
                comm.send(x, comm.rank ^ 1)

    return there


def _exchange(comm: Communicator, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    """To the right and from the left at once, as tensors go round a ring."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.exchange([(x, right)], [(y, left)])


_COLLECTIVES: dict[str, _Made] = {
    "all_reduce": lambda comm, x, y: lambda: comm.all_reduce(x, "max"),
    "all_gather": lambda comm, x, y: lambda: comm.all_gather_into(y, x[: len(x) // comm.size]),
    "reduce_scatter": lambda comm, x, y: lambda: comm.reduce_scatter(x, "sum", out=y[: len(x) // comm.size]),
    "all_to_all": lambda comm, x, y: lambda: comm.all_to_all(x, out=y),
    "send": _send,
    "exchange": _exchange,
}
