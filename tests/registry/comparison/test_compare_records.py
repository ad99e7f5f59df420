"""The service compares a submission without a comparison by the evidence of both versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate import Evidence, Policy
from gate.decision.champion import Champion
from gate.errors import ResourceGone
from gate.policy.sections import ChampionPolicy
from gate.registry.interface import CHAMPION
from gate.registry.load_champion import compare_records
from gate.registry.release import Release
from gate.storage.untrusted_files import RECORD_LIMIT
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME
from tests.registry.signed import Signing
from tests.service.signed_submissions import SigningService
from tests.service.test_submissions import edit_json_field

DROP = ChampionPolicy(max_accuracy_drop=0.01)
POLICY = builders.policy(promotion="by_service", incumbent=DROP)
REVIEWED = POLICY.model_copy(update={"review": "required"})


def with_accuracy(
    evidence: Evidence, accuracy: float, *, labels: str | None = "labels"
) -> Evidence:
    """Return the evidence with this accuracy on these labels."""

    def set_accuracy(runtime: Any) -> Any:
        outputs = []
        for output in runtime.outputs:
            result = output.classification.accuracy.model_copy(
                update={"reference": accuracy, "candidate": accuracy}
            )
            classes = output.classification.model_copy(update={"accuracy": result})
            outputs.append(output.model_copy(update={"classification": classes}))
        return runtime.model_copy(update={"outputs": tuple(outputs)})

    digest = None if labels is None else builders.digest(labels)
    source = evidence.source.model_copy(update={"labels_sha256": digest})
    runtimes = tuple(map(set_accuracy, evidence.runtimes))
    return evidence.model_copy(update={"runtimes": runtimes, "source": source})


def make_release(service: SigningService, seed: int, accuracy: float, **more: Any) -> Release:
    """Make a signed release of a CI that compared it with no champion."""
    policy: Policy = more.pop("policy", service.policy)
    release = service.setup.release(seed, policy=builders.policy())
    release = replace(release, evidence=with_accuracy(release.evidence, accuracy, **more))
    return Signing(service.ci).signed(release, policy)


def create_service(folder: Path, policy: Policy = POLICY) -> SigningService:
    """Create a service with a submitted version 1, whose accuracy is 0.97."""
    service = SigningService(folder, policy)
    service.submit(make_release(service, 1, 0.97))
    return service


@pytest.fixture
def service(tmp_path: Path) -> SigningService:
    """A service that serves version 1, whose accuracy is 0.97."""
    result = create_service(tmp_path)
    assert result.reconcile_once() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    return result


def test_first_release_is_determined_by_the_ledger(service: SigningService) -> None:
    line = service.setup.model().history().promotion_of("1")
    assert line is not None
    assert line.incumbent is not None
    assert line.incumbent.state == "first"
    refusing = DROP.model_copy(update={"first_release": "refuse"})
    second = create_service(
        service.setup.folder / "other", POLICY.model_copy(update={"incumbent": refusing})
    )
    assert second.reconcile_once() == [("hand_in", "refused", "1")]


def test_release_that_is_not_worse_is_promoted_and_deployed_once(service: SigningService) -> None:
    release = make_release(service, 2, 0.965)
    assert release.decision.passed
    assert [check.name for check in release.decision.waived if check.name == "incumbent"]
    number = service.submit(release)
    assert service.reconcile_once() == [
        ("hand_in", "promoted", number),
        ("deploy", "deployed", number),
    ]
    line = service.setup.model().history().promotion_of(number)
    assert line is not None
    assert "compared by the records of both with version 1" in line.reason
    assert line.compared_with is None  # the same as in the stored decision
    assert line.incumbent is not None
    (answers,) = line.incumbent.outputs
    assert (answers.champion_accuracy, answers.accuracy) == (0.97, 0.965)
    assert answers.agreement is None
    service.restart()
    assert service.reconcile_once() == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "worse": ({"accuracy": 0.9}, "incumbent_accuracy_drop is 0.07"),
    "other labels": ({"labels": "others"}, "other labels"),
    "no labels": ({"labels": None}, "other labels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_worse_or_incomparable_release_is_refused(service: SigningService, case: str) -> None:
    changes, message = REFUSED[case]
    number = service.submit(make_release(service, 2, **{"accuracy": 0.97, **changes}))
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert message in service.refusal(number)
    assert (service.setup.champion, service.live) == ("1", "1")


def test_required_agreement_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    agreement = ChampionPolicy(min_agreement=0.9)
    service = create_service(tmp_path, POLICY.model_copy(update={"incumbent": agreement}))
    service.reconcile_once()
    number = service.submit(make_release(service, 2, 0.97))
    assert service.reconcile_once() == [("hand_in", "refused", number)]
    assert "incumbent_agreement was not measured" in service.refusal(number)


def test_service_policy_requires_a_comparison_that_ci_did_not(service: SigningService) -> None:
    """The verdict of a policy without a comparison is compared by the service's policy."""
    policy_without_comparison = builders.policy()
    good = service.submit(
        make_release(service, 2, 0.97, policy=policy_without_comparison),
        policy=policy_without_comparison,
    )
    assert service.reconcile_once() == [("hand_in", "promoted", good), ("deploy", "deployed", good)]
    worse = service.submit(
        make_release(service, 3, 0.5, policy=policy_without_comparison),
        policy=policy_without_comparison,
    )
    assert service.reconcile_once() == [("hand_in", "refused", worse)]


