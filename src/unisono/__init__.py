"""unisono: many devices, one result.

The names below load what they need on first use, so that `import unisono` stays quick.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono import nn as nn
    from unisono.comm.communicator import Communicator as Communicator
    from unisono.comm.rendezvous.world import init as init
    from unisono.comm.rendezvous.world import is_initialized as is_initialized
    from unisono.comm.rendezvous.world import rank as rank
    from unisono.comm.rendezvous.world import shutdown as shutdown
    from unisono.comm.rendezvous.world import world as world
    from unisono.comm.rendezvous.world import world_size as world_size
    from unisono.comm.ring import ring_all_reduce as ring_all_reduce
    from unisono.graph.marks.api import mark as mark
    from unisono.graph.marks.api import reshard as reshard
    from unisono.graph.marks.api import shard_tensor as shard_tensor
    from unisono.graph.marks.sharded import shard as shard
    from unisono.graph.marks.sharded import shard_op as shard_op
    from unisono.graph.program.program import Program as Program
    from unisono.launch.spawn import spawn as spawn
    from unisono.mesh.mesh import Mesh as Mesh
    from unisono.mesh.named_groups import grouped as grouped
    from unisono.mesh.placement import Partial as Partial
    from unisono.mesh.placement import Replicate as Replicate
    from unisono.mesh.placement import Shard as Shard
    from unisono.parallel.loss.batch_loss import BatchLoss as BatchLoss
    from unisono.parallel.static.marked import apply_marks as apply_marks
    from unisono.parallel.static.to_static import StagedProgram as StagedProgram
    from unisono.parallel.static.to_static import to_static as to_static
    from unisono.parallel.task import Task as Task
    from unisono.parallel.trainer import Trainer as Trainer
    from unisono.plan.plan import Plan as Plan
    from unisono.train.callbacks import Callback as Callback
    from unisono.train.callbacks import EarlyStopping as EarlyStopping
    from unisono.train.callbacks import StepInfo as StepInfo
    from unisono.train.checkpoint.checkpoints import Checkpoints as Checkpoints
    from unisono.train.checkpoint.weights import export_weights as export_weights
    from unisono.train.checkpoint.weights import import_weights as import_weights
    from unisono.train.data.loader import Loader as Loader
    from unisono.train.data.partitioner import DataPartitioner as DataPartitioner
    from unisono.train.data.partitioner import split_data as split_data
    from unisono.train.data.sampler import DistributedBatchSampler as DistributedBatchSampler
    from unisono.train.ema import EMA as EMA
    from unisono.train.engine import Engine as Engine
    from unisono.train.metrics import Accuracy as Accuracy
    from unisono.train.metrics import Metric as Metric
    from unisono.train.metrics import Perplexity as Perplexity
    from unisono.train.telemetry.loggers import Logger as Logger
    from unisono.train.telemetry.loggers import MLflowLogger as MLflowLogger
    from unisono.train.telemetry.loggers import TensorBoardLogger as TensorBoardLogger
    from unisono.train.telemetry.loggers import WandbLogger as WandbLogger
    from unisono.verify.self_check import parallelize as parallelize

__version__ = "0.1.0"

# torch.cuda.is_available() then asks NVML and leaves CUDA alone: a process that has initialised it cannot fork ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_HOME = {
    "Accuracy": "unisono.train.metrics",
    "BatchLoss": "unisono.parallel.loss.batch_loss",
    "Callback": "unisono.train.callbacks",
    "EarlyStopping": "unisono.train.callbacks",
    "EMA": "unisono.train.ema",
    "Engine": "unisono.train.engine",
    "Logger": "unisono.train.telemetry.loggers",
    "MLflowLogger": "unisono.train.telemetry.loggers",
    "Metric": "unisono.train.metrics",
    "Perplexity": "unisono.train.metrics",
    "Communicator": "unisono.comm.communicator",
    "Checkpoints": "unisono.train.checkpoint.checkpoints",
    "DataPartitioner": "unisono.train.data.partitioner",
    "DistributedBatchSampler": "unisono.train.data.sampler",
    "Loader": "unisono.train.data.loader",
    "Plan": "unisono.plan.plan",
    "Program": "unisono.graph.program.program",
    "Task": "unisono.parallel.task",
    "TensorBoardLogger": "unisono.train.telemetry.loggers",
    "Trainer": "unisono.parallel.trainer",
    "parallelize": "unisono.verify.self_check",
    "Mesh": "unisono.mesh.mesh",
    "Partial": "unisono.mesh.placement",
    "Replicate": "unisono.mesh.placement",
    "Shard": "unisono.mesh.placement",
    "export_weights": "unisono.train.checkpoint.weights",
    "grouped": "unisono.mesh.named_groups",
    "import_weights": "unisono.train.checkpoint.weights",
    "init": "unisono.comm.rendezvous.world",
    "is_initialized": "unisono.comm.rendezvous.world",
    "rank": "unisono.comm.rendezvous.world",
    "mark": "unisono.graph.marks.api",
    "reshard": "unisono.graph.marks.api",
    "ring_all_reduce": "unisono.comm.ring",
    "shard": "unisono.graph.marks.sharded",
    "shard_op": "unisono.graph.marks.sharded",
    "shard_tensor": "unisono.graph.marks.api",
    "shutdown": "unisono.comm.rendezvous.world",
    "spawn": "unisono.launch.spawn",
    "split_data": "unisono.train.data.partitioner",
    "StepInfo": "unisono.train.callbacks",
    "StagedProgram": "unisono.parallel.static.to_static",
    "WandbLogger": "unisono.train.telemetry.loggers",
    "apply_marks": "unisono.parallel.static.marked",
    "to_static": "unisono.parallel.static.to_static",
    "world": "unisono.comm.rendezvous.world",
    "world_size": "unisono.comm.rendezvous.world",
}

__all__ = ["__version__", "nn", *_HOME]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext unisono`: cells that begin with `%%unisono -n 4` run on four ranks."""
    importlib.import_module("unisono.launch.notebook").load_ipython_extension(shell)


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("unisono.nn")
    if name not in _HOME:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
