"""The order of samples: a shuffle that depends on (seed, epoch) and nothing else.

Every rank, under every plan, on every version of torch, computes the same one, and a batch is a run of it.
"""

from __future__ import annotations

import hashlib

import torch

from unisono.errors import UsageError
from unisono.mesh.philox import Stream, words
from unisono.mesh.region import runs_of


def order(samples: int, seed: int, epoch: int, shuffle: bool = True) -> torch.Tensor:
    """The numbers of all samples, in the order in which an epoch takes them."""
    if not shuffle:
        return torch.arange(samples)
    drawn = runs_of((samples,), {})
    high, low = (words(Stream.of("order of samples", seed, epoch, lane), drawn, torch.device("cpu")) for lane in (0, 1))
    return ((high.long() << 32) | (low.long() & 0xFFFFFFFF)).argsort(stable=True)


def number_of(*identity: object) -> int:
    """A number of 63 bits to seed a generator with: other identities give unrelated ones."""
    digest = hashlib.blake2b("\0".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def require_whole_number(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}; expected a whole number of at least {least}")
    return value


def require_part(part: tuple[int, int]) -> tuple[int, int]:
    """(index, count): which of how many parts of every batch."""
    index, count = part
    if not 0 <= index < count:
        raise UsageError(f"part={part}: expected (index, count) with an index from 0 to count - 1")
    return index, count
