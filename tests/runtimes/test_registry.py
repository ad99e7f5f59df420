"""The registry: the gate's own names stand, those of packages are added, nobody takes another's."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gate.errors import EvidenceError, PolicyError
from gate.records.runtime import ORT, PROVIDERS, RUNTIMES
from gate.runtimes import selection
from gate.runtimes.isolated import IsolatedRuntime
from tests.runtimes import acme

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages, the first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def found(name: str) -> selection.RuntimeEntry:
    return selection.find_runtime(name, selection.entries())


def test_the_gate_s_own_are_there_whatever_the_metadata_says(monkeypatch):
    monkeypatch.setattr(selection.metadata, "entry_points", lambda **_: ())
    assert set(RUNTIMES) <= set(selection.entries())
    for name in RUNTIMES:
        own = selection.load_entry(found(name))
        assert own.name == name
        assert not isinstance(own, IsolatedRuntime)


def test_the_metadata_names_what_the_code_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][selection.GROUP] == selection.BUILTIN


def test_the_decision_has_the_promise_of_each_of_the_gate_s_own():
    assert set(selection.BUILTIN) == {*RUNTIMES, *PROVIDERS, ORT}


def test_a_package_adds_one(site):
    acme.install(site, {"acme": "tests.runtimes.acme:Acme"})
    entry = found("acme")
    assert (entry.place, entry.package) == ("tests.runtimes.acme:Acme", "acme-parity 1.2")
    assert isinstance(selection.load_entry(entry), IsolatedRuntime)


@pytest.mark.parametrize("name", ["ort-cpu", "ort", "torch-cuda"])
def test_a_name_of_the_gate_s_is_not_taken(site, name):
    acme.install(site, {name: "evil:Runtime"})
    with pytest.raises(PolicyError) as refused:
        found(name)
    assert f"two runtimes are named '{name}'" in str(refused.value)
    assert selection.BUILTIN[name] in str(refused.value)
    assert "evil:Runtime of acme-parity 1.2" in str(refused.value)


def test_two_packages_with_one_name_are_refused(site):
    acme.install(site, {"acme": "one:Runtime"})
    acme.install(site, {"acme": "two:Runtime"}, name="other-parity")
    with pytest.raises(
        PolicyError, match="one:Runtime of acme-parity 1.2 and two:Runtime of other"
    ):
        found("acme")


def test_a_name_that_nobody_has_is_answered_with_the_nearest(site):
    acme.install(site, {"acme": "tests.runtimes.acme:Acme"})
    with pytest.raises(PolicyError, match=r"no runtime named 'acne'.*Did you mean 'acme'\?"):
        found("acne")
    with pytest.raises(PolicyError, match=r"Did you mean 'ort-cpu-optimized'\?"):
        found("ort-cpu-optimised")


def test_a_class_that_is_no_runtime_is_refused():
    with pytest.raises(EvidenceError, match="is not a runtime: it is a Nothing"):
        selection.load_runtime("tests.runtimes.acme:Nothing")


def test_names_are_listed_without_anything_heavy():
    program = (
        "import sys; from gate.runtimes import selection as registry; installed = registry.entries();"
        "[registry.load_entry(registry.find_runtime(n, installed)) for n in ('ort', 'ort-cpu', 'torch-cuda')];"
        "print(sorted({'torch', 'onnxruntime', 'onnx', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
