"""What can be read off a state. Every rank calls alike and gets the same answer, whatever the number of ranks.

state = simulate(circuit, weights, comm=comm)
probabilities(state, (0, 3))      samples(state, 1000, seed=7)      variances(state, ["Z0 Z1"])
density(state, (2, 5))            amplitudes(state, ["0000", "1111"])      fidelity(state, other)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import shown
from unisono.quantum.circuit.circuit import Circuit, require_circuit
from unisono.quantum.circuit.gates import PAULIS
from unisono.quantum.circuit.parameter import in_order, is_index, require_seed
from unisono.quantum.distributed.local_steps import local_exchange
from unisono.quantum.kernels.reference import block
from unisono.quantum.observables.application import applied, inner
from unisono.quantum.observables.expectation import pauli_values
from unisono.quantum.observables.observable import observables
from unisono.quantum.schedule.step import Exchange
from unisono.quantum.state import NORM_TOLERANCE, State, full_vector, require_state, sampled

MOST_PROBABILITIES = 26  # wires
MOST_DENSITY = 10  # wires
_MOST_SHOTS = 1 << 31
_PART = 22  # bits of a part of the state that is looked at in one go
_FIRST, _NEXT = 16, 8  # wires that are sampled together: at first, and then for each outcome so far


def simulate(
    circuit: Circuit,
    weights: Any = (),
    features: Any = (),
    *,
    comm: Communicator | None = None,
    dtype: torch.dtype = torch.complex128,
    **options: Any,
) -> State:
    """The state that the circuit makes of |0...0>, sharded over ranks.

    Args:
        circuit: The circuit.
        weights: Values of its weights.
        features: Values of its features.
        comm: The ranks that share the state.
        dtype: Of amplitudes.
        **options: Those of State.
    """
    given = require_circuit(circuit, "simulate").check_values(weights, features)
    return State(circuit.wires, comm, dtype=dtype, **options).run(circuit, *given)


def variances(state: State, of: Any) -> torch.Tensor:
    """<(O - <O>)^2> of one or several observables, float64."""
    found = []
    chosen = [each.check(require_state(state, "variances").wires) for each in observables(of)]
    weight = state.norm() ** 2
    for each in chosen:
        made = applied(state, each)
        mean = inner(state, made).real / weight
        made.local.add_(state.local, alpha=-mean)  # ||(O - <O>) psi||^2: no difference of large numbers
        found.append(made.norm() ** 2)
    return torch.tensor(found, dtype=torch.float64)


def probabilities(state: State, wires: Sequence[int] | int | None = None) -> torch.Tensor:
    """The probability of each reading of these wires (default: all), float64, the first wire most significant."""
    chosen = checked_wires(require_state(state, "probabilities").wires, wires, MOST_PROBABILITIES)
    return state.total(_marginal(state, chosen, {})).cpu()


def samples(state: State, shots: int, *, seed: int = 0, wires: Sequence[int] | None = None) -> torch.Tensor:
    """Readings of wires, uint8, (shots, wires). The state is not changed.

    Wires are drawn in the order given, a few at a time, each group given the bits before it.

    Args:
        state: The state.
        shots: How many readings.
        seed: Of the readings.
        wires: Which; default: all.
    """
    chosen = checked_wires(require_state(state, "samples").wires, wires, state.wires)
    shots = require_shots(shots)
    draws = np.random.default_rng(require_seed(seed))
    return samples_from(state, shots, chosen, lambda: draws.random(shots))


def samples_from(state: State, shots: int, chosen: Sequence[int], uniforms: Callable[[], np.ndarray]) -> torch.Tensor:
    """The same from uniform numbers, one for each shot whenever they are asked for."""
    read = np.zeros((shots, len(chosen)), dtype=np.uint8)
    for start, stop in _groups(len(chosen)):
        uniform = uniforms()
        before, which = np.unique(read[:, :start], axis=0, return_inverse=True)
        which = which.reshape(-1)
        picks = np.zeros(shots, dtype=np.int64)
        per_batch = max(1, 1 << (_PART - (stop - start)))
        for first in range(0, len(before), per_batch):
            known = [dict(zip(chosen[:start], row.tolist(), strict=True)) for row in before[first : first + per_batch]]
            tables = state.total(torch.stack([_marginal(state, chosen[start:stop], fixed) for fixed in known]))
            for number, table in enumerate(tables.cpu().numpy(), start=first):
                shots_here = np.flatnonzero(which == number)
                picks[shots_here] = sampled(table, uniform[shots_here])
        picks = state.agreed(picks)  # sums may differ in the last bit between ranks; readings must not
        for at in range(start, stop):
            read[:, at] = picks >> (stop - 1 - at) & 1
    return torch.from_numpy(read)


def counts(read: torch.Tensor) -> dict[str, int]:
    """How often each string of bits was read, the most frequent first."""
    try:
        table = np.asarray(read.detach().cpu() if isinstance(read, torch.Tensor) else read)
    except ValueError as error:
        raise UsageError(f"counts: expected bits, (shots, wires), as samples gives ({error})") from None
    if table.ndim != 2 or table.dtype.kind not in "uib" or not np.isin(table, (0, 1)).all():
        raise UsageError(
            f"counts of {table.dtype} numbers of shape {table.shape}: expected bits, (shots, wires), as samples gives"
        )
    rows, times = np.unique(table.astype(np.uint8), axis=0, return_counts=True)
    found = {"".join(map(str, row)): int(number) for row, number in zip(rows.tolist(), times, strict=True)}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def amplitudes(state: State, strings: Sequence[str]) -> torch.Tensor:
    """The amplitudes of basis states such as "0110", wire 0 first."""
    require_state(state, "amplitudes")
    if isinstance(strings, str) or not isinstance(strings, Sequence):
        raise UsageError(f"basis states {strings!r}: expected a list of strings such as {'0' * state.wires!r}")
    found = torch.zeros(len(strings), dtype=torch.complex128, device=state.device)
    for number, bits in enumerate(strings):
        if not isinstance(bits, str) or len(bits) != state.wires or set(bits) - {"0", "1"}:
            raise UsageError(f"basis state {bits!r}: expected {state.wires} characters 0 or 1")
        index = 0
        for wire in state.layout:
            index = index << 1 | int(bits[wire])
        axes = state.wires - state.global_qubits
        if index >> axes == int(state.index_map.table[state.rank]):
            found[number] = state.local[index & ((1 << axes) - 1)]
    return torch.view_as_complex(state.total(torch.view_as_real(found))).to(state.dtype).cpu()


def density(state: State, wires: Sequence[int]) -> torch.Tensor:
    """The reduced density matrix of a few wires, complex128, the first wire most significant."""
    chosen = checked_wires(require_state(state, "density").wires, wires, MOST_DENSITY)
    if len(chosen) > state.wires - state.global_qubits:
        return _density_from_pauli_strings(state, chosen)
    with _local(state, chosen):
        total = torch.zeros((1 << len(chosen),) * 2, dtype=torch.complex128, device=state.device)
        for part, _, free in _parts(state, {}, full=chosen):
            rest = [wire for wire in free if wire not in chosen]
            matrix = _permuted(part, [free.index(wire) for wire in (*chosen, *rest)]).view(1 << len(chosen), -1)
            total += matrix.to(torch.complex128) @ matrix.to(torch.complex128).conj().T
    return torch.view_as_complex(state.total(torch.view_as_real(total))).cpu()


def shard(state: State) -> torch.Tensor:
    """This rank's share of all amplitudes in the order of wires: rank r has the r-th of equal consecutive chunks.

    (`state.local` is in the layout that the circuit left; `state.amplitudes()` gathers all of it on every rank.)"""
    with _local(require_state(state, "shard"), range(state.global_qubits, state.wires)):
        order = [state.layout.index(wire) - state.global_qubits for wire in range(state.global_qubits, state.wires)]
        mine = _permuted(state.local, order)
        if state.comm is None:
            return mine
        target = [_ordered(state, int(index)) for index in state.index_map.table]
        received = torch.empty_like(mine)
        if target[state.rank] == state.rank:
            return mine
        state.comm.exchange([(mine, target[state.rank])], [(received, target.index(state.rank))])
        return received


def overlap(left: State, right: State | torch.Tensor | np.ndarray) -> complex:
    """<left|right>; `right` may be all amplitudes in the order of wires, given alike on every rank."""
    if not isinstance(left, State):
        raise UsageError(f"overlap of {shown(left)}: expected a State first; a vector may come second")
    if isinstance(right, State):
        if (right.wires, right.global_qubits) != (left.wires, left.global_qubits):
            raise UsageError(
                f"states of {left.wires} and {right.wires} wires on {1 << left.global_qubits} and "
                f"{1 << right.global_qubits} ranks: expected alike"
            )
        if left.layout == right.layout and np.array_equal(left.index_map.table, right.index_map.table):
            return inner(left, right)
        theirs = shard(right)
    else:
        right = full_vector(right, left.wires)
        size = 1 << (left.wires - left.global_qubits)
        theirs = right[left.rank * size : (left.rank + 1) * size].to(left.device)
    product_ = torch.vdot(shard(left).to(torch.complex128), theirs.to(torch.complex128))
    return complex(*left.total(torch.view_as_real(product_).clone()).tolist())


def fidelity(left: State, right: State | torch.Tensor | np.ndarray) -> float:
    """|<left|right>|^2 of states of norm one."""
    if isinstance(left, State) and not isinstance(right, State):
        norm = float(torch.linalg.vector_norm(full_vector(right, left.wires).to(torch.complex128)))
        if not abs(norm - 1) <= NORM_TOLERANCE:
            raise UsageError(f"fidelity with amplitudes of norm {norm:.6g}: expected 1; uq.overlap takes any")
    return abs(overlap(left, right)) ** 2


# ---- inside ---------------------------------------------------------------------------------------------------------


def require_shots(shots: int) -> int:
    if not is_index(shots) or not 0 <= shots < _MOST_SHOTS:
        raise UsageError(f"{shots!r} shots: expected a whole number of 0 to {_MOST_SHOTS - 1}")
    return int(shots)


def checked_wires(count: int, wires: Sequence[int] | int | None, most: int) -> tuple[int, ...]:
    try:
        given: Any = range(count) if wires is None else (wires,) if is_index(wires) else wires
        chosen = in_order(given)
    except TypeError:
        raise UsageError(f"wires {wires!r}: expected one wire or several") from None
    bad = [wire for wire in chosen if not is_index(wire) or not 0 <= wire < count]
    if bad or len({int(wire) for wire in chosen}) != len(chosen):
        raise UsageError(f"wires {chosen}: expected different wires of 0 to {count - 1}")
    if len(chosen) > most:
        raise UsageError(f"{len(chosen)} wires at once: at most {most} can be read so; name fewer")
    return tuple(int(wire) for wire in chosen)


def _groups(wires: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < wires:
        stop = min(wires, start + (_NEXT if start else _FIRST))
        yield start, stop
        start = stop


def _marginal(state: State, wires: Sequence[int], fixed: Mapping[int, int]) -> torch.Tensor:
    """This rank's part of the probabilities of `wires` together with the fixed bits."""
    out = torch.zeros((2,) * len(wires), dtype=torch.float64, device=state.device)
    values = {wire: state.value(wire) for wire in state.layout[: state.global_qubits]}
    if all(values.get(wire, bit) == bit for wire, bit in fixed.items()):
        for part, known, free in _parts(state, {**values, **fixed}):
            chances = part.real.double() ** 2 + part.imag.double() ** 2
            totals = _summed(chances, [wire in wires for wire in free])
            kept = [wire for wire in free if wire in wires]
            index = tuple(known.get(wire, slice(None)) for wire in wires)
            out[index] += totals.view((2,) * len(kept)).permute([kept.index(wire) for wire in wires if wire in kept])
    return out.view(-1)


