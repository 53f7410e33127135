"""The programs of document 001 (torch.distributed), by the commands in their docstrings, and what they print."""

from __future__ import annotations

import re

import pytest

from tests.examples.runner import Ran, printed_in, run_example

# What each rank prints, line by line, as a pattern in which {rank} is its number.
PRINTED = {
    "template.py": [*[r"\[(\d)\] hello from rank \1 of 2"] * 2, r"seats: \[\(0, 2\), \(1, 2\)\]"],
    "launch.py": [r"rank {rank}/4, local rank {rank} on localhost: deviation \S+"],
    "initialise.py": [
        rf"{how}: rank {{rank}} of 4 over gloo, ranks sum to 6" for how in ("environment", "tcp", "file")
    ],
    "blocking.py": [r"rank {rank} has 1"],
    "nonblocking.py": [r"rank {rank} started (sending|receiving)", r"rank {rank} has 1, and 499500 in the meantime"],
    "group.py": [r"rank {rank} has [12]", r"rank {rank} is rank [01] of \(., .\), which sum to [15]"],
    "collectives.py": [
        r"broadcast: \[3\]",
        r"reduce: \[\d+\]",
        r"all_reduce: \[10\]",
        r"scatter: \[\d+\]",
        r"gather: (None|\[1, 2, 3, 4\])",
        r"all_gather: \[1, 2, 3, 4\]",
        r"reduce_scatter: \[6[048]\]|reduce_scatter: \[72\]",
        r"all_to_all: \[{rank}, 1{rank}, 2{rank}, 3{rank}\]",
        *("sum: 10", "avg: 2", "product: 24", "min: 1", "max: 4", "band: 0", "bor: 7", "bxor: 4", r"premul_sum: 5\.0"),
    ],
    "asynchronous.py": ["rank {rank}: 101"],
    "partition.py": [r"rank {rank} has (449|450) of 1797 samples: \d+, \d+, \d+ \.\.\."],
    "ring.py": [rf"{length} numbers: whole tensors deviate by \S+, chunks by \S+" for length in (1, 10, 1001)],
}


@pytest.mark.parametrize(("path", "number"), printed_in("seeds/001_torch"))
def test_programs_print_what_they_say(path: str, number: int) -> None:
    name = path.rpartition("/")[2]
    ran = run_example(path, number=number)
    if name == "sgd.py":
        _learns_as_one_process_does(ran)
    elif name == "mpi.py":  # which mpiexec prints as it comes
        right = r"rank {} of 4 over mpi: \[6.0, 6.0\] and \[6.0, 6.0\]"
        _is_printed([right.format(rank) for rank in range(4)], sorted(ran.text.splitlines()))
    else:
        for rank, printed in enumerate(ran.ranks):
            _is_printed([pattern.replace("{rank}", str(rank)) for pattern in PRINTED[name]], printed.splitlines())


def _is_printed(patterns: list[str], lines: list[str]) -> None:
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


def _learns_as_one_process_does(ran: Ran) -> None:
    for rank, printed in enumerate(ran.ranks):
        losses = [float(loss) for loss in re.findall(rf"rank {rank}, epoch \d: (\S+)", printed)]
        assert len(losses) == 3
        assert losses == sorted(losses, reverse=True)
    assert "worst deviation from one process" in ran.ranks[0]
