"""VQNet's documented names, thin, over unisono's own parts.

    import unisono.compat.vqnet as pyvqnet                            # was: import pyvqnet
    from unisono.compat.vqnet.distributed import CommController       # was: from pyvqnet.distributed import ...

A program changes its imports and nothing else. Tensors are torch's: a QTensor is one that answers to VQNet's names too.
`toGPU`, DEV_GPU_0 and dtype=8 are taken as they are; on a machine without GPUs all of it runs on the CPU.
"""

from __future__ import annotations

import sys

from unisono.compat.vqnet import data as data
from unisono.compat.vqnet import device as device
from unisono.compat.vqnet import distributed as distributed
from unisono.compat.vqnet import dtype as dtype
from unisono.compat.vqnet import nn as nn
from unisono.compat.vqnet import optim as optim
from unisono.compat.vqnet import qnn as qnn
from unisono.compat.vqnet import seed as utils
from unisono.compat.vqnet import tensor as tensor
from unisono.compat.vqnet.device import DEV_CPU as DEV_CPU
from unisono.compat.vqnet.device import DEV_GPU as DEV_GPU
from unisono.compat.vqnet.device import DEV_GPU_0 as DEV_GPU_0
from unisono.compat.vqnet.device import DEV_GPU_1 as DEV_GPU_1
from unisono.compat.vqnet.device import DEV_GPU_2 as DEV_GPU_2
from unisono.compat.vqnet.device import DEV_GPU_3 as DEV_GPU_3
from unisono.compat.vqnet.device import DEV_GPU_4 as DEV_GPU_4
from unisono.compat.vqnet.device import DEV_GPU_5 as DEV_GPU_5
from unisono.compat.vqnet.device import DEV_GPU_6 as DEV_GPU_6
from unisono.compat.vqnet.device import DEV_GPU_7 as DEV_GPU_7
from unisono.compat.vqnet.dtype import kbool as kbool
from unisono.compat.vqnet.dtype import kcomplex64 as kcomplex64
from unisono.compat.vqnet.dtype import kcomplex128 as kcomplex128
from unisono.compat.vqnet.dtype import kfloat32 as kfloat32
from unisono.compat.vqnet.dtype import kfloat64 as kfloat64
from unisono.compat.vqnet.dtype import kint8 as kint8
from unisono.compat.vqnet.dtype import kint16 as kint16
from unisono.compat.vqnet.dtype import kint32 as kint32
from unisono.compat.vqnet.dtype import kint64 as kint64
from unisono.compat.vqnet.dtype import kuint8 as kuint8
from unisono.compat.vqnet.tensor import QTensor as QTensor
from unisono.compat.vqnet.tensor import no_grad as no_grad
from unisono.compat.vqnet.vqnet_names import explain, missing_names

sys.modules[f"{__name__}.utils"] = utils  # so that `from ....utils import set_random_seed` finds it too

# What `from pyvqnet import *` gives: no names that a program would have of its own, such as data or device.
__all__ = [
    "DEV_CPU",
    "DEV_GPU",
    "DEV_GPU_0",
    "DEV_GPU_1",
    "DEV_GPU_2",
    "DEV_GPU_3",
    "DEV_GPU_4",
    "DEV_GPU_5",
    "DEV_GPU_6",
    "DEV_GPU_7",
    "QTensor",
    "kbool",
    "kcomplex64",
    "kcomplex128",
    "kfloat32",
    "kfloat64",
    "kint8",
    "kint16",
    "kint32",
    "kint64",
    "kuint8",
    "nn",
    "no_grad",
    "optim",
    "tensor",
]

__getattr__ = missing_names(__name__)


def explain_missing_module(name: str) -> str:
    """The sentence for `import pyvqnet.qnn.pq3`."""
    return explain(name, {})
