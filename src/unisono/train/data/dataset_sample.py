"""A fingerprint of some samples of a dataset, by which a resumed run notices that it is given other data."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from unisono.comm.rendezvous import world
from unisono.train.data.reading import is_iterable_only, preserved_generators, seed_generators

_READ = 4  # samples


def fingerprint(dataset: Any) -> str | None:
    """Of a few samples, the first and the last among them; None where they cannot be read like this."""
    try:
        if is_iterable_only(dataset):
            return None
        count = len(dataset)
        found = hashlib.blake2b(digest_size=16)
        with preserved_generators():
            for index in sorted({(count - 1) * part // (_READ - 1) for part in range(_READ)}):
                seed_generators("dataset sample", index)  # of augmentations
                leaves, structure = tree_flatten(dataset[index])
                found.update(str(structure).encode())
                for leaf in leaves:
                    _add(found, leaf)
        return found.hexdigest()
    except Exception:  # of the user's dataset: what it says then, the training says, too
        return None


def _add(found: Any, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if callable(getattr(leaf, "tobytes", None)):  # arrays and images
        found.update(leaf.tobytes())
    elif leaf is None or isinstance(leaf, bool | int | float | str | bytes):
        found.update(repr(leaf).encode())
    else:
        found.update(type(leaf).__name__.encode())


def warn_of_other_data(saved: Any, dataset: Any) -> None:
    """Warn, on rank 0, if the samples are not those that were saved; not of a dataset that is never twice the same."""
    if not isinstance(saved, str) or world.rank() != 0:
        return
    found = fingerprint(dataset)
    if found not in (None, saved) and fingerprint(dataset) == found:
        warnings.warn(
            f"the {type(dataset).__name__} has other samples than the one that the checkpoint was saved with (its "
            "length is the same): the run goes on with them; if that is not meant, give the dataset that it began with",
            RuntimeWarning,
            stacklevel=2,
        )
