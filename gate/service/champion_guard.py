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
"""So many versions out of reach are the registry's trouble: one may be an editor's doing."""


def guard_champion(
    model: RegisteredModel, policy: Policy, *, thoroughly: bool, trust: ReadTrust = no_trust
) -> list[StepResult]:
    """Take `champion` back from a version that must not serve.

    If the gate moved `champion` there and the version was deployed, only its own lines, tags and
    (`thoroughly`) bytes are checked: a changed policy or trust does not take a model out of
    service. A version that was not deployed yet must pass by this policy and this trust, with
    evidence that was young enough when it was promoted. If `champion` was moved by hand, the
    version must meet all conditions of a promotion now. If no other version can be verified, none
    serves until one can be: an unreachable store is no reason to remove a version, or to keep it.
    If another version serves meanwhile, the expected one is restored as soon as it can be verified.

    Raises RegistryError where the ledger has no line about the model, the other RegistryErrors,
    EvidenceError and StorageError where it can't be judged now.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    if champion is None:
        return _bring_back(model, policy, history, trust=trust)
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
    terms = Terms.now(policy, trust) if moved else Terms.of(policy, history, champion, trust=trust)
    if terms is not None and not moved and history.passed_before_signing(champion):
        # Enabling signatures takes nothing out of service; an unsigned version is only not deployed
        # again.
        terms = replace(terms, trust=None)
    if moved or thoroughly:
        examined = _examined(model, champion, terms=terms, history=history)
    else:
        examined = veto(model, champion, history=history, terms=terms)
    served = history.was_served(champion)  # then it may be gone back to
    if moved and examined.problem is None and policy.incumbent is not None and not served:
        compared = comparison_in(history.approving_entry(champion))
        examined = replace(examined, problem=outdated(compared, history.serving, history))
    if examined.problem is not None:
        return [_revert(model, examined, policy=policy, history=history, trust=trust)]
    if moved:
        return [_accept(model, examined, history)]
    return _give_back(model, history)


def _examined(
    model: RegisteredModel, champion: str, *, terms: Terms | None, history: ModelHistory
) -> Eligibility:
    """Examine the champion with its bytes.

    An unavailable file, or one wrong download, does not count against a version that the gate
    promoted. It does count against one that was set by hand.
    """
    moved = champion != history.serving
    try:
        # What is to be deployed yet needs its golden vectors.
        golden = not moved and not history.was_deployed(champion)
        return examine(model, champion, history=history, terms=terms, golden=golden)
    except (RegistryUnavailable, RegistryDenied, ResourceGone):
        raise
    except RegistryError as error:  # the store, or an editor, may write any content into its files
        if not moved:
            raise
        return replace(veto(model, champion, history=history), problem=str(error))


def _accept(model: RegisteredModel, examined: Eligibility, history: ModelHistory) -> StepResult:
    """Somebody pointed at a version that may serve: write down that it does."""
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
    # Before the alias moves, so that the version shows the reason from then on.
    model.note(examined.version, Tag.REVERTED, problem)
    number = target.version if target else None
    move_alias(
        model, model.entry("reverted", reason, version=number, previous=champion, about=target)
    )
    return StepResult("guard", "reverted", number, reason)


def _bring_back(
    model: RegisteredModel, policy: Policy, history: ModelHistory, *, trust: ReadTrust
) -> list[StepResult]:
    """Restore `champion` to a version that may serve, after the guard itself had removed the alias.

    Nothing happens until such a version is verified.
    """
    change = history.change
    if change is None or (change.action, change.version) != ("reverted", None):
        return []
    # A version that was set by hand does not come back; one that served by the ledger may, once its
    # bytes are right again.
    but = None if history.expected_champion is None else change.previous_version
    target, trouble = _fallback(model, history, policy=policy, but=but, trust=trust)
    if trouble is not None:
        raise trouble
    if target is None:
        return []
    reason = f"'{CHAMPION}' had been taken away, and is version {target.version} now: it was proven"
    move_alias(model, model.entry("reverted", reason, version=target.version, about=target))
    return [StepResult("guard", "restored", target.version, reason)]


def _give_back(model: RegisteredModel, history: ModelHistory) -> list[StepResult]:
    """Return `champion` to the expected version once it is verified.

    Another version serves meanwhile because `champion` was moved by hand, and the expected version,
    which was deployed, could not be verified then.
    """
    number, serving = history.expected_champion, history.serving
    vouched = None if number is None else history.approving_entry(number)
    if number is None or vouched is None or number == serving or not history.was_deployed(number):
        return []  # what was not deployed may have failed by a policy
    try:
        if examine(model, number, history=history, terms=None).problem is not None:
            return []
    except (RegistryError, StorageError):  # what serves meanwhile is proven
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
    """Return the line of the last served version that may still serve, with verified bytes.

    It must pass by this policy and be signed by keys that are still trusted. Without one, return
    the error that prevented verification now, if there was one.
    """
    trouble: GateError | None = None
    unreached = 0
    for number in history.served:
        vouched = history.approving_entry(number)
        if number == but or vouched is None:
            continue
        try:
            # The expected champion served until it was moved by hand: its keys are not checked.
            believed = None if number == history.expected_champion else trust()
            word = history.promotion_of(number) or vouched  # a line that it waits has no approvers
            if believed is not None and trust_problem(word, believed) is not None:
                continue
            terms = Terms.of(policy, history, number, trust=trust)
            if examine(model, number, history=history, terms=terms).problem is None:
                return vouched, None
        except ResourceGone:
            continue
        except GateError as error:
            trouble = error
            unreached += isinstance(error, RegistryUnavailable)
            if unreached == _UNREACHED:  # of the others neither
                break
    return None, trouble
