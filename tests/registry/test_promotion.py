from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gate import Decision, Digest, Policy, Verdict, decide
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    PromotionConflict,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
)
from gate.ledger.ledger import Ledger
from gate.policy.overrides import with_overrides
from gate.records.evidence import ModelCode
from gate.registry import promotion
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from tests import builders
from tests.ledger.rows import replace_lines
from tests.registry.promoting import promote
from tests.registry.releases import DECIDED_AT, NAME, evidence, failing_release, release
from tests.registry.simulator import Crash, Simulator, Watched

POLICY = builders.policy()
MUTATIONS = ("ensure_model", "create_version", "set_alias", "set_tag", "set_description")

CALLS_OF_A_PROMOTION = [
    "ensure_model", "alias champion", "find", "create_version", "version", "download",
    "alias champion", "alias candidate", "set_alias candidate", "alias candidate", "version",
    "alias champion", "alias previous", "set_alias previous", "alias previous", "alias champion",
    "set_alias champion", "alias champion", "version", "set_description", "version",
    "set_description",
]  # fmt: skip


def promote_release(registry, new_release: Release, ledger: Ledger, policy=POLICY):
    return promote(registry, new_release, policy=policy, ledger=ledger)


def make_rolled_back_registry(ledger: Ledger, bad: Release, good: Release) -> Simulator:
    """Return a registry whose version 1 was rolled back and whose version 2 is champion."""
    registry = Simulator()
    promote_release(registry, bad, ledger)
    promote_release(registry, good, ledger)
    registry.aliases |= {CHAMPION: "1", PREVIOUS: "2"}
    rollback(registry, NAME, ledger=ledger, reason="wrong digits")
    return registry


def ledger_actions(ledger: Ledger) -> list[str]:
    return [entry.action for entry in ledger.entries()]


def test_first_promotion_sets_aliases_tags_and_ledger_entry(ledger: Ledger, first: Release) -> None:
    registry = Simulator()
    outcome = promote_release(registry, first, ledger)
    assert (outcome.outcome, outcome.version, outcome.previous_version) == ("promoted", "1", None)
    assert registry.aliases == {CANDIDATE: "1", CHAMPION: "1"}
    (stored,) = registry.versions
    assert stored.data == first.onnx_path.read_bytes()
    status, _, rest = stored.description.partition("\n\n")
    assert status.startswith("Status: champion since 20")
    assert rest == first.description
    assert stored.tags == {
        "gate.verdict": "PASS",
        "gate.sha256": first.decision.subject_sha256.hex,
        "gate.policy_sha256": POLICY.digest().hex,
        "gate.evidence_sha256": first.evidence.digest().hex,
        "gate.runtimes": "ort-cpu,ort-cpu-optimized",
        "gate.waived": "torch-cuda / runtime,ort-cuda / runtime,ort-cuda-optimized / runtime",
    }
    (line,) = ledger.entries()
    assert line.sha256 == first.decision.subject_sha256
    assert line.policy_sha256 == POLICY.digest()
    assert line.evidence_sha256 == first.evidence.digest()
    assert (line.action, line.model, line.version, line.run_id) == ("promoted", NAME, "1", "run")
    assert line.reason == (
        "PASS on ort-cpu, ort-cpu-optimized; "
        "waived: torch-cuda / runtime, ort-cuda / runtime, ort-cuda-optimized / runtime"
    )


