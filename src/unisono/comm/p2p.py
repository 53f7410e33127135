"""Point-to-point operations of a Communicator: send, recv, their asynchronous forms, and exchange of many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from unisono.comm import traffic
from unisono.comm.collectives import Collectives
from unisono.comm.handle import Handle
from unisono.comm.operation import Message, Outcome
from unisono.comm.watchdog.exits import ANY_SOURCE
from unisono.errors import UsageError

TAGS = 2**29  # larger tags are unisono's own


class PointToPoint(Collectives):
    """Operations between pairs of ranks of the group."""

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> None:
        """Send a tensor; returns when it may be changed again."""
        if self._fast_path is None or not self._fast_path.exchange([(tensor, to)], (), tag, "send to rank"):
            self._send("send", tensor, to, tag, False)

    def recv(self, tensor: torch.Tensor, source: int | None = None, tag: int = 0) -> int:
        """Receive into a tensor, from one rank or (None) from any; returns the rank it came from."""
        if source is not None:
            if self._fast_path is None or not self._fast_path.exchange((), [(tensor, source)], tag, "recv from rank"):
                self._recv("recv", tensor, source, tag, False)
            return source
        _require_tag(tag)
        self._require_tensor(tensor)
        transfer = self._transport.recv(tensor, None, tag)
        found: int = self._run(ANY_SOURCE, tensor, transfer, None, False, log=self._p2p_log)
        if traffic.counters:
            traffic.note_arrival(tensor, self.ranks[found])
        return found

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Handle:
        """Begin to send; the tensor must not change until the handle is waited for."""
        return cast(Handle, self._send("isend", tensor, to, tag, True))

    def irecv(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Handle:
        """Begin to receive; the tensor must not be read until the handle is waited for."""
        return cast(Handle, self._recv("irecv", tensor, source, tag, True))

    def exchange(
        self, sends: Sequence[Message] = (), recvs: Sequence[Message] = (), *, async_op: bool = False
    ) -> Outcome:
        """Send and receive many tensors at once, in any pattern, without deadlock.

        `sends` are (tensor, to) and `recvs` are (tensor, source); between two ranks they pair up in order.
        """
        received = [tensor for tensor, _ in recvs]
        if self._fast_path is not None and not async_op and self._fast_path.exchange(sends, recvs):
            return received
        for tensor, peer in (*sends, *recvs):
            self._require_tensor(tensor)
            self._require_peer(peer)
        transfer = self._transport.exchange(sends, recvs)
        self._note(sends, recvs)
        peers = ",".join(str(peer) for peer in sorted({peer for _, peer in (*sends, *recvs)}))
        return self._run(f"exchange with ranks {peers}", None, transfer, received, async_op, log=self._p2p_log)

    def block(self, what: str, until: Callable[[], None]) -> None:
        """Wait for other ranks in a way of one's own, visibly for the watchdog: `until` returns, or raises RuntimeError
        where what is waited for will not come."""
        self._watchdog.begin(self._p2p_log, what, "", None)
        try:
            self._watchdog.waiter(self._p2p_log)(until)
        finally:
            self._p2p_log.left = self._p2p_log.entered

    def _send(self, op: str, tensor: torch.Tensor, to: int, tag: int, async_op: bool) -> Outcome:
        self._require_peer(to)
        _require_tag(tag)
        self._require_tensor(tensor)
        transfer = self._transport.send(tensor, to, tag)
        self._note([(tensor, to)], ())
        return self._run(f"{op} to rank {to}", tensor, transfer, tensor, async_op, log=self._p2p_log)

    def _recv(self, op: str, tensor: torch.Tensor, source: int, tag: int, async_op: bool) -> Outcome:
        self._require_peer(source)
        _require_tag(tag)
        self._require_tensor(tensor)
        transfer = self._transport.recv(tensor, source, tag)
        self._note((), [(tensor, source)])
        return self._run(f"{op} from rank {source}", tensor, transfer, tensor, async_op, log=self._p2p_log)

    def _note(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        if traffic.counters:
            for tensor, to in sends:
                traffic.note("send", self.size, tensor, (self.ranks[to],))
            for tensor, source in recvs:
                traffic.note_arrival(tensor, self.ranks[source])

    def _require_peer(self, peer: int) -> None:
        self._require_rank("peer", peer)
        if peer == self.rank:
            raise UsageError(f"rank {peer} would send to or receive from itself; copy the tensor instead")


def _require_tag(tag: int) -> None:
    if tag.__class__ is not int or not 0 <= tag < TAGS:
        raise UsageError(f"tag {tag!r}: expected a whole number from 0 to {TAGS - 1}")
