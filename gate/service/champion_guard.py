"""Keep `champion` on an eligible version; confirm mismatches."""

from __future__ import annotations

from dataclasses import replace

from gate.errors import (
    GateError,
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    ResourceGone,
    StorageError,
)
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.registry import reviews
from gate.registry.alias import move_alias
from gate.registry.comparison import comparison_in, outdated
from gate.registry.eligibility import Eligibility, examine, trust_problem, veto
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import ReadTrust, Terms, no_trust
from gate.registry.version_page import write_status
from gate.service.monitoring import StepResult

_MAX_UNREACHABLE = 3
"""Number of unreachable versions after which the registry counts as unreachable. A single one may
be the result of an edit."""


def guard_champion(
    model: RegisteredModel, policy: Policy, *, thoroughly: bool, trust: ReadTrust = no_trust
) -> list[StepResult]:
    """Move `champion` away from a version that is not eligible.

    If the gate moved `champion` there and the version was deployed, only its ledger entries, tags
    and (`thoroughly`) bytes are checked: a changed policy or trust does not take a model out of
    service. A version that was not deployed yet must pass this policy and this trust, with evidence
    that was recent enough when it was promoted. If `champion` was moved by hand, the version must
    meet all conditions of a promotion now. If no other version can be verified, `champion` is
    removed until one can be verified: an unreachable store is neither a reason to remove a version
    nor to keep it. A deleted alias is restored. A temporary replacement is reverted when the
    expected version can be verified.

    Raises RegistryError if the ledger has no entry about the model, and RegistryError,
    EvidenceError, StorageError if it can't be judged now.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    if champion is None:
        return _restore_removed(model, policy, history, trust=trust)
    if not history.passed_any:
        raise RegistryError(
            f"'{CHAMPION}' of {model.name} points at version {champion}, but the ledger "
            f"{model.ledger.location} has no version of {model.name} in "
            f"{model.registry.identity} that passed. Nothing was changed, and the model is not "
            "deployed. Name the right ledger with --state, or the registry's other address with "
            f"--same-registry. If '{CHAMPION}' was set before any version passed, remove this "
            f"alias: the service then judges '{CANDIDATE}'."
        )
    moved = champion != history.serving
    terms = (
        Terms.now(policy, trust)
        if moved
        else Terms.from_history(policy, history, champion, trust=trust)
    )
    if terms is not None and not moved and history.passed_before_signing(champion):
        # Enabling signatures takes nothing out of service; it only prevents a new deployment of an
        # unsigned version.
        terms = replace(terms, trust=None)
    if moved or thoroughly:
        eligibility = _examine_champion(model, champion, terms=terms, history=history)
    else:
        eligibility = veto(model, champion, history=history, terms=terms)
    served = history.was_served(champion)  # a valid target of a manual rollback
    if moved and eligibility.problem is None and policy.incumbent is not None and not served:
        compared = comparison_in(history.approving_entry(champion))
        eligibility = replace(eligibility, problem=outdated(compared, history.serving, history))
    if eligibility.problem is not None:
        return [_revert(model, eligibility, policy=policy, history=history, trust=trust)]
    if moved:
        return [_accept(model, eligibility, history)]
    return _restore_expected(model, history)


def _examine_champion(
    model: RegisteredModel, champion: str, *, terms: Terms | None, history: ModelHistory
) -> Eligibility:
    """Examine the champion with its bytes.

    An unavailable file, or one wrong download, does not count against a version that the gate
    promoted. It does count against one that was set by hand.
    """
    moved = champion != history.serving
    try:
        # A version that is not deployed yet needs its golden vectors.
        golden = not moved and not history.was_deployed(champion)
        return examine(model, champion, history=history, terms=terms, golden=golden)
    except (RegistryUnavailable, RegistryDenied, ResourceGone):
        raise
    except RegistryError as error:  # the files may have any content
        if not moved:
            raise
        return replace(veto(model, champion, history=history), problem=str(error))


def _accept(model: RegisteredModel, eligibility: Eligibility, history: ModelHistory) -> StepResult:
    """Record in the ledger that `champion` was moved by hand to an eligible version."""
    number = eligibility.version.number
    reason = f"'{CHAMPION}' was pointed at version {number} by hand; it may serve"
    model.write(
        "promoted", reason, version=number, previous=history.serving, about=eligibility.entry
    )
    write_status(model, (number, history.serving))
    return StepResult("guard", "accepted", number, reason)


def _revert(
    model: RegisteredModel,
    eligibility: Eligibility,
    *,
    policy: Policy,
    history: ModelHistory,
    trust: ReadTrust,
) -> StepResult:
    version, problem = eligibility.version, eligibility.problem
    champion, tags = version.number, version.tags
    assert problem is not None
    target, error = _fallback(model, history, policy=policy, exclude=champion, trust=trust)
    change = f"went back to version {target.version}" if target else "was taken away"
    if error is not None:
        change += f" until another version can be proven; now it can't be: {error}"
    reason = f"{problem}; '{CHAMPION}' {change}"
    rejected = "rejected" in history.since_passed(champion)
    if reviews.rejects(tags, model.reviews.tag) and eligibility.entry and not rejected:
        comment = reviews.comment(tags)
        why = f"{problem}{reviews.quoted(comment)}"
        model.write("rejected", why, version=champion, about=eligibility.entry, comment=comment)
    standing = history.standing(champion)
    if eligibility.unreviewed and standing is not None and standing.action != "passed":
        model.write("passed", problem, version=champion, about=eligibility.entry)  # it waits
    # The note is written before the alias moves, so that the version always shows the reason.
    model.note(version, Tag.REVERTED, problem)
    number = target.version if target else None
    move_alias(
        model, model.entry("reverted", reason, version=number, previous=champion, about=target)
    )
    return StepResult("guard", "reverted", number, reason)


def _restore_removed(
    model: RegisteredModel, policy: Policy, history: ModelHistory, *, trust: ReadTrust
) -> list[StepResult]:
    """Restore `champion` after the guard removed it or a user deleted it, if an eligible version
    can be verified: first the one that served."""
    change = history.change
    if change is None or (change.version is None and change.action != "reverted"):
        return []
    # A version that was set by hand is not restored. One that served according to the ledger is,
    # once its bytes are correct again.
    served = change.version is not None or history.expected_champion is None
    exclude = None if served else change.previous_version
    target, error = _fallback(model, history, policy=policy, exclude=exclude, trust=trust)
    if error is not None:
        raise error
    if target is None:
        return []
    removed = "removed" if change.version is None else "deleted by hand"
    reason = f"'{CHAMPION}' had been {removed}; version {target.version}, now verified, has it"
    move_alias(model, model.entry("reverted", reason, version=target.version, about=target))
    return [StepResult("guard", "restored", target.version, reason)]


def _restore_expected(model: RegisteredModel, history: ModelHistory) -> list[StepResult]:
    """Move `champion` back to the expected version once it can be verified.

    A replacement serves because `champion` was moved by hand at a time when the expected version,
    which was deployed, could not be verified.
    """
    number, serving = history.expected_champion, history.serving
    approval = None if number is None else history.approving_entry(number)
    if number is None or approval is None or number == serving or not history.was_deployed(number):
        return []  # a version that was not deployed may not pass the policy
    try:
        if examine(model, number, history=history, terms=None).problem is not None:
            return []
    except (RegistryError, StorageError):  # the replacement is verified and can stay
        return []
    reason = f"version {number} can be proven again, and '{CHAMPION}' went back from {serving}"
    entry = model.entry("reverted", reason, version=number, previous=serving, about=approval)
    move_alias(model, entry)
    return [StepResult("guard", "restored", number, reason)]


def _fallback(
    model: RegisteredModel,
    history: ModelHistory,
    *,
    policy: Policy,
    exclude: str | None,
    trust: ReadTrust,
) -> tuple[LedgerEntry | None, GateError | None]:
    """Return the ledger entry of the last served version that is eligible, with verified bytes.

    It must pass this policy and be signed by keys that are still trusted. If there is none, also
    return the error that prevented verification, if any.
    """
    last_error: GateError | None = None
    unreachable = 0
    for number in history.served:
        entry = history.approving_entry(number)
        if number == exclude or entry is None:
            continue
        try:
            # The expected champion served until `champion` was moved by hand: its keys stay valid.
            current_trust = None if number == history.expected_champion else trust()
            promotion = history.promotion_of(number) or entry  # a "passed" entry has no approvers
            if current_trust is not None and trust_problem(promotion, current_trust) is not None:
                continue
            terms = Terms.from_history(policy, history, number, trust=trust)
            if examine(model, number, history=history, terms=terms).problem is None:
                return entry, None
        except ResourceGone:
            continue
        except GateError as error:
            last_error = error
            unreachable += isinstance(error, RegistryUnavailable)
            if unreachable == _MAX_UNREACHABLE:  # do not try the others
                break
    return None, last_error
