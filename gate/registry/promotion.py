"""Promote, submit, roll back."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, TypeVar

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
from gate.registry.comparison import outdated
from gate.registry.create_version import create_version
from gate.registry.eligibility import check_bytes_allowed, veto
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Registry, Tag, Version
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import PromotionResult, Release
from gate.registry.reviews import ReviewSettings
from gate.registry.verify_release import VerifiedRelease
from gate.registry.version_files import ExpectedDigests, load_statements
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

T = TypeVar("T")


# A submission needs neither the ledger nor the right to move `champion`, so that measuring and
# deciding can run on different machines.
def submit(model: RegisteredModel, verified: VerifiedRelease) -> PromotionResult:
    """Upload the release as a version and point `candidate` at it, if its decision is a PASS.

    The ledger is not needed. A release that was submitted before reuses its version, unless the
    service refused that version.

    Outcomes: `refused` if the service evaluated the version before, the decision is not PASS, the
    model's source files changed since the measurement, there are no statements, or evidence or
    statements are too old; `dry_run` within `dvc exp run`; `unchanged` if it is already champion.

    Raises MismatchUnconfirmed if the registry returns other bytes than were uploaded;
    PromotionConflict if another version became the candidate meanwhile; the other RegistryErrors
    and StorageError. After an exception at most a version without an alias exists, and the next
    call completes the submission.
    """
    release = verified.release
    refusal = verified.refusal or release.outdated() or verified.age_problem(datetime.now(UTC))
    if refusal is None and any(each.statements is None for each in release.evaluated_files):
        refusal = (
            "it has no signed statements, which the service requires. Measure and sign it: "
            "gate check --report --key"
        )
    if refusal is not None:
        return PromotionResult("refused", None, None, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment only decides and reports; to submit it, run `make repro`"
        return PromotionResult("dry_run", None, None, reason)
    return _Submission(model, verified).run()


@dataclass(frozen=True)
class _Submission:
    """The submission of one release."""

    model: RegisteredModel
    verified: VerifiedRelease

    @property
    def registry(self) -> Registry:
        return self.model.registry

    @property
    def release(self) -> Release:
        return self.verified.release

    def run(self) -> PromotionResult:
        registry, release, policy = self.registry, self.release, self.verified.policy
        name = release.model_name
        registry.ensure_model(name)
        champion, existing = registry.alias(name, CHAMPION), self._existing_version()
        outcome = None if existing is None or existing.number == champion else _outcome_of(existing)
        if existing is not None and outcome is not None:
            reason = (
                f"it was submitted before as version {existing.number}, and {outcome}. "
                f"{way_back(key_in(registry.identity, name), existing.number)}."
            )
            return PromotionResult("refused", existing.number, champion, reason)
        if existing is None:
            number = create_version(registry, release, policy, status=WAITS_FOR_SERVICE)
            self._verify_upload(number)
        else:
            number = existing.number
        if registry.alias(name, CANDIDATE) != number:  # setting it again would fire an event
            registry.set_alias(name, CANDIDATE, number)
            self._expect_candidate(number)
        if number == champion:
            reason = f"version {number} is champion already, with these bytes and this verdict"
            return PromotionResult("unchanged", number, champion, reason)
        compared = ""
        if policy.incumbent is not None and release.decision.incumbent is None:
            compared = " (the service compares it with the champion)"
        reason = (
            f"PASS on {', '.join(release.decision.runtimes)}{compared}, submitted: the service "
            "decides (gate serve) and writes the outcome into the first line of the page of "
            f"version {number}"
        )
        return PromotionResult("handed_in", number, champion, reason)

    def _existing_version(self) -> Version | None:
        """Return an unchanged version of this release with the same statements, or None.

        Versions that the service refused are ignored.
        """
        release = self.release
        expected_tags = release.draft().tags.items()
        for version in self.registry.find(release.model_name, release.decision.subject_sha256):
            if not expected_tags <= version.tags.items() or Tag.REFUSED in version.tags:
                continue
            # A version that can't be verified may stay broken, so a new one is created instead.
            with contextlib.suppress(DigestMismatch, ArtifactMissing, MismatchUnconfirmed):
                if self._read(version, self._has_same_statements):
                    return version
        return None

    def _verify_upload(self, number: str) -> None:
        """Download a new version and verify it; retry once on a mismatch."""

        def verify_statements(path: Path) -> None:
            if not self._has_same_statements(path):
                raise DigestMismatch("Its statements differ from the uploaded ones.")

        name = self.release.model_name
        try:
            self._read(self.registry.version(name, number), verify_statements)
        except (DigestMismatch, MismatchUnconfirmed) as error:
            raise MismatchUnconfirmed(
                f"version {number} of {name} was created, but its download differs from the "
                f"upload: {error} '{CANDIDATE}' was not moved. Check the artifact store, then "
                "retry."
            ) from error

    def _read(self, version: Version, use: Callable[[Path], T]) -> T:
        """Download a version, verify the digests of its files, and return `use(path)`."""
        golden = version.tags.get(Tag.GOLDEN)
        expected = ExpectedDigests.from_release(self.release, golden=golden)
        with temporary_folder() as folder:
            return self.model.read(version.number, expected, use, into=folder)

    def _has_same_statements(self, path: Path) -> bool:
        """Return whether the statements next to a file equal the release's, with the same
        signers."""
        try:
            uploaded = load_statements(path)
        except Untrusted:
            return False
        statements = self.release.statements
        if uploaded is None or statements is None:
            return False
        pairs = ((uploaded.evidence, statements.evidence), (uploaded.decision, statements.decision))
        return all(self._are_equal(*pair) for pair in pairs)

    def _are_equal(self, first: SignedStatement, second: SignedStatement) -> bool:
        # ECDSA signatures of the same content differ: compare the signers instead.
        if first.data == second.data:
            return True
        trust = self.verified.trust
        if trust is None or first.statement != second.statement:
            return False
        signers = [
            {key.key_id for key in signed.signers(trust.measurers)} for signed in (first, second)
        ]
        return signers[0] == signers[1]

    def _expect_candidate(self, number: str) -> None:
        name = self.release.model_name
        candidate = self.registry.alias(name, CANDIDATE)
        if candidate != number:
            raise PromotionConflict(
                f"'{CANDIDATE}' of {name} points at version {candidate or 'none'} instead of "
                f"{number}: another version was submitted meanwhile. Check the registry; if "
                f"version {number} should be the candidate, retry."
            )


def _outcome_of(version: Version) -> str | None:
    """Return the outcome that the registry records for a version, or None if there is none yet."""
    outcome, tag = outcome_on(version.description), version.tags.get(Tag.REVERTED)
    if outcome is not None:
        return f"its page shows: {outcome}"
    return None if tag is None else f"it has the tag {Tag.REVERTED}: {tag.rstrip('.')}"


# Only the local records decide which version serves. Tags serve to find a version that an
# interrupted promotion left behind (its bytes are hashed again), and a review tag may veto.
_MAX_TITLES = 3
"""Maximum number of waived checks that a reason names."""


def promote(model: RegisteredModel, verified: VerifiedRelease) -> PromotionResult:
    """Make the release's file the champion, if the decision on it is a PASS.

    Outcomes: `refused` if the decision is not PASS, the model's source files changed since the
    measurement, the evidence is older than the policy allows or from the future, the statements are
    no longer valid, or these bytes were rolled back or rejected in review; `passed` if the policy
    requires a review, for which the version waits; `dry_run` within `dvc exp run`, which never
    promotes; `unchanged` if the release serves already, regardless of its age.

    Raises DigestMismatch or EvidenceError if the download differs from the upload;
    PromotionConflict if another promotion is running; the other RegistryErrors and StorageError.
    After an exception the next owner of the lock points `champion` at the version in the ledger,
    and the next call completes the promotion.
    """
    model = replace(model, reviews=ReviewSettings.from_policy(verified.policy))
    release = verified.release
    refusal = verified.refusal or release.outdated()
    if refusal is not None:
        return refuse(model, release, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment only decides and reports; to promote, run `make repro`"
        return PromotionResult("dry_run", None, None, reason)
    with model_lock(model):
        # Read the history first: a broken ledger must stop the promotion before any change.
        result = _Promotion(model, verified, model.history()).run()
        return replace(result, signers=release.signers)


@dataclass(frozen=True)
class _Promotion:
    """The promotion of one release, with the ledger history at its start."""

    model: RegisteredModel
    verified: VerifiedRelease
    history: ModelHistory

    @property
    def release(self) -> Release:
        return self.verified.release

    @property
    def policy(self) -> Policy:
        return self.verified.policy

    def run(self) -> PromotionResult:
        model, history = self.model, self.history
        model.registry.ensure_model(model.name)
        champion = model.alias(CHAMPION)
        sha256 = self.release.decision.subject_sha256
        matches = model.registry.find(model.name, sha256)
        tags = {version.number: version.tags for version in matches}
        for number in dict.fromkeys((*tags, *history.versions_with_bytes(sha256))):
            objection = check_bytes_allowed(model, history, number, tags=tags.get(number))
            if objection is not None:
                return refuse(model, self.release, objection, version=number)
        champions = [version for version in matches if version.number == champion]
        serving = next((v.number for v in champions if self._serves_already(v)), None)
        if serving is not None and self._is_recorded_as_served(serving):
            return self._unchanged(serving)
        outdated_reason = self._outdated_reason(champion, serving)
        if outdated_reason is not None:
            return refuse(model, self.release, outdated_reason)
        required = self.policy.review != "automatic"
        if serving is not None and not required:
            return self._unchanged(serving)
        candidates = [version for version in matches if version.number != champion]
        number = serving or self._reusable_version(candidates) or self._create()
        if serving is None:
            model.expect(CHAMPION, champion)
            model.point(CANDIDATE, number)
        if required:
            return self._await_review(number, champion)
        reason, about = _pass_reason(self.release), self.release
        move_alias(
            model, model.entry("promoted", reason, version=number, previous=champion, about=about)
        )
        return PromotionResult("promoted", number, champion, reason)

    def _serves_already(self, champion: Version) -> bool:
        """Return whether the champion is this release."""
        release, entry = self.release, self.history.approving_entry(champion.number)
        if entry is not None:
            policy, spec = release.decision.policy_sha256, release.preprocess_sha256
            is_same = (entry.policy_sha256, entry.preprocess_sha256) == (policy, spec)
            twins = [twin and twin.sha256 for twin in (entry.twin, release.twin_digests)]
            return is_same and twins[0] == twins[1] and self._has_release_files(champion)
        # Without a ledger entry, only the champion's tags list the files that belong to it.
        tags = release.draft().tags
        names = {*tags, Tag.TWIN, Tag.PREPROCESS} - {Tag.COMPARED_WITH}
        is_same = all(champion.tags.get(name) == tags.get(name) for name in names)
        return is_same and self._has_release_files(champion)

    def _reusable_version(self, versions: Sequence[Version]) -> str | None:
        """Return the number of an unchanged version of this release, or None."""
        tags = self.release.draft().tags
        refused = {**tags, Tag.VERDICT: refused_as(tags[Tag.VERDICT])}  # may be promoted again
        for version in versions:
            # A version that can't be verified now may stay broken, so a new one is created instead.
            with contextlib.suppress(MismatchUnconfirmed):
                has_tags = any(each.items() <= version.tags.items() for each in (tags, refused))
                if has_tags and self._has_release_files(version):
                    return version.number
        return None

    def _create(self) -> str:
        """Upload a version, verify it, and return its number."""
        model, release = self.model, self.release
        number = create_version(model.registry, release, self.policy, status=HANDED_IN)
        golden = release.draft().tags.get(Tag.GOLDEN)
        model.verify_version(number, ExpectedDigests.from_release(release, golden=golden))
        return number

    def _has_release_files(self, version: Version) -> bool:
        """Return True if a version's bytes are the release's."""
        entry = self.history.approving_entry(version.number)
        expected = ExpectedDigests.from_release(self.release, golden=version.tags.get(Tag.GOLDEN))
        if entry is not None:
            expected = replace(ExpectedDigests.from_entry(entry), sha256=expected.sha256)
        try:
            self.model.verify_version(version.number, expected)
        except (DigestMismatch, ArtifactMissing):
            return False
        return True

    def _outdated_reason(self, champion: str | None, serving: str | None) -> str | None:
        """Return why evidence or decision are no longer valid, or None.

        serving: the champion's number if the champion is this release already.
        """
        age_problem = self.verified.age_problem(datetime.now(UTC))
        if age_problem is not None or serving is not None or self.policy.incumbent is None:
            return age_problem
        return outdated(self.release.compared_with, champion, self.history)

    def _is_recorded_as_served(self, number: str) -> bool:
        history = self.history
        return history.was_served(number) and history.rollback_of(number) is None

    def _unchanged(self, champion: str) -> PromotionResult:
        model, previous = self.model, self.model.alias(PREVIOUS)
        if self._is_recorded_as_served(champion):
            reason = f"version {champion} serves these bytes already, under the same policy"
            # Record the files that were promoted, not those that were submitted now.
            about = self.history.approving_entry(champion) or self.release
            model.write("unchanged", reason, version=champion, previous=previous, about=about)
        else:
            # `champion` was set by hand or by a gate with another ledger.
            reason = f"version {champion} was champion already, without an entry in this ledger"
            model.write("promoted", reason, version=champion, previous=previous, about=self.release)
        write_status(model, (champion, previous))
        return PromotionResult("unchanged", champion, previous, reason)

    def _await_review(self, number: str, champion: str | None) -> PromotionResult:
        """Record that the version passed and waits for its review."""
        waits = self.model.reviews.waits(shlex.quote(self.model.key), number)
        reason = f"{_pass_reason(self.release)}; {waits}"
        last_entry = self.history.standing(number)
        if last_entry is None or last_entry.action != "passed":
            self.model.write(
                "passed", reason, version=number, previous=champion, about=self.release
            )
        write_status(self.model, (number,))
        return PromotionResult("passed", number, champion, reason)


def _pass_reason(release: Release) -> str:
    reason = f"PASS on {', '.join(release.decision.runtimes)}"
    waived = [check.title for check in release.decision.waived]
    if waived:
        # A release of several files may waive dozens of checks; the report lists all of them.
        more = f" and {len(waived) - _MAX_TITLES} more" if len(waived) > _MAX_TITLES else ""
        reason += f"; waived: {', '.join(waived[:_MAX_TITLES])}{more}"
    return reason


def refuse(
    model: RegisteredModel, release: Release, reason: str, *, version: str | None = None
) -> PromotionResult:
    """Record in the ledger that a release is refused. Raises EvidenceError, StorageError."""
    model.write("refused", reason, version=version, about=release)
    return PromotionResult("refused", version, None, reason)


# If a user moved `champion` by hand, `previous` did not follow, and a rollback restores the version
# that served before that. If the user moved it to the version of `previous`, that already was a
# rollback: the serving version stays, and the ledger records the rollback.
def rollback(
    registry: Registry,
    model_name: str,
    *,
    ledger: Ledger,
    reason: str,
    reviews: ReviewSettings | None = None,
) -> PromotionResult:
    """Point `champion` at the version of `previous`, and `previous` at the old champion.

    reviews: the tag by which reviewers reject versions; None: the default tag.

    The target's bytes are downloaded and must have the digest in the ledger. The rollback's ledger
    entry keeps the old champion from serving, with or without a tag. Its tag `gate.rolled_back`
    keeps its bytes from being promoted again until a user deletes the tag.

    If `champion` was moved by hand, the rollback restores the version that served before, whether
    the guard has accepted the move or not. If it was moved to the version of `previous`, the
    rollback is only recorded.

    Raises RegistryError if there is no version to restore, EvidenceError if the ledger has no entry
    of it, DigestMismatch if its bytes differ, PromotionConflict if another promotion is running. To
    complete an interrupted rollback, call the function again.
    """
    model = RegisteredModel(registry, ledger, model_name, reviews=reviews or ReviewSettings())
    with model_lock(model) as finished:
        if finished is not None and finished.action == "rolled_back":
            return _outcome(finished)
        return _rollback(model, reason)


def _rollback(model: RegisteredModel, reason: str) -> PromotionResult:
    history = model.history()
    champion, previous = model.alias(CHAMPION), model.alias(PREVIOUS)
    if champion is None:
        _refuse(model, _nothing_serves(model, history))
    last = history.last_move
    if last is not None and _is_previous_stale(model, champion, previous, last, history):
        assert last.previous_version is not None
        model.point(PREVIOUS, last.previous_version)
        write_status(model, (champion, last.previous_version))
        return _outcome(last)
    before = _version_before_manual_move(history, champion)
    if before is not None and champion == previous and history.served_before(champion, before):
        return _record_manual_rollback(model, before, champion=champion, reason=reason)
    target = _verified_target(model, history, champion=champion, preferred=(before, previous))
    if target is None:
        _refuse(
            model,
            f"{model.name} can't be rolled back: '{CHAMPION}' points at version {champion}, "
            f"'{PREVIOUS}' at {previous or 'none'}, and no other version in the ledger may serve "
            "again. A rollback needs at least two promotions.",
        )
    _mark(model, champion, reason)
    if champion != history.serving:
        reason += (
            f" ('{CHAMPION}' had been pointed at version {champion} by hand; the serving version "
            f"in the ledger was {history.serving or 'none'})"
        )
    entry = model.entry(
        "rolled_back", reason, version=target.version, previous=champion, about=target
    )
    return _outcome(move_alias(model, entry))


def _version_before_manual_move(history: ModelHistory, champion: str) -> str | None:
    """Return the version that served before a user moved `champion` by hand, or None."""
    last = history.last_move
    if last is None:
        return None
    if last.version != champion:
        return last.version
    # Moves by the gate have an operation ID; moves by hand that the guard accepted have none.
    accepted = last.action == "promoted" and last.operation is None
    return last.previous_version if accepted else None


def _is_previous_stale(
    model: RegisteredModel,
    champion: str,
    previous: str | None,
    last: LedgerEntry,
    history: ModelHistory,
) -> bool:
    """Return whether `last` is a rollback to the champion that `previous` did not follow, because a
    crash came first: it points at the champion or at a version that may not serve."""
    if (last.action, last.version) != ("rolled_back", champion):
        return False
    if previous in (None, last.previous_version):
        return False
    return previous == champion or isinstance(_eligible(model, previous, history), GateError)


def _verified_target(
    model: RegisteredModel,
    history: ModelHistory,
    *,
    champion: str,
    preferred: tuple[str | None, ...],
) -> LedgerEntry | None:
    """Return the ledger entry of the version to restore, whose bytes were verified, or None.

    Versions with wrong bytes are skipped. If no version is left, record and raise the first
    problem."""
    problem: GateError | None = None
    for target in _targets(model, history, champion=champion, preferred=preferred):
        try:
            if isinstance(target, LedgerEntry):
                return _verify_target(model, target)
        except DigestMismatch as error:
            problem = problem or error
        else:
            problem = problem or target
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
    """Yield the ledger entries of the versions that a rollback may restore.

    preferred: the version before a move by hand, yielded first if it may serve, and the version of
    `previous`, yielded next as its entry or the objection to it. Then follow the versions that
    served and may serve again, newest first.
    """
    before, previous = preferred
    if before not in (None, champion) and _may_serve(model, before, history):
        yield _eligible(model, before, history)
    if previous not in (None, champion, before):
        yield _eligible(model, previous, history)
    for version in history.served:
        if version not in (champion, previous, before) and _may_serve(model, version, history):
            yield _eligible(model, version, history)


def _may_serve(model: RegisteredModel, version: str | None, history: ModelHistory) -> bool:
    try:
        return version is not None and veto(model, version, history=history).problem is None
    except ResourceGone:
        return False


def _record_manual_rollback(
    model: RegisteredModel, before: str, *, champion: str, reason: str
) -> PromotionResult:
    try:
        target = _verify_target(model, _eligible(model, champion, model.history()))
    except GateError as error:
        model.write("refused", str(error))
        raise
    why = f"{reason} ('{CHAMPION}' had been pointed back at version {champion} by hand)"
    with contextlib.suppress(ResourceGone):
        _mark(model, before, reason)
    entry = model.write("rolled_back", why, version=champion, previous=before, about=target)
    with contextlib.suppress(ResourceGone):
        model.registry.version(model.name, before)
        model.point(PREVIOUS, before)
    write_status(model, (champion, before))
    return _outcome(entry)


def _mark(model: RegisteredModel, version: str, reason: str) -> None:
    # Called before the alias moves: a crash in between must not leave the bad bytes promotable.
    if Tag.ROLLED_BACK not in model.registry.version(model.name, version).tags:
        note = f"{now()}: {reason}"
        model.registry.set_tag(model.name, version, key=Tag.ROLLED_BACK, value=note)


def _nothing_serves(model: RegisteredModel, history: ModelHistory) -> str:
    text = f"{model.name} can't be rolled back: the alias '{CHAMPION}' points at no version. "
    if history.serving is None:
        return f"{text}A rollback needs at least two promotions."
    return (
        f"{text}The alias was deleted by hand: in the ledger version {history.serving} serves. "
        "Run gate reconcile, which restores the alias, then retry."
    )


def _outcome(entry: LedgerEntry) -> PromotionResult:
    return PromotionResult("rolled_back", entry.version, entry.previous_version, entry.reason)


def _eligible(
    model: RegisteredModel, target: str | None, history: ModelHistory
) -> LedgerEntry | GateError:
    """Return the ledger entry that approves a version to restore, or why it can't be restored.

    The version's bytes are not verified. Raises the RegistryErrors except ResourceGone.
    """
    assert target is not None
    rolled_back = history.rollback_of(target)
    try:
        if rolled_back is not None:
            if Tag.ROLLED_BACK in model.registry.version(model.name, target).tags:
                return RegistryError(
                    f"version {target} of {model.name} was itself rolled back ({rolled_back.at}: "
                    f"{rolled_back.reason}), and no earlier version may serve. To return to it, "
                    f"delete its tag {Tag.ROLLED_BACK}, then retry."
                )
            history = history.without(rolled_back)
        entry = history.approving_entry(target) if history.was_served(target) else None
        if entry is None:
            return EvidenceError(
                f"the ledger {model.ledger.location} has no entry that version {target} of "
                f"{model.name} was promoted, so its expected digest is unknown. Use the ledger "
                "with which it was promoted, or promote a measured file."
            )
        problem = veto(model, target, history=history).problem
    except ResourceGone as error:
        return error
    if problem is not None:
        return RegistryError(f"{model.name} can't be rolled back to version {target}: {problem}.")
    return entry


def _verify_target(model: RegisteredModel, target: LedgerEntry | GateError) -> LedgerEntry:
    """Verify the bytes of a version to restore; raise the objection to it, if there is one."""
    if isinstance(target, GateError):
        raise target
    assert target.version is not None
    model.verify_version(target.version, ExpectedDigests.needed(target))
    return target


def _refuse(model: RegisteredModel, reason: str) -> NoReturn:
    model.write("refused", reason)
    raise RegistryError(reason)
