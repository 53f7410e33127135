"""A state vector sharded over ranks.

state = State(28, comm)                     # |0...0>
state.run(circuit, weights)                 # scheduled, exchanged, applied
state.amplitudes()                          # the full vector, on every rank, in the order of wires
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unisono.comm.communicator import Communicator
from unisono.errors import UsageError
from unisono.quantum.arguments import require_comm, require_device, require_dtype, shown
from unisono.quantum.circuit.channels import Superoperator
from unisono.quantum.circuit.circuit import MOST, Circuit, require_circuit
from unisono.quantum.circuit.parameter import finite_vector, is_index, require_seed
from unisono.quantum.distributed.exchange import DEFAULT_CHUNK, borrow, chunks, exchange_blocks, summed
from unisono.quantum.distributed.global_index_map import GlobalIndexMap
from unisono.quantum.distributed.local_steps import (
    Conditional,
    Kraus,
    LocalExchange,
    LocalOperations,
    LocalStep,
    Measure,
    require_finished,
)
from unisono.quantum.distributed.memory import require_room, zeros
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.kernels.reference import apply_matrix, block
from unisono.quantum.kernels.runner import require_kernel
from unisono.quantum.schedule.schedule import Schedule

NORM_TOLERANCE = 1e-3  # of amplitudes that come from outside
DRIFT = {torch.complex64: 1e-3, torch.complex128: 1e-9}  # of the norm, before it is an error
_LARGEST_GATHERED = 30  # wires


class NormError(ArithmeticError):
    """The state's norm is not what it was: amplitudes were damaged, or an operation is not unitary."""


