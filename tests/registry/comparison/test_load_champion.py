"""load_champion returns the champion as verified by the ledger, or the reason why it is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gate import Digest
from gate.errors import MismatchUnconfirmed, RegistryUnavailable
from gate.ledger.ledger import Ledger
from gate.records.champion_comparison import MAX_ROWS, Trend
from gate.records.layout import DECISION, EVIDENCE, RECORDS, TREND
from gate.registry.interface import CHAMPION, PREVIOUS
from gate.registry.load_champion import champion_if_any, load_champion
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME
from tests.registry.simulator import Simulator, Watched

POLICY = builders.policy()


@pytest.fixture
def registry(ledger: Ledger, first: Release) -> Simulator:
    """A registry whose champion is version 1."""
    created = Simulator()
    assert promote(created, first, ledger=ledger).version == "1"
    return created


def make_model(registry: Simulator | Watched, ledger: Ledger) -> RegisteredModel:
    return RegisteredModel(registry, ledger, NAME)  # type: ignore[arg-type]


def test_champion_has_the_promoted_file_evidence_and_decision(
    registry: Simulator, ledger: Ledger, first: Release, tmp_path: Path
) -> None:
    lines = len(ledger.entries())
    champion = load_champion(make_model(registry, ledger), into=tmp_path)
    assert (champion.state, champion.version, champion.absent) == ("proven", "1", None)
    assert champion.onnx_path is not None
    assert champion.sha256 == Digest.from_file(champion.onnx_path)
    assert champion.evidence == first.evidence
    assert champion.decision == first.decision
    assert [row.sha256 for row in champion.trend.rows] == [champion.sha256]
    assert len(ledger.entries()) == lines


def test_registry_without_champion_gives_a_first_release(ledger: Ledger, tmp_path: Path) -> None:
    champion = load_champion(make_model(Simulator(), ledger), into=tmp_path)
    assert champion.state == "first"
    assert champion.absent


def test_champion_is_found_in_the_ledger_without_its_alias(
    registry: Simulator, ledger: Ledger, tmp_path: Path
) -> None:
    del registry.aliases[CHAMPION]
    assert load_champion(make_model(registry, ledger), into=tmp_path).version == "1"


def test_rolled_back_version_is_not_the_champion(
    registry: Simulator, ledger: Ledger, second: Release, tmp_path: Path
) -> None:
    promote(registry, second, ledger=ledger)
    rollback(registry, NAME, ledger=ledger, reason="wrong")
    del registry.aliases[CHAMPION], registry.aliases[PREVIOUS]
    assert load_champion(make_model(registry, ledger), into=tmp_path).version == "1"


def test_champion_without_evidence_is_unrecorded(
    registry: Simulator, ledger: Ledger, tmp_path: Path
) -> None:
    del registry.versions[0].extra_files[f"{RECORDS}/{EVIDENCE}"]
    champion = load_champion(make_model(registry, ledger), into=tmp_path)
    assert (champion.state, champion.evidence) == ("unrecorded", None)
    assert "its evidence can't be read" in str(champion.absent)


def test_decision_on_another_file_is_ignored(
    registry: Simulator, ledger: Ledger, second: Release, tmp_path: Path
) -> None:
    path = f"{RECORDS}/{DECISION}"
    registry.versions[0].extra_files[path] = second.decision.to_json().encode()
    assert load_champion(make_model(registry, ledger), into=tmp_path).decision is None


def test_mismatch_is_not_recorded_when_loading_the_champion(
    registry: Simulator, ledger: Ledger, tmp_path: Path
) -> None:
    """Only promotion and the guard download twice and write a violation entry."""
    registry.versions[0].data = b"other"
    lines = len(ledger.entries())
    with pytest.raises(MismatchUnconfirmed, match="not flagged"):
        load_champion(make_model(registry, ledger), into=tmp_path)
    shown = champion_if_any(make_model(registry, ledger), into=tmp_path)
    assert shown.state == "unavailable"
    assert "not flagged" in str(shown.absent)
    assert len(ledger.entries()) == lines


def test_unavailable_registry_is_raised_or_reported(
    registry: Simulator, ledger: Ledger, tmp_path: Path
) -> None:
    def raise_unavailable(call: str, _: int) -> None:
        raise RegistryUnavailable("nothing answers")

    watched = Watched(registry)
    watched.before = raise_unavailable
    with pytest.raises(RegistryUnavailable):
        load_champion(make_model(watched, ledger), into=tmp_path)
    assert champion_if_any(make_model(watched, ledger), into=tmp_path).state == "unavailable"


def test_trend_grows_with_each_release(
    registry: Simulator, ledger: Ledger, second: Release, tmp_path: Path
) -> None:
    before = load_champion(make_model(registry, ledger), into=tmp_path).trend
    release = dataclasses.replace(second, trend=before)
    promote(registry, release, ledger=ledger)
    trend = load_champion(make_model(registry, ledger), into=tmp_path).trend
    assert len(trend.rows) == 2
    assert trend.rows[0] == before.rows[0]
    assert trend.rows[1].sha256 == second.evidence.subject.sha256


@pytest.mark.parametrize(
    "text",
    [
        b"no JSON",
        b'{"rows": [{}]}',
        b"[" * 100_000,
        b" " * (1 << 17) + b"{}",
        Trend().followed_by(builders.evidence()).to_json().replace("1.1", '"x"').encode(),
        b'{"rows": [' + b",".join([b'{"sha256": "' + b"0" * 64 + b'", "measured_at": ""}'] * (MAX_ROWS + 1)) + b"]}",
    ],
    ids=["text", "row", "nested", "long", "words", "many"],
)  # fmt: skip
def test_invalid_trend_is_replaced_by_an_empty_one(
    registry: Simulator, ledger: Ledger, tmp_path: Path, text: bytes
) -> None:
    registry.versions[0].extra_files[f"{RECORDS}/{TREND}"] = text
    champion = load_champion(make_model(registry, ledger), into=tmp_path)
    assert champion.state == "proven"
    assert champion.trend == Trend()
