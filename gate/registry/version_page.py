"""Write the status line and the description of a version."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC
from typing import Literal

from gate.decision.check_result import Verdict
from gate.errors import GateError, RegistryUnavailable, ResourceGone
from gate.ledger.entry import Action, LedgerEntry
from gate.ledger.history import MOVING, SERVING, ModelHistory
from gate.registry import reviews
from gate.registry.interface import CANDIDATE, Tag, Version
from gate.registry.registered_model import RegisteredModel
from gate.registry.reviews import ReviewSettings
from gate.signing.trust import parse_time
from gate.storage.safe_text import make_printable, shorten

MARK = "Status: "
"""Prefix of the status line."""

STATUS_LIMIT = 400
"""Maximum number of characters in the status line."""

DESCRIPTION_LIMIT = 5000
"""Maximum number of characters in a description; databases other than SQLite refuse more."""

BODY_LIMIT = DESCRIPTION_LIMIT - STATUS_LIMIT - 2
"""Maximum number of characters below the status line."""

_MIN_STATUS = len("Status: champion since 2026-01-01 00:00 UTC…")
"""Minimum number of characters in a truncated status line that is still useful."""

# Pages of earlier releases contain the texts below, and `is_waiting_for_service` and `outcome_on`
# parse them: do not reword them.
HANDED_IN = f"{MARK}handed in, not champion yet."
"""Status of a version without a ledger entry."""

WAITS_FOR_SERVICE = (
    f"{MARK}handed in, waits for the service (gate serve), which judges it. Until then the verdict "
    "below is a claim."
)
"""Status of a version that was submitted without access to the ledger."""

UNTRUSTING = (
    f"{MARK}handed in, and not judged: the service trusts no key yet, so no signature counts. "
    "Name one in the section trust: of its policy, or with gate serve --trust."
)
"""Status of a submitted version if the service trusts no keys."""

_UNJUDGED = f"{MARK}handed in, and not judged"

TOO_EARLY = (
    f"{_UNJUDGED}: 'champion' was pointed at it before anything passed here, so nothing is "
    "deployed. Take that alias away: then it is judged."
)
"""Status of a submitted version if `champion` points at it although no version has passed."""


Kind = Literal[
    "waits", "champion", "replaced", "rejected", "refused", "reverted", "rolled_back",
]  # fmt: skip

_CLAIM = "The text below and its verdict are claims of the submitter and did not count."
"""End of the status of a refused version."""

_FINAL = ("rejected", "rolled_back")
"""Statuses that the guard does not change."""

_MARKUP = str.maketrans("<>[]|`*~\\", "\u2039\u203a()\u00a6'\u2217\u223c/")
"""Replaces markup by similar characters, because MLflow can't escape all of it and shows the line
unrendered in its lists."""

_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Underscores at the start or the end of a word."""

_RESERVED = 200
"""Number of characters in the status line that are not used for a reason."""


@dataclass(frozen=True)
class VersionStatus:
    """The status of a version and the ledger entry that set it."""

    kind: Kind
    entry: LedgerEntry
    answer: str | None = None
    """Answer to the reviewer in `gate.review_result`, once the review was handled."""

    @classmethod
    def from_history(cls, history: ModelHistory, version: str) -> VersionStatus | None:
        """Return the status of a version by the ledger, or None if no entry names it."""
        status: VersionStatus | None = None
        for entry in history.naming(version):
            if entry.version == version:
                status = _after_entry(status, entry)
            elif entry.action in MOVING:
                status = _after_move_away(status, entry)
        if status is None or status.kind != "champion" or history.serving == version:
            return status
        # The alias was deleted by hand before another version was promoted: no entry names both.
        replacement = history.change
        assert replacement is not None
        for entry in reversed(history.entries):
            if entry is status.entry:
                break
            replacement = entry if entry.action in SERVING else replacement
        return VersionStatus("replaced", replacement, status.answer)

    def status_line(self, rule: ReviewSettings) -> str:
        """Return the status as one line of Markdown. rule: how the model is reviewed."""
        entry, at = self.entry, _when(self.entry)
        reason = _plain(entry.reason)
        match self.kind:
            case "waits":
                text = _plain(rule.waits(shlex.quote(entry.key), entry.version or ""))
                if not rule.signed:
                    text += f" (and before it {Tag.REVIEW_COMMENT}), on this page under Tags"
                text += "."
            case "champion":
                text = f"champion since {at}{_champion_reason(entry)}."
            case "replaced":
                served = f"version {entry.version}"
                by = f"replaced by {served}" if entry.version else "then nothing served"
                text = f"was champion until {at}, {by}."
            case "rejected":
                why = f'because "{_plain(entry.comment)}"' if entry.comment else "without a comment"
                text = f"rejected by review on {at} {why}. That is final for these bytes."
            case "refused":
                text = f"{reason} ({at}). {_CLAIM}"
            case "reverted":
                text = f"reverted by the guard on {at} because {reason}."
            case "rolled_back":
                serves = f"; version {entry.version} serves again" if entry.version else ""
                text = f"rolled back on {at} because {reason}{serves}."
        return shorten(MARK + text, STATUS_LIMIT)


