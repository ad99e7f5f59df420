"""Promote, submit, roll back."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    EvidenceError,
    GateError,
    MismatchUnconfirmed,
    PromotionConflict,
    RegistryError,
    ResourceGone,
    Untrusted,
)
from gate.ledger.entry import LedgerEntry, now
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Ledger
from gate.policy.policy import Policy
from gate.registry.alias import model_lock, move_alias
from gate.registry.create_version import create_version
from gate.registry.eligibility import check_bytes_allowed, veto
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Registry, Tag, Version
from gate.registry.registered_model import MismatchMemory, RegisteredModel
from gate.registry.release import PromotionResult, Release
from gate.registry.reviews import ReviewSettings
from gate.registry.verify_release import VerifiedRelease, outdated
from gate.registry.version_files import Download, ExpectedDigests, load_statements
from gate.registry.version_page import (
    HANDED_IN,
    WAITS_FOR_SERVICE,
    outcome_on,
    refused_as,
    way_back,
    write_status,
)
from gate.signing.statement import SignedStatement
from gate.storage.files import temporary_folder
from gate.storage.workspace import key_in


# Submitting needs neither the ledger nor the right to move `champion`: measuring and deciding can
# run on different machines.
def submit(model: RegisteredModel, verified: VerifiedRelease) -> PromotionResult:
    """Make a version of the release and point `candidate` at it, if its decision is a PASS. The
    same release handed in again finds its version, unless the service refused that. The ledger is
    not needed.

    Refused (a returned outcome): the service judged it before, as its page says; the decision is
    not PASS, the model's source files changed since it was measured, it has no statements, or
    evidence or statements are too old. `dry_run`: within `dvc exp run`. `unchanged`: it is champion
    already.

    Raises MismatchUnconfirmed where the registry does not give back what was sent;
    PromotionConflict where another version became the candidate meanwhile; the other RegistryErrors
    and StorageError as they come. After any of them nothing else than a version without an alias
    was made, and the next call finishes the job.
    """
    release = verified.release
    refusal = verified.refusal or release.outdated() or verified.untimely(datetime.now(UTC))
    judged = [release] if release.twin is None else [release, release.twin]
    if refusal is None and any(each.statements is None for each in judged):
        refusal = (
            "it has no signed statements, and the service takes no file without them. Measure and "
            "sign it: gate check --report --key"
        )
    if refusal is not None:
        return PromotionResult("refused", None, None, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment decides and reports only; run `make repro` to hand it in"
        return PromotionResult("dry_run", None, None, reason)
    return _Submission(model.registry, verified, MismatchMemory()).run()


@dataclass(frozen=True)
class _Submission:
    """One release on its way to `candidate`."""

    registry: Registry
    verified: VerifiedRelease
    mismatches: MismatchMemory

    @property
    def release(self) -> Release:
        return self.verified.release

    def run(self) -> PromotionResult:
        registry, release, policy = self.registry, self.release, self.verified.policy
        name = release.model_name
        registry.ensure_model(name)
        champion, found = registry.alias(name, CHAMPION), self._existing_version()
        closed = None if found is None or found.number == champion else _closed(found)
        if found is not None and closed is not None:
            reason = (
                f"it was handed in before as version {found.number}, and {closed}. "
                f"{way_back(key_in(registry.identity, name), found.number)}."
            )
            return PromotionResult("refused", found.number, champion, reason)
        if found is None:
            number = create_version(registry, release, policy, status=WAITS_FOR_SERVICE)
            self._prove(number)
        else:
            number = found.number
        if registry.alias(name, CANDIDATE) != number:  # again would fire an event of nothing
            registry.set_alias(name, CANDIDATE, number)
            self._expect(number)
        if number == champion:
            reason = f"version {number} is champion already, with these bytes and this verdict"
            return PromotionResult("unchanged", number, champion, reason)
        compared = ""
        if policy.incumbent is not None and release.decision.incumbent is None:
            compared = ", not compared with what serves, which the service does"
        reason = (
            f"PASS on {', '.join(release.decision.runtimes)}{compared}, handed in: now the "
            "service decides (gate serve). What came of it is said on the page of version "
            f"{number}, in the first line"
        )
        return PromotionResult("handed_in", number, champion, reason)

    def _existing_version(self) -> Version | None:
        """Return a whole version of this very release with the same statements, or None.

        A version that the service refused does not count.
        """
        release = self.release
        wanted = release.draft().tags.items()
        for version in self.registry.find(release.model_name, release.decision.subject_sha256):
            if not wanted <= version.tags.items() or Tag.REFUSED in version.tags:
                continue
            try:
                with temporary_folder() as folder:
                    path = self._download(version, into=folder).proven()
                    if self._has_same_statements(path):
                        return version
            except (DigestMismatch, ArtifactMissing):  # another is made: it could be so for good
                continue
        return None

    def _prove(self, number: str) -> None:
        """Read a version back that was just made; once more, if it comes otherwise."""
        name = self.release.model_name
        version = self.registry.version(name, number)
        for last in (False, True):
            with temporary_folder() as folder:
                try:
                    path = self._download(version, into=folder).proven()
                    if not self._has_same_statements(path):
                        raise DigestMismatch("Its statements are others than those that were sent.")
                except DigestMismatch as error:
                    if last or not self.mismatches.waits():
                        raise MismatchUnconfirmed(
                            f"version {number} of {name} was made, and the registry gives back "
                            f"something else: {error} '{CANDIDATE}' was not moved. Look at the "
                            "artifact store, then repeat."
                        ) from error
                else:
                    return

    def _download(self, version: Version, *, into: Path) -> Download:
        release = self.release
        expected = ExpectedDigests.from_release(release, golden=version.tags.get(Tag.GOLDEN))
        of = (release.model_name, version.number, expected)
        return Download.into(into, self.registry, of=of)

    def _has_same_statements(self, path: Path) -> bool:
        """Return whether the statements next to a file are the release's: signed by the same
        keys."""
        try:
            there = load_statements(path)
        except Untrusted:
            return False
        ours = self.release.statements
        if there is None or ours is None:
            return False
        pairs = ((there.evidence, ours.evidence), (there.decision, ours.decision))
        return all(self._are_alike(one, other) for one, other in pairs)

    def _are_alike(self, one: SignedStatement, other: SignedStatement) -> bool:
        """ECDSA signs the same otherwise each time."""
        if one.data == other.data:
            return True
        trust = self.verified.trust
        if trust is None or one.statement != other.statement:
            return False
        signers, wanted = (each.signers(trust.measurers) for each in (one, other))
        return {key.key_id for key in signers} == {key.key_id for key in wanted}

    def _expect(self, number: str) -> None:
        name = self.release.model_name
        candidate = self.registry.alias(name, CANDIDATE)
        if candidate != number:
            raise PromotionConflict(
                f"'{CANDIDATE}' of {name} points at version {candidate or 'none'}, this hand-in "
                f"left it at {number}: another one was handed in meanwhile. Look at the registry; "
                "if this one is meant, repeat."
            )


def _closed(version: Version) -> str | None:
    """Return the outcome that the registry records for a version, or None if there is none yet."""
    outcome, tag = outcome_on(version.description), version.tags.get(Tag.REVERTED)
    if outcome is not None:
        return f"its page says: {outcome}"
    return None if tag is None else f"it has the tag {Tag.REVERTED}: {tag.rstrip('.')}"


# What serves is decided by the local records alone. Tags only help to find a version that an
# interrupted promotion left behind (its bytes are hashed again); a reviewer's tag may veto.
_TITLES = 3
"""Of waived checks in a reason."""


def promote(model: RegisteredModel, verified: VerifiedRelease) -> PromotionResult:
    """Make the release's file the champion, if the decision on it is a PASS.

    Refused (a returned outcome): the decision is not PASS, the model's source files changed since
    it was measured, its evidence is older than the policy allows or of the future, its statements
    count no more at this time, or these bytes were rolled back or rejected in review. `passed`: the
    policy asks for a review, and the version waits for it. `dry_run`: within `dvc exp run`, which
    never promotes. `unchanged`: it serves already, whatever its age.

    Raises DigestMismatch or EvidenceError where what the registry gives back is not what was sent;
    PromotionConflict where another promotion is under way; the other RegistryErrors and
    StorageError as they come. After any of them the champion is what the ledger says, or the next
    owner of the lock moves it there, and the next call finishes the job.
    """
    model = replace(model, reviews=ReviewSettings.of(verified.policy))
    release = verified.release
    refusal = verified.refusal or release.outdated()
    if refusal is not None:
        return refuse(model, release, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment decides and reports only; run `make repro` to promote"
        return PromotionResult("dry_run", None, None, reason)
    with model_lock(model):
        # A broken ledger must stop the promotion before it touches the registry.
        done = _Attempt(model, verified, model.history()).promote()
        return replace(done, signers=release.signers)


@dataclass(frozen=True)
class _Attempt:
    """One release on its way to `champion`, and the model's history as it was at first."""

    model: RegisteredModel
    verified: VerifiedRelease
    history: ModelHistory

    @property
    def release(self) -> Release:
        return self.verified.release

    @property
    def policy(self) -> Policy:
        return self.verified.policy

    def promote(self) -> PromotionResult:
        model, history = self.model, self.history
        model.registry.ensure_model(model.name)
        champion = model.alias(CHAMPION)
        sha256 = self.release.decision.subject_sha256
        found = model.registry.find(model.name, sha256)
        tags = {version.number: version.tags for version in found}
        for number in dict.fromkeys((*tags, *history.versions_with_bytes(sha256))):
            objection = check_bytes_allowed(model, history, number, tags=tags.get(number))
            if objection is not None:
                return refuse(model, self.release, objection, version=number)
        there = [version for version in found if version.number == champion]
        serving = next((v.number for v in there if self._serves_already(v)), None)
        if serving is not None and self._served_rightly(serving):
            return self._unchanged(serving)
        late = self._outdated_reason(champion, serving)
        if late is not None:
            return refuse(model, self.release, late)
        required = self.policy.review != "automatic"
        if serving is not None and not required:
            return self._unchanged(serving)
        others = [version for version in found if version.number != champion]
        number = serving or self._left_behind(others) or self._create()
        if serving is None:
            model.expect(CHAMPION, champion)
            model.point(CANDIDATE, number)
        if required:
            return self._submit(number, champion)
        why, about = _why(self.release), self.release
        move_alias(
            model, model.entry("promoted", why, version=number, previous=champion, about=about)
        )
        return PromotionResult("promoted", number, champion, why)

    def _serves_already(self, champion: Version) -> bool:
        """Return whether the champion is this release."""
        release, vouched = self.release, self.history.approving_entry(champion.number)
        if vouched is not None:
            policy, spec = release.decision.policy_sha256, release.preprocess_sha256
            same = (vouched.policy_sha256, vouched.preprocess_sha256) == (policy, spec)
            twins = [twin and twin.sha256 for twin in (vouched.twin, release.twin_digests)]
            return same and twins[0] == twins[1] and self._is_whole(champion)
        # If the champion came from elsewhere, only its tags list the files that belong to it.
        tags = release.draft().tags
        names = {*tags, Tag.TWIN, Tag.PREPROCESS} - {Tag.COMPARED_WITH}
        same = all(champion.tags.get(name) == tags.get(name) for name in names)
        return same and self._is_whole(champion)

    def _left_behind(self, versions: Sequence[Version]) -> str | None:
        """Return the number of a whole version of this very release, or None."""
        tags = self.release.draft().tags
        refused = {**tags, Tag.VERDICT: refused_as(tags[Tag.VERDICT])}  # it may come again
        for version in versions:
            # Of one that can't be proven now another is made: it could be so for good.
            with contextlib.suppress(MismatchUnconfirmed):
                is_alike = any(all_of.items() <= version.tags.items() for all_of in (tags, refused))
                if is_alike and self._is_whole(version):
                    return version.number
        return None

    def _create(self) -> str:
        """Make a version and prove it; gives its number."""
        model, release = self.model, self.release
        number = create_version(model.registry, release, self.policy, status=HANDED_IN)
        golden = release.draft().tags.get(Tag.GOLDEN)
        model.prove(number, ExpectedDigests.from_release(release, golden=golden))
        return number

    def _is_whole(self, version: Version) -> bool:
        """Return True if a version's bytes are the release's."""
        vouched = self.history.approving_entry(version.number)
        expected = ExpectedDigests.from_release(self.release, golden=version.tags.get(Tag.GOLDEN))
        if vouched is not None:
            expected = replace(ExpectedDigests.from_entry(vouched), sha256=expected.sha256)
        try:
            self.model.prove(version.number, expected)
        except (DigestMismatch, ArtifactMissing):
            return False
        return True

    def _outdated_reason(self, champion: str | None, serving: str | None) -> str | None:
        """Return why what was measured and decided holds no more at this moment, or None.

        `serving`: the champion, where that is this release already.
        """
        untimely = self.verified.untimely(datetime.now(UTC))
        if untimely is not None or serving is not None or self.policy.incumbent is None:
            return untimely
        return outdated(self.release.compared_with, champion, self.history)

    def _served_rightly(self, number: str) -> bool:
        history = self.history
        return history.was_served(number) and history.rollback_of(number) is None

    def _unchanged(self, champion: str) -> PromotionResult:
        model, previous = self.model, self.model.alias(PREVIOUS)
        if self._served_rightly(champion):
            reason = f"version {champion} serves these bytes already, under the same policy"
            # The promoted files count, not those that were submitted now.
            about = self.history.approving_entry(champion) or self.release
            model.write("unchanged", reason, version=champion, previous=previous, about=about)
        else:
            # A crash between the alias and the ledger's line, or a promotion from elsewhere.
            reason = f"version {champion} was champion already, without a line in this ledger"
            model.write("promoted", reason, version=champion, previous=previous, about=self.release)
        write_status(model, (champion, previous))
        return PromotionResult("unchanged", champion, previous, reason)

    def _submit(self, number: str, champion: str | None) -> PromotionResult:
        """Have the version wait for its review."""
        waits = self.model.reviews.waits(shlex.quote(self.model.key), number)
        reason = f"{_why(self.release)}; {waits}"
        standing = self.history.standing(number)
        if standing is None or standing.action != "passed":
            self.model.write(
                "passed", reason, version=number, previous=champion, about=self.release
            )
        write_status(self.model, (number,))
        return PromotionResult("passed", number, champion, reason)