def _parts(
    state: State, known: Mapping[int, int], full: Sequence[int] = ()
) -> Iterator[tuple[torch.Tensor, dict[int, int], list[int]]]:
    """The local amplitudes where known wires have their bits, in parts of bounded size, not split along `full`.

    With each part come all bits that are known of it and the wires that are its axes."""
    free = [wire for wire in state.layout[state.global_qubits :] if wire not in known]
    split = [wire for wire in free if wire not in full][: max(0, len(free) - _PART)]
    axes = [axis for axis, wire in enumerate(state.layout[state.global_qubits :]) if wire in known or wire in split]
    for bits in product((0, 1), repeat=len(split)):
        all_known = {**known, **dict(zip(split, bits, strict=True))}
        index = 0
        for axis in axes:
            index = index << 1 | all_known[state.layout[state.global_qubits + axis]]
        part = block(state.local, axes, index) if axes else state.local
        yield part.reshape(-1), all_known, [wire for wire in free if wire not in split]


def _summed(values: torch.Tensor, kept: Sequence[bool]) -> torch.Tensor:
    """Sum over the bits that are not kept; runs of like bits are one dimension."""
    shape: list[int] = []
    sums: list[int] = []
    last: bool | None = None
    for keep in kept:
        if keep is last:
            shape[-1] *= 2
        else:
            sums += [] if keep else [len(shape)]
            shape.append(2)
        last = keep
    return values.view(shape).sum(sums).reshape(-1) if sums else values


