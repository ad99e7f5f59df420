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
from gate.signing.trust import time_of
from gate.storage.safe_text import make_printable, shorten

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
"""Text for a version without a ledger line."""

WAITS_FOR_SERVICE = (
    f"{MARK}handed in, waits for the service (gate serve), which judges it. Until then the verdict "
    "below is a claim."
)
"""The same, of one that is handed in without the ledger."""

UNTRUSTING = (
    f"{MARK}handed in, and not judged: the service trusts no key yet, so no signature counts. "
    "Name one in the section trust: of its policy, or with gate serve --trust."
)
"""The same, where the service trusts no keys."""

_UNJUDGED = f"{MARK}handed in, and not judged"

TOO_EARLY = (
    f"{_UNJUDGED}: 'champion' was pointed at it before anything passed here, so nothing is "
    "deployed. Take that alias away: then it is judged."
)
"""The same, of the first one."""


Kind = Literal[
    "waits", "champion", "replaced", "rejected", "refused", "reverted", "rolled_back",
]  # fmt: skip

_CLAIM = "The text below and its verdict are claims of the submitter and did not count."
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
class VersionStatus:
    """The last status of a version, and the line that states it; of a champion, since when."""

    kind: Kind
    line: LedgerEntry
    answer: str | None = None
    """The answer to the reviewer in `gate.review_result`, once the review was acted on."""

    @classmethod
    def of(cls, history: ModelHistory, version: str) -> VersionStatus | None:
        """Return the status of a version by the ledger, or None where no line names it."""
        fate: VersionStatus | None = None
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
        return VersionStatus("replaced", other, fate.answer)

    def status_line(self, rule: ReviewSettings) -> str:
        """One line of Markdown, for people; `rule`: how the model is reviewed."""
        line, at = self.line, _when(self.line)
        reason = _plain(line.reason)
        match self.kind:
            case "waits":
                text = _waits(line, rule)
            case "champion":
                text = f"champion since {at}{_how(line)}."
            case "replaced":
                by = (
                    f"replaced by version {line.version}" if line.version else "then nothing served"
                )
                text = f"was champion until {at}, {by}."
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
        return shorten(MARK + text, STATUS_LIMIT)


def unjudged(reason: str) -> str:
    """The line of a version that was handed in, and of which nothing can be said as it comes."""
    text = (
        f"{MARK}handed in, and not judged yet: {_plain(reason)}. It is looked at again; where it "
    )
    return shorten(f"{text}stays so, hand it in again.", STATUS_LIMIT)


def is_waiting_for_service(description: str) -> bool:
    """Return whether a page says that the version was submitted and is not judged yet."""
    return description.startswith((WAITS_FOR_SERVICE, _UNJUDGED))


def outcome_on(description: str) -> str | None:
    """Return the outcome that a page states for its version, or None if there is none yet.

    The text is not trusted: anyone who can edit the page may have written it.
    """
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
        line = shorten(line, room)
    return f"{line}\n\n{body}"


def _came(fate: VersionStatus | None, line: LedgerEntry) -> VersionStatus | None:
    """Return the status after a line about the version itself."""
    kind, answer = (None, None) if fate is None else (fate.kind, fate.answer)
    match line.action:
        case "passed":
            fate = VersionStatus("waits", line)
        case "promoted" | "unchanged" | "rolled_back" | "reverted":
            stays = line.action == "unchanged" or line.previous_version == line.version
            if kind == "waits" and line.action == "promoted":
                answer = f"approved: became champion at {line.at}"
            came = VersionStatus("champion", line, answer)
            fate = fate if kind == "champion" and stays else came
        case "rejected":
            fate = VersionStatus("rejected", line, f"rejected at {line.at}: final for these bytes")
        case "refused" if kind in (None, "waits") or line.made_at is not None:
            fate = VersionStatus("refused", line, line.reason)
    return fate


def _left(fate: VersionStatus | None, line: LedgerEntry) -> VersionStatus | None:
    """Return the status after a line that moved `champion` away from the version."""
    kind, answer = (None, None) if fate is None else (fate.kind, fate.answer)
    match line.action:
        case "rolled_back" if kind != "rejected":
            fate = VersionStatus("rolled_back", line, answer)
        case "promoted" if kind == "champion":
            fate = VersionStatus("replaced", line, answer)
        case "reverted" if kind not in (*_FINAL, "waits"):
            fate = VersionStatus("reverted", line, answer)
    return fate


def _waits(line: LedgerEntry, rule: ReviewSettings) -> str:
    waits = _plain(rule.waits(shlex.quote(line.key), line.version or ""))
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


def _when(line: LedgerEntry) -> str:
    at = time_of(line.at)
    return _plain(line.at) if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _plain(text: str) -> str:
    """Short, on one line, without markup."""
    line = shorten(make_printable(text).rstrip("."), STATUS_LIMIT - _SPARE)
    return _EMPHASIS.sub(r"\\\g<0>", line.translate(_ALIKE))