def _why(release: Release) -> str:
    reason = f"PASS on {', '.join(release.decision.runtimes)}"
    waived = [check.title for check in release.decision.waived]
    if waived:
        # A release of several files may waive dozens, which its report lists.
        more = f" and {len(waived) - _TITLES} more" if len(waived) > _TITLES else ""
        reason += f"; waived: {', '.join(waived[:_TITLES])}{more}"
    return reason


def refuse(
    model: RegisteredModel, release: Release, reason: str, *, version: str | None = None
) -> PromotionResult:
    """Write down that a release is refused, and why. Raises EvidenceError, StorageError."""
    model.write("refused", reason, version=version, about=release)
    return PromotionResult("refused", version, None, reason)


# If `champion` was moved by hand, `previous` did not follow: then a rollback restores the version
# that served before that. If it was moved to the version of `previous`, that was a rollback by
# hand: the serving version stays, and the ledger records it.
def rollback(
    registry: Registry,
    model_name: str,
    *,
    ledger: Ledger,
    reason: str,
    reviews: ReviewSettings | None = None,
) -> PromotionResult:
    """Point `champion` at the version of `previous`, and `previous` at the old champion. `reviews`:
    by which tag reviewers say no; None: by the gate's own.

    The target's bytes are downloaded and must have the digest that the ledger recorded when they
    were promoted. The line in the ledger keeps the old champion from serving, with or without a
    tag; its tag `gate.rolled_back` keeps its bytes from being handed in again until it is deleted.

    A move by hand counts, whether the guard has accepted it yet or not: what served before it is
    gone back to. One to the version of `previous` was itself a rollback, which is written down.

    Raises RegistryError where there is nothing to go back to, EvidenceError without a line in the
    ledger, DigestMismatch on other bytes, PromotionConflict where another promotion is under way.
    An interrupted rollback is finished by calling again.
    """
    model = RegisteredModel(registry, ledger, model_name, reviews=reviews or ReviewSettings())
    with model_lock(model) as finished:
        if finished is not None and finished.action == "rolled_back":
            return _resumed(model, finished)
        return _rollback(model, reason)


