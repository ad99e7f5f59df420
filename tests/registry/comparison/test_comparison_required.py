"""A release is promoted only if it was compared with the current champion."""

from __future__ import annotations

import dataclasses

import pytest

from gate.decision.decide import decide
from gate.errors import EvidenceError
from gate.ledger.ledger import Ledger
from gate.policy.sections import ChampionPolicy
from gate.records.champion_comparison import ChampionComparison
from gate.records.layout import DECISION, RECORDS
from gate.registry.eligibility import examine
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import PromotionResult, Release
from gate.registry.verify_release import Terms, verify_release
from gate.service.champion_guard import guard_champion
from gate.service.submissions import process_reviews
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import DECIDED_AT, NAME, onnx_file, release
from tests.registry.simulator import Simulator

POLICY = builders.policy(
    incumbent=ChampionPolicy(max_accuracy_drop=0.01, min_agreement=0.9, max_latency_ratio=1.5)
)
REVIEWED = POLICY.model_copy(update={"review": "required"})


def against(version: str | None, old: Release | None, new: Release, policy=POLICY) -> Release:
    """`new`, decided against `old` as this version; None: as a first release."""
    ours = {"subject_sha256": new.evidence.subject.sha256, "data_sha256": builders.digest("data")}
    incumbent = (
        ChampionComparison(state="first", **ours)
        if old is None
        else builders.incumbent(version=version, sha256=old.evidence.subject.sha256, **ours)
    )
    decision = decide(policy, new.evidence, incumbent=incumbent, decided_at=DECIDED_AT)
    assert decision.passed
    return dataclasses.replace(new, decision=decision)


def run(registry, of: Release, ledger: Ledger, policy=POLICY) -> PromotionResult:
    return promote(registry, of, policy=policy, ledger=ledger)


@pytest.fixture
def registry(ledger: Ledger, first: Release) -> Simulator:
    """Version 1 serves, as a first release."""
    created = Simulator()
    assert run(created, against(None, None, first), ledger).outcome == "promoted"
    return created


