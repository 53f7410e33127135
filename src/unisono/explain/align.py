"""Alignment: the record of a rank under a plan beside the record of one device.

Ops are joined on (module path, function, nth call). Calls that unisono's own layers make stand for the model's call of
the same name, if there is none of the model itself; those that stand for nothing are left out. How an activation is
sharded follows from its local shape and its full shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from unisono.comm.traffic import received_bytes
from unisono.explain.record import BACKWARD, FORWARD, UPDATE, Communication, RankRecord, RecordedCall, TensorType
from unisono.graph.render.listing import CollectiveStep, ListedOp, Listing, tensor_text
from unisono.mesh.mesh import Mesh

_MESSAGES = {"send", "recv"}
_PURPOSES = {  # by the module of unisono that communicates
    "gradient_norm": "norm of the gradients",
    "tied": "gradients of tied parameters",
    "loss": "loss",
    "trainer": "loss",
    "runtime": "loss",
    "counts": "elements that the loss counts",
    "normalizers": "elements that the loss counts",
    "loss_scale": "whether gradients are finite",
}


def aligned(serial: RankRecord, local: RankRecord, mesh: Mesh, rank: int, *, all_stages: bool = True) -> Listing:
    """The listing of a rank. all_stages: whether the rank runs the model from its first op to its last."""
    listing = Listing(mesh, rank)
    forward = [op for op in local.ops if op.phase == FORWARD]
    pairs = matched(serial.ops, forward)
    by_local = {number: op for op, number in pairs.items()}
    listing.lines, line_of, line_of_message = _lines(serial, local, forward, by_local, all_stages)
    _attach(listing, local, line_of, line_of_message)
    listing.order = local.order
    listing.about = _totals(local)
    return listing


def matched(serial: Sequence[RecordedCall], local: Sequence[RecordedCall]) -> dict[int, int]:
    """Serial ops, by number, and the local op that does the same."""
    found: dict[int, int] = {}
    taken: set[int] = set()
    for are_internal in (False, True):
        numbers = {(op.path, op.function, op.nth): n for n, op in enumerate(local) if op.is_internal == are_internal}
        for number, op in enumerate(serial):
            there = numbers.get((op.path, op.function, op.nth))
            if number not in found and there is not None and there not in taken:
                found[number] = there
                taken.add(there)
    return found


def _lines(
    serial: RankRecord, local: RankRecord, forward: Sequence[RecordedCall], by_local: dict[int, int], all_stages: bool
) -> tuple[list[ListedOp], dict[int, int], dict[int, int]]:
    """The lines, and the line that each local op, and each communication, is shown in."""
    lines: list[ListedOp] = []
    line_of: dict[int, int] = {}
    line_of_message: dict[int, int] = {}
    of_one_device = serial.ops
    waiting: list[int] = []  # ops of unisono's own since the last line
    messages = [
        (index, each) for index, each in enumerate(local.communication) if each.phase == FORWARD and not each.microbatch
    ]
    next_message, next_serial = 0, 0
    numbers = {each: itertools.count(1) for each in {message.kind for _, message in messages}}
    for number in range(len(forward) + 1):
        while next_message < len(messages) and (messages[next_message][1].op or 0) <= number:
            index, message = messages[next_message]
            line_of_message[index] = len(lines)
            lines.append(_line_of_message(message, f"{message.kind}_{next(numbers[message.kind])}"))
            next_message += 1
        if number == len(forward):
            break
        op = forward[number]
        waiting.append(number)
        if number not in by_local and op.is_internal:
            continue
        there = by_local.get(number)
        if all_stages and there is not None:
            for missing in range(next_serial, there):
                if missing not in by_local.values() and not of_one_device[missing].is_internal:
                    lines.append(_line(of_one_device[missing], None))
            next_serial = max(next_serial, there + 1)
        line_of.update((each, len(lines)) for each in waiting)
        waiting = []
        lines.append(_line(None if there is None else of_one_device[there], op, is_again=op.name in local.recomputed))
    line_of.update((each, max(len(lines) - 1, 0)) for each in waiting)
    return lines, line_of, line_of_message


def _line(serial: RecordedCall | None, local: RecordedCall | None, is_again: bool = False) -> ListedOp:
    shown = serial or local
    assert shown is not None
    words = f"{shown.name} = {shown.function}({', '.join(shown.arguments)})"
    here = words if serial is None or local is None else f"{shown.name} = {shown.function}({_here(serial, local)})"
    note = "runs again in the backward (recompute)" if is_again else ""
    if local is None:
        note = "computed by unisono in other ops"
    return ListedOp(
        name=shown.name,
        serial=words if serial is not None else "",
        serial_shapes="" if serial is None else _types(serial),
        distributed=here,
        local_shapes="" if local is None else _types(local),
        placements="",
        strategy="" if serial is None or local is None else _sharding(serial.outputs, local.outputs),
        path=shown.path,
        source=shown.source,
        note=note,
        uses=tuple(word.partition("[")[0] for word in shown.arguments),
    )


def _here(serial: RecordedCall, local: RecordedCall) -> str:
    """The arguments of the local call, its tensors by the names that they have on one device."""
    if len(serial.arguments) != len(local.arguments):
        return ", ".join(serial.arguments)
    both = zip(serial.arguments, local.arguments, serial.tensors, strict=True)
    return ", ".join(theirs if is_tensor else ours for theirs, ours, is_tensor in both)


def _types(op: RecordedCall) -> str:
    inputs, outputs = (" ".join(tensor_text(each.dtype, each.shape) for each in of) for of in (op.inputs, op.outputs))
    return f"{inputs} -> {outputs}".strip()


def _sharding(full: Sequence[TensorType], local: Sequence[TensorType]) -> str:
    """(2,1,1): into how many shards each dim of the first result is split; 37/19 where they are not equal."""
    if not full or not local or len(full[0].shape) != len(local[0].shape):
        return ""
    sizes = zip(full[0].shape, local[0].shape, strict=True)
    words = [
        f"{full_value // part}" if part and full_value % part == 0 else f"{full_value}/{part}"
        for full_value, part in sizes
    ]
    return f"({','.join(words)})"


def _line_of_message(message: Communication, name: str) -> ListedOp:
    shape = "" if message.tensor is None else tensor_text(message.tensor.dtype, message.tensor.shape)
    ends = {"send": f" to rank {message.ranks[0]}", "recv": f" from rank {message.ranks[0]}"}.get(message.kind, "")
    return ListedOp(
        name, "", "", f"{message.kind}{ends}", shape, "", "", message.path, "", forward=(_collective(message),),
    )  # fmt: skip


def _collective(message: Communication) -> CollectiveStep:
    detail = _PURPOSES.get(message.caller, "")
    if not detail and message.phase != FORWARD and message.op is None and message.twin is None:
        detail = "parameters" if message.kind == "all_gather" else "gradients"
    if message.parameter and detail == "gradients":
        detail += f", the last is that of {message.parameter}"
    shape = () if message.tensor is None else message.tensor.shape
    size = 0 if message.tensor is None else message.tensor.bytes
    count = len(message.ranks)
    after = shape
    if shape and message.kind == "all_gather":
        after = (shape[0] * count, *shape[1:])
    elif shape and message.kind == "reduce_scatter":
        after = (shape[0] // count, *shape[1:])
    return CollectiveStep(
        message.kind, (), message.ranks, received_bytes(message.kind, count, size), shape, after, detail,
        message.kind in _MESSAGES or count > 1,
    )  # fmt: skip


def _attach(listing: Listing, local: RankRecord, line_of: dict[int, int], line_of_message: dict[int, int]) -> None:
    """Collectives of the backward beside the ops that they belong to; those of gradients and of the update apart."""
    behind: dict[int, list[CollectiveStep]] = {}
    for message in local.communication:
        if message.phase == BACKWARD and message.twin is not None:
            if message.twin in line_of_message:
                behind.setdefault(line_of_message[message.twin], []).append(_collective(message))
        elif message.phase == BACKWARD and message.op is not None:
            if not message.microbatch:
                behind.setdefault(_line_near(message, local, line_of), []).append(_collective(message))
        elif message.phase == BACKWARD:
            listing.sums.append(_collective(message))
        elif message.phase == UPDATE:
            listing.updates.append(_collective(message))
    for number, collectives in behind.items():
        listing.lines[number] = replace(listing.lines[number], backward=tuple(collectives))
    axes = {collective.ranks: _axes(listing.mesh, listing.rank, collective) for collective in _all(listing)}

    def placed(collectives: Sequence[CollectiveStep]) -> list[CollectiveStep]:
        return [replace(collective, axes=axes[collective.ranks]) for collective in collectives]

    listing.lines = [
        replace(line, forward=tuple(placed(line.forward)), backward=tuple(placed(line.backward)))
        for line in listing.lines
    ]
    listing.sums, listing.updates = placed(listing.sums), placed(listing.updates)


def _line_near(message: Communication, local: RankRecord, line_of: dict[int, int]) -> int:
    """The line of the op that a collective of the backward belongs to: of its module, where only that is known."""
    assert message.op is not None
    shown = {line: number for number, line in sorted(line_of.items())}  # the last op of each line
    if message.near is not None:
        ops = local.ops
        of_module = [line for line, number in shown.items() if ops[number].path == message.near]
        if of_module:
            return min(of_module, key=lambda line: abs(shown[line] - (message.op or 0)))
    return line_of[min(message.op, max(line_of))]


def _all(listing: Listing) -> list[CollectiveStep]:
    return [
        *(collective for line in listing.lines for collective in (*line.forward, *line.backward)),
        *listing.sums,
        *listing.updates,
    ]


def _axes(mesh: Mesh, rank: int, collective: CollectiveStep) -> tuple[str, ...]:
    """The fewest axes of the mesh that these ranks are along."""
    if collective.kind in _MESSAGES:
        pairs = zip(mesh.names, mesh.coordinate(rank), mesh.coordinate(collective.ranks[0]), strict=True)
        return tuple(name for name, here, there in pairs if here != there)
    several = [name for name in mesh.names if mesh.size(name) > 1]
    for count in range(1, len(several) + 1):
        for names in itertools.combinations(several, count):
            if sorted(mesh.along(*names, rank=rank)) == sorted(collective.ranks):
                return names
    return ()


def _totals(local: RankRecord) -> list[str]:
    """What the full step communicates, where it has several microbatches: lines show the first."""
    microbatches = 1 + max((each.microbatch for each in local.communication), default=0)
    if microbatches == 1:
        return []
    kinds: dict[str, int] = {}
    for each in local.communication:
        kinds[each.kind] = kinds.get(each.kind, 0) + 1
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return [f"lines show the first of {microbatches} microbatches; in the full step: {listed}"]
