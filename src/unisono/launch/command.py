"""`unisono run`: the options, and the LaunchJob made from them."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError, UsageError
from unisono.launch import environment, foreign_options, hosts, launcher, scheduler
from unisono.launch.console import Console, discard, terminal_variables
from unisono.launch.hosts import Host, Placement
from unisono.launch.job import COMMAND, MODULE, SCRIPT, Entrypoint, LaunchJob, default_start_timeout
from unisono.launch.outcome.monitor import Interrupted, Outcome
from unisono.launch.scheduler import NodeGroup
from unisono.launch.worker import aliases as import_aliases
from unisono.launch.worker import process_tree

_RANGE = re.compile(r"(\d+):(\d+)", re.ASCII)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_BACKENDS = ("auto", "gloo", "nccl", "mpi")
_LONGEST = 1e9  # seconds, as of `uni.init`
_START_HELP = "seconds for the start (default: 30; with --backend mpi, 60 and 1 for each rank; with --nnodes, 300)"
_TORCHRUN: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("nproc-per-node", "N", str, "ranks of each node: a number, gpu, cpu or auto"),
    ("node-rank", "N", int, "number of this node (default: $PET_NODE_RANK or $JOB_COMPLETION_INDEX)"),
    ("master-addr", "HOST", str, "address of node 0 (default: $PET_MASTER_ADDR or $MASTER_ADDR)"),
)


def add_parser(
    subparsers: Any,
    require_plan: Callable[[str, int], None] | None = None,
    aliases: Mapping[str, Mapping[str, str]] | None = None,
    compat: Mapping[str, str] | None = None,
) -> None:
    """require_plan(text, ranks): raises UsageError where --plan is no plan for so many ranks. aliases: what --as takes,
    with the modules that stand for import names. compat: what --compat takes, with the module that ranks install."""
    parser = subparsers.add_parser(
        "run",
        help="start a script on N ranks, here or on several hosts",
        usage="unisono run -n N [options] script.py ARGS | -m module ARGS",
        allow_abbrev=False,
    )
    add_options(parser, aliases or {}, compat or {})
    parser.set_defaults(handler=run, require_plan=require_plan)


def add_options(
    parser: argparse.ArgumentParser,
    aliases: Mapping[str, Mapping[str, str]] | None = None,
    compat: Mapping[str, str] | None = None,
) -> None:
    add = parser.add_argument
    add("-n", "-np", dest="n", type=int, metavar="N", help="ranks in all (default: every slot of the hosts)")
    add("-H", "--hosts", metavar="a:2,b:2", help="hosts with their slots")
    add("-f", "--hostfile", "-hostfile", metavar="FILE", help="a file of lines like `node0 slots=4`")
    add("--backend", choices=_BACKENDS, default="auto", help="communication backend (default: auto)")
    add("--output-filename", metavar="DIR", help="also write each rank's output to DIR/rank.N")
    add("--verbose", action="store_true", help="show the checks before the start")
    add("--json", action="store_true", help="print how the job ended as JSON, in the last line")
    add("--quiet", action="store_true", help="show the output of ranks, and of the launcher only why the job failed")
    add("--start-timeout", type=float, metavar="S", help=_START_HELP)
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start again after a failure, K times at most",
    )
    add(
        "--elastic",
        action="store_true",
        help="when a host is lost, restart with fewer ranks on the others, and with all when it is back; "
        "--elastic 2:4: with 2 ranks at least and 4 at most",
    )
    parser.set_defaults(parse_rest=parser.parse_args)
    add("--min-ranks", type=int, metavar="K", help="with --elastic: end when fewer than K ranks remain")
    add("--encrypt", action="store_true", help="encrypt what ranks of different hosts say to each other (backend gloo)")
    add("--timeout", type=float, metavar="S", help="seconds a collective may take before the job is stopped")
    add("--check", action="store_true", help="compare every collective between ranks before it runs")
    add(
        "--check-plan",
        choices=("auto", "full", "off"),
        help="how plans are verified before the first step (default: set by the script)",
    )
    add("--plan", metavar="PLAN", help="the plan to use instead of the script's, such as dp=4,tp=2, or auto")
    if aliases:
        add(
            "--as",
            dest="written_for",
            choices=sorted(aliases),
            help="run a program written for another framework as it is: its imports find unisono's names in the ranks",
        )
        parser.set_defaults(aliases=aliases)
    if compat:
        add(
            "--compat",
            choices=sorted(compat),
            help="torch: a program for GPUs runs on a machine without them, and backend mpi is unisono's",
        )
        parser.set_defaults(compat_modules=compat)
    add("--no-race", action="store_true", help='plan="auto" takes the best prediction, without timing real steps')
    add(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of the ranks",
    )
    add("--nnodes", "--nnode", metavar="N", help="nodes, each with a launcher of its own, as with torchrun")
    for name, metavar, kind, text in _TORCHRUN:
        add(f"--{name}", f"--{name.replace('-', '_')}", metavar=metavar, type=kind, help=text)
    add(
        *("--master-port", "--master_port"),
        type=int,
        default=0,
        metavar="PORT",
        help="port of the rendezvous (default: any free one; with --nnodes, $MASTER_PORT or 29500)",
    )
    foreign_options.add_options(parser)
    add("--python", default="", metavar="PATH", help="the interpreter on other hosts (default: this one)")
    add("--ssh", metavar="COMMAND", help='the ssh to use, with options: "ssh -F file" (default: $UNISONO_SSH)')
    add("-m", dest="module", action="store_true", help="run a module, as `python -m` does")
    add("command", nargs=argparse.REMAINDER, metavar="script.py ARGS", help="what every rank runs")


def run(chosen: argparse.Namespace) -> int:
    """Run the job; the exit code is that of the first rank that failed."""
    job = job_of(chosen)
    process_tree.adopt_orphans()
    console = Console(job.output_directory, chosen.quiet)
    try:
        outcome = launcher.launch(job, console)
    except Interrupted as interrupted:
        console.flush()
        if interrupted.signum == signal.SIGPIPE:
            return 128 + interrupted.signum
        reason = f"stopped by {interrupted}; all ranks have ended"
        outcome = Outcome(128 + interrupted.signum, reason, summary=reason, attempt=interrupted.attempt)
    except LaunchError as error:
        console.flush()
        _print_json(chosen, Outcome(1, str(error), summary=str(error)))
        raise
    finally:
        console.close()
        process_tree.sweep(os.getpid())
    if outcome.error:
        console.error(outcome.error)
    _print_json(chosen, outcome)
    for target in console.lost:
        discard(target)  # the code is that of the job, and not of a flush at exit
    return outcome.code


def _print_json(chosen: argparse.Namespace, outcome: Outcome) -> None:
    """With --json: how the job ended, as the last line of the output. Lines of ranks begin with `[rank]`."""
    if chosen.json:
        ended = {"exit_code": outcome.code, "restarts": outcome.attempt, "failed_rank": outcome.failed_rank}
        print(json.dumps(ended | {"reason": outcome.summary or outcome.error}), flush=True)


def job_of(chosen: argparse.Namespace) -> LaunchJob:
    """The job of these options; UsageError if they are invalid."""
    _settle_elastic(chosen)
    foreign_options.settle(chosen)
    group = _group(chosen)
    if group is not None:
        node = Host(hosts.LOCAL, group.per_node)
        named, placements = [node], [Placement(node, group.node * group.per_node, group.per_node)]
    else:
        named = _hosts(chosen)
        placements = hosts.assign_ranks(named, chosen.n)
    for name in ("start_timeout", "timeout"):
        value = getattr(chosen, name)
        if value is not None and not 0 < value <= _LONGEST:
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be above 0 seconds, {_LONGEST:g} at most")
    if chosen.max_restarts < 0:
        raise UsageError(f"--max-restarts {chosen.max_restarts}: must be at least 0")
    if not 0 <= chosen.master_port < 1 << 16:
        raise UsageError(f"--master-port {chosen.master_port}: must be between 1 and 65535")
    world = group.world if group else sum(placement.count for placement in placements)
    _require_elastic(chosen, world)
    _settle_encrypt(chosen, group.nodes if group else len(placements), group)
    backend = None if chosen.backend == "auto" else chosen.backend
    return LaunchJob(
        program=_command(chosen.command) if chosen.no_python else _program(chosen.command, chosen.module),
        placements=tuple(placements),
        backend=backend,
        environment=_variables(chosen, world),
        output_directory=chosen.output_filename,
        verbose=chosen.verbose,
        start_timeout=chosen.start_timeout or default_start_timeout(world, backend, of_group=group is not None),
        max_restarts=chosen.max_restarts,
        master_port=chosen.master_port,
        python=chosen.python,
        ssh=tuple(_words(chosen.ssh or os.environ.get(environment.SSH) or "ssh")),
        hosts=tuple(named),
        elastic=chosen.elastic,
        min_ranks=chosen.min_ranks or 1,
        group=group,
        encrypt=chosen.encrypt,
    )


def _settle_elastic(chosen: argparse.Namespace) -> None:
    """`--elastic 2:4` is --elastic --min-ranks 2 -n 4. The parser takes 2:4 for the script, and all that follows for
    its arguments, since --elastic may also stand alone."""
    word = chosen.command[0] if chosen.elastic and chosen.command else ""
    found = _RANGE.fullmatch(word)
    if found is None:
        return
    chosen.parse_rest(chosen.command[1:], chosen)
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most:
        raise UsageError(f"--elastic {word}: expected the least and the greatest number of ranks, such as 2:4")
    for option, value, wanted in (("-n", chosen.n, most), ("--min-ranks", chosen.min_ranks, least)):
        if value not in (None, wanted):
            raise UsageError(f"--elastic {word} and {option} {value} contradict each other; leave {option} out")
    chosen.n, chosen.min_ranks = most, least


def _group(chosen: argparse.Namespace) -> NodeGroup | None:
    """The nodes of a scheduler's job; None where this launcher is to start all ranks itself."""
    given = {"-n": chosen.n, "-H": chosen.hosts, "-f": chosen.hostfile}
    own = next((option for option, value in given.items() if value is not None), None)
    if own is not None:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        for name, value in (("--nnodes", chosen.nnodes), ("--nproc-per-node", chosen.nproc_per_node)):
            if value is not None:
                raise UsageError(f"{own} and {name} both say how many ranks there are; give one of them")
        if tasks != "1":
            raise UsageError(
                f"srun has started {tasks} launchers, and with {own} each would run a job of its own: leave {own} out "
                "(--nproc-per-node N for N ranks in each task)"
            )
        return None
    group = scheduler.find_group(
        chosen.nnodes, chosen.nproc_per_node, chosen.node_rank, chosen.master_addr, chosen.master_port
    )
    if group is None:
        chosen.n = scheduler.ranks_here(chosen.nproc_per_node)
    elif chosen.elastic or chosen.backend == "mpi":
        option = "--elastic" if chosen.elastic else "--backend mpi"
        raise UsageError(f"{option} needs one launcher for all hosts (-n, -H or -f); here every node has its own")
    return group


