"""What is measured, apart from what is demanded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gate.commands.result import ExitCode
from pipelines import paths, plan
from tests.pipelines.conftest import REPOSITORY
from tests.pipelines.test_twin import POLICY, name_a_twin


@pytest.fixture(autouse=True)
def _params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / paths.PARAMS, paths.PARAMS)


def written() -> tuple[str, str]:
    """The plan of the file, and of its twin."""
    assert plan.main() == ExitCode.DONE
    return paths.PLAN.read_text(), paths.TWIN_PLAN.read_text()


def test_no_twin_is_written_down_as_none() -> None:
    exact, twin = written()
    assert "ort-cpu" in json.loads(exact)["runtimes"]
    assert json.loads(twin) is None


def test_another_bound_of_the_twin_leaves_both_as_they_are() -> None:
    name_a_twin(agreement=0.9)
    before = written()
    name_a_twin(agreement=0.8)
    assert written() == before
    assert set(json.loads(before[1])["runtimes"]) == set(POLICY["runtimes"])


def test_another_instrument_of_the_twin_is_in_its_plan_alone() -> None:
    name_a_twin()
    exact, twin = written()
    yaml = YAML()
    settings = yaml.load(paths.PARAMS)
    settings["gate"]["twin"]["instruments"]["stability_samples"] = 2
    yaml.dump(settings, paths.PARAMS)
    assert written()[0] == exact
    assert written()[1] != twin
