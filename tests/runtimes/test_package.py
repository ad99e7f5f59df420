"""The example package of docs/runtimes.md can be installed by pip and used by `gate check`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gate import Policy, cli
from gate.errors import PolicyError
from gate.policy.sections import Bounds, RuntimePolicy
from gate.runtimes.selection import with_runtime
from tests import small_project

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runtimes.md").read_text(encoding="utf-8")
POLICY = """
task: tensors
instruments: {noise_samples: 8, stability_samples: 2, probes: false, search_inputs: 0}
runtimes:
  ort-cpu: {required: always, bounds: {noise_ratio: 1.5}}
  acme: {required: always, bounds: {noise_ratio: 1.5}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder into which pip installed the package."""
    folder = tmp_path_factory.mktemp("acme")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "acme_runtime.py").write_text(code)
    (folder / "pyproject.toml").write_text(project)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--quiet", "--target", str(folder / "site"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def policy(tmp_path):
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path / "policy.yaml"


def arguments(model: str, policy: Path | None = None) -> list[str]:
    provided = [] if policy is None else ["--policy", str(policy)]
    return [
        "check", model, "--reference", "small_models:build", "--inputs", "images.npy",
        *provided, "--json",
    ]  # fmt: skip


@pytest.mark.proof
def test_documented_plugin_passes_a_correct_file(site, policy):
    path = os.pathsep.join([str(site), str(ROOT)])
    completed = subprocess.run(
        [sys.executable, "-m", "gate", *arguments("good.onnx", policy)],
        cwd=small_project.create_project(), env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert json.loads(completed.stdout)["decision"]["runtimes"] == ["ort-cpu", "acme"]


@pytest.fixture
def _project_folder(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(small_project.create_project()))
    monkeypatch.chdir(small_project.create_project())


@pytest.mark.proof
@pytest.mark.usefixtures("_project_folder")
def test_documented_plugin_fails_a_wrong_file(policy, capsys):
    assert cli.main(arguments("bad.onnx", policy)) == 1
    decision = json.loads(capsys.readouterr().out)["decision"]
    assert decision["runtimes"] == []
    noise = [c for c in decision["checks"] if (c["runtime"], c["name"]) == ("acme", "noise_ratio")]
    assert {c["verdict"] for c in noise} == {"FAIL"}


@pytest.mark.further
@pytest.mark.usefixtures("_project_folder")
def test_documented_plugin_is_added_with_its_bounds():
    added = with_runtime(Policy.default(), "acme").runtimes["acme"]
    assert added.required == "always"
    assert added.bounds == Policy.default().runtimes["ort-cpu"].bounds
    waiting = RuntimePolicy(required="never", bounds=Bounds(memory_mb=100.0))
    settings = Policy.default()
    settings = settings.model_copy(update={"runtimes": {**settings.runtimes, "acme": waiting}})
    merged = with_runtime(settings, "acme").runtimes["acme"].bounds
    assert merged == added.bounds.model_copy(update={"memory_mb": 100.0})
    with pytest.raises(PolicyError, match="no runtime named 'acmee'.*Did you mean 'acme'"):
        with_runtime(Policy.default(), "acmee")
    assert cli.main([*arguments("good.onnx"), "--runtime", "acmee"]) == 2
