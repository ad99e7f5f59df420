"""Objections: what was said against bytes that keeps them out of service for good."""

from __future__ import annotations

from collections.abc import Mapping

from gate.errors import ResourceGone
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import History
from gate.registry.page import reviewer
from gate.registry.page.status_line import Fate
from gate.registry.port import Tag
from gate.registry.registered_model import RegisteredModel


def objection_to(
    model: RegisteredModel, history: History, number: str, *, tags: Mapping[str, str] | None
) -> str | None:
    """What was said against the bytes of a version, for whoever promotes where the ledger is; or
    None. `tags`: of the version, None where the registry did not find these bytes under its number.

    A rollback is taken back by two: whoever deletes the tag in the registry, and whoever then
    hands the file in again where the ledger is. Raises the RegistryErrors.
    """
    name, rolled_back = model.name, history.rollback_of(number)
    if rolled_back is not None and tags is None:
        tags = model.tags(number)
    tags = tags or {}
    if rolled_back is not None and Tag.ROLLED_BACK in tags:
        return (
            f"these bytes were rolled back as version {number} ({rolled_back.at}: "
            f"{rolled_back.reason}). To promote them all the same, delete the tag "
            f"{Tag.ROLLED_BACK} of version {number} of {name}, then repeat."
        )
    return _rejection(model, history, number, tags=tags)


def objection_from_afar(model: RegisteredModel, history: History, line: LedgerEntry) -> str | None:
    """The same for bytes that were handed in without the ledger. `line`: what is to be written of
    them. A rollback can't be taken back from there, and one verdict brings its bytes into service
    once: the way back to what served before is a rollback. A reviewer's word on that version itself
    is for the review. Raises the RegistryErrors."""
    assert line.sha256 is not None
    for number in history.holding(line.sha256):
        rolled_back = history.rollback_of(number)
        if rolled_back is not None:
            return (
                f"these bytes were rolled back as version {number} ({rolled_back.at}: "
                f"{rolled_back.reason}). Only gate promote --direct, where the ledger is, takes "
                "that back."
            )
        objection = _rejection(model, history, number, tags={})
        if objection is not None:
            return objection
        if number != line.version and _is_replayed(model, history, number, line=line):
            return (
                f"its verdict brought version {number} into service before. To go back to that: "
                "gate rollback; else measure anew, and hand that in."
            )
    for version in model.registry.find(model.name, line.sha256):
        if version.number != line.version and reviewer.rejects(version.tags, model.reviews.tag):
            return _rejection(model, history, version.number, tags=version.tags)
    return None


def _is_replayed(
    model: RegisteredModel, history: History, number: str, *, line: LedgerEntry
) -> bool:
    """Whether this very verdict made another version champion, which is still there and whole."""
    vouched, fate = history.vouching_for(number), Fate.of(history, number)
    if vouched is None or fate is None or fate.kind not in ("champion", "replaced"):
        return False
    verdicts = [
        (each.evidence_sha256, each.policy_sha256, each.compared_with) for each in (vouched, line)
    ]
    if verdicts[0] != verdicts[1]:
        return False
    try:
        made_at = model.registry.version(model.name, number).made_at
    except ResourceGone:  # the registry was made anew
        return False
    return history.judged(number, made_at=made_at)


def _rejection(
    model: RegisteredModel, history: History, number: str, *, tags: Mapping[str, str]
) -> str | None:
    if "rejected" in history.since_passed(number) or reviewer.rejects(tags, model.reviews.tag):
        return (
            f"a reviewer rejected these bytes as version {number} of {model.name}. Train or export "
            "anew, and hand that in."
        )
    return None
