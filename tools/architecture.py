"""The map of docs/architecture.md, drawn from the imports.

    python tools/architecture.py            writes the map into the page
    python tools/architecture.py --check    exits 1 if the page's map is not up to date

Each room is a folder of src/unisono. A line gives its folders and the rooms that its modules import, without those that
are reached through another of them, and without the ground (errors, regular_files, ...), which all import.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.imports import MAY_IMPORT, SOURCE, imported_layers, layer_of

PAGE = SOURCE.parent.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- the map, by tools/architecture.py -->", "<!-- the end of the map -->"
GROUND = {"amounts", "errors", "kernel_files", "regular_files", "torch_compat", "torch_patches"}
GROUND |= {"__init__", "(relative)"}


def imports_of() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = layer_of(path)
        if (SOURCE / room).is_dir():
            targets = {target for _, target in imported_layers(path)}
            found.setdefault(room, set()).update(targets - GROUND - {room})
    return found


def shortest(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without edges that a longer path makes up for."""

    def reached(room: str) -> set[str]:
        return graph.get(room, set()).union(*(reached(below) for below in graph.get(room, set())))

    return {room: below - set().union(*(reached(each) for each in below)) for room, below in graph.items()}


def drawing() -> str:
    """The rooms from top to bottom: a room is above all that it imports."""
    graph = imports_of()
    order = sorted(graph, key=lambda room: (-len(MAY_IMPORT.get(room, ())), room))
    width = max(map(len, order))
    lines = []
    for room in order:
        folders = sorted(path.name for path in (SOURCE / room).iterdir() if (path / "__init__.py").exists())
        below = sorted(shortest(graph)[room])
        lines.append(f"{room.ljust(width)}  -> {', '.join(below) or '(the ground)'}")
        if folders:
            lines.append(f"{' ' * width}     {'  '.join(f'{folder}/' for folder in folders)}")
    return "\n".join(lines)


def page_with(drawn: str) -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```text\n{drawn}\n```\n{END}{after}"


if __name__ == "__main__":
    wanted = page_with(drawing())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
    elif PAGE.read_text() != wanted:
        sys.exit(f"{PAGE.name}: the map is not that of the imports; run python tools/architecture.py")
