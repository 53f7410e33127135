"""A host that is gone: the job goes on without it where it may, and says what happened."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono as uni
from tests import warm
from tests.faults import program
from tests.faults.test_kills import PROGRAM, wait_for_step
from tests.launch import namespaces
from tests.launch.harness import Run, wait_for, write_script
from tests.launch.namespaces import Hosts
from tests.ranks import RankPool
from unisono.errors import UsageError
from unisono.launch import environment, hosts, launcher
from unisono.launch.job import SCRIPT, Entrypoint, LaunchJob
from unisono.launch.outcome.failure import RESUMABLE

STEPS = 12
PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
ON_PAGE = re.search(r"\$ unisono run (?P<options>--elastic .*) train.py\n(?P<gone>.*)\n", PAGE.read_text())
SILENCE = 3  # seconds


@pytest.fixture
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(f"no two hosts on this machine: {reason}")
    with namespaces.two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def agent_of(folder: Path, rank: int) -> int:
    """The process whose child the rank is."""
    pid = (folder / f"at.{rank}").read_text().split()[0]
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def on_two_hosts(made: Hosts, folder: Path, *arguments: str) -> Run:
    """The command and the agents are forked, behind an ssh that is real."""
    variables = {"UNISONO_SSH": made.ssh, environment.HOST_TIMEOUT: str(SILENCE)}
    run = Run([], folder, variables, before=made.inside, host=made.namespaces[0])
    run.arguments = ["run", "--python", str(warm.write_stand_in(folder / "python", run.mark)), *arguments]
    return run


@pytest.mark.thorough
@pytest.mark.hosts
def test_the_job_goes_on_without_a_host_that_is_gone(two_hosts: Hosts, tmp_path: Path) -> None:
    assert ON_PAGE is not None
    folder = tmp_path / "run"
    options = shlex.split(ON_PAGE["options"])
    run = on_two_hosts(two_hosts, tmp_path, *options, PROGRAM, str(folder), "auto", "stay:7", str(STEPS))
    with run.started() as process:
        wait_for_step(folder, 7, 4)
        two_hosts.kill_second()
        out, output = process.communicate(timeout=240)
        assert run.left_running() == []
    assert process.returncode == 0, out + output
    assert [line for line in output.splitlines() if not line.startswith("[")] == [ON_PAGE["gone"]]
    _, start = json.loads((folder / "run.json").read_text())["starts"]
    assert start["world"] == 2
    assert start["first_step"] > 0
    assert f"start 1 from step {start['first_step']}: plan {start['plan']}" in out
    assert f"step {STEPS} done" in out
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.thorough
@pytest.mark.hosts
@pytest.mark.parametrize("more", [[], ["--encrypt"]])
def test_a_host_that_is_back_is_taken_back(
    two_hosts: Hosts, tmp_path: Path, pools: Callable[[str, int], RankPool], more: list[str]
) -> None:
    """With the parameters, at the end, of a job that was stopped at the same steps and resumed with as many ranks."""
    folder, plan = tmp_path / "run", "dp={ranks},zero=1"
    options = ("--elastic", "2:4", "--max-restarts", "3", "-H", "node0:2,node1:2", *more)
    run = on_two_hosts(two_hosts, tmp_path, *options, PROGRAM, str(folder), plan, "stay:7,hold:9", str(STEPS))
    with run.started() as process:
        wait_for_step(folder, 7, 4)
        two_hosts.kill_second()
        wait_for(folder / "held.0", process)
        two_hosts.revive_second()
        out, output = process.communicate(timeout=240)
        assert run.left_running() == []
    assert process.returncode == 0, out + output
    assert [line for line in output.splitlines() if not line.startswith("[")] == [
        "host node1 is lost (its agent was lost); continuing with 2 ranks on node0: restart 1 of 3",
        "host node1 is back; continuing with 4 ranks on node0, node1",
    ]
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start["world"] for start in starts] == [4, 2, 4]
    first, second = (start["first_step"] for start in starts[1:])
    assert first in (5, 10), "a checkpoint of before the loss"
    assert second >= 9, "saved when the host came back"
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    parts = ((4, first), (2, second), (4, STEPS))
    again = [pools("gloo", n).run(program.trained, str(tmp_path / "again"), plan, "none", end)[0] for n, end in parts]
    assert f"step {STEPS} done: {again[-1][0]}" in out


@pytest.mark.thorough
@pytest.mark.hosts
def test_a_host_that_falls_silent_is_noticed(two_hosts: Hosts, tmp_path: Path) -> None:
    """The first of the list, where the ranks' store was."""
    folder = tmp_path / "run"
    options = ("--elastic", "--max-restarts", "3", "-H", "node1:1,node0:1")
    run = on_two_hosts(two_hosts, tmp_path, *options, PROGRAM, str(folder), "dp={ranks}", "stay:7", str(STEPS))
    with run.started() as process:
        wait_for_step(folder, 7, 2)
        two_hosts.cut_cable()
        out, output = process.communicate(timeout=240)
        two_hosts.kill_second()  # what runs there would end by itself, after minutes
        assert run.left_running() == []
    assert process.returncode == 0, out + output
    assert "host node1 is lost (its agent was lost); continuing with 1 rank on node0: restart 1 of 3" in output
    assert f"step {STEPS} done" in out
    steps = [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.thorough
@pytest.mark.hosts
def test_sigterm_to_an_agent_ends_the_job_on_all_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """Also where its ranks have saved and ended well: the other host's agent would wait for it."""
    folder = tmp_path / "run"
    options = ("--max-restarts", "3", "-H", "node0:1,node1:1")
    run = on_two_hosts(two_hosts, tmp_path, *options, PROGRAM, str(folder), "dp=2", "none", "100000")
    with run.started() as process:
        wait_for_step(folder, 7, 2)
        os.kill(agent_of(folder, 1), signal.SIGTERM)
        out, output = process.communicate(timeout=120)
        assert run.left_running() == []
    assert process.returncode == RESUMABLE, out + output
    assert "stopped by SIGTERM to the agent on host node1" in output


@pytest.mark.thorough
@pytest.mark.hosts
def test_a_host_that_is_cut_off_for_a_moment_is_named(two_hosts: Hosts, tmp_path: Path) -> None:
    """Its agent, without a launcher, stops its ranks; where these can still save with the others, the job has saved."""
    folder = tmp_path / "run"
    run = on_two_hosts(two_hosts, tmp_path, "-H", "node0:1,node1:1", PROGRAM, str(folder), "dp=2", "none", "100000")
    with run.started() as process:
        wait_for_step(folder, 7, 2)
        two_hosts.cut_cable()
        time.sleep(SILENCE + 2)
        two_hosts.mend_cable()
        out, output = process.communicate(timeout=120)
        assert run.left_running() == []
    assert process.returncode in (1, RESUMABLE), out + output
    named = r"^the agent on host node1 was lost; its ranks are 1(:|; stopped by SIGTERM to a rank: |$)"
    assert re.search(named, output, re.MULTILINE), output


STAYS = "import os, pathlib, time\npathlib.Path('up.' + os.environ['RANK']).touch()\ntime.sleep(1000)\n"


@pytest.mark.hosts
def test_without_elastic_a_host_that_is_gone_ends_the_job(two_hosts: Hosts, tmp_path: Path) -> None:
    write_script(tmp_path, STAYS)
    run = on_two_hosts(two_hosts, tmp_path, "--max-restarts", "3", "-H", "node0:1,node1:1", "script.py")
    with run.started() as process:
        for rank in range(2):
            wait_for(tmp_path / f"up.{rank}", process)
        two_hosts.kill_second()
        _, output = process.communicate(timeout=30)
        assert run.left_running() == []
    assert process.returncode == 1
    assert re.fullmatch(r"the agent on host node1 was lost; its ranks are 1(:\n.*)?\n", output, re.DOTALL), output


def job(named: str, ranks: int | None) -> LaunchJob:
    listed = hosts.parse_list(named)
    placements = tuple(hosts.assign_ranks(listed, ranks))
    return LaunchJob(Entrypoint(SCRIPT, "x.py"), placements, hosts=tuple(listed), elastic=True, max_restarts=3)


def test_job_without_lost_hosts() -> None:
    full = job("a:2,b:2,c:1", None)
    left = launcher.without_hosts(full, {"b": "its agent was lost"})
    assert [(each.host.name, each.first_rank, each.count) for each in left.placements] == [("a", 0, 2), ("c", 2, 1)]
    assert launcher.describe_restart({"b": "its agent was lost"}, left, 2) == (
        "host b is lost (its agent was lost); continuing with 3 ranks on a, c: restart 2 of 3"
    )
    assert launcher.why_not_continue(replace(full, min_ranks=4), left, 2) == (
        "3 ranks on a, c are too few to continue: --min-ranks is 4"
    )
    further = launcher.without_hosts(left, {"a": "ssh refused"})
    assert (further.world, further.environment[environment.LOST_HOSTS]) == (1, "b,a")
    assert launcher.why_not_continue(left, further, 3) == ""
    assert launcher.why_not_continue(left, further, 4) == "1 rank on c could continue, but --max-restarts 3 is used up"
    nothing = launcher.without_hosts(further, {"c": "x"})
    assert launcher.why_not_continue(left, nothing, 3) == "no host is left to continue on"


def test_job_with_a_host_that_is_back() -> None:
    full = job("a:2,b:2,c:1", None)
    left = launcher.without_hosts(launcher.without_hosts(full, {"b": "x"}), {"c": "y"})
    more = launcher.with_hosts(left, full, ["b"])
    assert [(each.host.name, each.first_rank, each.count) for each in more.placements] == [("a", 0, 2), ("b", 2, 2)]
    assert more.environment[environment.LOST_HOSTS] == "c"
    assert launcher.describe_return(["b"], more) == "host b is back; continuing with 4 ranks on a, b"
    assert environment.LOST_HOSTS not in launcher.with_hosts(more, full, ["c"]).environment
    assert launcher.why_not_continue(more, left, 4) == "", "its return was not one of the 3 restarts"


def test_the_agent_of_this_host_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (temporary := tmp_path / "tmp").mkdir()
    words = ["run", "-n", "2", "--max-restarts", "1", PROGRAM, str(folder), "dp=2", "hold:7", str(STEPS)]
    run = Run(words, tmp_path, {"TMPDIR": str(temporary)})
    with run.started() as process:
        wait_for_step(folder, 7, 2)
        os.kill(agent_of(folder, 0), signal.SIGKILL)
        out, output = process.communicate(timeout=120)
        assert run.left_running() == []
    assert process.returncode == 0, out + output
    assert "restart 1 of 1" in output
    assert list(temporary.glob("unisono-*")) == []
    assert f"step {STEPS} done" in out


def test_spare_hosts_take_the_place_of_the_lost() -> None:
    left = launcher.without_hosts(job("a:2,b:2,spare:2", 4), {"b": "its agent was lost"})
    assert [(each.host.name, each.count) for each in left.placements] == [("a", 2), ("spare", 2)]


def test_a_plan_by_hand_that_fits_no_more_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.LOST_HOSTS, "b")
    engine = uni.Engine(nn.Linear(2, 2), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=2,tp=2")
    with pytest.raises(UsageError, match=r"needs 4 ranks .* but 1 are running.*lost host b .*plan='auto'. chooses"):
        engine.prepare((torch.zeros(4, 2), torch.zeros(4, 2)))


def test_wrong_use_is_not_tried_again(tmp_path: Path) -> None:
    write_script(tmp_path, "from unisono.errors import UsageError\nraise UsageError('plan dp=4 needs 4 ranks')\n")
    done = Run(["run", "-n", "1", "--max-restarts", "3", "script.py"], tmp_path).finish()
    assert done.returncode == 1
    assert done.stderr.endswith("UsageError: plan dp=4 needs 4 ranks\n")
    assert "restart" not in done.stderr
