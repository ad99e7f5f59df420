"""The status line on a version's page, derived from the ledger alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gate.ledger.entry import LedgerEntry
from gate.ledger.history import ModelHistory
from gate.registry.reviews import ReviewSettings
from gate.registry.version_page import (
    DESCRIPTION_LIMIT,
    HANDED_IN,
    MARK,
    STATUS_LIMIT,
    VersionStatus,
    with_status,
)

Line = tuple[str, str | None, str | None]


def line(action: str, version: str | None, previous: str | None = None, **more: Any) -> LedgerEntry:
    fields = {"at": "2026-03-01T09:30:00+00:00", "reason": "because of it.", "comment": None} | more
    return LedgerEntry.model_validate(
        {"action": action, "version": version, "previous_version": previous, "registry": "r",
         "model": "m", **fields}
    )  # fmt: skip


def status(lines: list[LedgerEntry], version: str) -> str | None:
    version_status = VersionStatus.from_history(ModelHistory(tuple(lines)), version)
    return (
        None
        if version_status is None
        else version_status.status_line(ReviewSettings()).removeprefix(MARK)
    )


AT = "2026-03-01 09:30 UTC"
DARK = "too \u2039b\u203adark\u2039/b\u203a"
PROMOTED_1, PROMOTED_2 = line("promoted", "1"), line("promoted", "2", "1")
PASSED_2 = line("passed", "2", "1")
REJECTED_2 = line("rejected", "2", comment="too <b>dark</b>")
REVERTED_2 = line("reverted", "1", "2")
STATUS_LINES: dict[str, tuple[list[LedgerEntry], str, str | None]] = {
    "nothing": ([PROMOTED_1], "2", None),
    "waits": ([PROMOTED_1, PASSED_2], "2",
              "waits for review: set the tag gate.review to approved or rejected (and before it "
              "gate.review_comment), on this page under Tags."),
    "another waits": ([PROMOTED_1, PASSED_2], "1", f"champion since {AT}."),
    "champion": ([PROMOTED_1], "1", f"champion since {AT}."),
    "champion, since the first": (
        [PROMOTED_1, line("unchanged", "1", "3", at="2027-01-01T00:00:00+00:00")], "1",
        f"champion since {AT}."),
    "champion, with a comment": (
        [PASSED_2, line("promoted", "2", "1", comment="good")], "2",
        f'champion since {AT}, approved in review: "good".'),
    "replaced": ([PROMOTED_1, PROMOTED_2], "1", f"was champion until {AT}, replaced by version 2."),
    "replaced, its alias had been taken away": (
        [PROMOTED_1, line("promoted", "2")], "1",
        f"was champion until {AT}, replaced by version 2."),
    "replaced by itself": (
        [PROMOTED_1, line("promoted", "1", "1", at="2027-01-01T00:00:00+00:00")], "1",
        f"champion since {AT}."),
    "rejected": ([PASSED_2, REJECTED_2], "2",
                 f'rejected by review on {AT} because "{DARK}". That is final for '
                 "these bytes."),
    "rejected, no comment": ([PASSED_2, line("rejected", "2")], "2",
                             f"rejected by review on {AT} without a comment. That is final for "
                             "these bytes."),
    "rejected and taken back": (
        [PROMOTED_2, REJECTED_2, REVERTED_2], "2",
        f'rejected by review on {AT} because "{DARK}". That is final for '
        "these bytes."),
    "approved and refused": (
        [PASSED_2, line("refused", "2", reason="approved, but not promoted: it is old")], "2",
        f"approved, but not promoted: it is old ({AT}). The text below and its verdict are "
        "claims of the submitter and did not count."),
    "the same bytes refused again": (
        [PASSED_2, line("rejected", "2"), line("refused", "2")], "2",
        f"rejected by review on {AT} without a comment. That is final for these bytes."),
    "reverted": ([PROMOTED_1, PROMOTED_2, REVERTED_2], "2",
                 f"reverted by the guard on {AT} because because of it."),
    "gone back to": ([PROMOTED_1, PROMOTED_2, REVERTED_2], "1",
                     f"champion since {AT}, again: the guard restored it."),
    "reverted, of no line": ([PROMOTED_1, line("reverted", "1", "7")], "7",
                             f"reverted by the guard on {AT} because because of it."),
    "reverted for want of a review": (
        [PROMOTED_2, PASSED_2, REVERTED_2], "2",
        "waits for review: set the tag gate.review to approved or rejected (and before it "
        "gate.review_comment), on this page under Tags."),
    "taken away": ([PROMOTED_1, line("reverted", None, "1")], "1",
                   f"reverted by the guard on {AT} because because of it."),
    "brought back": ([PROMOTED_1, line("reverted", None, "1"), line("reverted", "1")], "1",
                     f"champion since {AT}, again: the guard restored it."),
    "rolled back": ([PROMOTED_1, PROMOTED_2, line("rolled_back", "1", "2")], "2",
                    f"rolled back on {AT} because because of it; version 1 serves again."),
    "rolled back to": ([PROMOTED_1, PROMOTED_2, line("rolled_back", "1", "2")], "1",
                       f"champion since {AT}, again: version 2 was rolled back."),
    "rolled back, pointed at, taken back": (
        [PROMOTED_1, PROMOTED_2, line("rolled_back", "1", "2"), REVERTED_2], "2",
        f"rolled back on {AT} because because of it; version 1 serves again."),
    "rolled back and promoted anew": (
        [PROMOTED_1, PROMOTED_2, line("rolled_back", "1", "2"), PROMOTED_2], "2",
        f"champion since {AT}."),
    "a violation of an older version": ([PROMOTED_1, line("violation", "1")], "1",
                                        f"champion since {AT}."),
    "no time": ([line("promoted", "1", at="`then`")], "1", "champion since 'then'."),
}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "version", "text"), STATUS_LINES.values(), ids=list(STATUS_LINES)
)
def test_status_line(lines, version, text):
    assert status(lines, version) == text


REVIEW_RESULTS = {
    "waits": ([PASSED_2], None),
    "approved": ([PASSED_2, PROMOTED_2], "approved: became champion at 2026-03-01T09:30:00+00:00"),
    "and rolled back later": (
        [PASSED_2, PROMOTED_2, line("rolled_back", "1", "2")],
        "approved: became champion at 2026-03-01T09:30:00+00:00"),
    "never reviewed": ([PROMOTED_2], None),
    "rejected": ([PASSED_2, REJECTED_2], "rejected at 2026-03-01T09:30:00+00:00: final for these "
                 "bytes"),
    "refused": ([PASSED_2, line("refused", "2")], "because of it."),
    "handed in anew": ([PASSED_2, line("refused", "2"), PASSED_2], None),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "answer"), REVIEW_RESULTS.values(), ids=list(REVIEW_RESULTS))
def test_review_result(lines, answer):
    version_status = VersionStatus.from_history(ModelHistory(tuple(lines)), "2")
    assert version_status is not None
    assert version_status.answer == answer


ACTIONS = st.sampled_from(
    ["passed", "promoted", "unchanged", "refused", "rejected", "rolled_back", "reverted",
     "deployed", "not_deployed", "replay_failed", "violation", "absolved", "conflict", "overridden"]
)  # fmt: skip
VERSIONS = st.sampled_from(["1", "2", "3", None])
TEXT = st.text(max_size=700)
LINES = st.lists(
    st.builds(line, ACTIONS, VERSIONS, VERSIONS, reason=TEXT, comment=st.none() | TEXT), max_size=9
)


@given(LINES)
@example([line("rejected", "1", comment="_" * 700)])
def test_any_history_gives_short_status_lines_and_at_most_one_champion(lines):
    history = ModelHistory(tuple(lines))
    champions = []
    for version in ("1", "2", "3"):
        version_status = VersionStatus.from_history(history, version)
        if version_status is None:
            continue
        assert len(version_status.status_line(ReviewSettings())) <= STATUS_LIMIT
        assert version_status.status_line(ReviewSettings()).isprintable()
        if version_status.kind == "champion":
            champions.append(version)
    assert champions in ([], [history.serving])


BODY = st.text(max_size=300).filter(lambda text: not text.startswith(MARK))
STATUS = st.text(max_size=80).map(lambda text: MARK + "".join(filter(str.isprintable, text)))


@given(BODY, STATUS, STATUS)
def test_text_below_the_status_line_stays(body, first_status, second_status):
    first = with_status(body, first_status)
    assert with_status(first, second_status) == with_status(body, second_status)
    assert with_status(first, first_status) == first
    assert first.removeprefix(first_status).removeprefix("\n\n") == body


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_both_newline_styles_are_accepted(newline):
    text = f"Status: old.{newline}{newline}# Title{newline}text"
    assert with_status(text, "Status: new.") == f"Status: new.\n\n# Title{newline}text"


@pytest.mark.parametrize("size", [0, 4600, 4940, 4990, 5000, 5001, 80_000])
def test_description_is_limited_to_the_database_column(size):
    for status_line in (HANDED_IN, MARK + "x" * (STATUS_LIMIT - len(MARK))):
        text = with_status("b" * size, status_line)
        assert text.endswith("b" * size)
        assert len(text) <= max(DESCRIPTION_LIMIT, size + STATUS_LIMIT + 2)
        if size <= DESCRIPTION_LIMIT:
            assert len(text) <= DESCRIPTION_LIMIT
