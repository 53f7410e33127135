"""Whether a message of gloo's has filled its place: gloo takes one that is too short for one that fits.

A mark at the end of the place, random and eight bytes long, is still there when the message did not reach it. That
costs a microsecond and is always done. It does not tell how much came, and of fewer than eight bytes it may be there
by chance. So with `--check` a label travels before every message, under a tag of its own, and tells its length and a
sum over its end: one small message more, which nobody waits for. On the line between two ranks it goes first, so a
message that is over has its label behind it.

A label is only asked when the mark, or the end of it, is still there; and believed when its sum fits what came. For
torch.distributed sends messages that have no label, and takes messages whose label is then left over.

gloo does not tell that a label has been taken, and a line on which one is lost while it is under way carries nothing
any more. So the receiver tells from time to time how many it has taken, and the sender keeps the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from unisono.errors import MessageError, UsageError

TAGS = 2**29  # of messages; their labels have those above, and the receipts for labels those above these
_LENGTH = 8
_MARK = os.urandom(_LENGTH - 1) + b"\xa7"  # few numbers that people send end like this
_NONE = -1
_UNTAKEN = 2**16  # labels on one line, at most: who leaves so many takes messages by torch.distributed
_PER_RECEIPT = 64
_PATIENCE = 0.5  # seconds for the label of a message that may be too short
_SUM_BITS = 22  # of a label, below the length
_SUMMED = 64  # bytes at the end of a message


class Labels:
    """The labels of one group's messages."""

    def __init__(self, group: dist.ProcessGroup, is_used: bool) -> None:
        self._group = group
        # over several interfaces a message may overtake its label
        self.is_used = is_used and "," not in os.environ.get("GLOO_SOCKET_IFNAME", "")
        self._sent: dict[tuple[int, int], SentLine] = {}
        self._lines: dict[tuple[int, int], Line] = {}

    def send(self, wire: torch.Tensor, to: int, tag: int) -> dist.Work | None:
        """To be called before the message itself is sent. What it returns must live until that is over."""
        if not self.is_used:
            return None
        line = self._sent.get((to, tag))
        if line is None:
            line = self._sent[to, tag] = SentLine(self._group, to, tag)
        return line.send(_label_of(wire.data_ptr(), wire.nbytes))

    def expect(self, source: int, tag: int) -> Line | None:
        """To be called before the message itself is expected."""
        if not self.is_used:
            return None
        line = self._lines.get((source, tag))
        if line is None:
            line = self._lines[source, tag] = Line(self._group, source, tag)
        line.expect()
        return line


class SentLine:
    """The labels to one rank under one tag."""

    def __init__(self, group: dist.ProcessGroup, to: int, tag: int) -> None:
        self._send = partial(group.send, dstRank=to, tag=TAGS + tag)
        self._receive = partial(group.recv, srcRank=to, tag=2 * TAGS + tag)
        self._untaken: deque[dist.Work] = deque()
        self._taken = 0
        self._turn = threading.Lock()
        self._await_receipt()

    def send(self, label: int) -> dist.Work | None:
        with self._turn:
            self._forget_taken()
            if len(self._untaken) == _UNTAKEN:
                return None
            work = self._send([torch.tensor([label])])
            self._untaken.append(work)
            return work

    def _forget_taken(self) -> None:
        while (taken := int(self._receipt[0])) != _NONE:
            for _ in range(taken - self._taken):
                self._untaken.popleft()
            self._taken = taken
            self._await_receipt()

    def _await_receipt(self) -> None:
        self._receipt = torch.tensor([_NONE])
        self._receiving = self._receive([self._receipt])


