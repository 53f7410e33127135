"""`unisono attach JOB`: what the ranks of a running job do: the watchdog's report, and their Python stacks.

The ranks on this host answer by themselves (`launch.worker.stacks`): the launcher, the agents and the store take no
part, and may be stopped. Nothing in the job changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.amounts import ranks_in_words
from unisono.errors import UsageError
from unisono.launch.worker import process_tree, stacks
from unisono.launch.worker.stacks import Frame, RankProcess
from unisono.regular_files import read_text

_ANSWER = 3.0  # seconds that ranks get for their stack, and for their state
_LOCK = "run.lock"  # in a run folder
_OWNER = re.compile(r"process (\d+) on host (\S+), since")
_DUMP = re.compile(r".*rank_?(\d+)")
_FRAMES = 8  # of a process that a rank has forked
_PACKAGE = str(Path(__file__).resolve().parents[3]) + os.sep
_FOLDERS = (sysconfig.get_paths()["purelib"] + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, _PACKAGE)
_LAUNCH = os.path.join("unisono", "launch", "")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "attach", help="show what the ranks of a running job do: who waits where, and their stacks", allow_abbrev=False
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        help="the process id of `unisono run` (or of any process of the job), a run folder, or a folder "
        "of dumps of torch's flight recorder",
    )
    parser.add_argument("--json", action="store_true", help="print report and stacks as JSON")
    parser.add_argument("--quiet", action="store_true", help="print the report alone, one sentence without stacks")
    parser.set_defaults(handler=handle)


def handle(chosen: argparse.Namespace) -> int:
    dumps = _dumps(Path(chosen.job))
    if dumps:
        from unisono.comm.watchdog import flight_recorder  # imports torch

        sentence = flight_recorder.explain(dumps)
        print(json.dumps({"report": sentence}) if chosen.json else sentence)
        return 0
    ranks = find(chosen.job)
    found = look(ranks)
    if chosen.json:
        print(json.dumps(found))
    elif chosen.quiet:
        print(found["report"])
    else:
        _show(found)
    return 0


def _dumps(folder: Path) -> dict[int, Path]:
    """Dumps of torch's flight recorder in a folder that is no run folder, by rank."""
    if not folder.is_dir() or (folder / _LOCK).exists():
        return {}
    found = ((_DUMP.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return {int(match[1]): path for match, path in found if match}


def find(job: str) -> list[RankProcess]:
    """The job's ranks on this host. UsageError where there is no such job."""
    pid = int(job) if job.isdecimal() else _owner(Path(job))
    if not process_tree.state(pid):
        raise UsageError(f"attach {job}: there is no process {pid} on this host; the job may have ended")
    if os.getuid() not in (0, os.stat(f"/proc/{pid}").st_uid):
        raise UsageError(f"attach {job}: process {pid} is another user's, who alone may look into it")
    here = stacks.ranks_here()
    jobs = {rank.job for rank in here if pid in (rank.launcher, rank.pid, *process_tree.ancestors(rank.pid))}
    if len(jobs) > 1:
        raise UsageError(f"attach {job}: process {pid} has started {len(jobs)} jobs; give the `unisono run` of one")
    ranks = [rank for rank in here if rank.job in jobs]
    if not ranks:
        raise UsageError(
            f"attach {job}: process {pid} has no running ranks on this host; give the process id of `unisono run`, or "
            "the folder of fit(save=...), on the host where the ranks run"
        )
    return ranks


def _owner(folder: Path) -> int:
    """The process that holds a run folder."""
    if not folder.is_dir():
        raise UsageError(
            f"attach {folder}: neither a process id nor a folder; give that of `unisono run`, or a run folder"
        )
    try:
        owner = _OWNER.match(read_text(folder / _LOCK))
    except (OSError, ValueError):
        owner = None
    if owner is None:
        raise UsageError(f"attach {folder}: no job has this run folder; give the process id of `unisono run`")
    if owner[2] != os.uname().nodename:
        raise UsageError(f"attach {folder}: the job's rank 0 runs on host {owner[2]}; run this command there")
    return int(owner[1])


def look(ranks: Sequence[RankProcess]) -> dict[str, Any]:
    """The report on these ranks in one sentence, and for each its stack and those of processes that it forked."""
    from unisono.comm.watchdog import crash_note, report  # imports torch

    before = {rank.rank: rank.state_time for rank in ranks}
    frames = {rank.rank: rank.stack(_ANSWER) for rank in ranks}
    deadline = time.monotonic() + _ANSWER
    states, absent = {}, {}
    for rank in ranks:
        left = 0.0 if rank.is_stopped else max(0.05, deadline - time.monotonic())
        state = rank.asked_state(before[rank.rank], left)
        if state is not None:
            states[rank.rank] = report.RankState.from_json(state)
        elif rank.is_stopped:
            absent[rank.rank] = f"{crash_note.HALTED} (by SIGSTOP, or in a debugger)"
        elif before[rank.rank]:
            absent[rank.rank] = "are busy in native code, or have just left the world"
        else:
            absent[rank.rank] = "have not joined the world (uni.init)"
    return {
        "launcher": ranks[0].launcher,
        "world": ranks[0].world,
        "attempt": ranks[0].attempt,
        "report": report.report(states, absent),
        "ranks": [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "stack": frames[rank.rank],
                "forked": [{"pid": pid, "stack": found} for pid, found in rank.workers(_ANSWER)],
            }
            for rank in ranks
        ],
    }


# ---- what is printed -----------------------------------------------------------------------------------------------


def _show(found: dict[str, Any]) -> None:
    here = len(found["ranks"])
    head = f"{found['world']} ranks" + (f", {here} of them on this host" if here < found["world"] else "")
    head += f", after restart {found['attempt']}" if found["attempt"] else ""
    print(f"{head}: {found['report']}\n")
    groups = grouped({each["rank"]: own_frames(each["stack"]) for each in found["ranks"]})
    common = _common([stack for stack, _ in groups])
    if common:
        print("\n".join(["all of them", *map(_line, groups[0][0][:common]), ""]))
    columns = []
    for stack, ranks in groups:
        lines = [_line(frame) for frame in stack[common:]] or ["  (no more)" if stack else "  (no answer)"]
        columns.append([ranks_in_words(ranks), *lines])
    _print_side_by_side(columns)
    for each in found["ranks"]:
        for worker in each["forked"]:
            frames = own_frames(worker["stack"])[-_FRAMES:]
            print("\n".join(["", f"process {worker['pid']}, forked by rank {each['rank']}", *map(_line, frames)]))


def _print_side_by_side(columns: list[list[str]]) -> None:
    """Below each other where they are too wide for the terminal."""
    widths = [max(map(len, column)) + 4 for column in columns]
    if sum(widths) > shutil.get_terminal_size((160, 0)).columns:
        print("\n\n".join("\n".join(column) for column in columns))
        return
    for row in itertools.zip_longest(*columns, fillvalue=""):
        print("".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _common(stacks_of_groups: Sequence[tuple[Frame, ...]]) -> int:
    """How many of the outermost frames are the same in all that have answered; none of one alone."""
    if sum(map(bool, stacks_of_groups)) < 2:
        return 0
    levels = itertools.takewhile(
        lambda frames: len(set(frames)) == 1, zip(*filter(None, stacks_of_groups), strict=False)
    )
    return sum(1 for _ in levels)


def own_frames(stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames without those of the launcher and the agent, from which ranks are forked."""
    inside = [number for number, frame in enumerate(stack) if _LAUNCH in frame.file]
    own = tuple(Frame(*frame) for frame in stack[inside[-1] + 1 :]) if inside else tuple(stack)
    return own or tuple(stack[-3:])


def grouped(by_rank: dict[int, tuple[Frame, ...]]) -> list[tuple[tuple[Frame, ...], list[int]]]:
    """Ranks of equal stacks together, the most common first."""
    ranks_at: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(by_rank):
        ranks_at.setdefault(by_rank[rank], []).append(rank)
    return sorted(ranks_at.items(), key=lambda item: (-len(item[1]), item[1]))


def _line(frame: Frame) -> str:
    file, line, function = frame
    for folder in _FOLDERS:
        file = file.removeprefix(folder)
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"  {file if relative.startswith('..') else relative}:{line} {function}"
