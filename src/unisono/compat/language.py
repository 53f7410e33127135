"""The language of errors in compat: that of the user's locale, English or Chinese."""

from __future__ import annotations

import os
import sys

_said: set[str] = set()


def is_chinese() -> bool:
    """Whether messages are in Chinese, by the first of LC_ALL, LC_MESSAGES and LANG that is set."""
    chosen = next((os.environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(name)), "")
    return chosen.lower().startswith("zh")


def say(en: str, zh: str) -> str:
    """One sentence in the user's language."""
    return zh if is_chinese() else en


def say_once(en: str, zh: str) -> None:
    """On rank 0's standard error, once in a process."""
    text = say(en, zh)
    if text not in _said and os.environ.get("RANK", "0") == "0":
        print(f"unisono: {text}", file=sys.stderr)
    _said.add(text)
