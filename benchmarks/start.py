"""How long from the command to the first finished all_reduce: `unisono run` against `torchrun`.

Both start the same script with the same ranks on this machine, one after the other, in turns. The time ends
when the last rank has its first all_reduce behind it, so how fast a launcher ends its job does not count.

    python benchmarks/start.py --ranks 8 --repeats 5 --json start.json
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

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    file.write(repr(time.time()))
dist.destroy_process_group()
"""


def launchers(ranks: int) -> dict[str, list[str]]:
    run = [sys.executable, "-P", "-m", "unisono", "run", "-n", str(ranks), "--backend", "gloo"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return {"unisono run": run, "torchrun": torchrun}


def measure(command: list[str], ranks: int) -> float:
    """Seconds from the command to the last rank's first all_reduce."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        times = Path(folder) / "times"
        times.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        start = time.time()
        done = subprocess.run(
            [*command, str(script), str(times)], env=environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        ends = [float(path.read_text()) for path in times.iterdir()]
        assert len(ends) == ranks
        return max(ends) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    commands = launchers(chosen.ranks)
    for command in commands.values():  # once unmeasured: files come into the page cache, byte code is written
        measure(command, chosen.ranks)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(chosen.repeats):
        for name, command in commands.items():
            seconds[name].append(measure(command, chosen.ranks))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"command to first all_reduce, {chosen.ranks} ranks, {chosen.repeats} repeats, {os.cpu_count()} cores")
    print(f"{'':14}{'median':>9}{'least':>9}{'most':>9}")
    for name, values in seconds.items():
        print(f"{name:14}{medians[name]:8.2f}s{min(values):8.2f}s{max(values):8.2f}s")
    ratio = medians["unisono run"] / medians["torchrun"]
    print(f"ratio of medians: {ratio:.3f} (aim 0.2, at most 0.3)")
    if chosen.json:
        report = {"ranks": chosen.ranks, "cores": os.cpu_count(), "seconds": seconds, "ratio": ratio}
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
