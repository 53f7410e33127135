"""`vqnetrun`: VQNet's launcher, which here is `unisono run` under another name.

vqnetrun -n 2 python test.py
vqnetrun -np 4 -f hosts --output-filename out --verbose --start-timeout 10 python test.py

Where VQNet is not installed, `import pyvqnet` finds unisono.compat.vqnet in the ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from unisono.compat.aliases import ALIASES
from unisono.errors import UnisonoError, UsageError
from unisono.launch import command, hosts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. Wrong usage is 2, a job's own code is passed on."""
    parser = argparse.ArgumentParser(
        prog="vqnetrun",
        usage="vqnetrun -n N [options] python script.py ARGS",
        description="Start a script on N ranks, here or on several hosts: `unisono run` with VQNet's options.",
        allow_abbrev=False,
    )
    command.add_options(parser)
    chosen = parser.parse_args(arguments)
    try:
        settle(chosen)
        return command.run(chosen)
    except UsageError as error:
        print(f"vqnetrun: {error}", file=sys.stderr)
        return 2
    except UnisonoError as error:
        print(f"vqnetrun: {error}", file=sys.stderr)
        return 1


def settle(chosen: argparse.Namespace) -> None:
    """Make options of vqnetrun those of `unisono run`: VQNet's names are unisono's where VQNet is not installed."""
    _widen(chosen)
    if importlib.util.find_spec("pyvqnet") is None:
        chosen.aliases, chosen.written_for = ALIASES, "pyvqnet"


def _widen(chosen: argparse.Namespace) -> None:
    """Where -np asks for more ranks than the hosts have slots, give every host as many times its slots as it takes.

    That is what VQNet's own examples do (-np 4 -H node0:1,node2:1); `unisono run` refuses it.
    """
    if chosen.n is None or not (chosen.hosts or chosen.hostfile) or (chosen.hosts and chosen.hostfile):
        return
    named = hosts.parse_list(chosen.hosts) if chosen.hosts else hosts.parse_file(chosen.hostfile)
    times = -(-chosen.n // sum(host.slots for host in named))
    if times > 1:
        chosen.hosts = ",".join(f"{host.name}:{host.slots * times}" for host in named)
        chosen.hostfile = None


if __name__ == "__main__":
    sys.exit(main())
