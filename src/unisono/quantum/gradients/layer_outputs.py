"""What a layer puts out for one sample's state, and the co-state that a gradient of it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from unisono.errors import UsageError
from unisono.quantum.observables.application import applied_pauli_strings
from unisono.quantum.observables.expectation import Observed
from unisono.quantum.observables.observable import LARGEST_EXPANSION, PauliSum
from unisono.quantum.outputs import MOST_PROBABILITIES
from unisono.quantum.state import State

if TYPE_CHECKING:
    from unisono.quantum.kernels.pauli_strings_gpu import GpuPauliStrings


class Expectations:
    """The expectation of each observable."""

    shiftable = True

    def __init__(self, observables: Sequence[PauliSum], wires: int, dtype: torch.dtype) -> None:
        self.observables = tuple(each.check(wires) for each in observables)
        self.wires = wires
        self.width = len(self.observables)
        self.dtype = torch.float32 if dtype == torch.complex64 else torch.float64
        self.observed = Observed(self.observables, wires)
        self._on_gpu: dict[tuple[int, ...], GpuPauliStrings] = {}

    @property
    def mixed(self) -> set[int]:
        """The wires on which an observable is not diagonal."""
        return {wire for string in self.observed.pauli_strings for wire, pauli in string if pauli != "Z"}

    def read(self, state: State) -> torch.Tensor:
        if pauli_strings := self._gpu_pauli_strings(state):
            return torch.from_numpy(pauli_strings.values(state.local)).to(self.dtype)
        return self.observed.values(state).to(self.dtype)

    def costate(self, state: State, output: torch.Tensor, gradient: torch.Tensor) -> State:
        weights = gradient.double().tolist()
        if pauli_strings := self._gpu_pauli_strings(state):
            return state.like(pauli_strings.applied(state.local, weights))
        seen = self.observed
        terms = [(w * c, pauli_string) for w, each in zip(weights, seen.sums, strict=True) for c, pauli_string in each]
        projectors = [(w * c, bits) for w, each in zip(weights, seen.projectors, strict=True) for c, bits in each]
        return applied_pauli_strings(state, terms, projectors)

    def _gpu_pauli_strings(self, state: State) -> GpuPauliStrings | None:
        """The GPU's own kernel, where one GPU has the full state and the observables are short Pauli sums."""
        wide = [len(bits) for each in self.observables for _, bits in each.projectors]
        wide += [len(block.wires) for each in self.observables for block in each.blocks]
        if (
            state.device.type != "cuda"
            or state.global_qubits
            or state.kernel == "reference"
            or max(wide, default=0) > _WIDEST
        ):
            return None
        from unisono.quantum.kernels.pauli_strings_gpu import GpuPauliStrings  # compiled where there is a GPU

        if state.layout not in self._on_gpu:
            self._on_gpu[state.layout] = GpuPauliStrings(self.observables, state.layout)
        return self._on_gpu[state.layout]


_WIDEST = min(4, LARGEST_EXPANSION)  # wires of a matrix or projector that is worth writing out in Pauli strings


class Amplitudes:
    """All amplitudes, in the order of wires."""

    shiftable = False

    def __init__(self, wires: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = _all(wires), dtype

    def read(self, state: State) -> torch.Tensor:
        return state.amplitudes()

    def costate(self, state: State, output: torch.Tensor, gradient: torch.Tensor) -> State:
        """dL = Re <gradient|d psi>, so half of the gradient."""
        return _placed(state, gradient / 2)


class Probabilities:
    """The probability of every basis state of the first `wires` wires; those of deferred measurements follow."""

    shiftable = True
    mixed: frozenset[int] = frozenset()

    def __init__(self, wires: int, dtype: torch.dtype) -> None:
        self.wires, self.width = wires, _all(wires)
        self.dtype = torch.float32 if dtype == torch.complex64 else torch.float64

    def read(self, state: State) -> torch.Tensor:
        amplitudes = state.amplitudes()
        return (amplitudes.real**2 + amplitudes.imag**2).view(self.width, -1).sum(1).to(self.dtype)

    def costate(self, state: State, output: torch.Tensor, gradient: torch.Tensor) -> State:
        """dL = sum of gradient * 2 Re(conj(psi) d psi)"""
        made = _placed(state, gradient.to(state.dtype).repeat_interleave(1 << (state.wires - self.wires)))
        made.local *= state.local
        return made


Output = Expectations | Amplitudes | Probabilities


def output_of(kind: str, observables: Sequence[PauliSum], wires: int, dtype: torch.dtype) -> Output:
    if not isinstance(kind, str):
        raise UsageError(f"output={kind!r}: expected 'expectations', 'state' or 'probabilities'")
    if kind == "expectations":
        if not observables:
            raise UsageError("a layer of expectations needs observables; or use output='state' or 'probabilities'")
        return Expectations(observables, wires, dtype)
    if observables:
        raise UsageError(f"output={kind!r} takes no observables")
    if kind == "state":
        return Amplitudes(wires, dtype)
    if kind == "probabilities":
        return Probabilities(wires, dtype)
    raise UsageError(f"output={kind!r}: expected 'expectations', 'state' or 'probabilities'")


def _placed(state: State, amplitudes: torch.Tensor) -> State:
    """Amplitudes in the order of wires, as a state of this layout."""
    return state.blank().load_amplitudes(amplitudes)


def _all(wires: int) -> int:
    if wires > MOST_PROBABILITIES:
        raise UsageError(f"all amplitudes of {wires} wires: at most {MOST_PROBABILITIES} wires can be put out")
    return int(np.left_shift(1, wires))
