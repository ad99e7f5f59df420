"""Signed reviews: the service counts statements, and no tag approves; a no needs no signature."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gate.deploy.store import ModelStore
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    PolicyError,
    RegistryError,
    RegistryUnavailable,
)
from gate.policy.policy import Policy
from gate.policy.sections import ReviewTag
from gate.registry.eligibility import TrustFile
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.release import Release
from gate.registry.reviews import STATEMENT_TAG, ReviewSubmission
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import Failed
from gate.service.reconciler import Reconciler
from gate.service.submissions import process_reviews
from gate.signing.keys import SigningKey
from gate.signing.predicates import Word
from gate.signing.trust import Trust, TrustedKey
from gate.signing.verification import StatementPair
from tests import builders
from tests.registry.releases import NAME
from tests.registry.signed import Signing, save, trust_in
from tests.registry.simulator import Watched
from tests.service.handing_in import World
from tests.service.places import AUTOMATIC, REVIEWED, SIGNED, Place

LINE = "gate/decision.json"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    names = ("alice", "bob", "ci", "mallory")
    return {name: SigningKey.make(folder / f"{name}.pem") for name in names}


class Reviewing(Place):
    """Version 1 passed and waits for signed approvals."""

    def __init__(self, folder: Path, keys: dict[str, SigningKey]) -> None:
        super().__init__(folder, SIGNED)
        self.keys = keys
        self.promote(1)

    def release(self, seed: int, *, days: float = 0.0, policy: Policy | None = None) -> Release:
        """Signed by the key of ci, as it was when this began."""
        policy = policy or self.policy
        by = Signing(self.keys["ci"], at=self.begun.isoformat(timespec="seconds"))
        return by.signed(super().release(seed, days=days, policy=policy), policy)

    def trust(self, **more: Any) -> Trust:
        def trusted(*names: str) -> tuple[TrustedKey, ...]:
            return tuple(TrustedKey(**self.keys[name].public.to_plain()) for name in names)

        fields = {"measurers": trusted("ci"), "reviewers": trusted("alice", "bob", "ci")}
        return Trust(**{**fields, **more})

    def sign(self, by: str, word: Word = "approved", number: str = "1", **more: Any) -> None:
        """As gate approve does."""
        of = ReviewSubmission.read(self.registry, NAME, number)
        of.review(self.registry, word, self.keys[by], **more)

    def state_only(self, by: str, word: Word, *, number: str = "1", **more: Any) -> None:
        """A statement, and no tag beside it."""
        of = ReviewSubmission.read(self.registry, NAME, number).of
        at = more.pop("at", datetime.now(UTC))
        key = self.keys[by]
        text = of.signed(word, key, at=at, **more).compact
        self.registry.set_tag(NAME, number, key=f"{STATEMENT_TAG}{key.public.short}", value=text)

    def look(self, *, trust: Trust | None = None) -> list[Any]:
        taken = process_reviews(self.model(), self.policy, trust=lambda: trust or self.trust())
        return [one if isinstance(one, Failed) else (one.outcome, one.version) for one in taken]

    def result(self, number: str = "1") -> str:
        return self.stored(number).tags.get(Tag.REVIEW_RESULT, "")

    def status(self, number: str = "1") -> str:
        return self.stored(number).description.partition("\n")[0]


@pytest.fixture
def place(tmp_path: Path, keys: dict[str, SigningKey]) -> Reviewing:
    return Reviewing(tmp_path, keys)


def test_what_passed_waits_and_the_page_says_for_what(place: Reviewing) -> None:
    assert place.lines() == [("passed", "1")]
    (line,) = place.ledger.entries()
    assert line.reason.endswith(
        "waits for review: gate approve digits 1 --key KEY, or gate reject with the same arguments"
    )
    assert place.status().startswith("Status: waits for review: gate approve digits 1 --key KEY")
    assert place.look() == []
    assert place.result() == ""


def test_a_signed_approval_promotes_and_the_line_says_by_whose_key(place: Reviewing) -> None:
    place.sign("alice", comment="looked at the sevens")
    assert place.look() == [("promoted", "1")]
    line = place.ledger.entries()[-1]
    alice = place.keys["alice"].public
    assert line.approvers == (alice.key_id,)
    assert line.comment == "looked at the sevens"
    assert line.reason == (
        f'version 1 passed and was approved by alice ({alice.short}): "looked at the sevens"'
    )
    assert place.champion == "1"
    assert f'approved by the key {alice.short}: "looked at the sevens"' in place.status()
    assert place.result().startswith("approved: became champion at 20")
    assert place.look() == []


def test_four_eyes(place: Reviewing) -> None:
    by_measurer(place)
    trust = place.trust(reviewers_threshold=2)
    place.sign("alice")
    watched = place.registry = Watched(place.registry)  # type: ignore[assignment]
    for _ in range(3):
        assert place.look(trust=trust) == []
    assert watched.calls.count("set_tag") == 1  # said once
    place.registry = watched.inner
    assert place.result().startswith("1 of 2 signed approvals (alice (")
    place.sign("ci")
    assert place.look(trust=trust) == []
    assert "this key also signed the verdict" in place.result()
    place.sign("bob")
    assert place.look(trust=trust) == [("promoted", "1")]
    line = place.ledger.entries()[-1]
    assert set(line.approvers) == {place.keys[name].public.key_id for name in ("alice", "bob")}
    assert "approved by the keys " in place.status()


def by_measurer(place: Reviewing) -> None:
    """The line says whose key vouched for the verdict."""
    waiting = place.ledger.entries()[-1]
    signers = (place.keys["ci"].public.key_id,)
    place.ledger.append(waiting.model_copy(update={"signers": signers, "parent": None}))


@pytest.mark.parametrize("tag", [ReviewTag(), ReviewTag(name="Approval", approved="Approved")])
def test_a_tag_alone_approves_nothing_and_is_answered(
    tmp_path: Path, keys: dict[str, SigningKey], tag: ReviewTag
) -> None:
    place = Reviewing(tmp_path, keys)
    place.policy = builders.policy(review="signed", review_tag=tag)
    place.tag("1", tag.approved, tag.name)
    assert place.look() == []
    assert place.result() == (
        "0 of 1 signed approvals. A tag approves nothing here: gate approve digits 1 --key KEY"
    )
    assert place.champion is None


@pytest.mark.parametrize("key", ["gate.review", "Approval"])
def test_a_tag_rejects(place: Reviewing, key: str) -> None:
    place.sign("alice")
    place.tag("1", "too dark", Tag.REVIEW_COMMENT)
    place.tag("1", "Rejected!", key)
    place.policy = builders.policy(review="signed", review_tag=ReviewTag(name="approval"))
    assert place.look() == [("rejected", "1")]
    place.policy = SIGNED  # another one would have other digests
    assert place.ledger.entries()[-1].comment == "too dark"
    assert place.promote(1).outcome == "refused"


@pytest.mark.parametrize("way", ["gate reject", "a statement alone"])
def test_a_signed_no_rejects_and_the_line_says_whose(place: Reviewing, way: str) -> None:
    place.sign("bob")
    if way == "gate reject":
        place.sign("alice", "rejected", comment="too dark")
        assert place.stored("1").tags[Tag.REVIEW] == "rejected"
    else:
        place.state_only("alice", "rejected", comment="too dark")
    assert place.look() == [("rejected", "1")]
    line = place.ledger.entries()[-1]
    assert line.reason == (
        f'version 1 was rejected by alice ({place.keys["alice"].public.short}): "too dark"'
    )
    assert line.comment == "too dark"
    assert line.approvers == ()
    assert CANDIDATE not in place.registry.aliases
    assert place.result().startswith("rejected at 20")
    assert place.promote(1).outcome == "refused"


def test_no_weather_hides_a_no(place: Reviewing) -> None:
    place.sign("mallory", "rejected")

    def away(*_: object, **_options: object) -> None:
        raise RegistryError("the store is away")

    place.registry.fetch = away  # type: ignore[method-assign]
    assert place.look() == [("rejected", "1")]


def test_without_trust_nothing_is_approved_and_the_page_says_why(place: Reviewing) -> None:
    place.sign("alice")
    place.tag("1", "approved")
    assert list(process_reviews(place.model(), SIGNED)) == []
    assert "Start it with --trust FILE" in place.result()
    assert place.champion is None
    place.tag("1", "rejected")
    assert [one.outcome for one in process_reviews(place.model(), SIGNED)] == ["rejected"]  # type: ignore[union-attr]


def test_while_the_trust_is_damaged_nothing_is_approved_and_a_no_is_heard(place: Reviewing) -> None:
    def damaged() -> Trust:
        raise PolicyError("trust.yaml is no YAML")

    place.sign("alice")
    (failed,) = process_reviews(place.model(), SIGNED, trust=damaged)
    assert isinstance(failed, Failed)
    assert place.result() == ""
    place.tag("1", "rejected")
    (taken,) = process_reviews(place.model(), SIGNED, trust=damaged)
    assert taken.outcome == "rejected"  # type: ignore[union-attr]


def test_an_exchanged_decision_is_answered_and_one_whole_again_promotes(place: Reviewing) -> None:
    beside = place.stored("1").beside
    whole = beside[LINE]
    place.promote(2)
    beside[LINE] = place.stored("2").beside[LINE]
    place.registry.aliases[CANDIDATE] = "1"
    place.state_only("alice", "approved")
    assert place.look() == []
    assert "it was exchanged, and nothing can be approved" in place.result()
    beside[LINE] = b"{}"
    assert place.look() == []
    beside[LINE] = whole
    assert place.look() == []
    assert "it is about file" in place.result()
    place.sign("alice")
    assert place.look() == [("promoted", "1")]


def test_a_decision_that_is_exchanged_after_the_count_is_none_that_was_approved(
    place: Reviewing,
) -> None:
    """The statements are on what was read first; what is downloaded with the file is another."""
    place.sign("alice")
    download = place.registry.download

    def other(*arguments: Any, **options: Any) -> Path:
        path = download(*arguments, **options)
        decision = path.parent / LINE
        text = decision.read_text()
        decision.write_text(text.replace('"decided_at": "20', '"decided_at": "21'))
        return path

    place.registry.download = other  # type: ignore[method-assign]
    assert place.look() == [("refused", "1")]
    assert "the decision that was approved" in place.ledger.entries()[-1].reason
    assert place.champion is None


def test_one_whose_records_can_not_be_had_now_stands_in_no_other_s_way(place: Reviewing) -> None:
    place.sign("alice")
    place.promote(2)
    place.sign("alice", number="2")
    fetch = place.registry.fetch

    def away(name: str, number: str, *rest: Any, **options: Any) -> None:
        if number == "1":
            raise RegistryError("the store is away")
        fetch(name, number, *rest, **options)

    place.registry.fetch = away  # type: ignore[method-assign]
    failed, promoted = place.look()
    assert isinstance(failed, Failed)
    assert promoted == ("promoted", "2")

    def gone(*_: object, **_options: object) -> None:
        raise RegistryUnavailable("no answer")

    place.registry.fetch = gone  # type: ignore[method-assign]
    with pytest.raises(RegistryUnavailable):
        place.look()


def test_approval_waives_nothing(place: Reviewing) -> None:
    place.sign("alice")
    place.stored("1").data += b"\0"
    assert place.look() == [("refused", "1")]
    assert place.champion is None


def test_an_approval_of_before_a_rollback_brings_nothing_back(place: Reviewing) -> None:
    """Whoever may edit the model can delete the rollback's tag, and hand the bytes in again."""
    place.state_only("alice", "approved", at=datetime.now(UTC) - timedelta(hours=1))
    assert place.look() == [("promoted", "1")]
    place.promote(2)
    place.state_only("bob", "approved", number="2")
    assert place.look() == [("promoted", "2")]
    rollback(place.registry, NAME, ledger=place.ledger, reason="worse")
    place.stored("2").tags.pop(Tag.ROLLED_BACK)
    assert place.promote(2).outcome == "passed"
    assert place.look() == []
    assert "sign again" in place.result("2")
    place.state_only("bob", "approved", number="2", at=datetime.now(UTC) + timedelta(seconds=2))
    assert place.look() == [("promoted", "2")]


