"""Ring all-reduce from point-to-point calls: the algorithm behind most libraries' all_reduce, in thirty lines.

The ranks stand in a ring; each tensor is split into as many chunks as there are ranks. In step s of the first round
(reduce-scatter), rank r passes chunk r - s on to its right neighbour and adds what its left neighbour passes to its
own chunk. After size - 1 steps each rank holds one chunk that is complete. The second round (all-gather) passes the
complete chunks on the same way. Every rank sends 2 (size - 1) / size of the tensor, whatever the size of the ring.
"""

from __future__ import annotations

import torch

from unisono.comm.communicator import Communicator


def ring_all_reduce(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Replace a tensor by the sum over all ranks, in place, for any length and any number of ranks.

    Args:
        comm: The ranks.
        tensor: This rank's.
    """
    if comm.size == 1:
        return tensor
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    flat = tensor.detach().contiguous().view(-1)
    chunks = flat.tensor_split(comm.size)
    incoming = torch.empty_like(chunks[0])  # the longest chunk comes first

    for step in range(comm.size - 1):
        outgoing = chunks[(comm.rank - step) % comm.size]
        partial = chunks[(comm.rank - step - 1) % comm.size]
        _pass_on(comm, outgoing, right, incoming[: partial.numel()], left)
        partial += incoming[: partial.numel()]

    for step in range(comm.size - 1):
        outgoing = chunks[(comm.rank - step + 1) % comm.size]
        complete = chunks[(comm.rank - step) % comm.size]
        _pass_on(comm, outgoing, right, complete, left)

    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view_as(tensor))
    return tensor


def _pass_on(comm: Communicator, outgoing: torch.Tensor, right: int, incoming: torch.Tensor, left: int) -> None:
    """Send to the right while receiving from the left; chunks of a short tensor may be empty."""
    comm.exchange(
        sends=[(outgoing, right)] if outgoing.numel() else [],
        recvs=[(incoming, left)] if incoming.numel() else [],
    )


def naive_all_reduce(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """The same sum with full tensors going round: size - 1 tensors sent a rank instead of less than two."""
    if comm.size == 1:
        return tensor
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    travelling, total = tensor.detach().clone(), tensor.detach().clone()
    for _ in range(comm.size - 1):
        arriving = torch.empty_like(travelling)
        comm.exchange(sends=[(travelling, right)], recvs=[(arriving, left)])
        total += arriving
        travelling = arriving
    tensor.detach().copy_(total)
    return tensor
