"""The campaign of random faults in short; benchmarks/faults.py is the whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults import kinds
from tests.faults.campaign import SETUPS, Campaign

FAULTS = 5  # for each setup


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gloo, ZeRO 1", "MPI, pipeline"])
def test_random_faults_change_nothing(name: str, tmp_path: Path) -> None:
    setup = next(each for each in SETUPS if each.name == name)
    if setup.backend == "mpi":
        pytest.importorskip("mpi4py")
    campaign = Campaign(tmp_path, random.Random(25))
    wanted = campaign.undisturbed(setup, None)
    done = 0
    while done < FAULTS:
        done += campaign.disturb(setup, wanted, [*kinds.SIGNALS, *kinds.FILES, *kinds.OTHERS], FAULTS - done)
    assert [record.wrong for record in campaign.records if record.wrong] == []
    assert sum(len(record.faults) for record in campaign.records) == FAULTS
