"""The tag by which reviewers speak in the registry's pages: its name, and its two words.

Deployment jobs of hosted registries look for a tag named after their task, with the value
`Approved`: the gate can listen to that very tag.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Self

from pydantic import Field, model_validator

from gate.policy.sections import PolicyRecord

REVIEW_TAG, APPROVED, REJECTED = "gate.review", "approved", "rejected"
"""A no by these is heard whatever is configured."""
_RESERVED = ("gate.", "mlflow.")
"""What the gate and MLflow call their own tags."""
Word = Annotated[str, Field(min_length=1, max_length=100)]


def letters(text: str) -> str:
    """Its letters alone, without case and width."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return "".join(char for char in text if char.isalpha())


def without_case(text: str) -> str:
    """The text without case, and without the space around."""
    return text.strip().casefold()


class ReviewTag(PolicyRecord):
    """Which tag of a version holds a reviewer's word, and what the words are; all of it compared
    without case, and without the space around."""

    name: Annotated[str, Field(pattern=r"^ *[\w.\-:/][\w.\-:/ ]*$", max_length=250)] = REVIEW_TAG
    """MLflow takes letters, digits and `_ - . : /` and spaces."""
    approved: Word = APPROVED
    """The value that lets a version pass."""
    rejected: Word = REJECTED
    """The value that refuses it."""

    @model_validator(mode="after")
    def _is_unmistakable(self) -> Self:
        name = without_case(self.name)
        if name.startswith(_RESERVED) and name != REVIEW_TAG:
            raise ValueError(
                f"the tag '{self.name}' is the gate's own or MLflow's: expected {REVIEW_TAG}, or a "
                "name that begins with neither 'gate.' nor 'mlflow.'"
            )
        yes, no = letters(self.approved), letters(self.rejected)
        if not yes or not no:
            raise ValueError("approved and rejected are words: each needs a letter")
        if yes in (no, REJECTED) or no == APPROVED:
            raise ValueError(
                f"approved is '{self.approved}' and rejected is '{self.rejected}': a yes must be "
                "told from a no by its letters"
            )
        return self

    def is_named(self, key: str) -> bool:
        """Whether a tag of this key is the one."""
        return without_case(key) == without_case(self.name)

    def may_reject(self, key: str) -> bool:
        """Whether a no in a tag of this key is heard: in this one, and in the gate's own."""
        return self.is_named(key) or without_case(key) == REVIEW_TAG

    def is_yes(self, value: str) -> bool:
        """Whether a value is the word of approval."""
        return without_case(value) == without_case(self.approved) and not self.is_no(value)

    def is_no(self, value: str) -> bool:
        """Whether a value is a rejection. Signs and spaces anywhere in it, and the width of its
        letters, make it no other word: a no that is spelled otherwise is not to be missed."""
        return letters(value) in (REJECTED, letters(self.rejected))
