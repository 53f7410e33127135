"""Measures the links between ranks: seconds of messages by their size.

Note: amid work. Messages that follow each other find threads awake and caches warm, and take half of what they take in
a step or less. There ranks come to them from computing, one after the other. So each is timed after some milliseconds
of work, but for two kinds: ranks that share cores would count the work of the others too, and sends meet a stage of a
pipeline that waits for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unisono.comm.communicator import Communicator

Points = list[tuple[float, float]]  # (bytes, seconds)
_SIDE = 256  # rows and columns of the products between messages


class Care(NamedTuple):
    """How long to measure."""

    rounds: int = 7
    turn: float = 0.02  # seconds that one turn lasts at least
    messages: tuple[int, ...] = (2**10, 2**14, 2**17, 2**20, 2**23, 2**25)
    in_a_turn: int = 8  # messages, where computations are between them
    work: int = 5  # products between two, some milliseconds: the longer ranks compute, the further apart they come


BRIEF = Care(rounds=3, turn=0.003, messages=(2**10, 2**17, 2**22), in_a_turn=3, work=2)


def links(
    comm: Communicator, care: Care, timed: Callable[[Callable[[], Any]], float], have_cores: bool
) -> dict[str, Points]:
    """Of all collectives. `timed` gives the seconds of a call that is made over and over; `have_cores`: each rank has
    one of its own."""
    found = {}
    for name, made in _COLLECTIVES.items():
        clock = timed if name == "send" or not have_cores else _AmidWork(care).seconds
        found[name] = _rising([(float(size), clock(_call(made, comm, size))) for size in care.messages])
    return found


def together(name: str, of_ranks: list[Points]) -> Points:
    """Of several ranks. Who comes first to a collective and waits is another each time; of a send, the receiver."""
    chosen = max if name == "send" else statistics.mean
    return [(point[0][0], chosen([seconds for _, seconds in point])) for point in zip(*of_ranks, strict=True)]


def _rising(points: Points) -> Points:
    """No message takes longer than a larger one."""
    for place in range(len(points) - 2, -1, -1):
        points[place] = (points[place][0], min(points[place][1], points[place + 1][1]))
    return points


class _AmidWork:
    """Times calls between computations."""

    def __init__(self, care: Care) -> None:
        self._care = care
        self._weights = [torch.randn(_SIDE, _SIDE) for _ in range(care.work)]

    def seconds(self, call: Callable[[], Any]) -> float:
        self._turn(call)
        turns = sorted(self._turn(call) for _ in range(self._care.rounds))
        return turns[len(turns) // 4]  # what else goes on here only adds

    def _turn(self, call: Callable[[], Any]) -> float:
        """Some messages of a step take several times as long as others, and all of them count."""
        return statistics.mean(self._one(call) for _ in range(self._care.in_a_turn))

    def _one(self, call: Callable[[], Any]) -> float:
        x = self._weights[0]
        for weight in self._weights:
            x = torch.tanh(x @ weight)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


# ---- the calls -------------------------------------------------------------------------------------------------------

_Made = Callable[[Communicator, torch.Tensor, torch.Tensor], Callable[[], Any]]


def _call(made: _Made, comm: Communicator, size: int) -> Callable[[], Any]:
    count = size // 4 // comm.size * comm.size
    return made(comm, torch.ones(count), torch.empty(count))


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
