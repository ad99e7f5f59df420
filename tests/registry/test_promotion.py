from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision, decide
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    PromotionConflict,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
)
from gate.ledger.ledger import Ledger, promotion_lock
from gate.policy.overrides import with_overrides
from gate.policy.policy import Policy
from gate.records.evidence import ModelCode
from gate.registry import promotion
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.storage.digest import Digest
from tests import builders
from tests.ledger.rows import put_lines
from tests.registry.promoting import promote
from tests.registry.releases import DECIDED_AT, NAME, evidence, failing_release, release
from tests.registry.simulator import Crash, CrashingLedger, Simulator, Watched

POLICY = builders.policy()
MUTATIONS = ("ensure_model", "create_version", "set_alias", "set_tag", "set_description")

CALLS_OF_A_PROMOTION = [
    "ensure_model", "alias champion", "find", "create_version", "version", "download",
    "alias champion", "alias candidate", "set_alias candidate", "alias candidate", "version",
    "alias champion", "alias previous", "set_alias previous", "alias previous", "alias champion",
    "set_alias champion", "alias champion", "version", "set_description", "version",
    "set_description",
]  # fmt: skip


def run(registry, of: Release, ledger: Ledger, policy=POLICY):
    return promote(registry, of, policy=policy, ledger=ledger)


def rolled_back_registry(ledger: Ledger, bad: Release, good: Release) -> Simulator:
    """Version 1 is bad, served, and was rolled back; version 2 serves."""
    registry = Simulator()
    run(registry, bad, ledger)
    run(registry, good, ledger)
    registry.aliases |= {CHAMPION: "1", PREVIOUS: "2"}
    rollback(registry, NAME, ledger=ledger, reason="wrong digits")
    return registry


def actions(ledger: Ledger) -> list[str]:
    return [entry.action for entry in ledger.entries()]


def test_the_first_promotion(ledger: Ledger, first: Release) -> None:
    registry = Simulator()
    outcome = run(registry, first, ledger)
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


def test_a_reason_names_some_of_many_waived_checks(
    ledger: Ledger, first: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "_MAX_TITLES", 2)
    promote(Simulator(), first, policy=POLICY, ledger=ledger)
    (line,) = ledger.entries()
    assert line.reason.endswith("torch-cuda / runtime, ort-cuda / runtime and 1 more")


def test_nothing_waived_leaves_no_tag(ledger: Ledger, first: Release) -> None:
    policy = POLICY.model_copy(update={"runtimes": {"ort-cpu": POLICY.runtimes["ort-cpu"]}})
    registry = Simulator()
    run(registry, release(first.onnx_path, policy=policy), ledger, policy)
    assert "gate.waived" not in registry.versions[0].tags


