"""The command `unisono`. Each sub-command is a function that adds its parser and names its handler."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import unisono
from unisono.comm import bench_command, doctor
from unisono.comm.watchdog import attach
from unisono.compat.aliases import ALIASES, COMPAT
from unisono.errors import UnisonoError, UsageError, did_you_mean
from unisono.explain import command as explain_command
from unisono.launch import command as run_command
from unisono.launch import completion
from unisono.launch.console import discard
from unisono.plan.plan import Plan
from unisono.planner import command as plan_command
from unisono.quantum import command as qsim_command
from unisono.report import command as report_command
from unisono.verify import command as verify_command

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit of file sizes


class Parser(argparse.ArgumentParser):
    """Suggests the nearest option, sub-command or choice where one is unknown. The parsers of sub-commands are of this
    class, too."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = sys.argv[1:] if args is None else list(args)
        chosen, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return chosen, unknown

    def error(self, message: str) -> NoReturn:
        """A misspelt option that is required is reported as missing."""
        if "required" in message:
            message += self._subcommands() + self._suggestion(self._given)
        super().error(message)

    def _subcommands(self) -> str:
        """What there is to choose from, where a sub-command is missing."""
        names = [each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        return f"; one of {', '.join(names[0])}, each with --help" if names and names[0] else ""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            expected = {int: "a whole number", float: "a number"}.get(action.type)  # type: ignore[call-overload]
            if expected is None:
                raise
            raise argparse.ArgumentError(action, f"{arg_string!r}: expected {expected}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            near = did_you_mean(str(value), map(str, action.choices))
            if near:
                raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}")
        super()._check_value(action, value)

    def _suggestion(self, words: Sequence[str]) -> str:
        known = self._option_string_actions
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            if option not in known and (near := did_you_mean(option, known)):
                return near
        return ""


def add_run(subparsers: Any) -> None:
    run_command.add_parser(subparsers, _require_plan, ALIASES, COMPAT)


def _require_plan(text: str, ranks: int) -> None:
    if text != "auto":
        Plan.parse(text).fit(ranks)


def add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure communication and computation", allow_abbrev=False)
    kinds = parser.add_subparsers(metavar="comm|hardware", required=True)
    bench_command.add_kind(kinds)
    plan_command.add_bench_kind(kinds)


# To add a sub-command: a function that takes the sub-parsers, adds its own parser and sets its default
# `handler`, a function from the parsed arguments to an exit code.
SUBCOMMANDS = (
    add_run,
    add_bench,
    doctor.add_parser,
    verify_command.add_parser,
    plan_command.add_parser,
    attach.add_parser,
    report_command.add_parser,
    explain_command.add_parser,
    qsim_command.add_parser,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. Wrong usage is 2, a job's own code is passed on."""
    parser = Parser(
        prog="unisono", description="Many devices, one result: start, check and measure distributed training."
    )
    parser.add_argument("--version", action="version", version=f"unisono {unisono.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_parser in SUBCOMMANDS:
        add_parser(subparsers)
    completion.add_parser(subparsers, parser)
    chosen = parser.parse_args(arguments)
    try:
        code = int(chosen.handler(chosen))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, such as head, has read enough
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        discard(sys.stdout)
        where = error.filename or "the output"
        print(f"unisono: {where} cannot be written: {error.strerror}; make room, or write elsewhere", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"unisono: {error}", file=sys.stderr)
        return 2
    except UnisonoError as error:
        print(f"unisono: {error}", file=sys.stderr)
        return 1
