"""Version pages are brought up to date after a crash or a transient error, without extra requests."""

from __future__ import annotations

import logging

import pytest

from gate.deploy.store import ModelStore
from gate.errors import RegistryError, RegistryUnavailable, ResourceGone
from gate.registry.interface import CANDIDATE, Tag
from gate.registry.promotion import rollback
from gate.registry.version_page import PageUpdater, write_status
from gate.service.champion_guard import guard_champion
from gate.service.reconciler import Reconciler
from tests.registry.releases import NAME
from tests.registry.simulator import Watched
from tests.service.registry_setup import AUTOMATIC, REVIEWED, RegistrySetup


@pytest.fixture
def setup(tmp_path) -> RegistrySetup:
    """A model whose version 2 is the champion and version 1 was before; the pages are up to date."""
    created = RegistrySetup(tmp_path, AUTOMATIC)
    for seed in (1, 2):
        created.promote(seed)
    return created


def status(setup: RegistrySetup, number: str) -> str:
    return setup.stored(number).description.partition("\n")[0].removeprefix("Status: ")


def outdate(setup: RegistrySetup, *numbers: str) -> None:
    """Write an old status, as if the process was killed between the ledger entry and the page."""
    for number in numbers:
        setup.stored(number).description = "Status: out of date.\n\nThe body.\n"


def watch_calls(setup: RegistrySetup) -> Watched:
    setup.registry = Watched(setup.registry)
    return setup.registry


def test_no_requests_without_new_ledger_entries(setup):
    registry = watch_calls(setup)
    pages = PageUpdater()
    pages.follow(setup.model(), thoroughly=False)
    assert "set_description" not in registry.calls
    registry.calls.clear()
    pages.follow(setup.model(), thoroughly=False)
    assert registry.calls == []
    setup.deployed("2")
    pages.follow(setup.model(), thoroughly=False)
    assert registry.calls == []


def test_new_entries_update_the_pages_of_their_versions(setup):
    pages = PageUpdater()
    pages.follow(setup.model(), thoroughly=False)
    setup.promote(3)
    outdate(setup, "1", "2", "3")
    registry = watch_calls(setup)
    pages.follow(setup.model(), thoroughly=False)
    assert sorted(registry.calls) == ["set_description"] * 2 + ["version"] * 2
    assert [status(setup, n)[:9] for n in ("1", "2", "3")] == [
        "out of da", "was champ", "champion ",
    ]  # fmt: skip
    assert setup.stored("3").description.endswith("\n\nThe body.\n")


@pytest.mark.parametrize("thoroughly", [True, False])
def test_first_and_thorough_runs_update_older_pages(setup, thoroughly):
    pages = PageUpdater()
    if thoroughly:
        pages.follow(setup.model(), thoroughly=False)
    outdate(setup, "1", "2")
    pages.follow(setup.model(), thoroughly=thoroughly)
    assert status(setup, "1").startswith("was champion until")
    assert status(setup, "2").startswith("champion since")


def test_reconciler_updates_pages(setup, tmp_path):
    reconcile = Reconciler(
        setup.registry, setup.ledger, AUTOMATIC, store=ModelStore(tmp_path / "store")
    )
    outdate(setup, "2")
    reconcile(NAME, cause="timer")
    assert status(setup, "2").startswith("champion since")


def fail_set_description(setup: RegistrySetup, error: RegistryError | None) -> None:
    """Let `set_description` raise the error; None: let it work again."""
    setup.registry.__dict__.pop("set_description", None)
    if error is not None:

        def refuse(*_: object) -> None:
            raise error

        setup.registry.__dict__["set_description"] = refuse


def test_page_update_is_retried_while_the_registry_is_unavailable(setup, caplog):
    pages = PageUpdater()
    pages.follow(setup.model(), thoroughly=False)
    fail_set_description(setup, RegistryUnavailable("no answer"))
    with caplog.at_level(logging.WARNING):
        assert setup.promote(3).outcome == "promoted"
    assert "the page of version 3 of digits is out of date: no answer" in caplog.text
    pages.follow(setup.model(), thoroughly=False)
    fail_set_description(setup, None)
    pages.follow(setup.model(), thoroughly=False)
    assert status(setup, "3").startswith("champion since")
    assert status(setup, "2").startswith("was champion until")


