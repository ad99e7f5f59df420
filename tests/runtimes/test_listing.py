"""The list of runtimes shows available and absent ones, with the reason."""

from __future__ import annotations

import pytest

from gate.policy.policy import Policy
from gate.runtimes import ort
from gate.runtimes.selection import runtime_statuses
from tests.policy.test_runtimes import policy
from tests.runtimes import acme


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