def test_second_promotion_moves_the_aliases_last(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    registry.calls.clear()
    outcome = promote_release(registry, second, ledger)
    assert registry.calls == CALLS_OF_A_PROMOTION
    assert (outcome.outcome, outcome.version, outcome.previous_version) == ("promoted", "2", "1")
    assert registry.inner.aliases == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    assert ledger_actions(ledger) == ["promoted", "promoted"]


def test_promoting_the_same_release_again_changes_nothing(ledger: Ledger, first: Release) -> None:
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    registry.calls.clear()
    measured_again = evidence(first.onnx_path, measured_at="2026-02-02T00:00:00+00:00")
    for again in (first, release(first.onnx_path, evidence=measured_again)):
        assert promote_release(registry, again, ledger).outcome == "unchanged"
    assert not any(call.startswith(MUTATIONS[1:]) for call in registry.calls)
    assert "download" in registry.calls
    assert len(registry.inner.versions) == 1
    assert ledger_actions(ledger) == ["promoted", "unchanged", "unchanged"]


@pytest.mark.rows(5)
@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.proof)])
@pytest.mark.parametrize("index", range(len(CALLS_OF_A_PROMOTION)))
def test_next_promotion_finishes_a_crash_at_any_registry_call(
    ledger: Ledger, first: Release, second: Release, index: int, moment: str
) -> None:
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    registry.calls.clear()

    def crash(_: str, at: int) -> None:
        if at == index:
            raise Crash

    setattr(registry, moment, crash)
    with pytest.raises(Crash):
        promote_release(registry, second, ledger)
    alias_call = CALLS_OF_A_PROMOTION.index("set_alias champion")
    is_moved = index > alias_call or (index == alias_call and moment == "after")
    is_written = index >= CALLS_OF_A_PROMOTION.index("alias previous")
    simulator = registry.inner
    assert simulator.aliases[CHAMPION] == ("2" if is_moved else "1")
    assert ledger_actions(ledger) == ["promoted", "promoted"][: 1 + is_written]

    outcome = promote_release(simulator, second, ledger)
    assert outcome.outcome == ("unchanged" if is_written else "promoted")
    assert simulator.aliases == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    assert len(simulator.versions) == 2
    assert ledger_actions(ledger) == ["promoted", "promoted", *["unchanged"][: int(is_written)]]
    reported = ledger.entries()[1]
    assert (reported.version, reported.previous_version) == ("2", "1")
    assert [v.description.split(" ")[1:3] for v in simulator.versions] == [
        ["was", "champion"],
        ["champion", "since"],
    ]


def _with_evidence(new_release: Release, **update: Any) -> Release:
    """Return the release with other evidence and a decision that fits it."""
    return release(new_release.onnx_path, evidence=new_release.evidence.model_copy(update=update))


def _change_file(new_release: Release, change: Callable[[bytes], bytes]) -> Release:
    new_release.onnx_path.write_bytes(change(new_release.onnx_path.read_bytes()))
    return new_release


def _with_decision(new_release: Release, decision: Decision) -> Release:
    return dataclasses.replace(new_release, decision=decision)


def _forge_verdict(new_release: Release) -> Release:
    failing = failing_release(new_release.onnx_path)
    update = {"verdict": Verdict.PASS, "checks": new_release.decision.checks}
    return _with_decision(failing, failing.decision.model_copy(update=update))


def _name_foreign_data(new_release: Release) -> Release:
    """Name an external file that the upload would take from another folder."""
    subject = new_release.evidence.subject.model_copy(update={"external_data": ("../secret",)})
    return _with_evidence(new_release, subject=subject)


INCONSISTENT: dict[str, tuple[Callable[[Release], Release], type[Exception]]] = {
    "truncated": (lambda new_release: _change_file(new_release, lambda data: data[:-1]), DigestMismatch),
    "other file": (lambda new_release: _change_file(new_release, lambda data: data + b"\0"), DigestMismatch),
    "other subject": (lambda new_release: _with_evidence(new_release, subject=builders.evidence().subject), DigestMismatch),
    "evidence made better after the decision": (
        lambda new_release: dataclasses.replace(new_release, evidence=failing_release(new_release.onnx_path).evidence),
        DigestMismatch),
    "other policy": (
        lambda new_release: _with_decision(
            new_release, decide(builders.policy(min_samples=1_000), new_release.evidence, decided_at=DECIDED_AT)),
        DigestMismatch),
    "other external data": (_name_foreign_data, EvidenceError),
    "forged verdict": (_forge_verdict, EvidenceError),
    "dropped checks": (
        lambda new_release: _with_decision(
            new_release, new_release.decision.model_copy(update={"checks": new_release.decision.checks[:1]})),
        EvidenceError),
}  # fmt: skip


@pytest.mark.rows(4)
@pytest.mark.parametrize(("tamper", "error"), INCONSISTENT.values(), ids=INCONSISTENT)
def test_inconsistent_release_is_rejected_before_any_registry_call(
    ledger: Ledger, first: Release, second: Release, tamper, error
) -> None:
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    registry.calls.clear()
    with pytest.raises(error):
        promote_release(registry, tamper(second), ledger)
    assert registry.calls == []
    assert ledger_actions(ledger) == ["promoted", "refused"]


def _with_difference(new_release: Release, difference: float) -> Release:
    outputs = (builders.output_parity(max_abs_diff=difference),)
    runtimes = tuple(
        each.model_copy(update={"outputs": outputs}) if each.outputs else each
        for each in new_release.evidence.runtimes
    )
    return _with_evidence(new_release, runtimes=runtimes)


