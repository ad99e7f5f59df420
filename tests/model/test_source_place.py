"""A place in code is called the same on every machine."""

from __future__ import annotations

import sys
from pathlib import Path

from gate.model.source_place import below_import_path, source_place


def test_the_file_below_the_longest_import_path(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "site" / "nets"
    package.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site"), "/no/such/folder"])
    assert source_place(str(package / "small.py"), 12) == "nets/small.py:12"
    assert below_import_path(str(tmp_path / "own.py")) == "own.py"


def test_elsewhere_its_name_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert below_import_path("/somebody/home/model.py") == "model.py"
