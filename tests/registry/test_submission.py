"""A submission creates a version with its evidence and sets `candidate`, without a ledger."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate.errors import MismatchUnconfirmed, PromotionConflict
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.release import Release
from gate.signing.keys import SigningKey
from tests import builders
from tests.registry.promoting import submit
from tests.registry.releases import NAME, failing_release, onnx_file, release, twin_policy
from tests.registry.signed import Signing, trust_in
from tests.registry.simulator import Crash, Simulator, Watched
from tests.registry.test_preprocessing_spec import make_release as with_spec
from tests.service.registry_setup import RegistrySetup

POLICY = builders.policy()
POLICY_WITH_TWIN = builders.policy(twin=twin_policy())


@pytest.fixture
def ci(tmp_path: Path) -> SigningKey:
    return SigningKey.make(tmp_path / "ci.pem")


@pytest.fixture
def registry() -> Simulator:
    return Simulator()


@pytest.fixture
def signed_release(ci: SigningKey, tmp_path: Path) -> Release:
    return Signing(ci).signed(release(onnx_file(tmp_path / "model.onnx")), POLICY)


def test_submission_creates_a_complete_version_and_sets_only_candidate(
    registry: Simulator, signed_release: Release
) -> None:
    result = submit(registry, signed_release)
    assert (result.outcome, result.version, result.previous_version) == ("handed_in", "1", None)
    assert "the service decides" in result.reason
    assert registry.aliases == {CANDIDATE: "1"}
    (stored,) = registry.versions
    assert sorted(stored.extra_files) == [
        "gate/decision.dsse.json", "gate/decision.json", "gate/evidence.dsse.json",
        "gate/evidence.json", "gate/policy.json", "gate/trend.json",
    ]  # fmt: skip
    policy = json.loads(stored.extra_files["gate/policy.json"])
    assert policy == POLICY.to_plain()
    assert stored.description.startswith("Status: handed in, waits for the service")
    assert stored.description.endswith(signed_release.description)


def test_submission_uploads_twin_and_spec_with_their_records(
    ci: SigningKey, tmp_path: Path
) -> None:
    registry = Simulator()
    with_twin = Signing(ci).signed(
        RegistrySetup(tmp_path, POLICY_WITH_TWIN).release(1), POLICY_WITH_TWIN
    )
    assert submit(registry, with_twin, policy=POLICY_WITH_TWIN).outcome == "handed_in"
    assert {
        "quantized/model.onnx", "quantized/gate/decision.dsse.json", "quantized/gate/policy.json",
    } <= set(registry.versions[0].extra_files)  # fmt: skip
    spec = Signing(ci).signed(with_spec(tmp_path, 2), POLICY)
    assert submit(registry, spec).outcome == "handed_in"
    assert any(name.startswith("preprocessing/") for name in registry.versions[1].extra_files)


def test_resubmission_sets_candidate_back_to_the_same_version(
    registry: Simulator, ci: SigningKey, signed_release: Release, tmp_path: Path
) -> None:
    second = Signing(ci).signed(release(onnx_file(tmp_path / "other.onnx", seed=1)), POLICY)
    for new_release, number in (
        (signed_release, "1"),
        (signed_release, "1"),
        (second, "2"),
        (signed_release, "1"),
    ):
        assert submit(registry, new_release).version == number
        assert registry.aliases[CANDIDATE] == number
    assert len(registry.versions) == 2


def test_same_file_signed_by_another_key_becomes_a_new_version(
    registry: Simulator, signed_release: Release, tmp_path: Path
) -> None:
    submit(registry, signed_release)
    other_key = SigningKey.make(tmp_path / "stranger.pem")
    assert submit(registry, Signing(other_key).signed(signed_release, POLICY)).version == "2"


def test_resubmission_with_a_fresh_ecdsa_signature_reuses_the_version(
    registry: Simulator, signed_release: Release, tmp_path: Path
) -> None:
    key = SigningKey.make(tmp_path / "ecdsa.pem", scheme="ecdsa")
    at = signed_release.decision.decided_at
    first, second = (Signing(key, at=at).signed(signed_release, POLICY) for _ in range(2))
    assert first.statements != second.statements
    trust = trust_in(key)
    assert [submit(registry, new_release, trust=trust).version for new_release in (first, second)] == [
        "1", "1",
    ]  # fmt: skip


def test_resubmission_after_a_refusal_becomes_a_new_version(
    registry: Simulator, signed_release: Release
) -> None:
    submit(registry, signed_release)
    registry.set_tag(NAME, "1", key=Tag.REFUSED, value="then: unknown key")
    assert submit(registry, signed_release).version == "2"


def test_submitting_the_champion_changes_nothing(
    registry: Simulator, signed_release: Release
) -> None:
    submit(registry, signed_release)
    registry.set_alias(NAME, CHAMPION, "1")
    assert submit(registry, signed_release).outcome == "unchanged"


def test_refused_submission_creates_no_version(
    registry: Simulator, ci: SigningKey, signed_release: Release, tmp_path: Path
) -> None:
    other_key = SigningKey.make(tmp_path / "stranger.pem")
    old = release(onnx_file(tmp_path / "old.onnx"))
    old = replace(old, evidence=old.evidence.model_copy(update={"measured_at": "2026-01-01"}))
    refusals = (
        (replace(signed_release, statements=None), None, "it has no signed statements"),
        (Signing(ci).signed(failing_release(tmp_path / "model.onnx"), POLICY), None, "FAIL"),
        (Signing(ci).signed(old, POLICY), None, "days old"),
        (signed_release, trust_in(other_key), "is signed by 0 of the keys"),
        (Signing(ci, model="letters").signed(signed_release, POLICY), trust_in(ci), "letters"),
    )
    for new_release, trust, reason in refusals:
        result = submit(registry, new_release, trust=trust)
        assert (result.outcome, result.version) == ("refused", None)
        assert reason in result.reason
    assert registry.versions == []


def test_submission_inside_a_dvc_experiment_is_a_dry_run(
    registry: Simulator, signed_release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "try")
    assert submit(registry, signed_release).outcome == "dry_run"
    assert registry.versions == []


def _delete_a_statement(stored: Any) -> None:
    del stored.extra_files["gate/decision.dsse.json"]


def _replace_a_statement(stored: Any) -> None:
    stored.extra_files["gate/decision.dsse.json"] = stored.extra_files["gate/evidence.dsse.json"]


def _replace_the_file(stored: Any) -> None:
    stored.data = stored.data.replace(b"tiny", b"tidy")


@pytest.mark.parametrize("tamper", [_delete_a_statement, _replace_a_statement, _replace_the_file])
def test_version_that_reads_back_changed_is_not_the_candidate(
    registry: Simulator, signed_release: Release, tamper: Callable[[Any], None]
) -> None:
    watched = Watched(registry)

    def after(call: str, _index: int) -> None:
        if call == "create_version":
            tamper(registry.versions[-1])

    watched.after = after
    with pytest.raises(MismatchUnconfirmed, match="its download differs"):
        submit(watched, signed_release)
    assert registry.aliases == {}
    watched.after = lambda _call, _index: None
    assert submit(watched, signed_release).version == "2"


def test_one_wrong_download_is_retried(registry: Simulator, signed_release: Release) -> None:
    watched, original = Watched(registry), b""

    def before(call: str, _index: int) -> None:
        nonlocal original
        if call == "download":
            stored = registry.versions[-1]
            first = watched.calls.count("download") == 1
            original, stored.data = (stored.data, b"<html>") if first else (original, original)

    watched.before = before
    assert submit(watched, signed_release).version == "1"


def test_concurrent_submission_is_a_conflict(registry: Simulator, signed_release: Release) -> None:
    watched = Watched(registry)

    def after(call: str, _index: int) -> None:
        if call == f"set_alias {CANDIDATE}":
            registry.aliases[CANDIDATE] = "7"

    watched.after = after
    with pytest.raises(PromotionConflict, match="version 7"):
        submit(watched, signed_release)


def test_next_submission_finishes_a_crash_at_any_call(signed_release: Release) -> None:
    uninterrupted = Watched(Simulator())
    submit(uninterrupted, signed_release)
    for at in range(len(uninterrupted.calls)):
        registry = Simulator()
        watched = Watched(registry)

        def crash(_call: str, index: int, at: int = at) -> None:
            if index == at:
                raise Crash

        watched.before = crash
        with pytest.raises(Crash):
            submit(watched, signed_release)
        assert CHAMPION not in registry.aliases
        assert submit(registry, signed_release).outcome == "handed_in"
        assert registry.aliases == {CANDIDATE: "1"}
        assert len(registry.versions) == 1