def _rollback(model: RegisteredModel, reason: str) -> PromotionResult:
    history = model.history()
    champion, previous = model.alias(CHAMPION), model.alias(PREVIOUS)
    if champion is None:
        _refuse(model, _nothing_serves(model, history))
    last = history.last_move
    rolled_back = last is not None and (last.action, last.version) == ("rolled_back", champion)
    if last is not None and rolled_back and _is_left_behind(model, previous, last, history):
        return _resumed(model, last)
    left = _version_before_manual_move(history, champion)
    if left is not None and champion == previous and history.served_before(champion, left):
        return _roll_back_manual_move(model, left, champion=champion, reason=reason)
    target = _proven_target(model, history, champion=champion, preferred=(left, previous))
    if target is None:
        _refuse(
            model,
            f"{model.name} can't be rolled back: '{CHAMPION}' points at version {champion}, "
            f"'{PREVIOUS}' at {previous or 'none'}, and the ledger knows no other version that "
            "served and may serve again. There must have been two promotions.",
        )
    _mark(model, champion, reason)
    if champion != history.serving:
        reason += (
            f" ('{CHAMPION}' had been pointed at version {champion} by hand; by the ledger version "
            f"{history.serving or 'none'} served)"
        )
    entry = model.entry(
        "rolled_back", reason, version=target.version, previous=champion, about=target
    )
    return _outcome(move_alias(model, entry))


