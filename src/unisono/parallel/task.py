"""A Task: what it takes to rebuild a training job on any rank."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from unisono.comm.rendezvous import world
from unisono.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Task:
    """What it takes to rebuild a training job on any rank.

    Args:
        model: model() builds the module.
        loss: loss(outputs, targets) gives a scalar.
        optimizer: optimizer(parameters) gives a torch optimizer.
        batch: batch(seed) gives (inputs, targets) for one global batch, inputs being a tensor, a tuple or a dict of
            keyword arguments for the model.
        rules: Which layers tensor parallelism shards.
        clip: The largest norm of the gradients.
        name: For tables.
        batch_dim: As for uni.parallelize.
        precision: As for uni.parallelize; explain shows it, plan counts with it, and verify proves it.
    """

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
    """The task at `file.py:name`, where name is a Task or a function that returns one; or what the training script
    `file.py` trains, which is run up to Engine.fit."""
    if is_script(address):
        return _task_of_script(Path(address))
    path, colon, name = address.rpartition(":")
    if not colon or not path or not name:
        raise UsageError(
            f"task {address!r}: expected file.py:name, such as gpt.py:tiny, or a training script, such as train.py"
        )
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"task {address!r}: there is no file {path}")
    module = _module_of(file)
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"task {address!r}: {path} has no {name!r}{did_you_mean(name, vars(module))}")
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


# ---- training scripts ------------------------------------------------------------------------------------------------

_sought = False


class _Found(BaseException):
    """Ends a script; handlers of Exception let it pass."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task


def is_script(address: str) -> bool:
    return address.endswith(".py")


def is_sought() -> bool:
    """Whether a script runs only to find what it trains."""
    return _sought


def found(task: Task) -> NoReturn:
    """Called where the script would begin to train."""
    raise _Found(task)


def _task_of_script(file: Path) -> Task:
    global _sought
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    had_world, argv, path = world.is_initialized(), sys.argv, list(sys.path)
    sys.argv = [str(file)]
    sys.path.insert(0, str(file.resolve().parent))
    _sought = True
    try:
        runpy.run_path(str(file), run_name="__main__")
    except _Found as ended:
        return replace(ended.task, name=ended.task.name or file.stem)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{file} ended before it began to train: {type(error).__name__}: {error}") from error
    finally:
        _sought = False
        sys.argv, sys.path[:] = argv, path
        if world.is_initialized() and not had_world:
            world.shutdown()
    raise UsageError(
        f"{file} ended without Engine.fit, Engine.run or Engine.prepare; give a script that trains with a uni.Engine, "
        "or file.py:name of a uni.Task"
    )
