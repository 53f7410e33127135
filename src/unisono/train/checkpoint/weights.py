"""Export and import of weights: one safetensors file with the model's own names, as for Hugging Face models.

    export_weights(trainer, "gpt.safetensors")            # every rank calls it; or a module, or a checkpoint's folder
    import_weights(trainer, "gpt.safetensors")            # each rank reads its shards; or into a plain module

The ranks of a trainer write their shards beside the file, and rank 0 assembles it one tensor at a time: no rank holds
the full model. Sources are a safetensors file, a folder of them, a state_dict, a file of one by torch.save, or a
checkpoint. None of them can execute code.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from unisono.errors import CheckpointError, UsageError
from unisono.mesh.deferred_init.weight_files import SAFE_NAMES
from unisono.parallel.full_state import full_shape
from unisono.parallel.layout import layout_of
from unisono.parallel.precision import model_dtype
from unisono.parallel.trainer import Trainer
from unisono.regular_files import require_regular
from unisono.train.checkpoint.checkpoints import Checkpoints
from unisono.train.checkpoint.chunk_files import Described, bytes_of, safetensors_header
from unisono.train.checkpoint.chunks import full_chunk, held_chunks
from unisono.train.checkpoint.inventory import Entry, named_tensors, nonpersistent_buffers
from unisono.train.checkpoint.manifest import NAME as MANIFEST
from unisono.train.checkpoint.manifest import Manifest, shown
from unisono.train.checkpoint.restoring import full_entry, read_entries

SAFE_WEIGHTS = "model.safetensors"  # of a folder that from_pretrained reads
_INDEX = f"{SAFE_WEIGHTS}.index.json"

# ---- out -------------------------------------------------------------------------------------------------------------


def export_weights(source: Trainer | nn.Module | str | Path, path: str | Path) -> None:
    """Write parameters and persistent buffers, in the model's dtypes, to one safetensors file.

    Args:
        source: A trainer, a module, or the folder of a checkpoint.
        path: The file.
    """
    path = Path(path)
    if isinstance(source, Trainer):
        _export_trainer(source, path)
    elif isinstance(source, nn.Module):
        skipped = set(nonpersistent_buffers(source))
        rounded = next((name for name, each in _named(source).items() if model_dtype(each) != each.dtype), None)
        if rounded is not None:
            raise UsageError(f"{rounded} is rounded by ZeRO in this model; pass the trainer to export_weights")
        named = {name: tensor for name, tensor in _named(source).items() if name not in skipped}
        described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()]
        _write(path, described, iter(named.values()))
    else:
        _require_intact(Path(source))
        _export_checkpoint(Path(source), path)


def _require_intact(folder: Path) -> None:
    faults = Manifest.read(folder).faults(folder)
    if faults:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {shown(faults)}")


def export_pretrained(trainer: Trainer, folder: str | Path, max_shard_size: int | str = "50GB") -> None:
    """Write the folder that Hugging Face's `from_pretrained` reads: config, generation config, and weights in files of
    at most `max_shard_size` (if no tensor is larger) with an index; of a PEFT model, its adapters. Every rank calls it.
    """
    folder, limit = Path(folder), _size(max_shard_size)
    config = getattr(trainer.model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        raise UsageError(
            f"save_pretrained of a {type(trainer.model).__name__}, which has no config of transformers; expected a "
            "Hugging Face model: save others with engine.save, or uni.export_weights"
        )

    def write(saved: Path) -> None:
        if hasattr(trainer.model, "peft_config"):
            _export_adapters(trainer.model, saved, folder)
            return
        dtypes = [getattr(torch, dtype) for _, dtype in Manifest.read(saved).model.values()]
        _export_sharded(saved, folder, limit)
        _save_configs(trainer.model, folder, next(filter(lambda dtype: dtype.is_floating_point, dtypes), None))

    _assemble(trainer, folder / SAFE_WEIGHTS, write)


def _export_adapters(model: Any, saved: Path, folder: Path) -> None:
    """The adapter that is in use, as PeftModel.from_pretrained reads it."""
    from peft import get_peft_model_state_dict  # type: ignore[import-not-found, unused-ignore]

    manifest, adapter = Manifest.read(saved), model.active_adapter
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, dtype) in _kept(manifest):
        if adapter in name.split("."):
            entry = full_entry(f"model.{name}", manifest)
            read_entries(saved, manifest, [entry])
            tensors[name] = entry.tensor.to(getattr(torch, dtype))
    tensors = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    _write(folder / "adapter_model.safetensors", described, tensors.values())
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True  # as peft's own save_pretrained has it
    config.save_pretrained(str(folder))


def _size(limit: int | str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    text = str(limit).strip().upper()
    number, unit = (text[:-2], units[text[-2:]]) if text[-2:] in units else (text, 1)
    if not number.isdecimal() or not int(number):
        raise UsageError(f'max_shard_size={limit!r}: expected a number of bytes, or a text as "500MB" or "5GB"')
    return int(number) * unit


def _export_sharded(saved: Path, folder: Path, limit: int) -> None:
    manifest = Manifest.read(saved)
    sizes = {name: math.prod(shape) * getattr(torch, dtype).itemsize for name, (shape, dtype) in _kept(manifest)}
    files: list[list[str]] = [[]]
    size = 0
    for name, each in sizes.items():
        if files[-1] and size + each > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += each
    stem, suffix = SAFE_WEIGHTS.split(".")
    paths = [SAFE_WEIGHTS]
    if len(files) > 1:
        paths = [f"{stem}-{number:05}-of-{len(files):05}.{suffix}" for number in range(1, len(files) + 1)]
    for stale in [*folder.glob(f"{stem}-*-of-*.{suffix}"), folder / _INDEX, folder / SAFE_WEIGHTS]:
        if stale.name not in paths:
            stale.unlink(missing_ok=True)
    for path, names in zip(paths, files, strict=True):
        _export_checkpoint(saved, folder / path, names)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}}
        index["weight_map"] = {name: path for path, names in zip(paths, files, strict=True) for name in names}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save_configs(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    config: Any = copy.deepcopy(model.config)
    if hasattr(model, "save_pretrained"):  # else a stage of a pipeline, whose config names the model
        config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _export_trainer(trainer: Trainer, path: Path) -> None:
    _assemble(trainer, path, lambda saved: _export_checkpoint(saved, path))


def _assemble(trainer: Trainer, path: Path, write: Callable[[Path], None]) -> None:
    """Have rank 0 write, from the shards of all ranks, which lie beside the path meanwhile."""
    parts = Checkpoints(path.with_name(f".{path.name}.parts"), keep=None)
    with contextlib.closing(parts):
        saved = parts.save_weights(trainer, trainer.steps)
    error: str | None = None
    if trainer.mesh.index() == 0:
        try:
            write(saved)
        except (OSError, CheckpointError) as failure:
            error = str(failure)
        shutil.rmtree(parts.folder, ignore_errors=True)
    comm = trainer.mesh.comm()
    error = comm.broadcast_object(error, only_data=True) if comm.size > 1 else error
    if error is not None:
        raise CheckpointError(f"the weights were not written to {path}: {error}")


def _kept(manifest: Manifest) -> list[tuple[str, tuple[tuple[int, ...], str]]]:
    """Shape and dtype of what is exported."""
    return [(name, about) for name, about in manifest.model.items() if name not in manifest.passing]


def _export_checkpoint(folder: Path, path: Path, names: Sequence[str] | None = None) -> None:
    """names: of the tensors to write; default: all."""
    manifest = Manifest.read(folder)
    kept = [(name, about) for name, about in _kept(manifest) if names is None or name in names]
    described = [(name, getattr(torch, dtype), shape) for name, (shape, dtype) in kept]

    def tensors() -> Iterator[torch.Tensor]:
        for name, dtype, _ in described:
            entry = full_entry(f"model.{name}", manifest)
            read_entries(folder, manifest, [entry])
            yield entry.tensor.to(dtype)

    _write(path, described, tensors())


def _write(path: Path, described: Sequence[Described], tensors: Iterable[torch.Tensor]) -> None:
    for name, dtype, _ in described:
        if dtype not in SAFE_NAMES:
            raise UsageError(f"{name} is {dtype}, which safetensors does not support; save a checkpoint instead")
    temporary = path.with_name(f".{path.name}.draft")
    try:
        with open(temporary, "wb") as file:
            file.write(safetensors_header(described)[0])
            for tensor in tensors:
                file.write(memoryview(bytes_of(tensor)))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _names(model: nn.Module) -> set[str]:
    """Of all parameters and persistent buffers; every name of a tied one."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name for name, _ in named} - set(nonpersistent_buffers(model))


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# ---- in --------------------------------------------------------------------------------------------------------------


