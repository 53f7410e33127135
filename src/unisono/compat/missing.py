"""Names that a framework has and its package here has not: one sentence that says so, and what works instead.

`import paddle.vision`, `from paddle import vision` and `paddle.vision` all raise that sentence. A framework's package
says what it is (paddle_names, vqnet_names, mindspore_names), and its modules end with

    __getattr__ = missing_names(__name__)
"""

from __future__ import annotations

import difflib
import dis
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from unisono.errors import UsageError

Entry = TypeVar("Entry")


class MissingName(UsageError, AttributeError):
    """A name that the framework may have, and the package here has not."""


class MissingImport(UsageError, ImportError):
    """The same, where a program imports it."""


def answer_with(sentence: Callable[[str, Mapping[str, Any]], str], module: str) -> Callable[[str], Any]:
    """A module's __getattr__. sentence: of a name, and the names that the module has."""

    def missing(name: str) -> Any:
        if name.startswith("__"):  # asked for by Python itself, such as __path__
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        frame = sys._getframe(1)
        # `from module import name` would replace an AttributeError's text by its own
        is_import = frame.f_lasti >= 0 and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
        raise (MissingImport if is_import else MissingName)(sentence(name, vars(sys.modules[module])))

    return missing


def longest_prefix(name: str, table: Mapping[str, Entry]) -> tuple[str, Entry] | None:
    """The entry of a full name such as paddle.vision.models, or of the package that it is in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next(((prefix, table[prefix]) for prefix in prefixes if prefix in table), None)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The public name that is most like it, or ""."""
    return next(iter(difflib.get_close_matches(name, [each for each in known if each[:1] != "_"], 1, cutoff)), "")
