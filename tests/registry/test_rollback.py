from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gate.errors import DigestMismatch, EvidenceError, PromotionConflict, RegistryError
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Ledger
from gate.registry.eligibility import veto
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.version_page import PageUpdater
from gate.service.champion_guard import guard_champion
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file, release
from tests.registry.simulator import Crash, Simulator, Watched

POLICY = builders.policy()
CALLS_OF_A_ROLLBACK = [
    "alias champion", "alias previous", "version", "download", "version", "set_tag",
    "alias champion", "alias previous", "set_alias previous", "alias previous", "alias champion",
    "set_alias champion", "alias champion", "version", "set_description", "version",
    "set_description",
]  # fmt: skip


@pytest.fixture
def registry(ledger: Ledger, first: Release, second: Release) -> Watched:
    """A registry whose champion is version 2; version 1 is `previous`."""
    created = Watched(Simulator())
    for each in (first, second):
        promote(created, each, ledger=ledger)
    created.calls.clear()
    return created


def history(ledger: Ledger) -> ModelHistory:
    return ModelHistory(ledger.entries())


def roll_back(registry, ledger: Ledger, reason: str = "sevens read as ones"):
    return rollback(registry, NAME, ledger=ledger, reason=reason)


def test_rollback_swaps_the_aliases(registry: Watched, ledger: Ledger, first: Release) -> None:
    outcome = roll_back(registry, ledger)
    assert registry.calls == CALLS_OF_A_ROLLBACK
    assert outcome.outcome == "rolled_back"
    assert (outcome.version, outcome.previous_version) == ("1", "2")
    assert registry.inner.aliases[CHAMPION] == "1"
    assert registry.inner.aliases[PREVIOUS] == "2"
    assert "sevens read as ones" in registry.inner.versions[1].tags[Tag.ROLLED_BACK]
    line = ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("rolled_back", "1", "2")
    assert line.sha256 == first.decision.subject_sha256
    assert line.reason == "sevens read as ones"


def test_rollback_entry_blocks_a_version_and_a_tag_alone_does_not(
    registry: Watched, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    model = RegisteredModel(registry, ledger, NAME)
    registry.inner.set_tag(NAME, "1", key=Tag.ROLLED_BACK, value="2026: by an editor")
    for _ in range(2):
        assert veto(model, "1", history=history(ledger)).problem is None
    assert [record.args[:2] for record in caplog.records] == [("1", NAME)]
    assert roll_back(registry, ledger).version == "1"
    del registry.inner.versions[1].tags[Tag.ROLLED_BACK]
    problem = veto(model, "2", history=history(ledger)).problem
    assert problem is not None
    assert "was rolled back" in problem
    assert "sevens read as ones" in problem


@pytest.mark.rows(5)
@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.proof)])
@pytest.mark.parametrize("index", range(len(CALLS_OF_A_ROLLBACK)))
def test_next_rollback_finishes_a_crash_at_any_call(
    registry: Watched, ledger: Ledger, index: int, moment: str
) -> None:
    def crash(_: str, at: int) -> None:
        if at == index:
            raise Crash

    setattr(registry, moment, crash)
    with pytest.raises(Crash):
        roll_back(registry, ledger)
    simulator = registry.inner
    assert simulator.aliases[CHAMPION] in ("1", "2")
    if index > CALLS_OF_A_ROLLBACK.index("set_alias champion") + 1:  # no longer pending
        with pytest.raises(RegistryError, match="was itself rolled back"):  # no move is pending
            roll_back(simulator, ledger)
        assert ledger.entries()[-2].action == "rolled_back"
        PageUpdater().follow(RegisteredModel(simulator, ledger, NAME), thoroughly=False)
        assert_pages(simulator)
        return
    assert roll_back(simulator, ledger).version == "1"
    assert (simulator.aliases[CHAMPION], simulator.aliases[PREVIOUS]) == ("1", "2")
    assert Tag.ROLLED_BACK in simulator.versions[1].tags
    assert [e.action for e in ledger.entries()] == ["promoted", "promoted", "rolled_back"]
    assert_pages(simulator)


def assert_pages(simulator: Simulator) -> None:
    """Assert that the pages show the rollback from version 2 to version 1."""
    first, second = (version.description for version in simulator.versions)
    assert first.startswith("Status: champion since")
    assert "again: version 2 was rolled back" in first
    assert second.startswith("Status: rolled back on")
    assert "because sevens read as ones; version 1 serves again." in second


def move_by_hand(registry: Watched, version: str) -> None:
    """Move `champion` by hand, as in the web interface of the registry."""
    registry.inner.aliases[CHAMPION] = version


def run_guard(registry: Watched, ledger: Ledger) -> None:
    """Let the service's guard accept the move."""
    (result,) = guard_champion(RegisteredModel(registry, ledger, NAME), POLICY, thoroughly=False)
    assert result.outcome == "accepted"


def skip_guard(registry: Watched, ledger: Ledger) -> None:
    """Leave the move unprocessed."""


