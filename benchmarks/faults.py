"""What random faults cost: python benchmarks/faults.py [--faults 100] [--seed 0] [--setup gloo] [--kind SIGKILL]

    python benchmarks/faults.py --faults 40 --seed 1 --append campaign.jsonl      # again with other seeds, to add up
    python benchmarks/faults.py --summary campaign.jsonl                          # the totals of all of them

Jobs train a small model, with a checkpoint every few steps, over gloo and MPI, on one host and on two (network
namespaces, which need root), with ZeRO and pipelines. At random moments something happens to them: see
tests/faults/kinds.py. Each must reach, bit for bit, the parameters and optimizer state of a job that nobody disturbed.
In turn with them, jobs of torchrun, plain torch under DDP on one host, have the faults after which torchelastic
restarts ranks: the time to the next step stands beside ours. Their faults are not counted among `--faults`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults import kinds, records, torchelastic
from tests.faults.campaign import SETUPS, Campaign
from tests.launch import namespaces

ALONE = "FAULTS_ALONE"  # set where this process has mounts, and so a /dev/shm, of its own
PEER_FAULTS = 10  # of a job of torchelastic, about as many as one of ours has


def become_alone() -> None:
    """With root: mounts are seen by this process only, and what it finds in /dev/shm is of its jobs."""
    if os.geteuid() == 0 and ALONE not in os.environ:
        words = ["unshare", "--mount", "--propagation", "slave", sys.executable, *sys.argv]
        if subprocess.run([*words[:4], "true"], capture_output=True).returncode == 0:
            os.environ[ALONE] = "1"
            os.execvp(words[0], words)
    elif ALONE in os.environ:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


def print_now(text: str) -> None:
    print(text, flush=True)


def print_summary(found: list[records.JobRecord]) -> None:
    for line in records.summary(found, [kind.name for kind in torchelastic.KINDS]):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--minutes", type=float, default=600.0, help="leave jobs alone after that time")
    parser.add_argument("--setup", default="", help="only setups whose name this regular expression finds")
    parser.add_argument("--kind", default="", help="only kinds, likewise")
    parser.add_argument("--append", type=Path, help="add a record of each job to this file, as lines of JSON")
    parser.add_argument("--summary", type=Path, help="print the totals of such a file, and run nothing")
    chosen = parser.parse_args()
    if chosen.summary is not None:
        print_summary(records.read(chosen.summary))
        return
    become_alone()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends its jobs and takes its folder away
    began = time.monotonic()
    known = [kind for kind in kinds.available() if re.search(chosen.kind, kind.name)]
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)))
        setups, hosts = [each for each in SETUPS if re.search(chosen.setup, each.name)], None
        if any(each.hosts > 1 for each in setups):
            if reason := namespaces.why_not():
                print(f"no two hosts on this machine: {reason}")
                setups = [each for each in setups if each.hosts == 1]
            else:
                (root / "hosts").mkdir()
                hosts = stack.enter_context(namespaces.two_hosts(root / "hosts"))
        campaign = Campaign(root, random.Random(chosen.seed), seed=chosen.seed, steps=chosen.steps, show=print_now)
        campaign.small_disks = ALONE in os.environ
        campaign.deadline = began + 60 * chosen.minutes
        campaign.peer = torchelastic.TorchelasticJob
        suiting = {each: [kind for kind in known if kind.suits(each)] for each in setups}
        if re.search(chosen.setup, torchelastic.SETUP.name):
            suiting = {torchelastic.SETUP: [kind for kind in known if kind.peer]} | suiting
        setups = [each for each in suiting if suiting[each]]
        if all(each.is_peer for each in setups):
            parser.error(f"no setup has faults for --setup {chosen.setup!r} and --kind {chosen.kind!r} on this machine")
        wanted = {}
        done = turn = 0
        while done < chosen.faults and time.monotonic() < campaign.deadline:
            setup = setups[turn % len(setups)]
            turn += 1
            there = hosts if setup.hosts > 1 else None
            if setup not in wanted:
                wanted[setup] = None if setup.is_peer else campaign.undisturbed(setup, there)
            most = min(PEER_FAULTS, chosen.faults) if setup.is_peer else chosen.faults - done
            faults = campaign.disturb(setup, wanted[setup], suiting[setup], most, there)
            done += 0 if setup.is_peer else faults
            if chosen.append is not None:
                records.append(chosen.append, campaign.records[-1:])
        print_summary(campaign.records)
        print(f"in {time.monotonic() - began:.0f} s, seed {chosen.seed}, undisturbed jobs included")
        raise SystemExit(1 if any(each.wrong for each in campaign.records if each.setup != records.PEER) else 0)


if __name__ == "__main__":
    main()
