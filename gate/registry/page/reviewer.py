"""A reviewer's word and comment in the tags of a version: read here, and nowhere else.

Case and the space around do not matter. What is neither of the two words is no approval; what is
the word of rejection in any spelling is a rejection, in the configured tag and in the gate's own.
Which tag and which words: `gate.policy.review_tag`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from gate.policy.policy import Policy
from gate.policy.review_tag import ReviewTag
from gate.registry.port import Tag
from gate.story.wording import printable

COMMENT_LIMIT = 500
"""Characters of a comment that are kept."""
STATEMENT_TAG = "gate.review_statement."
"""What the key of a tag with a signed review begins with; the short id of the reviewer's key
follows (`gate.registry.signed_review`)."""
_QUOTED = 80
"""Characters of a wrong word that are repeated."""


@dataclass(frozen=True)
class ReviewRule:
    """How the versions of a model are reviewed."""

    tag: ReviewTag = field(default_factory=ReviewTag)
    signed: bool = False
    """Whether an approval has to be signed; a rejection never has to be."""

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """As a policy says."""
        return cls(policy.review_tag, policy.review == "signed")

    def waits(self, model: str, version: str) -> str:
        """That a version waits, and for what, for people."""
        if self.signed:
            return (
                f"waits for review: gate approve {model} {version} --key KEY, or gate reject "
                "likewise"
            )
        tag = self.tag
        return f"waits for review: set the tag {tag.name} to {tag.approved} or {tag.rejected}"


def rejects(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Whether the reviewer's word is a no: by the configured tag, or by the gate's own."""
    return any(tag.may_reject(key) and tag.is_no(value) for key, value in tags.items())


def approves(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Whether the reviewer's word is a yes, and nobody says no."""
    return any(map(tag.is_yes, _values(tags, tag))) and not rejects(tags, tag)


def speaks(tags: Mapping[str, str], tag: ReviewTag) -> bool:
    """Whether a reviewer said yes or no, by his tag or in a statement."""
    signed = any(key.startswith(STATEMENT_TAG) for key in tags)
    return signed or approves(tags, tag) or rejects(tags, tag)


def correction(tags: Mapping[str, str], tag: ReviewTag) -> str | None:
    """What to answer a reviewer whose word is none, or in another tag; None where he wrote one of
    the two, or nothing."""
    if approves(tags, tag) or rejects(tags, tag):
        return None
    write = f"write {tag.approved} or {tag.rejected}"
    for value in _values(tags, tag):
        return f'{write}; seen: "{shortened(value, _QUOTED)}"'
    for key, value in tags.items():
        if tag.may_reject(key):
            word = shortened(value, _QUOTED)
            return f'{write} into the tag {tag.name}; seen: "{word}" in {printable(key)}'
    return None


def comment(tags: Mapping[str, str]) -> str | None:
    """What the reviewer wrote beside his word, on one line, without what could steer a terminal,
    and not without end; None where that is nothing."""
    return shortened(tags.get(Tag.REVIEW_COMMENT, ""), COMMENT_LIMIT) or None


def quoted(text: str | None) -> str:
    """A comment as the reason of a line ends with it; nothing where there is none."""
    return f': "{text}" ({Tag.REVIEW_COMMENT}; MLflow does not say who)' if text else ""


def shortened(text: str, limit: int) -> str:
    """What people read of a stranger's text: on one line, and so much at most."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _values(tags: Mapping[str, str], tag: ReviewTag) -> Iterator[str]:
    return (value for key, value in tags.items() if tag.is_named(key))
