"""What is done to an image before training: an array (height, width, channels) becomes a tensor (channels, ...)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from unisono.compat.language import say
from unisono.compat.vqnet.whole import whole_number
from unisono.errors import UsageError


def _require_size(name: str, size: Any) -> None:
    listed = [size] * 2 if isinstance(size, int) else list(size) if isinstance(size, list | tuple) else []
    if len(listed) != 2 or any((whole_number(each) or 0) < 1 for each in listed):
        raise UsageError(
            say(
                f"{name}({size!r}): expected a whole number of at least 1, or two for height and width",
                f"{name}({size!r})：应为不小于 1 的整数，或高和宽两个",
            )
        )


class TransformCompose:
    """One transform after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class TransformResize:
    """Scale an image, so that its shorter side (one number) or its height and width (two) are these."""

    def __init__(self, size: int | Sequence[int]) -> None:
        _require_size("TransformResize", size)
        self.size = size

    def __call__(self, image: np.ndarray) -> np.ndarray:
        height, width = _require_image(image).shape[:2]
        if isinstance(self.size, int):
            scale = self.size / min(height, width)
            wanted = (round(height * scale), round(width * scale))
        else:
            wanted = (self.size[0], self.size[1])
        pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None].float()
        scaled = F.interpolate(pixels, wanted, mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
        return scaled.round().clip(0, 255).astype(np.uint8) if image.dtype == np.uint8 else scaled


class TransformCenterCrop:
    """The middle of an image, `size` high and wide."""

    def __init__(self, size: int | Sequence[int]) -> None:
        _require_size("TransformCenterCrop", size)
        self.height, self.width = (size, size) if isinstance(size, int) else size

    def __call__(self, image: np.ndarray) -> np.ndarray:
        height, width = _require_image(image).shape[:2]
        if self.height > height or self.width > width:
            raise UsageError(
                say(
                    f"TransformCenterCrop: {self.height} x {self.width} of an image of {height} x {width}; "
                    "resize it first",
                    f"TransformCenterCrop：要从 {height} x {width} 的图像裁出 {self.height} x {self.width}；请先缩放",
                )
            )
        top, left = (height - self.height) // 2, (width - self.width) // 2
        return image[top : top + self.height, left : left + self.width]


class TransformToTensor:
    """(height, width, channels) of bytes becomes (channels, height, width) of float32 from 0 to 1."""

    def __call__(self, image: np.ndarray) -> torch.Tensor:
        made = torch.from_numpy(np.ascontiguousarray(_require_image(image))).permute(2, 0, 1).contiguous()
        return made.float() / 255 if made.dtype == torch.uint8 else made.float()


class TransformNormalize:
    """Subtract each channel's mean, and divide by its deviation."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if not len(mean) == len(std) or not all(each > 0 for each in std):
            raise UsageError(
                say(
                    f"TransformNormalize(mean={list(mean)}, std={list(std)}): expected a mean and a deviation "
                    "above 0 for each channel",
                    f"TransformNormalize(mean={list(mean)}, std={list(std)})：每个通道应有均值和大于 0 的标准差",
                )
            )
        self.mean, self.std = (torch.tensor(list(each), dtype=torch.float32)[:, None, None] for each in (mean, std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if not isinstance(image, torch.Tensor) or image.shape[0] != len(self.mean):
            raise UsageError(
                say(
                    f"TransformNormalize has {len(self.mean)} channels; expected a tensor (channels, height, "
                    "width), as TransformToTensor makes it",
                    f"TransformNormalize 有 {len(self.mean)} 个通道；应为张量（通道、高、宽），即 "
                    "TransformToTensor 所给出的",
                )
            )
        return (image - self.mean) / self.std


def _require_image(image: Any) -> np.ndarray:
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        raise UsageError(
            say(
                f"an image of type {type(image).__name__}: expected a NumPy array (height, width, channels); "
                "TransformToTensor comes after resizing and cropping",
                f"图像的类型为 {type(image).__name__}：应为 NumPy 数组（高、宽、通道）；TransformToTensor 应在"
                "缩放和裁剪之后",
            )
        )
    return image
