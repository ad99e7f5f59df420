"""What became of a version, by the ledger: the first line of its description.

Pure: of the same lines comes the same text. Tags and aliases say nothing here.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import UTC
from typing import Literal

from gate.ledger.entry import LedgerEntry
from gate.ledger.history import History
from gate.ledger.index import MOVING, SERVING
from gate.registry.judged import moment
from gate.registry.page.reviewer import ReviewRule
from gate.registry.port import Tag
from gate.story.wording import printable

MARK = "Status: "
"""What the line begins with."""
STATUS_LIMIT = 400
"""Characters of the line at most."""
DESCRIPTION_LIMIT = 5000
"""Characters of a description: databases other than SQLite refuse more."""
BODY_LIMIT = DESCRIPTION_LIMIT - STATUS_LIMIT - 2
"""Characters of what stands below the status line."""
_LEAST = len("Status: champion since 2026-01-01 00:00 UTC…")
"""Characters of a line that still says something."""
HANDED_IN = f"{MARK}handed in, not champion yet."
"""Of a version that no line of the ledger tells of yet."""
WAITS_FOR_SERVICE = (
    f"{MARK}handed in, waits for the service (gate serve), which judges it. Until then the verdict "
    "below is a claim."
)
"""The same, of one that is handed in without the ledger."""
UNTRUSTING = (
    f"{MARK}handed in, and not judged: the service trusts no key yet, so nobody can vouch for it. "
    "Name one in the section trust: of its policy, or with gate serve --trust."
)
"""The same, where the service believes nobody."""
_UNJUDGED = f"{MARK}handed in, and not judged"
TOO_EARLY = (
    f"{_UNJUDGED}: 'champion' was pointed at it before anything passed here, so nothing is "
    "deployed. Take that alias away: then it is judged."
)
"""The same, of the first one."""

Kind = Literal[
    "waits", "champion", "replaced", "rejected", "refused", "reverted", "rolled_back", "violated",
    "absolved",
]  # fmt: skip
_CLAIM = (
    "What stands below, and its verdict, is the word of whoever handed it in, and did not count."
)
"""Below the status of a version that was refused."""
_FINAL = ("rejected", "rolled_back")
"""What another look at the version does not change."""
_ALIKE = str.maketrans("<>[]|`*~\\", "\u2039\u203a()\u00a6'\u2217\u223c/")
"""What looks like markup, and is none: MLflow knows no escape for some of it, and shows the line
raw in its lists."""
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Underscores that are not within a word."""
_SPARE = 200
"""Characters of the line that are not a reason's."""


@dataclass(frozen=True)
class Fate:
    """What became of a version last, and the line that says so; of a champion, since when."""

    kind: Kind
    line: LedgerEntry
    answer: str | None = None
    """What the reviewer is told in `gate.review_result`, once his word was acted on."""

    @classmethod
    def of(cls, history: History, version: str) -> Fate | None:
        """By the ledger; None: no line tells of it."""
        fate: Fate | None = None
        for line in history.naming(version):
            if line.version == version:
                fate = _came(fate, line)
            elif line.action in MOVING:
                fate = _left(fate, line)
        if fate is None or fate.kind != "champion" or history.serving == version:
            return fate
        # Its alias had been taken away by hand when another one came: no line names both.
        other = history.change
        assert other is not None
        for line in reversed(history.entries):
            if line is fate.line:
                break
            other = line if line.action in SERVING else other
        return Fate("replaced", other, fate.answer)

    def status_line(self, rule: ReviewRule) -> str:
        """One line of Markdown, for people; `rule`: how the model is reviewed."""
        line, at = self.line, _when(self.line)
        reason = _plain(line.reason)
        match self.kind:
            case "waits":
                text = _waits(line, rule)
            case "champion":
                text = f"champion since {at}{_how(line)}."
            case "replaced":
                text = f"was champion until {at}, {_by(line)}."
            case "rejected":
                why = f'because "{_plain(line.comment)}"' if line.comment else "without a comment"
                text = f"rejected by review on {at} {why}. That is final for these bytes."
            case "refused":
                text = f"{reason} ({at}). {_CLAIM}"
            case "reverted":
                text = f"reverted by the guard on {at} because {reason}."
            case "rolled_back":
                serves = f"; version {line.version} came back" if line.version else ""
                text = f"rolled back on {at} because {reason}{serves}."
            case "violated":
                text = f"does not serve: found on {at} to hold other bytes than passed."
            case "absolved":
                text = f"may serve again: its violation was lifted on {at} because {reason}."
        return _cut(MARK + text, STATUS_LIMIT)


