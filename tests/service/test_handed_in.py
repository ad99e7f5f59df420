"""What is handed in by somebody who may write to the registry, and to nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gate.errors import ArtifactMissing, RegistryUnavailable
from gate.golden.manifest import Origin
from gate.ledger.ledger import Ledger
from gate.policy.sections import ChampionPolicy
from gate.registry import alias
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import MismatchMemory, Reading
from gate.registry.release import EvaluatedFile, GoldenFolder, Release
from gate.signing.statement import Resource, SignedStatement, Statement
from gate.signing.trust import Trust
from gate.signing.verification import StatementPair
from tests import builders
from tests.golden_vectors import vectors
from tests.registry.promoting import promote, submit
from tests.registry.releases import NAME, failing_release, onnx_file
from tests.registry.signed import Signing, save, trust_in
from tests.registry.simulator import Watched
from tests.service.handing_in import TWINNED, World
from tests.service.places import REVIEWED

Forge = Callable[[World], str]


@pytest.fixture
def world(tmp_path) -> World:
    """Version 1 was handed in, serves and is deployed."""
    made = World(tmp_path)
    made.send(made.release(1))
    assert made.look() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    return made


def test_what_a_trusted_key_vouches_for_is_promoted_and_deployed_once(world: World) -> None:
    number = world.send(world.release(2))
    assert world.page(number).startswith("Status: handed in, waits for the service")
    assert world.look() == [("hand_in", "promoted", "2"), ("deploy", "deployed", "2")]
    assert (world.place.champion, world.live) == ("2", "2")
    (line,) = [
        e for e in world.place.ledger.entries() if (e.action, e.version) == ("promoted", "2")
    ]
    assert line.signers == (world.ci.public.key_id,)
    assert "signed by ci" in line.reason
    assert world.page(number).startswith("Status: champion since ")
    assert world.look() == []


def test_all_that_goes_beside_a_file_is_promoted_with_it(world: World) -> None:
    for seed, make in ((2, world.with_golden), (3, world.with_spec)):
        number = world.send(make(seed))
        assert world.look()[0] == ("hand_in", "promoted", number)
        line = world.place.model().history().approving_entry(number)
        assert line is not None
        assert (line.golden_sha256 is not None, line.preprocess_sha256 is not None) == (
            seed == 2, seed == 3,
        )  # fmt: skip
        assert line.extent is not None


def test_what_the_policy_wants_reviewed_waits(tmp_path) -> None:
    world = World(tmp_path, REVIEWED)
    number = world.send(world.release(1))
    assert world.look() == [("hand_in", "passed", number)]
    assert world.place.champion is None
    assert world.page(number).startswith("Status: waits for review")
    assert world.look() == []
    world.place.tag(number, "approved")
    assert world.look() == [("review", "promoted", number), ("deploy", "deployed", number)]
    assert world.place.ledger.entries()[-2].signers == (world.ci.public.key_id,)


def test_a_key_that_is_revoked_while_it_waits_is_heard_no_more(tmp_path) -> None:
    world = World(tmp_path, REVIEWED)
    number = world.send(world.release(1))
    world.look()
    save(trust_in(world.ci, world.stranger, revoked=(world.ci.public.key_id,)), world.trust)
    world.place.tag(number, "approved")
    assert world.look() == [("review", "refused", number)]
    assert "is revoked" in world.place.ledger.entries()[-1].reason
    assert world.place.champion is None


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


def sent(**signing: Any) -> Forge:
    """Version 2, signed otherwise than by CI for this model now."""
    return lambda world: world.send(world.release(2, **signing))


def by_stranger(world: World) -> str:
    return world.send(world.release(2, key=world.stranger))


def trusting(forge: Forge, **fields: Callable[[World], Any]) -> Forge:
    """Handed in while both keys are trusted, and with these fields of the trust."""

    def later(world: World) -> str:
        more = {name: of(world) for name, of in fields.items()}
        save(trust_in(world.ci, world.stranger, **more), world.trust)
        return forge(world)

    return later


def spoiled(
    *places: str, by: Callable[[World, bytes], bytes] | None = None, make: Any = World.release,
    send: Forge | None = None,
) -> Forge:  # fmt: skip
    """Files beside the version changed in the registry after it was handed in; removed without
    `by`: those whose names begin so."""

    def forge(world: World) -> str:
        number = send(world) if send else world.send(make(world, 2))
        beside = world.place.stored(number).beside
        for place in [name for name in beside if name.startswith(places)]:
            before = beside.pop(place)
            if by is not None:
                beside[place] = by(world, before)
                assert beside[place] != before
        return number

    return forge


def edited(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | {key: value}).encode()


def field(key: str, value: Any) -> Callable[[World, bytes], bytes]:
    return lambda _, data: edited(key, value)(data)


def another_payload(world: World, data: bytes) -> bytes:
    """The statement says PASSED of other bytes, under the signature of the right one."""
    other = world.release(3).statements
    assert other is not None
    return field("payload", json.loads(other.decision.data)["payload"])(world, data)


def signed_twice(as_stranger: bool) -> Callable[[World, bytes], bytes]:
    """The one signature once more, under another name or not."""

    def change(world: World, data: bytes) -> bytes:
        (first,) = json.loads(data)["signatures"]
        other = first | ({"keyid": world.stranger.public.key_id} if as_stranger else {})
        return field("signatures", [first, other])(world, data)

    return change


def under_a_trusted_id(world: World, data: bytes) -> bytes:
    stranger, ours = (key.public.key_id.encode() for key in (world.stranger, world.ci))
    return data.replace(stranger, ours)


def mixed(change: Callable[[Release, Release], dict[str, Any]]) -> Forge:
    """Version 2 with something of version 3."""

    def forge(world: World) -> str:
        ours, other = world.release(2), world.release(3)
        return world.put(replace(ours, **change(ours, other)))

    return forge


def on_other_evidence(ours: Release, other: Release) -> dict[str, Any]:
    assert ours.statements is not None
    assert other.statements is not None
    return {"statements": StatementPair(other.statements.evidence, ours.statements.decision)}


def other_bytes(world: World) -> str:
    number = world.send(world.release(2))
    world.place.stored(number).data = onnx_file(world.place.folder / "x.onnx", seed=9).read_bytes()
    return number


def by_a_reviewer(world: World) -> str:
    save(trust_in(world.ci, reviewers=trust_in(world.stranger).measurers), world.trust)
    return by_stranger(world)


def by_a_key_of_last_year(world: World) -> str:
    """Backdated or not."""
    (ours,) = trust_in(world.ci).measurers
    lapsed = ours.model_copy(update={"valid_until": days_ago(40)})
    save(Trust(measurers=(lapsed, *trust_in(world.stranger).measurers)), world.trust)
    return world.send(world.release(2, at=days_ago(60)))


def old_evidence(world: World) -> str:
    save(trust_in(world.ci, max_age_days=365.0), world.trust)
    patient = builders.policy(max_age_days=365.0)
    return world.send(world.release(2, policy=patient, days=91), policy=patient)


def weaker_policy(world: World) -> str:
    """It passes by the policy of whoever hands in, and not by the service's."""
    world.place.policy = builders.policy(min_samples=500)
    world.restart()
    return world.send(world.release(2))


