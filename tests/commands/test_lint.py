"""`gate lint`: exit codes, tables, JSON, and remedies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.running import create_runner

SOURCE = """
import torch
from torch import nn


class Inner(nn.Module):
    def forward(self, x):
        return x / len(x)


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        scale = x.max().item()  # noqa: TRC002
        if x.shape[1] > 5:
            x = x[:, :5]
        return self.inner(x) * scale


def right():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def shapes():
    class Shapes(nn.Module):
        def forward(self, x):
            return x[:, :5] if x.shape[1] > 5 else x

    return Shapes()


def script():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(2, 2))
"""
run, _ = create_runner("lint")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder, different for each test."""
    name = f"models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("factory", "options", "expected"),
    [
        ("right", (), 0),
        ("right", ("--level", "note"), 0),
        ("Wrong", (), 1),
        ("Wrong", ("--strategy", "scripted"), 0),
        ("shapes", (), 0),
        ("shapes", ("--level", "warning"), 1),
        ("script", (), 2),
        ("missing", (), 2),
    ],
)
def test_exit_code(capsys, project: str, factory: str, options: tuple[str, ...], expected: int) -> None:  # fmt: skip
    code, out, err = run(capsys, f"{project}:{factory}", *options)
    assert code == expected
    assert "Traceback" not in out + err


def test_json_has_the_same_findings(capsys, project: str) -> None:
    code, out, _ = run(capsys, f"{project}:Wrong", "--level", "warning", "--json")
    record: dict[str, Any] = json.loads(out)
    assert (code, record["exit_code"], record["refused"]) == (1, 1, 2)
    assert [finding["code"] for finding in record["findings"]] == ["TRC005", "TRC002", "TRC016"]
    assert [f.get("suppressed", False) for f in record["findings"]] == [False, True, False]
    assert record["pages"]["TRC005"] == "docs/lint/TRC005.md"
    assert record["unread"] == []


@pytest.mark.parametrize(("factory", "expected"), [("Wrong", 1), ("right", 0), ("missing", 2)])
def test_sarif_for_code_scanning(
    capsys, project: str, tmp_path: Path, factory: str, expected: int
) -> None:
    code, _, _ = run(capsys, f"{project}:{factory}", "--sarif", "lint.sarif")
    (actual,) = json.loads((tmp_path / "lint.sarif").read_text())["runs"]
    (invocation,) = actual["invocations"]
    assert code == invocation["exitCode"] == expected
    assert invocation["executionSuccessful"] is (expected < 2)
    locations = [result["locations"][0]["physicalLocation"] for result in actual["results"]]
    assert len(locations) == (3 if factory == "Wrong" else 0)
    assert all((tmp_path / location["artifactLocation"]["uri"]).is_file() for location in locations)