def unjudged(reason: str) -> str:
    """The line of a version that was handed in, and of which nothing can be said as it comes."""
    text = (
        f"{MARK}handed in, and not judged yet: {_plain(reason)}. It is looked at again; where it "
    )
    return _cut(f"{text}stays so, hand it in again.", STATUS_LIMIT)


def is_waiting_for_service(description: str) -> bool:
    """Whether a page says that somebody handed the version in, and that it was not judged yet."""
    return description.startswith((WAITS_FOR_SERVICE, _UNJUDGED))


def outcome_on(description: str) -> str | None:
    """What a page says that became of its version; None: nothing yet. Anybody may have written
    it."""
    line = description.partition("\n")[0]
    if not line.startswith(MARK) or line.startswith((HANDED_IN, f"{MARK}waits for ")):
        return None
    return None if is_waiting_for_service(line) else line.removeprefix(MARK).rstrip(".")


def way_back(model: str, number: str) -> str:
    """How a version that was judged comes into service again."""
    return (
        "The service judges a version once. What served before comes back by gate rollback "
        f"{shlex.quote(model)}, where the ledger is, or by pointing 'champion' at version "
        f"{number}, which stays if it may serve; else measure anew, and hand that in"
    )


def with_status(description: str, line: str) -> str:
    """The description with this status line in the place of the one that it has; all below stays
    as it is. The line is cut, or left out, rather than that a database refuses all of it."""
    body = description
    if description.startswith(MARK):
        body = re.sub(r"\A[^\n]*\n?\r?\n?", "", description)
    if not body:
        return line
    room = DESCRIPTION_LIMIT - len(body) - 2
    if len(line) > room and len(body) <= DESCRIPTION_LIMIT:
        if room < _LEAST:
            return body
        line = _cut(line, room)
    return f"{line}\n\n{body}"


def _came(fate: Fate | None, line: LedgerEntry) -> Fate | None:
    """What a line about the version itself makes of it."""
    kind, answer = (None, None) if fate is None else (fate.kind, fate.answer)
    match line.action:
        case "passed":
            fate = Fate("waits", line)
        case "promoted" | "unchanged" | "rolled_back" | "reverted":
            stays = line.action == "unchanged" or line.previous_version == line.version
            if kind == "waits" and line.action == "promoted":
                answer = f"approved: became champion at {line.at}"
            came = Fate("champion", line, answer)
            fate = fate if kind == "champion" and stays else came
        case "rejected":
            fate = Fate("rejected", line, f"rejected at {line.at}: final for these bytes")
        case "refused" if kind in (None, "waits") or line.made_at is not None:
            fate = Fate("refused", line, line.reason)
        case "violation" if kind not in _FINAL:
            fate = Fate("violated", line, answer)
        case "absolved" if kind in (None, "reverted", "violated"):
            fate = Fate("absolved", line, answer)
    return fate


def _left(fate: Fate | None, line: LedgerEntry) -> Fate | None:
    """What it makes of a version that `champion` went from it to another, or to none."""
    kind, answer = (None, None) if fate is None else (fate.kind, fate.answer)
    match line.action:
        case "rolled_back" if kind != "rejected":
            fate = Fate("rolled_back", line, answer)
        case "promoted" if kind == "champion":
            fate = Fate("replaced", line, answer)
        case "reverted" if kind not in (*_FINAL, "waits"):
            fate = Fate("reverted", line, answer)
    return fate


def _waits(line: LedgerEntry, rule: ReviewRule) -> str:
    waits = _plain(rule.waits(shlex.quote(line.model), line.version or ""))
    if rule.signed:
        return f"{waits}."
    return f"{waits} (and before it {Tag.REVIEW_COMMENT}), on this page under Tags."


def _how(line: LedgerEntry) -> str:
    if line.approvers:
        keys = ", ".join(key[:12] for key in line.approvers)
        why = f': "{_plain(line.comment)}"' if line.comment else ""
        return f", approved by the key{'s'[: len(line.approvers) > 1]} {keys}{why}"
    if line.comment:
        return f', approved in review: "{_plain(line.comment)}"'
    if line.action == "rolled_back":
        return f", again: version {line.previous_version} was rolled back"
    if line.action == "reverted":
        return ", again: the guard went back to it"
    return ""


def _by(line: LedgerEntry) -> str:
    return f"replaced by version {line.version}" if line.version else "then nothing served"


def _when(line: LedgerEntry) -> str:
    at = moment(line.at)
    return _plain(line.at) if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _plain(text: str) -> str:
    """Short, on one line, without markup."""
    line = _cut(printable(text).rstrip("."), STATUS_LIMIT - _SPARE)
    return _EMPHASIS.sub(r"\\\g<0>", line.translate(_ALIKE))


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