def test_unreadable_champion_evidence_delays_the_submission(service: SigningService) -> None:
    number, extra_files = (
        service.submit(make_release(service, 2, 0.97)),
        service.setup.stored("1").extra_files,
    )
    path = "gate/evidence.json"
    original = extra_files[path]
    edited_record = edit_json_field("measured_at", "2026-11-22T00:00:00Z")(original)
    for damaged in (edited_record, b"{}", original + b" " * RECORD_LIMIT, None):
        del extra_files[path]
        extra_files.update({} if damaged is None else {path: damaged})
        assert ("hand_in", "MismatchUnconfirmed", None) in service.reconcile_once()
        assert service.actions_of(number) == []
        assert "not judged yet" in service.page(number)
        extra_files[path] = original
    assert ("hand_in", "promoted", number) in service.reconcile_once()


@pytest.mark.further
def test_deleted_champion_delays_the_submission(
    service: SigningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, registry = service.submit(make_release(service, 2, 0.97)), service.setup.registry
    registry.delete_alias(NAME, CHAMPION)
    fetch = registry.fetch

    def fetch_all_but_version_1(name: str, version: str, *arguments: Any, **options: Any) -> Any:
        if version == "1":
            raise ResourceGone("there is no version 1")
        return fetch(name, version, *arguments, **options)

    monkeypatch.setattr(registry, "fetch", fetch_all_but_version_1)
    assert ("hand_in", "MismatchUnconfirmed", None) in service.reconcile_once()
    assert "version 1 of digits, which served last" in service.page(number)
    monkeypatch.undo()
    assert ("hand_in", "promoted", number) in service.reconcile_once()


def create_reviewed_service(folder: Path, *accuracies: float) -> SigningService:
    """Create a service that serves version 1; one version per accuracy waits for review."""
    service = create_service(folder, REVIEWED)
    service.reconcile_once()
    service.setup.tag("1", "approved")
    service.reconcile_once()
    for seed, accuracy in enumerate(accuracies, 2):
        service.submit(make_release(service, seed, accuracy))
        service.reconcile_once()
    return service


def test_champion_moved_by_hand_after_approval_is_accepted(
    tmp_path: Path,
) -> None:
    service = create_reviewed_service(tmp_path, 0.97)
    service.setup.tag("2", "approved")
    service.setup.move_champion("2")
    assert ("guard", "accepted", "2") in service.reconcile_once()


@pytest.mark.further
def test_repeated_move_by_hand_does_not_skip_the_comparison(tmp_path: Path) -> None:
    service = create_reviewed_service(tmp_path, 0.965, 0.99)
    service.setup.tag("3", "approved")
    assert ("review", "promoted", "3") in service.reconcile_once()
    service.setup.tag("2", "approved")
    for _ in range(3):
        service.setup.move_champion("2")
        service.reconcile_once()
        assert (service.setup.champion, service.live) == ("3", "3")


def test_version_promoted_without_a_comparison_is_not_deployed(service: SigningService) -> None:
    """The promoting policy requires no comparison; the policy of the service does."""
    policy_without_comparison = builders.policy()
    release = make_release(service, 2, 0.97, policy=policy_without_comparison)
    ledger = service.setup.ledger
    result = promote(
        service.setup.registry, release, policy=policy_without_comparison, ledger=ledger
    )
    assert result.outcome == "promoted"
    service.reconcile_once()
    assert service.live == "1"
    assert any(
        "it was not compared with the champion" in entry.reason for entry in ledger.entries()
    )


def test_evidence_on_other_samples_is_incomparable() -> None:
    old, new = (with_accuracy(builders.evidence(), each) for each in (0.97, 0.97))
    subject = new.subject.model_copy(update={"sha256": builders.digest("another file")})
    second = new.dataset.model_copy(update={"sha256": builders.digest("others")})
    champion = Champion(state="proven", version="1", sha256=old.subject.sha256, evidence=old)
    result = compare_records(
        champion, new.model_copy(update={"subject": subject, "dataset": second})
    )
    assert result.state == "incomparable"
    assert "other samples" in str(result.absent)
    assert compare_records(champion, old).is_same_file
    # Two accuracies without a labels digest cannot be compared.
    old, new = (with_accuracy(builders.evidence(), each, labels=None) for each in (0.97, 0.97))
    champion = replace(champion, evidence=old)
    new = new.model_copy(update={"subject": subject})
    assert compare_records(champion, new).state == "incomparable"