@pytest.mark.parametrize("guard_state", [skip_guard, run_guard])
def test_rollback_after_a_move_by_hand_is_recorded(
    registry: Watched, ledger: Ledger, guard_state, second: Release
) -> None:
    """The alias is not moved again, whether the guard ran before the rollback or not."""
    move_by_hand(registry, "1")
    guard_state(registry, ledger)
    registry.calls.clear()
    outcome = roll_back(registry, ledger)
    assert (outcome.version, outcome.previous_version) == ("1", "2")
    assert "set_alias champion" not in registry.calls
    assert registry.inner.aliases == {CANDIDATE: "2", CHAMPION: "1", PREVIOUS: "2"}
    line = ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("rolled_back", "1", "2")
    assert "by hand" in line.reason
    again = promote(registry, second, ledger=ledger)
    assert (again.outcome, "sevens read as ones" in again.reason) == ("refused", True)
    move_by_hand(registry, "2")
    problem = veto(RegisteredModel(registry, ledger, NAME), "2", history=history(ledger)).problem
    assert "was rolled back" in (problem or "")


@pytest.mark.rows(5)
@pytest.mark.parametrize("guard_state", [skip_guard, run_guard])
@pytest.mark.parametrize("index", range(16))
@pytest.mark.parametrize("moment", ["after", pytest.param("before", marks=pytest.mark.proof)])
def test_rollback_by_hand_is_recorded_once_despite_crashes(
    registry: Watched, ledger: Ledger, guard_state, index: int, moment: str
) -> None:
    move_by_hand(registry, "1")
    guard_state(registry, ledger)
    registry.calls.clear()

    def crash(_: str, at: int) -> None:
        if at == index:
            raise Crash

    setattr(registry, moment, crash)
    with contextlib.suppress(Crash):
        roll_back(registry, ledger)
    setattr(registry, moment, lambda *_: None)
    with contextlib.suppress(RegistryError):  # the rollback was already finished
        roll_back(registry, ledger)
    assert registry.inner.aliases == {CANDIDATE: "2", CHAMPION: "1", PREVIOUS: "2"}
    assert [e.action for e in ledger.entries()].count("rolled_back") == 1


@pytest.mark.parametrize("guard_state", [skip_guard, run_guard])
def test_rollback_of_a_move_by_hand_restores_the_last_champion(
    registry: Watched, ledger: Ledger, tmp_path: Path, guard_state
) -> None:
    """`previous` is not the target: it was not updated by the move by hand."""
    reviewed = builders.policy(review="required")
    waiting = release(onnx_file(tmp_path / "third.onnx", seed=3), policy=reviewed)
    promote(registry, waiting, policy=reviewed, ledger=ledger)
    registry.inner.set_tag(NAME, "3", key=Tag.REVIEW, value="approved")
    move_by_hand(registry, "3")
    guard_state(registry, ledger)
    outcome = roll_back(registry, ledger)
    assert (outcome.version, outcome.previous_version) == ("2", "3")
    assert registry.inner.aliases == {CANDIDATE: "3", CHAMPION: "2", PREVIOUS: "3"}
    assert Tag.ROLLED_BACK in registry.inner.versions[2].tags
    line = ledger.entries()[-1]
    assert (line.action, line.version, line.previous_version) == ("rolled_back", "2", "3")
    assert ("in the ledger was 2" in line.reason) is (guard_state is skip_guard)


def test_rollback_to_changed_bytes_is_refused(
    registry: Watched, ledger: Ledger, second: Release
) -> None:
    """The digest of the ledger counts, although the tag matches the changed bytes."""
    registry.inner.versions[0].data = second.onnx_path.read_bytes()
    registry.inner.versions[0].tags[Tag.SHA256] = second.decision.subject_sha256.hex
    with pytest.raises(DigestMismatch, match="version 1"):
        roll_back(registry, ledger)
    assert registry.inner.aliases[CHAMPION] == "2"
    assert Tag.ROLLED_BACK not in registry.inner.versions[1].tags
    assert ledger.entries()[-1].action == "refused"


def test_rollback_to_a_version_without_ledger_entry_is_refused(registry: Watched, tmp_path) -> None:
    empty = Ledger(tmp_path / "empty.jsonl")
    with pytest.raises(EvidenceError, match="no entry that version 1"):
        roll_back(registry, empty)
    assert registry.inner.aliases[CHAMPION] == "2"
    assert [e.action for e in empty.entries()] == ["refused"]


def test_champion_moved_during_rollback_is_a_conflict(
    registry: Watched, ledger: Ledger, third: Release
) -> None:
    registry.inner.create_version(NAME, third.draft())

    def interfere(call: str, _: int) -> None:
        if call == "set_tag":
            registry.inner.aliases[CHAMPION] = "3"

    registry.after = interfere
    with pytest.raises(PromotionConflict, match="points at version 3"):
        roll_back(registry, ledger)
    assert registry.inner.aliases[CHAMPION] == "3"
    assert ledger.entries()[-1].action == "conflict"
