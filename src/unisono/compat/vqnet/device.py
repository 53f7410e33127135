"""VQNet's numbers of devices: 0 is the CPU, 1000 + k the k-th GPU.

A program written for GPUs runs without any: on a machine that has none, 1000 + k is the CPU too. With fewer GPUs than
asked for, ranks share them round-robin.
"""

from __future__ import annotations

import torch

from unisono.compat.language import say
from unisono.compat.vqnet.vqnet_names import missing_names
from unisono.errors import UsageError

DEV_CPU = 0
DEV_GPU = DEV_GPU_0 = 1000
DEV_GPU_1, DEV_GPU_2, DEV_GPU_3, DEV_GPU_4, DEV_GPU_5, DEV_GPU_6, DEV_GPU_7 = range(1001, 1008)

Device = int | str | torch.device


def device_of(given: Device) -> torch.device:
    """The device of that number, or itself."""
    if isinstance(given, str | torch.device):
        return torch.device(given)
    if given == DEV_CPU:
        return torch.device("cpu")
    if given < DEV_GPU_0:
        raise UsageError(
            say(
                f"device {given}: expected {DEV_CPU} for the CPU, or {DEV_GPU_0} + k for the k-th GPU",
                f"设备 {given}：应为 {DEV_CPU}（CPU），或 {DEV_GPU_0} + k（第 k 个 GPU）",
            )
        )
    count = torch.cuda.device_count()
    return torch.device("cuda", (given - DEV_GPU_0) % count) if count else torch.device("cpu")


__getattr__ = missing_names(__name__)
