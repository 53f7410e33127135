"""torch.distributed's own collectives on objects, signed: a job with a secret unpickles only what its ranks have sent.

torch's checkpoints, and users, call `dist.all_gather_object` and its like, which unpickle whatever arrives. These
signatures know the job and its world, and neither the group nor the number of a call, which torch does not pass on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d

from unisono.comm.signatures.seal import Seal
from unisono.torch_patches import PatchSet, original

_OP, _ANY = "an object of torch.distributed", 0


def signed(key: bytes) -> PatchSet:
    """Patches under which objects are signed with this key."""
    seal = Seal(key, "torch")
    pickled = original(distributed_c10d, "_object_to_tensor")
    unpickled = original(distributed_c10d, "_tensor_to_object")

    def object_to_tensor(value: Any, device: Any, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        content, _ = pickled(value, torch.device("cpu"), group)
        data = seal.sign(content.numpy().tobytes(), _OP, _ANY, _ANY).to(device)
        return data, torch.tensor([data.numel()], device=device)

    def tensor_to_object(tensor: torch.Tensor, size: Any, group: Any) -> Any:
        content = seal.verified(tensor.cpu()[: int(size)], _OP, _ANY, _ANY)
        return unpickled(torch.frombuffer(bytearray(content), dtype=torch.uint8), len(content), group)

    return PatchSet(
        {
            (distributed_c10d, "_object_to_tensor"): object_to_tensor,
            (distributed_c10d, "_tensor_to_object"): tensor_to_object,
        },
        why="objects are unpickled only if a rank of the job has sent them",
        until="the world ends",
    )
