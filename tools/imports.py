"""Checks that imports only go down: a layer may import itself and the layers below it.

Run as `python tools/imports.py`; exits 1 and names file, line and layer for each import that goes up.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "unisono"

# What each layer may import of unisono, besides itself.
MAY_IMPORT: dict[str, set[str]] = {}
_GROUND = ["errors", "torch_compat", "torch_patches"]
_STACK = [*_GROUND, "launch", "comm", "mesh", "graph", "plan", "parallel"]
_STACK += ["simulate", "verify", "explain", "train", "compat", "report"]
for _height, _layer in enumerate(_STACK):
    MAY_IMPORT[_layer] = set(_STACK[:_height])
MAY_IMPORT["quantum"] = {*_GROUND, "launch", "comm"}
MAY_IMPORT["compat"] |= {"quantum"}
MAY_IMPORT["report"] |= {"quantum"}
_EVERYTHING = set(_STACK) | {"quantum"}
MAY_IMPORT["__init__"] = _EVERYTHING | {"nn"}
MAY_IMPORT["nn"] = _EVERYTHING - {"report"}
MAY_IMPORT["cli"] = _EVERYTHING | {"__init__", "nn"}
MAY_IMPORT["__main__"] = {"cli"}


def layer_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported_layers(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            whole = node.module == "unisono"
            names = [f"unisono.{a.name}" for a in node.names] if whole else [node.module]
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
        for lineno, target in imported_layers(ast.parse(path.read_text())):
            if target == "(relative)":
                lines.append(f"{shown}:{lineno}: relative import; write it from the root: from unisono. ...")
            elif target != layer and target not in MAY_IMPORT[layer]:
                lines.append(f"{shown}:{lineno}: {layer} imports {target}, which is not below it")
    return lines


if __name__ == "__main__":
    found_faults = faults()
    print("\n".join(found_faults) or "imports: all go down")
    sys.exit(1 if found_faults else 0)
