"""Signatures of the pickled objects that ranks send each other: verified before anything is unpickled.

Unpickling runs code that the sender has chosen, and a backend's connections prove nothing about who has sent what. In a
job with a secret (launch/store/secret.py) each object therefore bears HMAC-SHA256 of its content, operation, group,
number in the group, source and destination: one that was made up, changed, sent again or moved to another place is an
error, and is not read. Where a job has no secret, objects bear nothing.
"""

from __future__ import annotations

import hmac
from collections import Counter

import torch

from unisono.errors import CommError

_LENGTH = 32  # bytes of a signature
ALL = -1  # the destination of what every rank gets


class Seal:
    """Signs and verifies the objects of one group."""

    def __init__(self, key: bytes | None, group: str) -> None:
        self.key = key
        self._group = group
        self._numbers: Counter[object] = Counter()

    def next_number(self, line: object = None) -> int:
        """Of an operation on objects: ranks of a group number them alike, and so do the ends of a `line`."""
        self._numbers[line] += 1
        return self._numbers[line]

    def sign(self, content: bytes, op: str, number: int, source: int, to: int = ALL) -> torch.Tensor:
        """The content and its signature, as bytes to send."""
        return torch.frombuffer(bytearray(self._mac(content, op, number, source, to) + content), dtype=torch.uint8)

    def verified(self, received: torch.Tensor, op: str, number: int, source: int, to: int = ALL) -> bytes:
        """The content. CommError unless rank `source` has sent it, there and then."""
        data = received.numpy().tobytes()
        if self.key is None:
            return data
        content = data[_LENGTH:]
        if not hmac.compare_digest(data[:_LENGTH], self._mac(content, op, number, source, to)):
            raise CommError(
                f"{op}: what came as rank {source}'s object does not bear this job's signature: it was changed on its "
                "way, or that rank has another secret (UNISONO_SECRET_FILE); it has not been read"
            )
        return content

    def _mac(self, content: bytes, op: str, number: int, source: int, to: int) -> bytes:
        if self.key is None:
            return b""
        place = f"{self._group}\n{op}\n{number} {source} {to} {len(content)}\n"
        return hmac.digest(self.key, place.encode() + content, "sha256")