def _version_before_manual_move(history: ModelHistory, champion: str) -> str | None:
    """Return the version that served before `champion` was moved by hand; None if it was not."""
    last = history.last_move
    if last is None:
        return None
    if last.version != champion:
        return last.version
    # The gate's own moves have the id of an operation; what the guard accepted has none.
    accepted = last.action == "promoted" and last.operation is None
    return last.previous_version if accepted else None


def _is_left_behind(
    model: RegisteredModel, previous: str | None, last: LedgerEntry, history: ModelHistory
) -> bool:
    """Return whether `previous` did not follow the last rollback: it points at what serves since,
    or still at a version that was left before."""
    if previous in (None, last.previous_version):
        return False
    return previous == last.version or isinstance(_eligible(model, previous, history), GateError)


def _proven_target(
    model: RegisteredModel,
    history: ModelHistory,
    *,
    champion: str,
    preferred: tuple[str | None, ...],
) -> LedgerEntry | None:
    """The line of the version to go back to, whose bytes are proven; None: there is none. One whose
    bytes are others is passed over, if another one may serve; else what is said against the first
    is written down and raised."""
    problem: GateError | None = None
    for found in _targets(model, history, champion=champion, preferred=preferred):
        try:
            if isinstance(found, LedgerEntry):
                return _proven(model, found)
        except DigestMismatch as error:
            problem = problem or error
        else:
            problem = problem or found
    if problem is not None:
        model.write("refused", str(problem))
        raise problem
    return None