def no_pass(world: World) -> str:
    """A verdict that says no, signed, under tags that say yes."""
    path = onnx_file(world.place.folder / "2.onnx", seed=2)
    return world.put(Signing(world.ci).signed(failing_release(path), world.policy))


def rolled_back_bytes(world: World) -> str:
    """Whoever hands in took the tag away, and signed anew."""
    number = world.send(world.release(2))
    world.look()
    rollback(world.place.registry, NAME, ledger=world.place.ledger, reason="wrong answers")
    world.look()
    del world.place.stored(number).tags[Tag.ROLLED_BACK]
    return world.put(world.release(2, at=days_ago(0.01)))


def rejected_bytes(world: World) -> str:
    """A reviewer was faster than the service; then somebody took his word away."""
    world.place.tag(world.send(world.release(2)), "rejected")
    assert world.look() == [("hand_in", "passed", "2"), ("review", "rejected", "2")]
    del world.place.stored("2").tags[Tag.REVIEW]
    return world.put(world.release(2))


def replayed(world: World) -> str:
    """The verdict on what served before, under a new number."""
    for seed in (2, 3):
        world.send(world.release(seed))
        world.look()
        rollback(world.place.registry, NAME, ledger=world.place.ledger, reason="slow")
    world.look()
    assert world.place.champion == "1"
    world.place.stored("1").tags.clear()  # so that nothing is found by them
    return world.put(world.release(1))


