"""Recording the marks of a model that runs, and seeing to it that each counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.utils import _pytree as pytree

from unisono.errors import UsageError
from unisono.graph.marks.recorder import MarkRecorder
from unisono.graph.marks.sharded import Sharded, require_none_dropped


@contextlib.contextmanager
def recording(model: nn.Module, binding: bool = True) -> Iterator[MarkRecorder]:
    """Marks made in the block go into the graph; UsageError where some would not count. Not binding: they are ignored,
    as where placements are those of another trace."""
    require_none_dropped()
    with MarkRecorder(model, binding) as recording:
        yield recording
    if not binding:
        return
    require_none_dropped()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            for kept in pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]:
                if isinstance(kept, Sharded) and id(kept) not in recording.called:
                    where = f"{name}.{attribute}".lstrip(".")
                    raise UsageError(
                        f"{where} ({kept!r}) was not called, so its marks would not count; call it, or remove it"
                    )


@contextlib.contextmanager
def dry_run(copy: nn.Module) -> Iterator[MarkRecorder]:
    """Records the marks of a copy of a model that runs in the block, if it can; the copy is thrown away, and its marks
    need not have counted."""
    recording = MarkRecorder(copy)
    try:
        with recording:
            yield recording
    except UsageError:
        raise
    except Exception:
        recording.stages.clear()
    finally:
        for module in copy.modules():
            for value in vars(module).values():
                if isinstance(value, Sharded):
                    value.called = True