def _require_elastic(chosen: argparse.Namespace, world: int) -> None:
    """Check --elastic and --min-ranks against the other options."""
    if chosen.min_ranks is not None:
        if not chosen.elastic:
            raise UsageError(f"--min-ranks {chosen.min_ranks} limits how far --elastic may shrink: give --elastic too")
        if not 1 <= chosen.min_ranks <= world:
            raise UsageError(f"--min-ranks {chosen.min_ranks}: must be between 1 and the {world} ranks of the job")
    if not chosen.elastic:
        return
    if chosen.max_restarts == 0:
        raise UsageError("--elastic continues by restarting: give the number of restarts with --max-restarts R")
    if chosen.backend == "mpi":
        raise UsageError("--elastic does not work with --backend mpi, where mpiexec ends all hosts; use gloo or nccl")


def _settle_encrypt(chosen: argparse.Namespace, nodes: int, group: NodeGroup | None) -> None:
    """Check --encrypt against the other options; with several hosts the backend is gloo."""
    if not chosen.encrypt:
        return
    if chosen.backend in ("nccl", "mpi"):
        whose = "NCCL" if chosen.backend == "nccl" else "the site's MPI"
        raise UsageError(
            f"--encrypt is for --backend gloo, and {chosen.backend} was given, whose connections belong to {whose}: "
            "use gloo, or a network of your own"
        )
    if nodes == 1:
        return
    if chosen.no_python:
        raise UsageError(
            "--encrypt and --no-python exclude each other: a program in an interpreter of its own does not find the "
            "tunnel; give a Python script"
        )
    if group is not None and not os.environ.get(environment.SECRET_FILE):
        raise UsageError(
            "--encrypt where every node has a launcher of its own needs a secret that all share: name a file with it "
            f"in {environment.SECRET_FILE}, as made by: (umask 077; openssl rand -hex 32 > FILE)"
        )
    chosen.backend = "gloo"


