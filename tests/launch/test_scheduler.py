"""Which node of a job a launcher is, by torchrun's options and by the variables of Slurm, Kubernetes and Kubeflow."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from unisono import cli
from unisono.errors import UsageError
from unisono.launch.scheduler import NodeGroup, find_group

HOST = socket.gethostname()
NOTHING: dict[str, Any] = {"nnodes": None, "per_node": None, "node_rank": None, "address": None, "port": 0}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "8",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURMD_NODENAME": "gpu2",
}


@pytest.mark.parametrize(
    ("options", "environ", "group"),
    [
        ({}, {}, None),
        ({}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "JOB_COMPLETION_INDEX": "1"}, None),
        (
            {"nnodes": "2", "per_node": "4", "node_rank": 1, "address": "a", "port": 5},
            {"PET_NODE_RANK": "0", "MASTER_ADDR": "b"},
            NodeGroup(1, 2, 4, "a", 5, HOST, ""),
        ),
        ({"nnodes": "1"}, {}, NodeGroup(0, 1, 1, "127.0.0.1", 0, HOST, "")),
        (
            {"nnodes": "3"},
            {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "77"},
            NodeGroup(2, 3, 1, "train-0.train", 77, HOST, ""),
        ),
        ({}, KUBEFLOW, NodeGroup(1, 2, 4, "train-master-0", 23456, HOST, "")),
        ({"per_node": "2"}, SLURM, NodeGroup(3, 5, 2, "127.0.0.1", 20429, "gpu2", "Slurm's 7.2", 2, 4)),
    ],
)
def test_groups(options: dict[str, Any], environ: dict[str, str], group: NodeGroup | None) -> None:
    assert find_group(**{**NOTHING, **options}, environ=environ) == group


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ({"nnodes": "1:4"}, {}, "--nnodes 1:4: expected a whole number of at least 1"),
        ({"nnodes": "2"}, {}, "--nnodes 2: which of them is this? give --node-rank"),
        ({"nnodes": "2", "node_rank": 2}, {}, "--node-rank 2 does not fit --nnodes 2: nodes go from 0 to 1"),
        ({"nnodes": "2"}, {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX x: expected a whole number"),
        ({"nnodes": "2", "node_rank": 0}, {}, "--nnodes 2: where is node 0? give --master-addr"),
        ({"nnodes": "2", "node_rank": 0}, {"MASTER_ADDR": "a..b"}, "--master-addr a..b: no host can have this name"),
        ({"node_rank": 0}, {}, "--node-rank and --master-addr are for a job of several nodes: give --nnodes too"),
        ({"nnodes": "1", "per_node": "many"}, {}, "--nproc-per-node many: expected a whole number"),
        ({"nnodes": "1"}, {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; expected a number from 1 to 65535"),
    ],
)
def test_what_makes_no_group_is_one_sentence(options: dict[str, Any], environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as error:
        find_group(**{**NOTHING, **options}, environ=environ)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["-n", "2", "--nnodes", "2"], "-n and --nnodes both say how many ranks there are; give one of them"),
        (["--nnodes", "1", "--elastic", "--max-restarts", "1"], "--elastic needs one launcher for all hosts"),
        (["--nnodes", "1", "--backend", "mpi"], "--backend mpi needs one launcher for all hosts"),
    ],
)
def test_options_that_exclude_each_other(words: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *words, __file__]) == 2
    assert capsys.readouterr().err.startswith(f"unisono: {output}")


def test_srun_with_n_would_be_many_jobs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", "-n", "2", __file__]) == 2
    assert capsys.readouterr().err.startswith("unisono: srun has started 5 launchers, and with -n each would run a job")
