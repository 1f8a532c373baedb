"""The example notebook runs from top to bottom on a book, and draws."""

import warnings
from pathlib import Path

import nbformat
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "explore.ipynb"


def test_the_notebook_runs_on_a_book(shown_book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLBOOK_BOOK", str(shown_book))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own client
        from nbclient import NotebookClient

        notebook = nbformat.read(EXAMPLE, as_version=4)
        assert all(not cell.get("outputs") for cell in notebook.cells), "committed without outputs"
        NotebookClient(notebook, timeout=800, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    text = "".join(output.get("text", "") for output in outputs)
    assert "best: reward" in text
    assert "rows; the first has" in text
