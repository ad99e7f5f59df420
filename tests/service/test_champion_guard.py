"""The guard reverts `champion` when someone points it at a version that must not serve."""

from __future__ import annotations

import tempfile
from datetime import datetime, timedelta

import pytest

from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    MismatchUnconfirmed,
    RegistryError,
    StorageError,
)
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import declare_addresses
from gate.registry.interface import Tag
from gate.registry.release import Release
from gate.service.champion_guard import guard_champion
from gate.service.submissions import process_reviews
from tests.ledger.rows import replace_rows, rows
from tests.service.registry_setup import AUTOMATIC, REVIEWED, RegistrySetup
from tests.storage.test_untrusted import DEEP


@pytest.fixture
def setup(tmp_path) -> RegistrySetup:
    """A model whose versions 1 and 2 were promoted; 2 is the champion."""
    created = RegistrySetup(tmp_path)
    created.promote(1)
    created.promote(2)
    return created


def guard(setup: RegistrySetup, *, policy=AUTOMATIC, thoroughly: bool = False):
    return [
        (t.outcome, t.version) for t in guard_champion(setup.model(), policy, thoroughly=thoroughly)
    ]


def change_record(name, change):
    """Change a record of version 3 in the registry."""

    def tamper(setup):
        records = setup.stored("3").extra_files
        records[f"gate/{name}.json"] = change(setup, records[f"gate/{name}.json"])

    return tamper


def change_onnx_file(setup):
    setup.stored("3").data += b"\0"


def write_rollback_entry(setup):
    """Write the ledger entry without the tag."""
    about = setup.model().history().approving_entry("2")
    setup.model().write("rolled_back", "wrong", version="2", previous="3", about=about)


INELIGIBLE = {
    "missing records": (lambda setup: setup.stored("3").extra_files.clear(), "no evidence.json"),
    "other bytes": (change_onnx_file, "has digest"),
    "exchanged evidence": (
        change_record("evidence", lambda setup, _: setup.stored("1").extra_files["gate/evidence.json"]),
        "exchanged"),
    "edited evidence": (
        change_record("evidence", lambda _, data: data.replace(b'"samples": 4', b'"samples": 5')),
        "exchanged"),
    "edited decision": (
        change_record("decision", lambda _, data: data.replace(b'"PASS"', b'"FAIL"', 1)), "edited"),
    "nested evidence": (change_record("evidence", lambda *_: DEEP), "nested 20000 deep"),
    "nested decision": (change_record("decision", lambda *_: DEEP), "nested 20000 deep"),
    "rejected": (lambda setup: setup.tag("3", "rejected"), "rejected"),
    "rolled back": (write_rollback_entry, "rolled back"),
    "not in the ledger": (
        lambda setup: replace_rows(setup.ledger.state, rows(setup.ledger.state)[:2]),
        "the ledger has no entry"),
}  # fmt: skip


def serve_third_then_second(setup, **release):
    """Promote version 3, then move `champion` back to version 2 by hand."""
    setup.promote(3, **release)
    setup.move_champion("2")
    guard(setup)
    assert setup.champion == "2"


@pytest.mark.rows(4)
@pytest.mark.parametrize(("tamper", "words"), INELIGIBLE.values(), ids=INELIGIBLE)
def test_ineligible_version_is_reverted(setup, tamper, words):
    serve_third_then_second(setup)
    tamper(setup)
    setup.move_champion("3")
    assert guard(setup) == [("reverted", "2")]
    assert setup.champion == "2"
    line = setup.ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("reverted", "2", "3")
    assert line.cause == "delivery 1"
    assert words in line.reason
    assert words in setup.stored("3").tags[Tag.REVERTED]
    before = setup.lines()
    assert guard(setup, thoroughly=True) == []
    assert setup.lines() == before


AGES = {"too old": (91, "91.0 days old"), "of the future": (-30, "from the future")}


