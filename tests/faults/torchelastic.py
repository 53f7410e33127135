"""Jobs of torchrun, the peer beside which the time to resume is stated: torch_program.py, disturbed as ours are."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults import kinds, records
from tests.faults.campaign import MOST_RESTARTS, NOTES, Job, Setup
from tests.launch.harness import Run

PROGRAM = str(Path(__file__).with_name("torch_program.py"))
SETUP = Setup(records.PEER, "", is_peer=True)
KINDS = tuple(kind for kind in (*kinds.SIGNALS, *kinds.OTHERS) if kind.peer)


class Torchrun(Run):
    @property
    def words(self) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", *self.arguments]


@dataclass
class TorchelasticJob(Job):
    """Two ranks on this host, started again by torch's elastic agent.

    Ranks that were started again may find gloo's addresses of those before them in the store of torch 2.13, and then
    wait for each other for half an hour; so a job is given up earlier than one of ours.
    """

    longest = 120.0

    def start(self) -> None:
        self.starts += 1
        for folder in (self.folder / "run", self.notes, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", MOST_RESTARTS]
        variables = {NOTES: str(self.notes), "FAULTS_PACE": str(self.pace), "TMPDIR": str(self.temporary)}
        words = [*options, PROGRAM, str(self.folder / "run"), str(self.steps)]
        self.run = Torchrun(words, self.folder, variables, anew=True)
        with (self.folder / f"output.{self.starts}").open("wb") as output:
            self.process = self.run.start(stdout=output, stderr=output, start_new_session=True)
