"""Runtimes are registered by name, selected by a policy, and listed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gate import Policy
from gate.errors import PolicyError
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.runtime import ORT, PROVIDERS, RUNTIMES
from gate.runtimes import ort, selection
from gate.runtimes.isolated import IsolatedRuntime
from gate.runtimes.ort import Ort
from gate.runtimes.selection import SelectedRuntime, runtime_statuses
from tests.policy.test_runtimes import policy
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


CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.mark.parametrize(
    ("name", "wanted", "expected"),
    [
        ("torch-cuda", {}, True),
        ("ort-cuda", {}, True),
        ("ort-cuda-optimized", {}, True),
        ("mine", {"kind": "ort", "options": {"providers": [TENSORRT]}}, True),
        ("mine", {"kind": "ort", "options": {"providers": [CUDA]}}, True),
        ("mine", {"kind": "ort", "options": {"providers": ["XnnpackExecutionProvider"]}}, False),
        ("mine", {"kind": "ort", "options": {"providers": ["MIGraphXExecutionProvider"]}}, False),
        ("phone", {"kind": "recorded"}, False),
        ("browser-webgpu", {}, False),  # has the bounds of CUDA
        ("ort-cpu", {}, False),
    ],
)
def test_takes_cuda_depends_on_the_provider(
    name: str, wanted: dict[str, Any], expected: bool
) -> None:
    policy = RuntimePolicy(required="when_present", bounds=Bounds(max_abs_diff=1e-3), **wanted)
    assert SelectedRuntime(name, policy).takes_cuda is expected


@pytest.mark.parametrize(
    ("providers", "bounds"),
    [
        (["CPUExecutionProvider"], "cpu"),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda"),
        (["TensorrtExecutionProvider", "CUDAExecutionProvider"], "device"),
        (["DmlExecutionProvider"], "device"),
    ],
)
def test_built_in_bounds_follow_the_first_provider(providers, bounds):
    runtime = Ort()
    assert runtime.promised(runtime.options(providers=tuple(providers))).bounds == bounds


def test_plugin_with_cuda_bounds_gets_device_bounds(monkeypatch):
    runtime = IsolatedRuntime("acme:Acme")
    promises = {"promises": {"provider": "acme", "bounds": "cuda"}}
    monkeypatch.setattr(runtime, "_describe", lambda _: promises)
    assert runtime.promised(None).bounds == "device"


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The rows by name, with valid and faulty packages installed."""
    names = ("Acme", "Absent", "Needs", "RaisesInLook", "Nothing")
    points = {name.lower(): f"tests.runtimes.acme:{name}" for name in names}
    acme.install(tmp_path, {**points, "gone": "no_such_module:Runtime", "ort-cpu": "evil:Runtime"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ort, "cuda_traces", list)
    return {row.name: row for row in runtime_statuses()}


@pytest.mark.proof
def test_each_runtime_is_listed_with_state_and_reason(rows):
    acme_row = rows["acme"]
    assert (acme_row.state, acme_row.provider, acme_row.package) == (
        "ok",
        "ACME",
        "acme-parity 1.2",
    )
    assert acme_row.versions == {"acme": "1.2"}
    assert (rows["absent"].state, rows["absent"].reason) == (
        "absent",
        "no ACME chip on this machine",
    )
    assert (rows["needs"].state, rows["needs"].reason) == (
        "by options",
        "options: board: Field required",
    )
    for name, words in {
        "raisesinlook": "OSError: a driver is broken",
        "nothing": "is not a runtime",
        "gone": "No module named 'no_such_module'",
        "ort-cpu": "two runtimes are named 'ort-cpu'",
    }.items():
        assert rows[name].state == "broken"
        assert words in rows[name].reason
    assert rows["ort-cpu-optimized"].state == "ok"
    assert rows["ort"].state == "by options"
    assert "CPUExecutionProvider" in rows["ort"].reason
    assert "no CUDA device" in rows["ort-cuda"].reason


def test_runtimes_of_a_policy_are_listed_with_options(tmp_path, monkeypatch):
    custom_policy = policy("mine", kind="ort", options={"providers": ["RknpuExecutionProvider"]})
    matches = {row.name: row for row in runtime_statuses(custom_policy)}
    assert set(matches) == {"ort-cpu", "mine"}
    assert (matches["mine"].kind, matches["mine"].state) == ("ort", "absent")
    assert "does not have RknpuExecutionProvider" in matches["mine"].reason
    none = policy("mine", kind="ort", options={"providers": ["NoSuchExecutionProvider"]})
    assert {row.name: row for row in runtime_statuses(none)}["mine"].state == "broken"
    acme.install(tmp_path, {"acme": "tests.runtimes.acme:Acme"})
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = {row.name: row for row in runtime_statuses(policy("acme", options={"slow": True}))}[
        "acme"
    ]
    assert (wrong.state, "slow" in wrong.reason) == ("broken", True)
    unknown = {row.name: row for row in runtime_statuses(policy("nobody"))}["nobody"]
    assert (unknown.state, "no runtime named 'nobody'" in unknown.reason) == ("broken", True)
    assert {row.name for row in runtime_statuses(Policy.default())} == set(
        Policy.default().runtimes
    )
