"""Every notebook runs from top to bottom on the committed results, and on another run that its first cell is pointed at."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from harness import store
from harness.cell import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# In a process of its own: nbclient keeps an event loop for the life of the process.
_EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

path, folder, output = sys.argv[1:]
notebook = nbformat.read(path, as_version=4)
NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, output)
"""


def run(path: Path, tmp_path: Path, monkeypatch) -> nbformat.NotebookNode:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    output = tmp_path / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", _EXECUTE, str(path), str(path.parent), str(output)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return nbformat.read(output, as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_on_published_results(path, tmp_path, monkeypatch):
    monkeypatch.delenv("VERBFLOW_RUN", raising=False)
    monkeypatch.delenv("VERBFLOW_RESULTS", raising=False)
    notebook = run(path, tmp_path, monkeypatch)
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "stream" and output.name == "stderr"]


@pytest.mark.slow
def test_a_notebook_can_be_pointed_at_another_run(tmp_path, monkeypatch):
    from harness.tests.fabricated import make_run

    monkeypatch.setenv("VERBFLOW_RUN", str(make_run(tmp_path, "elsewhere")))
    notebook = run(ROOT / "notebooks" / "02_latency_and_bandwidth.ipynb", tmp_path, monkeypatch)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert "elsewhere" in "".join(output.get("text", "") for output in first.outputs)


def test_committed_notebooks_carry_no_outputs_and_no_paths():
    assert len(NOTEBOOKS) >= 4
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs")


def test_published_results_can_be_read_and_name_no_machine_path():
    for info in (ROOT / "results" / "published").glob("*/*/run.json"):
        results = store.load(info.parent)
        assert len(results.runs) and len(results.samples)
        for text in (info.read_text(), *results.runs["error"]):
            assert "/home/" not in text and "/tmp/" not in text and "/root/" not in text
