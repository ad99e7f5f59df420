"""The registry of runtimes has fixed built-in names; packages can add others."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gate.errors import PolicyError
from gate.records.runtime import ORT, PROVIDERS, RUNTIMES
from gate.runtimes import selection
from gate.runtimes.isolated import IsolatedRuntime
from tests.runtimes import acme

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages that is first on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def find_entry(name: str) -> selection.RuntimeEntry:
    return selection.find_runtime(name, selection.entries())


def test_built_in_runtimes_do_not_need_metadata(monkeypatch):
    monkeypatch.setattr(selection.metadata, "entry_points", lambda **_: ())
    assert set(RUNTIMES) <= set(selection.entries())
    for name in RUNTIMES:
        custom = selection.load_entry(find_entry(name))
        assert custom.name == name
        assert not isinstance(custom, IsolatedRuntime)


def test_entry_points_match_the_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][selection.GROUP] == selection.BUILTIN


def test_each_built_in_runtime_has_a_promised_provider():
    assert set(selection.BUILTIN) == {*RUNTIMES, *PROVIDERS, ORT}


def test_package_adds_a_runtime(site):
    acme.install(site, {"acme": "tests.runtimes.acme:Acme"})
    entry = find_entry("acme")
    assert (entry.class_path, entry.package) == ("tests.runtimes.acme:Acme", "acme-parity 1.2")
    assert isinstance(selection.load_entry(entry), IsolatedRuntime)


@pytest.mark.parametrize("name", ["ort-cpu", "ort", "torch-cuda"])
def test_built_in_name_cannot_be_replaced(site, name):
    acme.install(site, {name: "evil:Runtime"})
    with pytest.raises(PolicyError) as refused:
        find_entry(name)
    assert f"two runtimes are named '{name}'" in str(refused.value)
    assert selection.BUILTIN[name] in str(refused.value)
    assert "evil:Runtime of acme-parity 1.2" in str(refused.value)


def test_duplicate_runtime_name_is_refused(site):
    acme.install(site, {"acme": "one:Runtime"})
    acme.install(site, {"acme": "two:Runtime"}, name="other-parity")
    with pytest.raises(
        PolicyError, match="one:Runtime of acme-parity 1.2 and two:Runtime of other"
    ):
        find_entry("acme")


def test_unknown_runtime_name_has_a_suggestion(site):
    acme.install(site, {"acme": "tests.runtimes.acme:Acme"})
    with pytest.raises(PolicyError, match=r"no runtime named 'acne'.*Did you mean 'acme'\?"):
        find_entry("acne")
    with pytest.raises(PolicyError, match=r"Did you mean 'ort-cpu-optimized'\?"):
        find_entry("ort-cpu-optimised")


def test_runtimes_are_listed_without_heavy_imports():
    program = (
        "import sys; from gate.runtimes import selection as registry; installed = registry.entries();"
        "[registry.load_entry(registry.find_runtime(n, installed)) for n in ('ort', 'ort-cpu', 'torch-cuda')];"
        "print(sorted({'torch', 'onnxruntime', 'onnx', 'mlflow'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"