def restated(*place: str | int, to: Any) -> Forge:
    """The statement on the decision says something else, signed by the key that is trusted."""

    def forge(world: World) -> str:
        of = world.with_spec(2)
        assert of.statements is not None
        plain = of.statements.decision.statement.to_plain()
        inside: Any = plain
        for name in place[:-1]:
            inside = inside[name]
        inside[place[-1]] = to(inside[place[-1]]) if callable(to) else to
        again = SignedStatement.sign(Statement.from_json(json.dumps(plain)), world.ci)
        return world.put(replace(of, statements=StatementPair(of.statements.evidence, again)))

    return forge


TWIN = Resource.from_digest(builders.digest("twin"), name="quantized/model.onnx").to_plain()
POLICY_DIGEST = ("predicate", "policy", "digest")
BOTH = ("gate/evidence.dsse.json", "gate/decision.dsse.json")

FORGERIES: dict[str, tuple[Forge, str]] = {
    "states another file": (restated("subject", 0, "digest", "sha256", to="0" * 64), "file"),
    "states a bad digest": (
        restated("subject", -1, "digest", "sha256", to="x"),
        "no SHA-256 digest of the preprocessing"),
    "states a twin that is not there": (
        restated("subject", to=lambda all_: [*all_, TWIN]),
        "the quantized twin: the file has no signed statements"),
    "states another policy": (restated(*POLICY_DIGEST, "sha256", to="0" * 64), "is about decision"),
    "states another algorithm": (
        restated(*POLICY_DIGEST, to={"sha512": "0" * 128}), "no SHA-256 digest of the policy"),
    "states another result": (
        restated("predicate", "verificationResult", to="FAILED"), "FAILED"),
    "states two pieces of evidence": (
        restated("predicate", "inputAttestations", to=lambda all_: all_ * 2),
        "2 evidence records"),
    "unsigned": (
        lambda w: w.put(replace(w.release(2), statements=None)),
        "the file has no signed statements"),
    "unknown key": (by_stranger, "is signed by 0 of the keys that are trusted"),
    "unknown key under a trusted id": (
        spoiled(*BOTH, by=under_a_trusted_id, send=by_stranger), "is signed by 0"),
    "reviewer's key": (by_a_reviewer, "is signed by 0"),
    "key of last year": (by_a_key_of_last_year, "was valid until"),
    "revoked key": (
        trusting(sent(), revoked=lambda w: (w.ci.public.key_id,)), "is revoked"),
    "too few signatures": (
        trusting(sent(), threshold=lambda _: 2), "is signed by 1 of the keys"),
    "one key twice": (
        trusting(spoiled(BOTH[1], by=signed_twice(False)), threshold=lambda _: 2), "statement"),
    "one key under two names": (
        trusting(spoiled(*BOTH, by=signed_twice(True)), threshold=lambda _: 2),
        "is signed by 1 of"),
    "expired": (sent(at=days_ago(91)), "days old"),
    "of the future": (sent(at=days_ago(-1)), "is dated in the future"),
    "old evidence": (old_evidence, "its evidence is 91.0 days old"),
    "of another model": (sent(model="letters"), "letters"),
    "of another registry": (
        sent(registry="https://elsewhere"),
        "start the service: gate serve --same-registry https://elsewhere"),
    "for no registry": (sent(registry="sqlite:///m.db"), "sqlite:"),
    "of another file": (mixed(lambda _, other: {"statements": other.statements}), "has digest"),
    "with the evidence of another": (
        mixed(lambda _, other: {"evidence": other.evidence}), "has digest"),
    "statement on other evidence": (mixed(on_other_evidence), "is about evidence"),
    "edited evidence": (
        spoiled("gate/evidence.json", by=field("measured_at", "2026-11-22T00:00:00+00:00")),
        "has digest"),
    "edited decision": (
        spoiled("gate/decision.json", by=field("runtimes", ["ort-cpu"])), "is about decision"),
    "other bytes": (other_bytes, "has digest"),
    "exchanged golden vectors": (
        spoiled("golden/golden.json", by=lambda _, data: data + b" ", make=World.with_golden),
        "golden vectors"),
    "without golden vectors": (spoiled("golden", make=World.with_golden), "golden vectors"),
    "exchanged spec": (
        spoiled("prep", by=lambda _, data: data.replace(b"0.485", b"0.486"), make=World.with_spec),
        "preprocessing"),
    "without spec": (spoiled("prep", make=World.with_spec), "preprocessing"),
    "stripped": (spoiled(BOTH[1], by=field("signatures", [])), "signatures"),
    "of another type": (
        spoiled(BOTH[1], by=field("payloadType", "application/json")), "its payloadType is"),
    "another payload": (spoiled(BOTH[1], by=another_payload), "is signed by 0"),
    "half a word": (spoiled(BOTH[0]), "evidence.dsse.json"),
    "weaker policy": (weaker_policy, "it was judged by another policy"),
    "no pass": (no_pass, "its decision is FAIL"),
    "rolled-back bytes": (rolled_back_bytes, "these bytes were rolled back as version 2"),
    "rejected bytes": (rejected_bytes, "a reviewer rejected these bytes as version 2"),
    "replayed": (replayed, "version 1 was promoted with the same verdict before"),
}  # fmt: skip


