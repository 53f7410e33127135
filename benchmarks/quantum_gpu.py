"""Circuits on one GPU: seconds, and the share of what memory bandwidth allows.

    python benchmarks/quantum_gpu.py                     # forward at 26, 28 and 30 wires, gradients and layers at 28
    python benchmarks/quantum_gpu.py --forward 33 --gradient 32 --layer

Every row has its roofline beside it: the number of sweeps, the bytes of one read and one write of the state (of state
and co-state for a gradient) in every sweep, the time that a copy of as many bytes takes, at the speed of a copy
measured first, and the share of it that was reached.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from unisono.quantum import Circuit, Layer, Z, weight
from unisono.quantum.distributed.local_steps import LocalOperations
from unisono.quantum.distributed.program import QuantumProgram
from unisono.quantum.kernels.gpu import GpuCompiled
from unisono.quantum.schedule.schedule import Schedule


def hardware_efficient(wires: int, depth: int) -> Circuit:
    circuit = Circuit(wires)
    for number in range(depth * wires):
        wire = number % wires
        circuit.ry(wire, weight(2 * number)).rz(wire, weight(2 * number + 1))
        if wire == wires - 1:
            for control in range(wires):
                circuit.cnot(control, (control + 1) % wires)
    return circuit


def fourier(wires: int) -> Circuit:
    circuit = Circuit(wires)
    for wire in range(wires):
        circuit.h(wire)
        for other in range(wire + 1, wires):
            circuit.apply("p", [wire], math.pi / 2 ** (other - wire), controls={other: 1})
    for wire in range(wires // 2):
        circuit.swap(wire, wires - 1 - wire)
    return circuit


def random_layers(wires: int, depth: int) -> Circuit:
    """Random rotations of every wire, then CNOT or CZ, by turns, on random pairs."""
    draw = np.random.default_rng(0)
    circuit = Circuit(wires)
    for layer in range(depth):
        for wire in range(wires):
            circuit.u3(wire, *draw.uniform(0, 6, 3).tolist())
        pairs = draw.permutation(wires)[: wires // 2 * 2].reshape(-1, 2).tolist()
        for first, second in pairs:
            circuit.cz(first, second) if layer % 2 else circuit.cnot(first, second)
    return circuit


CIRCUITS: dict[str, Callable[[int, int], Circuit]] = {
    "ansatz": hardware_efficient,
    "qft": lambda wires, depth: fourier(wires),
    "random": random_layers,
}


def compiled(schedule: Schedule, dtype: torch.dtype) -> GpuCompiled:
    """The whole circuit on one GPU, without what a schedule prepares beforehand."""
    steps = QuantumProgram.of(schedule, 0).steps
    operations = [operation for step in steps if isinstance(step, LocalOperations) for operation in step.operations]
    return GpuCompiled(operations, schedule.wires, dtype, torch.device("cuda", torch.cuda.current_device()))


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """The least of a few runs, after a first that compiles."""
    call()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def copy_speed() -> float:
    """Bytes read and written in a second."""
    source = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 5)


def measure(name: str, wires: int, depth: int, dtype: torch.dtype, speed: float, gradient: bool) -> dict[str, object]:
    circuit = CIRCUITS[name](wires, depth)
    weights = np.random.default_rng(0).uniform(0, 6, circuit.weights)
    begin = time.perf_counter()
    program = compiled(Schedule.of(circuit), dtype)
    state = torch.zeros(1 << wires, dtype=dtype, device="cuda")
    state[0] = 1
    program(state, weights)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    states = [state, state.clone()] if gradient else [state]
    took = seconds(lambda: program.reverse(*states, weights) if gradient else program(state, weights))
    norm = sum(float(part.norm()) ** 2 for part in torch.view_as_real(state).view(-1).split(1 << 24))
    return {
        "what": "reverse pass of the gradient" if gradient else "forward",
        "circuit": name,
        "wires": wires,
        "dtype": str(dtype),
        "seconds": round(took, 4),
        **roofline(program, len(states), took, speed),
        "first call": round(first, 2),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "norm - 1": norm - 1,
    }


def roofline(program: GpuCompiled, states: int, took: float, speed: float) -> dict[str, object]:
    sweeps = len(program.code.sweeps)
    moved = sweeps * states * 2 * (program.dtype.itemsize << program.bits)
    return {
        "sweeps": sweeps,
        "GB": round(moved / 1e9, 1),
        "bound": round(moved / speed, 4),
        "share": round(moved / speed / took, 3),
    }


def forward_seconds(program: GpuCompiled, weights: np.ndarray) -> float:
    state = torch.zeros(1 << program.bits, dtype=program.dtype, device="cuda")
    state[0] = 1
    return seconds(lambda: program(state, weights))


def measure_layer(wires: int, depth: int, dtype: torch.dtype, speed: float) -> dict[str, object]:
    """A layer of the sum of all Z: its output, and output and gradient together."""
    total = sum((Z(wire) for wire in range(1, wires)), Z(0))
    layer = Layer(hardware_efficient(wires, depth), [total], dtype=dtype, device="cuda")
    program = compiled(Schedule.of(hardware_efficient(wires, depth)), dtype)
    forward = forward_seconds(program, layer.weights.detach().cpu().numpy())
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        output = seconds(layer)
    both = seconds(lambda: layer().sum().backward())
    return {
        "what": "layer",
        "wires": wires,
        "dtype": str(dtype),
        "forward": round(forward, 4),
        "output": round(output, 4),
        "output and gradient": round(both, 4),
        "in forwards": round(both / forward, 2),
        **roofline(program, 3, both, speed),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=int, nargs="*", default=[26, 28, 30], help="wires")
    parser.add_argument("--gradient", type=int, nargs="*", default=[28], help="wires")
    parser.add_argument("--layer", type=int, nargs="*", default=[20, 28], help="wires")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--dtype", choices=("complex64", "complex128"), default="complex64")
    parser.add_argument(
        "--circuits", choices=tuple(CIRCUITS), nargs="*", default=list(CIRCUITS), help="of the forward rows"
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none here")
    speed = copy_speed()
    torch.cuda.empty_cache()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "copy TB/s": round(speed / 1e12, 2)}), flush=True)
    dtype = getattr(torch, given.dtype)
    rows = [(name, wires, False) for name in given.circuits for wires in given.forward]
    for name, wires, gradient in rows + [("ansatz", wires, True) for wires in given.gradient]:
        print(json.dumps(measure(name, wires, given.depth, dtype, speed, gradient)), flush=True)
        torch.cuda.empty_cache()
    for wires in given.layer:
        print(json.dumps(measure_layer(wires, given.depth, dtype, speed)), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