def test_the_second_promotion_moves_the_aliases_last(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Watched(Simulator())
    run(registry, first, ledger)
    registry.calls.clear()
    outcome = run(registry, second, ledger)
    assert registry.calls == CALLS_OF_A_PROMOTION
    assert (outcome.outcome, outcome.version, outcome.previous_version) == ("promoted", "2", "1")
    assert registry.inner.aliases == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    assert actions(ledger) == ["promoted", "promoted"]


def test_the_same_release_again_is_a_successful_no_op(ledger: Ledger, first: Release) -> None:
    registry = Watched(Simulator())
    run(registry, first, ledger)
    registry.calls.clear()
    measured_again = evidence(first.onnx_path, measured_at="2026-02-02T00:00:00+00:00")
    for again in (first, release(first.onnx_path, evidence=measured_again)):
        assert run(registry, again, ledger).outcome == "unchanged"
    assert not any(call.startswith(MUTATIONS[1:]) for call in registry.calls)
    assert "download" in registry.calls
    assert len(registry.inner.versions) == 1
    assert actions(ledger) == ["promoted", "unchanged", "unchanged"]


@pytest.mark.rows(5)
@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.proof)])
@pytest.mark.parametrize("index", range(len(CALLS_OF_A_PROMOTION)))
def test_a_crash_at_any_call_is_finished_by_the_next_promotion(
    ledger: Ledger, first: Release, second: Release, index: int, moment: str
) -> None:
    registry = Watched(Simulator())
    run(registry, first, ledger)
    registry.calls.clear()

    def crash(_: str, at: int) -> None:
        if at == index:
            raise Crash

    setattr(registry, moment, crash)
    with pytest.raises(Crash):
        run(registry, second, ledger)
    done = CALLS_OF_A_PROMOTION.index("set_alias champion")
    moved = index > done or (index == done and moment == "after")
    written = index >= CALLS_OF_A_PROMOTION.index("alias previous")
    simulator = registry.inner
    assert simulator.aliases[CHAMPION] == ("2" if moved else "1")
    assert actions(ledger) == ["promoted", "promoted"][: 1 + written]

    outcome = run(simulator, second, ledger)
    assert outcome.outcome == ("unchanged" if written else "promoted")
    assert simulator.aliases == {CANDIDATE: "2", CHAMPION: "2", PREVIOUS: "1"}
    assert len(simulator.versions) == 2
    assert actions(ledger) == ["promoted", "promoted", *["unchanged"][: int(written)]]
    told = ledger.entries()[1]
    assert (told.version, told.previous_version) == ("2", "1")
    assert [v.description.split(" ")[1:3] for v in simulator.versions] == [
        ["was", "champion"],
        ["champion", "since"],
    ]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_at_the_ledger_is_finished_too(
    ledger: Ledger, first: Release, second: Release, moment: str
) -> None:
    registry = Simulator()
    run(registry, first, ledger)
    with pytest.raises(Crash):
        run(registry, second, CrashingLedger(ledger.state, moment))
    outcome = run(registry, second, ledger).outcome
    assert outcome == ("unchanged" if moment == "after" else "promoted")
    promoted = [e.version for e in ledger.entries() if e.action == "promoted"]
    assert promoted == ["1", "2"]


def _with(of: Release, **update: Any) -> Release:
    """Other evidence, with a decision that fits it."""
    return release(of.onnx_path, evidence=of.evidence.model_copy(update=update))


def _file(of: Release, change: Callable[[bytes], bytes]) -> Release:
    of.onnx_path.write_bytes(change(of.onnx_path.read_bytes()))
    return of


def _decided(of: Release, decision: Decision) -> Release:
    return dataclasses.replace(of, decision=decision)


def _forged_verdict(of: Release) -> Release:
    failing = failing_release(of.onnx_path)
    update = {"verdict": Verdict.PASS, "checks": of.decision.checks}
    return _decided(failing, failing.decision.model_copy(update=update))


def _other_external_data(of: Release) -> Release:
    """It would make the upload take a file from elsewhere along."""
    subject = of.evidence.subject.model_copy(update={"external_data": ("../secret",)})
    return _with(of, subject=subject)


APART: dict[str, tuple[Callable[[Release], Release], type[Exception]]] = {
    "truncated": (lambda of: _file(of, lambda data: data[:-1]), DigestMismatch),
    "other file": (lambda of: _file(of, lambda data: data + b"\0"), DigestMismatch),
    "other subject": (lambda of: _with(of, subject=builders.evidence().subject), DigestMismatch),
    "evidence made better after the decision": (
        lambda of: dataclasses.replace(of, evidence=failing_release(of.onnx_path).evidence),
        DigestMismatch),
    "other policy": (
        lambda of: _decided(
            of, decide(builders.policy(min_samples=1_000), of.evidence, decided_at=DECIDED_AT)),
        DigestMismatch),
    "other external data": (_other_external_data, EvidenceError),
    "forged verdict": (_forged_verdict, EvidenceError),
    "dropped checks": (
        lambda of: _decided(
            of, of.decision.model_copy(update={"checks": of.decision.checks[:1]})),
        EvidenceError),
}  # fmt: skip


@pytest.mark.rows(4)
@pytest.mark.parametrize(("spoil", "error"), APART.values(), ids=APART)
def test_what_does_not_belong_together_never_reaches_the_registry(
    ledger: Ledger, first: Release, second: Release, spoil, error
) -> None:
    registry = Watched(Simulator())
    run(registry, first, ledger)
    registry.calls.clear()
    with pytest.raises(error):
        run(registry, spoil(second), ledger)
    assert registry.calls == []
    assert actions(ledger) == ["promoted", "refused"]


