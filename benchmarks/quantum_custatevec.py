"""Circuits on one GPU beside NVIDIA's cuStateVec: the same circuit, the same values, in turns, in one process.

    python benchmarks/quantum_custatevec.py                  # 26, 28 and 30 wires
    python benchmarks/quantum_custatevec.py --library path/to/libcustatevec.so.1 --wires 28 --circuits ansatz random

cuStateVec (`pip install custatevec-cu13`) is given the circuit gate by gate, and as matrices of up to k qubits into
which neighbouring gates are multiplied beforehand (greedily: a gate joins the last group that it can join without
passing a gate on one of its wires). The multiplication is not timed, nor is our compilation. Both apply all gates to
any state: ours does not begin with a product state, as it could where a circuit begins with |0...0>. The states that
they end with are compared at 20 wires.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quantum_gpu import CIRCUITS, compiled, seconds
from unisono.quantum import Circuit
from unisono.quantum.circuit.operation import Operation
from unisono.quantum.schedule.schedule import Schedule

COMPLEX64, COMPLEX128, BY_ROWS = 4, 5, 1  # CUDA_C_32F, CUDA_C_64F, CUSTATEVEC_MATRIX_LAYOUT_ROW


# ---- fusing ----------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """Gates that are applied as one matrix; of its index, the first wire is the most significant bit."""

    wires: list[int] = field(default_factory=list)
    members: list[tuple[Operation, tuple[float, ...]]] = field(default_factory=list)

    def matrix(self) -> np.ndarray:
        width = len(self.wires)
        found = np.eye(1 << width, dtype=np.complex128).reshape([2] * width + [1 << width])
        for operation, angles in self.members:
            axes = [self.wires.index(wire) for wire in operation.wires]
            gate = operation.full_matrix(angles).reshape([2] * (2 * len(axes)))
            applied = np.tensordot(gate, found, (range(len(axes), 2 * len(axes)), axes))
            found = np.moveaxis(applied, range(len(axes)), axes)
        return found.reshape(1 << width, 1 << width)


def fused(circuit: Circuit, weights: np.ndarray, limit: int) -> list[Group]:
    """Groups of at most `limit` wires, in an order in which they can be applied."""
    groups: list[Group] = []
    last: dict[int, int] = {}  # by wire, the last group on it
    for operation in circuit.operations:
        wires = operation.wires
        first = max((last[wire] for wire in wires if wire in last), default=0)
        fits = [i for i in range(first, len(groups)) if len({*groups[i].wires, *wires}) <= limit]
        if fits:
            which = max(fits, key=lambda i: len({*groups[i].wires} & {*wires}))
        else:
            which = len(groups)
            groups.append(Group())
        group = groups[which]
        group.wires += [wire for wire in wires if wire not in group.wires]
        group.members.append((operation, operation.angles(weights)))
        last.update(dict.fromkeys(wires, which))
    return groups


# ---- cuStateVec ------------------------------------------------------------------------------------------------------


class CuStateVec:
    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._handle = ctypes.c_void_p()
        self._check(self._library.custatevecCreate(ctypes.byref(self._handle)))

    @property
    def version(self) -> str:
        found = int(self._library.custatevecGetVersion())
        return f"{found // 10000}.{found // 100 % 100}.{found % 100}"

    def program(
        self,
        calls: Sequence[tuple[np.ndarray, Sequence[int], Sequence[tuple[int, int]]]],
        bits: int,
        dtype: torch.dtype,
    ) -> Callable[[torch.Tensor], object]:
        """A function that applies matrices on targets, under (wire, value) controls, to a state."""
        prepared = [self._prepared(*call, bits) for call in calls]
        apply = self._library.custatevecApplyMatrix
        kind = COMPLEX64 if dtype == torch.complex64 else COMPLEX128
        room = torch.empty(
            max(self._workspace(call, bits, kind) for call in prepared), dtype=torch.uint8, device="cuda"
        )

        def run(state: torch.Tensor) -> None:
            pointer = ctypes.c_void_p(state.data_ptr())
            for matrix, targets, controls, values in prepared:
                self._check(
                    apply(
                        self._handle, pointer, kind, ctypes.c_uint32(bits),
                        matrix.ctypes.data_as(ctypes.c_void_p), COMPLEX128, BY_ROWS, 0,
                        targets, ctypes.c_uint32(len(targets)), controls, values, ctypes.c_uint32(len(controls)),
                        0, ctypes.c_void_p(room.data_ptr()), ctypes.c_size_t(room.nbytes),
                    )
                )  # fmt: skip

        return run

    def _workspace(self, call: tuple[Any, ...], bits: int, kind: int) -> int:
        """Bytes that cuStateVec asks for."""
        matrix, targets, controls, _ = call
        size = ctypes.c_size_t()
        self._check(
            self._library.custatevecApplyMatrixGetWorkspaceSize(
                self._handle, kind, ctypes.c_uint32(bits), matrix.ctypes.data_as(ctypes.c_void_p), COMPLEX128, BY_ROWS,
                0, ctypes.c_uint32(len(targets)), ctypes.c_uint32(len(controls)), 0, ctypes.byref(size),
            )
        )  # fmt: skip
        return size.value

    @staticmethod
    def _prepared(
        matrix: np.ndarray, wires: Sequence[int], controls: Sequence[tuple[int, int]], bits: int
    ) -> tuple[Any, ...]:
        numbers = [bits - 1 - wire for wire in reversed(wires)]  # the least significant first
        return (
            np.ascontiguousarray(matrix, dtype=np.complex128),
            (ctypes.c_int32 * len(numbers))(*numbers),
            (ctypes.c_int32 * len(controls))(*[bits - 1 - wire for wire, _ in controls]),
            (ctypes.c_int32 * len(controls))(*[value for _, value in controls]),
        )

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuStateVec returned status {status}")


def find_library(given: Path | None) -> Path:
    if given is not None:
        return given
    package = importlib.util.find_spec("cuquantum")
    for folder in (package.submodule_search_locations or []) if package else []:
        found = Path(folder) / "lib" / "libcustatevec.so.1"
        if found.exists():
            return found
    raise SystemExit("cuStateVec was not found; install custatevec-cu13, or give --library path/to/libcustatevec.so.1")


# ---- measuring -------------------------------------------------------------------------------------------------------


def contestants(
    library: CuStateVec, circuit: Circuit, weights: np.ndarray, dtype: torch.dtype, most: int
) -> dict[str, Callable[[torch.Tensor], object]]:
    bits = circuit.wires
    single = [(each.matrix(each.angles(weights)), each.targets, each.controls) for each in circuit.operations]
    found: dict[str, Callable[[torch.Tensor], object]] = {"gate by gate": library.program(single, bits, dtype)}
    for limit in range(3, most + 1):
        calls = [(group.matrix(), group.wires, ()) for group in fused(circuit, weights, limit)]
        found[f"fused to {limit} qubits, {len(calls)} calls"] = library.program(calls, bits, dtype)
    ours = compiled(Schedule.of(circuit, start=range(bits)), dtype)
    found["unisono"] = lambda state: ours(state, weights)
    return found


def begin(bits: int, dtype: torch.dtype) -> torch.Tensor:
    state = torch.zeros(1 << bits, dtype=dtype, device="cuda")
    state[0] = 1
    return state


def difference(library: CuStateVec, name: str, depth: int, dtype: torch.dtype, wires: int = 20) -> float:
    """The largest difference of two amplitudes, after gate by gate, fused gates and unisono's program."""
    circuit = CIRCUITS[name](wires, depth)
    weights = np.random.default_rng(0).uniform(0, 6, circuit.weights)
    schedule = Schedule.of(circuit, start=range(wires))
    found = []
    for each, run in contestants(library, circuit, weights, dtype, 4).items():
        state = begin(wires, dtype)
        run(state)
        if each == "unisono":  # swaps are names of axes
            axes = [schedule.finish.index(wire) for wire in range(wires)]
            state = state.view([2] * wires).permute(axes).reshape(-1)
        found.append(state)
    return max(float((state - found[0]).abs().max()) for state in found[1:])


