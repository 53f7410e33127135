"""Training: Model, callbacks, checkpoints.

model          Model: train, eval, predict
callback       Callback, LossMonitor, TimeMonitor, ModelCheckpoint, CheckpointConfig
serialization  save_checkpoint, load_checkpoint, load_param_into_net
batches        from what a rank reads to the global batch
"""

from __future__ import annotations

from unisono.compat.mindspore.mindspore_names import missing_names
from unisono.compat.mindspore.train import callback as callback
from unisono.compat.mindspore.train import serialization as serialization
from unisono.compat.mindspore.train.callback import Callback as Callback
from unisono.compat.mindspore.train.callback import CheckpointConfig as CheckpointConfig
from unisono.compat.mindspore.train.callback import LossMonitor as LossMonitor
from unisono.compat.mindspore.train.callback import ModelCheckpoint as ModelCheckpoint
from unisono.compat.mindspore.train.callback import RunContext as RunContext
from unisono.compat.mindspore.train.callback import TimeMonitor as TimeMonitor
from unisono.compat.mindspore.train.model import Model as Model
from unisono.compat.mindspore.train.serialization import load_checkpoint as load_checkpoint
from unisono.compat.mindspore.train.serialization import load_param_into_net as load_param_into_net
from unisono.compat.mindspore.train.serialization import save_checkpoint as save_checkpoint

__getattr__ = missing_names(__name__)
