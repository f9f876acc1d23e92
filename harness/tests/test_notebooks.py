"""Every notebook runs from top to bottom on the committed results, and on another run that its first cell is pointed at."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from harness import store
from harness.cell import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(path: Path, monkeypatch) -> nbformat.NotebookNode:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_notebook_runs_on_published_results(path, monkeypatch):
    monkeypatch.delenv("VERBFLOW_RUN", raising=False)
    monkeypatch.delenv("VERBFLOW_RESULTS", raising=False)
    notebook = run(path, monkeypatch)
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not [output for output in shown if output.output_type == "stream" and output.name == "stderr"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_can_be_pointed_at_another_run(tmp_path, monkeypatch):
    from harness.tests.fabricated import make_run

    monkeypatch.setenv("VERBFLOW_RUN", str(make_run(tmp_path, "elsewhere")))
    notebook = run(ROOT / "notebooks" / "02_latency_and_bandwidth.ipynb", monkeypatch)
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
