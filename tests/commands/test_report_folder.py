"""A report is written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gate import cli
from gate.commands import evaluate
from gate.errors import StorageError

CHECK = ["check", "--reference", "small_models:build", "--inputs", "images.npy"]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_report_replaces_an_older_one(project, tmp_path, capsys) -> None:
    report = tmp_path / "report"
    options = ["--report", str(report)]
    assert cli.main([*CHECK, "good.onnx", *options]) == 0
    (report / "mine.txt").write_text("stays")
    assert "golden" in names(report)
    assert cli.main([*CHECK, "bad.onnx", *options]) == 2
    assert cli.main([*CHECK, "bad.onnx", *options, "--overwrite"]) == 1
    assert names(report) >= {"mine.txt", "report.html", "decision.json", "evidence.dsse.json"}
    assert "golden" not in names(report)
    assert names(tmp_path) == {"report"}


def test_current_folder_can_be_the_report(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with evaluate.report_folder(Path()) as folder:
        (folder / "decision.json").write_text("new")
    assert names(tmp_path) == {"decision.json"}


def test_nothing_is_written_outside_the_report(tmp_path) -> None:
    """The folder may be a mount; its parent may be read-only or on another disk."""
    with evaluate.report_folder(tmp_path / "report") as folder:
        assert folder.parent == tmp_path / "report"
    assert names(tmp_path) == set()


@pytest.mark.parametrize("there", [False, True])
def test_failed_report_leaves_nothing(tmp_path, there) -> None:
    report = tmp_path / "report"
    if there:
        report.mkdir()
        (report / "decision.json").write_text("old")

    def half() -> None:
        with evaluate.report_folder(report) as folder:
            (folder / "decision.json").write_text("new")
            raise OSError(28, os.strerror(28))

    with pytest.raises(StorageError, match="No space"):
        half()
    assert names(tmp_path) == ({"report"} if there else set())
    assert not there or (report / "decision.json").read_text() == "old"


def test_report_is_written_without_pillow(project, tmp_path, capsys, monkeypatch) -> None:
    for module in ("gate.measure.artifacts", "gate.commands.evaluate"):
        monkeypatch.setattr(f"{module}.is_installed", lambda name: name != "PIL")
    arguments = [*CHECK, "bad.onnx", "--report", str(tmp_path / "report")]
    assert cli.main(arguments) == 1
    assert "Pillow" in capsys.readouterr().err
    assert not list((tmp_path / "report" / "pictures").glob("*"))
    assert (tmp_path / "report" / "report.html").exists()
