"""Source locations have the same name on every machine."""

from __future__ import annotations

import sys
from pathlib import Path

from gate.model.source_code import below_import_path, file_below, source_location


def test_path_below_the_longest_import_path(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "site" / "nets"
    package.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site"), "/no/such/folder"])
    assert source_location(str(package / "small.py"), 12) == "nets/small.py:12"
    assert below_import_path(str(tmp_path / "own.py")) == "own.py"


def test_path_outside_import_paths_is_the_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert below_import_path("/somebody/home/model.py") == "model.py"


def test_relative_path_from_a_folder(tmp_path: Path, monkeypatch) -> None:
    custom, installed = tmp_path / "src" / "nets", tmp_path / ".venv" / "site-packages"
    for folder, name in ((custom, "small.py"), (installed, "foreign.py")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    (tmp_path / "link").symlink_to(tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "link"), str(installed)])
    assert file_below(tmp_path, "nets/small.py") == "src/nets/small.py"
    assert file_below(tmp_path, "foreign.py") == "foreign.py"
    assert file_below(tmp_path / ".venv", "nets/small.py") == "nets/small.py"
    assert file_below(tmp_path, "nowhere.py") == "nowhere.py"
