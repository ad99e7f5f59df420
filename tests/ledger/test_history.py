"""ModelHistory derives the state of a model from its ledger entries."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Digest
from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import HistoryCache, ModelHistory

ACTIONS = get_args(Action)
DIGEST = Digest.from_bytes(b"model")
SERVING = {"promoted", "unchanged", "rolled_back", "reverted"}


def entry(action: str, version: str | None = "1", **fields) -> LedgerEntry:
    defaults = {"sha256": DIGEST, "reason": "because", "registry": "here", "model": "digits"}
    return LedgerEntry(action=action, version=version, actor="me", **defaults | fields)


def history(*lines: str) -> ModelHistory:
    """Make a history; each line is an action and a version, or an action without a version."""
    parts = (line.split() for line in lines)
    return ModelHistory(tuple(entry(action, *(rest or [None])) for action, *rest in parts))


@pytest.mark.parametrize("action", ACTIONS)
def test_meaning_of_each_action(action):
    first = history(f"{action} 1")
    approves = action in SERVING | {"passed"}
    assert (first.approving_entry("1") is not None) is approves
    assert first.passed_any is approves
    assert first.was_served("1") is (action in SERVING)
    assert first.serving == ("1" if action in SERVING else None)
    assert first.served == (("1",) if action in SERVING else ())
    silent = (
        "reverted", "deployed", "not_deployed", "replay_failed", "violation", "absolved", "conflict", "overridden",
        "ledger_accepted", "ledger_imported", "same_registry",
    )  # fmt: skip
    assert (first.standing("1") is not None) is (action not in silent)
    assert [e.version for e in first.waiting] == (["1"] if action == "passed" else [])
    assert first.since_passed("1") == (action,)


@pytest.mark.parametrize(
    ("lines", "serving", "served"),
    [
        ([], None, ()),
        (["passed 1", "refused 2"], None, ()),
        (["promoted 1", "promoted 2"], "2", ("2", "1")),
        (["promoted 1", "promoted 2", "rolled_back 1"], "1", ("1", "2")),
        (["promoted 1", "promoted 2", "reverted 1", "violation 2"], "1", ("1", "2")),
        (["promoted 1", "reverted"], None, ("1",)),
        (["promoted 1", "unchanged 1", "deployed 1", "conflict 7"], "1", ("1",)),
        (["promoted 1", "promoted 2", "reverted", "promoted 1"], "1", ("1", "2")),
    ],
)
def test_current_and_earlier_champions(lines, serving, served):
    assert (history(*lines).serving, history(*lines).served) == (serving, served)


@pytest.mark.parametrize(
    ("lines", "waiting"),
    [
        ([], []),
        (["passed 1", "passed 2"], ["1", "2"]),
        (["passed 1", "rejected 1"], []),
        (["passed 1", "promoted 1"], []),
        (["passed 1", "refused 1", "passed 2", "passed 1"], ["1", "2"]),
        (["passed 1", "promoted 1", "unchanged 1"], []),
        (["promoted 1", "promoted 2", "passed 1"], ["1"]),
        (["passed 1", "violation 1"], ["1"]),
        (["passed 1", "violation 1", "absolved 1"], ["1"]),
        (["passed 1", "reverted 1", "conflict 1", "not_deployed 1"], ["1"]),
    ],
)
def test_versions_waiting_for_review(lines, waiting):
    assert [line.version for line in history(*lines).waiting] == waiting


@pytest.mark.parametrize(
    ("lines", "actions"),
    [
        ([], ()),
        (["rejected 1"], ("rejected",)),
        (["rejected 1", "passed 1"], ("passed",)),
        (["promoted 1", "rejected 1", "rejected 2"], ("promoted", "rejected")),
        (["rejected 1", "promoted 1", "deployed 1"], ("promoted", "deployed")),
        (["promoted 1", "rejected 1", "unchanged 1"], ("promoted", "rejected", "unchanged")),
    ],
)
def test_passing_again_resets_earlier_entries(lines, actions):
    assert history(*lines).since_passed("1") == actions


def test_approving_entry_is_the_last_one_with_digests():
    old, new = entry("passed"), entry("promoted", sha256=Digest.from_bytes(b"other"))
    assert ModelHistory((old, new)).approving_entry("1") == new
    assert ModelHistory((old, entry("promoted", sha256=None))).approving_entry("1") == old
    assert ModelHistory((entry("promoted", sha256=None),)).approving_entry("1") is None


@pytest.mark.parametrize(
    ("lines", "action"),
    [
        (["promoted 1"], None),
        (["promoted 1", "deployed 1"], "deployed"),
        (["deployed 1", "deployed 2", "deployed 1"], "deployed"),
        (["deployed 1", "not_deployed 1"], "not_deployed"),
        (["deployed 1", "not_deployed 2"], "deployed"),
        (["deployed 1", "replay_failed 1"], "replay_failed"),
        (["not_deployed 1", "deployed 1"], "deployed"),
        (["deployed 1", "promoted 1"], None),
        (["promoted 1", "deployed 1", "passed 1"], "deployed"),
        (["promoted 1", "deployed 1", "promoted 2", "rolled_back 1"], "deployed"),
        (["promoted 1", "deployed 2"], None),
    ],
)
def test_last_deployment_since_the_promotion(lines, action):
    last = history(*lines).deployment_of(entry("promoted", "1"))
    assert (None if last is None else last.action) == action


def test_version_promoted_after_its_deployment_was_not_deployed():
    assert history("promoted 1", "deployed 1", "passed 1").was_deployed("1")
    assert not history("promoted 1", "deployed 1", "promoted 1").was_deployed("1")


def test_deployment_of_other_bytes_under_the_number_does_not_count():
    second = entry("deployed", sha256=Digest.from_bytes(b"other"))
    assert not ModelHistory((entry("promoted"), second)).was_deployed("1")
    assert not ModelHistory((second,)).was_deployed("1")


BACK = "rolled_back 1 2"
"""A rollback from version 2 to version 1."""


def with_previous(*lines: str) -> ModelHistory:
    parts = (line.split() for line in lines)
    return ModelHistory(
        tuple(
            entry(action, version, previous_version=previous[0] if previous else None)
            for action, version, *previous in parts
        )
    )


@pytest.mark.parametrize(
    ("lines", "bad"),
    [
        ([], set()),
        (["promoted 1", "promoted 2 1"], set()),
        ([BACK], {"2"}),
        ([BACK, "deployed 1", "refused 2", "unchanged 2", "conflict 2", "violation 2"], {"2"}),
        ([BACK, "passed 2"], set()),
        ([BACK, "promoted 2 1"], set()),
        ([BACK, "promoted 3 1"], {"2"}),
        ([BACK, "rolled_back 2 1"], {"1"}),
        ([BACK, "promoted 3 1", "rolled_back 1 3"], {"2", "3"}),
        (["reverted 1 2"], set()),
    ],
)
def test_rollback_counts_until_the_version_passes_or_serves_again(lines, bad):
    first = with_previous(*lines)
    assert {version for version in "123" if first.rollback_of(version)} == bad
    for version in bad:
        line = first.rollback_of(version)
        assert first.without(line).rollback_of(version) is None


def test_versions_with_the_same_bytes():
    second = entry("promoted", "3", sha256=Digest.from_bytes(b"other"))
    again = entry("promoted", "4", sha256=Digest.from_bytes(b"other"))
    first = ModelHistory(
        (entry("passed", "2"), entry("promoted", "4"), second, again, entry("refused", "5"))
    )
    assert first.versions_with_bytes(DIGEST) == ("2",)


def test_last_promotion_of_a_version():
    first, last = entry("promoted"), entry("promoted", reason="again")
    assert ModelHistory((first, last, entry("passed"))).promotion_of("1") is last
    assert ModelHistory((entry("passed"),)).promotion_of("1") is None


VERSIONS = st.sampled_from(["1", "2", "3", None])
LINES = st.lists(st.builds(entry, st.sampled_from(ACTIONS), VERSIONS), max_size=12)


def version_results(model_history: ModelHistory, version: str) -> tuple[object, ...]:
    return (model_history.approving_entry(version), model_history.was_served(version), model_history.standing(version),
            model_history.since_passed(version))  # fmt: skip


@given(LINES)
def test_entries_of_one_version_do_not_affect_another(lines):
    for version in ("1", "2", "3"):
        alone = tuple(line for line in lines if line.version == version)
        assert version_results(ModelHistory(tuple(lines)), version) == version_results(
            ModelHistory(alone), version
        )


@given(LINES)
def test_champion_is_the_last_version_that_served(lines):
    first = ModelHistory(tuple(lines))
    assert first.serving in (None, *first.served[:1])
    assert set(first.served) == {v for v in ("1", "2", "3") if first.was_served(v)}
    assert len(set(first.served)) == len(first.served)


@given(LINES, st.sampled_from(["conflict", "deployed", "not_deployed"]))
def test_deployment_and_conflict_entries_change_no_state(lines, action):
    first, second = ModelHistory(tuple(lines)), ModelHistory((*lines, entry(action)))
    assert (first.serving, first.served, first.waiting) == (
        second.serving,
        second.served,
        second.waiting,
    )


def test_cached_history_is_dropped_when_entries_change() -> None:
    histories, name = HistoryCache(), frozenset({"here"})
    for lines in (["promoted 1", "promoted 2"], ["promoted 1"], ["promoted 1", "promoted 3"], []):
        entries = history(*lines).entries
        for model, expected in (("digits", entries), ("letters", ())):
            for _ in range(2):
                cached = histories.history(entries, model, registries=name)
                assert cached.entries == expected
    assert histories.history(entries, "digits", registries=frozenset({"there"})).entries == ()


CREATED_AT = "2026-03-01T12:00:00.123+00:00"


@pytest.mark.parametrize(
    ("action", "fields", "judged"),
    [
        ("refused", {"made_at": CREATED_AT}, True),
        ("refused", {"made_at": "2026-02-01T12:00:00.123+00:00"}, False),
        ("promoted", {"at": "2026-03-01T12:00:00+00:00"}, True),
        ("promoted", {"at": "2026-03-01T11:56:00+00:00"}, True),  # the clocks differ
        ("promoted", {"at": "2026-03-01T11:54:00+00:00"}, False),
        ("promoted", {"at": "once upon a time"}, True),
        ("reverted", {"made_at": CREATED_AT}, True),
        ("conflict", {"made_at": CREATED_AT}, False),
        ("deployed", {"made_at": CREATED_AT}, False),
    ],
)
def test_outcome_counts_only_after_the_version_was_created(action, fields, judged):
    first = ModelHistory((entry(action, **fields),))
    assert first.has_outcome("1", created_at=CREATED_AT) is judged
    assert first.has_outcome("2", created_at=CREATED_AT) is False
    assert first.has_outcome("1", created_at=None) is (action not in ("conflict", "deployed"))


def test_versions_passed_before_signing_began():
    lines = [entry("promoted", "1"), entry("promoted", "2", signers=("k",)), entry("promoted", "3")]
    first = ModelHistory(tuple(lines))
    matches = {number: first.passed_before_signing(number) for number in "1234"}
    assert matches == {"1": True, "2": False, "3": False, "4": False}
    assert ModelHistory((*lines, entry("promoted", "1"))).passed_before_signing("1") is False
