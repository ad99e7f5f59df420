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
from gate.ledger.entry import LedgerEntry, now
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.registry import reviews
from gate.registry.alias import move_alias
from gate.registry.eligibility import Eligibility, examine, trust_problem, veto
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import ReadTrust, Terms, comparison_in, nobody, outdated
from gate.registry.version_page import write_status
from gate.service.monitoring import StepResult

_TAIL = 4000
"""Characters of a tag's value; databases other than SQLite refuse more than 5000."""

_UNREACHED = 3
"""So many versions out of reach are the registry's trouble: one may be an editor's doing."""


def guard_champion(
    model: RegisteredModel, policy: Policy, *, thoroughly: bool, trust: ReadTrust = nobody
) -> list[StepResult]:
    """Take `champion` back from a version that must not serve.

    Where the ledger put it and it was deployed, only its own lines, tags and (`thoroughly`) bytes
    are looked at: a policy or a trust that changed does not take a model out of service. What was
    not deployed yet must pass by this policy and this trust, with evidence that was young enough
    when it was promoted. Where somebody else put it, the version must be as good as one that is
    promoted now. Where no other can be proven, nothing serves until one can be: an unreachable
    store condemns nothing, and excuses nothing. Where another one serves meanwhile, the one that
    served rightly comes back as soon as it can be proven.

    Raises RegistryError where the ledger knows nothing of the model, the other RegistryErrors,
    EvidenceError and StorageError where nothing can be said now.
    """
    history, champion = model.history(), model.alias(CHAMPION)
    if champion is None:
        return _bring_back(model, policy, history, trust=trust)
    if not history.passed_any:
        raise RegistryError(
            f"'{CHAMPION}' of {model.name} points at version {champion}, and the ledger "
            f"{model.ledger.place} has no line that anything of {model.name} in "
            f"{model.registry.identity} ever passed; nothing was changed, and nothing of it is "
            "deployed. Name the right ledger with --state, or the registry's other address with "
            f"--same-registry. If somebody pointed '{CHAMPION}' there before anything passed, take "
            f"that alias away: what is '{CANDIDATE}' is judged then."
        )
    moved = champion != history.serving
    terms = Terms.now(policy, trust) if moved else Terms.of(policy, history, champion, trust=trust)
    if terms is not None and not moved and history.passed_before_signing(champion):
        # To begin with signing takes nothing out of service; it is only not deployed anew.
        terms = replace(terms, trust=None)
    if moved or thoroughly:
        examined = _examined(model, champion, terms=terms, history=history)
    else:
        examined = veto(model, champion, history=history, terms=terms)
    if moved and examined.problem is None:
        examined = replace(examined, problem=_late(champion, policy, history))
    if examined.problem is not None:
        return [_revert(model, examined, policy=policy, history=history, trust=trust)]
    if moved:
        return [_accept(model, examined, history)]
    return _give_back(model, history)


def _examined(
    model: RegisteredModel, champion: str, *, terms: Terms | None, history: ModelHistory
) -> Eligibility:
    """A file that is away for a while, or came wrong once, condemns nothing that serves rightly;
    but what somebody pointed at has to be there."""
    moved = champion != history.serving
    try:
        return examine(model, champion, history=history, terms=terms)
    except (RegistryUnavailable, RegistryDenied, ResourceGone):
        raise
    except RegistryError as error:  # whatever the store, or an editor, makes of its files
        if not moved:
            raise
        return replace(veto(model, champion, history=history), problem=str(error))


def _late(champion: str, policy: Policy, history: ModelHistory) -> str | None:
    """Why a version that never served yet is not what the policy wants it compared with; or None.
    What served before may be gone back to."""
    if policy.incumbent is None or history.was_served(champion):
        return None
    return outdated(comparison_in(history.vouching_for(champion)), history.serving, history)


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
    # Before the alias moves, so that whoever looks at the version finds out why.
    if not tags.get(Tag.REVERTED, "").endswith(problem[-_TAIL:]):
        note = f"{now()}: {problem}" if len(problem) <= _TAIL else f"{now()}: …{problem[-_TAIL:]}"
        model.registry.set_tag(model.name, champion, key=Tag.REVERTED, value=note)
    number = target.version if target else None
    move_alias(
        model, model.entry("reverted", reason, version=number, previous=champion, about=target)
    )
    return StepResult("guard", "reverted", number, reason)


def _bring_back(
    model: RegisteredModel, policy: Policy, history: ModelHistory, *, trust: ReadTrust
) -> list[StepResult]:
    """Where the guard itself took `champion` away: a version that may serve, once one is proven."""
    change = history.change
    if change is None or (change.action, change.version) != ("reverted", None):
        return []
    left = change.previous_version
    but = None if left is not None and history.was_absolved(left) else left
    target, trouble = _fallback(model, history, policy=policy, but=but, trust=trust)
    if trouble is not None:
        raise trouble
    if target is None:
        return []
    reason = f"'{CHAMPION}' had been taken away, and is version {target.version} now: it was proven"
    move_alias(model, model.entry("reverted", reason, version=target.version, about=target))
    return [StepResult("guard", "restored", target.version, reason)]


def _give_back(model: RegisteredModel, history: ModelHistory) -> list[StepResult]:
    """Where another version serves because somebody had pointed `champion` elsewhere, and the
    rightful one, which was deployed, could not be proven then: that one, once it is."""
    number, serving = history.expected_champion, history.serving
    vouched = None if number is None else history.vouching_for(number)
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
    """The line of the version that served last and still may by this policy and on a word that
    still counts, with proven bytes; without one, what kept it from being proven now, if anything
    did."""
    trouble: GateError | None = None
    unreached = 0
    for number in history.served:
        vouched = history.vouching_for(number)
        if number == but or vouched is None:
            continue
        try:
            # What was pushed aside by hand served until now, on whatever word.
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