class Line:
    """The labels from one rank under one tag, in the order in which they are sent."""

    def __init__(self, group: dist.ProcessGroup, source: int, tag: int) -> None:
        self._receive = partial(group.recv, srcRank=source, tag=TAGS + tag)
        self._send_receipt = partial(group.send, dstRank=source, tag=2 * TAGS + tag)
        self._awaited: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._came: deque[int] = deque()
        self._taken = self._told = 0
        # no more are under way: the sender takes one before it sends the next label
        self._receipts: deque[dist.Work] = deque(maxlen=_UNTAKEN // _PER_RECEIPT + 1)
        self._messages = 0  # expected, and not known to be over
        self._turn = threading.Lock()  # handles may be waited for in any thread

    def expect(self) -> None:
        """A message is about to be expected."""
        with self._turn:
            self._messages += 1
            self._collect()
            if len(self._awaited) < self._messages:  # else a message without a label has left one awaited
                self._await_one()

    def take(self, whole: Callable[[int], bool], part: Callable[[int], bool], patience: float = 0.0) -> int | None:
        """A message is over: the label that fits the whole of it, at once; else, when no more labels have come for
        `patience` seconds, the longest that fits a part of it, if there is one."""
        deadline = time.monotonic() + patience
        while True:
            with self._turn:
                if self._collect():
                    deadline = time.monotonic() + patience
                found = next(filter(whole, self._came), None)
                is_late = time.monotonic() >= deadline
                if found is None and is_late:
                    found = max(filter(part, self._came), default=None)
                if found is not None or is_late:
                    self._drop(found)
                    return found
                if not self._awaited:  # those of messages that torch.distributed took stand before it
                    self._await_one()
            time.sleep(1e-4)

    def _await_one(self) -> None:
        told = torch.tensor([_NONE])
        self._awaited.append((told, self._receive([told])))

    def _collect(self) -> bool:
        """Whether any has come."""
        before = self._taken
        while self._awaited and (label := int(self._awaited[0][0])) != _NONE:
            self._awaited.popleft()
            self._came.append(label)
            self._taken += 1
        if self._taken - self._told >= _PER_RECEIPT:
            self._told = self._taken
            with contextlib.suppress(RuntimeError):  # the sender may have left
                self._receipts.append(self._send_receipt([torch.tensor([self._told])]))
        return self._taken > before

    def _drop(self, found: int | None) -> None:
        """One for each message: a line that carries some without labels, or labels without theirs, does not grow."""
        self._messages -= 1
        if found is not None:
            self._came.remove(found)
        elif self._came:
            self._came.popleft()


class Place:
    """Where a message is received: `wire` is the memory for `tensor`."""

    def __init__(self, labels: Labels, tensor: torch.Tensor, wire: torch.Tensor) -> None:
        """To be made before the message is expected: it leaves its mark."""
        self._labels = labels
        self._tensor = tensor
        self._wire = wire
        self._line: Line | None = None
        self._mark = _MARK[: wire.nbytes] if wire.is_cpu else b""
        self._end = wire.data_ptr() + wire.nbytes - len(self._mark)
        if self._mark:
            ctypes.memmove(self._end, self._mark, len(self._mark))

    def expect_label(self, source: int, tag: int) -> None:
        self._line = self._labels.expect(source, tag)

    def check(self, source: int) -> None:
        """The message is there: MessageError where it has not filled the place."""
        unwritten = self._unwritten()
        if self._line is None:
            if unwritten == _LENGTH:
                raise self._too_short(source, "; --check tells how many")
        elif not unwritten:
            self._line.take(lambda _: True, lambda _: True)
        else:
            length = self._told_length(self._line, unwritten)
            if length is not None and length < self._wire.nbytes:
                raise not_as_long(self._tensor, length, source)
            if length is None and unwritten == _LENGTH:
                raise self._too_short(source)

    def check_from(self, source: int, tag: int) -> None:
        """As `check`, of a message whose sender was not known before it came."""
        self.expect_label(source, tag)
        self.check(source)

    def _unwritten(self) -> int:
        """How many bytes at the end are as in the mark."""
        found = ctypes.string_at(self._end, len(self._mark))
        count = 0
        while count < len(found) and found[-1 - count] == self._mark[-1 - count]:
            count += 1
        return count

    def _told_length(self, line: Line, unwritten: int) -> int | None:
        """How long the message is by its label, which fits what came; None where there is none."""
        nbytes = self._wire.nbytes

        def is_whole(label: int) -> bool:
            return label >> _SUM_BITS == nbytes and self._fits(label)

        def is_part(label: int) -> bool:
            missing = nbytes - (label >> _SUM_BITS)
            return missing > 0 and (missing <= unwritten or unwritten == _LENGTH) and self._fits(label)

        label = line.take(is_whole, is_part, _PATIENCE)
        return None if label is None else label >> _SUM_BITS

    def _fits(self, label: int) -> bool:
        return _label_of(self._wire.data_ptr(), label >> _SUM_BITS) == label

    def _too_short(self, source: int, hint: str = "") -> MessageError:
        expected = f"recv expected {self._tensor.numel()} elements ({self._tensor.dtype})"
        return MessageError(f"{expected}, but rank {source} sent fewer{hint}")


def _label_of(start: int, nbytes: int) -> int:
    """Of a message of so many bytes that lies there. One number, so that it comes all at once."""
    summed = min(nbytes, _SUMMED)
    end = zlib.crc32(ctypes.string_at(start + nbytes - summed, summed))
    return nbytes << _SUM_BITS | end & (1 << _SUM_BITS) - 1


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
