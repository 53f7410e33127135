"""What ranks get and what their output becomes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.launch.harness import Run, write_script

ALL_REDUCE = """
import json, os, sys, threading, atexit
links = [f"/proc/self/fd/{fd}" for fd in range(3, 90)]
inherited = {os.readlink(link).partition(":")[0] for link in links if os.path.lexists(link)}
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
child = os.fork()  # as a DataLoader does
if not child:
    os._exit(sum(os.readlink(f"/proc/self/fd/{fd}") != os.devnull for fd in opened))
lost = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
         "GLOO_SOCKET_IFNAME",
         "UNISONO_BACKEND", "UNISONO_CHECK", "UNISONO_TIMEOUT", "UNISONO_HOST", "UNISONO_RACE", "GIVEN",
         "TORCHELASTIC_RUN_ID"]
seen = {name: os.environ.get(name) for name in names}
seen |= {"total": total.tolist(), "argv": sys.argv, "path": sys.path[0], "main": __name__, "file": __file__,
         "threads": torch.get_num_threads(), "stdin": sys.stdin.read(),
         "leader": os.getpgid(0) == os.getpid(),
         "registered": sys.modules["__main__"].__dict__ is globals(), "lost": lost,
         "launchers": sorted(inherited & {"socket", "anon_inode"})}
