"""Notebooks: the one in examples/ runs in a kernel; progress is one line; cells run on ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError as MagicUsageError
from IPython.core.interactiveshell import InteractiveShell

from unisono.errors import LaunchError, UsageError
from unisono.launch.notebook import is_notebook, load_ipython_extension, run_cell
from unisono.launch.spawn import spawn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The code cells of the example, after a run in a kernel of this interpreter."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    folder = tmp_path_factory.mktemp("kernel")
    variables = {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder)}
    manager = AsyncKernelManager()
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=argv, display_name="python", language="python", env=variables)
    client = NotebookClient(notebook, km=manager, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cell: Any) -> tuple[list[str], str, Any]:
    """The lines that are updated in place, the text of streams, and the result of a cell."""
    shown = [each.data["text/plain"] for each in cell.outputs if each.output_type == "display_data"]
    text = "".join(each.text for each in cell.outputs if each.output_type == "stream")
    result = next((each.data["text/plain"] for each in cell.outputs if each.output_type == "execute_result"), None)
    return shown, text, result


@pytest.mark.thorough
def test_progress_is_one_line(cells: list[Any]) -> None:
    shown, text, _ = outputs(cells[1])
    assert len(shown) == 1
    assert shown[0].startswith("epoch 4 step 64/64 loss ")
    assert "plan dp=1" in text
    assert len(text.splitlines()) < 5
    assert "step 1/64" not in text


def test_a_cell_runs_on_ranks_after_fit_in_the_kernel(cells: list[Any]) -> None:
    _, _, alone = outputs(cells[1])
    _, text, values = outputs(cells[2])
    assert values == f"[{alone}, {alone}]"
    loss = alone.strip("'")
    assert f"[0] rank 0 of 2: {loss}" in text
    assert f"[1] rank 1 of 2: {loss}" in text


def test_spawn_and_fit_go_on_in_the_same_kernel(cells: list[Any]) -> None:
    assert outputs(cells[3])[2] is None  # its asserts have passed
    assert outputs(cells[4])[2] == "True"


def test_a_cell_without_a_kernel() -> None:
    assert not is_notebook()
    assert run_cell("-n 2", "x = base + 1\nx * 2", {"base": 3}) == [8, 8]
    assert run_cell("-n 1 --timeout 60", "y = 1", {}) is None
    with pytest.raises(LaunchError, match="division by zero"):
        run_cell("-n 1", "a = 1\n1 / 0", {})


def test_a_value_that_cannot_be_sent_comes_back_as_its_text() -> None:
    (shown,) = run_cell("-n 1", "lambda: 3", {}) or []
    assert repr(shown).startswith("<function <lambda> at ")
    with pytest.raises(LaunchError, match=r"the result is a function that cannot be pickled .* return plain data"):
        spawn(returns_a_function, 1)


def returns_a_function() -> object:
    return lambda: 3


def test_the_kernel_shows_what_is_wrong_without_a_traceback() -> None:
    shell = InteractiveShell()
    load_ipython_extension(shell)
    with pytest.raises(
        MagicUsageError, match=r"^%%unisono: .*'two' is no number of ranks; expected %%unisono -n RANKS"
    ):
        shell.run_cell_magic("unisono", "-n two", "1")
    with pytest.raises(SyntaxError) as wrong:
        shell.run_cell_magic("unisono", "-n 2", "x = 1\ndef f(:")
    assert (wrong.value.filename, wrong.value.lineno) == ("<unisono cell>", 2)


@pytest.mark.parametrize("line", ["", "-n two", "-n 0", "-n 2 --frontend x"])
def test_refused_lines(line: str) -> None:
    with pytest.raises(UsageError, match=r"%%unisono: .* expected %%unisono -n RANKS"):
        run_cell(line, "1", {})
