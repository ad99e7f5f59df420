"""The service compares what was handed in without a comparison: by the evidence of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gate.decision.champion import Champion
from gate.errors import ResourceGone
from gate.policy.policy import Policy
from gate.policy.sections import ChampionPolicy
from gate.records.evidence import Evidence
from gate.registry.interface import CHAMPION
from gate.registry.load_champion import compare_records
from gate.registry.release import Release
from gate.storage.untrusted_files import RECORD_LIMIT
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME
from tests.registry.signed import Signing
from tests.service.handing_in import World
from tests.service.test_handed_in import edited

DROP = ChampionPolicy(max_accuracy_drop=0.01)
POLICY = builders.policy(promotion="by_service", incumbent=DROP)
REVIEWED = POLICY.model_copy(update={"review": "required"})


def measured(of: Evidence, accuracy: float, *, labels: str | None = "labels") -> Evidence:
    """The evidence, had the file been right so often on these labels."""

    def changed(runtime: Any) -> Any:
        outputs = []
        for output in runtime.outputs:
            found = output.classification.accuracy.model_copy(
                update={"reference": accuracy, "candidate": accuracy}
            )
            classes = output.classification.model_copy(update={"accuracy": found})
            outputs.append(output.model_copy(update={"classification": classes}))
        return runtime.model_copy(update={"outputs": tuple(outputs)})

    digest = None if labels is None else builders.digest(labels)
    source = of.source.model_copy(update={"labels_sha256": digest})
    runtimes = tuple(map(changed, of.runtimes))
    return of.model_copy(update={"runtimes": runtimes, "source": source})


def made(world: World, seed: int, accuracy: float, **more: Any) -> Release:
    """By CI, which compared it with nothing."""
    policy: Policy = more.pop("policy", world.policy)
    release = world.place.release(seed, policy=builders.policy())
    release = replace(release, evidence=measured(release.evidence, accuracy, **more))
    return Signing(world.ci).signed(release, policy)


def begun(folder: Path, policy: Policy = POLICY) -> World:
    """Version 1, right for 97 of 100, was handed in."""
    world = World(folder, policy)
    world.send(made(world, 1, 0.97))
    return world


@pytest.fixture
def world(tmp_path: Path) -> World:
    """And serves."""
    found = begun(tmp_path)
    assert found.look() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    return found


def test_the_first_release_is_one_by_the_ledger(world: World) -> None:
    line = world.place.model().history().promotion_of("1")
    assert line is not None
    assert line.incumbent is not None
    assert line.incumbent.state == "first"
    refusing = DROP.model_copy(update={"first_release": "refuse"})
    other = begun(world.place.folder / "other", POLICY.model_copy(update={"incumbent": refusing}))
    assert other.look() == [("hand_in", "refused", "1")]


def test_what_is_not_worse_is_promoted_and_deployed_once(world: World) -> None:
    release = made(world, 2, 0.965)
    assert release.decision.passed
    assert [check.name for check in release.decision.waived if check.name == "incumbent"]
    number = world.send(release)
    assert world.look() == [("hand_in", "promoted", number), ("deploy", "deployed", number)]
    line = world.place.model().history().promotion_of(number)
    assert line is not None
    assert "compared by the records of both with version 1" in line.reason
    assert line.compared_with is None  # as the decision beside it
    assert line.incumbent is not None
    (answers,) = line.incumbent.outputs
    assert (answers.champion_accuracy, answers.accuracy) == (0.97, 0.965)
    assert answers.agreement is None
    world.restart()
    assert world.look() == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "worse": ({"accuracy": 0.9}, "incumbent_accuracy_drop is 0.07"),
    "other labels": ({"labels": "others"}, "other labels"),
    "no labels": ({"labels": None}, "other labels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_worse_or_can_not_be_compared_is_refused(world: World, case: str) -> None:
    changes, message = REFUSED[case]
    number = world.send(made(world, 2, **{"accuracy": 0.97, **changes}))
    assert world.look() == [("hand_in", "refused", number)]
    assert message in world.refusal(number)
    assert (world.place.champion, world.live) == ("1", "1")


def test_what_nobody_can_say_without_running_both_is_an_error(tmp_path: Path) -> None:
    agreement = ChampionPolicy(min_agreement=0.9)
    world = begun(tmp_path, POLICY.model_copy(update={"incumbent": agreement}))
    world.look()
    number = world.send(made(world, 2, 0.97))
    assert world.look() == [("hand_in", "refused", number)]
    assert "incumbent_agreement was not measured" in world.refusal(number)


def test_the_service_asks_where_ci_s_policy_does_not(world: World) -> None:
    """Decided anew by another policy, and with a comparison: still the one that was signed."""
    careless = builders.policy()
    good = world.send(made(world, 2, 0.97, policy=careless), policy=careless)
    assert world.look() == [("hand_in", "promoted", good), ("deploy", "deployed", good)]
    worse = world.send(made(world, 3, 0.5, policy=careless), policy=careless)
    assert world.look() == [("hand_in", "refused", worse)]


def test_evidence_of_the_champion_that_does_not_come_refuses_nothing(world: World) -> None:
    number, beside = world.send(made(world, 2, 0.97)), world.place.stored("1").beside
    place = "gate/evidence.json"
    whole = beside[place]
    other = edited("measured_at", "2026-11-22T00:00:00Z")(whole)
    for spoiled in (other, b"{}", whole + b" " * RECORD_LIMIT, None):
        del beside[place]
        beside.update({} if spoiled is None else {place: spoiled})
        assert ("hand_in", "MismatchUnconfirmed", None) in world.look()
        assert world.about(number) == []
        assert "not judged yet" in world.page(number)
        beside[place] = whole
    assert ("hand_in", "promoted", number) in world.look()


def test_a_champion_that_was_deleted_is_named_and_refuses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, registry = world.send(made(world, 2, 0.97)), world.place.registry
    registry.delete_alias(NAME, CHAMPION)
    fetch = registry.fetch

    def fetched(name: str, version: str, *arguments: Any, **options: Any) -> Any:
        if version == "1":
            raise ResourceGone("there is no version 1")
        return fetch(name, version, *arguments, **options)

    monkeypatch.setattr(registry, "fetch", fetched)
    assert ("hand_in", "MismatchUnconfirmed", None) in world.look()
    assert "version 1 of digits, which served last" in world.page(number)
    monkeypatch.undo()
    assert ("hand_in", "promoted", number) in world.look()


def reviewed(folder: Path, *accuracies: float) -> World:
    """One of them serves, and the others wait for their review."""
    world = begun(folder, REVIEWED)
    world.look()
    world.place.tag("1", "approved")
    world.look()
    for seed, accuracy in enumerate(accuracies, 2):
        world.send(made(world, seed, accuracy))
        world.look()
    return world


def test_who_approves_and_points_himself_is_right_with_a_comparison_of_the_service(
    tmp_path: Path,
) -> None:
    world = reviewed(tmp_path, 0.97)
    world.place.tag("2", "approved")
    world.place.point("2")
    assert ("guard", "accepted", "2") in world.look()


@pytest.mark.further
def test_pointing_a_second_time_skips_no_comparison(tmp_path: Path) -> None:
    world = reviewed(tmp_path, 0.965, 0.99)
    world.place.tag("3", "approved")
    assert ("review", "promoted", "3") in world.look()
    world.place.tag("2", "approved")
    for _ in range(3):
        world.place.point("2")
        world.look()
        assert (world.place.champion, world.live) == ("3", "3")


def test_without_a_comparison_nothing_is_promoted_past_the_service(world: World) -> None:
    release = made(world, 2, 0.97)
    done = promote(world.place.registry, release, policy=POLICY, ledger=world.place.ledger)
    assert done.outcome == "refused"
    assert "made with version none" in done.reason


def test_what_was_promoted_without_a_comparison_is_not_deployed(world: World) -> None:
    """By a policy that did not ask, where the ledger is; the service's own does."""
    careless = builders.policy()
    release = made(world, 2, 0.97, policy=careless)
    ledger = world.place.ledger
    done = promote(world.place.registry, release, policy=careless, ledger=ledger)
    assert done.outcome == "promoted"
    world.look()
    assert world.live == "1"
    assert any(
        "it was not compared with the champion" in entry.reason for entry in ledger.entries()
    )


def test_evidence_on_other_samples_says_nothing() -> None:
    old, new = (measured(builders.evidence(), each) for each in (0.97, 0.97))
    subject = new.subject.model_copy(update={"sha256": builders.digest("another file")})
    other = new.dataset.model_copy(update={"sha256": builders.digest("others")})
    champion = Champion(state="proven", version="1", sha256=old.subject.sha256, evidence=old)
    found = compare_records(champion, new.model_copy(update={"subject": subject, "dataset": other}))
    assert found.state == "incomparable"
    assert "other samples" in str(found.absent)
    assert compare_records(champion, old).is_same_file
    # Right so often on labels that nobody names is no number to compare.
    old, new = (measured(builders.evidence(), each, labels=None) for each in (0.97, 0.97))
    champion = replace(champion, evidence=old)
    new = new.model_copy(update={"subject": subject})
    assert compare_records(champion, new).state == "incomparable"
