"""Review: a reviewer's word on the candidate, given as a tag in the registry's pages.

Approval can veto, never waive: what is approved is examined as if it were promoted now.
"""

from __future__ import annotations

from collections.abc import Iterator

from gate.errors import GateError, RegistryUnavailable, ResourceGone
from gate.policy.policy import Policy
from gate.registry.champion import move
from gate.registry.comparison.compared import outdated
from gate.registry.history import History
from gate.registry.ledger import Action, LedgerEntry
from gate.registry.may_serve import Terms, examine
from gate.registry.port import APPROVED, CANDIDATE, CHAMPION, REJECTED, Tag
from gate.registry.registered_model import RegisteredModel
from gate.service.port import Failed, Taken


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
    word = model.registry.version(model.name, waiting.version).tags.get(Tag.REVIEW)
    if word == REJECTED:
        reason = f"a reviewer rejected version {waiting.version} ({Tag.REVIEW}={REJECTED})"
        return [_close(model, waiting, "rejected", reason=reason)]
    if word == APPROVED and waiting.version == candidate:
        return [_approved(model, waiting, policy=policy, history=history)]
    if word == APPROVED:
        reason = (
            f"version {waiting.version} was approved, but version {candidate or 'none'} is the "
            "candidate now: approve that, or hand this one in again"
        )
        return [_close(model, waiting, "refused", reason=reason)]
    return []


def _close(model: RegisteredModel, waiting: LedgerEntry, outcome: Action, *, reason: str) -> Taken:
    """The version waits no longer, and does not serve."""
    model.write(outcome, reason, version=waiting.version, about=waiting)
    return Taken("review", outcome, waiting.version, reason)


def _approved(
    model: RegisteredModel, waiting: LedgerEntry, *, policy: Policy, history: History
) -> Taken:
    number = waiting.version
    assert number is not None
    problem = examine(model, number, history=history, terms=Terms.now(policy)).problem
    if problem is not None:
        reason = f"version {number} was approved and is not promoted: {problem}"
        return _close(model, waiting, "refused", reason=reason)
    champion = model.alias(CHAMPION)
    if policy.incumbent is not None and champion != number:
        problem = outdated(waiting.compared_with, champion, history)
    if problem is not None:
        reason = f"version {number} was approved and is not promoted: {problem}"
        return _close(model, waiting, "refused", reason=reason)
    reason = f"version {number} passed and was approved in review"
    move(model, model.entry("promoted", reason, version=number, previous=champion, about=waiting))
    return Taken("review", "promoted", number, reason)
