"""Loads a checkpoint into a trainer: each rank reads its shards under its own plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from unisono.errors import CheckpointError
from unisono.parallel.full_state import full_shape
from unisono.parallel.layout import layout_of
from unisono.parallel.master_weights import take_remainders
from unisono.parallel.trainer import Trainer
from unisono.train.checkpoint.chunk_files import IndexReader
from unisono.train.checkpoint.chunks import Chunk, full_chunk, held_chunks
from unisono.train.checkpoint.dcp_planners import ChunkLoadPlanner
from unisono.train.checkpoint.inventory import ByParameter, Entry, decoded, dtype_name, named_tensors
from unisono.train.checkpoint.manifest import Manifest
from unisono.train.checkpoint.saving import cause_of

_SHARDED_BEFORE = "laid"  # what earlier versions wrote for "sharded_tensor"


def read_entries(folder: Path, manifest: Manifest, entries: Sequence[Entry]) -> None:
    """Fill the entries from the checkpoint."""
    wanted = {entry.name for entry in entries}
    stored = {name: about for name, about in manifest.tensors.items() if name in wanted}
    # no collectives, as intended
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        dcp.load({}, storage_reader=IndexReader(folder, stored), planner=ChunkLoadPlanner(entries), no_dist=True)
    except CheckpointException as error:
        raise cause_of(error) from error


def full_entry(name: str, manifest: Manifest, device: torch.device | str = "cpu") -> Entry:
    """An empty entry for a full stored tensor."""
    about = manifest.tensors.get(name)
    if about is None:
        raise CheckpointError(f"the checkpoint has no {name}")
    shape = tuple(about["shape"])
    tensor = torch.empty(shape, dtype=getattr(torch, about["dtype"]), device=device)
    return Entry(name, tensor, shape, [full_chunk(shape)] if tensor.numel() else [], [])


@dataclass
class Restoration:
    """Reads a checkpoint into a trainer of the same model."""

    trainer: Trainer
    folder: Path
    manifest: Manifest

    def __post_init__(self) -> None:
        self._entries: list[Entry] = []
        self._common_names: set[str] = set()
        # By id: the parameter (kept alive, so that the id stays valid), its full shape and its chunks.
        self._chunks: dict[int, tuple[torch.Tensor, tuple[int, ...], list[Chunk]]] = {}

    def run(self) -> Any:
        """Restore all of the trainer's state; return `extra`."""
        self._require_same_groups()
        with torch.no_grad():
            for name, tensor in named_tensors(self.trainer).items():
                self._add_sharded(f"model.{name}", tensor, tensor)
            states = {id(tensor): self._state(name, tensor) for name, tensor in self.trainer.optimized()}
            groups = [
                {key: decoded(value, self._common) for key, value in group["values"].items()}
                for group in self.manifest.optimizer["groups"]
            ]
            extra = decoded(self.manifest.extra, self._common, self._by_parameter)
            generators = self._generators()
            read_entries(self.folder, self.manifest, self._entries)
            self._install(states, groups)
            for kind, state in generators.items():
                torch.set_rng_state(state) if kind == "cpu" else torch.cuda.set_rng_state(state)
        return extra

    def _require_same_groups(self) -> None:
        saved, mine = self.manifest.optimizer["groups"], self.trainer.optimizer.param_groups
        was, kind = self.manifest.optimizer.get("kind"), type(self.trainer.optimizer).__qualname__
        if was is not None and was != kind:
            raise CheckpointError(
                f"{self.folder}: the optimizer was {was}, but this one is {kind}, which cannot load its state; "
                "import_weights loads only the weights"
            )
        if len(saved) != len(mine):
            raise CheckpointError(
                f"{self.folder}: the optimizer had {len(saved)} parameter groups, but this one has {len(mine)}; "
                "build it as it was when the checkpoint was saved"
            )
        was_in = {name: number for number, group in enumerate(saved) for name in group["params"]}
        names = {id(tensor): name for name, tensor in self.trainer.optimized()}
        for number, group in enumerate(mine):
            for name in (names[id(each)] for each in group["params"] if id(each) in names):
                if was_in.get(name, number) != number:
                    raise CheckpointError(
                        f"{self.folder}: {name} was in the optimizer's parameter group {was_in[name]}, but now in "
                        f"group {number}; build it as it was when the checkpoint was saved"
                    )

    def _add_sharded(self, entry: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._chunks:
            shape = tuple(full_shape(parameter))
            held = held_chunks(shape, layout_of(parameter), self.trainer.mesh)
            self._chunks[id(parameter)] = parameter, shape, held
        _, shape, held = self._chunks[id(parameter)]
        self._entries.append(Entry(entry, tensor.detach(), shape, held, []))

    def _common(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        if name in self._common_names:  # memory is only taken for what is stored
            raise CheckpointError(f"{self.folder}: {name} is used in several places; the checkpoint is not of unisono")
        self._common_names.add(name)
        self._entries.append(full_entry(name, self.manifest, device))
        return self._entries[-1].tensor

    def _by_parameter(self, prefix: str) -> ByParameter:
        """Empty tensors, sharded like the parameters on this rank, to be filled."""
        tensors = {}
        for name, parameter in self.trainer.optimized():
            about = self.manifest.tensors.get(f"{prefix}.{name}")
            if about is not None:
                dtype = getattr(torch, about["dtype"])
                tensors[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                self._add_sharded(f"{prefix}.{name}", tensors[name], parameter)
        return ByParameter(tensors)

    def _state(self, name: str, parameter: torch.Tensor) -> dict[str, Any]:
        """Empty optimizer state of a parameter on this rank, to be filled."""
        state: dict[str, Any] = {}
        for key, entry in self.manifest.optimizer["state"].get(name, {}).items():
            content = entry.get("sharded_tensor", entry.get(_SHARDED_BEFORE)) if isinstance(entry, dict) else None
            if content is not None:
                saved = self.manifest.tensors[content]["dtype"]
                state[key] = torch.empty_like(parameter, dtype=self._dtype(name, parameter, saved), requires_grad=False)
                self._add_sharded(content, state[key], parameter)
            else:
                device = self._device(key, parameter)
                state[key] = decoded(entry, lambda name, device=device: self._common(name, device))  # type: ignore[misc]
        return state

    def _dtype(self, name: str, parameter: torch.Tensor, saved: str) -> torch.dtype:
        """The saved dtype; of floating point that of the parameter, if it has another precision now."""
        was, dtype = self.manifest.tensors[f"model.{name}"]["dtype"], getattr(torch, saved)
        return dtype if was == dtype_name(parameter.dtype) or not dtype.is_floating_point else parameter.dtype

    def _device(self, key: str, parameter: torch.Tensor) -> torch.device | str:
        """Optimizers of torch keep their step count on the host, unless fused or capturable."""
        if key != "step":
            return parameter.device
        for group in self.trainer.optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                return parameter.device if group.get("fused") or group.get("capturable") else "cpu"
        return "cpu"

    def _generators(self) -> dict[str, torch.Tensor]:
        """torch's own generators: restored if the plan is the same."""
        manifest, trainer = self.manifest, self.trainer
        if manifest.ranks != trainer.mesh.size() or manifest.plan != str(trainer.plan):
            return {}
        rank = trainer.mesh.index()
        kinds = [kind for kind in ("cpu", "cuda") if f"random.{rank}.{kind}" in manifest.tensors]
        kinds = [kind for kind in kinds if kind == "cpu" or torch.cuda.is_available()]
        return {kind: self._common(f"random.{rank}.{kind}") for kind in kinds}

    def _install(self, states: dict[int, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        trainer = self.trainer
        optimized = [tensor for _, tensor in trainer.optimized()]
        if trainer.cuda_graph is not None:
            trainer.cuda_graph.forget()
        trainer.optimizer.state.clear()
        for tensor in optimized:
            if states[id(tensor)]:
                trainer.optimizer.state[tensor] = states[id(tensor)]
        take_remainders(trainer.optimizer, optimized)
        trainer.replicas.publish()
        for group, values in zip(trainer.optimizer.param_groups, groups, strict=True):
            group.update(values)
        state = self.manifest.trainer
        trainer.steps, trainer.skipped = state["steps"], state["skipped"]
        trainer.random.seed = self.manifest.seed
        if trainer.scaler is not None and state["scaler"] is not None:
            trainer.scaler.load_state_dict(state["scaler"])
