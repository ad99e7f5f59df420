"""The reconciler converges from any state of a simulated registry and a real store."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gate import Digest, GateError, Policy
from gate.deploy.store import EXACT, ModelStore
from gate.errors import (
    ArtifactMissing,
    EvidenceError,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
)
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Ledger
from gate.registry.interface import Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.service.monitoring import Failed, Kind
from gate.service.reconciler import Reconciler, deploy_champion
from tests.exhaustive import exhaustive
from tests.ledger.rows import record_parsed_lines
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.registry_setup import (
    ALLOWS_OLD_EVIDENCE,
    AUTOMATIC,
    REVIEWED,
    STRICT,
    RegistrySetup,
    Service,
)


@pytest.fixture
def service(tmp_path) -> Service:
    """A service that deployed version 1."""
    created = Service(tmp_path)
    created.setup.promote(1)
    assert created.reconcile_once() == [("deploy", "deployed", "1")]
    return created


def test_promoted_version_is_deployed_once(service):
    assert service.live == "1"
    assert service.reconcile_once() == []
    assert service.setup.lines() == [("promoted", "1"), ("deployed", "1")]
    assert service.setup.ledger.entries()[-1].cause == "delivery 1"


def test_pass_parses_only_entries_of_other_processes(service, monkeypatch):
    parsed = record_parsed_lines(monkeypatch)
    assert service.reconcile_once() == []
    assert parsed == []
    other = Ledger(service.setup.ledger.state)
    RegisteredModel(service.setup.registry, other, NAME, cause="delivery 2").write(
        "conflict", "written by another process"
    )
    parsed.clear()
    assert service.reconcile_once() == []
    assert parsed == [3]


def test_bytes_replaced_between_two_downloads_are_not_deployed(service, monkeypatch):
    service.setup.promote(2)
    watched = Watched(service.setup.registry)

    def replace_bytes(call: str, _: int) -> None:
        if watched.calls.count("download") == 2 and call == "download":
            service.setup.stored("2").data += b"\0"
            monkeypatch.setattr("gate.deploy.deploy.read_subject_in_sandbox", parse)

    def parse(*_: object) -> None:
        pytest.fail("bytes were parsed that nobody had proven")

    watched.before = replace_bytes
    service.reconcile = Reconciler(watched, service.setup.ledger, AUTOMATIC, store=service.store)
    assert service.reconcile_once() == [("deploy", "refused", "2")]
    assert service.live == "1"
    assert service.setup.lines()[-1] == ("not_deployed", "2")
    assert service.reconcile_once() == [("guard", "reverted", "1")]
    assert service.live == "1"


def test_crash_between_deployment_and_ledger_entry_is_finished_later(service, monkeypatch):
    service.setup.promote(2)
    with monkeypatch.context() as patched:
        patched.setattr("gate.service.reconciler._record_outcome", lambda *_a, **_o: 1 / 0)
        assert service.reconcile_once() == [("deploy", "ZeroDivisionError", None)]
    assert service.live == "2"
    service.restart()
    assert service.reconcile_once("timer") == [("deploy", "deployed", "2")]
    assert service.setup.lines().count(("deployed", "2")) == 1


def test_unavailable_registry_changes_nothing(service):
    service.setup.promote(2)
    watched = Watched(service.setup.registry)

    def raise_unavailable(call: str, _: int) -> None:
        if call == "download":
            raise RegistryUnavailable("no answer")

    watched.before = raise_unavailable
    service.reconcile = Reconciler(watched, service.setup.ledger, AUTOMATIC, store=service.store)
    before = service.setup.lines()
    raise_unavailable = [(step, "RegistryUnavailable", None) for step in ("guard", "deploy")]
    assert service.reconcile_once() == raise_unavailable
    assert service.live == "1"
    assert service.setup.lines() == before
    watched.before = lambda *_: None
    assert service.reconcile_once() == [("deploy", "deployed", "2")]


STEP_FUNCTIONS = {
    "guard": "guard_champion",
    "review": "process_reviews",
    "deploy": "deploy_champion",
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("error", [RegistryUnavailable("away"), RegistryError("?"), KeyError("x")])
@pytest.mark.parametrize("failing", STEP_FUNCTIONS)
def test_failing_step_does_not_stop_the_other_steps(tmp_path, monkeypatch, failing: Kind, error):
    """Version 2 waits and was approved; `champion` was moved to a version that never passed."""
    service = Service(tmp_path, REVIEWED)
    setup = service.setup
    setup.promote(1)
    setup.tag("1", "approved")
    service.reconcile_once()
    setup.promote(2)
    bad = setup.register_by_hand(5)
    setup.tag("2", "approved")
    setup.move_champion(bad)

    def fail(*_a, **_o):
        raise error

    result = {
        "guard": ("guard", "reverted", "1"),
        "review": ("review", "promoted", "2"),
        "deploy": ("deploy", "deployed", "2"),
    }
    with monkeypatch.context() as broken:
        broken.setattr(f"gate.service.reconciler.{STEP_FUNCTIONS[failing]}", fail)
        actual = service.reconcile_once()
    expected = [result[kind] for kind in result if kind != failing]
    if failing == "review":
        expected.pop()  # version 1 is deployed already
    assert [item for item in actual if item[1] != type(error).__name__] == expected
    assert [item[0] for item in actual if item[1] == type(error).__name__] == [failing]
    service.reconcile_once()
    assert (setup.champion, service.live) == ("2", "2")


def test_unregistered_model_is_not_an_error(tmp_path, monkeypatch):
    service = Service(tmp_path)
    monkeypatch.setattr(service.setup.registry, "has_model", lambda _name: False)
    assert service.reconcile_once() == []


def test_deleted_model_is_reported_and_left_alone(service, monkeypatch):
    before = service.setup.lines()
    with monkeypatch.context() as renamed:
        renamed.setattr(service.setup.registry, "has_model", lambda _name: False)
        renamed.setattr(service.setup.registry, "aliases", {})
        with pytest.raises(ResourceGone, match="deleted or renamed"):
            service.reconcile_once()
    assert service.setup.lines() == before
    assert service.reconcile_once() == []


def test_failed_step_is_repeated_thoroughly(service, monkeypatch):
    service.restart()
    setup = service.setup
    with monkeypatch.context() as patched:
        patched.setattr(setup.registry, "download", lambda *_, **_options: 1 / 0)
        assert service.reconcile_once() == [("guard", "ZeroDivisionError", None)]
    setup.stored("1").data += b"\0"
    assert service.reconcile_once() == [("guard", "reverted", None)]


def test_deleted_champion_alias_is_restored(service):
    service.setup.registry.aliases.pop("champion")
    assert service.reconcile_once() == [("guard", "restored", "1")]
    assert service.setup.champion == service.live == "1"


ACTIONS = st.lists(
    st.sampled_from(
        ["promote 1", "promote 2", "promote 3", "old 2", "approve 1", "approve 2", "approve 3",
         "point 1", "point 2", "point 3", "back", "untag 1", "untag 2", "untag 3", "forge tags 1",
         "forge tags 2", "away", "there", "look AUTOMATIC", "look REVIEWED", "look STRICT"]
    ),
    max_size=12,
)  # fmt: skip
POLICIES = {"AUTOMATIC": AUTOMATIC, "REVIEWED": REVIEWED, "STRICT": STRICT}


def _act(setup: RegistrySetup, step: str, number: str) -> None:
    """Run one step; the promoter's policies are weaker than most policies of the service."""
    with contextlib.suppress(GateError):
        if step == "promote":
            setup.promote(int(number), policy=ALLOWS_OLD_EVIDENCE if number == "3" else AUTOMATIC)
        elif step == "old":
            setup.promote(7, days=200, policy=ALLOWS_OLD_EVIDENCE)
        elif step in ("away", "there"):
            _make_downloads_fail(setup, bad=step == "away")
        elif step == "back":
            rollback(setup.registry, NAME, ledger=setup.ledger, reason="worse")
        elif int(number) > len(setup.registry.versions):
            return
        elif step == "approve":
            setup.tag(number, "approved")
        elif step == "point":
            setup.move_champion(number)
        elif step == "untag":
            setup.stored(number).tags.clear()
        else:
            for tag in (Tag.ROLLED_BACK, Tag.REVERTED, Tag.POLICY, Tag.VERDICT):
                setup.tag(number, "2026: forged", tag)


