"""Load: many ranks, many jobs, many steps, many samples; what each costs in memory, and what it leaves behind.

    python benchmarks/load.py [--only ranks,jobs,steps,dataset]
    python benchmarks/load.py --only ranks --ranks 64 --backends gloo,mpi
    python benchmarks/load.py --only jobs --jobs 500
    python benchmarks/load.py --only steps --steps 10000 --plans dp=2,zero=2:pp=2,microbatches=2
    python benchmarks/load.py --only dataset --samples 10000,10000000

Runs on Linux, in namespaces of its own for processes, the network, System V memory and mounts: what is there after a
job is of that job, whatever else the machine does. This takes root, or a system that lets users make namespaces.

Memory of a process is told three ways, from /proc/PID/smaps_rollup: RSS (all its pages), PSS (a page that n processes
share counts as an n-th; so the sum over ranks counts it once) and USS (its own pages). Ends with 1 if a line is missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import unisono as uni
from unisono.errors import LaunchError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.load_program import Usage, summed

PROGRAM = str(Path(__file__).with_name("load_program.py"))
ALONE = "LOAD_ALONE"  # set in namespaces of our own
LEAST_FREE = "LOAD_LEAST_FREE"  # GiB of memory that must stay free on the machine
GROWTH = 1.01  # from the first tenth of a run's steps to its end
BLOCK = 2 << 20  # bytes: what a page allocator takes at a time, and the working memory of a block of indices
MIB = 1 << 20


def become_alone() -> None:
    """Start again in namespaces, below a shell that takes in the processes whose parents have ended."""
    if ALONE in os.environ:
        return
    inside = 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && "$@"; exit $?'
    spaces = ["unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
    for more in ([], ["--map-root-user"]):
        if subprocess.run([*spaces, *more, "sh", "-c", inside, "sh", "true"], capture_output=True).returncode == 0:
            words = [*spaces, *more, "sh", "-c", inside, "sh", sys.executable, *sys.argv]
            os.execvpe(words[0], words, {**os.environ, ALONE: "1"})
    raise SystemExit("load.py needs namespaces of its own (unshare), which this system refuses; run it as root")


def free_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10


def watch_memory(process: subprocess.Popen[Any]) -> None:
    """End a job that takes the machine's memory."""
    least = int(os.environ[LEAST_FREE]) << 30

    def watch() -> None:
        while process.poll() is None:
            if free_memory() < least:
                print(f"less than {least >> 30} GiB of memory are free: the job is ended", flush=True)
                process.terminate()
                return
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()


def command(ranks: int, backend: str, *words: object) -> list[str]:
    start = [
        sys.executable,
        "-P",
        "-m",
        "unisono",
        "run",
        "-n",
        str(ranks),
        "--backend",
        backend,
        "--start-timeout",
        "600",
    ]
    return [*start, PROGRAM, *map(str, words)]


def started(words: list[str], **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    watch_memory(process)
    return process


def finished(process: subprocess.Popen[str], expected: Sequence[int] = (0,)) -> str:
    output, _ = process.communicate()
    if process.returncode not in expected:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}:\n{output}")
    return output


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what is there ---------------------------------------------------------------------------------------------------


def processes() -> dict[int, str]:
    """Every process but this one and those above it, with its command; all of them are ours."""
    found, above, pid = {}, set(), os.getpid()
    while pid:
        above.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(name) not in above and state not in "ZX":  # these have ended
            found[int(name)] = words.strip() or Path(f"/proc/{name}/comm").read_text().strip()
    return found


def present() -> set[str]:
    """What jobs could leave: processes, shared memory, files in the temporary folder, sockets that listen."""
    found = {f"process {words}" for words in processes().values()}
    found |= {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    temporary = tempfile.gettempdir()  # torch keeps a cache for each user in it, which outlives all jobs
    found |= {f"{temporary}/{name}" for name in os.listdir(temporary) if not name.startswith("torchinductor_")}
    for kind in ("shm", "sem", "msg"):
        rows = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]]
        found |= {f"System V {kind} {row[1]}" for row in rows}
    for name in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        found |= {f"{name} port {int(row[1].rpartition(':')[2], 16)}" for row in rows if row[3] == "0A"}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found | {f"socket {row[-1]}" for row in rows if len(row) > 7 and int(row[3], 16) & 0x10000}


