"""Options of torchrun and of Paddle's launcher: taken as they are, or refused in a sentence."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from tests.launch.harness import Run, write_script
from unisono.errors import UsageError
from unisono.launch import command
from unisono.launch.job import LaunchJob


def _job(folder: Path, *options: str) -> LaunchJob:
    script = write_script(folder, "pass")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_options(parser)
    return command.job_of(parser.parse_args([*options, str(script)]))


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("--standalone --nproc-per-node 3", 3),
        ("--standalone", 1),
        ("--nproc_per_node=2 --nnodes=1:1 --rdzv_id=7 --rdzv-backend=c10d --rdzv-endpoint=localhost:0", 2),
        ("--gpus=0,1 --log_dir logs", 2),
        ("--devices 0,3,5", 3),
        ("-np 2 --max-restarts 2 --monitor-interval 5 --start-method spawn --role trainer -r 3 -t 3", 2),
    ],
)
def test_they_are_taken(options: str, ranks: int, tmp_path: Path) -> None:
    job = _job(tmp_path, *options.split())
    assert job.world == ranks
    if "gpus" in options:
        assert job.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert job.output_directory == "logs"


def test_the_endpoint_says_which_node_this_is(tmp_path: Path) -> None:
    here = _job(tmp_path, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", "127.0.0.1:29400").group
    assert here is not None
    assert (here.node, here.nodes, here.address, here.port) == (0, 2, "127.0.0.1", 29400)
    there = _job(tmp_path, "--nnodes", "2", "--rdzv-endpoint", "192.0.2.1").group
    assert there is not None
    assert (there.node, there.address) == (1, "192.0.2.1")
    assert _job(tmp_path, "--nnodes", "2", "--rdzv-endpoint", socket.gethostname(), "--node-rank", "1").group


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--nnodes 1:4", "give one number"),
        ("--nnodes 3 --rdzv-endpoint 192.0.2.1:1", "give --node-rank"),
        ("--nnodes 2 --rdzv-endpoint :29400", "expected the address of node 0"),
        ("--nnodes 2 --rdzv-endpoint a..b:1 --node-rank 1", "no host can have this name"),
        ("--nnodes 2 --rdzv-backend etcd", "without another service"),
        ("--standalone --nnodes 2", "give one of them"),
        ("--gpus 0,0", "different numbers"),
        ("--gpus all", "different numbers"),
        ("-n 2 --log-dir a --output-filename b", "give one of them"),
        ("-n 2 --no-python -m", "give one of them"),
        ("-n 2 --no-python", "no such command"),
    ],
)
def test_they_are_refused_in_a_sentence(options: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        _job(tmp_path, *options.split())


PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=-1, type=int)
parser.add_argument("--lr", type=float)
print(parser.parse_args())
"""
MENTIONS = """
import sys
command = ["python", "other.py", "--local-rank", "0"]
print(sys.argv[1:])
"""


def test_a_script_that_parses_it_gets_its_local_rank(tmp_path: Path) -> None:
    parses, mentions = tmp_path / "parses.py", tmp_path / "mentions.py"
    parses.write_text(PARSES)
    mentions.write_text(MENTIONS)
    given = {
        ("-n", "2", "parses.py", "--lr", "1"): [f"[{r}] Namespace(local_rank={r}, lr=1.0)" for r in range(2)],
        ("-n", "1", "--use-env", "parses.py"): ["[0] Namespace(local_rank=-1, lr=None)"],
        ("-n", "1", "parses.py", "--local_rank", "5"): ["[0] Namespace(local_rank=5, lr=None)"],
        ("-n", "1", "mentions.py"): ["[0] []"],
    }
    for words, expected in given.items():
        ran = Run(["run", *words], tmp_path).finish()
        assert sorted(ran.stdout.splitlines()) == expected, ran.stderr


def test_a_command_that_is_no_python(tmp_path: Path) -> None:
    waits = "[ $RANK = 0 ] && touch said || until [ -e said ]; do sleep 0.05; done"  # rank 1 fails last
    program = f"echo $RANK of $WORLD_SIZE; {waits}; exit $RANK"
    ran = Run(["run", "-n", "2", "--no-python", "sh", "-c", program], tmp_path).finish()
    assert sorted(ran.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]
    assert ran.returncode == 1
