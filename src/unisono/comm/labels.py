"""Whether a message of gloo's has filled its place: gloo takes one that is too short for one that fits.

A mark at the end of the place, random and eight bytes long, is still there when the message did not reach it. That
costs a microsecond and is always done. It does not tell how much came, nor notices what is fewer than eight bytes
short. So with `--check` a label travels before every message, under a tag of its own, and tells its length: one small
message more, which nobody waits for. On the line between two ranks it goes first, so a message that is over has its
label behind it; where there is none, the message was sent by torch.distributed itself, and nothing is known of it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist

from unisono.errors import MessageError, UsageError

TAGS = 2**29  # of messages; their labels have those above
_LENGTH = 8
_MARK = os.urandom(_LENGTH)
_NONE = -1
_SENT = 256  # labels to one rank that are kept
_PATIENCE = 5.0  # seconds for the label of a message whose sender was not known before it came


class Labels:
    """The labels of one group's messages."""

    def __init__(self, group: dist.ProcessGroup, is_used: bool) -> None:
        self._group = group
        # over several interfaces a message may overtake its label
        self._is_used = is_used and "," not in os.environ.get("GLOO_SOCKET_IFNAME", "")
        # gloo must not lose a label that is under way: those never taken by the receiver, or that never came
        self._sent: dict[int, deque[dist.Work]] = defaultdict(lambda: deque(maxlen=_SENT))
        self._kept: list[tuple[torch.Tensor, dist.Work]] = []

    def send(self, wire: torch.Tensor, to: int, tag: int) -> dist.Work | None:
        """To be called before the message itself is sent. What it returns must live until that is over."""
        if not self._is_used:
            return None
        work = self._group.send([torch.tensor([wire.nbytes])], to, TAGS + tag)
        self._sent[to].append(work)
        return work

    def expect(self, source: int, tag: int) -> tuple[torch.Tensor, dist.Work] | None:
        """To be called before the message itself is expected."""
        if not self._is_used:
            return None
        told = torch.tensor([_NONE])
        return told, self._group.recv([told], source, TAGS + tag)

    def keep(self, label: tuple[torch.Tensor, dist.Work]) -> None:
        self._kept.append(label)


class Place:
    """Where a message is received: `wire` is the memory for `tensor`."""

    def __init__(self, labels: Labels, tensor: torch.Tensor, wire: torch.Tensor) -> None:
        """To be made before the message is expected: it leaves its mark."""
        self._labels = labels
        self._tensor = tensor
        self._wire = wire
        self._label: tuple[torch.Tensor, dist.Work] | None = None
        nbytes = wire.nbytes
        self._end = wire.data_ptr() + nbytes - _LENGTH if wire.is_cpu and nbytes >= _LENGTH else 0
        if self._end:
            ctypes.memmove(self._end, _MARK, _LENGTH)

    def expect_label(self, source: int, tag: int) -> None:
        self._label = self._labels.expect(source, tag)

    def check(self, source: int, patience: float = 0.0) -> None:
        """The message is there: MessageError where it has not filled the place."""
        if self._label is not None:
            length = self._told(patience)
            if length not in (_NONE, self._wire.nbytes):
                raise not_as_long(self._tensor, length, source)
        if self._end and ctypes.string_at(self._end, _LENGTH) == _MARK:
            raise MessageError(
                f"recv expected {self._tensor.numel()} elements ({self._tensor.dtype}), but rank {source} sent fewer; "
                "--check tells how many"
            )

    def check_from(self, source: int, tag: int) -> None:
        """As `check`, of a message whose sender was not known before it came."""
        self.expect_label(source, tag)
        self.check(source, _PATIENCE)

    def _told(self, patience: float) -> int:
        assert self._label is not None
        deadline = time.monotonic() + patience
        while (length := int(self._label[0])) == _NONE and time.monotonic() < deadline:
            time.sleep(1e-4)
        if length == _NONE:
            self._labels.keep(self._label)
        return length


class Message:
    """A message under way, on the side that sends it: gloo's are waited for, and never tell that they are over."""

    def __init__(self, work: dist.Work, label: dist.Work | None = None) -> None:
        self._work = work
        self._label = label  # lives as long

    def wait(self) -> None:
        self._work.wait()

    def is_completed(self) -> bool:
        return False


class Received(Message):
    """A message under way to its place."""

    def __init__(self, work: dist.Work, place: Place, source: int) -> None:
        self._work = work
        self._place = place
        self._source = source

    def wait(self) -> None:
        self._work.wait()
        self._place.check(self._source)


def not_as_long(tensor: torch.Tensor, nbytes: int, source: int) -> MessageError:
    """What to raise for a message that does not fill the tensor it is for."""
    elements, rest = divmod(nbytes, tensor.itemsize)
    return MessageError(
        f"recv expected {tensor.numel()} elements ({tensor.dtype}), but rank {source} "
        f"sent {elements}{' and a part of one' if rest else ''}"
    )


def require_tag(tag: int) -> None:
    if tag.__class__ is not int or not 0 <= tag < TAGS:
        raise UsageError(f"tag {tag!r}: expected a whole number from 0 to {TAGS - 1}")
