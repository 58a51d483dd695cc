"""The notebook of the quickstart runs from its first cell to its last, and prints what its text promises.

`python -m tests.test_notebook_quickstart` executes it and stores the new outputs in docs/start/notebook.ipynb.
"""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spawn import HANG_S

NOTEBOOK = Path(__file__).parent.parent / "docs" / "start" / "notebook.ipynb"


def execute(folder: Path) -> Any:
    """Run all cells anew in a folder; the notebook with their outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(str(NOTEBOOK), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=int(HANG_S),
        startup_timeout=int(HANG_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    return notebook


def shown(notebook: Any) -> str:
    """Return what the cells print and what their last lines are worth, as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text") or output.data["text/plain"] + "\n" for output in outputs)


def check(text: str) -> None:
    """Compare what the cells have shown with what the text between them says."""
    [stopped] = re.findall(r"Stopped by SIGINT .* at step (\d+)", text)
    assert re.findall(r"Resuming .* step (\d+)", text) == [stopped]
    assert 200 <= int(stopped) < 600
    assert "they have saved and can be resumed" in text
    results = [row for found in re.findall(r"^\[\{.*?\}\]$", text, re.M | re.S) for row in ast.literal_eval(found)]
    assert [row["steps"] for row in results] == [600, 600, 600]
    assert all(row["accuracy"] > 0.95 for row in results)
    one, *two = (row["accuracy"] for row in results)
    assert two == pytest.approx([one, one], abs=0.01)  # the order of sums differs
    assert f"'last': {one}" in text


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # those of the kernel's client
def test_the_notebook_of_the_quickstart_runs(tmp_path: Path) -> None:
    check(shown(execute(tmp_path)))


@pytest.mark.notebook
def test_the_stored_outputs_are_of_a_whole_run_and_name_no_machine() -> None:
    import nbformat

    notebook = nbformat.read(str(NOTEBOOK), as_version=4)
    nbformat.validate(notebook)
    check(shown(notebook))
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [1, 2, 3, 4, 5, 6]
    assert not re.search(r"/(tmp|home|root|work|Users)/", NOTEBOOK.read_text())
    assert not any(cell.metadata for cell in notebook.cells)
    assert NOTEBOOK.stat().st_size < 50_000


def _store() -> None:
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(Path(folder))
    for cell in notebook.cells:
        cell.metadata.clear()  # when it ran
        kept: list[Any] = []
        for output in cell.get("outputs", []):
            if kept and output.get("name", "") == kept[-1].get("name"):
                kept[-1].text += output.text
            elif output.output_type != "stream" or output.text.strip():
                kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    NOTEBOOK.write_text(nbformat.writes(notebook).replace(f"{folder}/", "") + "\n")


if __name__ == "__main__":
    _store()
