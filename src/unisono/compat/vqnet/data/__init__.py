"""Images for VQNet's examples."""

from __future__ import annotations

from unisono.compat.vqnet.data.cifar10 import CIFAR10_Dataset as CIFAR10_Dataset
from unisono.compat.vqnet.data.transform import TransformCenterCrop as TransformCenterCrop
from unisono.compat.vqnet.data.transform import TransformCompose as TransformCompose
from unisono.compat.vqnet.data.transform import TransformNormalize as TransformNormalize
from unisono.compat.vqnet.data.transform import TransformResize as TransformResize
from unisono.compat.vqnet.data.transform import TransformToTensor as TransformToTensor
from unisono.compat.vqnet.vqnet_names import missing_names

__getattr__ = missing_names(__name__)
