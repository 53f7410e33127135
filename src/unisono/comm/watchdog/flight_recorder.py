"""torch's flight recorder: who waits where, from the dumps that NCCL's watchdog leaves when a job hangs.

With TORCH_FR_BUFFER_SIZE set, torch notes the last collectives of each rank; at a timeout each writes them to a file of
its own, whose name begins as TORCH_FR_DUMP_TEMP_FILE says and ends with the rank. `unisono attach FOLDER` reads them.

A dump is a pickle of dicts, lists and plain values. Only what these are made of is read (`_Plain`): a pickle that names
a function, or asks for more memory than it fills, is refused.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from unisono.amounts import ranks_in_words
from unisono.comm.watchdog import report
from unisono.comm.watchdog.op_log import P2P, LoggedOp, shown
from unisono.comm.watchdog.report import GroupState, RankState
from unisono.errors import UsageError
from unisono.regular_files import open_regular

_MOST = 1 << 28  # bytes of a dump
_WORLD = "default_pg"
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|/unisono/comm/|^<")
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_SAME_SIZES = ("all_reduce", "broadcast")  # whose tensors must be alike on all ranks


class _Plain(pickle._Unpickler):
    """Written in Python: the one in C takes as much memory as the number of a memo says."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        ord(code): pickle._Unpickler.dispatch[ord(code)]
        for code in (
            *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
            *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE),
            *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
            *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
            *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
        )
    }


def explain(dumps: Mapping[int, Path]) -> str:
    """One sentence: in what each rank waits, and what the others do instead."""
    states: dict[int, RankState] = {}
    for rank, path in dumps.items():
        dump = _read(path)
        try:
            states[rank] = _state(rank, dump, len(dumps))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise _refusal(path, f"{type(error).__name__}: {error}") from None
    world = {rank for state in states.values() for group in state.groups.values() for rank in group.ranks}
    absent = dict.fromkeys(world - set(states), "have left no dump")
    dispute = _dispute(states)
    if dispute is None and not any(state.waiting for state in states.values()):
        return f"{ranks_in_words(sorted(states))} wait in no collective that was recorded"
    return report.report(states, absent, dispute)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MOST:
                raise _refusal(path, f"it has {size} bytes, and at most {_MOST} are read")
            content = b"".join(iter(lambda: file.read(1 << 20), b""))
        dump = _Plain(io.BytesIO(content)).load()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except KeyError as error:
        raise _refusal(path, f"it has what no dump has (opcode {error})") from None
    except Exception as error:  # whatever is wrong with it
        raise error if isinstance(error, UsageError) else _refusal(path, f"{type(error).__name__}: {error}") from None
    if not isinstance(dump, dict):
        raise _refusal(path, f"it holds a {type(dump).__name__}")
    return dump


def _refusal(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a dump of torch's flight recorder ({why[:200]}); give the folder that has them")


def _state(rank: int, dump: Mapping[str, Any], count: int) -> RankState:
    ranks_of = {str(name): _ranks(config["ranks"]) for name, config in dump["pg_config"].items()}
    entries: dict[str, dict[int, Mapping[str, Any]]] = {}
    names: dict[str, str] = {}
    last = ""
    for entry in dump["entries"]:
        name, described = map(str, entry["process_group"])
        group = "world" if described == _WORLD else name
        is_p2p = bool(entry["is_p2p"])
        names[group + P2P * is_p2p] = name
        number = int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"])
        entries.setdefault(group + P2P * is_p2p, {}).setdefault(number, entry)  # the first of those that are coalesced
        last = _location(entry)
    groups = {}
    for group, by_number in entries.items():
        waiting = [number for number, entry in by_number.items() if not _is_done(entry)]
        ops = tuple(_op(number, entry) for number, entry in sorted(by_number.items()))
        ranks = ranks_of.get(names[group]) or ranks_of.get("") or tuple(range(count))
        groups[group] = GroupState(ranks, min(waiting, default=0), max(by_number), ops)
    return RankState(rank, f"an unknown line after {last}" if last else "an unknown line", "", groups)


def _ranks(given: Any) -> tuple[int, ...]:
    return tuple(map(int, json.loads(given) if isinstance(given, str) else given))


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _op(number: int, entry: Mapping[str, Any]) -> LoggedOp:
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    what = ""
    if sizes and dtypes:
        dtype = str(dtypes[0])
        what = f"{_DTYPES.get(dtype, dtype)}[{', '.join(str(int(size)) for size in sizes[0])}]"
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return LoggedOp(number, name.lstrip("_"), what, _location(entry))


def _location(entry: Mapping[str, Any]) -> str:
    """The innermost line that is not in a library."""
    for frame in entry.get("frames", ()):
        if not _LIBRARY.search(str(frame["filename"])):
            return f"{shown(str(frame['filename']))}:{int(frame['line'])}"
    return "an unknown line"


def _dispute(states: Mapping[int, RankState]) -> report.Dispute | None:
    """The first collective of a group that is not the same on all of its ranks."""
    for group in sorted({group for state in states.values() for group in state.groups if not group.endswith(P2P)}):
        members = [state.groups[group] for state in states.values() if group in state.groups]
        for number in sorted({op.number for member in members for op in member.recent}):
            found = [op for member in members if (op := member.entry(number)) is not None]
            if len({(op.op, op.what if op.op in _SAME_SIZES else "") for op in found}) > 1:
                return group, number
    return None
