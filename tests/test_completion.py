"""Completion in real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CASES = [
    (["ver"], ["verify"]),
    (["bench", ""], ["comm", "hardware"]),
    (["verify", "--pl"], ["--plan"]),
    (["verify", "train.py", "--dtype", "float"], ["float16", "float32", "float64"]),
    (["completion", ""], ["bash", "fish", "zsh"]),
    (["run", "-n", "2", "tra"], ["train.py"]),
]


def _folder(name: str, folder: Path) -> Path:
    """A folder with the script for a shell and a file to complete."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    made = subprocess.run([sys.executable, "-m", "unisono", "completion", name], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (folder / "script").write_text(made.stdout)
    (folder / "train.py").touch()
    return folder


@pytest.mark.parametrize("name", ["bash", "fish"])
def test_words_are_completed(name: str, tmp_path: Path) -> None:
    folder = _folder(name, tmp_path)
    for words, expected in CASES:
        assert _completions(name, folder, words) == expected


def _completions(name: str, folder: Path, words: list[str]) -> list[str]:
    if name == "fish":
        program = f"source ./script; complete --do-complete 'unisono {' '.join(words)}'"
    else:
        quoted = " ".join(f"'{word}'" for word in ["unisono", *words])
        program = f"source ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _unisono; "
        program += 'printf "%s\\n" "${COMPREPLY[@]}"'
    ran = subprocess.run([name, "-c", program], cwd=folder, capture_output=True, text=True)
    return sorted(line.partition("\t")[0] for line in ran.stdout.splitlines() if line)


@pytest.mark.thorough
def test_in_the_line_editor_of_zsh(tmp_path: Path) -> None:
    """Its completion system runs nowhere else: keys are typed into a terminal."""
    folder = _folder("zsh", tmp_path)
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "PS1": "> "})
    try:
        _type(
            terminal, "autoload -U compinit; compinit -u -D; source ./script; print -r ready $((40 + 2))\n", "ready 42"
        )
        for keys, expected in (
            ("unisono ver", "verify"),
            ("unisono verify --pl", "--plan"),
            ("unisono run tra", ".py"),
        ):
            _type(terminal, f"{keys}\t", expected)
            os.write(terminal, b"\x15")  # Ctrl-U: the line is emptied
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def _type(terminal: int, keys: str, expected: str) -> None:
    """Type, and wait until the terminal shows what is expected."""
    os.write(terminal, keys.encode())
    shown, ends = "", time.monotonic() + 30
    while expected not in shown and time.monotonic() < ends:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    assert expected in shown, shown


def test_an_unknown_shell_is_refused() -> None:
    ran = subprocess.run([sys.executable, "-m", "unisono", "completion", "tcsh"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "choose from" in ran.stderr
