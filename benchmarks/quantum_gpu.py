"""Circuits on one GPU: seconds, and the share of what memory bandwidth allows.

    python benchmarks/quantum_gpu.py                     # depth 10 at 28 and 30 wires, gradients at 26 and 28
    python benchmarks/quantum_gpu.py --forward 33 --gradient 32

The bound is one read and one write of the state for every sweep, at the speed of a copy measured first. The unfused
bound is the same for every rotation and CNOT by itself.
"""

from __future__ import annotations

import argparse
import json
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


def compiled(circuit: Circuit, dtype: torch.dtype) -> GpuCompiled:
    """The whole circuit on one GPU, scheduled as a state would."""
    steps = QuantumProgram.of(Schedule.of(circuit), 0).steps
    operations = [operation for step in steps if isinstance(step, LocalOperations) for operation in step.operations]
    return GpuCompiled(operations, circuit.wires, dtype, torch.device("cuda", torch.cuda.current_device()))


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


def measure(wires: int, depth: int, dtype: torch.dtype, speed: float, gradient: bool) -> dict[str, object]:
    circuit = hardware_efficient(wires, depth)
    weights = np.random.default_rng(0).uniform(0, 6, circuit.weights)
    begin = time.perf_counter()
    program = compiled(circuit, dtype)
    state = torch.zeros(1 << wires, dtype=dtype, device="cuda")
    state[0] = 1
    program(state, weights)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    states = [state, state.clone()] if gradient else [state]
    took = seconds(lambda: program.reverse(*states, weights) if gradient else program(state, weights))
    sweeps = len(program.code.sweeps)
    bound = sweeps * len(states) * 2 * state.nbytes / speed
    norm = sum(float(part.norm()) ** 2 for part in torch.view_as_real(state).view(-1).split(1 << 24))
    return {
        "what": "reverse pass of the gradient" if gradient else "forward",
        "wires": wires,
        "depth": depth,
        "dtype": str(dtype),
        "seconds": round(took, 4),
        "sweeps": sweeps,
        "bound": round(bound, 4),
        "share": round(bound / took, 3),
        "unfused bound": round(3 * wires * depth * len(states) * 2 * state.nbytes / speed, 3),
        "first call": round(first, 2),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "norm - 1": norm - 1,
    }


def measure_layer(wires: int, depth: int, dtype: torch.dtype) -> dict[str, object]:
    """A layer of the sum of all Z: its output, and output and gradient together."""
    total = sum((Z(wire) for wire in range(1, wires)), Z(0))
    layer = Layer(hardware_efficient(wires, depth), [total], dtype=dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        forward = seconds(layer)
    both = seconds(lambda: layer().sum().backward())
    return {
        "what": "layer",
        "wires": wires,
        "depth": depth,
        "dtype": str(dtype),
        "output": round(forward, 4),
        "output and gradient": round(both, 4),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward", type=int, nargs="*", default=[28, 30], help="wires")
    parser.add_argument("--gradient", type=int, nargs="*", default=[26, 28], help="wires")
    parser.add_argument("--layer", type=int, nargs="*", default=[20, 26, 28], help="wires")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--dtype", choices=("complex64", "complex128"), default="complex64")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU, and torch sees none here")
    speed = copy_speed()
    torch.cuda.empty_cache()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "copy TB/s": round(speed / 1e12, 2)}), flush=True)
    dtype = getattr(torch, given.dtype)
    for gradient, sizes in ((False, given.forward), (True, given.gradient)):
        for wires in sizes:
            print(json.dumps(measure(wires, given.depth, dtype, speed, gradient)), flush=True)
            torch.cuda.empty_cache()
    for wires in given.layer:
        print(json.dumps(measure_layer(wires, given.depth, dtype)), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