class State:
    """2^wires amplitudes over the 2^global_qubits ranks of `comm` (None: all here).

    `local` are this rank's; `layout[p]` is the wire at position p: the first `global_qubits` positions are global
    qubits, whose bits on each rank are in `index_map`; the others are the axes of `local`. All ranks call every method
    alike."""

    def __init__(
        self,
        wires: int,
        comm: Communicator | None = None,
        *,
        dtype: torch.dtype = torch.complex128,
        device: torch.device | str | None = None,
        chunk: int = DEFAULT_CHUNK,
        kernel: str = "auto",
        seed: int = 0,
    ) -> None:
        require_dtype(dtype)
        require_kernel(kernel)
        if not is_index(wires) or not 1 <= wires <= MOST:
            raise UsageError(f"State({wires!r}): expected a number of wires of 1 or more")
        if not is_index(chunk) or chunk < 1:
            raise UsageError(f"chunk={chunk!r}: expected bytes of buffers for exchanges, 1 or more")
        size = 1 if require_comm(comm) is None else comm.size  # type: ignore[union-attr]
        wires, seed = int(wires), require_seed(seed)
        self.wires = wires
        self.global_qubits = size.bit_length() - 1
        if size != 1 << self.global_qubits or self.global_qubits > wires:
            raise UsageError(
                f"{size} ranks for a state of {wires} wires: expected a power of two of at most {2**wires}; "
                "uq.share(comm, wires) gives a group that fits"
            )
        self.comm = comm if size > 1 else None
        self.rank = comm.rank if comm is not None else 0
        self.device = device_of(comm, device)
        self.chunk = chunk
        self.kernel = kernel
        self.bits: dict[int, int] = {}
        require_room(wires, self.global_qubits, dtype, self.device, chunk, self.comm)
        self.local = zeros(1 << (wires - self.global_qubits), dtype, self.device)
        self.layout: tuple[int, ...] = tuple(range(wires))
        self.index_map = GlobalIndexMap(self.global_qubits)
        self.draws = np.random.default_rng(seed)
        self._begin(self.layout, [np.array([1, 0])] * wires)
        self.fresh = True

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    # ---- running ------------------------------------------------------------------------------------------------

    def schedule(self, circuit: Circuit, *, nodes: int | None = None) -> Schedule:
        """The schedule of a circuit from this state: free to choose the layout while the state is still |0...0>."""
        if require_circuit(circuit, "schedule").wires != self.wires:
            raise UsageError(f"a circuit of {circuit.wires} wires for a state of {self.wires}")
        start = None if self.fresh else self.layout
        chosen = nodes_of(self.comm) if nodes is None else nodes
        return Schedule.of(circuit, 1 << self.global_qubits, nodes=chosen, start=start)

    def run(self, circuit: Circuit | Schedule | QuantumProgram, weights: Any = (), features: Any = ()) -> State:
        """Run a circuit, or a schedule or program made before for a state like this one."""
        if not isinstance(circuit, Circuit | Schedule | QuantumProgram):
            raise UsageError(f"run of a {type(circuit).__name__}: expected a Circuit, or its Schedule or Program")
        if isinstance(circuit, Circuit):
            weights, features = circuit.check_values(weights, features)
            circuit = circuit.with_strengths(weights, features)
            weights, features = weights[: circuit.weights], features[: circuit.features]
            circuit = self.schedule(circuit)
        if isinstance(circuit, Schedule):
            circuit = QuantumProgram.of(circuit, self.rank, None if self.fresh else self.index_map)
        weights = finite_vector("weights", weights, circuit.schedule.weights, copy=False)
        features = finite_vector("features", features, circuit.schedule.features, copy=False)
        circuit.prepare(self.wires - self.global_qubits, self.dtype, self.device, self.kernel)
        self.begin(circuit.schedule)
        for step in circuit.steps:
            self.do(step, weights, features)
        self.layout = circuit.schedule.finish
        self.index_map = circuit.index_map.copy()
        return self

    def begin(self, schedule: Schedule) -> None:
        """Take the layout, and the product state, that a schedule begins with."""
        if not isinstance(schedule, Schedule):
            raise UsageError(f"begin of a {type(schedule).__name__}: expected a Schedule")
        if self.fresh:
            self._begin(schedule.start, [_prepared(gates) for gates in schedule.prepare])
            self.fresh = False
        elif schedule.start != self.layout or any(schedule.prepare):
            raise UsageError(
                "the schedule begins with another layout than the state has; make it with state.schedule()"
            )

    def do(self, step: LocalStep, weights: Any = (), features: Any = ()) -> None:
        """One step of a program."""
        if isinstance(step, LocalOperations):
            self.apply(step, weights, features)
        elif isinstance(step, LocalExchange):
            self.exchange(step)
        elif isinstance(step, Measure | Kraus):
            if self.holds(step.condition):
                require_finished(step)
                weights_ = self.outcomes(step)
                outcome = int(self.agreed(drawn(weights_, self.draws.random(1)))[0])
                self.collapse(step, outcome, weights_[outcome])
        elif isinstance(step, Conditional):
            if self.holds(step.operation.condition):
                self.apply(LocalOperations((replace(step.operation, condition=()),)), weights, features)
        else:
            raise UsageError(f"do of {shown(step)}: expected a step of a Program, or state.run(circuit)")

    def apply(self, run: LocalOperations, weights: Any = (), features: Any = ()) -> None:
        """Operations on local axes, with this state's kernel."""
        if not isinstance(run, LocalOperations):
            raise UsageError(f"apply of {shown(run)}: expected a Run of a Program, or state.run(circuit)")
        if run.has_strengths:
            for each in run.operations:
                apply_matrix(self.local, each.targets, each.matrix(each.angles(weights, features)))
        else:
            make = run.runner(self.wires - self.global_qubits, self.dtype, self.device, self.kernel)
            make(self.local, weights, features)
        if self.comm is not None and any(isinstance(each.gate, Superoperator) for each in run.operations):
            self.norm_expected = self.norm()

    def exchange(self, step: LocalExchange) -> None:
        """Exchange blocks with other ranks; the norm must stay the same."""
        if not isinstance(step, LocalExchange):
            raise UsageError(f"exchange of {shown(step)}: expected a LocalExchange, a step of a Program")
        if self.comm is None:
            return
        exchange_blocks(self.local, step, self.comm, self.chunk)
        norm = summed(squares(self.local), self.comm) ** 0.5
        if not abs(norm - self.norm_expected) <= DRIFT[self.dtype] * self.norm_expected:
            raise NormError(
                f"after an exchange the norm is {norm:.12g}, but it was {self.norm_expected:.12g}: a gate is not "
                "unitary, or amplitudes were damaged on the way"
            )

    def partner_chunks(self, flip: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The amplitudes of the rank whose global index differs by `flip`, a chunk at a time, with each chunk's offset.

        A chunk is only there until the next is asked for, and all of them must be."""
        partner = self.index_map.rank_of(int(self.index_map.table[self.rank]) ^ flip)
        if flip and self.comm is not None:
            return borrow(self.local, partner, self.comm, self.chunk)
        return chunks(self.local, self.chunk if self.device.type == "cuda" else 4 * self.local.nbytes)

    # ---- looking ------------------------------------------------------------------------------------------------

    def axis(self, wire: int) -> int | None:
        """The axis of `local` that a wire is, or None where ranks hold it."""
        position = self._position(wire)
        return position - self.global_qubits if position >= self.global_qubits else None

    def value(self, wire: int) -> int:
        """This rank's bit of a wire that ranks hold."""
        position = self._position(wire)
        if position >= self.global_qubits:
            raise UsageError(f"wire {wire} is an axis of this rank's amplitudes; state.axis({wire}) is its number")
        return self.index_map.bit(self.rank, position)

    def _position(self, wire: int) -> int:
        if not is_index(wire) or not 0 <= wire < self.wires:
            raise UsageError(f"wire {wire!r}: the state has wires 0 to {self.wires - 1}")
        return self.layout.index(wire)

    def norm(self) -> float:
        return float(self.total(squares(self.local))) ** 0.5

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank."""
        if self.comm is not None:
            self.comm.all_reduce(value)
        return value

    def amplitudes(self) -> torch.Tensor:
        """All amplitudes in the order of wires, on every rank: for states that fit one."""
        if self.wires > _LARGEST_GATHERED:
            raise UsageError(f"{self.wires} wires: at most {_LARGEST_GATHERED} are gathered; read `local` on each rank")
        parts = [self.local] if self.comm is None else self.comm.all_gather(self.local)
        full = torch.empty((1 << self.global_qubits, len(self.local)), dtype=self.dtype, device=self.device)
        for rank, part in enumerate(parts):
            full[int(self.index_map.table[rank])] = part
        order = [self.layout.index(wire) for wire in range(self.wires)]
        return full.reshape((2,) * self.wires).permute(order).reshape(-1)

    def set_amplitudes(self, amplitudes: torch.Tensor) -> State:
        """Begin with these 2^wires amplitudes of norm one, given alike on every rank, in the order of wires."""
        given = full_vector(amplitudes, self.wires)
        norm = float(torch.linalg.vector_norm(given, dtype=torch.complex128 if given.is_complex() else torch.float64))
        if not abs(norm - 1) <= NORM_TOLERANCE:
            raise UsageError(f"amplitudes of norm {norm:.6g}: expected 1; divide them by their norm")
        return self.load_amplitudes(given)

    def load_amplitudes(self, amplitudes: torch.Tensor) -> State:
        """The same for amplitudes of any norm: a co-state's."""
        full = (
            full_vector(amplitudes, self.wires)
            .to(self.device, self.dtype)
            .reshape((2,) * self.wires)
            .permute(self.layout)
        )
        self.local.copy_(full.reshape(1 << self.global_qubits, -1)[int(self.index_map.table[self.rank])])
        self.norm_expected = self.norm()
        self.fresh = False
        return self

    def like(self, local: torch.Tensor) -> State:
        """A state with the same layout and other amplitudes: a co-state, a copy."""
        other = object.__new__(State)
        other.__dict__.update(self.__dict__)
        other.local, other.bits, other.index_map = local, dict(self.bits), self.index_map.copy()
        return other

    def blank(self) -> State:
        """A state like this one whose amplitudes are all zero, if there is room for it."""
        self.require_another()
        return self.like(zeros(self.local.numel(), self.dtype, self.device))

    def twin(self) -> State:
        """A copy, if there is room for it."""
        self.require_another()
        return self.like(self.local.clone())

    def require_another(self) -> None:
        what = "another state (a co-state or a copy)"
        require_room(self.wires, self.global_qubits, self.dtype, self.device, 0, self.comm, what)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _begin(self, layout: tuple[int, ...], vectors: Sequence[np.ndarray]) -> None:
        """A product state, from zeros but for the first amplitude: a vector of two amplitudes for each wire."""
        self.layout, self.index_map = layout, GlobalIndexMap(self.global_qubits)
        factor = complex(1)
        for position in range(self.global_qubits):
            factor *= complex(vectors[layout[position]][self.index_map.bit(self.rank, position)])
        self.local[:1].fill_(factor)
        filled = 1  # from the least significant axis up: [v0 * x, v1 * x]
        for position in reversed(range(self.global_qubits, self.wires)):
            low, high = vectors[layout[position]]
            if high:
                torch.mul(self.local[:filled], complex(high), out=self.local[filled : 2 * filled])
            if low != 1:
                self.local[:filled] *= complex(low)
            filled *= 2
        self.norm_expected = 1.0

    def outcomes(self, step: Measure | Kraus) -> np.ndarray:
        """The squared norm of the state after each outcome: a bit that is read, or a channel's Kraus operator."""
        if isinstance(step, Kraus):
            if step.channel.probabilities is not None:
                return np.array(step.channel.probabilities)
            reduced = torch.view_as_complex(self.total(torch.view_as_real(_reduced(self.local, step.axes))))
            return np.einsum("kij,ji->k", step.channel.effects, reduced.cpu().numpy()).real.clip(0)
        if step.axis is None:
            ones = squares(self.local) * step.value
        else:
            ones = squares(block(self.local, [step.axis], 1))
        one, both = self.total(torch.stack([ones, squares(self.local)])).tolist()
        return np.array([both - one, one])

    def collapse(self, step: Measure | Kraus, outcome: int, weight: float) -> None:
        """Keep the part of the state with this outcome, which has this weight, and put a reset wire back to 0."""
        kept = self.norm_expected / weight**0.5
        if isinstance(step, Kraus):
            scale = kept if step.channel.probabilities is None else weight**-0.5
            matrix = step.channel.operators[outcome] * scale
            if np.abs(matrix - matrix[0, 0] * np.eye(len(matrix))).max() > 1e-15:  # else a phase
                apply_matrix(self.local, step.axes, matrix)
            return
        if step.axis is None:
            self.local *= kept * (step.value == outcome)
        else:
            block(self.local, [step.axis], outcome).mul_(kept)
            block(self.local, [step.axis], 1 - outcome).zero_()
            if step.reset and outcome:
                block(self.local, [step.axis], 0).copy_(block(self.local, [step.axis], 1))
                block(self.local, [step.axis], 1).zero_()
        for bit in step.bits:
            self.bits[bit] = outcome

    def agreed(self, outcomes: np.ndarray) -> np.ndarray:
        """Rank 0's outcomes, on every rank: sums may differ in the last bit between ranks; outcomes must not."""
        if self.comm is None:
            return outcomes
        return self.comm.broadcast(torch.from_numpy(outcomes).to(self.device)).cpu().numpy()

    def holds(self, condition: Sequence[tuple[int, int]]) -> bool:
        """Whether the bits measured so far have these values."""
        return all(self.bits.get(bit, 0) == value for bit, value in condition)


def full_vector(amplitudes: Any, wires: int) -> torch.Tensor:
    """All amplitudes of so many wires, from a tensor or what becomes one."""
    try:
        given = torch.as_tensor(amplitudes)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"amplitudes: expected 2^{wires} numbers ({error})") from None
    if given.shape != (1 << wires,):
        raise UsageError(f"amplitudes of shape {tuple(given.shape)}: expected ({1 << wires},)")
    return given if given.is_complex() or given.is_floating_point() else given.double()


