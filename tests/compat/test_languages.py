"""Every error and warning that compat raises has a Chinese form beside the English one."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono.compat
from unisono.compat import language
from unisono.compat.mindspore.common.seed import set_seed
from unisono.errors import UsageError

_ROOT = Path(unisono.compat.__file__).parent
_MODULES = sorted(
    ".".join(("unisono.compat", *path.relative_to(_ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in _ROOT.rglob("*.py")
)
_CHINESE = re.compile("[\u3000-\u9fff\uff00-\uffef]")  # with punctuation
# Python's own words, for names that it asks for itself; what a subclass must have; how a forward ends, which is caught.
_NOT_SHOWN = ("AttributeError", "NotImplementedError", "MarkFound", "SystemExit")


def _parsed(module: str) -> tuple[Any, ast.Module]:
    loaded = importlib.import_module(module)
    return loaded, ast.parse(Path(str(loaded.__file__)).read_text(encoding="utf-8"))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _bilingual_functions() -> set[str]:
    """`say`, functions that return what it gives, and classes of errors that say it themselves."""
    found = {"say"}
    for module in _MODULES:
        for node in ast.walk(_parsed(module)[1]):
            if isinstance(node, ast.FunctionDef):
                made = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
                if made and all(isinstance(each, ast.Call) and _name(each) == "say" for each in made):
                    found.add(node.name)
            if isinstance(node, ast.ClassDef) and "super().__init__(say(" in re.sub(r"\s", "", ast.unparse(node)):
                found.add(node.name)
    return found


def _shown(module: str) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Calls that make an error or a warning, and the function that each is in."""
    loaded, tree = _parsed(module)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        within: ast.AST = next((f for f in reversed(functions) if f.lineno <= node.lineno <= (f.end_lineno or 0)), tree)
        kind = getattr(loaded, _name(node), getattr(__import__("builtins"), _name(node), None))
        is_error = isinstance(kind, type) and issubclass(kind, BaseException) and _name(node) not in _NOT_SHOWN
        if is_error or ast.unparse(node.func) in ("warnings.warn", "pickle.UnpicklingError"):
            yield node, within


def _is_bilingual(message: ast.AST, within: ast.AST, known: set[str]) -> bool:
    if isinstance(message, ast.Name):
        assigned = [each for each in ast.walk(within) if isinstance(each, ast.Assign)]
        values = [each.value for each in assigned if ast.unparse(each.targets[0]) == message.id]
        return bool(values) and all(_is_bilingual(each, within, known) for each in values)
    return isinstance(message, ast.Call) and _name(message) in known


def test_errors_have_a_chinese_form() -> None:
    known = _bilingual_functions()
    english_only, count = [], 0
    for module in _MODULES:
        for call, within in _shown(module):
            count += 1
            if _name(call) in known:
                continue
            if not call.args or not _is_bilingual(call.args[0], within, known):
                english_only.append(f"{module}:{call.lineno}: {ast.unparse(call)}")
    assert english_only == []
    assert count > 200  # there is something to be looked at


def test_what_is_said_is_in_two_languages() -> None:
    wrong = []
    for module in _MODULES:
        for node in ast.walk(_parsed(module)[1]):
            if isinstance(node, ast.Call) and _name(node) in ("say", "say_once") and len(node.args) == 2:
                english, chinese = map(ast.unparse, node.args)
                if any(isinstance(each, ast.Name | ast.Subscript) for each in node.args):
                    continue  # forwarded, or of a table
                if _CHINESE.search(english) or not _CHINESE.search(chinese):
                    wrong.append(f"{module}:{node.lineno}: {english} / {chinese}")
    assert wrong == []


@pytest.mark.parametrize(
    ("locale", "expected"), [("zh_CN.UTF-8", "应为非负整数"), ("en_US.UTF-8", "expected a whole number")]
)
def test_the_locale_decides(monkeypatch: pytest.MonkeyPatch, locale: str, expected: str) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    assert language.is_chinese() == locale.startswith("zh")
    with pytest.raises(UsageError, match=expected):
        set_seed(-1)
