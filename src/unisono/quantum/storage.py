"""States on disk: a folder with one array a rank and a manifest, readable by any number of ranks.

A physical index is the global index followed by the local one, so the arrays, in the order of global indices, are the
state in one line; another number of ranks splits that line elsewhere. Blocks have digests; a reader checks those it
reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import CheckpointError, UsageError
from unisono.quantum.arguments import require_comm, require_path
from unisono.quantum.circuit.circuit import MOST
from unisono.quantum.state import State, require_state
from unisono.regular_files import read_json, require_regular

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
    if _kept(folder).exists() and not overwrite:
        raise UsageError(f"{folder} exists; pass overwrite=True to replace it")
    growing = folder.with_name(folder.name + ".partial")
    if state.rank == 0:
        shutil.rmtree(growing, ignore_errors=True)  # of a job that was killed
    if state.comm is not None:
        state.comm.barrier()
    index = int(state.index_map.table[state.rank])
    array = state.local.cpu().numpy()
    block = min(_BLOCK, len(array))
    mine = [_digest(array[at : at + block]) for at in range(0, len(array), block)]
    error = _written(growing / _shard(index), lambda file: _write_array(file, array))
    gathered = (
        [(index, mine, error)]
        if state.comm is None
        else state.comm.all_gather_object((index, mine, error), only_data=True)
    )
    digests = {index: mine for index, mine, _ in gathered}
    error = next((failed for _, _, failed in gathered if failed), "")
    if state.rank == 0 and not error:
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
        text = json.dumps(manifest).encode()
        error = _written(growing / "manifest.json", lambda file: file.write(text)) or _published(growing, folder)
    if state.comm is not None:
        error = state.comm.broadcast_object(error, only_data=True)
    if error:
        if state.rank == 0:
            shutil.rmtree(growing, ignore_errors=True)
        raise CheckpointError(f"the state was not saved in {folder}: {error}; what was there before is not changed")


def _written(path: Path, write: Callable[[BinaryIO], Any]) -> str:
    """Write a file, durably; returns the error, which other ranks are to learn of, or ""."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        return ""
    except OSError as error:
        return f"{error.strerror or error} ({path})"


def _write_array(file: BinaryIO, array: np.ndarray) -> None:
    """As np.save, whose error on a full disk does not say why."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.view(np.uint8).data)


def _published(growing: Path, folder: Path) -> str:
    """Rename, and delete an older state of that name; one of the two exists at all times (see `_kept`)."""
    replaced = folder.with_name(folder.name + ".replaced")
    try:
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        growing.rename(folder)
    except OSError as error:
        return f"{error.strerror or error} ({folder})"
    shutil.rmtree(replaced, ignore_errors=True)
    return ""


def _kept(folder: Path) -> Path:
    """The folder of a state; the replaced one, if a job was killed between the two renames."""
    replaced = folder.with_name(folder.name + ".replaced")
    return replaced if replaced.exists() and not folder.exists() else folder


def load(path: str | os.PathLike[str], comm: Communicator | None = None, **options: Any) -> State:
    """The saved state, sharded over the ranks of `comm`, however many saved it. Options are those of State."""
    folder = _kept(require_path(path, "load"))
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
        if not math.isfinite(state.norm_expected):
            raise ValueError(f"norm {state.norm_expected}")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DamagedStateError(
            f"{folder / 'manifest.json'} cannot be read ({repr(error)[:200]}); save the state again"
        ) from None
    state.fresh = False
    return state


def _read_block(folder: Path, manifest: dict[str, Any], at: int) -> np.ndarray:
    shard = 1 << (manifest["wires"] - manifest["held"])
    file = folder / _shard(at // shard)
    try:
        require_regular(file)
        array = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # of NumPy's reader of headers, which evaluates literals
        raise DamagedStateError(f"{file}: {str(error)[:200]}; save the state again") from None
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
    try:
        manifest = read_json(file)
        if manifest["format"] != FORMAT:
            raise DamagedStateError(f"{file} has the format {str(manifest['format'])[:60]!r}; expected {FORMAT!r}")
        full = _is_consistent(manifest)
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no saved state: there is no manifest.json") from None
    except DamagedStateError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise DamagedStateError(f"{file} cannot be read ({reason}); save the state again") from None
    if not full:
        raise DamagedStateError(f"{file} contradicts itself; save the state again")
    shard = (1 << manifest["wires"] - manifest["held"]) * _DTYPES[manifest["dtype"]].itemsize
    for index in range(1 << manifest["held"]):  # before memory is taken for what a manifest says is there
        array = folder / _shard(index)
        size = array.stat().st_size if array.is_file() else 0
        if size < shard:
            raise DamagedStateError(f"{array} has {size} bytes and not {shard} or more; save the state again")
    return manifest


def _is_consistent(manifest: dict[str, Any]) -> bool:
    wires, held, block = (manifest[name] for name in ("wires", "held", "block"))
    if not all(type(each) is int for each in (wires, held, block)) or not 0 <= held <= wires <= MOST:
        return False
    if sorted(manifest["layout"]) != list(range(wires)) or wires - held > 62:
        return False
    digests = manifest["digests"]
    is_block = block == min(_BLOCK, 1 << (wires - held)) and len(digests) == (1 << wires) // block
    return is_block and isinstance(digests, list) and manifest["dtype"] in _DTYPES


def _shard(index: int) -> str:
    return f"{index:06d}.npy"


def _digest(amplitudes: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(amplitudes).data, digest_size=16).hexdigest()
