"""`gate init`, in folders that have something already."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gate.policy.policy import Policy, Precision
from tests.commands.running import Capture, runner
from tests.exhaustive import exhaustive

run, as_json = runner("init")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir()}


def test_the_policy_is_what_applies_without_one(capsys: Capture) -> None:
    assert run(capsys)[0] == 0
    assert set(contents()) == {"gate.yaml", "gate.schema.json"}
    assert Policy.from_file(Path("gate.yaml")) == Policy.default()


@pytest.mark.parametrize("precision", ["exact", "reduced", "quantized"])
def test_it_may_be_that_of_other_files(capsys: Capture, precision: Precision) -> None:
    assert run(capsys, "--precision", precision)[0] == 0
    assert Policy.from_file(Path("gate.yaml")) == Policy.built_in(precision)


def test_nothing_is_overwritten_and_a_second_time_changes_nothing(capsys: Capture) -> None:
    Path("gate.yaml").write_text("mine: 1\n")
    Path("dvc.yaml").write_text("stages:\n  gate: {cmd: mine}\n")
    Path("MLproject").write_text("name: mine\nentry_points:\n  main: {command: run}\n")
    before = contents()
    code, told = as_json(capsys, "--pipeline")
    assert code == 0
    assert {file["path"]: file["written"] for file in told["files"]} == {
        "gate.yaml": False, "dvc.yaml": False, "MLproject": True,
    }  # fmt: skip
    after = contents()
    assert {name for name in after if after[name] != before.get(name)} == {"MLproject"}
    assert "unchanged  gate.yaml" in run(capsys, "--pipeline")[1]
    assert contents() == after


def test_diff_shows_what_would_be_written_and_writes_nothing(capsys: Capture) -> None:
    Path("dvc.yaml").write_text("stages:\n  train:\n    cmd: python train.py\n")
    before = contents()
    code, out, _ = run(capsys, "--pipeline", "--diff")
    assert (code, contents()) == (0, before)
    assert "+++ dvc.yaml" in out
    assert "+  gate:  #" in out
    patched = subprocess.run(
        ["patch", "-p0", "--dry-run"], input=out, text=True, check=False, capture_output=True
    )
    assert patched.returncode == 0, patched.stdout + patched.stderr


def test_both_run_the_same_command_of_gate(capsys: Capture) -> None:
    odd = ["--model", "a b.onnx", "--reference", "m:build", "--checkpoint", "{w}.pt"]
    assert run(capsys, "--pipeline", *odd, "--inputs", "m.data:eval_set")[0] == 0
    stage = YAML(typ="safe").load(Path("dvc.yaml"))["stages"]["gate"]
    assert stage["deps"] == ["a b.onnx", "{w}.pt"]
    assert stage["params"] == [{"gate.yaml": ["gate"]}]
    words = ["gate", "check", "a b.onnx", "--reference", "m:build", "--checkpoint", "{w}.pt",
             "--inputs", "m.data:eval_set", "--policy", "gate.yaml", "--report", "report"]  # fmt: skip
    assert shlex.split(stage["cmd"]) == words
    entry = YAML(typ="safe").load(Path("MLproject"))["entry_points"]["gate"]
    model = entry["parameters"]["model"]["default"]
    assert shlex.split(entry["command"].format(model=shlex.quote(model))) == words


def test_nothing_is_written_where_one_file_has_no_room(capsys: Capture) -> None:
    Path("MLproject").write_text("entry_points: {main: {command: run}}\n")
    before = contents()
    code, _, err = run(capsys, "--pipeline")
    assert (code, contents()) == (2, before)
    assert "Add this by hand" in err


def stage() -> dict[str, Any]:
    return YAML(typ="safe").load(Path("dvc.yaml"))["stages"]["gate"]


@pytest.mark.parametrize(
    ("files", "reference", "sources"),
    [
        (["mymodel.py"], "mymodel:build", ["mymodel.py"]),
        (["mine/__init__.py", "mine/nets.py"], "mine.nets:build", ["mine"]),
        (["mine/nets.py"], "mine.nets:build", ["mine"]),
        ([], "torchvision.models:resnet18", []),
        ([], "json:loads", []),
        ([], "nowhere:build", []),
    ],
)
def test_the_stage_reads_the_source_of_the_model(
    capsys: Capture, files: list[str], reference: str, sources: list[str]
) -> None:
    for name in files:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    code, told = as_json(capsys, "--pipeline", "--reference", reference)
    assert (code, stage()["deps"]) == (0, ["model.onnx", "samples.npy", *sources])
    notes = {file["path"]: file["note"] for file in told["files"]}
    assert ("add the source of" in notes["dvc.yaml"]) is (not sources)
    assert (".dvcignore" in notes) is (sources == ["mine"])


def test_a_data_set_has_a_source_too_and_a_url_none(capsys: Capture) -> None:
    Path("mymodel.py").touch()
    Path("mydata.py").touch()
    assert run(capsys, "--pipeline", "--inputs", "mydata:samples")[0] == 0
    assert stage()["deps"] == ["model.onnx", "mymodel.py", "mydata.py"]
    Path("dvc.yaml").unlink()
    assert run(capsys, "--pipeline", "--inputs", "s3://bucket/shards")[0] == 0
    assert stage()["deps"] == ["model.onnx", "mymodel.py"]


def test_a_line_is_added_to_what_dvc_ignores_once(capsys: Capture) -> None:
    Path("mine").mkdir()
    Path(".dvcignore").write_text("*.tmp")
    for _ in range(2):
        assert run(capsys, "--pipeline", "--reference", "mine.nets:build")[0] == 0
        assert Path(".dvcignore").read_text() == "*.tmp\n__pycache__\n"


@exhaustive
@pytest.mark.proof
def test_an_edited_source_is_judged_anew(
    capsys: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By dvc itself; in place of `gate check` stands what writes a report."""
    for name in ("mine/nets.py", "model.onnx", "samples.npy", "bin/gate"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("#!/bin/sh\nmkdir -p report mine/__pycache__\n"
                              "date +%N > mine/__pycache__/nets.pyc\ntouch report/report.html\n")  # fmt: skip
    Path("bin/gate").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    assert run(capsys, "--pipeline", "--reference", "mine.nets:build")[0] == 0

    def dvc(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *words], check=True, capture_output=True, text=True
        )
        return done.stdout

    dvc("init", "-q", "--no-scm")
    dvc("repro", "gate")
    Path("mine/__pycache__/nets.pyc").write_text("another Python")
    assert "up to date" in dvc("status")
    Path("mine/nets.py").write_text("# edited\n")
    assert "modified:" in dvc("status")
    assert "didn't change" not in dvc("repro", "gate")
    assert "up to date" in dvc("status")


@pytest.mark.proof
def test_dvc_and_mlflow_read_what_was_written(capsys: Capture) -> None:
    from mlflow.projects._project_spec import load_project

    assert run(capsys, "--pipeline")[0] == 0
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "-q", "--no-scm"], check=True)
    listed = subprocess.run([*dvc, "stage", "list"], check=True, capture_output=True, text=True)
    assert listed.stdout.split()[0] == "gate"
    command = load_project(".").get_entry_point("gate").compute_command({}, ".")
    assert command.startswith("gate check model.onnx --reference mymodel:build")