def measure(library: CuStateVec, name: str, wires: int, given: argparse.Namespace) -> dict[str, object]:
    circuit, dtype = CIRCUITS[name](wires, given.depth), getattr(torch, given.dtype)
    weights = np.random.default_rng(0).uniform(0, 6, circuit.weights)
    runs = contestants(library, circuit, weights, dtype, given.most)
    state = begin(wires, dtype)
    took: dict[str, list[float]] = {each: [] for each in runs}
    for _ in range(given.rounds):
        for each, run in runs.items():
            took[each].append(seconds(lambda run=run: run(state), 1))
    medians = {each: statistics.median(found) for each, found in took.items()}
    best = min(value for each, value in medians.items() if each != "unisono")
    return {
        "circuit": name,
        "wires": wires,
        "dtype": given.dtype,
        **{each: round(value, 4) for each, value in medians.items()},
        "best of cuStateVec over unisono": round(best / medians["unisono"], 2),
        "largest spread": round(max(max(x) / min(x) for x in took.values()), 2),
        "largest difference": difference(library, name, given.depth, dtype),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="libcustatevec.so.1, where it is not installed")
    parser.add_argument("--wires", type=int, nargs="*", default=[26, 28, 30])
    parser.add_argument("--circuits", choices=tuple(CIRCUITS), nargs="*", default=["ansatz"])
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--dtype", choices=("complex64", "complex128"), default="complex64")
    parser.add_argument("--most", type=int, default=6, help="qubits of the largest fused matrices")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none here")
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")  # loads cuBLAS, of which cuStateVec makes use
    library = CuStateVec(find_library(given.library))
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "cuStateVec": library.version}), flush=True)
    for name in given.circuits:
        for wires in given.wires:
            print(json.dumps(measure(library, name, wires, given)), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