def test_release_compared_with_the_champion_is_promoted(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    good = against("1", first, second)
    assert run(registry, good, ledger).outcome == "promoted"
    line = ledger.entries()[-1]
    assert line.compared_with is not None
    assert good.decision.incumbent is not None
    assert line.compared_with.record_sha256 == good.decision.incumbent.digest()
    assert line.compared_with.version == "1"
    tags = registry.versions[1].tags
    assert tags[Tag.COMPARED_WITH] == line.compared_with.record_sha256.hex


@pytest.mark.parametrize(
    ("version", "named"), [("2", "version 2"), (None, "none")], ids=["other", "first"]
)
def test_release_compared_with_another_version_is_refused(
    registry: Simulator, ledger: Ledger, first: Release, second: Release, version, named: str
) -> None:
    late = against(version, first if version else None, second)
    before = dict(registry.aliases)
    outcome = run(registry, late, ledger)
    assert outcome.outcome == "refused"
    assert outcome.reason.startswith("champion is version 1 now, but the comparison was made with")
    assert named in outcome.reason
    assert "decide again" in outcome.reason
    assert registry.aliases == before
    assert len(registry.versions) == 1


def test_comparison_with_another_digest_of_the_champion_is_refused(
    registry: Simulator, ledger: Ledger, second: Release, third: Release
) -> None:
    assert run(registry, against("1", third, second), ledger).outcome == "refused"


def test_second_of_two_candidates_must_be_compared_again(
    registry: Simulator, ledger: Ledger, first: Release, second: Release, third: Release
) -> None:
    item, another = against("1", first, second), against("1", first, third)
    assert run(registry, item, ledger).outcome == "promoted"
    assert "champion is version 2 now" in run(registry, another, ledger).reason
    rollback(registry, NAME, ledger=ledger, reason="wrong")
    assert run(registry, another, ledger).outcome == "promoted"


def test_first_release_is_refused_when_only_the_alias_was_removed(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    del registry.aliases[CHAMPION]
    assert run(registry, against(None, None, second), ledger).outcome == "refused"
    assert run(registry, against("1", first, second), ledger).outcome == "promoted"


def test_promoting_the_champion_again_ignores_the_comparison(
    registry: Simulator, ledger: Ledger, first: Release
) -> None:
    assert run(registry, against(None, None, first), ledger).outcome == "unchanged"
    assert run(registry, against("1", first, first), ledger).outcome == "unchanged"


def test_policy_without_comparison_promotes_without_one(
    registry: Simulator, ledger: Ledger, second: Release
) -> None:
    assert run(registry, second, ledger, builders.policy()).outcome == "promoted"
    assert ledger.entries()[-1].compared_with is None
    assert Tag.COMPARED_WITH not in registry.versions[1].tags


def test_stored_comparison_must_match_the_ledger_when_decided_again(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    """A stricter policy of the service must not be met by who can write to the registry."""
    run(registry, against("1", first, second), ledger)
    model = RegisteredModel(registry, ledger, NAME)
    section = POLICY.incumbent.model_copy(update={"max_latency_ratio": 1.05})
    strict = POLICY.model_copy(update={"incumbent": section})

    def problem(policy) -> str:
        return str(examine(model, "2", history=model.history(), terms=Terms.now(policy)).problem)

    assert problem(POLICY) == "None"
    assert "incumbent_latency_ratio" in problem(strict)
    fast = against("1", first, second).decision.incumbent
    forged = fast.model_copy(update={"latency": fast.champion_latency})
    edited = decide(POLICY, second.evidence, incumbent=forged, decided_at=DECIDED_AT)
    registry.versions[1].beside[f"{RECORDS}/{DECISION}"] = edited.to_json().encode()
    for policy in (POLICY, strict):
        assert "the ledger has one" in problem(policy)


def test_approval_is_refused_when_the_champion_changed(
    registry: Simulator, ledger: Ledger, first: Release, second: Release, third: Release
) -> None:
    model = RegisteredModel(registry, ledger, NAME)
    waits = against("1", first, second, REVIEWED)
    assert run(registry, waits, ledger, REVIEWED).outcome == "passed"
    assert run(registry, waits, ledger, REVIEWED).version == "2"
    assert run(registry, against("1", first, third), ledger).version == "3"
    registry.aliases[CANDIDATE] = "2"
    registry.versions[1].tags[Tag.REVIEW] = "approved"
    (used,) = process_reviews(model, REVIEWED)
    assert used.outcome == "refused"
    assert "champion is version 3 now, but the comparison was made with version 1" in used.reason
    fourth = release(onnx_file(first.onnx_path.with_name("fourth.onnx"), seed=4))
    again = against("3", third, fourth, REVIEWED)
    assert run(registry, again, ledger, REVIEWED).version == "4"
    registry.versions[3].tags[Tag.REVIEW] = "approved"
    assert [(each.outcome, each.version) for each in process_reviews(model, REVIEWED)] == [
        ("promoted", "4")
    ]


def test_edited_comparison_does_not_match_its_decision(first: Release) -> None:
    good = against(None, None, first)
    worse = builders.incumbent(subject_sha256=first.evidence.subject.sha256, outputs=())
    edited = good.decision.model_copy(update={"incumbent": worse})
    with pytest.raises(EvidenceError, match="its evidence and policy give"):
        verify_release(dataclasses.replace(good, decision=edited), policy=POLICY)


@pytest.mark.parametrize("meanwhile", [False, True], ids=["the same serves", "another serves"])
def test_champion_moved_by_hand_needs_a_comparison_with_the_last_champion(
    registry: Simulator,
    ledger: Ledger,
    first: Release,
    second: Release,
    third: Release,
    meanwhile: bool,
) -> None:
    """Whoever approves by a tag and then moves the alias himself is faster than the review."""
    model = RegisteredModel(registry, ledger, NAME)
    assert run(registry, against("1", first, second, REVIEWED), ledger, REVIEWED).version == "2"
    if meanwhile:
        assert run(registry, against("1", first, third), ledger).outcome == "promoted"
        vouched = model.history().approving_entry("3")
        model.write("deployed", "it serves", version="3", about=vouched)
    registry.set_tag(NAME, "2", key=Tag.REVIEW, value="approved")
    registry.set_alias(NAME, CHAMPION, "2")
    (used,) = guard_champion(model, REVIEWED, thoroughly=False)
    expected = ("reverted", "3") if meanwhile else ("accepted", "2")
    assert (used.outcome, used.version) == expected
    assert (
        "champion is version 3 now, but the comparison was made with" in used.reason
    ) is meanwhile


def test_move_by_hand_to_an_earlier_champion_needs_no_comparison(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    run(registry, against("1", first, second), ledger)
    registry.set_alias(NAME, CHAMPION, "1")
    (used,) = guard_champion(RegisteredModel(registry, ledger, NAME), POLICY, thoroughly=False)
    assert (used.outcome, used.version) == ("accepted", "1")