def left_over(before: set[str], patience: float = 10.0) -> set[str]:
    """What is there beyond `before` and does not go within patience."""
    deadline = time.monotonic() + patience
    while (found := present() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def own_state() -> dict[str, int]:
    """What this process has open, which spawn must give back."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "children": len(children),
    }


def own_state_beside(before: dict[str, int], patience: float = 10.0) -> dict[str, int]:
    """What it has open, once it is no more than before, or after patience: a thread that was joined has yet to go."""
    deadline = time.monotonic() + patience
    while any((now := own_state())[name] > before[name] for name in before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


# ---- the four loads --------------------------------------------------------------------------------------------------


def ranks(count: int, backend: str, folder: Path) -> bool:
    """Start, reduce, end; the memory of each rank while all are there."""
    before, began = present(), time.time()
    process = started(command(count, backend, "ranks", folder))
    while len(list(folder.glob("met.*"))) < count:
        if process.poll() is not None:
            finished(process, expected=())
        time.sleep(0.1)
    time.sleep(1)  # the last has written its line
    seen = [lines_of(folder / f"met.{rank}")[0] for rank in range(count)]
    used = [Usage.of(each["pid"]) for each in seen]
    rest = processes().keys() - {each["pid"] for each in seen}
    others = [Usage.of(pid) for pid in rest]
    (folder / "measured").touch()
    ending = time.time()
    finished(process)
    left = left_over(before)
    print(
        f"{count} ranks, {backend}: first all_reduce done {max(each['time'] for each in seen) - began:.1f} s after "
        f"the command, ended {time.time() - ending:.1f} s after the last"
    )
    for name in ("rss", "pss", "uss"):
        values = sorted(getattr(each, name) / MIB for each in used)
        middle = values[len(values) // 2]
        print(f"    {name.upper()} a rank: {middle:.1f} MiB (from {values[0]:.1f} to {values[-1]:.1f})")
    total, around = sum(each.pss for each in used), sum(each.pss for each in others)
    print(
        f"    PSS of all ranks {total / MIB:.0f} MiB, of the {len(others)} processes around them {around / MIB:.0f} MiB"
    )
    return report_left(left)


def report_left(left: set[str]) -> bool:
    print(f"    left behind: {', '.join(sorted(left)) or 'nothing'}", flush=True)
    return not left


def ended_from_outside(backend: str, folder: Path) -> None:
    process = started(command(2, backend, "job", folder, "stays"))
    while len(list(folder.glob("stays.*"))) < 2:
        if process.poll() is not None:
            finished(process, expected=())
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    finished(process, expected=(-signal.SIGTERM, 128 + signal.SIGTERM))
    for path in folder.glob("stays.*"):
        path.unlink()


def spawned(backend: str) -> None:
    assert uni.spawn(summed, 2, backend, (3.0,)) == [6.0, 6.0]


def spawn_fails(backend: str) -> None:
    try:
        uni.spawn(summed, 2, backend, ("no number",))
    except LaunchError:
        return
    raise SystemExit("a spawn whose ranks fail did not")


def kinds(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Jobs of every kind in turn, without end."""
    for backend in itertools.cycle(("gloo", "mpi")):
        yield f"{backend} ends", lambda b=backend: finished(started(command(2, b, "job", folder, "ends")))
        yield f"{backend} spawn", lambda b=backend: spawned(b)
        yield f"{backend} fails", lambda b=backend: finished(started(command(2, b, "job", folder, "fails")), (1,))
        yield f"{backend} spawn fails", lambda b=backend: spawn_fails(b)
        yield f"{backend} SIGTERM", lambda b=backend: ended_from_outside(b, folder)


def jobs(count: int, folder: Path) -> bool:
    """One after the other; after each, whatever is there that was not is named."""
    turn = kinds(folder)
    for _ in range(10):  # what is made once in a process: torch's threads, caches, MPI's library
        name, run = next(turn)
        run()
    before, open_before, memory = present(), own_state(), Usage.own()
    left: dict[str, int] = {}
    began = time.monotonic()
    for number in range(count):
        name, run = next(turn)
        run()
        for thing in left_over(before | left.keys()):
            print(f"    after job {number + 1} ({name}): {thing}", flush=True)
            left[thing] = number
        if (number + 1) % 50 == 0:
            print(f"    {number + 1} jobs, {time.monotonic() - began:.0f} s, own {own_state()}", flush=True)
    after, grown = own_state_beside(open_before), Usage.own().uss - memory.uss
    print(
        f"{count} jobs in a row; the process that called spawn {2 * count // 5} times: USS {grown / MIB:+.1f} MiB of "
        f"{memory.uss / MIB:.0f}, {', '.join(f'{name} {open_before[name]} -> {after[name]}' for name in after)}"
    )
    is_back = report_left(set(left) | left_over(before))
    return is_back and all(after[name] <= open_before[name] for name in after)


def steps(count: int, plan: str, folder: Path) -> bool:
    """A run with all that users have; the memory of its processes from the first tenth of the steps to the last."""
    process = started(command(2, "gloo", "steps", folder, plan, count))
    finished(process)
    looks = [lines_of(folder / f"looks.{rank}") for rank in range(2)]
    print(f"{count} steps, plan {plan}: MiB after steps {', '.join(str(look['step']) for look in looks[0])}")
    is_flat = True
    for kind in ("rss", "uss"):
        rows = {f"rank {rank}": [look["own"][kind] for look in looks[rank]] for rank in range(2)}
        rows |= {name: [look["others"][name][kind] for look in looks[0]] for name in looks[0][0]["others"]}
        for name, values in rows.items():
            growth = max(values) / values[0]
            is_flat &= kind != "rss" or growth <= GROWTH  # a page of a file is a rank's own once another job has ended
            shown = ", ".join(f"{value / MIB:.2f}" for value in values)
            print(f"    {kind.upper()}, {name}: {shown}: {100 * (growth - 1):+.2f}%")
    for what in ("blocks", "keys"):
        print(f"    {what} of rank 0: {', '.join(str(look[what]) for look in looks[0])}", flush=True)
    return is_flat


def dataset(samples: list[int], folder: Path) -> bool:
    """The same run over datasets of other lengths."""
    is_flat = True
    for count in (1, 2):
        used: list[list[dict[str, int]]] = []
        for number in samples:
            here = folder / f"{count}.{number}"
            here.mkdir()
            finished(started(command(count, "gloo", "dataset", here, number)))
            used.append([lines_of(here / f"own.{rank}")[0] for rank in range(count)])
            for rank, own in enumerate(used[-1]):
                print(
                    f"{number} samples, rank {rank} of {count}: "
                    + ", ".join(f"{name.upper()} {own[name] / MIB:.1f} MiB" for name in ("uss", "pss", "peak")),
                    flush=True,
                )
        for rank in range(count):
            is_flat &= all(
                own[rank][name] <= used[0][rank][name] * GROWTH + BLOCK for own in used for name in ("uss", "peak")
            )
    return is_flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="ranks,jobs,steps,dataset")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--backends", default="gloo,mpi")
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--plans", default="dp=2,zero=2:pp=2,microbatches=2", help="separated by colons")
    parser.add_argument("--samples", default="10000,10000000")
    parser.add_argument("--least-free", type=int, default=6, help="GiB of memory; a job that leaves less is ended")
    chosen = parser.parse_args()
    become_alone()
    os.environ[LEAST_FREE] = str(chosen.least_free)
    is_well = True
    with tempfile.TemporaryDirectory(prefix="load-") as root:
        for name in ("measured", "tmp"):
            (Path(root) / name).mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(root) / "tmp")  # of the jobs, and empty
        folders = (made(Path(root) / "measured" / str(number)) for number in itertools.count())
        for load in chosen.only.split(","):
            if load == "ranks":
                for backend in chosen.backends.split(","):
                    is_well &= ranks(chosen.ranks, backend, next(folders))
            elif load == "jobs":
                is_well &= jobs(chosen.jobs, next(folders))
            elif load == "steps":
                for plan in chosen.plans.split(":"):
                    is_well &= steps(chosen.steps, plan, next(folders))
            elif load == "dataset":
                is_well &= dataset([int(each) for each in chosen.samples.split(",")], next(folders))
            else:
                raise SystemExit(f"--only {load}: expected ranks, jobs, steps or dataset")
    raise SystemExit(0 if is_well else 1)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