def _make_downloads_fail(setup: RegistrySetup, *, bad: bool) -> None:
    """Let all downloads fail if `bad`, or work again."""

    def raise_missing(*_: object, **_options: object) -> Path:
        raise ArtifactMissing("its store is away")

    setup.registry.__dict__.pop("download", None)
    if bad:
        setup.registry.__dict__["download"] = raise_missing


class LedgerSummary:
    """The deployments and rollbacks of a version, computed independently of `ModelHistory`."""

    def __init__(self, entries: tuple[LedgerEntry, ...], version: str) -> None:
        last = {(e.action, e.version): index for index, e in enumerate(entries)}
        last_as_previous = {
            (e.action, e.previous_version): index for index, e in enumerate(entries)
        }
        passed, promoted, back, deployed = (
            last.get((action, version), -1)
            for action in ("passed", "promoted", "rolled_back", "deployed")
        )
        self.deployed = deployed > promoted
        self.rolled_back = last_as_previous.get(("rolled_back", version), -1) > max(
            passed, promoted, back
        )


def _may_be_deployed(
    setup: RegistrySetup, number: str, summary: LedgerSummary, policy: Policy
) -> bool:
    old = Digest.from_bytes(setup.stored(number).data) == setup.release(7).evidence.subject.sha256
    approved = setup.stored(number).tags.get(Tag.REVIEW) == "approved"
    reviewed = policy.review == "automatic" or approved
    passes = policy is not STRICT and reviewed and not old
    return not summary.rolled_back and (summary.deployed or passes)


