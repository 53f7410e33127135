"""CIFAR-10 from its own files, of either kind that its authors give out. Nothing is downloaded.

cifar-10-batches-bin/data_batch_1.bin ... test_batch.bin      a byte for the label, 3072 for the image
cifar-10-batches-py/data_batch_1 ... test_batch               pickled dictionaries of arrays
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from unisono.compat.language import say
from unisono.errors import UsageError

_RECORD = 1 + 3 * 32 * 32
_MODES = {"train": "data_batch_", "test": "test_batch"}
_LAYOUTS = ("HWC", "CHW")


class CIFAR10_Dataset(Dataset[Any]):
    """Pairs of an image (uint8, in that layout, then transformed) and its class, 0 to 9."""

    def __init__(
        self,
        root: str = "./cifar10-data",
        mode: str = "train",
        transform: Callable[[Any], Any] | None = None,
        layout: str = "HWC",
    ) -> None:
        if mode not in _MODES:
            raise UsageError(
                say(
                    f"CIFAR10_Dataset: mode={mode!r}; expected one of {', '.join(_MODES)}",
                    f"CIFAR10_Dataset：mode={mode!r}；应为 {', '.join(_MODES)} 之一",
                )
            )
        if layout not in _LAYOUTS:
            raise UsageError(
                say(
                    f"CIFAR10_Dataset: layout={layout!r}; expected one of {', '.join(_LAYOUTS)}",
                    f"CIFAR10_Dataset：layout={layout!r}；应为 {', '.join(_LAYOUTS)} 之一",
                )
            )
        parts = [_read(path) for path in _files(Path(root), mode)]
        images = np.concatenate([images for images, _ in parts])
        self.images = images if layout == "CHW" else np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        self.labels = np.concatenate([labels for _, labels in parts])
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        return (image if self.transform is None else self.transform(image)), int(self.labels[index])


def _files(root: Path, mode: str) -> list[Path]:
    for folder, suffix in (("cifar-10-batches-bin", ".bin"), ("cifar-10-batches-py", "")):
        for folder_or_root in (root / folder, root):
            found = [path for path in sorted(folder_or_root.glob(f"{_MODES[mode]}*")) if path.suffix == suffix]
            if found:
                return found
    raise UsageError(
        say(
            f"CIFAR10_Dataset: {root} has no files {_MODES[mode]}* of CIFAR-10; put its folder "
            "cifar-10-batches-bin or cifar-10-batches-py there (nothing is downloaded)",
            f"CIFAR10_Dataset：{root} 中没有 CIFAR-10 的文件 {_MODES[mode]}*；请把 cifar-10-batches-bin 或 "
            "cifar-10-batches-py 目录放在那里（不会下载）",
        )
    )


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if path.suffix == ".bin":
        data = np.fromfile(path, dtype=np.uint8)
        if not len(data) or len(data) % _RECORD:
            raise UsageError(
                say(
                    f"{path} has {len(data)} bytes; expected a multiple of {_RECORD}: is it CIFAR-10's?",
                    f"{path} 有 {len(data)} 字节；应为 {_RECORD} 的倍数：它是 CIFAR-10 的文件吗？",
                )
            )
        records = data.reshape(-1, _RECORD)
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)
    with path.open("rb") as file:
        try:
            content = _ArraysOnly(file, encoding="bytes").load()
            return content[b"data"].reshape(-1, 3, 32, 32), np.asarray(content[b"labels"], dtype=np.int64)
        except (pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
            raise UsageError(
                say(
                    f"{path} cannot be read as a batch of CIFAR-10: {error}",
                    f"无法把 {path} 读作 CIFAR-10 的批：{error}",
                )
            ) from error


class _ArraysOnly(pickle.Unpickler):
    """Reads arrays and plain values; a file that wants anything else called is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype", "_frombuffer"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            say(
                f"it calls {module}.{name}, which no batch of CIFAR-10 does",
                f"它调用 {module}.{name}，而 CIFAR-10 的批不会这样",
            )
        )