# A page decides nothing. The process that wrote a line updates the pages of its versions, and the
# service updates those that were left out. No move and no line waits for a page.
REJECTED_VERDICT = "REJECTED by review"
"""What `gate.verdict` says then; that it passed stands in the ledger."""

_REFUSED = "REFUSED"
"""Start of the tag of a refused version; the claim of the submission follows."""

_ANSWER_LIMIT = 1000
"""Characters of `gate.review_result`."""

_log = logging.getLogger(__name__)


def write_status(model: RegisteredModel, versions: Iterable[str | None]) -> tuple[str, ...]:
    """Bring the pages of these versions up to date; what says already what it should is left alone.
    The caller is alone (`gate.registry.alias`).

    Gives those that could not be because the registry is away; what else went wrong is logged.
    """
    wanted = tuple(dict.fromkeys(version for version in versions if version is not None))
    for place, number in enumerate(wanted):
        try:
            _refresh(model, number, model.history())
        except ResourceGone:
            continue
        except GateError as error:
            _log.warning(
                "the page of version %s of %s is out of date: %s", number, model.key, error
            )
            if isinstance(error, RegistryUnavailable):  # the others neither
                return wanted[place:]
    return ()


def answer(model: RegisteredModel, version: Version, text: str) -> None:
    """Tell the reviewer; once. Raises the RegistryErrors."""
    _set(model, version, Tag.REVIEW_RESULT, text[:_ANSWER_LIMIT])


def refused_as(claim: str) -> str:
    """Return the value of `gate.verdict` for a refused version that was submitted as `claim`."""
    return f"{_REFUSED} (see {Tag.REFUSED}); handed in as {claim}"


def _refresh(model: RegisteredModel, number: str, history: ModelHistory) -> None:
    fate = VersionStatus.of(history, number)
    if fate is None:
        return
    page = model.registry.version(model.name, number)
    if fate.kind == "rejected" and model.alias(CANDIDATE) == number:
        model.registry.delete_alias(model.name, CANDIDATE)
    verdict = _verdict(fate, page.tags.get(Tag.VERDICT))
    if verdict is not None:
        _set(model, page, Tag.VERDICT, verdict)
    if fate.answer is not None and reviews.speaks(page.tags, model.reviews.tag):
        answer(model, page, fate.answer)
    text = with_status(page.description, fate.status_line(model.reviews))
    if text != page.description:
        model.registry.set_description(model.name, number, text)


def _verdict(fate: VersionStatus, shown: str | None) -> str | None:
    """Return the value that `gate.verdict` must have; None: it may stay as it is.

    A version says PASS when it is submitted. If it is refused, that claim remains visible in the
    new value.
    """
    claim = next((each.value for each in Verdict if shown in (each, refused_as(each))), None)
    match fate.kind:
        case "rejected":
            return REJECTED_VERDICT
        case "refused":
            return _REFUSED if claim is None else refused_as(claim)
        case "waits" | "champion" if claim is not None:  # it was refused before, and came again
            return claim
    return None


def _set(model: RegisteredModel, version: Version, key: str, value: str) -> None:
    if version.tags.get(key) != value:
        model.registry.set_tag(model.name, version.number, key=key, value=value)


# The writer of a line updated the pages already; this finishes the updates that a crash or an
# unreachable registry prevented. Without new lines, it sends no request to the registry.
_RECENT = 20
"""Number of lines that a first or a thorough update goes back."""

_SILENT: tuple[Action, ...] = ("deployed", "not_deployed", "replay_failed", "conflict")
"""Of these the pages say nothing."""


class Pages:
    """The progress of a service in updating each model's version pages."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        """By model: how many lines were followed."""
        self._left: dict[str, tuple[str, ...]] = {}
        """By model: versions whose pages are out of date, because the registry was away."""

    def follow(self, model: RegisteredModel, *, thoroughly: bool) -> None:
        """Update the pages of the versions that new ledger lines name.

        The first time, and `thoroughly`, also update those of the latest older lines. The caller
        holds the lock. Raises EvidenceError and StorageError where the ledger can't be read.
        """
        history, followed = model.history(), self._lines.get(model.key)
        number = len(history.entries)
        if followed is None or thoroughly or followed > number:
            waiting = (line.version for line in history.waiting)
            versions: Iterable[str | None] = (
                history.serving,
                *waiting,
                *_named(history.entries[-_RECENT:]),
            )
        else:
            versions = _named(history.entries[followed:])
        wanted = (*self._left.get(model.key, ()), *versions)
        self._left[model.key] = write_status(model, wanted)
        self._lines[model.key] = number


def _named(lines: Iterable[LedgerEntry]) -> Iterator[str]:
    for line in lines:
        if line.action not in _SILENT:
            yield from filter(None, (line.version, line.previous_version))