NO_PASS: dict[str, Callable[[Release], Release]] = {
    "fails": lambda new_release: failing_release(new_release.onnx_path),
    "NaN": lambda new_release: _with_difference(new_release, math.nan),
    "no runtimes": lambda new_release: _with_evidence(new_release, runtimes=()),
}  # fmt: skip


@pytest.mark.parametrize("tamper", NO_PASS.values(), ids=NO_PASS)
def test_release_that_does_not_pass_is_refused(
    ledger: Ledger, first: Release, second: Release, tamper
) -> None:
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    registry.calls.clear()
    outcome = promote_release(registry, tamper(second), ledger)
    assert outcome.outcome == "refused"
    assert outcome.version is None
    assert "checks did not pass" in outcome.reason
    assert registry.calls == []
    assert registry.inner.aliases[CHAMPION] == "1"
    assert ledger_actions(ledger) == ["promoted", "refused"]
    assert ledger.entries()[-1].reason == outcome.reason


def test_pass_under_overridden_policy_values_is_refused(ledger: Ledger, first: Release) -> None:
    registry = Simulator()
    overridden_policy = with_overrides(POLICY, {"min_samples": "7"})
    new_release = release(first.onnx_path, policy=overridden_policy)
    assert new_release.decision.passed
    outcome = promote_release(registry, new_release, ledger, overridden_policy)
    assert (outcome.outcome, outcome.version) == ("refused", None)
    assert "overridden with --set: min_samples = 7" in outcome.reason
    assert registry.aliases == {}


@pytest.mark.parametrize(
    ("now", "outcome"), [("x.sigmoid()", "refused"), ("x.relu()", "promoted"), (None, "promoted")]
)
def test_promotion_is_refused_when_model_code_changed_after_measurement(
    ledger: Ledger, first: Release, tmp_path: Path, monkeypatch, now: str | None, outcome: str
) -> None:
    """now=None: the code is not installed, as on a server."""
    monkeypatch.chdir(tmp_path)
    files = {"their_models": Digest.from_bytes(b"x.relu()")}
    if now is not None:
        Path("their_models.py").write_text(now)
    source = first.evidence.source.model_copy(
        update={"code": ModelCode(files=files, packages={"torch": "0.1"})}
    )
    new_release = release(first.onnx_path, evidence=evidence(first.onnx_path, source=source))
    result = promote_release(Simulator(), new_release, ledger)
    assert result.outcome == outcome
    assert ("code changed since it was measured: their_models." in result.reason) is (
        outcome == "refused"
    )
    assert ledger_actions(ledger) == [outcome]


