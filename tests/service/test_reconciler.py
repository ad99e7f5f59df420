"""All of it, on a simulated registry and a real store: whatever happened, one state comes out."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gate.deploy.store import EXACT, ModelStore
from gate.errors import (
    ArtifactMissing,
    EvidenceError,
    GateError,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
)
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.registry.interface import Tag
from gate.registry.promotion import rollback
from gate.service.monitoring import Failed, Kind
from gate.service.reconciler import Reconciler, deploy_champion
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.places import AUTOMATIC, PATIENT, REVIEWED, STRICT, Place, Service


@pytest.fixture
def service(tmp_path) -> Service:
    """Version 1 serves and is deployed."""
    made = Service(tmp_path)
    made.place.promote(1)
    assert made.look() == [("deploy", "deployed", "1")]
    return made


def test_what_was_promoted_is_deployed_once(service):
    assert service.live == "1"
    assert service.look() == []
    assert service.place.lines() == [("promoted", "1"), ("deployed", "1")]
    assert service.place.ledger.entries()[-1].cause == "delivery 1"


def test_bytes_that_are_exchanged_while_they_are_fetched(service, monkeypatch):
    service.place.promote(2)
    watched = Watched(service.place.registry)

    def exchange(call: str, _: int) -> None:
        if watched.calls.count("download") == 2 and call == "download":
            service.place.stored("2").data += b"\0"
            monkeypatch.setattr("gate.deploy.deploy.read_subject_in_sandbox", parse)

    def parse(*_: object) -> None:
        pytest.fail("bytes were parsed that nobody had proven")

    watched.before = exchange
    service.reconcile = Reconciler(watched, service.place.ledger, AUTOMATIC, store=service.store)
    assert service.look() == [("deploy", "refused", "2")]
    assert service.live == "1"
    assert service.place.lines()[-1] == ("not_deployed", "2")
    assert service.look() == [("guard", "reverted", "1")]
    assert service.live == "1"


def test_a_crash_between_the_store_and_the_line(service, monkeypatch):
    service.place.promote(2)
    with monkeypatch.context() as broken:
        broken.setattr("gate.service.reconciler._record_outcome", lambda *_a, **_o: 1 / 0)
        assert service.look() == [("deploy", "ZeroDivisionError", None)]
    assert service.live == "2"
    service.restart()
    assert service.look("timer") == [("deploy", "deployed", "2")]
    assert service.place.lines().count(("deployed", "2")) == 1


def test_a_server_that_is_away_changes_nothing(service):
    service.place.promote(2)
    watched = Watched(service.place.registry)

    def away(call: str, _: int) -> None:
        if call == "download":
            raise RegistryUnavailable("no answer")

    watched.before = away
    service.reconcile = Reconciler(watched, service.place.ledger, AUTOMATIC, store=service.store)
    before = service.place.lines()
    away = [(step, "RegistryUnavailable", None) for step in ("guard", "deploy")]
    assert service.look() == away
    assert service.live == "1"
    assert service.place.lines() == before
    watched.before = lambda *_: None
    assert service.look() == [("deploy", "deployed", "2")]


STEPS_OF_A_LOOK = {
    "guard": "guard_champion",
    "review": "process_reviews",
    "deploy": "deploy_champion",
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("error", [RegistryUnavailable("away"), RegistryError("?"), KeyError("x")])
@pytest.mark.parametrize("failing", STEPS_OF_A_LOOK)
def test_a_step_that_fails_keeps_no_other_from_its_work(
    tmp_path, monkeypatch, failing: Kind, error
):
    """Version 3 waits and was approved; somebody pointed `champion` at what never passed."""
    service = Service(tmp_path, REVIEWED)
    place = service.place
    place.promote(1)
    place.tag("1", "approved")
    service.look()
    place.promote(2)
    bad = place.hand_made(5)
    place.tag("2", "approved")
    place.point(bad)

    def fail(*_a, **_o):
        raise error

    done = {
        "guard": ("guard", "reverted", "1"),
        "review": ("review", "promoted", "2"),
        "deploy": ("deploy", "deployed", "2"),
    }
    with monkeypatch.context() as broken:
        broken.setattr(f"gate.service.reconciler.{STEPS_OF_A_LOOK[failing]}", fail)
        found = service.look()
    expected = [done[kind] for kind in done if kind != failing]
    if failing == "review":
        expected.pop()  # version 1 is deployed already
    assert [one for one in found if one[1] != type(error).__name__] == expected
    assert [one[0] for one in found if one[1] == type(error).__name__] == [failing]
    service.look()
    assert (place.champion, service.live) == ("2", "2")


def test_a_model_that_was_never_registered_is_no_failure(tmp_path, monkeypatch):
    service = Service(tmp_path)
    monkeypatch.setattr(service.place.registry, "has_model", lambda _name: False)
    assert service.look() == []


def test_a_model_that_is_gone_is_left_as_it_is(service, monkeypatch):
    before = service.place.lines()
    with monkeypatch.context() as renamed:
        renamed.setattr(service.place.registry, "has_model", lambda _name: False)
        renamed.setattr(service.place.registry, "aliases", {})
        with pytest.raises(ResourceGone, match="deleted or renamed"):
            service.look()
    assert service.place.lines() == before
    assert service.look() == []


def test_a_step_that_failed_is_looked_at_thoroughly_again(service, monkeypatch):
    service.restart()
    place = service.place
    with monkeypatch.context() as away:
        away.setattr(place.registry, "download", lambda *_, **_options: 1 / 0)
        assert service.look() == [("guard", "ZeroDivisionError", None)]
    place.stored("1").data += b"\0"
    assert service.look() == [("guard", "reverted", None)]


def test_champion_without_alias_leaves_what_is_deployed(service):
    service.place.registry.aliases.pop("champion")
    assert service.look() == []
    assert service.live == "1"


STEPS = st.lists(
    st.sampled_from(
        ["promote 1", "promote 2", "promote 3", "point 1", "point 2", "point 3", "forge", "spoil 2",
         "approve 2", "reject 3", "look", "look", "restart", "unalias"]
    ),
    max_size=14,
)  # fmt: skip


def _do(service: Service, step: str, what: str) -> None:
    place = service.place
    {
        "promote": lambda: place.promote(int(what)),
        "point": lambda: place.point(what),
        "forge": lambda: place.point(place.hand_made(8)),
        "spoil": lambda: setattr(place.stored(what), "data", place.stored(what).data + b"\0"),
        "approve": lambda: place.tag(what, "approved"),
        "reject": lambda: place.tag(what, "rejected"),
        "look": service.look,
        "restart": service.restart,
        "unalias": lambda: place.registry.aliases.pop("champion", None),
    }[step]()


@given(STEPS, st.sampled_from([AUTOMATIC, REVIEWED]))
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@pytest.mark.proof
def test_whatever_people_do_only_what_passed_is_deployed(tmp_path_factory, steps, policy):
    service = Service(tmp_path_factory.mktemp("place"), policy)
    place = service.place
    place.promote(4)
    for step in steps:
        do, _, what = step.partition(" ")
        if do == "promote" or not what or int(what) <= len(place.registry.versions):
            _do(service, do, what)
    service.restart()
    service.look()
    lines = place.lines()
    assert service.look() == []
    assert place.lines() == lines
    live = service.store.live(NAME)
    passed = {e.sha256 for e in place.ledger.entries() if e.action in ("passed", "promoted")}
    assert live is None or live.slots[EXACT].sha256 in passed
    if place.champion is not None:
        assert live is not None
        champion = [e for e in place.ledger.entries() if e.version == place.champion and e.sha256]
        assert live.slots[EXACT].sha256 == champion[-1].sha256


ATTACKS = st.lists(
    st.sampled_from(
        ["promote 1", "promote 2", "promote 3", "old 2", "approve 1", "approve 2", "approve 3",
         "point 1", "point 2", "point 3", "back", "untag 1", "untag 2", "untag 3", "forge tags 1",
         "forge tags 2", "away", "there", "look AUTOMATIC", "look REVIEWED", "look STRICT"]
    ),
    max_size=12,
)  # fmt: skip
POLICIES = {"AUTOMATIC": AUTOMATIC, "REVIEWED": REVIEWED, "STRICT": STRICT}


def _attack(place: Place, step: str, number: str) -> None:
    """The promoter's policies are weaker than most of the service's."""
    with contextlib.suppress(GateError):
        if step == "promote":
            place.promote(int(number), policy=PATIENT if number == "3" else AUTOMATIC)
        elif step == "old":
            place.promote(7, days=200, policy=PATIENT)
        elif step in ("away", "there"):
            _weather(place, bad=step == "away")
        elif step == "back":
            rollback(place.registry, NAME, ledger=place.ledger, reason="worse")
        elif int(number) > len(place.registry.versions):
            return
        elif step == "approve":
            place.tag(number, "approved")
        elif step == "point":
            place.point(number)
        elif step == "untag":
            place.stored(number).tags.clear()
        else:
            for tag in (Tag.ROLLED_BACK, Tag.REVERTED, Tag.POLICY, Tag.VERDICT):
                place.tag(number, "2026: forged", tag)


def _weather(place: Place, *, bad: bool) -> None:
    """While it is bad no file can be had."""

    def away(*_: object, **_options: object) -> Path:
        raise ArtifactMissing("its store is away")

    place.registry.__dict__.pop("download", None)
    if bad:
        place.registry.__dict__["download"] = away


class Account:
    """What the ledger said of a version before a look, read in the plainest way."""

    def __init__(self, entries: tuple[LedgerEntry, ...], version: str) -> None:
        last = {(e.action, e.version): place for place, e in enumerate(entries)}
        left = {(e.action, e.previous_version): place for place, e in enumerate(entries)}
        passed, promoted, back, deployed = (
            last.get((action, version), -1)
            for action in ("passed", "promoted", "rolled_back", "deployed")
        )
        self.deployed = deployed > promoted
        self.rolled_back = left.get(("rolled_back", version), -1) > max(passed, promoted, back)


def _may_be_deployed(place: Place, number: str, account: Account, policy: Policy) -> bool:
    old = Digest.from_bytes(place.stored(number).data) == place.release(7).evidence.subject.sha256
    approved = place.stored(number).tags.get(Tag.REVIEW) == "approved"
    reviewed = policy.review == "automatic" or approved
    passes = policy is not STRICT and reviewed and not old
    return not account.rolled_back and (account.deployed or passes)


TWO_SERVED = ("promote 1", "look AUTOMATIC", "promote 2", "look AUTOMATIC")


@exhaustive
@given(ATTACKS)
@example(["back", "look AUTOMATIC", "untag 2", "point 2"])
@example(["back", "untag 2", "look REVIEWED", "promote 2", "point 2", "look STRICT"])
@example(["promote 3", "away", "look REVIEWED", "point 3", "there", "look STRICT"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@pytest.mark.proof
def test_whatever_the_promoter_and_editors_do_the_service_s_policy_decides(tmp_path_factory, steps):
    place = Place(tmp_path_factory.mktemp("place"))
    store = ModelStore(place.folder / "store")
    for step in (*TWO_SERVED, *steps, "there", "look AUTOMATIC"):
        do, _, what = step.rpartition(" ")
        if do != "look":
            _attack(place, *((do, what) if do else (what, "")))
            continue
        policy, before = POLICIES[what], place.ledger.entries()
        rightful = ModelHistory(before).serving
        reconcile = Reconciler(place.registry, place.ledger, policy, store=store)
        failed = [t for t in reconcile(NAME, cause="timer") if isinstance(t, Failed)]
        assert all(isinstance(one.error, RegistryError) for one in failed)
        made = place.ledger.entries()[len(before) :]
        for number in (e.version for e in made if e.action == "deployed" and e.version):
            assert _may_be_deployed(place, number, Account(before, number), policy)
        if rightful and Account(before, rightful).deployed:
            assert ("reverted", rightful) not in [(e.action, e.previous_version) for e in made]


def test_what_the_guard_did_not_get_to_judge_is_not_deployed(service):
    """Deploying judges by itself: the guard may have failed in this look."""
    place = service.place
    place.promote(2)
    before = place.lines()
    with pytest.raises(EvidenceError, match="at least 500 are required"):
        deploy_champion(place.model(), service.store, STRICT, thoroughly=True)
    assert deploy_champion(place.model(), service.store, REVIEWED, thoroughly=True) == []
    assert (service.live, place.lines()) == ("1", before)
    assert service.look() == [("deploy", "deployed", "2")]
    assert deploy_champion(place.model(), service.store, STRICT, thoroughly=True) == []
    assert service.live == "2"


def test_evidence_that_can_not_be_read_is_not_deployed(service, monkeypatch):
    place = service.place
    place.promote(2)

    def fail(*_a, **_o):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr("gate.registry.verify_release.load_records", fail)
        (taken,) = deploy_champion(place.model(), service.store, AUTOMATIC)
    assert (taken.outcome, service.live) == ("refused", "1")
    assert "MemoryError" in taken.reason
    assert service.look() == [("deploy", "deployed", "2")]


@pytest.mark.parametrize("how", ["after a while", "when they were found"])
def test_damaged_bytes_in_the_store_are_brought_anew(service, monkeypatch, how):
    manifest = service.store.live(NAME)
    slot = manifest.slots[EXACT]
    path = service.store.file(slot.sha256, slot.model)
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + b"x")
    assert service.look() == []  # not looked at each time
    if how == "after a while":
        monkeypatch.setattr("gate.service.reconciler._RECHECK_S", -1.0)
    else:
        service.reconcile.report_damage(NAME)
    assert service.look() == [("deploy", "deployed", "1")]
    assert path.read_bytes() == whole
    assert service.look() == []


@pytest.mark.parametrize("what", ["manifest", "file", "release", "store"])
def test_what_is_gone_from_the_store_is_brought_anew(service, what):
    manifest = service.store.live(NAME)
    slot = manifest.slots[EXACT]
    link = service.store.live_link(NAME)
    spoilt = {
        "manifest": link / "manifest.json",
        "file": service.store.file(slot.sha256, slot.model),
        "release": link.resolve(),
        "store": service.store.root,
    }[what]
    if spoilt.is_dir():
        shutil.rmtree(spoilt)
    else:
        spoilt.unlink()
    service.restart()  # as gate reconcile
    assert service.look() == [("deploy", "deployed", "1")]
    assert service.live == "1"
    assert service.store.damage(NAME) is None
    assert service.look() == []
