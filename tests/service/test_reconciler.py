"""The reconciler converges from any state of a simulated registry and a real store."""

from __future__ import annotations

import shutil

import pytest

from gate.deploy.store import EXACT
from gate.errors import (
    EvidenceError,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
)
from gate.service.monitoring import Kind
from gate.service.reconciler import Reconciler, deploy_champion
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.registry_setup import AUTOMATIC, REVIEWED, STRICT, Service, failing


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
@pytest.mark.parametrize("step", STEP_FUNCTIONS)
def test_failing_step_does_not_stop_the_other_steps(tmp_path, monkeypatch, step: Kind, error):
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

    result = {
        "guard": ("guard", "reverted", "1"),
        "review": ("review", "promoted", "2"),
        "deploy": ("deploy", "deployed", "2"),
    }
    with monkeypatch.context() as broken:
        broken.setattr(f"gate.service.reconciler.{STEP_FUNCTIONS[step]}", failing(error))
        actual = service.reconcile_once()
    expected = [result[kind] for kind in result if kind != step]
    if step == "review":
        expected.pop()  # version 1 is deployed already
    assert [item for item in actual if item[1] != type(error).__name__] == expected
    assert [item[0] for item in actual if item[1] == type(error).__name__] == [step]
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

    with monkeypatch.context() as patched:
        patched.setattr("gate.registry.verify_release.load_records", failing(MemoryError()))
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