def _targets(
    model: RegisteredModel,
    history: ModelHistory,
    *,
    champion: str,
    preferred: tuple[str | None, ...],
) -> Iterator[LedgerEntry | GateError]:
    """Yield the lines of the versions that a rollback may restore, the preferred first.

    They are: the first of these, if it may serve; the version of `previous`, or the objection to
    it; and the versions that served by the ledger and may serve, newest first.
    """
    left, previous = preferred
    if left not in (None, champion) and _may_serve(model, left, history):
        yield _eligible(model, left, history)
    if previous not in (None, champion, left):
        yield _eligible(model, previous, history)
    for version in history.served:
        if version not in (champion, previous, left) and _may_serve(model, version, history):
            yield _eligible(model, version, history)


def _may_serve(model: RegisteredModel, version: str | None, history: ModelHistory) -> bool:
    try:
        return version is not None and veto(model, version, history=history).problem is None
    except ResourceGone:
        return False


def _roll_back_manual_move(
    model: RegisteredModel, left: str, *, champion: str, reason: str
) -> PromotionResult:
    try:
        vouched = _proven(model, _eligible(model, champion, model.history()))
    except GateError as error:
        model.write("refused", str(error))
        raise
    why = f"{reason} ('{CHAMPION}' had been pointed back at version {champion} by hand)"
    with contextlib.suppress(ResourceGone):
        _mark(model, left, reason)
    line = model.write("rolled_back", why, version=champion, previous=left, about=vouched)
    with contextlib.suppress(ResourceGone):
        model.registry.version(model.name, left)
        model.point(PREVIOUS, left)
    write_status(model, (champion, left))
    return _outcome(line)


