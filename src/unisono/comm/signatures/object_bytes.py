"""An object as bytes: as data where it is plain data (plain_data.py), otherwise pickled."""

from __future__ import annotations

import pickle
from typing import Any

from unisono.comm.signatures.plain_data import NotPlainError, decoded, encoded
from unisono.errors import CommError

_DATA, _PICKLE = b"D", b"\x80"  # how the bytes begin; a pickle, by itself


def object_to_bytes(value: Any, only_data: bool = False) -> bytes:
    """only_data: NotPlainError instead of a pickle."""
    try:
        return _DATA + encoded(value, or_pickled=not only_data)
    except (NotPlainError, RecursionError):
        if only_data:
            raise
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def object_of_bytes(content: bytes, what: str, only_data: bool = False) -> Any:
    """CommError, about `what`, if the bytes are no object's, or with only_data pickled. Unpickling runs code that the
    sender has chosen: who has sent the bytes is to be verified before, if the job has a secret."""
    kind = content[:1]
    if kind == _DATA:
        return decoded(content, 1, what)
    if kind == _PICKLE and not only_data:
        return pickle.loads(content)
    raise CommError(
        f"{what} is {'pickled' if kind == _PICKLE else 'neither data nor pickled'}, but "
        f"{'plain data (only_data=True)' if only_data else 'an object'} is expected; it has not been read, so look for "
        "what else sends to this job's ports"
    )
