"""Review: a reviewer's word on the candidate, given as a tag in the registry's pages.

Approval can veto, never waive: what is approved is examined as if it were promoted now.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from gate.errors import GateError, RegistryError, RegistryUnavailable, ResourceGone
from gate.policy.policy import Policy
from gate.registry.champion import move
from gate.registry.comparison.compared import outdated
from gate.registry.history import History
from gate.registry.ledger import Action, LedgerEntry
from gate.registry.may_serve import Terms, examine
from gate.registry.page import reviewer
from gate.registry.page.version_page import answer, refresh
from gate.registry.port import CANDIDATE, CHAMPION, Version
from gate.registry.registered_model import RegisteredModel
from gate.service.port import Failed, Taken

_log = logging.getLogger(__name__)


def review(model: RegisteredModel, policy: Policy) -> Iterator[Taken | Failed]:
    """Act on what reviewers said of the versions that wait for it. Only the candidate is promoted;
    the others may be rejected, and an approval of them is answered with the reason. A version that
    is gone waits no longer; one of which nothing can be said now stands in no other's way.

    Raises RegistryUnavailable; what else can't be read, as the versions are.
    """
    history, candidate = model.history(), model.alias(CANDIDATE)
    for waiting in history.waiting:
        try:
            taken = _reviewed(model, waiting, candidate=candidate, policy=policy, history=history)
        except ResourceGone:
            reason = f"version {waiting.version} waited for review, and was deleted"
            yield _close(model, waiting, "refused", reason=reason)
        except RegistryUnavailable:  # of the others neither
            raise
        except GateError as error:
            yield Failed("review", error)
        else:
            yield from taken


def _reviewed(
    model: RegisteredModel,
    waiting: LedgerEntry,
    *,
    candidate: str | None,
    policy: Policy,
    history: History,
) -> list[Taken]:
    assert waiting.version is not None
    version = model.registry.version(model.name, waiting.version)
    comment = reviewer.comment(version.tags)
    if reviewer.rejects(version.tags):
        reason = f"a reviewer rejected version {version.number}{reviewer.quoted(comment)}"
        return [_close(model, waiting, "rejected", reason=reason, comment=comment)]
    if not reviewer.approves(version.tags):
        _correct(model, version)
        return []
    problem = _problem(model, version.number, candidate=candidate, policy=policy, history=history)
    if problem is not None:
        reason = f"approved, but not promoted: {problem}"
        return [_close(model, waiting, "refused", reason=reason, comment=comment)]
    return [_promoted(model, waiting, comment)]


def _correct(model: RegisteredModel, version: Version) -> None:
    """Answer a word that says nothing; that it can't be answered now keeps nobody waiting."""
    correction = reviewer.correction(version.tags)
    if correction is None:
        return
    try:
        answer(model, version, correction)
    except RegistryError as error:
        _log.warning("the reviewer of version %s is not answered: %s", version.number, error)


def _close(
    model: RegisteredModel,
    waiting: LedgerEntry,
    outcome: Action,
    *,
    reason: str,
    comment: str | None = None,
) -> Taken:
    """The version waits no longer, and does not serve."""
    version = waiting.version
    model.write(outcome, reason, version=version, about=waiting, comment=comment)
    refresh(model, (version,))
    return Taken("review", outcome, version, reason)


def _problem(
    model: RegisteredModel, number: str, *, candidate: str | None, policy: Policy, history: History
) -> str | None:
    """Why an approved version is not promoted; None where it is."""
    if number != candidate:
        other = f"version {candidate} is" if candidate else "no version is"
        instead = "approve that, or hand this one in again" if candidate else "hand it in again"
        return f"{other} the candidate now: {instead}"
    champion = model.alias(CHAMPION)
    if policy.incumbent is not None and champion != number:
        waiting = history.standing(number)
        problem = outdated(waiting.compared_with if waiting else None, champion, history)
        if problem is not None:
            return problem
    return examine(model, number, history=history, terms=Terms.now(policy)).problem


def _promoted(model: RegisteredModel, waiting: LedgerEntry, comment: str | None) -> Taken:
    number = waiting.version
    champion = model.alias(CHAMPION)
    reason = f"version {number} passed and was approved in review{reviewer.quoted(comment)}"
    entry = model.entry(
        "promoted", reason, version=number, previous=champion, about=waiting, comment=comment
    )
    move(model, entry)
    return Taken("review", "promoted", number, reason)
