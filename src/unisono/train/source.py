"""Sources of weights: any box of any tensor, by name, from what people keep weights in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from unisono.errors import CheckpointError, UsageError
from unisono.train.manifest import NAME as MANIFEST
from unisono.train.manifest import Manifest, shown
from unisono.train.restoring import read_entries, whole_entry

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Box], torch.Tensor]
    where: str


def opened_source(source: str | Path | Mapping[str, torch.Tensor]) -> Source:
    """A state_dict, a file of one, a safetensors file or a folder of them, or a checkpoint."""
    if isinstance(source, Mapping):
        return _of_mapping(source, "the state_dict")
    path = Path(source)
    if not path.exists():
        raise UsageError(f"there is no {path} to read weights from")
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _of_checkpoint(path)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{path} has no *.safetensors files, and is no checkpoint")
        return _of_safetensors(files, str(path))
    if path.suffix == ".safetensors":
        return _of_safetensors([path], str(path))
    try:
        return _of_mapping(torch.load(path, map_location="cpu", weights_only=True, mmap=True), str(path))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} is no file of weights ({type(error).__name__}); expected *.safetensors, or a state_dict that "
            "torch.save wrote. Files that would run code are not read"
        ) from None


def _of_mapping(tensors: Any, where: str) -> Source:
    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UsageError(f"{where} is no plain state_dict; expected tensors by name")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Source(shapes, lambda name, box: tensors[name][box], where)


def _of_safetensors(files: Sequence[Path], where: str) -> Source:
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, tuple[Any, Any]] = {}
    for path in files:
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged, or no safetensors file: {error}") from None
        for name in opened.keys():  # noqa: SIM118  # no mapping
            tensors[name] = opened, opened.get_slice(name)
            shapes[name] = tuple(tensors[name][1].get_shape())

    def read(name: str, box: Box) -> torch.Tensor:
        file, tensor = tensors[name]
        return tensor[box] if box else file.get_tensor(name)

    return Source(shapes, read, where)


def _of_checkpoint(folder: Path) -> Source:
    manifest = Manifest.read(folder)
    faults = manifest.faults(folder)
    if faults:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {shown(faults)}")

    def read(name: str, box: Box) -> torch.Tensor:
        entry = whole_entry(f"model.{name}", manifest)
        read_entries(folder, manifest, [entry])
        return entry.tensor[box]

    return Source({name: shape for name, (shape, _) in manifest.model.items()}, read, str(folder))
