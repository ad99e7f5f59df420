"""`gate check --set` overrides settings of the policy."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.commands.running import Capture, create_runner
from tests.small_project import create_project

CHECK_OPTIONS = ("--reference", "small_models:build", "--inputs", "images.npy")
SET = "runtimes.ort-cpu.bounds.noise_ratio=2"
run, as_json = create_runner("check")


@pytest.fixture(autouse=True)
def _project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(create_project())


def test_set_applies_is_reported_and_blocks_promotion(capsys: Capture, tmp_path: Path) -> None:
    report = tmp_path / "report"
    code, reported = as_json(capsys, "good.onnx", *CHECK_OPTIONS, "--set", SET, "--set=min_samples=9", "--report", str(report))  # fmt: skip
    assert (code, reported["verdict"]) == (0, "PASS")
    tried = {"runtimes.ort-cpu.bounds.noise_ratio": 2, "min_samples": 9}
    assert reported["decision"]["tried"] == tried
    assert json.loads((report / "policy.json").read_text())["tried"] == tried
    bounds = {
        check["runtime"]: check["bound"]
        for check in reported["decision"]["checks"]
        if check["name"] == "noise_ratio"
    }
    assert bounds == {"ort-cpu": 2.0, "ort-cpu-optimized": 1.5}
    assert "Tried out, so it promotes nothing: " in (report / "report.html").read_text()
    command = shlex.split(reported["story"]["steps"][0]["command"])
    assert not [word for word in command if word.startswith("--set") or word == SET]
    assert command[-2:] == ["--policy", "POLICY"]


@pytest.mark.parametrize("text", ["noise_ratio", "=2", "runtimes..bounds=2", ""])
def test_unknown_setting_is_refused(capsys: Capture, text: str) -> None:
    code, _, err = run(capsys, "good.onnx", *CHECK_OPTIONS, "--set", text)
    assert code == 2
    assert "expected PLACE=VALUE" in err
