"""ci/parity-gate.gitlab-ci.yml with its inputs inserted, and its scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from tests.small_project import create_project
from tests.test_code_blocks import parse_gate

ROOT = Path(__file__).parents[2]
SPEC, JOBS = (ROOT / "ci" / "parity-gate.gitlab-ci.yml").read_text().split("\n---\n")
INPUTS: dict[str, dict[str, str]] = YAML(typ="safe").load(SPEC)["spec"]["inputs"]
GOOD = {"model": "good.onnx", "reference": "small_models:build", "inputs": "images.npy"}


def insert_inputs(**inputs: str) -> str:
    values = {name: about["default"] for name, about in INPUTS.items() if "default" in about}
    return re.sub(r"\$\[\[ inputs\.(\w+) \]\]", lambda found: (values | inputs)[found[1]], JOBS)


def jobs(**inputs: str) -> Any:
    return YAML(typ="safe").load(insert_inputs(**inputs))


def test_each_input_is_used_and_all_but_three_have_defaults() -> None:
    assert set(re.findall(r"\$\[\[ inputs\.(\w+) \]\]", JOBS)) == set(INPUTS)
    assert {name for name, about in INPUTS.items() if "default" not in about} == set(GOOD)


def test_template_matches_the_gitlab_schema(tmp_path: Path) -> None:
    (tmp_path / "jobs.yml").write_text(insert_inputs(**GOOD, name="digits", args="--batch-size 4"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.gitlab-ci"]
    completed = subprocess.run(
        [*command, str(tmp_path / "jobs.yml")], capture_output=True, check=False
    )
    assert completed.returncode == 0, completed.stdout


def test_template_calls_valid_gate_commands() -> None:
    result = jobs(**GOOD, name="digits", args="--batch-size 4")
    for job in result.values():
        install, command = job["script"]
        assert shlex.split(install)[:2] == ["pip", "install"]
        parse_gate(shlex.split(command)[1:])
    assert result["promote"]["needs"] == ["parity"]  # it downloads their artifacts
    assert "report" in result["parity"]["artifacts"]["paths"]


@pytest.mark.proof
@pytest.mark.parametrize(("model", "code"), [("bad.onnx", 1), ("none.onnx", 2)])
def test_job_writes_its_artifacts(tmp_path: Path, model: str, code: int) -> None:
    folder = shutil.copytree(create_project(), tmp_path / "project")
    job = jobs(**GOOD | {"model": model})["parity"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    completed = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(job["script"][1:])],  # without pip install
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == code, completed.stderr
    artifacts = job["artifacts"]
    assert artifacts["when"] == "always"
    files = [name for name in artifacts["paths"] if name != "report"]
    files += artifacts["reports"].values()
    assert all((folder / name).is_file() for name in files)
    ElementTree.parse(folder / artifacts["reports"]["junit"])
    json.loads((folder / "gl-sarif.json").read_text())
    if code == 1:
        decision = json.loads((folder / "report" / "decision.json").read_text())
        assert decision["verdict"] == "FAIL"
