"""The manifest of a checkpoint: its contents, the location of each chunk, and the checksums of its files.

It is JSON, written last, with its own checksum. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unisono.errors import CheckpointError
from unisono.regular_files import parse_json, read_json
from unisono.train.checkpoint.chunk_files import CHECKSUM, CHECKSUMS, Stored, checksum_of
from unisono.train.checkpoint.inventory import Shapes, dtype_name

NAME = "manifest.json"
VERSION = 1
_DTYPES = {dtype_name(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass
class Manifest:
    step: int
    plan: str
    ranks: int
    seed: int  # with the trainer's steps, the state of unisono's random numbers
    data: Any  # state of the data, as passed to save
    trainer: dict[str, Any]
    model: Shapes
    passing: list[str]  # buffers that are not in the model's state_dict
    optimizer: dict[str, Any]
    extra: Any
    files: dict[str, dict[str, Any]]  # {name: {"bytes", "xxh3_128"}}, or another of CHECKSUMS
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # {name: {"dtype", "shape", "chunks"}}

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def write(self, folder: Path) -> None:
        body = {"format": "unisono checkpoint", "version": VERSION, "fingerprint": self.fingerprint, **vars(self)}
        text = json.dumps(body, separators=(",", ":"))
        signed = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text})
        with open(folder / NAME, "w", encoding="utf-8") as file:
            file.write(signed)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        try:
            signed = read_json(folder / NAME)
            text = signed["body"]
            is_intact = hashlib.sha256(text.encode()).hexdigest() == signed["sha256"]
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: {NAME} is missing; the checkpoint is incomplete") from None
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{folder}: {NAME} is damaged ({type(error).__name__}: {error})") from None
        if not is_intact:
            raise CheckpointError(f"{folder}: {NAME} does not match its checksum")
        try:
            manifest = cls._parsed(parse_json(text), folder)
            manifest._check_form()
            return manifest
        except CheckpointError:
            raise
        except Exception as error:  # it has the form of no manifest, in whichever way
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(f"{folder}: {NAME} cannot be read ({reason})") from None

    @classmethod
    def _parsed(cls, body: dict[str, Any], folder: Path) -> Manifest:
        if body.pop("format", None) != "unisono checkpoint" or body.pop("version", None) != VERSION:
            raise CheckpointError(f"{folder}: {NAME} is not of a checkpoint of version {VERSION}")
        body.pop("fingerprint")
        manifest = cls(**body)
        manifest.model = {name: (tuple(shape), dtype) for name, (shape, dtype) in manifest.model.items()}
        for name, about in manifest.tensors.items():
            if about["dtype"] not in _DTYPES:
                raise CheckpointError(f"{folder}: {NAME} gives {name[:200]} the dtype {str(about['dtype'])[:60]!r}")
            chunks = [Stored(tuple(a), tuple(b), *rest) for a, b, *rest in about["chunks"]]
            unknown = {chunk.file for chunk in chunks} - set(manifest.files)
            if unknown:
                raise CheckpointError(
                    f"{folder}: {NAME} puts {name[:200]} in {min(unknown)[:200]!r}, which is not among its files"
                )
            about["chunks"] = chunks
        for name, about in manifest.files.items():
            if Path(name).name != name or name == ".." or "\0" in name:
                raise CheckpointError(f"{folder}: {NAME} names a file outside the checkpoint, {name[:200]!r}")
            if unknown := set(about) - {"bytes", *CHECKSUMS}:
                raise CheckpointError(
                    f"{folder}: {NAME} gives {name[:200]} a checksum {min(unknown)[:60]!r}; expected "
                    f"{' or '.join(CHECKSUMS)}: was it saved by a newer version of unisono?"
                )
        return manifest

    def _check_form(self) -> None:
        """ValueError, KeyError or TypeError where a value is none that `write` could have written."""
        sizes = {name: _count(each["bytes"]) for name, each in self.files.items()}
        for each in self.files.values():
            _require([isinstance(each[name], str) for name in CHECKSUMS if name in each] == [True], "a checksum")
        whole = (self.step, self.ranks, self.seed, self.trainer["steps"], self.trainer["skipped"])
        _require(all(isinstance(each, int) for each in whole), "numbers")
        _require(isinstance(self.plan, str) and isinstance(self.passing, list), "the plan or the buffers")
        for name, (shape, dtype) in self.model.items():
            _require(dtype in _DTYPES and all(_count(size) >= 0 for size in shape), f"what it has of {name}")
        for name, about in self.tensors.items():
            shape, width = about["shape"], getattr(torch, about["dtype"]).itemsize
            stored = 0
            for chunk in about["chunks"]:
                elements = math.prod(map(_count, chunk.sizes))
                ends = zip(map(_count, chunk.offsets), chunk.sizes, shape, strict=True)
                is_inside = all(first + size <= full for first, size, full in ends)
                is_inside &= 0 <= _count(chunk.begin) <= _count(chunk.end) <= sizes[chunk.file]
                _require(is_inside and chunk.end - chunk.begin == elements * width, f"a chunk of {name}")
                stored += elements
            _require(math.prod(map(_count, shape)) <= stored, f"the shape of {name}, of which not all is stored,")
        optimizer = self.optimizer
        _require(all(isinstance(each, dict) for each in optimizer["state"].values()), "the optimizer's state")
        for group in optimizer["groups"]:
            _require(isinstance(group["values"], dict) and isinstance(group["params"], list), "a parameter group")

    def faults(self, folder: Path, files: Iterable[str] | None = None) -> list[str]:
        """Defects of the files (default: all)."""
        found = []
        for each in self.files if files is None else files:
            path, expected, name = folder / each, self.files[each], each[:200]
            algorithm = next(each for each in CHECKSUMS if each in expected)
            try:
                size = path.stat().st_size
                if size != expected["bytes"]:
                    found.append(f"{name} has {size} bytes and not {expected['bytes']}: truncated or overwritten")
                elif checksum_of(path, algorithm) != expected[algorithm]:
                    found.append(f"{name} does not match its checksum: its bytes have changed")
            except FileNotFoundError:
                found.append(f"{name} is missing")
            except OSError as error:
                found.append(f"{name} cannot be read ({error.strerror or error})")
        return found


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} as a size")
    return value


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} cannot be right")


def fingerprint(model: Shapes) -> str:
    """Equal for models with equal names, shapes and dtypes."""
    return hashlib.sha256(json.dumps(sorted(model.items())).encode()).hexdigest()


def differences(saved: Shapes, model: Shapes) -> list[str]:
    """Differences between a saved model and this one."""
    found = [f"{name} is in the checkpoint only" for name in sorted(set(saved) - set(model))]
    found += [f"{name} is in the model only" for name in sorted(set(model) - set(saved))]
    for name in sorted(set(saved) & set(model)):
        if saved[name] != model[name]:
            (shape, dtype), (shape_now, dtype_now) = saved[name], model[name]
            found.append(f"{name} was {dtype}{list(shape)} and is {dtype_now}{list(shape_now)}")
    return found


def shown(faults: Sequence[str], most: int = 3) -> str:
    more = f" and {len(faults) - most} more" if len(faults) > most else ""
    return "; ".join(faults[:most]) + more


def merged(parts: Sequence[dict[str, Any]], **about: Any) -> Manifest:
    """The manifest, merged from the indices of all ranks."""
    model: Shapes = {}
    passing: set[str] = set()
    optimizer: dict[str, Any] = {"kind": parts[0]["optimizer"]["kind"], "state": {}, "groups": []}
    tensors: dict[str, dict[str, Any]] = {}
    for part in parts:
        model.update(part["model"])
        passing.update(part["passing"])
        for name, state in part["optimizer"]["state"].items():
            optimizer["state"].setdefault(name, state)
        _merge_groups(optimizer["groups"], part["optimizer"]["groups"])
        _merge_tensors(tensors, part["tensors"])
    files = {part["file"]: {"bytes": part["bytes"], CHECKSUM: part[CHECKSUM]} for part in parts}
    first = parts[0]
    return Manifest(
        trainer=first["trainer"],
        extra=first["extra"],
        model=model,
        passing=sorted(passing),
        optimizer=optimizer,
        files=files,
        tensors=tensors,
        **about,
    )


def _merge_groups(groups: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    if not groups:
        groups += [{"values": group["values"], "params": []} for group in more]
    for group, other in zip(groups, more, strict=True):
        known = set(group["params"])
        group["params"] += [name for name in other["params"] if name not in known]


def _merge_tensors(tensors: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]]) -> None:
    """Tensors that several pipeline stages have may have been written by each: keep one."""
    for name, about in more.items():
        known = tensors.setdefault(name, {"dtype": about["dtype"], "shape": about["shape"], "chunks": []})
        offsets = {tuple(chunk[0]) for chunk in known["chunks"]}
        known["chunks"] += [chunk for chunk in about["chunks"] if tuple(chunk[0]) not in offsets]