def assert_page_says_refused(world: World, number: str) -> None:
    """That, and why; and what was handed in with it is a claim."""
    verdict, page = world.place.stored(number).tags[Tag.VERDICT], world.page(number)
    assert verdict.startswith("REFUSED (see gate.refused); handed in as ")
    assert not page.startswith("Status: champion")
    assert "refused" in page
    assert "are claims of the submitter and did not count." in page


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_refused_once_and_nothing_moves(world: World, name: str) -> None:
    forge, problem = FORGERIES[name]
    number = forge(world)
    assert world.look() == [("hand_in", "refused", number)]
    assert (world.place.champion, world.live) == ("1", "1")
    assert problem in world.refusal(number)
    assert ("--same-registry" in world.refusal(number)) is ("registry" in name)
    assert_page_says_refused(world, number)
    assert world.look() == []
    assert world.about(number) == ["refused"]


TWINS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "quantized/model.onnx": (lambda data: data.replace(b"tiny", b"tidy"), "has digest"),
    "quantized/gate/evidence.json": (edited("measured_at", "2026-11-22T00:00:00Z"), "has digest"),
    "quantized/gate/decision.json": (edited("runtimes", []), "is about decision"),
    "quantized/gate/decision.dsse.json": (lambda _: b"[1]", "the quantized twin"),
    "quantized/gate/evidence.dsse.json": (lambda _: b"[1]", "evidence.dsse.json"),
}


@pytest.mark.parametrize("place", TWINS)
def test_a_twin_is_proven_like_the_file(tmp_path, place: str) -> None:
    world = World(tmp_path, TWINNED)
    number = world.send(world.release(1))
    change, problem = TWINS[place]
    world.spoil(number, place, change)
    assert world.look() == [("hand_in", "refused", number)]
    assert problem in world.refusal(number)
    assert world.place.champion is None


def test_the_twin_of_another_file_with_true_statements(tmp_path) -> None:
    world = World(tmp_path, TWINNED)
    one, other = world.release(1), world.release(2)
    number = world.put(replace(one, twin=other.twin))
    assert world.look() == [("hand_in", "refused", number)]
    assert "does not name the quantized twin" in world.refusal(number)


