""".github/workflows/ci.yml and the scripts that it runs."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[str, Any] = YAML(typ="safe").load((ROOT / ".github/workflows/ci.yml").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNPINNED = {"mlflow", "uvicorn", "torch", "onnx", "onnxruntime-gpu"}


def _steps(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_all_supported_versions_of_python_are_tested() -> None:
    classifier = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    stated = [
        result[1] for text in PROJECT["classifiers"] if (result := classifier.fullmatch(text))
    ]
    assert WORKFLOW["jobs"]["check"]["strategy"]["matrix"]["python"] == stated
    assert _steps("check") == [".ci/run"]


def test_newest_packages_are_tested_nightly() -> None:
    assert WORKFLOW["on"]["schedule"]
    assert WORKFLOW["jobs"]["newest"]["if"] == "github.event_name == 'schedule'"
    assert _steps("newest") == [".ci/nightly"]
    script = (ROOT / ".ci/nightly").read_text()
    installed = script.partition("--upgrade")[2].partition("\n.venv")[0]
    assert set(re.findall(r"[\w-]+", installed)) >= UNPINNED
    assert script.rstrip().endswith("make check\nmake coverage")


def test_step_scripts_are_executable_and_manifests_exist() -> None:
    for job in WORKFLOW["jobs"]:
        for step in _steps(job):
            for name in re.findall(r"(?:\.ci|deploy)/[\w./-]+\w", step):
                assert (ROOT / name).exists(), name
            if step.startswith(".ci/"):
                assert os.access(ROOT / step, os.X_OK)
