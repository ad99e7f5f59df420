"""A reviewer's word and comment in the tags of a version: read here, and nowhere else.

Case and the space around do not matter. What is neither of the two words is no approval; what is
`rejected` in any spelling is a rejection.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from gate.registry.port import APPROVED, REJECTED, Tag
from gate.story.wording import printable

COMMENT_LIMIT = 500
"""Characters of a comment that are kept."""
_QUOTED = 80
"""Characters of a wrong word that are repeated."""
WRITE = f"write {APPROVED} or {REJECTED}"


def rejects(tags: Mapping[str, str]) -> bool:
    """Whether the reviewer's word is a no. Signs and spaces anywhere in it, and the width of its
    letters, make it no other word: a no that is spelled otherwise is none that may be missed."""
    text = unicodedata.normalize("NFKC", tags.get(Tag.REVIEW, "")).casefold()
    return "".join(char for char in text if char.isalpha()) == REJECTED


def approves(tags: Mapping[str, str]) -> bool:
    """Whether the reviewer's word is a yes."""
    return tags.get(Tag.REVIEW, "").strip().casefold() == APPROVED


def correction(tags: Mapping[str, str]) -> str | None:
    """What to answer a reviewer whose word is none; None where he wrote one of the two, or
    nothing."""
    value = tags.get(Tag.REVIEW)
    if value is None or approves(tags) or rejects(tags):
        return None
    return f'{WRITE}; seen: "{_shortened(printable(value), _QUOTED)}"'


def comment(tags: Mapping[str, str]) -> str | None:
    """What the reviewer wrote beside his word, on one line, without what could steer a terminal,
    and not without end; None where that is nothing."""
    return _shortened(printable(tags.get(Tag.REVIEW_COMMENT, "")), COMMENT_LIMIT) or None


def quoted(text: str | None) -> str:
    """A comment as the reason of a line ends with it; nothing where there is none."""
    return f': "{text}" ({Tag.REVIEW_COMMENT}; MLflow does not say who)' if text else ""


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
