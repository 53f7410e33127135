"""The first failure is shown once, alone; the job ends soon, with its code, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch.harness import Run, await_end, wait_for, write_script

# One rank fails while the others wait for it in a collective; rank 3 starts a process that would outlive it.
SCRIPT = """
import os, signal, subprocess, sys, time
import torch, torch.distributed as dist
how, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
if rank == 3:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
dist.barrier()
if how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 2:
    print("last words")
    if how in ("raise", "stubborn"): raise ValueError("boom")
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if how == "code": sys.exit(3)
    if how == "message": sys.exit("no data here")
    if how == "sudden": os._exit(9)
    if how == "leave": sys.exit(0)
    if how == "lingers":
        import threading
        threading.Thread(target=time.sleep, args=(1000,)).start()
        raise ValueError("boom")
if how == "stubborn":
    time.sleep(1000)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("how", "code", "output"),
    [
        (
            "kill",
            137,
            "rank 2 was killed by SIGKILL (the kernel does this when memory runs out; see dmesg)\n",
        ),
        ("code", 3, "rank 2 failed (exit code 3):\nsys.exit(3) at script.py:16\n"),
        ("message", 1, "rank 2 failed (exit code 1):\nno data here\n"),
        (
            "sudden",
            9,
            "rank 2 failed (exit code 9); it reported no error, as after os._exit or an exit in native code\n",
        ),
    ],
)
def test_first_failure_alone(tmp_path: Path, how: str, code: int, output: str) -> None:
    write_script(tmp_path, SCRIPT)
    done = Run(["run", "-n", "4", "script.py", how], tmp_path).finish()
    assert (done.returncode, done.stdout, done.stderr) == (code, "[2] last words\n", output)


@pytest.mark.parametrize("how", ["raise", "stubborn", "lingers"])
def test_an_exception_is_shown_from_the_users_script_on(tmp_path: Path, how: str) -> None:
    script = write_script(tmp_path, SCRIPT)
    run = Run(["run", "-n", "4", "--output-filename", "logs", "script.py", how], tmp_path)
    done = run.finish()
    assert (done.returncode, done.stdout) == (1, "[2] last words\n")
    assert done.stderr.startswith(
        f'rank 2 failed (exit code 1):\nTraceback (most recent call last):\n  File "{script}", line '
    )
    assert done.stderr.endswith("ValueError: boom\n")
    assert done.stderr.count("Traceback") == 1
    assert (tmp_path / "logs/rank.2").read_text().endswith("ValueError: boom\n")


def test_a_segfault_is_named_with_its_python_stack(tmp_path: Path) -> None:
    script = write_script(tmp_path, SCRIPT)
    done = Run(["run", "-n", "4", "script.py", "segfault"], tmp_path).finish()
    assert done.returncode == 139
    assert f'[2]   File "{script}", line ' in done.stderr
    assert "rank 2 was killed by SIGSEGV" in done.stderr.splitlines()[-1]


