"""`gate check --report` writes golden vectors of a file that passed, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate import cli
from gate.golden.folder import GOLDEN_JSON
from tests.reused_charts import reused_charts
from tests.small_project import create_project

__all__ = ["reused_charts"]

COMMAND = ["--reference", "small_models:build", "--inputs", "images.npy"]


@pytest.mark.proof
def test_report_has_vectors_only_for_a_passed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(create_project())
    report = ["--report", str(tmp_path)]
    assert cli.main(["check", "good.onnx", *COMMAND, *report]) == 0
    golden = str(tmp_path / "golden")
    assert cli.main(["verify-release", "good.onnx", "--golden", golden]) == 0
    assert cli.main(["verify-release", "bad.onnx", "--golden", golden]) == 1
    assert cli.main(["check", "bad.onnx", *COMMAND, *report, "--overwrite"]) == 1
    assert not (tmp_path / "golden" / GOLDEN_JSON).exists()
    assert "Traceback" not in capsys.readouterr().err
