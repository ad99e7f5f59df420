"""The trace-safety rules run before an export and exclude unsafe strategies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gate import cli
from gate.errors import ExportRefused
from gate.export.export import export_model
from gate.records.export import ExportSettings
from tests.export.nets import images, seeded


class Branch(nn.Module):
    """Branch on data: a trace keeps one branch, a script both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            return self.body(x)
        return -self.body(x)


class SuppressedBranch(Branch):
    """The same branch with suppressed findings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):  # noqa: TRC001, TRC008
            return self.body(x)
        return -self.body(x)


def example() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)}


def export(model: nn.Module, folder: Path, **settings):
    requested = ExportSettings(**settings)
    return export_model(model.eval(), example(), settings=requested, output=folder / "model.onnx")


def test_ladder_skips_refused_strategies(tmp_path):
    record = export(Branch(), tmp_path).record
    assert record.strategy == "scripted"
    assert [line.partition(":")[0] for line in record.rungs] == ["traced", "direct"]
    assert all("refused by TRC008 at" in line and "test_safety.py" in line for line in record.rungs)
    assert record.lint == ()


def test_nothing_is_written_when_all_strategies_are_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"old")
    with pytest.raises(ExportRefused) as refused:
        export(Branch(), tmp_path, strategy="traced")
    lines = str(refused.value).splitlines()
    assert len(lines) <= 10
    assert "TRC008" in lines[1]
    assert "noqa: TRC008" in lines[-1]
    assert (tmp_path / "model.onnx").read_bytes() == b"old"


@pytest.mark.parametrize("model", [SuppressedBranch(), Branch()])
def test_suppressed_findings_are_recorded(tmp_path, model):
    lint = "off" if type(model) is Branch else "error"
    record = export(model, tmp_path, strategy="traced", lint=lint).record
    assert record.settings["lint"] == lint
    assert "TRC008" in {finding.code for finding in record.lint}
    assert all(finding.suppressed for finding in record.lint) is (type(model) is SuppressedBranch)


def test_model_without_findings(tmp_path):
    output = tmp_path / "model.onnx"
    exported = export_model(seeded(), images(), settings=ExportSettings(), output=output)
    assert exported.record.lint == exported.record.lint_unread == ()
    assert exported.record.settings["lint"] == "error"


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", example()["x"])
    factory = "tests.export.test_safety:Branch"
    return ["export", factory, "--example-input", "x.npy", "--output", "m.onnx"]


def test_export_command_exits_with_1_when_refused(command, capsys):
    assert cli.main([*command, "--strategy", "traced"]) == 1
    captured = capsys.readouterr().out
    assert "TRC008" in captured
    assert "Traceback" not in captured
    assert not Path("m.onnx").exists()
    assert cli.main([*command, "--strategy", "traced", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["exit_code"] == 1
    assert "TRC008" in "\n".join(plain["refused"])


def test_export_command_without_lint_shows_findings(command, capsys):
    assert cli.main([*command, "--strategy", "traced", "--no-lint"]) == 0
    assert "TRC008 error at" in capsys.readouterr().out
    assert cli.main(command) == 0
    captured = capsys.readouterr().out
    assert "strategy    scripted" in captured
    assert "failed    traced: refused by TRC008" in captured


@pytest.mark.proof
def test_export_compare_command(tmp_path, monkeypatch, capsys):
    """`gate export compare` exports despite the finding and reports the wrong strategy."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.abs(example()["x"]) * np.array([[1], [1], [1], [-1]], np.float32))
    factory = "tests.export.test_safety:Sizes"
    compare = ["export", "compare", factory, "--example-input", "x.npy", "--opset", "13"]
    more = ["--strategy", "traced", "--strategy", "scripted", "--folding", "on"]
    assert cli.main([*compare, *more, "--report", "report", "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    verdicts = {
        trial["strategy"]: [p["verdict"] for p in trial["parities"]] for trial in plain["trials"]
    }
    assert verdicts == {"traced": ["FAIL", "FAIL"], "scripted": ["PASS", "PASS"]}
    assert Path("report/trials.md").read_text().startswith("# Exports of ")
    assert cli.main([*compare, "--strategy", "scripted"]) == 0
    assert "2 of 2 exports compute what the model computes" in capsys.readouterr().out
    assert cli.main([*compare, "--strategy", "no such"]) == 2


class Sizes(Branch):
    """Return a different output for more than four samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 4:
            return self.body(x)
        return -self.body(x)
