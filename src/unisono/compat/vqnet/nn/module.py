"""Modules that take VQNet's numbers of devices."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from unisono.compat.vqnet.device import DEV_CPU, DEV_GPU_0, Device, device_of


class Module(nn.Module):
    """torch's Module with VQNet's `toGPU`, `toCPU` and numbers of devices."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name

    def to(self, *args: Any, **kwargs: Any) -> Self:
        if args and isinstance(args[0], int):
            args = (device_of(args[0]), *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = device_of(kwargs["device"])
        return super().to(*args, **kwargs)

    def toGPU(self, device: Device = DEV_GPU_0) -> Self:
        return self.to(device_of(device))

    def toCPU(self) -> Self:
        return self.to(device_of(DEV_CPU))


class Sequential(Module, nn.Sequential):
    def __init__(self, *modules: Any) -> None:
        nn.Sequential.__init__(self, *modules)


class ModuleList(Module, nn.ModuleList):
    def __init__(self, modules: Any = None) -> None:
        nn.ModuleList.__init__(self, modules)
