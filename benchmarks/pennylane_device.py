"""The gradient of one QNode on unisono.qubit and on PennyLane's own devices, in turns.

A hardware-efficient ansatz (RY and RZ on every wire, a CNOT ring), the sum of Z as observable, the adjoint method. Each
device has a process of its own, and each round takes one gradient on each; the first round, in which circuits are
compiled, is not counted. What is PennyLane's own (building tapes, transforms, autograd) is measured with a device that
computes nothing. With a batch, each sample's features are embedded before the ansatz, the gradient is that of the sum
of squared outputs with respect to the weights, and the same device with a circuit for each sample takes part.

    python benchmarks/pennylane_device.py --wires 20 --depth 10 --rounds 7 --json out.json
    python benchmarks/pennylane_device.py --wires 14 --depth 3 --batch 32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pennylane as qml
from pennylane import numpy as pnp
from pennylane.exceptions import DeviceError

from unisono.integrations.pennylane import UnisonoQubit
from unisono.integrations.pennylane.device import expand_batches

PEERS = ("lightning.qubit", "lightning.kokkos")
NOTHING = "PennyLane's own part"
EXPANDED = "unisono.qubit, expanded"


class NothingComputed(UnisonoQubit):
    """The same device without states: what is left is PennyLane and the translation of tapes."""

    def _execute(self, circuit: Any, *, keep: bool) -> Any:
        size = self._jobs(circuit).size
        return np.zeros(() if size is None else size)

    def compute_derivatives(self, circuits: Any, execution_config: Any = None) -> Any:
        made = []
        for each in circuits:
            size = self._jobs(each).size
            made.append(tuple(np.zeros(() if size is None else size) for _ in each.trainable_params))
        return tuple(made)


class Expanded(UnisonoQubit):
    """The same device with a circuit for each sample of a batch."""

    def preprocess_transforms(self, execution_config: Any = None) -> Any:
        pipeline = qml.CompilePipeline()
        for each in super().preprocess_transforms(execution_config):
            if each.tape_transform is expand_batches.tape_transform:
                pipeline.add_transform(qml.transforms.broadcast_expand)
            else:
                pipeline.append(each)
        return pipeline


def gradient_on(device: Any, wires: int, depth: int, batch: int) -> Callable[[Any], np.ndarray]:
    """Of one circuit's output, or of the sum of squared outputs for a batch."""
    features = np.random.default_rng(1).uniform(0, 3, (batch, wires))

    @qml.qnode(device, diff_method="adjoint")
    def circuit(x: Any) -> Any:
        if batch:
            qml.AngleEmbedding(features, wires=range(wires))
        for layer in range(depth):
            for wire in range(wires):
                qml.RY(x[layer, wire, 0], wires=wire)
                qml.RZ(x[layer, wire, 1], wires=wire)
            for wire in range(wires):
                qml.CNOT(wires=[wire, (wire + 1) % wires])
        return qml.expval(qml.sum(*[qml.Z(wire) for wire in range(wires)]))

    return qml.grad(lambda x: pnp.sum(circuit(x) ** 2) if batch else circuit(x))


def inside(chosen: argparse.Namespace) -> None:
    """What each process does: a gradient for each line that it reads; its time, and at the end the gradient."""
    dtype = np.dtype(chosen.dtype).type
    ours = {"unisono.qubit": UnisonoQubit, EXPANDED: Expanded, NOTHING: NothingComputed}.get(chosen.inside)
    device = ours(chosen.wires, c_dtype=dtype) if ours else qml.device(chosen.inside, wires=chosen.wires, c_dtype=dtype)
    gradient = gradient_on(device, chosen.wires, chosen.depth, chosen.batch)
    x = pnp.array(np.random.default_rng(0).uniform(0, 6, (chosen.depth, chosen.wires, 2)), requires_grad=True)
    found = np.zeros(0)
    for line in sys.stdin:
        if line.strip() == "gradient":
            print(json.dumps(np.asarray(found).reshape(-1).tolist()), flush=True)
            continue
        begin = time.perf_counter()
        found = gradient(x)
        print(time.perf_counter() - begin, flush=True)


class Contestant:
    def __init__(self, name: str, chosen: argparse.Namespace) -> None:
        options = [f"--{each}={getattr(chosen, each)}" for each in ("wires", "depth", "batch", "dtype")]
        command = [sys.executable, __file__, "--inside", name, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def taking_part(batch: int) -> list[str]:
    found = ["unisono.qubit", EXPANDED] if batch else ["unisono.qubit"]
    for name in PEERS:
        try:
            qml.device(name, wires=1)
            found.append(name)
        except (DeviceError, ImportError) as error:
            print(f"{name} takes no part: {str(error).splitlines()[0]}")
    return [*found, NOTHING]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", type=int, default=20)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--batch", type=int, default=0, help="samples of one call; 0: a circuit without features")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("complex64", "complex128"), default="complex128")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(chosen)
        return
    contestants = {name: Contestant(name, chosen) for name in taking_part(chosen.batch)}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    loads = []
    for _ in range(chosen.rounds + 1):
        loads.append(os.getloadavg()[0])
        for name, each in contestants.items():
            times[name].append(each.ask("go"))
    times = {name: seconds[1:] for name, seconds in times.items()}
    found = {name: np.array(each.ask("gradient")) for name, each in contestants.items()}
    ours = statistics.median(times["unisono.qubit"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        apart = np.abs(found[name] - found["unisono.qubit"]).max()
        note = "" if name == NOTHING else f", {median / ours:.1f} times, differs by {apart:.1e}"
        print(f"{name:24} {median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}){note}")
    batch = f"batch {chosen.batch}, " if chosen.batch else ""
    print(f"{chosen.wires} wires, depth {chosen.depth}, {batch}{chosen.dtype}, {chosen.rounds} rounds", end="; ")
    print(f"load {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores")
    if chosen.json:
        chosen.json.write_text(json.dumps({"options": vars(chosen), "seconds": times, "loads": loads}, default=str))


if __name__ == "__main__":
    main()