def import_weights(
    model: Trainer | nn.Module, source: str | Path | Mapping[str, torch.Tensor], strict: bool = True
) -> None:
    """Load weights into a model under any plan; every rank calls it. The optimizer's state is not changed.

    Args:
        model: A trainer or a module.
        source: A file, a checkpoint, or tensors by name.
        strict: Whether names in the source that the model does not have are an error. Missing names always are.
    """
    opened = open_source(source)
    if isinstance(model, Trainer):
        tensors, known = named_tensors(model), _known_names(model)
        entries = [_sharded(name, tensor, model) for name, tensor in tensors.items()]
    else:
        tensors, known = _named(model), _names(model)
        entries = [Entry(name, t.detach(), tuple(t.shape), [full_chunk(t.shape)], []) for name, t in tensors.items()]
    module = model.model if isinstance(model, Trainer) else model
    found = _matched(entries, opened, module)
    unexpected = sorted(set(opened.shapes) - known - set(found.values()))
    if strict and unexpected:
        raise UsageError(
            f"{opened.where} has {shown(unexpected)}, which the model does not have; strict=False ignores them"
        )
    with torch.no_grad():
        for entry in entries:
            for chunk in entry.held if entry.name in found else ():
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                box = tuple(slice(first, first + size) for first, size in ends)
                entry.tensor[chunk.slices].copy_(opened.read(found[entry.name], box))
    if isinstance(model, Trainer):
        model.replicas.publish()


