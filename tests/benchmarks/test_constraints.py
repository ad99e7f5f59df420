"""constraints.txt pins every dependency within the ranges of pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import constraints

PROJECT = tomllib.loads((constraints.ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
REMEDY = "make constraints"
UNPINNED = "server-grpc"
"""An extra with its own environment, because it conflicts with the pinned protobuf."""


def find_disagreements(project: dict, text: str) -> list[str]:
    pins = dict(
        re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line).groups()
        for line in text.splitlines()
        if line and not line.startswith("#")
    )
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    extras = {n: lines for n, lines in project["optional-dependencies"].items() if n != UNPINNED}
    lines = chain(project["dependencies"], *extras.values())
    matches = []
    for expected in map(Requirement, lines):
        name = canonicalize_name(expected.name)
        if name == "parity-gate" or (expected.marker and not expected.marker.evaluate()):
            continue
        if name not in pins:
            matches.append(f"{expected} is not pinned")
        elif pins[name] not in expected.specifier:
            matches.append(f"{expected} is pinned at {pins[name]}")
    return matches


def test_all_that_any_extra_brings_is_pinned_within_its_bounds() -> None:
    text = constraints.FILE.read_text(encoding="utf-8")
    assert find_disagreements(PROJECT, text) == [], f"run {REMEDY}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("numpy==2.1\n", []),
        ("numpy==1.9\n", ["numpy>=2.0 is pinned at 1.9"]),
        ("onnx==1.18\n", ["numpy>=2.0 is not pinned"]),
    ],
)
def test_a_disagreement_is_found(text: str, found: list[str]) -> None:
    project = {"dependencies": ["numpy>=2.0"], "optional-dependencies": {"all": ["parity-gate[x]"]}}
    assert find_disagreements(project, text) == found


def test_nothing_but_names_and_versions_is_written() -> None:
    first, *lines = constraints.FILE.read_text(encoding="utf-8").splitlines()
    assert first.startswith("# ")
    assert first.endswith(REMEDY)
    assert lines
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
    assert lines == sorted(lines, key=constraints._normalize_name)


def _pip(monkeypatch: pytest.MonkeyPatch, code: int, report: dict) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        calls.append(command)
        Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


REPORT = {
    "install": [
        {"metadata": {"name": name, "version": version}, "download_info": {"url": "file:///x"}}
        for name, version in (("parity-gate", "0.1.0"), ("Zed_x", "2"), ("alpha", "1"), ("zed-a", "3"))
    ]
}  # fmt: skip


def test_the_file_is_made_from_pips_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "FILE", tmp_path / "constraints.txt")
    monkeypatch.setattr("sys.argv", ["constraints"])
    calls = _pip(monkeypatch, 0, REPORT)
    assert constraints.main() == 0
    assert constraints.FILE.read_text().splitlines()[1:] == ["alpha==1", "zed-a==3", "Zed_x==2"]
    assert "-c" in calls[0]
    assert constraints.ALL_EXTRAS in calls[0]
    monkeypatch.setattr("sys.argv", ["constraints", "--upgrade"])
    assert constraints.main() == 0
    assert "-c" not in calls[1]


def test_where_pip_finds_none_the_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("as it was")
    monkeypatch.setattr(constraints, "FILE", file)
    monkeypatch.setattr("sys.argv", ["constraints"])
    _pip(monkeypatch, 1, REPORT)
    assert constraints.main() == 2
    assert file.read_text() == "as it was"
    assert "UPGRADE=1" in capsys.readouterr().err
