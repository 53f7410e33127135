"""Each operation as the MPI calls it takes: which memory, which arguments, what to do afterwards.

MPI does not match a blocking collective on one rank with a non-blocking one on another, so all calls are made
non-blocking, whether the caller waits at once or later. Imports mpi4py, so import it late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from mpi4py import MPI

from unisono.comm.backends import folded
from unisono.comm.mpi import buffers
from unisono.comm.mpi.buffers import (
    DATA_TYPES,
    NUMBERS,
    OPS,
    Buffer,
    chunks_of,
    computable,
    is_plain,
    joined,
    joint,
    land,
    land_parts,
    number_buffer,
    overlap,
    raw_buffer,
    raw_parts,
    readable,
    ready,
    room_to_compute,
    writable,
)
from unisono.comm.reduction import Factor, Reduction, plan_reduction
from unisono.errors import MessageError, UsageError

Step = tuple[str, tuple[Any, ...]]  # a non-blocking MPI method, and its arguments


@dataclass
class MPICall:
    name: str
    steps: list[Step]
    outputs: Sequence[torch.Tensor] = ()
    memory: tuple[torch.Tensor, ...] = ()  # must live until the steps have completed
    finish: Callable[[], None] | None = None  # once, after the steps
    status: MPI.Status = field(default_factory=MPI.Status)


def barrier() -> MPICall:
    return MPICall("barrier", [("Ibarrier", ())])


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> MPICall:
    tensor = _data(tensor)
    memory = readable(tensor) if rank == root else writable(tensor)
    finish = None if rank == root else _landing(memory, tensor)
    return MPICall("broadcast", _broadcast_steps(memory, root), [tensor], (memory,), finish)


def _broadcast_steps(memory: torch.Tensor, root: int) -> list[Step]:
    return [("Ibcast", (raw_buffer(chunk), root)) for chunk in chunks_of(memory)]


def all_reduce(tensor: torch.Tensor, op: str, factor: Factor | None, size: int) -> MPICall:
    reduction = plan_reduction(op, tensor.dtype)
    tensor = _data(tensor)
    wire = reduction.to_wire(tensor, factor)
    if buffers.folds(wire, size):
        sent, received = _parts(wire, size)
        gather: Step = ("Iallgather", (raw_buffer(sent), raw_buffer(received)))
        return MPICall("all_reduce", [gather], [tensor], (sent, received), _folding(reduction, received, tensor))
    wire = computable(wire)
    steps: list[Step] = [
        ("Iallreduce", (MPI.IN_PLACE, number_buffer(chunk), OPS[reduction.wire_op])) for chunk in chunks_of(wire)
    ]
    return MPICall("all_reduce", steps, [tensor], (wire,), _finishing(reduction, wire, tensor, size))


def reduce(tensor: torch.Tensor, root: int, op: str, factor: Factor | None, rank: int, size: int) -> MPICall:
    reduction = plan_reduction(op, tensor.dtype)
    tensor = _data(tensor)
    wire = reduction.to_wire(tensor, factor)
    if buffers.folds(wire, size):
        sent, received = _parts(wire, size if rank == root else 0)
        gather: Step = ("Igather", (raw_buffer(sent), raw_buffer(received) if rank == root else None, root))
        fold = _folding(reduction, received, tensor) if rank == root else None
        return MPICall("reduce", [gather], [tensor], (sent, received), fold)
    wire = computable(wire)
    steps = [_reduce_step(chunk, chunk, root, rank, OPS[reduction.wire_op]) for chunk in chunks_of(wire)]
    finish = _finishing(reduction, wire, tensor, size) if rank == root else None
    return MPICall("reduce", steps, [tensor], (wire,), finish)


def all_gather_single(output: torch.Tensor, input: torch.Tensor, rank: int, size: int) -> MPICall:
    pair = plain_pair(input, output)
    if pair is not None and output.nbytes == input.nbytes * size:
        return MPICall("all_gather", [("Iallgather", pair)], [output], (output, input))
    _same_dtype("all_gather", output, input)
    if output.numel() != input.numel() * size:
        raise UsageError(
            f"all_gather of {input.numel()} elements from each of {size} ranks fills {input.numel() * size}, "
            f"but the output holds {output.numel()}"
        )
    output, input = _data(output), _data(input)
    received, sent = writable(output), readable(input)
    counts = [input.numel()] * size
    steps, sent = _all_gather_steps(sent, received, counts, rank)
    return MPICall("all_gather", steps, [output], (received, sent), _landing(received, output))


def all_gather(outputs: Sequence[torch.Tensor], input: torch.Tensor, rank: int, size: int) -> MPICall:
    """Into one tensor a rank; their sizes may differ."""
    _one_a_rank("all_gather", outputs, size)
    _same_dtype("all_gather", *outputs, input)
    if outputs[rank].numel() != input.numel():
        raise UsageError(
            f"all_gather sends {input.numel()} elements from rank {rank}, but the output for that rank "
            f"holds {outputs[rank].numel()}"
        )
    outputs, input = [_data(output) for output in outputs], _data(input)
    received = joint(outputs)
    counts = [output.numel() for output in outputs]
    steps, sent = _all_gather_steps(readable(input), received, counts, rank)
    return MPICall("all_gather", steps, outputs, (received, sent), partial(land_parts, received, outputs))


def _all_gather_steps(
    sent: torch.Tensor, received: torch.Tensor, counts: list[int], rank: int
) -> tuple[list[Step], torch.Tensor]:
    """The steps, and the memory that they send from."""
    if received.numel() > buffers.AT_ONCE:
        slots = received.view(-1).split(counts)
        ready(slots[rank].copy_(sent.view(-1)))
        return [step for root, slot in enumerate(slots) for step in _broadcast_steps(slot, root)], sent
    own_address = received.data_ptr() + sum(counts[:rank]) * received.itemsize
    in_place = sent.data_ptr() == own_address and sent.numel() > 0
    sent = sent if in_place else _apart(sent, received)
    given = MPI.IN_PLACE if in_place else raw_buffer(sent)
    if min(counts) == max(counts):
        return [("Iallgather", (given, raw_buffer(received)))], sent
    return [("Iallgatherv", (given, raw_parts(received, counts)))], sent


def gather_into(output: torch.Tensor | None, input: torch.Tensor, root: int) -> MPICall:
    """Equal sizes into one contiguous tensor, which the root alone has. Does not match `gather` on another rank."""
    sent = readable(_data(input))
    if output is None:
        return MPICall("gather", [("Igather", (raw_buffer(sent), None, root))], [], (sent,))
    received = writable(output)
    step = ("Igather", (raw_buffer(sent), raw_buffer(received), root))
    return MPICall("gather", [step], [output], (sent, received), _landing(received, output))


def scatter_from(output: torch.Tensor, chunks: Sequence[torch.Tensor] | torch.Tensor | None, root: int) -> MPICall:
    """Equal parts, which the root alone has, as a list or one tensor of them. Does not match `scatter` on another
    rank."""
    output = _data(output)
    received = writable(output)
    sent: tuple[torch.Tensor, ...] = ()
    if chunks is not None:
        sent_chunks = chunks if isinstance(chunks, torch.Tensor) else joined([_data(chunk) for chunk in chunks])
        sent = (_apart(readable(_data(sent_chunks)), received),)
    step = ("Iscatter", (raw_buffer(sent[0]) if sent else None, raw_buffer(received), root))
    return MPICall("scatter", [step], [output], (received, *sent), _landing(received, output))


def gather(outputs: Sequence[torch.Tensor], input: torch.Tensor, root: int, rank: int, size: int) -> MPICall:
    """`outputs` counts on the root only: one tensor a rank; their sizes may differ."""
    input = _data(input)
    sent = readable(input)
    if rank != root:
        return MPICall("gather", [("Igatherv", (raw_buffer(sent), None, root))], (), (sent,))
    _one_a_rank("gather", outputs, size)
    _same_dtype("gather", *outputs, input)
    outputs = [_data(output) for output in outputs]
    received = joint(outputs)
    sent = _apart(sent, received)
    into = raw_parts(received, [output.numel() for output in outputs])
    step = ("Igatherv", (raw_buffer(sent), into, root))
    return MPICall("gather", [step], outputs, (received, sent), partial(land_parts, received, outputs))


def scatter(output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, rank: int, size: int) -> MPICall:
    """`inputs` counts on the root only: one tensor a rank; their sizes may differ."""
    output = _data(output)
    received = writable(output)
    finish = _landing(received, output)
    if rank != root:
        return MPICall("scatter", [("Iscatterv", (None, raw_buffer(received), root))], [output], (received,), finish)
    _one_a_rank("scatter", inputs, size)
    _same_dtype("scatter", output, *inputs)
    sent = _apart(readable(joined([_data(input) for input in inputs])), received)
    of = raw_parts(sent, [input.numel() for input in inputs])
    return MPICall("scatter", [("Iscatterv", (of, raw_buffer(received), root))], [output], (received, sent), finish)


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: str, factor: Factor | None, rank: int, size: int
) -> MPICall:
    pair, reduction = plain_pair(input, output), plan_reduction(op, input.dtype)
    if pair is not None and reduction.is_plain and factor is None and input.nbytes == output.nbytes * size:
        (of, _), (into, _), number = *pair, NUMBERS[input.dtype]
        step = ("Ireduce_scatter_block", ((of, number), (into, number), OPS[op]))
        return MPICall("reduce_scatter", [step], [output], (output, input))
    _same_dtype("reduce_scatter", output, input)
    if input.numel() != output.numel() * size:
        raise UsageError(
            f"reduce_scatter over {size} ranks gives each of them 1/{size} of the input's {input.numel()} "
            f"elements, but the output holds {output.numel()}"
        )
    return _reduce_scatter(output, _data(input), [output.numel()] * size, op, factor, rank)


def reduce_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, factor: Factor | None, rank: int, size: int
) -> MPICall:
    """From one tensor a rank; their sizes may differ."""
    _one_a_rank("reduce_scatter", inputs, size)
    _same_dtype("reduce_scatter", output, *inputs)
    if inputs[rank].numel() != output.numel():
        raise UsageError(
            f"reduce_scatter gives rank {rank} {inputs[rank].numel()} elements, but its output holds {output.numel()}"
        )
    together = joined([_data(input) for input in inputs])
    return _reduce_scatter(output, together, [input.numel() for input in inputs], op, factor, rank)


def _reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, counts: list[int], op: str, factor: Factor | None, rank: int
) -> MPICall:
    reduction = plan_reduction(op, output.dtype)
    output = _data(output)
    wire = reduction.to_wire(input, factor)
    per_element = wire.numel() // max(1, sum(counts))  # 2 where complex numbers travel as reals
    counts = [count * per_element for count in counts]
    if buffers.folds(wire, 1):
        sent = readable(wire)
        received = ready(wire.new_empty((len(counts), counts[rank])))
        step = ("Ialltoallv", (raw_parts(sent, counts), raw_parts(received, [counts[rank]] * len(counts))))
        return MPICall("reduce_scatter", [step], [output], (received, sent), _folding(reduction, received, output))
    received = room_to_compute(reduction.landing(output))
    sent = _apart(computable(wire), received)
    mpi_op = OPS[reduction.wire_op]
    if sent.numel() > buffers.AT_ONCE:
        steps = _reduce_to_each(sent, received, counts, rank, mpi_op)
    elif min(counts) == max(counts):
        steps = [("Ireduce_scatter_block", (number_buffer(sent), number_buffer(received), mpi_op))]
    else:
        steps = [("Ireduce_scatter", (number_buffer(sent), number_buffer(received), counts, mpi_op))]
    finish = _finishing(reduction, received, output, len(counts))
    return MPICall("reduce_scatter", steps, [output], (received, sent), finish)


def _reduce_to_each(sent: torch.Tensor, received: torch.Tensor, counts: list[int], rank: int, op: MPI.Op) -> list[Step]:
    """A reduce-scatter too long for one call, as a reduce to one rank after the other."""
    steps = []
    for root, part in enumerate(sent.view(-1).split(counts)):
        into = list(chunks_of(received.view(-1))) if rank == root else list(chunks_of(part))
        for chunk, slot in zip(chunks_of(part), into, strict=True):
            steps.append(_reduce_step(chunk, slot, root, rank, op))
    return steps


def _reduce_step(chunk: torch.Tensor, slot: torch.Tensor, root: int, rank: int, op: MPI.Op) -> Step:
    if rank != root:
        return "Ireduce", (number_buffer(chunk), None, op, root)
    sent = MPI.IN_PLACE if chunk.data_ptr() == slot.data_ptr() else number_buffer(chunk)
    return "Ireduce", (sent, number_buffer(slot), op, root)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    size: int,
) -> MPICall:
    """Splits are lengths of dim 0, one a rank; empty for equal parts."""
    _same_dtype("all_to_all", output, input)
    output, input = _data(output), _data(input)
    output_counts = _split_counts("output", output, output_splits, size)
    input_counts = _split_counts("input", input, input_splits, size)
    received = writable(output)
    sent = _apart(readable(input), received)
    step = ("Ialltoallv", (raw_parts(sent, input_counts), raw_parts(received, output_counts)))
    return MPICall("all_to_all", [step], [output], (received, sent), _landing(received, output))


def all_to_all_even(output: torch.Tensor, input: torch.Tensor, size: int) -> MPICall:
    """Equal parts everywhere. Does not match `all_to_all_single` on another rank."""
    pair = plain_pair(input, output)
    if pair is not None and output.shape == input.shape and input.dim() and input.shape[0] % size == 0:
        return MPICall("all_to_all", [("Ialltoall", pair)], [output], (output, input))
    _same_dtype("all_to_all", output, input)
    output, input = _data(output), _data(input)
    if _split_counts("output", output, (), size) != _split_counts("input", input, (), size):
        raise UsageError(f"all_to_all without splits was given {input.numel()} elements for {output.numel()}")
    received = writable(output)
    sent = _apart(readable(input), received)
    if sent.numel() > buffers.AT_ONCE:
        return all_to_all_single(output, input, (), (), size)
    step = ("Ialltoall", (raw_buffer(sent), raw_buffer(received)))
    return MPICall("all_to_all", [step], [output], (received, sent), _landing(received, output))


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], size: int) -> MPICall:
    """From one tensor a rank into one tensor a rank; their sizes may differ."""
    _one_a_rank("all_to_all", outputs, size)
    _one_a_rank("all_to_all", inputs, size)
    _same_dtype("all_to_all", *outputs, *inputs)
    outputs = [_data(output) for output in outputs]
    received = joint(outputs)
    sent = _apart(readable(joined([_data(input) for input in inputs])), received)
    of = raw_parts(sent, [input.numel() for input in inputs])
    into = raw_parts(received, [output.numel() for output in outputs])
    memory = (received, sent)
    return MPICall("all_to_all", [("Ialltoallv", (of, into))], outputs, memory, partial(land_parts, received, outputs))


def send(tensor: torch.Tensor, to: int, tag: int) -> MPICall:
    memory = readable(_data(tensor))
    steps: list[Step] = [("Isend", (raw_buffer(chunk), to, tag)) for chunk in chunks_of(memory)]
    return MPICall("send", steps, [tensor], (memory,))


def receive(tensor: torch.Tensor, source: int, tag: int) -> MPICall:
    tensor = _data(tensor)
    memory = writable(tensor)
    steps: list[Step] = [("Irecv", (raw_buffer(chunk), source, tag)) for chunk in chunks_of(memory)]
    status = MPI.Status()

    def finish() -> None:
        count = status.Get_count(raw_buffer(memory)[1]) if len(steps) == 1 else memory.numel()
        if count != memory.numel():
            raise not_as_long(tensor, status)
        land(memory, tensor)

    return MPICall("recv", steps, [tensor], (memory,), finish, status)


def not_as_long(tensor: torch.Tensor, status: MPI.Status) -> MessageError:
    """What to raise for a message that does not fill the tensor it is for."""
    elements, rest = divmod(status.Get_count(MPI.BYTE), tensor.itemsize)
    return MessageError(
        f"recv expected {tensor.numel()} elements ({tensor.dtype}), but rank {status.Get_source()} "
        f"sent {elements}{' and a part of one' if rest else ''}"
    )


def together(name: str, calls: Sequence[MPICall]) -> MPICall:
    """Several calls as one."""
    finishes = [call.finish for call in calls if call.finish is not None]

    def finish() -> None:
        for one in finishes:
            one()

    return MPICall(
        name,
        [step for call in calls for step in call.steps],
        [output for call in calls for output in call.outputs],
        tuple(memory for call in calls for memory in call.memory),
        finish,
    )


def plain_pair(input: torch.Tensor, output: torch.Tensor) -> tuple[Buffer, Buffer] | None:
    """The common case in short: two CPU tensors that MPI can use as they are, as buffers; None for any other."""
    if not (is_plain(input) and is_plain(output)) or input.dtype != output.dtype:
        return None
    of, into, sent, received = input.data_ptr(), output.data_ptr(), input.nbytes, output.nbytes
    if (of < into + received and into < of + sent) or max(sent, received) > buffers.AT_ONCE:
        return None
    datatype = DATA_TYPES[input.itemsize]
    return (MPI.memory.fromaddress(of, sent), datatype), (MPI.memory.fromaddress(into, received), datatype)


def _finishing(reduction: Reduction, wire: torch.Tensor, tensor: torch.Tensor, size: int) -> Callable[[], None] | None:
    if reduction.is_plain and wire.data_ptr() == tensor.data_ptr():
        return None
    return partial(reduction.from_wire, wire, tensor, size)


def _parts(wire: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends of a reduction that is folded, and the memory for what it gets of `ranks` ranks."""
    return readable(wire), ready(wire.new_empty((ranks, wire.numel())))


def _folding(reduction: Reduction, parts: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
    def finish() -> None:
        reduction.from_wire(folded(parts.unbind(), reduction.wire_op), out, len(parts))

    return finish


def _landing(memory: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None] | None:
    return None if memory.data_ptr() == tensor.data_ptr() else partial(land, memory, tensor)


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _apart(sent: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    return ready(sent.clone()) if overlap(sent, received) else sent


def _split_counts(side: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise UsageError(
                f"all_to_all over {size} ranks cannot split {side} of length {length} equally; pass splits"
            )
        splits = [length // size] * size
    if len(splits) != size or sum(splits) != length:
        raise UsageError(f"all_to_all over {size} ranks was given {side} splits {list(splits)} for length {length}")
    row = prod(tensor.shape[1:])
    return [split * row for split in splits]


def _one_a_rank(name: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    if len(tensors) != size:
        raise UsageError(f"{name} over {size} ranks was given {len(tensors)} tensors; pass one for each rank")


def _same_dtype(name: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    for other in others:
        if other.dtype != first.dtype or other.device != first.device:
            raise UsageError(
                f"{name} was given tensors of {first.dtype} on {first.device} and of {other.dtype} on "
                f"{other.device}; they must be alike"
            )
