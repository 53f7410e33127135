"""What random kills cost: python benchmarks/faults.py [--kills 50] [--plan dp=2,zero=1] [--steps 1000]

Jobs train a small model, with a checkpoint every few steps, under `unisono run --max-restarts`. At random moments, also
while ranks start, resume or save, one of their ranks gets SIGKILL. Each job must reach, bit for bit, the parameters and
optimizer state of a job that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "tests" / "faults" / "program.py"
MOST_RESTARTS = 1000
PAUSES = (0.2, 4.0)  # seconds between kills: from before a start is over to after many checkpoints


def start(folder: Path, plan: str, steps: int, ranks: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--max-restarts", str(MOST_RESTARTS)]
    words += [str(PROGRAM), str(folder), plan, "none", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def ranks_of(launcher: int) -> list[int]:
    """The processes that are ranks: the children of the launcher's agent."""
    return [rank for agent in children(launcher) for rank in children(agent)]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def digest_of(output: str) -> str:
    found = re.search(r"step \d+ done: (\w+)", output)
    if not found:
        raise SystemExit(f"a job did not come to its end:\n{output[-3000:]}")
    return found[1]


def disturb(job: subprocess.Popen[str], kills: int, chance: random.Random) -> int:
    """Kill a rank now and then until the job ends or there were enough; how many were killed."""
    done = 0
    while job.poll() is None and done < kills:
        time.sleep(chance.uniform(*PAUSES))
        alive = ranks_of(job.pid)
        if alive:
            try:
                os.kill(chance.choice(alive), signal.SIGKILL)
                done += 1
            except ProcessLookupError:
                continue
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--plan", default="dp=2,zero=1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        job = start(root / "undisturbed", chosen.plan, chosen.steps, chosen.ranks)
        wanted = digest_of(job.communicate()[0])
        print(f"undisturbed: {chosen.steps} steps under {chosen.plan}, state {wanted}", flush=True)
        killed, jobs, lost, repeated = 0, 0, 0, 0
        counted: Counter[str] = Counter()
        while killed < chosen.kills:
            folder = root / f"job{jobs}"
            job = start(folder, chosen.plan, chosen.steps, chosen.ranks)
            here = disturb(job, chosen.kills - killed, chance)
            output = job.communicate()[0]
            killed, jobs, lost = killed + here, jobs + 1, lost + (digest_of(output) != wanted)
            starts = json.loads((folder / "run.json").read_text())["starts"]
            counted["restarts"] += output.count("restart ")
            counted["resumed from a checkpoint"] += sum(each["first_step"] > 0 for each in starts)
            counted["passed over a damaged checkpoint"] += output.count("is damaged")
            steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
            repeated += len(steps) - len(set(steps))
            print(f"job {jobs}: {here} kills, state {digest_of(output)}", flush=True)
        print(f"{killed} kills in {jobs} jobs; {', '.join(f'{name}: {count}' for name, count in counted.items())}")
        print(f"in {time.monotonic() - began:.0f} s, the undisturbed job included")
        print(f"lost: {lost} of {jobs} jobs differ from the undisturbed one; {repeated} steps are logged twice")
        raise SystemExit(1 if lost or repeated else 0)


if __name__ == "__main__":
    main()