with open(f"seen.{dist.get_rank()}", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
atexit.register(print, "at exit")
threading.Thread(target=lambda: print("from a thread")).start()
"""


@pytest.mark.thorough
def test_a_rank_is_like_a_process_of_its_own(tmp_path: Path) -> None:
    script = write_script(tmp_path, ALL_REDUCE)
    arguments = ["a b", "it's", '"q"', ";ls", "$HOME", "--flag", "-n", "é", ""]
    options = ["-np", "3", "--backend", "gloo", "--check", "--timeout", "7.5", "--no-race", "-x", "GIVEN=x y"]
    done = Run(["run", *options, "script.py", *arguments], tmp_path, anew=True).finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}] {line}" for rank in range(3) for line in ("at exit", "from a thread")
    )
    for rank in range(3):
        seen = json.loads((tmp_path / f"seen.{rank}").read_text())
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "UNISONO_BACKEND": "gloo",
            "UNISONO_CHECK": "1",
            "UNISONO_TIMEOUT": "7.5",
            "UNISONO_HOST": "localhost",
            "UNISONO_RACE": "0",
            "GIVEN": "x y",
            "TORCHELASTIC_RUN_ID": "unisono",
            "total": [6.0, 6.0, 6.0],
            "argv": ["script.py", *arguments],
            "path": str(tmp_path),
            "main": "__main__",
            "file": str(script),
            "threads": 1,
            "stdin": "",
            "leader": True,
            "registered": True,
            "lost": 0,  # of its descriptors, in a child
            "launchers": [],  # of its descriptors, the launcher's
        }


@pytest.mark.thorough
def test_ranks_that_share_a_host_have_one_thread_each(tmp_path: Path) -> None:
    """... in libraries too that go by what they found when the process was loaded that ranks are forked from."""
    write_script(
        tmp_path,
        "import os, torch\n"
        "before = os.listdir('/proc/self/task')\n"
        "torch.nn.functional.linear(torch.ones(256, 512), torch.ones(512, 512), torch.ones(512))\n"
        "print(set(os.listdir('/proc/self/task')) - set(before), torch.get_num_threads())\n",
    )
    for wanted, threads in (("", 1), ("2", 2)):
        run = Run(["run", "-n", "2", "script.py"], tmp_path, {"OMP_NUM_THREADS": wanted}, anew=True).finish()
        assert [line.split()[-1] for line in run.stdout.splitlines()] == [str(threads)] * 2, run.stderr
        if threads == 1:
            assert run.stdout.count("set()") == 2


def test_modules_and_python_words(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text("import sys, pack\nprint(__name__, sys.argv[1:], sys.path[0] != '')\n")
    for words in (["-m", "pack.work", "-m", "x"], ["python", "-m", "pack.work", "-m", "x"]):
        done = Run(["run", "-n", "1", *words], tmp_path).finish()
        assert (done.returncode, done.stdout) == (0, "[0] __main__ ['-m', 'x'] True\n"), done.stderr
    write_script(tmp_path, "import sys; print(sys.argv)")
    done = Run(["run", "-n", "1", "--", "python3", "-u", "script.py", "-u"], tmp_path).finish()
    assert done.stdout == "[0] ['script.py', '-u']\n"


@pytest.mark.thorough
def test_a_file_of_the_users_shadows_nothing_of_the_launchers(tmp_path: Path) -> None:
    for name in ("json", "selectors", "socket", "torch"):
        write_script(tmp_path, "raise RuntimeError('shadowed')", f"{name}.py")
    write_script(tmp_path, "print('fine')")
    done = Run(["run", "-n", "1", "script.py"], tmp_path, anew=True).finish()
    assert (done.returncode, done.stdout) == (0, "[0] fine\n"), done.stderr


OUTPUT = r"""
import os, sys
rank = os.environ["RANK"]
print("line")
print("warning", file=sys.stderr)
sys.stdout.write("1%\r50%\r100%\n")
sys.stdout.flush()
os.write(1, b"bytes \xff\xfe\n")
os.system("echo child")
print("x" * 200000)
print("no newline", end="")
"""


def test_output_lines_and_files(tmp_path: Path) -> None:
    write_script(tmp_path, OUTPUT)
    arguments = ["run", "-n", "2", "--output-filename", "logs/deep", "script.py"]
    with Run(arguments, tmp_path).start(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 0
    expected = [b"line", b"100%", b"bytes \xff\xfe", b"child", b"x" * 200000, b"no newline"]
    for rank in (b"0", b"1"):
        mine = [line for line in stdout.split(b"\n") if line.startswith(b"[" + rank)]
        assert mine == [b"[" + rank + b"] " + text for text in expected]
    assert sorted(stderr.splitlines()) == [b"[0] warning", b"[1] warning"]
    for rank in range(2):
        logged = (tmp_path / f"logs/deep/rank.{rank}").read_bytes()
        assert logged.startswith(b"line\n")
        for shard in (b"warning\n", b"1%\r50%\r100%\n", b"bytes \xff\xfe\n", b"child\n", b"no newline"):
            assert shard in logged


PROGRESS = """
import os, sys, time
from rich.progress import track

def until_seen(what):
    deadline = time.monotonic() + 60
    while not os.path.exists(what) and time.monotonic() < deadline:
        time.sleep(0.01)

print(os.environ["COLUMNS"])
for text in ("10%", "\\r90%"):
    sys.stdout.write(text)
    sys.stdout.flush()
    until_seen(text.strip())
sys.stdout.write("\\rdone\\n")
for _ in track(range(3), description="bar"):
    until_seen("bar")
"""


def test_progress_is_live_on_a_terminal(tmp_path: Path) -> None:
    write_script(tmp_path, PROGRESS)
    run = Run(["run", "-n", "1", "script.py"], tmp_path, {"COLUMNS": "90", "TERM": "xterm"})
    controller, terminal = pty.openpty()
    with run.start(stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                shard = os.read(controller, 65536)
            except OSError:
                break
            shown += shard
            for what, times in ((b"10%", 1), (b"90%", 1), (b"bar", 3)):
                if shown.count(b"[0] " + what) >= times:
                    (tmp_path / what.decode()).touch()
    os.close(controller)
    assert process.returncode == 0
    assert b"[0] 86\r\n[0] 10%" in shown  # the terminal's width less the label
    assert b"\r\x1b[K[0] 90%" in shown
    assert b"\r\x1b[K[0] done\r\n" in shown
    assert shown.count(b"[0] bar") > 2


def test_values_of_variables_are_not_shown_by_ps(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        "import os, pathlib, subprocess\n"
        "assert os.environ['TOKEN'] == 'sesame'\n"
        "print(subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout.count('TOKEN=sesame'))\n"
        "print(pathlib.Path(f'/proc/{os.environ[\"UNISONO_LAUNCHER\"]}/cmdline').read_text().split('\\0'))\n",
    )
    done = Run(["run", "-n", "1", "-x", "TOKEN=sesame", "script.py"], tmp_path, anew=True).finish()
    assert "'-x', 'TOKEN=******', 'script.py'" in done.stdout, done
    assert "[0] 0\n" in done.stdout, done
