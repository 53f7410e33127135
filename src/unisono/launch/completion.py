"""`unisono completion bash|zsh|fish`: completion of commands, options and their choices, made from the parsers.

    eval "$(unisono completion bash)"             # in ~/.bashrc
    eval "$(unisono completion zsh)"              # in ~/.zshrc, after compinit
    unisono completion fish > ~/.config/fish/completions/unisono.fish

What is written is a script that calls nothing: a press of Tab does not start Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SHELLS = ("bash", "zsh", "fish")


@dataclass
class _Option:
    flags: list[str]
    help: str
    takes_value: bool
    choices: list[str]


@dataclass
class _Command:
    path: tuple[str, ...]  # "bench", "comm"
    help: str
    options: list[_Option] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # its sub-commands, and choices of its positional arguments


def add_parser(subparsers: Any, root: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser("completion", help="print a script that completes commands in a shell")
    parser.add_argument("shell", choices=SHELLS, help='as in eval "$(unisono completion bash)"')

    def run(chosen: argparse.Namespace) -> int:
        print(script(root, chosen.shell), end="")
        return 0

    parser.set_defaults(handler=run)


def script(root: argparse.ArgumentParser, shell: str) -> str:
    """The script for a shell."""
    commands = list(_commands(root))
    writers: dict[str, Callable[[str, list[_Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return writers[shell](root.prog, commands)


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), help: str = "") -> Iterator[_Command]:
    made = _Command(path, help)
    below: list[_Command] = []
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, child in action.choices.items():
                below.extend(_commands(child, (*path, name), helps.get(name, "")))
            made.words += choices
        elif not action.option_strings:
            made.words += choices
        elif action.help != argparse.SUPPRESS:
            text = "" if action.help is None else action.help % _values(action)
            made.options.append(_Option(list(action.option_strings), text, action.nargs != 0, choices))
    yield made
    yield from below


def _values(action: argparse.Action) -> dict[str, Any]:
    """What argparse fills into an option's help."""
    return {**vars(action), "prog": "unisono"}


# ---- bash and zsh ----------------------------------------------------------------------------------------------------


def _bash(program: str, commands: list[_Command]) -> str:
    paths = [" ".join(command.path) for command in commands]
    deeper = "|".join(f"{' '.join(command.path[:-1])!r}:{command.path[-1]}" for command in commands if command.path)
    lines = [
        f"_{program}() {{",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[$((COMP_CWORD-1))]}" seen="" word',
        '    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do',
        "        case \"'$seen':$word\" in",
        f'            {deeper.replace(chr(39), chr(92) + chr(39))}) seen="${{seen:+$seen }}$word" ;;',
        "        esac",
        "    done",
        '    case "$seen|$prev" in',
    ]
    for path, command in zip(paths, commands, strict=True):
        for option in command.options:
            patterns = "|".join(shlex.quote(f"{path}|{flag}") for flag in option.flags)
            if option.choices:
                words = shlex.quote(" ".join(option.choices))
                lines.append(f'        {patterns}) COMPREPLY=( $(compgen -W {words} -- "$cur") ); return ;;')
            elif option.takes_value:
                lines.append(f'        {patterns}) COMPREPLY=( $(compgen -f -- "$cur") ); return ;;')
    lines += ["    esac", '    case "$seen" in']
    for path, command in zip(paths, commands, strict=True):
        flags = shlex.quote(" ".join(flag for option in command.options for flag in option.flags))
        words = shlex.quote(" ".join(command.words))
        otherwise = f"compgen -W {words}" if command.words else "compgen -f"
        lines.append(
            f'        {shlex.quote(path)}) if [[ "$cur" == -* ]]; then COMPREPLY=( $(compgen -W {flags} -- "$cur") ); '
            f'else COMPREPLY=( $({otherwise} -- "$cur") ); fi ;;'
        )
    lines += ["    esac", "}", f"complete -o filenames -F _{program} {program}", ""]
    return "\n".join(lines)


def _zsh(program: str, commands: list[_Command]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(program, commands)


# ---- fish ------------------------------------------------------------------------------------------------------------


def _fish(program: str, commands: list[_Command]) -> str:
    helps = {command.path: command.help for command in commands}
    lines = []
    for command in commands:
        if command.path:
            where = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.path)
        else:
            where = "__fish_use_subcommand"
        rest = [other.path[-1] for other in commands if other.path[:-1] == command.path and other.path]
        if rest and command.path:
            where_words = f"{where}; and not __fish_seen_subcommand_from {' '.join(rest)}"
        else:
            where_words = where
        start = f"complete -c {program} -n {shlex.quote(where)}"
        for word in command.words:
            about = helps.get((*command.path, word), "")
            lines.append(f"complete -c {program} -f -n {shlex.quote(where_words)} -a {word}{_described(about)}")
        for option in command.options:
            flags = " ".join(f"-l {f[2:]}" if f.startswith("--") else f"-s {f[1:]}" for f in option.flags)
            value = f" -xa {shlex.quote(' '.join(option.choices))}" if option.choices else " -r"
            lines.append(f"{start} {flags}{value if option.takes_value else ''}{_described(option.help)}")
    return "\n".join([*lines, ""])


def _described(text: str) -> str:
    return f" -d {shlex.quote(text)}" if text else ""
