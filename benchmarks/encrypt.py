"""What `unisono run --encrypt` costs: python benchmarks/encrypt.py [--size 64] [--rounds 5] [--repeats 2]

all_reduce over gloo between two hosts, which are network namespaces of this machine (root): so both ranks, both tunnels
and the cable share its cores. Runs with and without --encrypt take turns; the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.launch import namespaces

SCRIPT = """
import sys, time
import torch
import unisono as uni
comm = uni.init()
tensor = torch.ones(int(sys.argv[1]) << 18)
times = []
for _ in range(1 + int(sys.argv[2])):
    comm.barrier()
    start = time.perf_counter()
    comm.all_reduce(tensor)
    times.append(time.perf_counter() - start)
if comm.rank == 0:
    print(min(times[1:]))
uni.shutdown()
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    chosen = parser.parse_args()
    if reason := namespaces.why_not():
        sys.exit(f"no two hosts on this machine: {reason}")
    best = {"": float("inf"), "--encrypt": float("inf")}
    with tempfile.TemporaryDirectory() as folder, namespaces.two_hosts(Path(folder)) as hosts:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        variables = {**os.environ, "UNISONO_SSH": hosts.ssh, "OMP_NUM_THREADS": "1"}
        for _ in range(chosen.repeats):
            for option in best:
                words = [*hosts.inside, sys.executable, "-P", "-m", "unisono", "run", "--backend", "gloo"]
                words += [*option.split(), "--start-timeout", "300", "-H", "node0:1,node1:1"]
                words += [str(script), str(chosen.size), str(chosen.rounds)]
                done = subprocess.run(words, env=variables, check=True, stdout=subprocess.PIPE, text=True)
                best[option] = min(best[option], float(done.stdout.split()[-1]))
    for option, seconds in best.items():
        print(f"all_reduce of {chosen.size} MiB {option or 'plain':>9}: {seconds * 1e3:8.1f} ms")
    print(f"ratio: {best['--encrypt'] / best['']:.2f}")


if __name__ == "__main__":
    main()
