"""Every collective on CUDA tensors, held against the same on the CPU; started by `unisono run`."""

from __future__ import annotations

import torch

import unisono as uni
from tests.comm.test_table import DTYPES, OPS, movements, reductions
from unisono.comm.communicator import Communicator


class OnGpu:
    """A communicator whose calls get their CPU tensors moved to the GPU first, and the outcome back."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name: str) -> object:
        method = getattr(self._comm, name)

        def call(*args: object, **options: object) -> object:
            moved = [_to(arg, "cuda") for arg in args]
            outcome = method(*moved, **options)
            for before, after in zip(args, moved, strict=True):
                _copy_back(before, after)
            if isinstance(args[0] if args else None, torch.Tensor) and outcome is moved[0]:
                return args[0]
            return _to(outcome, "cpu")

        return call


def _to(value: object, device: str) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_to(each, device) for each in value)
    return value


def _copy_back(before: object, after: object) -> None:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        before.copy_(after)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        for one, other in zip(before, after, strict=True):
            _copy_back(one, other)


def main() -> None:
    comm = uni.init()
    on_gpu = OnGpu(comm)
    expected, got = reductions(comm, False), reductions(on_gpu, False)  # type: ignore[arg-type]
    wrong = {cell: (got[cell], expected[cell]) for cell in expected if got[cell] != expected[cell]}
    assert not wrong, wrong
    if comm.size > 1:
        moved = movements(on_gpu, False)  # type: ignore[arg-type]
        assert set(moved.values()) == {"ok"}, {cell: reported for cell, reported in moved.items() if reported != "ok"}
    if comm.rank == 0:
        where = torch.cuda.get_device_name()
        print(f"{comm.backend}: {len(DTYPES)} dtypes x {len(OPS)} reductions on {where}: all as on the CPU")
    uni.shutdown()


if __name__ == "__main__":
    main()
