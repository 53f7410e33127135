"""Import names that stand for modules of unisono in this process: `unisono run --as paddle program.py`.

    install("paddle=unisono.compat.paddle")     # from here on `import paddle.io` is `import unisono.compat.paddle.io`

Ranks install what the launcher's environment has, before they run their program; no other process is changed. A package
that stands for another may define `explain_missing_module(name)`, the error's sentence where a module is not there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib import util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def written(aliases: Mapping[str, str]) -> str:
    """The aliases as the text that `install` reads."""
    return ",".join(f"{name}={target}" for name, target in aliases.items())


def install(text: str) -> None:
    """Alias the names in this process, also where packages of those names are installed."""
    aliases = dict(pair.split("=") for pair in text.split(",") if pair)
    if aliases:
        for name in [name for name in sys.modules if name.partition(".")[0] in aliases]:
            del sys.modules[name]
        sys.meta_path.insert(0, _AliasFinder(aliases))


class _AliasFinder(MetaPathFinder):
    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, dot, rest = fullname.partition(".")
        if top not in self._aliases:
            return None
        own = self._aliases[top] + dot + rest
        if own not in sys.modules and _found(own) is None:
            explain = getattr(sys.modules.get(self._aliases[top]), "explain_missing_module", None)
            text = f"No module named {fullname!r}" if explain is None else explain(fullname)
            raise ModuleNotFoundError(text, name=fullname)
        return ModuleSpec(fullname, _AliasLoader(own), is_package=True)


def _found(name: str) -> ModuleSpec | None:
    try:
        return util.find_spec(name)
    except ModuleNotFoundError:  # its parent is a module and no package
        return None


class _AliasLoader(Loader):
    """One module under two names: what it defines exists once."""

    def __init__(self, own: str) -> None:
        self._own = own

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._own)
