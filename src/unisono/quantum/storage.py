"""States on disk: a folder with one array a rank and a manifest, readable by any number of ranks.

A physical index is the global index followed by the local one, so the arrays, in the order of global indices, are the
state in one line; another number of ranks splits that line elsewhere. Blocks have digests; a reader checks those it
reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import require_comm, require_path
from unisono.quantum.state import State, require_state

FORMAT = "unisono quantum state 1"
_BLOCK = 1 << 20  # amplitudes a digest
_DTYPES = {"complex64": torch.complex64, "complex128": torch.complex128}


class DamagedStateError(UsageError):
    """A saved state is incomplete, or is not what was saved."""


def save(state: State, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write the state into a folder that all ranks see; it appears under its name when it is complete."""
    require_state(state, "save")
    folder = require_path(path, "save to")
    if not isinstance(overwrite, bool):
        raise UsageError(f"overwrite={overwrite!r}: expected True or False")
    if folder.exists() and not overwrite:
        raise UsageError(f"{folder} exists; pass overwrite=True to replace it")
    growing = folder.with_name(folder.name + ".partial")
    growing.mkdir(parents=True, exist_ok=True)
    index = int(state.index_map.table[state.rank])
    array = state.local.cpu().numpy()
    np.save(growing / _shard(index), array, allow_pickle=False)
    block = min(_BLOCK, len(array))
    mine = [_digest(array[at : at + block]) for at in range(0, len(array), block)]
    digests = dict([(index, mine)] if state.comm is None else state.comm.all_gather_object((index, mine)))
    if state.rank == 0:
        manifest = {
            "format": FORMAT,
            "wires": state.wires,
            "held": state.global_qubits,
            "dtype": str(state.dtype).removeprefix("torch."),
            "layout": list(state.layout),
            "bits": {str(bit): value for bit, value in state.bits.items()},
            "draws": state.draws.bit_generator.state,
            "norm": state.norm_expected,
            "block": block,
            "digests": [digest for held in sorted(digests) for digest in digests[held]],
        }
        (growing / "manifest.json").write_text(json.dumps(manifest))
        if folder.exists():
            shutil.rmtree(folder)
        growing.rename(folder)
    if state.comm is not None:
        state.comm.barrier()


def load(path: str | os.PathLike[str], comm: Communicator | None = None, **options: Any) -> State:
    """The saved state, sharded over the ranks of `comm`, however many saved it. Options are those of State."""
    folder = require_path(path, "load")
    require_comm(comm)
    manifest = _manifest(folder)
    options.setdefault("dtype", _DTYPES[manifest["dtype"]])
    state = State(manifest["wires"], comm, **options)
    state.layout = tuple(manifest["layout"])
    start = state.rank * len(state.local)
    block = manifest["block"]
    first = start - start % block
    for at in range(first, start + len(state.local), block):
        amplitudes = torch.from_numpy(_read_block(folder, manifest, at)).to(state.local)
        low, high = max(at, start), min(at + block, start + len(state.local))
        state.local[low - start : high - start] = amplitudes[low - at : high - at]
    try:
        state.bits = {int(bit): int(value) for bit, value in manifest["bits"].items()}
        state.draws.bit_generator.state = manifest["draws"]
        state.norm_expected = float(manifest["norm"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedStateError(f"{folder / 'manifest.json'} cannot be read: {error!r}; save the state again") from None
    state.fresh = False
    return state


def _read_block(folder: Path, manifest: dict[str, Any], at: int) -> np.ndarray:
    shard = 1 << (manifest["wires"] - manifest["held"])
    file = folder / _shard(at // shard)
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DamagedStateError(f"{file}: {error}; save the state again") from None
    if array.shape != (shard,) or str(array.dtype) != manifest["dtype"]:
        raise DamagedStateError(
            f"{file} holds {array.dtype} of shape {array.shape}, but the manifest has {manifest['dtype']} ({shard},)"
        )
    amplitudes = np.array(array[at % shard : at % shard + manifest["block"]])
    if _digest(amplitudes) != manifest["digests"][at // manifest["block"]]:
        raise DamagedStateError(f"{file} is damaged: the amplitudes from {at % shard} on are not those that were saved")
    return amplitudes


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    if not file.exists():
        raise UsageError(f"{folder} holds no saved state: there is no manifest.json")
    try:
        manifest = json.loads(file.read_text())
        if manifest["format"] != FORMAT:
            raise DamagedStateError(f"{file} has the format {manifest['format']!r}; expected {FORMAT!r}")
        digests = (1 << manifest["wires"]) // manifest["block"]
        full = sorted(manifest["layout"]) == list(range(manifest["wires"])) and len(manifest["digests"]) == digests
        full &= manifest["dtype"] in _DTYPES
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DamagedStateError(f"{file} cannot be read: {error!r}; save the state again") from None
    if not full:
        raise DamagedStateError(f"{file} contradicts itself; save the state again")
    return manifest


def _shard(index: int) -> str:
    return f"{index:06d}.npy"


def _digest(amplitudes: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(amplitudes).data, digest_size=16).hexdigest()
