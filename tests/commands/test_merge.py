"""gate plan, gate measure and gate merge give the result of gate check."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from gate import cli
from tests.exhaustive import exhaustive
from tests.small_project import create_project

DOCS = Path(__file__).parents[2] / "docs"
CHECK_OPTIONS = ("--reference", "small_models:build", "--inputs", "images.npy", "--labels", "labels.npy",
         "--batch-size", "2", "--units", "3")  # fmt: skip


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder, threads = create_project(), torch.get_num_threads()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GATE_SIGNING_KEY", "")
    yield folder
    torch.set_num_threads(threads)


def gate(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, dict[str, Any]]:
    code = cli.main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@functools.cache
def _measure_parts(model: str, *more: str) -> Path:
    """Measure the three parts of a plan once for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="parts-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    plan, parts = folder / "plan.json", [folder / f"part-{index}.json" for index in range(3)]
    assert cli.main(["plan", model, *CHECK_OPTIONS, *more, "-o", str(plan)]) == 0
    for index, part in enumerate(parts):
        lead = ["--lead", str(parts[0])] if index else []
        first = ["--unit", str(index), *lead, "-o", str(part)]
        assert cli.main(["measure", str(plan), *first]) == 0
    return folder


def copy_measured_parts(
    capsys: pytest.CaptureFixture[str], folder: Path, model: str, *more: str
) -> tuple[Path, list[Path]]:
    shutil.copytree(_measure_parts(model, *more), folder, dirs_exist_ok=True)
    capsys.readouterr()
    return folder / "plan.json", [folder / f"part-{index}.json" for index in range(3)]


def test_other_files_are_never_overwritten(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, parts = copy_measured_parts(capsys, tmp_path, "good.onnx")
    model = tmp_path / "model.onnx"
    model.write_bytes((project / "good.onnx").read_bytes())
    weights, record = tmp_path / "model.onnx.data", tmp_path / "record.json"
    weights.write_bytes(b"\0" * 2**21 + b"\1")
    record.write_text('{\n  "schema_version": 3\n}\n')
    contents = {path: path.read_bytes() for path in tmp_path.iterdir()}
    first = ("measure", plan, "--unit", 1, "-o")
    for command, says in (
        (("plan", model, *CHECK_OPTIONS, "-o", model), "is not a plan"),
        (("plan", model, *CHECK_OPTIONS, "-o", parts[1]), "is not a plan"),
        ((*first, plan), "is not a part of a plan"),
        ((*first, weights), "is not a part of a plan"),
        ((*first, record), "is not a part of a plan"),
        ((*first, parts[2]), "is the part of unit 2"),
        (("merge", plan, *parts, "-o", plan), "is not evidence"),
        (("merge", plan, *parts, "-o", parts[2]), "is not evidence"),
        (("merge", plan, plan, *parts), "is a plan. Name it before the parts"),
        (("merge", parts[1], *parts), "is not a complete plan of this version"),
        (("measure", parts[1], "--unit", 1, "-o", tmp_path / "new.json"), "Run gate plan again"),
    ):
        code = cli.main([*map(str, command)])
        assert (code, says in capsys.readouterr().err) == (2, True), command
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == contents


@pytest.mark.further
@pytest.mark.parametrize(
    ("model", "verdict", "code"),
    [("good.onnx", "PASS", 0), pytest.param("bad.onnx", "FAIL", 1, marks=pytest.mark.proof)],
)
def test_merged_verdict_equals_the_verdict_of_check(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    model: str, verdict: str, code: int,
) -> None:  # fmt: skip
    plan, parts = copy_measured_parts(capsys, tmp_path, model)
    report, evidence = tmp_path / "report", tmp_path / "evidence.json"
    junit = tmp_path / "junit.xml"
    merged = gate(
        capsys, "merge", plan, *parts, "-o", evidence, "--report", report, "--junit", junit
    )
    assert ("<failure " in junit.read_text()) == (code == 1)
    assert merged[1]["ci_files"] == [{"option": "--junit", "path": str(junit), "error": None}]
    assert (merged[0], merged[1]["verdict"]) == (code, verdict)
    assert merged[1]["evidence"]["dataset"]["samples"] == 64
    assert json.loads(evidence.read_text()) == json.loads((report / "evidence.json").read_text())
    assert "3 parts, merged here" in (report / "report.html").read_text()
    assert (report / "decision.dsse.json").exists()


@pytest.mark.further
def test_complete_parts_are_kept_and_torn_parts_measured_again(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, parts = copy_measured_parts(capsys, tmp_path, "good.onnx")
    repeated_unit = ("measure", plan, "--unit", 1, "--lead", parts[0], "-o", parts[1])
    before = parts[1].stat().st_mtime_ns
    assert gate(capsys, *repeated_unit)[1]["measured"] is False
    assert parts[1].stat().st_mtime_ns == before
    begun = parts[1].read_bytes()[:40]
    for torn in (begun, b"{", b"\0" * 4096, begun + b"\0" * 4096):
        parts[1].write_bytes(torn)
        assert gate(capsys, *repeated_unit)[1]["measured"] is True
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    code, printed = gate(capsys, "merge", plan, *parts)
    assert (code, printed["error"]["type"]) == (2, "EvidenceError")
    assert "(unit 1)" in printed["error"]["message"]
    assert gate(capsys, *repeated_unit)[1]["measured"] is True
    assert gate(capsys, "merge", plan, *parts)[0] == 0


@exhaustive
@pytest.mark.proof
def test_kubernetes_job_commands_run_as_local_processes(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = DOCS.parent / "deploy" / "kubernetes" / "measure-job.yaml"
    job = YAML(typ="safe").load(manifest.read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    wrapper = tmp_path / "gate"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gate "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    work = tmp_path / "work"
    (work / "parts").mkdir(parents=True)
    for file in project.iterdir():
        (work / file.name).symlink_to(file)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(DOCS.parent)}
    subprocess.run(
        ["gate", "plan", "good.onnx", *CHECK_OPTIONS, "-o", "plan.json"], cwd=work,
        env=os.environ | path, check=True, capture_output=True,
    )  # fmt: skip

    def pod(index: int) -> subprocess.Popen[bytes]:
        index_of_pod = {"JOB_COMPLETION_INDEX": str(index)}
        command = [*container["command"], *container["args"]]
        return subprocess.Popen(
            command, cwd=work, env=os.environ | path | index_of_pod, stderr=subprocess.PIPE
        )

    for pods in ([pod(0)], [pod(1), pod(2)]):
        for process in pods:
            _, printed = process.communicate(timeout=300)
            assert process.returncode == 0, printed.decode()
    parts = sorted((work / "parts").iterdir())
    assert [part.name for part in parts] == ["part-0.json", "part-1.json", "part-2.json"]
    os.chdir(work)
    assert gate(capsys, "merge", "plan.json", *parts)[0] == 0
