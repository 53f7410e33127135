"""Weights in and out: one safetensors file under the model's own names, as Hugging Face's models have theirs.

    export_weights(trainer, "gpt.safetensors")            # every rank calls it; or a module, or a checkpoint's folder
    import_weights(trainer, "gpt.safetensors")            # each rank reads its pieces; or into a plain module

A trainer's ranks write their pieces beside the file, and rank 0 strings them together, one tensor at a time: no rank
holds the whole model. What is read may be a safetensors file, a folder of them, a state_dict or a file of one that
torch.save wrote, or a checkpoint. None of them can run code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from unisono.errors import CheckpointError, UsageError
from unisono.parallel.layout import layout_of
from unisono.parallel.optimizer_state import whole_shape
from unisono.parallel.trainer import Trainer
from unisono.parallel.zero.zero import Zero
from unisono.train.checkpoint import Checkpoints
from unisono.train.chunks import held_chunks, whole_chunk
from unisono.train.inventory import Entry, named_tensors, passing_buffers
from unisono.train.manifest import Manifest, shown
from unisono.train.restoring import read_entries, whole_entry
from unisono.train.source import Source, opened_source
from unisono.train.storage import SAFE_NAMES, Described, bytes_of, safetensors_header

# ---- out -------------------------------------------------------------------------------------------------------------


def export_weights(source: Trainer | nn.Module | str | Path, path: str | Path) -> None:
    """Write parameters and persistent buffers, in the model's dtypes, to one safetensors file."""
    path = Path(path)
    if isinstance(source, Trainer):
        _export_trainer(source, path)
    elif isinstance(source, nn.Module):
        passing = set(passing_buffers(source))
        named = {name: tensor for name, tensor in _named(source).items() if name not in passing}
        described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()]
        _write(path, described, iter(named.values()))
    else:
        _require_whole(Path(source))
        _export_checkpoint(Path(source), path)


def _require_whole(folder: Path) -> None:
    faults = Manifest.read(folder).faults(folder)
    if faults:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {shown(faults)}")


def _export_trainer(trainer: Trainer, path: Path) -> None:
    parts = Checkpoints(path.with_name(f".{path.name}.parts"), keep=None)
    saved = parts.save_weights(trainer, trainer.steps)
    error: str | None = None
    if trainer.mesh.index() == 0:
        try:
            _export_checkpoint(saved, path)
        except (OSError, CheckpointError) as failure:
            error = str(failure)
        shutil.rmtree(parts.folder, ignore_errors=True)
    comm = trainer.mesh.comm()
    error = comm.broadcast_object(error) if comm.size > 1 else error
    if error is not None:
        raise CheckpointError(f"the weights were not written to {path}: {error}")


def _export_checkpoint(folder: Path, path: Path) -> None:
    manifest = Manifest.read(folder)
    kept = {name: about for name, about in manifest.model.items() if name not in manifest.passing}
    described = [(name, getattr(torch, dtype), shape) for name, (shape, dtype) in kept.items()]

    def wholes() -> Iterator[torch.Tensor]:
        for name, dtype, _ in described:
            entry = whole_entry(f"model.{name}", manifest)
            read_entries(folder, manifest, [entry])
            yield entry.tensor.to(dtype)

    _write(path, described, wholes())


def _write(path: Path, described: Sequence[Described], tensors: Iterable[torch.Tensor]) -> None:
    for name, dtype, _ in described:
        if dtype not in SAFE_NAMES:
            raise UsageError(f"{name} is {dtype}, which the safetensors format lacks; save a checkpoint instead")
    draft = path.with_name(f".{path.name}.draft")
    try:
        with open(draft, "wb") as file:
            file.write(safetensors_header(described)[0])
            for tensor in tensors:
                file.write(memoryview(bytes_of(tensor)))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# ---- in --------------------------------------------------------------------------------------------------------------


def import_weights(
    model: Trainer | nn.Module, source: str | Path | Mapping[str, torch.Tensor], strict: bool = True
) -> None:
    """Put weights into a model, under any plan; every rank calls it. The optimizer's state stays as it is.

    strict: whether names in the source that the model does not have are an error. Names that it lacks always are.
    """
    opened = opened_source(source)
    if isinstance(model, Trainer):
        tensors, known = named_tensors(model), _known_names(model)
        entries = [_laid(name, tensor, model) for name, tensor in tensors.items()]
    else:
        tensors, known = _named(model), set(model.state_dict())
        entries = [Entry(name, t.detach(), tuple(t.shape), [whole_chunk(t.shape)], []) for name, t in tensors.items()]
    module = model.model if isinstance(model, Trainer) else model
    found = _matched(entries, opened, module)
    strangers = sorted(set(opened.shapes) - known - set(found.values()))
    if strict and strangers:
        raise UsageError(
            f"{opened.where} has {shown(strangers)}, which the model does not have; strict=False leaves such out"
        )
    with torch.no_grad():
        for entry in entries:
            for chunk in entry.held if entry.name in found else ():
                ends = zip(chunk.offsets, chunk.sizes, strict=True)
                box = tuple(slice(first, first + size) for first, size in ends)
                entry.tensor[chunk.slices].copy_(opened.read(found[entry.name], box))
    if isinstance(model, Trainer) and isinstance(model.replicas, Zero):
        model.replicas.publish()


def _laid(name: str, tensor: torch.Tensor, trainer: Trainer) -> Entry:
    shape = tuple(whole_shape(tensor))
    return Entry(name, tensor.detach(), shape, held_chunks(shape, layout_of(tensor), trainer.mesh), [])


def _known_names(trainer: Trainer) -> set[str]:
    """Of the whole model, also where a pipeline has taken it apart; every name of a tied parameter."""
    mine = set(trainer.model.state_dict()) | set(named_tensors(trainer))
    if trainer.mesh.size("pp") == 1:
        return mine
    return set().union(*trainer.mesh.comm("pp").all_gather_object(mine))


def _matched(entries: list[Entry], source: Source, module: nn.Module) -> dict[str, str]:
    """For each entry its name in the source, which for a tied parameter may be any of its names."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    names = {name: aliases[id(parameter)] for name, parameter in module.named_parameters()}
    passing = set(passing_buffers(module))
    found: dict[str, str] = {}
    lacking: list[str] = []
    for entry in entries:
        name = next((each for each in (entry.name, *names.get(entry.name, ())) if each in source.shapes), "")
        if not name:
            lacking += [entry.name] if entry.name not in passing else []
        elif source.shapes[name] != entry.shape:
            raise UsageError(f"{name} is of shape {source.shapes[name]} in {source.where}; expected {entry.shape}")
        else:
            found[entry.name] = name
    if lacking:
        raise UsageError(f"{source.where} lacks {shown(lacking)}; is it of another model?")
    return found
