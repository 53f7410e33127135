"""A Task: what it takes to rebuild a training job on any rank."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.errors import UsageError


@dataclass(frozen=True)
class Task:
    """model() builds the module; batch(seed) gives (inputs, targets) for one global batch, inputs being a tensor, a
    tuple or a dict of keyword arguments for the model; loss(outputs, targets) gives a scalar; optimizer(parameters)
    gives a torch optimizer. rules: which layers tensor parallelism shards. clip: the largest norm of the gradients.
    batch_dim and precision: as for uni.parallelize; explain shows the precision, and verify proves it."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[int], tuple[Any, Any]]
    rules: Any = None
    clip: float | None = None
    name: str = ""
    batch_dim: Any = 0
    precision: Any = "fp32"


def load_task(address: str) -> Task:
    """The task at `file.py:name`, where name is a Task or a function that returns one."""
    path, colon, name = address.rpartition(":")
    if not colon or not path or not name:
        raise UsageError(f"task {address!r}: expected file.py:name, such as gpt.py:tiny")
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"task {address!r}: there is no file {path}")
    found = getattr(_module_of(file), name, None)
    if found is None:
        raise UsageError(f"task {address!r}: {path} has no {name!r}")
    task = found() if callable(found) and not isinstance(found, Task) else found
    if not isinstance(task, Task):
        raise UsageError(f"task {address!r}: {name} gave {type(task).__name__}; expected a uni.Task")
    return task


def _module_of(file: Path) -> Any:
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem.isidentifier() else "unisono_task"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file.resolve()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
