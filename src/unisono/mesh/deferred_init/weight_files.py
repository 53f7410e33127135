"""Weights that a constructor reads from safetensors files, as Hugging Face's `from_pretrained` does.

While a constructor is recorded, a tensor of a file is not read but recorded, as one more operation without arguments;
a replay reads it. What is made of it (another dtype, experts stacked to one tensor) is recorded like any operation. So
a rank reads from the files what it owns, and no rank holds the full model.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from unisono.mesh.deferred_init.init_recorder import CannotRecord, InitRecorder
from unisono.torch_compat import disable_dispatch_modes, no_torch_function
from unisono.torch_patches import patched

SAFE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in SAFE_NAMES.items()}
_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"  # modes of torch are those of one thread


@contextlib.contextmanager
def recorded_files(recorder: InitRecorder) -> Iterator[None]:
    """In the block, tensors that transformers reads from safetensors files are recorded."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import modeling_utils

    def opened(path: Any, *args: Any, **kwargs: Any) -> _RecordedFile:
        return _RecordedFile(recorder, str(path), *args, **kwargs)

    before = os.environ.get(_ONE_THREAD)
    os.environ[_ONE_THREAD] = "1"
    try:
        with patched(modeling_utils, "safe_open", opened, why="weights are read when a rank needs them"):
            yield
    finally:
        if before is None:
            del os.environ[_ONE_THREAD]
        else:
            os.environ[_ONE_THREAD] = before


class _RecordedFile:
    """Instead of a file opened by safe_open."""

    def __init__(self, recorder: InitRecorder, path: str, *args: Any, **kwargs: Any) -> None:
        self._recorder, self._path = recorder, path
        with disable_dispatch_modes(), no_torch_function():
            self._file = safe_open(path, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _RecordedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> _RecordedSlice:
        return _RecordedSlice(self._recorder, self._path, name, self._file.get_slice(name))

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]


class _RecordedSlice:
    """Instead of a slice of a file, which reads when it is indexed."""

    def __init__(self, recorder: InitRecorder, path: str, name: str, real: Any) -> None:
        self._recorder, self._path, self._name, self._real = recorder, path, name, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = _DTYPES.get(self._real.get_dtype())
        if dtype is None:
            raise CannotRecord(f"{self._name} in {self._path} is of dtype {self._real.get_dtype()}")
        full = self._recorder.made_by(_read, (self._path, self._name), self._real.get_shape(), dtype)
        return full if index is ... else full[index]


def _read(path: str, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor.clone(memory_format=torch.contiguous_format)