def _hosts(chosen: argparse.Namespace) -> list[Host]:
    if chosen.hosts and chosen.hostfile:
        raise UsageError("--hosts and --hostfile both name hosts; give one of them")
    if chosen.n is not None and chosen.n <= 0:
        raise UsageError(f"-n {chosen.n}: the number of ranks must be at least 1")
    if chosen.hosts is not None:
        return hosts.parse_list(chosen.hosts)
    if chosen.hostfile is not None:
        return hosts.parse_file(chosen.hostfile)
    if chosen.n is None:
        late = "; options come before the script" if {"-n", "-np", "-H", "-f"} & set(chosen.command) else ""
        raise UsageError(f"how many ranks? give -n N, --hosts or --hostfile{late}")
    return [Host(hosts.LOCAL, chosen.n)]


def _program(command: list[str], module: bool) -> Entrypoint:
    words = command[1:] if command[:1] == ["--"] else list(command)
    if words and not module and _PYTHON.fullmatch(os.path.basename(words[0])):
        words, module = _without_python(words)
    if not words:
        raise UsageError("nothing to run; give a script, or -m and a module")
    target, *args = words
    if module:
        _require_module(target)
        return Entrypoint(MODULE, target, tuple(args), os.getcwd())
    path = Path(target)
    if not path.exists():
        raise UsageError(f"script {target!r} does not exist; check the path (the directory is {os.getcwd()})")
    if not path.is_file():
        raise UsageError(f"{target!r} is not a file; give a Python script, or -m and a module")
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{target!r} is a notebook, and ranks run Python scripts; write one by `jupyter nbconvert --to script "
            f"{target}`, or use %%unisono in a cell"
        )
    if path.suffix in (".sh", ".bash"):
        raise UsageError(f"{target!r} is a shell script, and ranks run Python; use --no-python bash {target}")
    return Entrypoint(SCRIPT, target, tuple(args), os.getcwd())


