"""`gate init` in folders that already contain files."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gate import Policy
from tests.commands.running import Capture, create_runner

run, as_json = create_runner("init")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path().iterdir()}


@pytest.mark.parametrize("precision", ["exact", "reduced", "quantized"])
def test_policy_for_each_precision(capsys: Capture, precision: str) -> None:
    assert run(capsys, "--precision", precision)[0] == 0
    assert Policy.from_file(Path("gate.yaml")) == Policy.built_in(precision)


def test_existing_files_are_kept_and_init_is_idempotent(capsys: Capture) -> None:
    Path("gate.yaml").write_text("mine: 1\n")
    Path("dvc.yaml").write_text("stages:\n  gate: {cmd: mine}\n")
    Path("MLproject").write_text("name: mine\nentry_points:\n  main: {command: run}\n")
    before = contents()
    code, printed = as_json(capsys, "--pipeline")
    assert code == 0
    assert {file["path"]: file["written"] for file in printed["files"]} == {
        "gate.yaml": False, "dvc.yaml": False, "MLproject": True,
    }  # fmt: skip
    after = contents()
    assert {name for name in after if after[name] != before.get(name)} == {"MLproject"}
    assert "unchanged  gate.yaml" in run(capsys, "--pipeline")[1]
    assert contents() == after


def test_diff_is_a_patch_and_writes_nothing(capsys: Capture) -> None:
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


def test_dvc_and_mlproject_run_the_same_command(capsys: Capture) -> None:
    unusual_names = ["--model", "a b.onnx", "--reference", "m:build", "--checkpoint", "{w}.pt"]
    assert run(capsys, "--pipeline", *unusual_names, "--inputs", "m.data:eval_set")[0] == 0
    stage = YAML(typ="safe").load(Path("dvc.yaml"))["stages"]["gate"]
    assert stage["deps"] == ["a b.onnx", "{w}.pt"]
    assert stage["params"] == [{"gate.yaml": ["gate"]}]
    words = ["gate", "check", "a b.onnx", "--reference", "m:build", "--checkpoint", "{w}.pt",
             "--inputs", "m.data:eval_set", "--policy", "gate.yaml", "--report", "report"]  # fmt: skip
    assert shlex.split(stage["cmd"]) == words
    entry = YAML(typ="safe").load(Path("MLproject"))["entry_points"]["gate"]
    model = entry["parameters"]["model"]["default"]
    assert shlex.split(entry["command"].format(model=shlex.quote(model))) == words


def test_nothing_is_written_when_one_file_cannot_be_extended(capsys: Capture) -> None:
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
def test_stage_depends_on_the_model_source(
    capsys: Capture, files: list[str], reference: str, sources: list[str]
) -> None:
    for name in files:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    code, printed = as_json(capsys, "--pipeline", "--reference", reference)
    assert (code, stage()["deps"]) == (0, ["model.onnx", "samples.npy", *sources])
    notes = {file["path"]: file["note"] for file in printed["files"]}
    assert ("add the source of" in notes["dvc.yaml"]) is (not sources)
    assert (".dvcignore" in notes) is (sources == ["mine"])


def test_stage_depends_on_the_data_source(capsys: Capture) -> None:
    Path("mymodel.py").touch()
    Path("mydata.py").touch()
    assert run(capsys, "--pipeline", "--inputs", "mydata:samples")[0] == 0
    assert stage()["deps"] == ["model.onnx", "mymodel.py", "mydata.py"]
    Path("dvc.yaml").unlink()
    assert run(capsys, "--pipeline", "--inputs", "s3://bucket/shards")[0] == 0
    assert stage()["deps"] == ["model.onnx", "mymodel.py"]


def test_dvcignore_gets_one_line(capsys: Capture) -> None:
    Path("mine").mkdir()
    Path(".dvcignore").write_text("*.tmp")
    for _ in range(2):
        assert run(capsys, "--pipeline", "--reference", "mine.nets:build")[0] == 0
        assert Path(".dvcignore").read_text() == "*.tmp\n__pycache__\n"


@pytest.mark.proof
def test_dvc_and_mlflow_read_the_written_files(capsys: Capture) -> None:
    from mlflow.projects._project_spec import load_project

    assert run(capsys, "--pipeline")[0] == 0
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "-q", "--no-scm"], check=True)
    listed = subprocess.run([*dvc, "stage", "list"], check=True, capture_output=True, text=True)
    assert listed.stdout.split()[0] == "gate"
    command = load_project(".").get_entry_point("gate").compute_command({}, ".")
    assert command.startswith("gate check model.onnx --reference mymodel:build")
