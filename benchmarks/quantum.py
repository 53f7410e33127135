"""unisono's circuits against the peers': one run, both cores, single precision, side by side.

    pip install -c constraints.txt -e '.[quantum,peers-quantum]'
    python benchmarks/quantum.py --rows hea-20,grad-z-16 --rounds 3 --json out.json

Each contestant runs in a process of its own, so that its peak memory can be told, and the contestants take turns within
a row. The start (imports, compilation or loading of kernels, a circuit of 5 wires) and a row's setup (its circuit, a
first evaluation) are timed apart; a round is one evaluation with new angles, the reading of the observable included.
qulacs has double precision only on a CPU; aer has no adjoint gradient. A first process computes the row in double
precision with unisono, and is not timed: each contestant's answer is compared with its, so that a difference has an
owner; qulacs, in double precision too, vouches for it.

Memory is looked at after the timed rounds, as often as asked for (`--looks`): the contestant drops the row, gives free
memory back, sets the row up again and evaluates it for a second or more, while this process reads
/proc/PID/smaps_rollup as often as it can. Told is the most anonymous memory seen, beyond what the contestant held
before it set the row up again. smaps_rollup is exact, the kernel walks all pages for it; VmHWM of /proc/PID/status,
which keeps the peak, is not: it is made of counters that each core keeps for itself up to 32 pages at a time, so that
it may be off by 128 KiB for each core and kind of page. What an allocator keeps of the first time that a row is set up,
pages whose neighbours are in use, is not the row's. It is in the second figure, which is counted from a small circuit:
what the process holds when a circuit of 5 wires with as many gates as the row's has been made and evaluated, twice, and
is still there. That one depends on the small circuit's shape. Pages of files, which are code that ran for the first
time, are not counted. What a machine has to have, libraries and all, is reported beside it: the most that the process
held, and how much of that was anonymous.

Rows: hea-N (hardware-efficient ansatz of depth 10), qft-N, random-N (depth 20), grad-z-N and grad-p-N (gradient of sum
Z, and of a sum of 20 Pauli words, for the ansatz).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DEPTH, RANDOM_DEPTH, TERMS, THREADS = 10, 20, 20, 2
PATIENCE = 100  # seconds for one answer
MEMORY, LOOKING = "memory", 1.0  # a line that asks for the round in which memory is looked at; its least seconds
DEFAULT_ROWS = (
    "hea-20,hea-22,hea-24,hea-26,qft-24,random-24,grad-z-16,grad-z-20,grad-z-22,grad-p-16,grad-p-20,grad-p-22"
)
Step = tuple[str, tuple[int, ...], tuple[int, ...]]  # gate, wires, which angles
Evaluate = Callable[[np.ndarray], float | np.ndarray]


# ---- what is computed -----------------------------------------------------------------------------------------------


def parsed(row: str) -> tuple[str, int, int]:
    """Kind, wires, and how often."""
    kind, size = row.rsplit("-", 1)
    wires, _, times = size.partition("x")
    return kind, int(wires), int(times or 1)


def small_row(row: str) -> str:
    """A row of 5 wires with as many gates or more."""
    small = f"{parsed(row)[0]}-5"
    return f"{small}x{-(-len(steps_of(row)[1]) // len(steps_of(small)[1]))}"


def steps_of(row: str) -> tuple[int, list[Step], int]:
    """Wires, gates and the number of angles of a row's circuit; hea-5x12 is twelve of them, one after the other."""
    kind, n, times = parsed(row)
    if times > 1:
        _, once, count = steps_of(f"{kind}-{n}")
        again = [
            (name, wires, tuple(number * count + i for i in which))
            for number in range(times)
            for name, wires, which in once
        ]
        return n, again, times * count
    made: list[Step] = []
    count = 0
    if kind == "qft":
        for wire in range(n):
            made.append(("ry", (wire,), (wire,)))
        for wire in range(n):
            made.append(("h", (wire,), ()))
            made += [("cp", (wire, other), (n + other - wire,)) for other in range(wire + 1, n)]
        made += [("swap", (wire, n - 1 - wire), ()) for wire in range(n // 2)]
        return n, made, 2 * n
    for layer in range(RANDOM_DEPTH if kind == "random" else DEPTH):
        for wire in range(n):
            if kind == "random":
                made.append(("u3", (wire,), (count, count + 1, count + 2)))
                count += 3
            else:
                made += [("ry", (wire,), (count,)), ("rz", (wire,), (count + 1,))]
                count += 2
        if kind == "random":
            made += [("cz", (wire, wire + 1), ()) for wire in range(layer % 2, n - 1, 2)]
        else:
            made += [("cx", (wire, (wire + 1) % n), ()) for wire in range(n)]
    return n, made, count


def angles_of(row: str, count: int, seed: int) -> np.ndarray:
    angles = np.random.default_rng(seed).uniform(0, 2 * np.pi, count)
    if row.startswith("qft"):
        angles[count // 2 :] = [np.pi / 2**k for k in range(count - count // 2)]
    return angles


def words_of(row: str) -> list[tuple[float, list[tuple[int, str]]]]:
    """(coefficient, letters) of the row's observable."""
    _, n, _ = parsed(row)
    if row.startswith("grad-z"):
        return [(1.0, [(wire, "Z")]) for wire in range(n)]
    if row.startswith("grad-p"):
        draw = np.random.default_rng(7)
        chosen = [sorted(int(wire) for wire in draw.choice(n, 4, replace=False)) for _ in range(TERMS)]
        return [(float(draw.normal()), [(wire, "XYZ"[draw.integers(3)]) for wire in wires]) for wires in chosen]
    return [(1.0, [(0, "Z")])]


# ---- contestants ----------------------------------------------------------------------------------------------------


def unisono(row: str, double: bool = False) -> Evaluate:
    import torch

    from unisono import quantum as uq

    torch.set_num_threads(THREADS)
    n, steps, _ = steps_of(row)
    circuit = uq.Circuit(n)
    for name, wires, which in steps:
        circuit.apply(name, wires, *[uq.weight(index) for index in which])
    observable = {" ".join(f"{letter}{wire}" for wire, letter in letters): c for c, letters in words_of(row)}
    dtype = torch.complex128 if double else torch.complex64
    layer = uq.Layer(circuit, observable, weights=np.zeros(circuit.weights), dtype=dtype)

    def evaluate(angles: np.ndarray) -> float | np.ndarray:
        with torch.no_grad():
            layer.weights.copy_(torch.from_numpy(angles[: circuit.weights]))
        if not row.startswith("grad"):
            with torch.no_grad():
                return float(layer())
        layer.weights.grad = None
        layer().sum().backward()
        assert layer.weights.grad is not None
        return layer.weights.grad.numpy()

    return evaluate


def referee(row: str) -> Evaluate:
    return unisono(row, double=True)


def lightning(row: str, device: str = "lightning.qubit") -> Evaluate:
    import pennylane as qml

    n, steps, _ = steps_of(row)
    gates = {
        "ry": qml.RY, "rz": qml.RZ, "cx": qml.CNOT, "h": qml.Hadamard, "cp": qml.ControlledPhaseShift,
        "swap": qml.SWAP, "u3": qml.U3, "cz": qml.CZ,
    }  # fmt: skip
    letters = {"X": qml.PauliX, "Y": qml.PauliY, "Z": qml.PauliZ}
    words = words_of(row)
    factors = [qml.prod(*[letters[letter](wire) for wire, letter in word]) for _, word in words]
    observable = qml.Hamiltonian([c for c, _ in words], factors) if len(words) > 1 else factors[0]
    machine = qml.device(device, wires=n, c_dtype=np.complex64)

    def tape(angles: np.ndarray) -> Any:
        made = [gates[name](*[angles[i] for i in which], wires=list(wires)) for name, wires, which in steps]
        return qml.tape.QuantumScript(made, [qml.expval(observable)])

    if not row.startswith("grad"):
        return lambda angles: float(machine.execute(tape(angles)))
    config = qml.devices.ExecutionConfig(gradient_method="adjoint", use_device_gradient=True)

    def evaluate(angles: np.ndarray) -> np.ndarray:
        return np.array(machine.compute_derivatives(tape(angles), config)).reshape(-1)

    return evaluate


def kokkos(row: str) -> Evaluate:
    return lightning(row, "lightning.kokkos")


def qulacs(row: str) -> Evaluate:
    from qulacs import Observable, ParametricQuantumCircuit, QuantumCircuit, QuantumState
    from qulacs.circuit import QuantumCircuitOptimizer
    from qulacs.gate import U3, DenseMatrix

    n, steps, _ = steps_of(row)
    observable = Observable(n)
    for coefficient, word in words_of(row):
        observable.add_operator(coefficient, " ".join(f"{letter} {wire}" for wire, letter in word))

    def fill(circuit: Any, angles: np.ndarray, parametric: bool) -> Any:
        for name, wires, which in steps:
            if name in ("ry", "rz"):
                kind = ("add_parametric_%s_gate" if parametric else "add_%s_gate") % name.upper()
                getattr(circuit, kind)(wires[0], -angles[which[0]])  # qulacs turns the other way
            elif name == "u3":
                theta, phi, lam = (angles[i] for i in which)
                circuit.add_gate(U3(wires[0], theta, phi, lam))
            elif name == "cp":
                gate = DenseMatrix(wires[0], np.diag([1, np.exp(1j * angles[which[0]])]))
                gate.add_control_qubit(wires[1], 1)
                circuit.add_gate(gate)
            else:
                adds = {"cx": "add_CNOT_gate", "cz": "add_CZ_gate", "swap": "add_SWAP_gate", "h": "add_H_gate"}
                getattr(circuit, adds[name])(*wires)
        return circuit

    if row.startswith("grad"):
        return lambda angles: -np.array(fill(ParametricQuantumCircuit(n), angles, True).backprop(observable))

    def evaluate(angles: np.ndarray) -> float:
        circuit = fill(QuantumCircuit(n), angles, False)
        QuantumCircuitOptimizer().optimize(circuit, 1)  # the best of none, light, 1, 2, 3 at hea-20
        state = QuantumState(n)
        circuit.update_quantum_state(state)
        return observable.get_expectation_value(state).real

    return evaluate


def aer(row: str) -> Evaluate:
    from qiskit import QuantumCircuit
    from qiskit.quantum_info import SparsePauliOp
    from qiskit_aer import AerSimulator

    if row.startswith("grad"):
        raise NotImplementedError("qiskit-aer has no adjoint gradient")
    n, steps, _ = steps_of(row)
    word = "I" * (n - 1) + "Z"  # the first wire is qiskit's last letter
    fused = row.startswith(("qft", "random"))  # at hea-20 fusion of 2 to 5 qubits costs more than it brings
    machine = AerSimulator(method="statevector", precision="single", max_parallel_threads=THREADS, fusion_enable=fused)

    def evaluate(angles: np.ndarray) -> float:
        circuit = QuantumCircuit(n)
        for name, wires, which in steps:
            getattr(circuit, "u" if name == "u3" else name)(*[float(angles[i]) for i in which], *wires)
        circuit.save_expectation_value(SparsePauliOp(word), range(n))
        return float(machine.run(circuit).result().data()["expectation_value"])

    return evaluate


def tensorcircuit(row: str) -> Evaluate:
    np.ComplexWarning = np.exceptions.ComplexWarning  # type: ignore[attr-defined] # the package is older than numpy 2
    original = np.reshape
    np.reshape = lambda a, shape=None, order="C", newshape=None, **more: original(  # type: ignore[assignment]
        a, newshape if shape is None else shape, order=order, **more
    )
    import jax
    import tensorcircuit as tc

    tc.set_backend("jax")
    tc.set_dtype("complex64")
    n, steps, _ = steps_of(row)
    words = words_of(row)

    def value(angles: Any) -> Any:
        circuit = tc.Circuit(n)
        for name, wires, which in steps:
            given = [angles[i] for i in which]
            keys = {"u3": ("theta", "phi", "lbd"), "cp": ("theta",)}.get(name, ("theta",))
            named = dict(zip(keys, given, strict=False))
            getattr(circuit, {"u3": "u", "cp": "cphase", "cx": "cnot"}.get(name, name))(*wires, **named)
        total = 0.0
        for coefficient, word in words:
            sets = {axis: [wire for wire, letter in word if letter == axis.upper()] for axis in "xyz"}
            total = total + coefficient * tc.backend.real(circuit.expectation_ps(**sets))
        return total

    compiled = jax.jit(jax.grad(value) if row.startswith("grad") else value)
    return lambda angles: np.asarray(jax.block_until_ready(compiled(angles.astype(np.float32))))


CONTESTANTS: dict[str, Callable[[str], Evaluate]] = {
    "unisono": unisono,
    "lightning": lightning,
    "kokkos": kokkos,
    "qulacs": qulacs,
    "aer": aer,
    "tensorcircuit": tensorcircuit,
}


REFEREE = "referee"


# ---- running --------------------------------------------------------------------------------------------------------


def held_memory(process: int | str = "self") -> dict[str, float]:
    """MiB of a process now: all of it (Rss), and what is no file's (Anonymous). The kernel counts page by page."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("Rss", "Anonymous")}


def give_back() -> None:
    """What is garbage, and what the C library keeps of freed memory, to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Sampling(threading.Thread):
    """The most memory of a process until `most` is asked for, looked at as often as this thread can."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.over = process, threading.Event()
        self.seen: list[dict[str, float]] = [held_memory(process)]
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            try:
                self.seen.append(held_memory(self.process))
            except (OSError, KeyError):  # it ended meanwhile
                return

    def most(self) -> dict[str, float]:
        """Of all looks, and how many they were."""
        self.over.set()
        self.join()
        return {name: max(each[name] for each in self.seen) for name in self.seen[0]} | {"looks": len(self.seen)}


def work(name: str, row: str) -> None:
    """A contestant's process: sets up, then evaluates once for each line it is sent; for `MEMORY`, all anew."""
    _, _, count = steps_of(row)
    started = time.perf_counter()
    try:
        small = small_row(row)  # what the libraries themselves take is not the row's
        make = referee if name == REFEREE else CONTESTANTS[name]
        for _ in range(2):  # what only the first circuit of a process leaves behind is gone after the second
            evaluate = make(small)
            for seed in range(2):
                evaluate(angles_of(small, steps_of(small)[2], seed))
        before = held_memory()["Anonymous"]
        del evaluate
        begin = time.perf_counter()
        evaluate = make(row)
        first = np.atleast_1d(evaluate(angles_of(row, count, 0)))
    except (ImportError, NotImplementedError) as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    now = time.perf_counter()
    times = {"start": begin - started, "setup": now - begin, "before_mib": before}
    print(json.dumps(times | {"check": first[:6].tolist()}), flush=True)
    for line in sys.stdin:
        if line.strip() == MEMORY:
            del evaluate
            give_back()
            print(json.dumps({"rest_mib": held_memory()["Anonymous"]}), flush=True)
            sys.stdin.readline()
            evaluate = make(row)
            until = time.perf_counter() + LOOKING
            for seed in itertools.count():
                evaluate(angles_of(row, count, seed))
                if time.perf_counter() > until:
                    break
            print(json.dumps({}), flush=True)
            continue
        angles = angles_of(row, count, int(line))
        begin = time.perf_counter()
        evaluate(angles)
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


def ask(process: subprocess.Popen, line: str = "") -> dict[str, Any]:
    """The next answer that is one; libraries talk as well. Who is not done in time is out of the row."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    try:
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        for answer in process.stdout:
            if answer.startswith("{"):
                return json.loads(answer)
    except BrokenPipeError:
        pass
    finally:
        timer.cancel()
    status = process.wait()
    return {"missing": f"not done in {PATIENCE} s" if status == -9 else f"ended with status {status}"}


def look(process: subprocess.Popen) -> dict[str, Any]:
    """The round in which memory is looked at: before the row is set up again, and while it is and is evaluated."""
    rest = ask(process, MEMORY)
    if "missing" in rest:
        return rest
    sampling = Sampling(process.pid)
    answer = ask(process, "go")
    return answer | rest | sampling.most()


def race(row: str, names: list[str], rounds: int, looks: int) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_PROC_BIND": "false"}
    found: dict[str, Any] = {}
    processes = {}
    for name in [REFEREE, *names]:  # one after the other: setups are timed too
        words = [sys.executable, os.path.abspath(__file__), "--worker", name, "--rows", row]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        found[name] = ask(process)
        if name == REFEREE:
            process.communicate()
        elif "missing" not in found[name]:
            processes[name] = process
            found[name] |= {"times": [], "memory": []}
    for number in range(rounds + looks):
        for name, process in processes.items():
            result = found[name]
            if "missing" in result:
                continue
            answer = ask(process, str(number + 1)) if number < rounds else look(process)
            if "missing" in answer:
                result["missing"] = answer["missing"]
            elif number < rounds:
                result["times"].append(answer["seconds"])
            else:
                result["memory"].append(answer)
    for process in processes.values():
        process.communicate()
    for result in found.values():
        if result.get("times"):
            result["median"] = statistics.median(result["times"])
            result["spread"] = max(result["times"]) - min(result["times"])
    return found


def shown(row: str, found: dict[str, Any]) -> str:
    lines = [f"{row}"]
    best = min((r["median"] for name, r in found.items() if name != "unisono" and "median" in r), default=None)
    for name, result in found.items():
        if name == REFEREE:
            continue
        if "times" not in result:
            lines.append(f"  {name:14} - {result.get('missing', '')[:80]}")
            continue
        line = f"  {name:14}"
        if "median" in result:
            line += f" {result['median']:9.4f} s  spread {result['spread']:.4f}"
        line += f"  start {result['start']:5.1f} s  setup {result['setup']:6.2f} s{took(result)}  {off(result, found)}"
        if name == "unisono" and best and "median" in result:
            line += f"  {best / result['median']:.1f}x the best peer"
        lines.append(line + (f"  {result['missing'][:80]}" if "missing" in result else ""))
    return "\n".join(lines)


def took(result: dict[str, Any]) -> str:
    """The memory of the row, median, least and most of the looks, with what the first one left; that of the process."""
    if not result["memory"]:
        return ""
    reported = []
    for beyond in ([each["rest_mib"] for each in result["memory"]], [result["before_mib"]] * len(result["memory"])):
        sizes = sorted(each["Anonymous"] - base for each, base in zip(result["memory"], beyond, strict=True))
        between = f" ({sizes[0]:.3f} to {sizes[-1]:.3f})" if len(sizes) > 1 else ""
        reported.append(f"{statistics.median(sizes):.3f}{between}")
    full, anonymous = (max(each[name] for each in result["memory"]) for name in ("Rss", "Anonymous"))
    return f"  memory {reported[0]} MiB, from small {reported[1]} (process {full:.0f}, anonymous {anonymous:.0f})"


def off(result: dict[str, Any], found: dict[str, Any]) -> str:
    """How far an answer is from that in double precision."""
    if "check" not in found.get(REFEREE, {}):
        return "not judged"
    return f"off by {float(np.abs(np.array(result['check']) - np.array(found[REFEREE]['check'])).max()):.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=DEFAULT_ROWS)
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--looks", type=int, default=1, help="rounds in which memory is looked at, after the timed ones"
    )
    parser.add_argument("--json", help="add the results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.rows)
        return
    for row in options.rows.split(","):
        found = race(row, options.only.split(","), options.rounds, options.looks)
        print(shown(row, found), flush=True)
        if options.json:
            kept = json.loads(Path(options.json).read_text()) if os.path.exists(options.json) else {}
            with open(options.json, "w") as file:
                json.dump(kept | {row: found}, file, indent=1)


if __name__ == "__main__":
    main()