def with_twin_vectors(world: World, torch: str) -> Release:
    """The same exact file and the same twin each time, with golden vectors of their own."""
    made = world.place.release(1)
    assert made.twin is not None
    assert world.policy.twin is not None
    folder = world.place.folder / f"vectors-{torch}"
    origin = Origin(policy_sha256=world.policy.twin.digest(), versions={"torch": torch})
    vectors.golden_of(folder, made.twin.onnx_path, origin=origin)
    twin = replace(made.twin, golden=GoldenFolder.open(folder))
    return Signing(world.ci).signed(replace(made, twin=twin), world.policy)


def its_own(one: EvaluatedFile, _other: EvaluatedFile) -> EvaluatedFile:
    return one


def another_statement(_one: EvaluatedFile, other: EvaluatedFile) -> EvaluatedFile:
    """Signed by the same key, on the same bytes."""
    return other


def no_vectors(one: EvaluatedFile, _other: EvaluatedFile) -> EvaluatedFile:
    return replace(one, golden=None)


def other_vectors(one: EvaluatedFile, other: EvaluatedFile) -> EvaluatedFile:
    return replace(one, golden=other.golden)


@pytest.mark.parametrize(
    ("exchange", "problem"),
    [
        (its_own, None),
        (another_statement, "golden"),
        (no_vectors, "golden"),
        (other_vectors, "golden"),
    ],
)
def test_golden_vectors_of_a_twin_are_those_of_the_verdict(tmp_path, exchange, problem) -> None:
    world = World(tmp_path, TWINNED)
    one, other = (with_twin_vectors(world, torch) for torch in ("2", "3"))
    assert one.twin is not None
    assert other.twin is not None
    assert one.twin.golden_sha256 != other.twin.golden_sha256
    number = world.put(replace(one, twin=exchange(one.twin, other.twin)))
    outcome = "promoted" if problem is None else "refused"
    assert world.look()[0] == ("hand_in", outcome, number)
    assert problem is None or problem in world.refusal(number)


def test_a_twin_that_nobody_signed(tmp_path) -> None:
    world = World(tmp_path, TWINNED)
    one = world.release(1)
    assert one.twin is not None
    number = world.put(replace(one, twin=replace(one.twin, statements=None)))
    assert world.look() == [("hand_in", "refused", number)]
    assert "the quantized twin: the file has no signed statements" in world.refusal(number)


def test_what_was_refused_by_a_stricter_policy_of_its_own_is_decided_anew(world: World) -> None:
    """The sender's policy says nothing: neither for nor against."""
    strict = builders.policy(min_samples=500)
    number = world.put(world.release(2, policy=strict))
    world.place.stored(number)
    world.place.policy = builders.policy(min_samples=350)
    world.restart()
    assert world.look()[0] == ("hand_in", "promoted", number)


def test_what_was_refused_comes_as_another_version_when_it_is_handed_in_again(world: World) -> None:
    refused = world.send(world.release(2, key=world.stranger))
    world.look()
    save(trust_in(world.ci, world.stranger), world.trust)
    assert world.look() == []  # what was refused stays refused
    again = world.send(world.release(2, key=world.stranger))
    assert again != refused
    assert world.look()[0] == ("hand_in", "promoted", again)


def test_a_damaged_trust_is_weather(world: World) -> None:
    number = world.send(world.release(2))
    kept = world.trust.read_text()
    world.trust.write_text("trust: [")
    assert world.look() == [("hand_in", "PolicyError", None)]
    assert (world.about(number), world.place.champion, world.live) == ([], "1", "1")
    world.trust.write_text(kept)
    assert world.look()[0] == ("hand_in", "promoted", number)


def test_without_any_trust_its_page_says_what_is_missing(world: World) -> None:
    number, kept = world.send(world.release(2)), world.trust
    world.trust = None  # type: ignore[assignment]
    world.restart()
    for _ in range(2):
        assert world.look() == []
    assert "gate serve --trust" in world.page(number)
    assert world.about(number) == []
    world.trust = kept
    world.restart()
    assert world.look()[0] == ("hand_in", "promoted", number)
    assert world.page(number).startswith("Status: champion since ")