@pytest.mark.parametrize(("days", "words"), AGES.values(), ids=list(AGES))
def test_version_with_evidence_of_an_invalid_age_is_reverted(setup, monkeypatch, days, words):
    """The promoter has another clock, or a gate without an age limit."""
    with monkeypatch.context() as patched:
        patched.setattr(Release, "age_problem", lambda *_, **__: None)
        setup.promote(3, days=days)
    assert guard(setup, thoroughly=True) == [("reverted", "2")]
    assert words in setup.ledger.entries()[-1].reason
    setup.move_champion("3")
    assert guard(setup) == [("reverted", "2")]


@pytest.mark.parametrize("deployed", [True, False])
def test_champion_with_old_evidence_is_kept(setup, monkeypatch, deployed):
    if deployed:
        setup.deployed("2")
    monkeypatch.setattr("gate.registry.verify_release.datetime", clock_ahead(days=400))
    assert guard(setup, thoroughly=True) == []
    assert setup.champion == "2"


def test_move_by_hand_to_old_evidence_is_reverted(setup, monkeypatch):
    setup.deployed("1")
    setup.move_champion("1")
    monkeypatch.setattr("gate.registry.verify_release.datetime", clock_ahead(days=400))
    assert guard(setup) == [("reverted", "2")]
    assert "400.0 days old" in setup.ledger.entries()[-1].reason


def clock_ahead(**ahead):
    """Return a datetime class whose clock is ahead."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(**ahead)

    return Shifted


@pytest.mark.parametrize("thoroughly", [True, False])
def test_tags_without_ledger_entries_do_not_revert(setup, caplog, thoroughly):
    setup.tag("2", "2026: by one editor", Tag.ROLLED_BACK)
    setup.tag("2", "2026: by one editor", Tag.REVERTED)
    setup.tag("2", "FAIL", Tag.VERDICT)
    for _ in range(3):
        assert guard(setup, thoroughly=thoroughly) == []
    assert setup.champion == "2"
    assert [record.levelname for record in caplog.records] in (["WARNING"], [])


@pytest.mark.parametrize("thoroughly", [True, False])
def test_ledger_without_the_model_changes_nothing(setup, tmp_path, thoroughly):
    ledger_with_history, setup.ledger = setup.ledger, Ledger(tmp_path / "another.jsonl")
    with pytest.raises(RegistryError, match="--same-registry"):
        guard(setup, thoroughly=thoroughly)
    assert (setup.champion, setup.lines()) == ("2", [])
    setup.ledger, setup.registry.identity = ledger_with_history, "http://Mlflow:80/"
    with pytest.raises(RegistryError):
        guard(setup)
    declare_addresses(setup.ledger, "http://mlflow", ["simulator"])
    assert guard(setup, thoroughly=True) == []


def fail_downloads(registry, *numbers, error=ArtifactMissing("its store is away")):  # noqa: B008
    """Let downloads of these versions fail."""
    download = registry.download

    def fail_for_versions(name, number, folder, **options):
        if number in numbers:
            raise error
        return download(name, number, folder, **options)

    registry.download = fail_for_versions


@pytest.mark.parametrize(
    "error",
    [
        RegistryError("it is a pipe"),
        MismatchUnconfirmed("a page"),
        DigestMismatch("a file called a\udcff\0.onnx"),
    ],
)
def test_download_error_caused_by_an_editor_reverts(setup, error):
    setup.move_champion("1")
    fail_downloads(setup.registry, "1", error=error)
    assert guard(setup) == [("reverted", "2")]
    text = str(error).encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    assert text in setup.ledger.entries()[-1].reason


def test_unreviewed_version_is_reverted_without_a_temporary_folder(tmp_path, monkeypatch):
    setup = RegistrySetup(tmp_path, REVIEWED)
    setup.promote(1)
    setup.tag("1", "approved")
    list(process_reviews(setup.model(), REVIEWED))
    setup.promote(2)
    setup.move_champion("2")
    with monkeypatch.context() as broken:
        broken.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert guard(setup, policy=REVIEWED) == [("reverted", None)]
        with pytest.raises(StorageError, match="temporary folder"):
            guard(setup, policy=REVIEWED)
    assert guard(setup, policy=REVIEWED) == [("restored", "1")]