TWO_DEPLOYED = ("promote 1", "look AUTOMATIC", "promote 2", "look AUTOMATIC")


@exhaustive
@given(ACTIONS)
@example(["back", "look AUTOMATIC", "untag 2", "point 2"])
@example(["back", "untag 2", "look REVIEWED", "promote 2", "point 2", "look STRICT"])
@example(["promote 3", "away", "look REVIEWED", "point 3", "there", "look STRICT"])
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@pytest.mark.proof
def test_service_policy_decides_whatever_promoters_and_editors_do(tmp_path_factory, steps):
    setup = RegistrySetup(tmp_path_factory.mktemp("place"))
    store = ModelStore(setup.folder / "store")
    for step in (*TWO_DEPLOYED, *steps, "there", "look AUTOMATIC"):
        do, _, what = step.rpartition(" ")
        if do != "look":
            _act(setup, *((do, what) if do else (what, "")))
            continue
        policy, before = POLICIES[what], setup.ledger.entries()
        serving = ModelHistory(before).serving
        reconcile = Reconciler(setup.registry, setup.ledger, policy, store=store)
        failed = [t for t in reconcile(NAME, cause="timer") if isinstance(t, Failed)]
        assert all(isinstance(item.error, RegistryError) for item in failed)
        created = setup.ledger.entries()[len(before) :]
        for number in (e.version for e in created if e.action == "deployed" and e.version):
            assert _may_be_deployed(setup, number, LedgerSummary(before, number), policy)
        if serving and LedgerSummary(before, serving).deployed:
            assert ("reverted", serving) not in [(e.action, e.previous_version) for e in created]


def test_deployment_checks_the_policy_without_the_guard(service):
    """The deployment checks the policy itself, because the guard may have failed in this pass."""
    setup = service.setup
    setup.promote(2)
    before = setup.lines()
    with pytest.raises(EvidenceError, match="at least 500 are required"):
        deploy_champion(setup.model(), service.store, STRICT, thoroughly=True)
    assert deploy_champion(setup.model(), service.store, REVIEWED, thoroughly=True) == []
    assert (service.live, setup.lines()) == ("1", before)
    assert service.reconcile_once() == [("deploy", "deployed", "2")]
    assert deploy_champion(setup.model(), service.store, STRICT, thoroughly=True) == []
    assert service.live == "2"


def test_version_with_unreadable_evidence_is_not_deployed(service, monkeypatch):
    setup = service.setup
    setup.promote(2)

    def fail(*_a, **_o):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("gate.registry.verify_release.load_records", fail)
        (result,) = deploy_champion(setup.model(), service.store, AUTOMATIC)
    assert (result.outcome, service.live) == ("refused", "1")
    assert "MemoryError" in result.reason
    assert service.reconcile_once() == [("deploy", "deployed", "2")]


@pytest.mark.parametrize("how", ["after a while", "when they were found"])
def test_damaged_file_in_the_store_is_restored(service, monkeypatch, how):
    manifest = service.store.live(NAME)
    slot = manifest.slots[EXACT]
    path = service.store.file(slot.sha256, slot.model)
    original = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(original[:-1] + b"x")
    assert service.reconcile_once() == []  # files are not hashed in each pass
    if how == "after a while":
        monkeypatch.setattr("gate.service.reconciler._RECHECK_S", -1.0)
    else:
        service.reconcile.report_damage(NAME)
    assert service.reconcile_once() == [("deploy", "deployed", "1")]
    assert path.read_bytes() == original
    assert service.reconcile_once() == []


@pytest.mark.parametrize("what", ["manifest", "file", "release", "store"])
def test_missing_content_of_the_store_is_restored(service, what):
    manifest = service.store.live(NAME)
    slot = manifest.slots[EXACT]
    link = service.store.live_link(NAME)
    removed_path = {
        "manifest": link / "manifest.json",
        "file": service.store.file(slot.sha256, slot.model),
        "release": link.resolve(),
        "store": service.store.root,
    }[what]
    if removed_path.is_dir():
        shutil.rmtree(removed_path)
    else:
        removed_path.unlink()
    service.restart()  # as `gate reconcile` does
    assert service.reconcile_once() == [("deploy", "deployed", "1")]
    assert service.live == "1"
    assert service.store.damage(NAME) is None
    assert service.reconcile_once() == []