@pytest.mark.parametrize("name", ["brave-tapir", ""])
def test_promotion_inside_a_dvc_experiment_is_a_dry_run(
    ledger: Ledger, first: Release, monkeypatch, name: str
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", name)
    registry = Watched(Simulator())
    outcome = promote_release(registry, first, ledger)
    assert outcome.outcome == "dry_run"
    assert "make repro" in outcome.reason
    assert registry.calls == []
    assert ledger.entries() == ()
    assert promote_release(registry, failing_release(first.onnx_path), ledger).outcome == "refused"


def test_upload_that_reads_back_changed_is_not_promoted(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Simulator()
    promote_release(registry, first, ledger)
    registry.corrupt = lambda data: data[:-4] + b"\x00\x00\x00\x00"
    with pytest.raises(DigestMismatch, match="version 2 of digits"):
        promote_release(registry, second, ledger)
    assert registry.aliases[CHAMPION] == "1"
    registry.corrupt = bytes
    assert promote_release(registry, second, ledger).version == "3"
    assert ledger_actions(ledger) == ["promoted", "promoted"]
    assert registry.aliases == {CANDIDATE: "3", CHAMPION: "3", PREVIOUS: "1"}


def test_interrupted_version_with_overwritten_bytes_is_not_promoted(
    ledger: Ledger, first: Release, second: Release
) -> None:
    """An interrupted promotion left version 2; an editor changed its bytes afterwards."""
    registry = Simulator()
    promote_release(registry, first, ledger)
    registry.create_version(NAME, second.draft())
    registry.versions[1].data = first.onnx_path.read_bytes()
    outcome = promote_release(registry, second, ledger)
    assert (outcome.version, outcome.previous_version) == ("3", "1")
    assert registry.versions[2].data == second.onnx_path.read_bytes()
    assert ledger_actions(ledger) == ["promoted", "promoted"]


def test_overwritten_champion_is_replaced_and_skipped_by_rollback(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Simulator()
    promote_release(registry, first, ledger)
    promote_release(registry, second, ledger)
    registry.versions[1].data += b"\x00"
    outcome = promote_release(registry, second, ledger)
    assert (outcome.outcome, outcome.version) == ("promoted", "3")
    assert registry.aliases == {CANDIDATE: "3", CHAMPION: "3", PREVIOUS: "2"}
    assert promote_release(registry, second, ledger).outcome == "unchanged"
    assert rollback(registry, NAME, ledger=ledger, reason="worse").version == "1"
    assert ledger_actions(ledger)[:-1] == ["promoted", "promoted", "promoted", "unchanged"]


def test_version_with_edited_tags_is_not_reused(ledger: Ledger, first: Release) -> None:
    registry = Simulator()
    registry.create_version(NAME, first.draft())
    registry.versions[0].tags["gate.verdict"] = "FAIL"
    assert promote_release(registry, first, ledger).version == "2"


def test_version_that_reads_back_with_other_tags_is_not_promoted(
    ledger: Ledger, first: Release
) -> None:
    registry = Watched(Simulator())

    def delete_tag(call: str, _: int) -> None:
        if call == "create_version":
            del registry.inner.versions[0].tags["gate.runtimes"]

    registry.after = delete_tag
    with pytest.raises(RegistryError, match="the registry returned"):
        promote_release(registry, first, ledger)
    assert registry.inner.aliases == {}


def test_rolled_back_file_is_refused_until_its_tag_is_deleted(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = make_rolled_back_registry(ledger, second, first)
    policy = builders.policy(min_samples=350)
    for new_release, by in ((second, POLICY), (release(second.onnx_path, policy=policy), policy)):
        outcome = promote_release(registry, new_release, ledger, by)
        assert outcome.outcome == "refused"
        assert outcome.version == "1"
        assert "wrong digits" in outcome.reason
        assert f"delete the tag {Tag.ROLLED_BACK}" in outcome.reason
    assert registry.aliases[CHAMPION] == "2"
    del registry.versions[0].tags[Tag.ROLLED_BACK]
    assert promote_release(registry, second, ledger).version == "1"
    assert promote_release(registry, second, ledger).outcome == "unchanged"


def test_rollback_entry_applies_although_the_digest_tag_is_missing(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = make_rolled_back_registry(ledger, second, first)
    remaining_tags = {Tag.ROLLED_BACK: registry.versions[0].tags[Tag.ROLLED_BACK]}
    registry.versions[0].tags = remaining_tags
    assert promote_release(registry, second, ledger).outcome == "refused"
    registry.versions[0].tags = {}
    assert promote_release(registry, second, ledger).outcome == "promoted"


@pytest.mark.parametrize("error", [ResourceGone, RegistryError, RegistryUnavailable])
def test_deleted_rolled_back_version_does_not_block_but_a_registry_error_does(
    ledger: Ledger, first: Release, second: Release, error: type[RegistryError]
) -> None:
    registry = make_rolled_back_registry(ledger, second, first)
    del registry.versions[0].tags[Tag.SHA256]
    watched = Watched(registry)

    def fail_to_read(call: str, _: int) -> None:
        if call == "version" and "create_version" not in watched.calls:
            raise error("no version 1")

    watched.before = fail_to_read
    if error is ResourceGone:
        assert promote_release(watched, second, ledger).version == "3"
        return
    with pytest.raises(error):
        promote_release(watched, second, ledger)
    assert registry.aliases[CHAMPION] == "2"


def test_rollback_tag_without_a_ledger_entry_does_not_block_promotion(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Simulator()
    promote_release(registry, second, ledger)
    promote_release(registry, first, ledger)
    registry.set_tag(NAME, "1", key=Tag.ROLLED_BACK, value="2026-01-01: by an editor")
    assert promote_release(registry, second, ledger).version == "1"


def test_rejected_file_is_refused_although_its_tags_are_gone(
    ledger: Ledger, first: Release
) -> None:
    registry = Simulator()
    policy = builders.policy(review="required")
    reviewed = release(first.onnx_path, policy=policy)
    assert promote_release(registry, reviewed, ledger, policy).outcome == "passed"
    (line,) = ledger.entries()
    model = RegisteredModel(registry, ledger, NAME)
    model.write("rejected", "no", version="1", about=line)
    registry.versions[0].tags = {}
    for new_release, by in ((reviewed, policy), (first, POLICY)):
        assert promote_release(registry, new_release, ledger, by).outcome == "refused"
    assert registry.aliases == {CANDIDATE: "1"}


def test_unchanged_outcome_depends_on_the_ledger_and_not_on_tags(
    ledger: Ledger, first: Release
) -> None:
    """An editor writes the digest of the stricter policy into the champion's tag."""
    registry = Simulator()
    promote_release(registry, first, ledger)
    policy = builders.policy(min_samples=350)
    registry.versions[0].tags[Tag.POLICY] = policy.digest().hex
    again = promote_release(registry, release(first.onnx_path, policy=policy), ledger, policy)
    assert (again.outcome, again.version) == ("promoted", "2")


INVALID_TIMES = {
    "91 days old": ({"days": -91}, "91.0 days old, the policy allows 90 (max_age_days)"),
    "ten minutes ahead": ({"minutes": 10}, "clocks may differ by at most 5 minutes"),
    "no time": ("yesterday", "'yesterday', which is not ISO 8601"),
}


def to_iso_time(at: dict[str, float] | str) -> str:
    return at if isinstance(at, str) else (datetime.now(UTC) + timedelta(**at)).isoformat()


@pytest.mark.parametrize(("at", "reason"), INVALID_TIMES.values(), ids=list(INVALID_TIMES))
def test_evidence_that_is_too_old_or_from_the_future_is_refused(
    ledger: Ledger, first: Release, at: dict[str, float] | str, reason: str
) -> None:
    registry, policy = Simulator(), builders.policy(review="required")
    new_release = evidence(first.onnx_path, measured_at=to_iso_time(at))
    outcome = promote_release(
        registry, release(first.onnx_path, evidence=new_release, policy=policy), ledger, policy
    )
    assert outcome.outcome == "refused"
    assert reason in outcome.reason
    assert "Measure the file again" in outcome.reason
    assert (registry.versions, registry.aliases) == ([], {})
    assert ledger_actions(ledger) == ["refused"]


@pytest.mark.parametrize(
    ("at", "policy"),
    [
        ({"days": -89}, POLICY),
        ({"minutes": 4}, POLICY),
        ({"days": -200}, builders.policy(max_age_days=365.0)),
    ],
)
def test_recent_evidence_is_promoted(
    ledger: Ledger, first: Release, at: dict[str, float], policy: Policy
) -> None:
    new_release = evidence(first.onnx_path, measured_at=to_iso_time(at))
    evaluated = release(first.onnx_path, evidence=new_release, policy=policy)
    assert promote_release(Simulator(), evaluated, ledger, policy).outcome == "promoted"


def test_champion_with_old_evidence_stays_unchanged(
    ledger: Ledger, first: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Simulator()
    promote_release(registry, first, ledger)

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=400)

    monkeypatch.setattr(promotion, "datetime", Later)
    assert promote_release(registry, first, ledger).outcome == "unchanged"
    registry.aliases.clear()
    assert "400.0 days old" in promote_release(registry, first, ledger).reason


@pytest.mark.parametrize("index", [6, 10, 16])
def test_champion_moved_by_another_host_is_a_conflict(
    ledger: Ledger, first: Release, second: Release, third: Release, index: int
) -> None:
    """The alias moves before the promotion reads it again, or right after it was set."""
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    registry.inner.create_version(NAME, third.draft())
    registry.calls.clear()

    def interfere(_: str, at: int) -> None:
        if at == index:
            registry.inner.aliases[CHAMPION] = "2"

    hook = "after" if index == 16 else "before"
    setattr(registry, hook, interfere)
    with pytest.raises(PromotionConflict, match="points at version 2"):
        promote_release(registry, second, ledger)
    assert registry.inner.aliases[CHAMPION] == "2"
    assert ledger_actions(ledger) == ["promoted", *["promoted"][: index == 16], "conflict"]


def test_broken_ledger_stops_the_promotion_before_any_registry_call(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Watched(Simulator())
    promote_release(registry, first, ledger)
    replace_lines(ledger.state, [b'{"edited": true}'])
    registry.calls.clear()
    with pytest.raises(EvidenceError, match=r"ledger\.db:1"):
        promote_release(registry, second, ledger)
    assert registry.calls == []


def test_champion_without_a_ledger_entry_gets_one(
    ledger: Ledger, tmp_path: Path, first: Release
) -> None:
    registry = Simulator()
    promote_release(registry, first, Ledger(tmp_path / "elsewhere.jsonl"))
    assert promote_release(registry, first, ledger).outcome == "unchanged"
    (line,) = ledger.entries()
    assert line.action == "promoted"
    assert "without an entry in this ledger" in line.reason
    assert registry.versions[0].tags[Tag.SHA256] == first.decision.subject_sha256.hex
