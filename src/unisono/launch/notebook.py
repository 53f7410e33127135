"""Notebooks: `%load_ext unisono`, then cells that begin with `%%unisono -n 4` run on four ranks.

The ranks are forked from the kernel (spawn.py): they see all that earlier cells have defined, each for itself, and what
they define or change is gone after the cell. The values of the cell's last expression come back, as a list by rank.
"""

from __future__ import annotations

import argparse
import ast
import linecache
import os
import pickle
import shlex
import sys
from typing import Any, NoReturn

from unisono.errors import UsageError
from unisono.launch import environment
from unisono.launch.spawn import spawn

_USAGE = "%%unisono -n RANKS [--backend gloo] [--timeout SECONDS]"


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook, and no rank that was forked from it."""
    if "IPython" not in sys.modules or environment.HOST in os.environ:
        return False
    from IPython import get_ipython

    return type(get_ipython()).__name__ == "ZMQInteractiveShell"


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext unisono` calls."""

    from IPython.core.error import UsageError as MagicUsageError  # which IPython shows without a traceback

    def magic(line: str, cell: str) -> list[Any] | None:
        try:
            return run_cell(line, cell, shell.user_ns)
        except UsageError as error:
            raise MagicUsageError(str(error)) from None

    shell.register_magic_function(magic, "cell", "unisono")


def run_cell(line: str, cell: str, namespace: dict[str, Any]) -> list[Any] | None:
    """Run a cell on ranks; the values of its last expression by rank, or None if they have none."""
    options = _options(line)
    name = "<unisono cell>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)  # for tracebacks
    tree = ast.parse(cell, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    body = compile(tree, name, "exec")
    value = compile(ast.Expression(last.value), name, "eval") if isinstance(last, ast.Expr) else None

    def on_rank() -> Any:
        exec(body, namespace)
        return None if value is None else _sendable(eval(value, namespace))

    values = spawn(on_rank, options.n, options.backend, timeout=options.timeout)
    return None if all(each is None for each in values) else values


class _Shown:
    """A value that cannot be sent to the kernel, by its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _sendable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:
        return _Shown(repr(value))
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%unisono: {message}; expected {_USAGE}")


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks")
    return int(text)


def _options(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%unisono", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", type=_ranks, required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--timeout", type=float)
    return parser.parse_args(shlex.split(line))
