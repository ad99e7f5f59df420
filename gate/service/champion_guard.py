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
from gate.registry.eligibility import Eligibility, examine, trust_problem, veto
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import ReadTrust, Terms, comparison_in, no_trust, outdated
from gate.registry.version_page import write_status
from gate.service.monitoring import StepResult

_UNREACHED = 3
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
            f"'{CHAMPION}' of {model.name} points at version {champion}, and the ledger "
            f"{model.ledger.location} has no line that anything of {model.name} in "
            f"{model.registry.identity} ever passed; nothing was changed, and nothing of it is "
            "deployed. Name the right ledger with --state, or the registry's other address with "
            f"--same-registry. If somebody pointed '{CHAMPION}' there before anything passed, take "
            f"that alias away: what is '{CANDIDATE}' is judged then."
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
        examined = _examined(model, champion, terms=terms, history=history)
    else:
        examined = veto(model, champion, history=history, terms=terms)
    served = history.was_served(champion)  # a valid target of a manual rollback
    if moved and examined.problem is None and policy.incumbent is not None and not served:
        compared = comparison_in(history.approving_entry(champion))
        examined = replace(examined, problem=outdated(compared, history.serving, history))
    if examined.problem is not None:
        return [_revert(model, examined, policy=policy, history=history, trust=trust)]
    if moved:
        return [_accept(model, examined, history)]
    return _restore_expected(model, history)


def _examined(
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


def _accept(model: RegisteredModel, examined: Eligibility, history: ModelHistory) -> StepResult:
    """Record in the ledger that `champion` was moved by hand to an eligible version."""
    number = examined.version.number
    reason = f"'{CHAMPION}' was pointed at version {number} by hand; it may serve"
    model.write(
        "promoted", reason, version=number, previous=history.serving, about=examined.vouched
    )
    write_status(model, (number, history.serving))
    return StepResult("guard", "accepted", number, reason)


def _revert(
    model: RegisteredModel,
    examined: Eligibility,
    *,
    policy: Policy,
    history: ModelHistory,
    trust: ReadTrust,
) -> StepResult:
    champion, tags, problem = examined.version.number, examined.version.tags, examined.problem
    assert problem is not None
    target, trouble = _fallback(model, history, policy=policy, but=champion, trust=trust)
    goes = f"went back to version {target.version}" if target else "was taken away"
    if trouble is not None:
        goes += f" until another version can be proven; now it can't be: {trouble}"
    reason = f"{problem}; '{CHAMPION}' {goes}"
    rejected = "rejected" in history.since_passed(champion)
    if reviews.rejects(tags, model.reviews.tag) and examined.vouched and not rejected:
        comment = reviews.comment(tags)
        why = f"{problem}{reviews.quoted(comment)}"
        model.write("rejected", why, version=champion, about=examined.vouched, comment=comment)
    standing = history.standing(champion)
    if examined.unreviewed and standing is not None and standing.action != "passed":
        model.write("passed", problem, version=champion, about=examined.vouched)  # it waits
    # The note is written before the alias moves, so that the version always shows the reason.
    model.note(examined.version, Tag.REVERTED, problem)
    number = target.version if target else None
    move_alias(
        model, model.entry("reverted", reason, version=number, previous=champion, about=target)
    )
    return StepResult("guard", "reverted", number, reason)


def _restore_removed(
    model: RegisteredModel, policy: Policy, history: ModelHistory, *, trust: ReadTrust
) -> list[StepResult]:
    """Restore `champion` after the guard removed it or somebody deleted it, if an eligible version
    can be verified: first the one that served."""
    change = history.change
    if change is None or (change.version is None and change.action != "reverted"):
        return []
    # A version that was set by hand is not restored. One that served according to the ledger is,
    # once its bytes are correct again.
    served = change.version is not None or history.expected_champion is None
    but = None if served else change.previous_version
    target, trouble = _fallback(model, history, policy=policy, but=but, trust=trust)
    if trouble is not None:
        raise trouble
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
    vouched = None if number is None else history.approving_entry(number)
    if number is None or vouched is None or number == serving or not history.was_deployed(number):
        return []  # a version that was not deployed may not pass the policy
    try:
        if examine(model, number, history=history, terms=None).problem is not None:
            return []
    except (RegistryError, StorageError):  # the replacement is verified and can stay
        return []
    reason = f"version {number} can be proven again, and '{CHAMPION}' went back from {serving}"
    entry = model.entry("reverted", reason, version=number, previous=serving, about=vouched)
    move_alias(model, entry)
    return [StepResult("guard", "restored", number, reason)]


def _fallback(
    model: RegisteredModel,
    history: ModelHistory,
    *,
    policy: Policy,
    but: str | None,
    trust: ReadTrust,
) -> tuple[LedgerEntry | None, GateError | None]:
    """Return the ledger entry of the last served version that is eligible, with verified bytes.

    It must pass this policy and be signed by keys that are still trusted. If there is none, also
    return the error that prevented verification, if any.
    """
    trouble: GateError | None = None
    unreached = 0
    for number in history.served:
        vouched = history.approving_entry(number)
        if number == but or vouched is None:
            continue
        try:
            # The expected champion served until `champion` was moved by hand: its keys stay valid.
            believed = None if number == history.expected_champion else trust()
            entry = history.promotion_of(number) or vouched  # a "passed" entry has no approvers
            if believed is not None and trust_problem(entry, believed) is not None:
                continue
            terms = Terms.from_history(policy, history, number, trust=trust)
            if examine(model, number, history=history, terms=terms).problem is None:
                return vouched, None
        except ResourceGone:
            continue
        except GateError as error:
            trouble = error
            unreached += isinstance(error, RegistryUnavailable)
            if unreached == _UNREACHED:  # do not try the others
                break
    return None, trouble
