"""paddle.save and paddle.load: states of layers and optimizers in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unisono.compat.language import say
from unisono.compat.paddle.tensor import plain, wrapped
from unisono.errors import UsageError


def save(obj: Any, path: str | Path, protocol: int = 4, **configs: Any) -> None:
    """Write a state; folders are made. Under a plan every rank calls state_dict(), and one of them saves."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(plain(obj), path)


def load(path: str | Path, **configs: Any) -> Any:
    """What `save` wrote: tensors and plain values. Files of Paddle's own are other pickles, and refused."""
    try:
        return wrapped(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise UsageError(
            say(f"paddle.load({str(path)!r}): there is no such file", f"paddle.load({str(path)!r})：没有这个文件")
        ) from None
    except Exception as error:
        raise UsageError(
            say(
                f"paddle.load({str(path)!r}): this is no file of paddle.save under unisono; files that Paddle itself "
                "has saved can be converted there, with numpy.savez of the state_dict's arrays",
                f"paddle.load({str(path)!r})：不是在 unisono 下由 paddle.save 保存的文件；飞桨自己保存的文件"
                "可先在飞桨中用 numpy.savez 转存 state_dict 的数组",
            )
        ) from error