def test_champion_by_hand_goes_back_from_what_waits_whatever_its_tag(place: Reviewing) -> None:
    place.sign("alice")
    place.look()
    place.promote(2)
    place.tag("2", "approved")
    place.point("2")
    (taken,) = guard_champion(place.model(), SIGNED, thoroughly=False)
    assert (taken.outcome, place.champion) == ("reverted", "1")
    assert "no entry with a signed approval" in taken.reason
    assert [line.version for line in place.model().history().waiting] == ["2"]
    assert place.status("2").startswith("Status: waits for review: gate approve digits 2")
    place.sign("bob", number="2")
    assert place.look() == [("promoted", "2")]


@pytest.mark.parametrize("mode", ["automatic", "required"])
def test_a_promotion_by_another_mode_is_no_signed_approval(
    tmp_path: Path, keys: dict[str, SigningKey], mode: str
) -> None:
    place = Reviewing(tmp_path, keys)
    place.sign("alice")
    place.look()
    other = {"automatic": AUTOMATIC, "required": REVIEWED}[mode]
    place.promote(2, policy=other)
    place.tag("2", "approved")
    if mode == "required":
        assert [t.outcome for t in process_reviews(place.model(), other)] == ["promoted"]  # type: ignore[union-attr]
    assert place.champion == "2"
    (taken,) = guard_champion(place.model(), SIGNED, thoroughly=True)
    assert (taken.outcome, place.champion) == ("reverted", "1")
    place.state_only("bob", "approved", number="2", at=datetime.now(UTC) + timedelta(seconds=2))
    assert place.look() == [("promoted", "2")]