def test_a_champion_by_hand_goes_back_and_is_then_judged_like_others(world: World) -> None:
    good, bad = world.send(world.release(2)), world.send(world.release(3, key=world.stranger))
    world.place.point(bad)
    assert world.look() == [("guard", "reverted", "1"), ("hand_in", "refused", bad)]
    world.place.registry.set_alias(NAME, CANDIDATE, good)
    world.place.point(good)
    assert world.look() == [
        ("guard", "reverted", "1"), ("hand_in", "promoted", good), ("deploy", "deployed", good),
    ]  # fmt: skip


@pytest.mark.parametrize("days", [0.0, 91.0], ids=["another policy", "old evidence"])
def test_approved_by_a_tag_and_made_champion_by_hand_it_is_judged_as_ever(tmp_path, days) -> None:
    """The alias is moved before the service reads the approval, and what passed is long ago."""
    world = World(tmp_path, REVIEWED)
    if days:
        world.place.policy = builders.policy(review="required", max_age_days=365.0)
        save(trust_in(world.ci, max_age_days=365.0), world.trust)
        world.restart()
    policy = world.place.policy
    number = world.send(world.release(1, policy=policy, days=days), policy=policy)
    assert world.look() == [("hand_in", "passed", number)]
    world.place.policy = REVIEWED if days else builders.policy(review="required", min_samples=500)
    world.restart()
    world.place.tag(number, "approved")
    world.place.point(number)
    assert ("guard", "reverted", None) in world.look()
    problem = "its evidence is 91.0 days old" if days else "it was judged by another policy"
    assert problem in world.place.stored(number).tags[Tag.REVERTED]
    assert (world.place.champion, world.live) == (None, None)


@pytest.mark.parametrize("error", [RegistryUnavailable, ArtifactMissing])
def test_a_store_that_is_away_refuses_nothing(world: World, error: type[Exception]) -> None:
    number = world.send(world.release(2))
    watched = Watched(world.place.registry)

    def away(call: str, _index: int) -> None:
        if call == "download":
            raise error("away")

    watched.before = away
    world.place.registry = watched  # type: ignore[assignment]
    world.restart()
    assert ("hand_in", error.__name__, None) in world.look()
    assert world.about(number) == []
    watched.before = lambda _call, _index: None
    assert world.look()[0] == ("hand_in", "promoted", number)


def test_an_error_page_in_the_place_of_a_statement_delays_the_verdict(world: World) -> None:
    number = world.send(world.release(2))
    world.reading = Reading(mismatches=MismatchMemory(3600.0, wait=None))
    stored = world.place.stored(number)
    kept, stored.beside["gate/decision.dsse.json"] = (
        stored.beside["gate/decision.dsse.json"], b'{"error": "try again"}',
    )  # fmt: skip
    watched = world.place.registry = Watched(world.place.registry)  # type: ignore[assignment]
    world.restart()
    for _ in range(3):  # within the time after which a second download confirms it
        assert world.look() == [("hand_in", "MismatchUnconfirmed", None)]
    assert watched.calls.count("set_description") == 1
    assert world.page(number).startswith("Status: handed in, and not judged yet: version 2 of ")
    stored.beside["gate/decision.dsse.json"] = kept
    assert world.look()[0] == ("hand_in", "promoted", number)
    assert world.page(number).startswith("Status: champion since ")


def test_a_candidate_that_moves_meanwhile_is_looked_at_anew(world: World) -> None:
    first, second = world.send(world.release(2)), world.send(world.release(3))
    world.place.registry.set_alias(NAME, CANDIDATE, first)
    watched = Watched(world.place.registry)

    def overtaken(call: str, _index: int) -> None:
        if call == "download" and watched.calls.count("download") == 2:  # the guard's is the first
            watched.inner.set_alias(NAME, CANDIDATE, second)

    watched.after = overtaken
    world.place.registry = watched  # type: ignore[assignment]
    world.restart()
    assert world.look()[0] == ("hand_in", "promoted", second)
    assert world.about(first) == []


