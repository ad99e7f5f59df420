"""The tutorial notebook runs and shows the expected output."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first-check.ipynb"


def displayed_data(cell: Any) -> dict[str, str]:
    """Return what a cell displays, by MIME type."""
    return {kind: text for each in cell.outputs for kind, text in each.get("data", {}).items()}


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_tutorial_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # no output is stored
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    displayed = [displayed_data(cell) for cell in notebook.cells if cell.cell_type == "code"]
    passed, failures, table, rejected, names, layers = filter(None, displayed)
    screen = html.unescape(passed["text/html"])
    assert "PASS" in screen
    assert screen.startswith("<iframe")
    assert "prefers-color-scheme: dark" in screen
    assert not re.search(r"<script|src=.http|@import|url\((?!#)", screen)
    assert failures["text/plain"] == "()"
    assert "<table" in table["text/html"]
    assert "FAIL" in html.unescape(rejected["text/html"])
    assert "noise_ratio" in names["text/plain"]
    assert "<svg" in html.unescape(layers["text/html"])
