"""A release is promoted only if it was compared with the current champion."""

from __future__ import annotations

import dataclasses

import pytest

from gate import decide
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


def decide_against(
    version: str | None, old: Release | None, new: Release, policy=POLICY
) -> Release:
    """Return `new` with a decision against `old`, registered as `version` (None: first release)."""
    digests = {
        "subject_sha256": new.evidence.subject.sha256,
        "data_sha256": builders.digest("data"),
    }
    incumbent = (
        ChampionComparison(state="first", **digests)
        if old is None
        else builders.incumbent(version=version, sha256=old.evidence.subject.sha256, **digests)
    )
    decision = decide(policy, new.evidence, incumbent=incumbent, decided_at=DECIDED_AT)
    assert decision.passed
    return dataclasses.replace(new, decision=decision)


def promote_release(registry, release: Release, ledger: Ledger, policy=POLICY) -> PromotionResult:
    return promote(registry, release, policy=policy, ledger=ledger)


@pytest.fixture
def registry(ledger: Ledger, first: Release) -> Simulator:
    """A registry whose version 1 was promoted as a first release."""
    registry = Simulator()
    assert (
        promote_release(registry, decide_against(None, None, first), ledger).outcome == "promoted"
    )
    return registry


def test_release_compared_with_the_champion_is_promoted(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    good = decide_against("1", first, second)
    assert promote_release(registry, good, ledger).outcome == "promoted"
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
    outdated = decide_against(version, first if version else None, second)
    before = dict(registry.aliases)
    outcome = promote_release(registry, outdated, ledger)
    assert outcome.outcome == "refused"
    assert outcome.reason.startswith("champion is version 1 now, but the comparison was made with")
    assert named in outcome.reason
    assert "decide again" in outcome.reason
    assert registry.aliases == before
    assert len(registry.versions) == 1


def test_comparison_with_another_digest_of_the_champion_is_refused(
    registry: Simulator, ledger: Ledger, second: Release, third: Release
) -> None:
    assert (
        promote_release(registry, decide_against("1", third, second), ledger).outcome == "refused"
    )


def test_second_of_two_candidates_must_be_compared_again(
    registry: Simulator, ledger: Ledger, first: Release, second: Release, third: Release
) -> None:
    second_compared, third_compared = (
        decide_against("1", first, second),
        decide_against("1", first, third),
    )
    assert promote_release(registry, second_compared, ledger).outcome == "promoted"
    assert "champion is version 2 now" in promote_release(registry, third_compared, ledger).reason
    rollback(registry, NAME, ledger=ledger, reason="wrong")
    assert promote_release(registry, third_compared, ledger).outcome == "promoted"


def test_first_release_is_refused_when_only_the_alias_was_removed(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    del registry.aliases[CHAMPION]
    assert (
        promote_release(registry, decide_against(None, None, second), ledger).outcome == "refused"
    )
    assert (
        promote_release(registry, decide_against("1", first, second), ledger).outcome == "promoted"
    )


def test_promoting_the_champion_again_ignores_the_comparison(
    registry: Simulator, ledger: Ledger, first: Release
) -> None:
    assert (
        promote_release(registry, decide_against(None, None, first), ledger).outcome == "unchanged"
    )
    assert (
        promote_release(registry, decide_against("1", first, first), ledger).outcome == "unchanged"
    )


def test_stored_comparison_must_match_the_ledger_when_decided_again(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    """A forged comparison in the registry does not meet a stricter policy of the service."""
    promote_release(registry, decide_against("1", first, second), ledger)
    model = RegisteredModel(registry, ledger, NAME)
    section = POLICY.incumbent.model_copy(update={"max_latency_ratio": 1.05})
    strict = POLICY.model_copy(update={"incumbent": section})

    def problem(policy) -> str:
        return str(examine(model, "2", history=model.history(), terms=Terms.now(policy)).problem)

    assert problem(POLICY) == "None"
    assert "incumbent_latency_ratio" in problem(strict)
    fast = decide_against("1", first, second).decision.incumbent
    forged = fast.model_copy(update={"latency": fast.champion_latency})
    edited = decide(POLICY, second.evidence, incumbent=forged, decided_at=DECIDED_AT)
    registry.versions[1].extra_files[f"{RECORDS}/{DECISION}"] = edited.to_json().encode()
    for policy in (POLICY, strict):
        assert "the ledger has one" in problem(policy)


def test_approval_is_refused_when_the_champion_changed(
    registry: Simulator, ledger: Ledger, first: Release, second: Release, third: Release
) -> None:
    model = RegisteredModel(registry, ledger, NAME)
    waiting = decide_against("1", first, second, REVIEWED)
    assert promote_release(registry, waiting, ledger, REVIEWED).outcome == "passed"
    assert promote_release(registry, waiting, ledger, REVIEWED).version == "2"
    assert promote_release(registry, decide_against("1", first, third), ledger).version == "3"
    registry.aliases[CANDIDATE] = "2"
    registry.versions[1].tags[Tag.REVIEW] = "approved"
    (result,) = process_reviews(model, REVIEWED)
    assert result.outcome == "refused"
    assert "champion is version 3 now, but the comparison was made with version 1" in result.reason
    fourth = release(onnx_file(first.onnx_path.with_name("fourth.onnx"), seed=4))
    again = decide_against("3", third, fourth, REVIEWED)
    assert promote_release(registry, again, ledger, REVIEWED).version == "4"
    registry.versions[3].tags[Tag.REVIEW] = "approved"
    assert [(each.outcome, each.version) for each in process_reviews(model, REVIEWED)] == [
        ("promoted", "4")
    ]


def test_edited_comparison_does_not_match_its_decision(first: Release) -> None:
    good = decide_against(None, None, first)
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
    """Version 2 is approved by a tag and made champion by hand before the review runs."""
    model = RegisteredModel(registry, ledger, NAME)
    assert (
        promote_release(
            registry, decide_against("1", first, second, REVIEWED), ledger, REVIEWED
        ).version
        == "2"
    )
    if meanwhile:
        assert (
            promote_release(registry, decide_against("1", first, third), ledger).outcome
            == "promoted"
        )
        approving_entry = model.history().approving_entry("3")
        model.write("deployed", "it serves", version="3", about=approving_entry)
    registry.set_tag(NAME, "2", key=Tag.REVIEW, value="approved")
    registry.set_alias(NAME, CHAMPION, "2")
    (result,) = guard_champion(model, REVIEWED, thoroughly=False)
    expected = ("reverted", "3") if meanwhile else ("accepted", "2")
    assert (result.outcome, result.version) == expected
    assert (
        "champion is version 3 now, but the comparison was made with" in result.reason
    ) is meanwhile


def test_move_by_hand_to_an_earlier_champion_needs_no_comparison(
    registry: Simulator, ledger: Ledger, first: Release, second: Release
) -> None:
    promote_release(registry, decide_against("1", first, second), ledger)
    registry.set_alias(NAME, CHAMPION, "1")
    (result,) = guard_champion(RegisteredModel(registry, ledger, NAME), POLICY, thoroughly=False)
    assert (result.outcome, result.version) == ("accepted", "1")