def nodes_of(comm: Communicator | None) -> int:
    """Hosts, where each has the same power of two of consecutive ranks; else one."""
    if comm is None:
        return 1
    hosts = comm.hosts
    nodes = len(set(hosts))
    each = len(hosts) // nodes
    regular = nodes & (nodes - 1) == 0 and all(len(set(hosts[i : i + each])) == 1 for i in range(0, len(hosts), each))
    return nodes if regular else 1


def device_of(comm: Communicator | None, device: torch.device | str | None) -> torch.device:
    """The device asked for, or the communicator's, if it is here."""
    if device is not None:
        return require_device(device)
    return require_device(comm.device if comm else torch.device("cpu"))


def _prepared(gates: Sequence[Any]) -> np.ndarray:
    vector = np.array([1, 0], dtype=np.complex128)
    for operation in gates:
        vector = operation.matrix(operation.angles()) @ vector
    return vector


def sampled(table: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Outcomes with the probabilities of a table that need not sum to one; never one of probability zero."""
    edges = np.cumsum(table)
    picks = np.searchsorted(edges, uniform * edges[-1], side="right")
    return np.minimum(picks, np.flatnonzero(table)[-1])


def drawn(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """An outcome for each uniform number, low numbers standing for the last outcomes."""
    return len(weights) - 1 - sampled(weights[::-1], uniform)


_COLUMNS = 1 << 18


def _reduced(local: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """This rank's part of the reduced density matrix of some axes, complex128."""
    parts = [block(local, axes, value).reshape(-1) for value in range(1 << len(axes))]
    total = torch.zeros((len(parts),) * 2, dtype=torch.complex128, device=local.device)
    for columns in zip(*(part.split(_COLUMNS) for part in parts), strict=True):
        matrix = torch.stack(columns).to(torch.complex128)
        total += matrix @ matrix.conj().T
    return total


def require_state(state: Any, what: str) -> State:
    if not isinstance(state, State):
        raise UsageError(f"{what} of {shown(state)}: expected a uq.State, such as uq.simulate(circuit) makes")
    return state


_SQUARES = 1 << 19  # numbers whose squares are added in their own precision


def squares(amplitudes: torch.Tensor) -> torch.Tensor:
    """The sum of squared moduli, in float64: summed in chunks that are short enough for their own precision."""
    parts = torch.view_as_real(amplitudes)
    if amplitudes.is_contiguous():
        parts = parts.view(-1)
        if len(parts) >= _SQUARES and parts.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
            from unisono.quantum.kernels.cpu import squares as fast

            return torch.tensor(fast(parts.numpy()), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(part) for part in parts.split(_SQUARES)]
    return torch.stack(norms).double().square().sum()
