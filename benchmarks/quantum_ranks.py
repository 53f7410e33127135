"""A state sharded over ranks against one process with as many threads, on the same cores.

Both run a hardware-efficient ansatz with a CNOT ring, in turns; compiling is not counted.

    python benchmarks/quantum_ranks.py --wires 24 --ranks 2 --backends gloo,mpi --json ranks.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run_here(wires: int, depth: int, threads: int, repeats: int, out: str) -> None:
    """What each contestant does: write its times, and the seconds of them that exchanges took."""
    import torch

    import unisono as uni
    from unisono.quantum.circuit.templates import hardware_efficient
    from unisono.quantum.distributed.local_steps import LocalExchange
    from unisono.quantum.distributed.program import QuantumProgram
    from unisono.quantum.state import State

    comm = uni.init()
    torch.set_num_threads(threads)
    circuit = hardware_efficient(wires, depth)
    weights = torch.linspace(-3, 3, circuit.weights, dtype=torch.float64).numpy()
    program: QuantumProgram | None = None
    times, exchanging = [], []
    for _ in range(repeats + 1):
        state = State(wires, comm, dtype=torch.complex64)
        program = program or QuantumProgram.of(state.schedule(circuit), state.rank)
        comm.barrier()
        begin = time.perf_counter()
        spent = 0.0
        state.begin(program.schedule)
        for step in program.steps:
            before = time.perf_counter()
            state.do(step, weights)
            spent += (time.perf_counter() - before) * isinstance(step, LocalExchange)
        comm.barrier()
        times.append(time.perf_counter() - begin)
        exchanging.append(spent)
    if comm.rank == 0:
        exchanges = len(program.schedule.exchanges) if program else 0
        Path(out).write_text(json.dumps({"seconds": times[1:], "exchanging": exchanging[1:], "exchanges": exchanges}))


def contestant(backend: str, chosen: argparse.Namespace, folder: Path) -> dict:
    out = folder / "out.json"
    alone = backend == "one process"
    threads = chosen.ranks if alone else 1
    job = [__file__, "--inside", str(threads), "--wires", str(chosen.wires), "--depth", str(chosen.depth)]
    job += ["--repeats", str(chosen.repeats), "--json", str(out)]
    ranks = ["-m", "unisono", "run", "-n", str(chosen.ranks), "--backend", backend]
    words = [sys.executable, *([] if alone else ranks), *job]
    done = subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wires", type=int, default=24)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", default="gloo,mpi")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, twice")
    parser.add_argument("--json", default="")
    parser.add_argument("--inside", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        run_here(chosen.wires, chosen.depth, chosen.inside, chosen.repeats, chosen.json)
        return
    names = ["one process", *chosen.backends.split(",")]
    found: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            for name in names:
                found[name].append(contestant(name, chosen, Path(folder)))
    table = {}
    for name in names:
        seconds = [each for part in found[name] for each in part["seconds"]]
        exchanging = [each for part in found[name] for each in part["exchanging"]]
        table[name] = {
            "median_s": statistics.median(seconds),
            "least_s": min(seconds),
            "most_s": max(seconds),
            "exchanging_s": statistics.median(exchanging),
            "exchanges": found[name][0]["exchanges"],
        }
    full = table["one process"]["median_s"]
    print(f"{chosen.wires} wires, depth {chosen.depth}, complex64; {chosen.ranks} threads or {chosen.ranks} ranks")
    for name, row in table.items():
        print(
            f"{name:12} {row['median_s']:.3f} s ({row['least_s']:.3f} to {row['most_s']:.3f}), ratio "
            f"{row['median_s'] / full:.2f}, of it {row['exchanging_s']:.3f} s in {row['exchanges']} exchanges"
        )
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