@pytest.mark.parametrize("error", [RegistryError("too long"), ResourceGone("deleted")])
def test_refused_page_update_is_not_retried_each_time(setup, error):
    fail_set_description(setup, error)
    setup.promote(3)
    pages = PageUpdater()
    pages.follow(setup.model(), thoroughly=False)
    registry = watch_calls(setup)
    pages.follow(setup.model(), thoroughly=False)
    assert registry.calls == []
    pages.follow(setup.model(), thoroughly=True)
    assert registry.calls.count("set_description") == 2


def test_interrupted_rejection_is_finished(tmp_path):
    """The process was killed right after it wrote the ledger entry of the rejection."""
    setup = RegistrySetup(tmp_path, REVIEWED)
    setup.promote(1)
    setup.tag("1", "rejected")
    (passed_entry,) = setup.ledger.entries()
    setup.model().write("rejected", "no", version="1", about=passed_entry)
    PageUpdater().follow(setup.model(), thoroughly=False)
    assert setup.registry.aliases == {}
    assert setup.stored("1").tags[Tag.VERDICT] == "REJECTED by review"
    assert setup.stored("1").tags[Tag.REVIEW_RESULT].startswith("rejected at 20")
    assert status(setup, "1").startswith("rejected by review on 20")
    registry = watch_calls(setup)
    PageUpdater().follow(setup.model(), thoroughly=False)
    assert registry.calls == ["version", "alias candidate"]


@pytest.mark.parametrize(
    ("claim", "shown"),
    [
        ("PASS", "REFUSED (see gate.refused); handed in as PASS"),
        ("FAIL", "REFUSED (see gate.refused); handed in as FAIL"),
        ("**approved** by everybody", "REFUSED"),
    ],
)
def test_verdict_tag_of_a_refused_version_is_shown_as_a_claim(tmp_path, claim, shown):
    setup = RegistrySetup(tmp_path, REVIEWED)
    setup.promote(1)
    (passed_entry,) = setup.ledger.entries()
    setup.model().write(
        "refused", "handed in, and refused: it is old", version="1", about=passed_entry
    )
    setup.tag("1", claim, Tag.VERDICT)
    for _ in range(2):
        write_status(setup.model(), ("1",))
        assert setup.stored("1").tags[Tag.VERDICT] == shown
    assert status(setup, "1").startswith("handed in, and refused: it is old (20")
    setup.tag("1", claim, Tag.VERDICT)  # an editor restores the claimed tag
    PageUpdater().follow(setup.model(), thoroughly=True)
    assert setup.stored("1").tags[Tag.VERDICT] == shown


def test_resubmission_after_a_refusal_restores_the_verdict_tag(tmp_path):
    setup = RegistrySetup(tmp_path, REVIEWED)
    setup.promote(1)
    (passed_entry,) = setup.ledger.entries()
    setup.model().write("refused", "another one is the candidate", version="1", about=passed_entry)
    write_status(setup.model(), ("1",))
    assert setup.promote(1).version == "1"  # the same version, found by its tags
    assert setup.stored("1").tags[Tag.VERDICT] == "PASS"
    assert status(setup, "1").startswith("waits for review")


def test_tag_without_ledger_entry_does_not_change_the_page(setup):
    setup.tag("2", "REJECTED by review", Tag.VERDICT)
    setup.tag("2", "rejected", Tag.REVIEW_RESULT)
    write_status(setup.model(), ("2",))
    assert status(setup, "2").startswith("champion since")
    assert setup.registry.aliases[CANDIDATE] == "2"


def test_moves_by_hand_reverts_and_rollbacks_update_the_pages(setup):
    setup.move_champion("1")
    (accepted,) = guard_champion(setup.model(), AUTOMATIC, thoroughly=False)
    assert accepted.outcome == "accepted"
    assert status(setup, "2").endswith("replaced by version 1.")
    assert status(setup, "1").startswith("champion since")

    bad = setup.register_by_hand(9)
    setup.move_champion(bad)
    guard_champion(setup.model(), AUTOMATIC, thoroughly=False)
    assert status(setup, bad).startswith("reverted by the guard on 20")
    assert "the ledger has no entry that version 3 passed the gate" in status(setup, bad)

    rollback(setup.registry, NAME, ledger=setup.ledger, reason="sevens read as ones")
    assert status(setup, "1").startswith("rolled back on 20")
    assert "because sevens read as ones; version 2 serves again." in status(setup, "1")
    assert "again: version 1 was rolled back" in status(setup, "2")
