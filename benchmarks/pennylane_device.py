"""The gradient of one QNode on unisono.qubit and on PennyLane's own devices, in turns.

A hardware-efficient ansatz (RY and RZ on every wire, a CNOT ring), the sum of Z as observable, the adjoint method. Each
round takes one gradient on each device; the first round, in which circuits are compiled, is not counted. The share of
the time that is PennyLane's own (building tapes, transforms, autograd) is measured with a device that computes nothing.

    python benchmarks/pennylane_device.py --wires 20 --depth 10 --rounds 7 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pennylane as qml
from pennylane import numpy as pnp
from pennylane.exceptions import DeviceError

from unisono.integrations.pennylane import UnisonoQubit

PEERS = ("lightning.qubit", "lightning.kokkos")


class NothingComputed(UnisonoQubit):
    """The same device without states: what is left is PennyLane and the translation of tapes."""

    def _execute(self, circuit: Any, *, keep: bool) -> Any:
        self._job(circuit)
        return np.array(0.0)

    def compute_derivatives(self, circuits: Any, execution_config: Any = None) -> Any:
        for each in circuits:
            self._job(each)
        return tuple(tuple(np.zeros(len(each.trainable_params))) for each in circuits)


def gradient_on(device: Any, wires: int, depth: int) -> Callable[[Any], np.ndarray]:
    @qml.qnode(device, diff_method="adjoint")
    def circuit(x: Any) -> Any:
        for layer in range(depth):
            for wire in range(wires):
                qml.RY(x[layer, wire, 0], wires=wire)
                qml.RZ(x[layer, wire, 1], wires=wire)
            for wire in range(wires):
                qml.CNOT(wires=[wire, (wire + 1) % wires])
        return qml.expval(qml.sum(*[qml.Z(wire) for wire in range(wires)]))

    return qml.grad(circuit)


def devices(wires: int, dtype: type) -> dict[str, Any]:
    found: dict[str, Any] = {"unisono.qubit": UnisonoQubit(wires, c_dtype=dtype)}
    for name in PEERS:
        try:
            found[name] = qml.device(name, wires=wires, c_dtype=dtype)
        except (DeviceError, ImportError) as error:
            print(f"{name} takes no part: {str(error).splitlines()[0]}")
    found["PennyLane's own part"] = NothingComputed(wires, c_dtype=dtype)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", type=int, default=20)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("complex64", "complex128"), default="complex128")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    x = pnp.array(np.random.default_rng(0).uniform(0, 6, (chosen.depth, chosen.wires, 2)), requires_grad=True)
    made = devices(chosen.wires, np.dtype(chosen.dtype).type)
    gradients = {name: gradient_on(device, chosen.wires, chosen.depth) for name, device in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    values: dict[str, np.ndarray] = {}
    loads = [os.getloadavg()[0]]
    for number in range(chosen.rounds + 1):
        for name, gradient in gradients.items():
            begin = time.perf_counter()
            values[name] = gradient(x)
            if number:
                times[name].append(time.perf_counter() - begin)
        loads.append(os.getloadavg()[0])
    ours = statistics.median(times["unisono.qubit"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        apart = np.abs(values[name] - values["unisono.qubit"]).max()
        note = "" if name.startswith("PennyLane") else f", {median / ours:.1f} times, differs by {apart:.1e}"
        print(f"{name:22} {median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}){note}")
    print(f"{chosen.wires} wires, depth {chosen.depth}, {chosen.dtype}, {chosen.rounds} rounds", end="; ")
    print(f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
    if chosen.json:
        chosen.json.write_text(json.dumps({"options": vars(chosen), "seconds": times, "loads": loads}, default=str))


if __name__ == "__main__":
    main()
