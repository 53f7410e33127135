"""The programs of document 004 (an overview of parallelism): each holds itself against one device, and reports it."""

from __future__ import annotations

import re

import pytest

from tests.examples.runner import printed_in, run_example

DEVIATIONS = {  # how many are printed
    "dp.py": 1,
    "ddp.py": 1,
    "ddp_torch.py": 1,
    "fsdp.py": 4,
    "pp.py": 3,
    "tp.py": 4,
    "cp.py": 2,
    "hybrid.py": 1,
}


@pytest.mark.parametrize(("path", "number"), printed_in("seeds/004_overview"))
def test_strategies_give_the_result_of_one_device(path: str, number: int) -> None:
    ran = run_example(path, number=number)
    found = [float(number) for number in re.findall(r"deviation\D*? (\d\.\de[-+]\d+)", ran.ranks[0])]
    assert len(found) == DEVIATIONS[path.rpartition("/")[2]], ran.text
    assert max(found) < 1e-9
    assert not any(ran.ranks[1:])
    _look_closer(path, ran.ranks[0])


def _look_closer(path: str, printed: str) -> None:
    if path.endswith("fsdp.py"):
        kept = re.findall(r"zero=(\d): (\d+)% of the state, (\d+)% of the parameters", printed)
        assert kept == [("0", "100", "100"), ("1", "25", "100"), ("2", "25", "100"), ("3", "25", "25")]
    if path.endswith("pp.py"):
        bubbles = [float(bubble) for bubble in re.findall(r"bubble (\S+)%", printed)]
        assert bubbles[0] == 75
        assert bubbles[1] == bubbles[2] < 30
        kept_at_most = re.findall(r"at most (\d+) microbatch", printed)
        assert kept_at_most == ["1", "8", "4"]
    if path.endswith("ddp.py"):
        assert "step 7 under dp=4, then to step 20 under dp=4,zero=1" in printed