def test_an_approval_lasts_while_its_version_serves_or_did(place: Reviewing) -> None:
    """Also where it was never deployed: pointed away and back by hand, and rolled back to."""
    place.sign("alice")
    place.look()
    place.promote(2)
    place.sign("bob", number="2")
    place.look()
    place.point("1")
    (taken,) = guard_champion(place.model(), SIGNED, thoroughly=True)
    assert taken.outcome == "accepted"
    assert guard_champion(place.model(), SIGNED, thoroughly=True) == []
    assert place.promote(1).outcome == "unchanged"
    place.point("2")
    guard_champion(place.model(), SIGNED, thoroughly=True)
    rollback(place.registry, NAME, ledger=place.ledger, reason="worse")
    assert guard_champion(place.model(), SIGNED, thoroughly=True) == []
    assert place.champion == "1"
    assert place.ledger.entries()[-1].approvers == (place.keys["alice"].public.key_id,)


def test_the_service_counts_by_its_trust(place: Reviewing, tmp_path: Path) -> None:
    by_measurer(place)
    store = ModelStore(tmp_path / "store")
    place.sign("alice")
    path = tmp_path / "trust.yaml"
    path.write_text(place.trust().to_json())
    looks = [
        Reconciler(place.registry, place.ledger, SIGNED, store=store, trust=trust)
        for trust in (None, TrustFile(path))
    ]
    assert looks[0](NAME, cause="timer") == []
    assert "--trust" in place.result()
    outcomes = [one.outcome for one in looks[1](NAME, cause="timer")]  # type: ignore[union-attr]
    assert outcomes == ["promoted", "deployed"]
    assert place.registry.aliases[CHAMPION] == "1"
    live = store.live(NAME)
    assert live is not None