def _sharded(name: str, tensor: torch.Tensor, trainer: Trainer) -> Entry:
    shape = tuple(full_shape(tensor))
    return Entry(name, tensor.detach(), shape, held_chunks(shape, layout_of(tensor), trainer.mesh), [])


def _known_names(trainer: Trainer) -> set[str]:
    """Of the full model, also under pipeline parallelism; every name of a tied parameter."""
    mine = set(_names(trainer.model)) | set(named_tensors(trainer))
    if trainer.mesh.size("pp") == 1:
        return mine
    return set().union(*trainer.mesh.comm("pp").all_gather_object(mine, only_data=True))


def _matched(entries: list[Entry], source: Source, module: nn.Module) -> dict[str, str]:
    """The name of each entry in the source; of a tied parameter, any of its names."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names = {name: aliases[id(parameter)] for name, parameter in module.named_parameters()}
    skipped = set(nonpersistent_buffers(module))
    found: dict[str, str] = {}
    missing: list[str] = []
    for entry in entries:
        name = next((each for each in (entry.name, *names.get(entry.name, ())) if each in source.shapes), "")
        if not name:
            missing += [entry.name] if entry.name not in skipped else []
        elif source.shapes[name] != entry.shape:
            raise UsageError(f"{name} is of shape {source.shapes[name]} in {source.where}; expected {entry.shape}")
        else:
            found[entry.name] = name
    if missing:
        raise UsageError(f"{source.where} does not have {shown(missing)}; is it of another model?")
    return found


Box = tuple[slice, ...]


@dataclass(frozen=True)
class Source:
    """Weights that can be read by name and box."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str, Box], torch.Tensor]
    where: str


def open_source(source: str | Path | Mapping[str, torch.Tensor]) -> Source:
    """Open a state_dict, a file of one, a safetensors file or a folder of them, or a checkpoint."""
    if isinstance(source, Mapping):
        return _of_mapping(source, "the state_dict")
    path = Path(source)
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _of_checkpoint(path)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{path} has no *.safetensors files and is not a checkpoint")
        return _of_safetensors(files, str(path))
    _require_regular(path)
    if path.suffix == ".safetensors":
        return _of_safetensors([path], str(path))
    try:
        return _of_mapping(torch.load(path, map_location="cpu", weights_only=True, mmap=True), str(path))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{path} is not a file of weights ({type(error).__name__}); expected *.safetensors, or a state_dict by "
            "torch.save. Files that would execute code are not loaded"
        ) from None


def _require_regular(path: Path) -> None:
    try:
        require_regular(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _of_mapping(tensors: Any, where: str) -> Source:
    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UsageError(f"{where} is not a plain state_dict; expected tensors by name")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Source(shapes, lambda name, box: tensors[name][box], where)


def _of_safetensors(files: Sequence[Path], where: str) -> Source:
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, tuple[Any, Any]] = {}
    for path in files:
        _require_regular(path)
        try:
            opened = safe_open(path, framework="pt")
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                tensors[name] = opened, opened.get_slice(name)
                shapes[name] = tuple(tensors[name][1].get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged, or not a safetensors file: {str(error)[:300]}") from None

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
        entry = full_entry(f"model.{name}", manifest)
        read_entries(folder, manifest, [entry])
        return entry.tensor[box]

    return Source({name: shape for name, (shape, _) in manifest.model.items()}, read, str(folder))
