"""Checks that imports only go down: a layer may import itself and the layers below it.

Run as `python tools/imports.py`; exits 1 and names file, line and layer for each import that goes up. With `--sizes` it
also prints the files and lines of each folder, and modules that import each other in a circle.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "unisono"

# What each layer may import of unisono, besides itself.
MAY_IMPORT: dict[str, set[str]] = {}
_GROUND = ["amounts", "errors", "kernel_files", "regular_files", "torch_compat", "torch_patches"]
_STACK = [*_GROUND, "launch", "comm", "mesh", "graph", "plan", "parallel"]
_STACK += ["simulate", "planner", "verify", "explain", "train", "compat", "report"]
for _height, _layer in enumerate(_STACK):
    MAY_IMPORT[_layer] = set(_STACK[:_height])
MAY_IMPORT["quantum"] = {*_GROUND, "launch", "comm"}
MAY_IMPORT["compat"] |= {"quantum"}
MAY_IMPORT["report"] |= {"quantum"}
MAY_IMPORT["integrations"] = set(_STACK) | {"quantum"}
_EVERYTHING = set(_STACK) | {"quantum"}
MAY_IMPORT["__init__"] = _EVERYTHING | {"nn"}
MAY_IMPORT["nn"] = _EVERYTHING - {"report"}
MAY_IMPORT["cli"] = _EVERYTHING | {"__init__", "nn"}
MAY_IMPORT["__main__"] = {"cli"}


def layer_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a module or in another statement: imports are among them, and expressions hold none."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, block, ()):
            yield statement
            yield from statements(statement)


def imported_layers(path: Path) -> list[tuple[int, str]]:
    """The layers that a file imports, with the lines."""
    found = []
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            full = node.module == "unisono"
            names = [f"unisono.{a.name}" for a in node.names] if full else [node.module]
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            found.append((node.lineno, "(relative)"))
            continue
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "unisono":
                found.append((node.lineno, parts[1] if len(parts) > 1 else "__init__"))
    return found


def faults() -> list[str]:
    lines = []
    for path in sorted(SOURCE.rglob("*.py")):
        layer = layer_of(path)
        shown = path.relative_to(SOURCE.parent.parent)
        if layer not in MAY_IMPORT:
            lines.append(f"{shown}: layer {layer!r} is not in the house plan of {Path(__file__).name}")
            continue
        for lineno, target in imported_layers(path):
            if target == "(relative)":
                lines.append(f"{shown}:{lineno}: relative import; write it from the root: from unisono. ...")
            elif target != layer and target not in MAY_IMPORT[layer]:
                lines.append(f"{shown}:{lineno}: {layer} imports {target}, which is not below it")
    return lines


def sizes() -> list[str]:
    """Files and lines of each folder."""
    rows = []
    for folder in sorted({path.parent for path in SOURCE.rglob("*.py")}):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        count = sum(len(path.read_text().splitlines()) for path in folder.glob("*.py"))
        rows.append(f"{len(files):4} files {count:7,} lines  {folder.relative_to(SOURCE.parent)}")
    lines = sum(len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py"))
    return [*rows, f"{len(list(SOURCE.rglob('*.py'))):4} files {lines:7,} lines  in all"]


def circles() -> list[list[str]]:
    """Modules that import each other, also from within functions, but not for types alone."""
    names = {_module(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: _imports(path, names) - {name} for name, path in names.items()}
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:  # Tarjan: modules that reach each other are on the stack together
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, names: dict[str, Path]) -> set[str]:
    tree = parsed(path)
    typed = {
        id(inner)
        for node in statements(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in statements(node)
    }
    found: set[str] = set()
    for node in statements(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & names.keys() or {node.module}
    return found & names.keys()


if __name__ == "__main__":
    if "--sizes" in sys.argv[1:]:
        print("\n".join(sizes()))
        for members in circles():
            print("circle:", " <-> ".join(members))
    found_faults = faults()
    print("\n".join(found_faults) or "imports: all go down")
    sys.exit(1 if found_faults else 0)