@pytest.mark.parametrize("spoil", ["verdict", "tag"])
def test_what_makes_no_sense_is_not_signed(place: Reviewing, spoil: str) -> None:
    if spoil == "tag":
        place.stored("1").tags[Tag.SHA256] = "0" * 64
        with pytest.raises(DigestMismatch, match="One of them was replaced"):
            place.sign("alice")
    else:
        beside = place.stored("1").beside
        beside[LINE] = beside[LINE].replace(b'"verdict": "PASS"', b'"verdict": "FAIL"')
        with pytest.raises(EvidenceError, match="only a PASS can be approved"):
            place.sign("alice")
    assert not any(key.startswith(STATEMENT_TAG) for key in place.stored("1").tags)
    place.sign("alice", "rejected")
    assert place.look() == [("rejected", "1")]


def reviewers(*keys: SigningKey) -> tuple[TrustedKey, ...]:
    return tuple(TrustedKey(**key.public.to_plain()) for key in keys)


def approved(world: World, number: str, by: SigningKey) -> None:
    ReviewSubmission.read(world.place.registry, NAME, number).review(
        world.place.registry, "approved", by
    )


def test_who_measured_approves_nothing_though_another_signed_the_verdict(tmp_path: Path) -> None:
    world = World(tmp_path, SIGNED)
    gpu = world.stranger
    save(trust_in(world.ci, gpu, reviewers=reviewers(gpu)), world.trust)
    made = world.release(1)
    measured = Signing(gpu).signed(made, world.policy).statements
    assert measured is not None
    assert made.statements is not None
    both = StatementPair(measured.evidence, made.statements.decision)
    number = world.send(replace(made, statements=both))
    assert world.look() == [("hand_in", "passed", number)]
    line = world.place.ledger.entries()[-1]
    assert (line.signers, line.measured_by) == (
        (world.ci.public.key_id,), (gpu.public.key_id,),
    )  # fmt: skip
    approved(world, number, gpu)
    assert world.look() == []
    assert (
        "this key also signed the verdict" in (world.place.stored(number).tags[Tag.REVIEW_RESULT])
    )
    assert world.place.champion is None


def test_what_a_revoked_reviewer_approved_is_not_gone_back_to(
    tmp_path: Path, keys: dict[str, SigningKey]
) -> None:
    world = World(tmp_path, SIGNED)
    by = reviewers(keys["alice"], keys["bob"])
    save(trust_in(world.ci, reviewers=by), world.trust)
    for seed, name in ((1, "alice"), (2, "bob")):
        number = world.send(world.release(seed))
        world.look()
        approved(world, number, keys[name])
        assert ("review", "promoted", number) in world.look()
    revoked = (keys["alice"].public.key_id,)
    save(trust_in(world.ci, reviewers=by, revoked=revoked), world.trust)
    world.place.point("1")
    assert world.look() == [("guard", "reverted", "2")]
    world.place.tag("2", "rejected")
    assert world.look()[0] == ("guard", "reverted", None)


def test_what_was_approved_too_late_can_be_handed_in_again(tmp_path: Path) -> None:
    world = World(tmp_path, REVIEWED)
    first = world.release(1)
    for made in (first, world.release(2)):
        world.send(made)
        world.look()
    world.place.tag("1", "approved")
    assert world.look() == [("review", "refused", "1")]
    assert "hand this one in again" in world.page("1")
    number = world.send(first)
    assert world.look() == [("hand_in", "passed", number)]
    world.place.tag(number, "approved")
    assert world.look()[0] == ("review", "promoted", number)
