"""The table of the matrix: a row an architecture, a column a plan, and the reasons of what was refused."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable

from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.plans import EXPERTS, HYBRIDS, PLANS
from tests.pairs import EQUIVALENT, REFUSED, Outcome

CELLS: dict[tuple[str, str], Outcome] = {}  # filled by the tests of this process

_HEAD = """# Models

Hugging Face architectures, built from small configs with random weights and trained as they are, under each plan: two
steps in float64 against one device. {total} ({date}; transformers {version}).

`=`: losses, gradients, parameters, buffers and optimizer state are those of one device, to 1e-9. A number: the plan is
refused, for the reason below the table. `.`: not tried. `make test-all` fills the table anew.
"""


def page(cells: dict[tuple[str, str], Outcome]) -> str:
    import transformers

    total = f"{count(cells, EQUIVALENT)} cells are equivalent, {count(cells, REFUSED)} are refused"
    parts = [_HEAD.format(total=total, date=datetime.date.today().isoformat(), version=transformers.__version__)]
    reasons: dict[str, int] = {}
    for kind in dict.fromkeys(each.kind for each in ARCHITECTURES.values()):
        names = [name for name, each in ARCHITECTURES.items() if each.kind == kind and any(n == name for n, _ in cells)]
        if names:
            parts.append(f"## {kind.capitalize()}\n\n" + _table(cells, names, reasons))
    if reasons:
        parts.append("## Reasons\n\n" + "\n".join(f"{number}. {text}" for text, number in reasons.items()))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def count(cells: dict[tuple[str, str], Outcome], kind: str) -> int:
    return sum(outcome.kind == kind for outcome in cells.values())


def _table(cells: dict[tuple[str, str], Outcome], names: Iterable[str], reasons: dict[str, int]) -> str:
    names = list(names)
    plans = [plan for plan in (*PLANS, *EXPERTS, *HYBRIDS) if any((name, plan) in cells for name in names)]
    rows = [["", *(plan.replace(",", ", ") for plan in plans)], ["---", *[":-:"] * len(plans)]]
    for name in names:
        rows.append([name, *(_cell(cells.get((name, plan)), reasons) for plan in plans)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(outcome: Outcome | None, reasons: dict[str, int]) -> str:
    if outcome is None:
        return "."
    if outcome.kind == EQUIVALENT:
        return "="
    if outcome.kind == REFUSED:
        return str(reasons.setdefault(_without_names(outcome.text), len(reasons) + 1))
    return f"**{outcome.kind}**"


def _without_names(text: str) -> str:
    """A reason as it stands for several models: layers by number are any layer."""
    return re.sub(r"\.\d+\.", ".N.", " ".join(text.split()))