def _mark(model: RegisteredModel, version: str, reason: str) -> None:
    """Before the alias moves: a crash in between must not leave the bad bytes promotable."""
    if Tag.ROLLED_BACK not in model.registry.version(model.name, version).tags:
        note = f"{now()}: {reason}"
        model.registry.set_tag(model.name, version, key=Tag.ROLLED_BACK, value=note)


def _nothing_serves(model: RegisteredModel, history: ModelHistory) -> str:
    text = f"{model.name} can't be rolled back: the alias '{CHAMPION}' points at no version. "
    if history.serving is None:
        return f"{text}There must have been two promotions."
    return (
        f"{text}Somebody took it away: by the ledger version {history.serving} served. Point "
        f"'{CHAMPION}' at that or at another version that passed, then repeat."
    )


def _resumed(model: RegisteredModel, line: LedgerEntry) -> PromotionResult:
    """The rollback of this line was interrupted. Where an older version of the gate began it, or
    the registry refused, `previous` still has to follow."""
    if line.previous_version is not None:
        model.point(PREVIOUS, line.previous_version)
    write_status(model, (line.version, line.previous_version))
    return _outcome(line)


def _outcome(line: LedgerEntry) -> PromotionResult:
    return PromotionResult("rolled_back", line.version, line.previous_version, line.reason)


def _eligible(
    model: RegisteredModel, target: str | None, history: ModelHistory
) -> LedgerEntry | GateError:
    """Return the line that approves a version to restore, or why it can't be restored.

    Its bytes are not verified yet. Raises the RegistryErrors except ResourceGone.
    """
    assert target is not None
    line = history.rollback_of(target)
    try:
        if line is not None and Tag.ROLLED_BACK in model.registry.version(model.name, target).tags:
            return RegistryError(
                f"version {target} of {model.name} was itself rolled back ({line.at}: "
                f"{line.reason}), and no earlier version may serve. To return to it, delete its "
                f"tag {Tag.ROLLED_BACK}, then repeat."
            )
        if line is not None:
            history = history.without(line)
        vouched = history.approving_entry(target) if history.was_served(target) else None
        if vouched is None:
            return EvidenceError(
                f"the ledger {model.ledger.location} has no line that version {target} of "
                f"{model.name} was ever promoted, so nothing says which bytes it should hold. Roll "
                "back where the ledger is, or promote a measured file."
            )
        problem = veto(model, target, history=history).problem
    except ResourceGone as error:
        return error
    if problem is not None:
        return RegistryError(f"{model.name} can't be rolled back to version {target}: {problem}.")
    return vouched


def _proven(model: RegisteredModel, found: LedgerEntry | GateError) -> LedgerEntry:
    """The line of a version whose bytes are proven; else what is said against it is raised."""
    if isinstance(found, GateError):
        raise found
    assert found.version is not None
    model.prove(found.version, ExpectedDigests.needed(found))
    return found


def _refuse(model: RegisteredModel, reason: str) -> NoReturn:
    model.write("refused", reason)
    raise RegistryError(reason)