def unjudged(reason: str) -> str:
    """Return the status line of a submitted version that can't be judged now."""
    text = f"{_UNJUDGED} yet: {_plain(reason)}. The service retries. If this persists, submit it "
    return shorten(f"{text}again.", STATUS_LIMIT)


def is_waiting_for_service(description: str) -> bool:
    """Return whether a page shows that the version was submitted and is not judged yet."""
    return description.startswith((WAITS_FOR_SERVICE, _UNJUDGED))


def outcome_on(description: str) -> str | None:
    """Return the outcome that a page shows for its version, or None if there is none yet.

    The text is not trusted, because every user who can edit the page may have written it.
    """
    line = description.partition("\n")[0]
    if not line.startswith(MARK) or line.startswith((HANDED_IN, f"{MARK}waits for ")):
        return None
    return None if is_waiting_for_service(line) else line.removeprefix(MARK).rstrip(".")


def way_back(model: str, number: str) -> str:
    """Return how to promote a version again that the service has judged."""
    return (
        "The service judges each version once. To restore the version that served before, run "
        f"gate rollback {shlex.quote(model)} with access to the ledger. Or point 'champion' at "
        f"version {number}, which stays if it may serve, or measure the file again and submit it"
    )


def with_status(description: str, line: str) -> str:
    """Return a description with a new status line.

    The line is shortened or omitted if the database would otherwise refuse the description."""
    body = description
    if description.startswith(MARK):
        body = re.sub(r"\A[^\n]*\n?\r?\n?", "", description)
    if not body:
        return line
    room = DESCRIPTION_LIMIT - len(body) - 2
    if len(line) > room and len(body) <= DESCRIPTION_LIMIT:
        if room < _MIN_STATUS:
            return body
        line = shorten(line, room)
    return f"{line}\n\n{body}"


def _after_entry(status: VersionStatus | None, entry: LedgerEntry) -> VersionStatus | None:
    """Return the status after an entry about the version itself."""
    kind, answer = (None, None) if status is None else (status.kind, status.answer)
    match entry.action:
        case "passed":
            status = VersionStatus("waits", entry)
        case "promoted" | "unchanged" | "rolled_back" | "reverted":
            stays = entry.action == "unchanged" or entry.previous_version == entry.version
            if kind == "waits" and entry.action == "promoted":
                answer = f"approved: became champion at {entry.at}"
            champion = VersionStatus("champion", entry, answer)
            status = status if kind == "champion" and stays else champion
        case "rejected":
            answer = f"rejected at {entry.at}: final for these bytes"
            status = VersionStatus("rejected", entry, answer)
        case "refused" if kind in (None, "waits") or entry.made_at is not None:
            status = VersionStatus("refused", entry, entry.reason)
    return status


def _after_move_away(status: VersionStatus | None, entry: LedgerEntry) -> VersionStatus | None:
    """Return the status after an entry that moved `champion` away from the version."""
    kind, answer = (None, None) if status is None else (status.kind, status.answer)
    match entry.action:
        case "rolled_back" if kind != "rejected":
            status = VersionStatus("rolled_back", entry, answer)
        case "promoted" if kind == "champion":
            status = VersionStatus("replaced", entry, answer)
        case "reverted" if kind not in (*_FINAL, "waits"):
            status = VersionStatus("reverted", entry, answer)
    return status


def _champion_reason(entry: LedgerEntry) -> str:
    if entry.approvers:
        keys = ", ".join(key[:12] for key in entry.approvers)
        why = f': "{_plain(entry.comment)}"' if entry.comment else ""
        return f", approved by the key{'s'[: len(entry.approvers) > 1]} {keys}{why}"
    if entry.comment:
        return f', approved in review: "{_plain(entry.comment)}"'
    if entry.action == "rolled_back":
        return f", again: version {entry.previous_version} was rolled back"
    if entry.action == "reverted":
        return ", again: the guard restored it"
    return ""


def _when(entry: LedgerEntry) -> str:
    at = parse_time(entry.at)
    return _plain(entry.at) if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _plain(text: str) -> str:
    """Return a text as one short line without markup."""
    line = shorten(make_printable(text).rstrip("."), STATUS_LIMIT - _RESERVED)
    return _EMPHASIS.sub(r"\\\g<0>", line.translate(_MARKUP))