def _with_difference(of: Release, difference: float) -> Release:
    outputs = (builders.output_parity(max_abs_diff=difference),)
    runtimes = tuple(
        each.model_copy(update={"outputs": outputs}) if each.outputs else each
        for each in of.evidence.runtimes
    )
    return _with(of, runtimes=runtimes)


NO_PASS: dict[str, Callable[[Release], Release]] = {
    "fails": lambda of: failing_release(of.onnx_path),
    "NaN": lambda of: _with_difference(of, math.nan),
    "infinite": lambda of: _with_difference(of, math.inf),
    "no samples": lambda of: _with(
        of, dataset=of.evidence.dataset.model_copy(update={"samples": 0})),
    "no runtimes": lambda of: _with(of, runtimes=()),
}  # fmt: skip


@pytest.mark.parametrize("spoil", NO_PASS.values(), ids=NO_PASS)
def test_anything_but_a_pass_is_refused(
    ledger: Ledger, first: Release, second: Release, spoil
) -> None:
    registry = Watched(Simulator())
    run(registry, first, ledger)
    registry.calls.clear()
    outcome = run(registry, spoil(second), ledger)
    assert outcome.outcome == "refused"
    assert outcome.version is None
    assert "checks did not pass" in outcome.reason
    assert registry.calls == []
    assert registry.inner.aliases[CHAMPION] == "1"
    assert actions(ledger) == ["promoted", "refused"]
    assert ledger.entries()[-1].reason == outcome.reason


def test_a_pass_by_values_that_were_tried_out_is_refused(ledger: Ledger, first: Release) -> None:
    registry = Simulator()
    tried = with_overrides(POLICY, {"min_samples": "7"})
    of = release(first.onnx_path, policy=tried)
    assert of.decision.passed
    outcome = run(registry, of, ledger, tried)
    assert (outcome.outcome, outcome.version) == ("refused", None)
    assert "overridden with --set: min_samples = 7" in outcome.reason
    assert registry.aliases == {}


@pytest.mark.parametrize(
    ("now", "outcome"), [("x.sigmoid()", "refused"), ("x.relu()", "promoted"), (None, "promoted")]
)
def test_code_of_the_model_that_changed_since(
    ledger: Ledger, first: Release, tmp_path: Path, monkeypatch, now: str | None, outcome: str
) -> None:
    """None: the code is not here, as on a server."""
    monkeypatch.chdir(tmp_path)
    files = {"their_models": Digest.from_bytes(b"x.relu()")}
    if now is not None:
        Path("their_models.py").write_text(now)
    source = first.evidence.source.model_copy(
        update={"code": ModelCode(files=files, packages={"torch": "0.1"})}
    )
    of = release(first.onnx_path, evidence=evidence(first.onnx_path, source=source))
    done = run(Simulator(), of, ledger)
    assert done.outcome == outcome
    assert ("code changed since it was measured: their_models." in done.reason) is (
        outcome == "refused"
    )
    assert actions(ledger) == [outcome]