def test_a_rank_that_leaves_early_is_mentioned(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    done = Run(["run", "-n", "4", "script.py", "leave"], tmp_path).finish()
    assert done.returncode == 1
    assert done.stderr.endswith("(rank 2 had already ended with code 0)\n")


def test_a_job_whose_ranks_will_not_end_is_ended(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        "import os, signal, time, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1':\n"
        "    pathlib.Path('when').write_text(str(time.time()))\n"
        "    raise ValueError\n"
        "time.sleep(1000)\n",
    )
    done = Run(["run", "-n", "3", "script.py"], tmp_path).finish()
    assert done.returncode == 1
    # meant are less than 5 s; the bound is loose for busy machines, and below elastic's own 30 s
    assert time.time() - float((tmp_path / "when").read_text()) < 25


ALL_FAIL = """
import os, signal
os.kill(os.getppid(), signal.SIGSTOP)  # the agent, until all have failed: some may be slow to come to it
rank = os.environ["RANK"]
with open(f"{rank}.new", "w") as file:
    print(os.getppid(), os.getpid(), file=file)
os.rename(f"{rank}.new", f"up.{rank}")
import nothing_like_this
"""


def test_all_fail_alike_one_is_shown(tmp_path: Path) -> None:
    write_script(tmp_path, ALL_FAIL)
    run = Run(["run", "-n", "3", "script.py"], tmp_path)
    with run.started() as process:
        files = [tmp_path / f"up.{rank}" for rank in range(3)]
        for file in files:
            wait_for(file, process)
        (agent, *_), *_ = numbers = [[int(word) for word in file.read_text().split()] for file in files]
        for _, rank in numbers:
            await_end(rank)
        os.kill(agent, signal.SIGCONT)
        _, output = process.communicate(timeout=60)
        assert run.left_running() == []
    assert process.returncode == 1
    assert output.count("ModuleNotFoundError: No module named 'nothing_like_this'") == 1
    assert output.endswith("(2 more failed after it)\n")


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    write_script(tmp_path, "x = = 1\n")
    done = Run(["run", "-n", "1", "script.py"], tmp_path).finish()
    assert done.returncode == 1
    assert done.stderr.endswith("SyntaxError: invalid syntax\n")


@pytest.mark.parametrize("how", ["record", "raise"])
def test_the_report_of_a_hang_stands_alone(tmp_path: Path, how: str) -> None:
    write_script(
        tmp_path,
        "import os, sys, time\n"
        "from unisono.errors import HangError\n"
        "from unisono.launch.outcome import failure\n"
        "rank = int(os.environ['RANK'])\n"
        "if rank == 0:\n"
        "    open('new', 'w').write(str(os.getpid()))\n"
        "    os.rename('new', 'pid')\n"
        "if rank == 1:\n"
        "    while not os.path.exists('pid') or os.path.exists('/proc/' + open('pid').read()):\n"
        "        time.sleep(0.01)  # until the agent knows of rank 0\n"
        "    if sys.argv[1] == 'raise':\n"
        "        raise HangError('ranks 0,2 wait')\n"
        "kind = failure.HANG if rank == 1 else failure.PEER\n"
        "failure.record(failure.Failure.now(rank, kind, 'ranks 0,2 wait' if rank == 1 else 'debris'))\n"
        "os._exit(1)\n",
    )
    done = Run(["run", "-n", "3", "script.py", how], tmp_path).finish()
    assert (done.returncode, done.stderr) == (75, "ranks 0,2 wait\n")


RECOVERS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["UNISONO_ATTEMPT"])
assert attempt == int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 1:
    print("attempt", attempt, int(total))
    if attempt < int(sys.argv[1]):
        raise ValueError(f"attempt {attempt}")
dist.barrier()
"""


def test_restarts_until_it_works(tmp_path: Path) -> None:
    write_script(tmp_path, RECOVERS)
    done = Run(["run", "-n", "3", "--max-restarts", "3", "--json", "script.py", "2"], tmp_path).finish()
    assert done.returncode == 0
    *lines, end = done.stdout.splitlines()
    assert lines == [f"[1] attempt {i} 3" for i in range(3)]
    assert json.loads(end) == {"exit_code": 0, "restarts": 2, "failed_rank": None, "reason": ""}
    assert done.stderr.splitlines() == [
        f"restart {i + 1} of 3: rank 1 failed (exit code 1): ValueError: attempt {i}" for i in range(2)
    ]


def test_restarts_run_out(tmp_path: Path) -> None:
    write_script(tmp_path, RECOVERS)
    done = Run(["run", "-n", "2", "--max-restarts", "1", "--json", "script.py", "9"], tmp_path).finish()
    assert done.returncode == 1
    reason = "rank 1 failed (exit code 1): ValueError: attempt 1"
    end = {"exit_code": 1, "restarts": 1, "failed_rank": 1, "reason": reason}
    assert json.loads(done.stdout.splitlines()[-1]) == end
    assert done.stderr.splitlines()[0] == "restart 1 of 1: rank 1 failed (exit code 1): ValueError: attempt 0"
    assert done.stderr.splitlines()[-1] == "ValueError: attempt 1"
    assert done.stderr.count("Traceback") == 1


def test_an_error_that_comes_up_while_another_is_reported_is_reported_with_it(tmp_path: Path) -> None:
    """A DataLoader's handler of signals raises whenever one of its workers has died."""
    write_script(
        tmp_path,
        "import signal\n"
        "def handler(*_):\n"
        "    signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "    raise RuntimeError('a worker has died')\n"
        "class Lost(RuntimeError):\n"
        "    def __str__(self):\n"
        "        signal.raise_signal(signal.SIGUSR2)\n"
        "        return 'never'\n"
        "signal.signal(signal.SIGUSR2, handler)\n"
        "raise Lost\n",
    )
    done = Run(["run", "-n", "1", "script.py"], tmp_path).finish()
    assert done.returncode == 1
    assert done.stderr.startswith("rank 0 failed (exit code 1):\nTraceback"), done.stderr
    assert "raise Lost\n" in done.stderr
    assert done.stderr.endswith("RuntimeError: a worker has died\n"), done.stderr