def test_a_registry_that_was_made_anew_counts_from_one_again(world: World) -> None:
    registry = world.place.registry
    registry.versions.clear()
    registry.aliases.clear()
    number = world.send(world.release(5))
    registry.versions[0].made_at = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert number == "1"
    assert world.look() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    assert world.look() == []


def test_a_comparison_with_what_served_before_is_outdated(tmp_path) -> None:
    """The service's policy asks for one; CI's did not."""
    world = World(tmp_path)
    world.send(world.release(1))
    world.look()
    world.place.policy = builders.policy(incumbent=ChampionPolicy(min_agreement=0.9))
    world.restart()
    number = world.send(world.release(2))
    assert world.look() == [("hand_in", "refused", number)]
    assert world.place.champion == "1"


def test_a_release_that_is_promoted_where_the_ledger_is_is_not_judged_again(world: World) -> None:
    release = world.release(2)
    done = promote(world.place.registry, release, policy=world.policy, ledger=world.place.ledger)
    assert (done.outcome, world.about("2")) == ("promoted", ["promoted"])
    assert world.look() == [("deploy", "deployed", "2")]


def replaced(world: World) -> None:
    world.send(world.release(3))
    assert ("hand_in", "promoted", "3") in world.look()


def rolled_back(world: World) -> None:
    rollback(world.place.registry, NAME, ledger=world.place.ledger, reason="slow")
    world.look()


def reverted(world: World) -> None:
    """As the guard does with what it can't prove, or what does not pass by the policy in force."""
    model = world.place.model()
    about = model.history().approving_entry("1")
    entry = model.entry("reverted", "unproven", version="1", previous="2", about=about)
    alias.move_alias(model, entry)


CLOSED = {
    replaced: "was champion until",
    rolled_back: "rolled back on",
    reverted: "reverted by the guard on",
}


@pytest.mark.parametrize("close", CLOSED)
def test_what_was_judged_before_is_said_and_not_left_in_silence(world: World, close, caplog):
    """The service judges a version once; which one is the candidate does not change then."""
    caplog.set_level(logging.INFO)
    release = world.release(2)
    world.send(release)
    world.look()
    close(world)
    candidate = world.place.registry.alias(NAME, CANDIDATE)
    again = submit(world.place.registry, release, policy=world.policy)
    assert (again.outcome, again.version) == ("refused", "2")
    for part in (CLOSED[close], f"gate rollback {NAME}", "'champion'", "version 2"):
        assert part in again.reason
    assert world.place.registry.alias(NAME, CANDIDATE) == candidate
    world.place.registry.set_alias(NAME, CANDIDATE, "2")
    for _ in range(2):
        assert not [one for one in world.look() if one[0] == "hand_in"]
    (record,) = [each for each in caplog.records if "judged before" in each.message]
    assert CLOSED[close] in record.message
    assert f"gate rollback {NAME}" in record.message


def test_a_version_that_only_the_tag_closes(world: World) -> None:
    """Somebody edited its page."""
    release = world.release(2)
    number = world.send(release)
    world.place.tag(number, "then: it must not serve", key=Tag.REVERTED)
    again = submit(world.place.registry, release, policy=world.policy)
    assert (again.outcome, again.version) == ("refused", number)
    assert f"tag {Tag.REVERTED}: then: it must not serve" in again.reason


def test_a_first_champion_by_hand_is_said_on_its_page(tmp_path) -> None:
    world = World(tmp_path)
    number = world.send(world.release(1))
    world.place.point(number)
    for _ in range(2):
        assert world.look() == [("guard", "RegistryError", None)]
    assert (world.place.lines(), world.live) == ([], None)
    assert "'champion' was pointed at it before anything passed" in world.page(number)
    assert "Take that alias away" in world.page(number)
    world.place.registry.delete_alias(NAME, CHAMPION)
    assert world.look() == [("hand_in", "promoted", number), ("deploy", "deployed", number)]


def test_a_service_with_another_ledger_writes_on_no_page(world: World, tmp_path) -> None:
    page = world.page("1")
    world.place.ledger = Ledger(tmp_path / "another.db")
    world.restart()
    assert ("guard", "RegistryError", None) in world.look()
    assert world.page("1") == page