@pytest.mark.parametrize("name", ["brave-tapir", ""])
def test_a_dvc_experiment_never_promotes(
    ledger: Ledger, first: Release, monkeypatch, name: str
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", name)
    registry = Watched(Simulator())
    outcome = run(registry, first, ledger)
    assert outcome.outcome == "dry_run"
    assert "make repro" in outcome.reason
    assert registry.calls == []
    assert ledger.entries() == ()
    assert run(registry, failing_release(first.onnx_path), ledger).outcome == "refused"


def test_an_upload_that_comes_back_changed_is_not_promoted(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Simulator()
    run(registry, first, ledger)
    registry.corrupt = lambda data: data[:-4] + b"\x00\x00\x00\x00"
    with pytest.raises(DigestMismatch, match="version 2 of digits"):
        run(registry, second, ledger)
    assert registry.aliases[CHAMPION] == "1"
    registry.corrupt = bytes
    assert run(registry, second, ledger).version == "3"
    assert actions(ledger) == ["promoted", "promoted"]
    assert registry.aliases == {CANDIDATE: "3", CHAMPION: "3", PREVIOUS: "1"}


def page_for(registry: Simulator, *numbers: str, times: int) -> None:
    """The store gives a page in the place of these files, so many times."""
    download, left = registry.download, [times]

    def weather(name: str, number: str, folder: Path, **options: object) -> Path:
        path = download(name, number, folder, **options)
        if number in numbers and left[0] > 0:
            left[0] -= 1
            path.write_bytes(b"<html>busy</html>")
        return path

    registry.__dict__["download"] = weather


def test_an_error_page_after_an_upload_only_delays_the_promotion(
    ledger: Ledger, first: Release, second: Release, third: Release
) -> None:
    registry = Simulator()
    run(registry, first, ledger)
    page_for(registry, "2", times=1)
    assert run(registry, second, ledger).version == "2"  # the second download was good
    page_for(registry, "3", times=2)
    before = actions(ledger)
    with pytest.raises(DigestMismatch):  # a second download confirms what the first returned
        run(registry, third, ledger)
    assert (actions(ledger), registry.aliases[CHAMPION]) == (before, "2")
    assert run(registry, third, ledger).version == "3"


def test_an_error_page_for_the_champion_is_a_mismatch_if_it_lasts(
    ledger: Ledger, first: Release
) -> None:
    registry = Simulator()
    run(registry, first, ledger)
    page_for(registry, "1", times=2)
    done = run(registry, first, ledger)  # the same bytes again, as a version that can be read
    assert (done.outcome, done.version) == ("promoted", "2")
    assert registry.aliases[CHAMPION] == "2"


def test_an_overwritten_version_is_never_promoted(
    ledger: Ledger, first: Release, second: Release
) -> None:
    """An interrupted promotion left version 2 behind; then somebody changed its bytes."""
    registry = Simulator()
    run(registry, first, ledger)
    registry.create_version(NAME, second.draft())
    registry.versions[1].data = first.onnx_path.read_bytes()
    outcome = run(registry, second, ledger)
    assert (outcome.version, outcome.previous_version) == ("3", "1")
    assert registry.versions[2].data == second.onnx_path.read_bytes()
    assert actions(ledger) == ["promoted", "promoted"]


def test_an_overwritten_champion_is_replaced_and_a_rollback_passes_it_over(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Simulator()
    run(registry, first, ledger)
    run(registry, second, ledger)
    registry.versions[1].data += b"\x00"
    outcome = run(registry, second, ledger)
    assert (outcome.outcome, outcome.version) == ("promoted", "3")
    assert registry.aliases == {CANDIDATE: "3", CHAMPION: "3", PREVIOUS: "2"}
    assert run(registry, second, ledger).outcome == "unchanged"
    assert rollback(registry, NAME, ledger=ledger, reason="worse").version == "1"
    assert actions(ledger)[:-1] == ["promoted", "promoted", "promoted", "unchanged"]


def test_tags_alone_never_allow(ledger: Ledger, first: Release, second: Release) -> None:
    """Somebody tags the champion's version with the digests of a file that is not in it."""
    registry = Simulator()
    run(registry, first, ledger)
    registry.versions[0].tags.update(second.draft().tags)
    outcome = run(registry, second, ledger)
    assert outcome.version == "2"
    assert registry.versions[1].data == second.onnx_path.read_bytes()


def test_tags_that_were_edited_make_a_version_unfit_to_finish(
    ledger: Ledger, first: Release
) -> None:
    registry = Simulator()
    registry.create_version(NAME, first.draft())
    registry.versions[0].tags["gate.verdict"] = "FAIL"
    assert run(registry, first, ledger).version == "2"


def test_a_version_that_reads_back_otherwise_is_not_promoted(
    ledger: Ledger, first: Release
) -> None:
    registry = Watched(Simulator())

    def lose_a_tag(call: str, _: int) -> None:
        if call == "create_version":
            del registry.inner.versions[0].tags["gate.runtimes"]

    registry.after = lose_a_tag
    with pytest.raises(RegistryError, match="the registry returned"):
        run(registry, first, ledger)
    assert registry.inner.aliases == {}


def test_rolled_back_bytes_are_refused_until_the_tag_is_deleted(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = rolled_back_registry(ledger, second, first)
    policy = builders.policy(min_samples=350)
    for of, by in ((second, POLICY), (release(second.onnx_path, policy=policy), policy)):
        outcome = run(registry, of, ledger, by)
        assert outcome.outcome == "refused"
        assert outcome.version == "1"
        assert "wrong digits" in outcome.reason
        assert f"delete the tag {Tag.ROLLED_BACK}" in outcome.reason
    assert registry.aliases[CHAMPION] == "2"
    del registry.versions[0].tags[Tag.ROLLED_BACK]
    assert run(registry, second, ledger).version == "1"
    assert run(registry, second, ledger).outcome == "unchanged"


def test_rolled_back_bytes_are_found_in_the_ledger_where_the_tags_are_gone(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = rolled_back_registry(ledger, second, first)
    kept = {Tag.ROLLED_BACK: registry.versions[0].tags[Tag.ROLLED_BACK]}
    registry.versions[0].tags = kept
    assert run(registry, second, ledger).outcome == "refused"
    registry.versions[0].tags = {}
    assert run(registry, second, ledger).outcome == "promoted"


@pytest.mark.parametrize("error", [ResourceGone, RegistryError, RegistryUnavailable])
def test_a_rolled_back_version_that_is_gone_keeps_nothing_out_and_weather_promotes_nothing(
    ledger: Ledger, first: Release, second: Release, error: type[RegistryError]
) -> None:
    registry = rolled_back_registry(ledger, second, first)
    del registry.versions[0].tags[Tag.SHA256]
    watched = Watched(registry)

    def gone(call: str, _: int) -> None:
        if call == "version" and "create_version" not in watched.calls:
            raise error("no version 1")

    watched.before = gone
    if error is ResourceGone:
        assert run(watched, second, ledger).version == "3"
        return
    with pytest.raises(error):
        run(watched, second, ledger)
    assert registry.aliases[CHAMPION] == "2"


def test_a_tag_that_no_line_of_the_ledger_is_behind_keeps_nothing_out(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Simulator()
    run(registry, second, ledger)
    run(registry, first, ledger)
    registry.set_tag(NAME, "1", key=Tag.ROLLED_BACK, value="2026-01-01: by an editor")
    assert run(registry, second, ledger).version == "1"


def test_bytes_that_a_reviewer_rejected_stay_out_without_any_tag(
    ledger: Ledger, first: Release
) -> None:
    registry = Simulator()
    policy = builders.policy(review="required")
    handed_in = release(first.onnx_path, policy=policy)
    assert run(registry, handed_in, ledger, policy).outcome == "passed"
    (line,) = ledger.entries()
    model = RegisteredModel(registry, ledger, NAME)
    model.write("rejected", "no", version="1", about=line)
    registry.versions[0].tags = {}
    for of, by in ((handed_in, policy), (first, POLICY)):
        assert run(registry, of, ledger, by).outcome == "refused"
    assert registry.aliases == {CANDIDATE: "1"}


def test_whether_it_serves_already_is_told_by_the_ledger_and_not_by_tags(
    ledger: Ledger, first: Release
) -> None:
    """An editor writes the digest of the stricter policy into the champion's tag."""
    registry = Simulator()
    run(registry, first, ledger)
    policy = builders.policy(min_samples=350)
    registry.versions[0].tags[Tag.POLICY] = policy.digest().hex
    again = run(registry, release(first.onnx_path, policy=policy), ledger, policy)
    assert (again.outcome, again.version) == ("promoted", "2")


UNTIMELY = {
    "200 days old": ({"days": -200}, "200.0 days old, the policy allows 90 (max_age_days)"),
    "91 days old": ({"days": -91}, "91.0 days old"),
    "of 2099": ("2099-01-01T00:00:00+00:00", "from the future: measured at 2099-01-01"),
    "ten minutes ahead": ({"minutes": 10}, "clocks may differ by at most 5 minutes"),
    "no time": ("yesterday", "'yesterday', which is not ISO 8601"),
}


def measured(at: dict[str, float] | str) -> str:
    return at if isinstance(at, str) else (datetime.now(UTC) + timedelta(**at)).isoformat()


@pytest.mark.parametrize(("at", "reason"), UNTIMELY.values(), ids=list(UNTIMELY))
def test_evidence_that_is_too_old_or_of_the_future_is_not_promoted(
    ledger: Ledger, first: Release, at: dict[str, float] | str, reason: str
) -> None:
    registry, policy = Simulator(), builders.policy(review="required")
    of = evidence(first.onnx_path, measured_at=measured(at))
    outcome = run(registry, release(first.onnx_path, evidence=of, policy=policy), ledger, policy)
    assert outcome.outcome == "refused"
    assert reason in outcome.reason
    assert "Measure the file again" in outcome.reason
    assert (registry.versions, registry.aliases) == ([], {})
    assert actions(ledger) == ["refused"]


@pytest.mark.parametrize(
    ("at", "policy"),
    [
        ({"days": -89}, POLICY),
        ({"minutes": 4}, POLICY),
        ({"days": -200}, builders.policy(max_age_days=365.0)),
    ],
)
def test_evidence_that_is_young_enough_is_promoted(
    ledger: Ledger, first: Release, at: dict[str, float], policy: Policy
) -> None:
    of = evidence(first.onnx_path, measured_at=measured(at))
    handed = release(first.onnx_path, evidence=of, policy=policy)
    assert run(Simulator(), handed, ledger, policy).outcome == "promoted"


def test_what_serves_grows_old_and_serves(
    ledger: Ledger, first: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Simulator()
    run(registry, first, ledger)

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=400)

    monkeypatch.setattr(promotion, "datetime", Later)
    assert run(registry, first, ledger).outcome == "unchanged"
    registry.aliases.clear()
    assert "400.0 days old" in run(registry, first, ledger).reason


@pytest.mark.parametrize("index", [6, 10, 16])
def test_a_champion_moved_by_another_host_is_a_conflict(
    ledger: Ledger, first: Release, second: Release, third: Release, index: int
) -> None:
    """Before the promotion looks again, or right after it set the alias."""
    registry = Watched(Simulator())
    run(registry, first, ledger)
    registry.inner.create_version(NAME, third.draft())
    registry.calls.clear()

    def interfere(_: str, at: int) -> None:
        if at == index:
            registry.inner.aliases[CHAMPION] = "2"

    hook = "after" if index == 16 else "before"
    setattr(registry, hook, interfere)
    with pytest.raises(PromotionConflict, match="points at version 2"):
        run(registry, second, ledger)
    assert registry.inner.aliases[CHAMPION] == "2"
    assert actions(ledger) == ["promoted", *["promoted"][: index == 16], "conflict"]


def test_who_comes_second_is_told_who_is_first(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Watched(Simulator())
    with (
        promotion_lock(ledger),
        pytest.raises(PromotionConflict, match=r"process \d+ on \S+ since 20"),
    ):
        run(registry, first, ledger)
    assert registry.calls == []
    assert actions(ledger) == ["conflict"]
    assert run(registry, first, ledger).outcome == "promoted"


def test_a_broken_ledger_stops_before_the_registry(
    ledger: Ledger, first: Release, second: Release
) -> None:
    registry = Watched(Simulator())
    run(registry, first, ledger)
    put_lines(ledger.state, [b'{"edited": true}'])
    registry.calls.clear()
    with pytest.raises(EvidenceError, match=r"ledger\.db:1"):
        run(registry, second, ledger)
    assert registry.calls == []


def test_another_registry_with_the_same_ledger_is_another_history(
    ledger: Ledger, first: Release, second: Release
) -> None:
    here, there = Simulator("here"), Simulator("there")
    run(here, first, ledger)
    here.versions[0].data += b"\x00"
    run(here, first, ledger)
    run(there, second, ledger)
    assert run(there, second, ledger).outcome == "unchanged"
    assert [e.registry for e in ledger.entries()].count("there") == 2


def test_a_champion_from_elsewhere_gets_its_line(
    ledger: Ledger, tmp_path: Path, first: Release
) -> None:
    registry = Simulator()
    run(registry, first, Ledger(tmp_path / "elsewhere.jsonl"))
    assert run(registry, first, ledger).outcome == "unchanged"
    (line,) = ledger.entries()
    assert line.action == "promoted"
    assert "without an entry in this ledger" in line.reason
    assert registry.versions[0].tags[Tag.SHA256] == first.decision.subject_sha256.hex