# The gate never decides by a page. The process that wrote a ledger entry updates the pages of its
# versions, and the service updates those that were left out. No move waits for a page.
REJECTED_VERDICT = "REJECTED by review"
"""Value of `gate.verdict` for a rejected version. The ledger has the original verdict."""

_REFUSED = "REFUSED"
"""Start of `gate.verdict` for a refused version; the submitted verdict follows."""

_ANSWER_LIMIT = 1000
"""Maximum number of characters of `gate.review_result`."""

_log = logging.getLogger(__name__)


def write_status(model: RegisteredModel, versions: Iterable[str | None]) -> tuple[str, ...]:
    """Update the pages of these versions, if they are out of date.

    The caller holds the lock (`gate.registry.alias`). Return the versions that were not updated
    because the registry is unavailable; other failures are logged.
    """
    numbers = tuple(dict.fromkeys(version for version in versions if version is not None))
    for index, number in enumerate(numbers):
        try:
            _refresh(model, number, model.history())
        except ResourceGone:
            continue
        except GateError as error:
            _log.warning(
                "the page of version %s of %s is out of date: %s", number, model.key, error
            )
            if isinstance(error, RegistryUnavailable):  # the other updates would fail too
                return numbers[index:]
    return ()


def answer(model: RegisteredModel, version: Version, text: str) -> None:
    """Write the answer to the reviewer, if it is new. Raises the RegistryErrors."""
    _set(model, version, Tag.REVIEW_RESULT, text[:_ANSWER_LIMIT])


def refused_as(claim: str) -> str:
    """Return the value of `gate.verdict` for a refused version that was submitted as `claim`."""
    return f"{_REFUSED} (see {Tag.REFUSED}); handed in as {claim}"


def _refresh(model: RegisteredModel, number: str, history: ModelHistory) -> None:
    status = VersionStatus.from_history(history, number)
    if status is None:
        return
    page = model.registry.version(model.name, number)
    if status.kind == "rejected" and model.alias(CANDIDATE) == number:
        model.registry.delete_alias(model.name, CANDIDATE)
    verdict = _verdict(status, page.tags.get(Tag.VERDICT))
    if verdict is not None:
        _set(model, page, Tag.VERDICT, verdict)
    if status.answer is not None and reviews.has_review(page.tags, model.reviews.tag):
        answer(model, page, status.answer)
    text = with_status(page.description, status.status_line(model.reviews))
    if text != page.description:
        model.registry.set_description(model.name, number, text)


def _verdict(status: VersionStatus, shown: str | None) -> str | None:
    """Return the value that `gate.verdict` must have; None: do not change it.

    A submitted version has the value PASS. If it is refused, that claim remains visible in the new
    value.
    """
    claim = next((each.value for each in Verdict if shown in (each, refused_as(each))), None)
    match status.kind:
        case "rejected":
            return REJECTED_VERDICT
        case "refused":
            return _REFUSED if claim is None else refused_as(claim)
        case "waits" | "champion" if claim is not None:  # it may have been refused before
            return claim
    return None


def _set(model: RegisteredModel, version: Version, key: str, value: str) -> None:
    if version.tags.get(key) != value:
        model.registry.set_tag(model.name, version.number, key=key, value=value)


# The writer of an entry updates the pages itself. `PageUpdater` makes the updates that a crash or
# an unreachable registry prevented. Without new entries it sends no request to the registry.
_RECENT = 20
"""Number of recent ledger entries that a first or a thorough update includes."""

_NOT_SHOWN: tuple[Action, ...] = ("deployed", "not_deployed", "replay_failed", "conflict")
"""Actions that do not change a page."""


class PageUpdater:
    """The progress of a service in updating each model's version pages."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        """Number of processed ledger entries, by model."""
        self._pending: dict[str, tuple[str, ...]] = {}
        """Versions whose pages are out of date because the registry was unavailable, by model."""

    def follow(self, model: RegisteredModel, *, thoroughly: bool) -> None:
        """Update the pages of the versions that new ledger entries name.

        The first call, and a call with `thoroughly`, also updates those of recent entries. The
        caller holds the lock. Raises EvidenceError and StorageError if the ledger can't be read.
        """
        history, followed = model.history(), self._lines.get(model.key)
        number = len(history.entries)
        if followed is None or thoroughly or followed > number:
            waiting = (entry.version for entry in history.waiting)
            versions: Iterable[str | None] = (
                history.serving,
                *waiting,
                *_named(history.entries[-_RECENT:]),
            )
        else:
            versions = _named(history.entries[followed:])
        outdated = (*self._pending.get(model.key, ()), *versions)
        self._pending[model.key] = write_status(model, outdated)
        self._lines[model.key] = number


def _named(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    for entry in entries:
        if entry.action not in _NOT_SHOWN:
            yield from filter(None, (entry.version, entry.previous_version))
