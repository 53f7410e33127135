"""The table of what was run, printed at the end and written to $MATRIX_PAGE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.matrix.table import CELLS, page


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not CELLS:
        return
    text = page(CELLS)
    terminalreporter.write_line(text)
    if target := os.environ.get("MATRIX_PAGE"):
        Path(target).write_text(text)