def _density_from_pauli_strings(state: State, wires: Sequence[int]) -> torch.Tensor:
    """For states whose ranks have fewer wires than are asked for: from the values of all Pauli strings."""
    paulis = [*product("IXYZ", repeat=len(wires))]
    pauli_strings = [tuple(sorted((w, c) for w, c in zip(wires, each, strict=True) if c != "I")) for each in paulis]
    values = pauli_values(state, pauli_strings).tolist()
    total: Any = 0
    for each, value in zip(paulis, values, strict=True):
        total = total + value * reduce(np.kron, [PAULIS[pauli] for pauli in each])  # type: ignore[arg-type]
    return torch.from_numpy(total / 2 ** len(wires))


@contextmanager
def _local(state: State, wires: Sequence[int]) -> Iterator[None]:
    """Within, all of `wires` are local; afterwards the layout is what it was."""
    wanted, before = set(wires), state.layout
    leave = [position for position in range(state.global_qubits) if state.layout[position] in wanted]
    spare = [position for position in range(state.global_qubits, state.wires) if state.layout[position] not in wanted]
    if not leave:
        yield
        return
    exchange = Exchange(tuple(spare[: len(leave)]), tuple(leave))
    layout = list(before)
    for give, take in zip(exchange.give, exchange.take, strict=True):
        layout[give], layout[take] = layout[take], layout[give]
    state.exchange(local_exchange(exchange, state.index_map, state.rank))
    state.layout = tuple(layout)
    try:
        yield
    finally:
        state.exchange(local_exchange(exchange, state.index_map, state.rank))
        state.layout = before


def _permuted(amplitudes: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A copy with axis order[i] as axis i; neighbours that stay neighbours move as one."""
    if list(order) == sorted(order):
        return amplitudes.clone()
    runs: list[list[int]] = []
    for axis in order:
        if runs and axis == runs[-1][-1] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    by_axis = sorted(runs)
    shape = [1 << len(run) for run in by_axis]
    return amplitudes.view(shape).permute([by_axis.index(run) for run in runs]).reshape(-1)


def _ordered(state: State, global_index: int) -> int:
    """The global index with its bits in the order of wires."""
    bits = {
        wire: global_index >> (state.global_qubits - 1 - at) & 1
        for at, wire in enumerate(state.layout[: state.global_qubits])
    }
    index = 0
    for wire in sorted(bits):
        index = index << 1 | bits[wire]
    return index