def _command(command: list[str]) -> Entrypoint:
    """--no-python: any program, found as a shell does."""
    words = command[1:] if command[:1] == ["--"] else list(command)
    if not words:
        raise UsageError("--no-python: nothing to run; give a command")
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--no-python {words[0]}: no such command; check the path, or leave --no-python out for a script"
        )
    return Entrypoint(COMMAND, words[0], tuple(words[1:]), os.getcwd())


def _without_python(words: list[str]) -> tuple[list[str], bool]:
    """Drop a leading `python`: ranks run this interpreter."""
    given = words[0]
    if os.sep in given and not (os.path.exists(given) and os.path.samefile(given, sys.executable)):
        raise UsageError(f"ranks run {sys.executable}, not {given}; start with: {given} -m unisono run ...")
    words = words[1:]
    while words and words[0] == "-u":  # output is forwarded line by line in any case
        words = words[1:]
    if words and words[0] == "-m":
        return words[1:], True
    if words and words[0].startswith("-"):
        raise UsageError(f"python option {words[0]!r} cannot be passed to ranks; set it by environment instead")
    return words, False


def _require_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        top = name.partition(".")[0]
        if not top.isidentifier() or util.find_spec(top) is None:
            raise UsageError(f"no module named {name!r}; check the name (the directory is {os.getcwd()})")
    finally:
        sys.path.pop(0)


def _variables(chosen: argparse.Namespace, world: int) -> dict[str, str]:
    variables = environment.forwarded(dict(os.environ)) | terminal_variables(world)
    if chosen.backend != "auto":
        variables[environment.BACKEND] = chosen.backend
    if chosen.plan is not None:
        require_plan = getattr(chosen, "require_plan", None)
        if require_plan is not None:
            require_plan(chosen.plan, world)
        variables[environment.PLAN] = chosen.plan
    if getattr(chosen, "written_for", None) is not None:
        variables[environment.AS] = import_aliases.written(chosen.aliases[chosen.written_for])
    if getattr(chosen, "compat", None) is not None:
        variables[environment.COMPAT] = chosen.compat_modules[chosen.compat]
    if chosen.use_env:
        variables[environment.USE_ENV] = "1"
    if chosen.no_race:
        variables[environment.RACE] = "0"
    if chosen.check_plan:
        variables[environment.CHECK_PLAN] = chosen.check_plan
    if chosen.check:
        variables[environment.CHECK] = "1"
    if chosen.timeout is not None:
        variables[environment.TIMEOUT] = f"{chosen.timeout:g}"
    for setting in chosen.env:
        name, equals, value = setting.partition("=")
        if not name or (not equals and name not in os.environ):
            raise UsageError(f"--env {setting!r}: no such variable is set here; write NAME=VALUE")
        variables[name] = value if equals else os.environ[name]
        if value:
            process_tree.hide_argument(setting, f"{name}=")
    return variables


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--ssh {command!r} cannot be read: {error}") from None
    if not words:
        raise UsageError("--ssh names no command")
    return words
