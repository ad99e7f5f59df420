"""Verify a release. No other module does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate.errors import EvidenceError, Untrusted
from gate.golden.folder import GOLDEN_JSON
from gate.ledger.entry import ComparedWith, LedgerEntry, TwinDigests
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.records.champion_comparison import Trend
from gate.records.layout import GOLDEN as GOLDEN_FOLDER
from gate.records.layout import QUANTIZED, RECORDS
from gate.registry.comparison import verify_comparison
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import EvaluatedFile, GoldenFolder, Release, VerificationRules
from gate.registry.version_files import load_records, load_statements, twin_file
from gate.signing.keys import PublicKey
from gate.signing.predicates import VerificationSummary
from gate.signing.statement import Resource, SignedStatement
from gate.signing.subjects import GOLDEN, PREPROCESSING, file_resource, statement_subjects
from gate.signing.trust import Trust, parse_time
from gate.signing.verification import (
    StatementPair,
    summary_in,
    verify_files,
    verify_resource,
)
from gate.storage.digest import Digest
from gate.storage.untrusted_files import as_mismatch

_TWIN = f"{QUANTIZED}/"
_REMEDY = "Measure and sign the file again (gate check --report --key) and submit it."


def verify_statements(
    release: Release,
    *,
    files: Mapping[str, Digest],
    trust: Trust,
    registries: frozenset[str],
    now: datetime,
) -> tuple[PublicKey, ...]:
    """Verify that trusted keys signed a release for this model, including its twin.

    Return the keys that signed the decision. registries: all addresses of the registry. files: the
    digests of further files that the statement must name (`companion_digests`). Raises Untrusted.
    """
    signers = _verify(release, files=files, trust=trust, now=now)
    assert release.statements is not None
    signed = release.statements.decision
    verify_resource(summary_in(signed), registries=registries, model=release.model_name)
    twin = release.twin
    if twin is None:
        return signers
    vectors = {} if twin.golden_sha256 is None else {GOLDEN: twin.golden_sha256}
    with twin_errors():
        _verify(twin, files=vectors, trust=trust, now=now)
        assert twin.statements is not None
        summary = summary_in(twin.statements.decision)
        if summary.resource_uri != file_resource(twin.decision.subject_sha256):
            verify_resource(summary, registries=registries, model=release.model_name)
    if not _has_subject(signed, twin, below=_TWIN):
        raise Untrusted(
            "the statement on the decision does not name the quantized twin "
            f"{twin.decision.subject_sha256}. The twin was replaced. {_REMEDY}"
        )
    # A trusted key may have signed other golden vectors of the same twin.
    verify_files(signed, {f"{_TWIN}{name}": digest for name, digest in vectors.items()})
    return signers


def companion_digests(source: LedgerEntry | Release) -> dict[str, Digest]:
    """Return the digests that a statement must name in addition to the file.

    source: a release, or the ledger entry that approves the version.
    """
    named = {GOLDEN: source.golden_sha256, PREPROCESSING: source.preprocess_sha256}
    return {name: digest for name, digest in named.items() if digest is not None}


def claimed_entry(
    path: Path,
    model: RegisteredModel,
    entry: LedgerEntry,
    *,
    trust: Trust,
    now: datetime | None = None,
) -> LedgerEntry:
    """Return a ledger entry with the digests in the signed statements next to a file.

    The signatures are verified: they are by trusted keys, for this model in this registry, and
    valid at the time `now` (None: the verdict's own time). The digests are not verified, because no
    other file of the download was read yet.

    Raises EvidenceError if no trusted key signed the statements, StorageError.
    """
    try:
        now = now or StatementPair.from_folder(path.parent / RECORDS).decided_at
        names = model.identities()
        fields = _claimed_fields(path, model=model.name, trust=trust, registries=names, now=now)
    except Untrusted as error:
        raise EvidenceError(str(error)) from error
    return entry.model_copy(update=fields)


def _claimed_fields(
    path: Path, *, model: str, trust: Trust, registries: frozenset[str], now: datetime
) -> dict[str, Any]:
    statements, summary, signers = _decision_of(path, trust=trust, now=now)
    signed, pairs = statements.decision, [statements]
    verify_resource(summary, registries=registries, model=model)
    fields: dict[str, Any] = {
        "sha256": summary.model,
        "policy_sha256": _digest(summary.policy, label="policy"),
        "evidence_sha256": _evidence_of(summary),
        "golden_sha256": _subject(signed, GOLDEN),
        "preprocess_sha256": _subject(signed, PREPROCESSING),
        "compared_with": summary.incumbent and ComparedWith.from_record(summary.incumbent),
        "signers": tuple(key.key_id for key in signers),
    }
    if any((each.name or "").startswith(_TWIN) for each in signed.statement.subject):
        twin_path = path.parent / QUANTIZED / path.name
        with twin_errors():
            twin_statements, twin_summary, _ = _decision_of(twin_path, trust=trust, now=now)
        fields["twin"] = TwinDigests(
            sha256=twin_summary.model,
            evidence_sha256=_evidence_of(twin_summary),
            golden_sha256=_subject(signed, f"{_TWIN}{GOLDEN}"),
        )
        pairs.append(twin_statements)
    fields["measured_by"] = _further_measurers(pairs, trust=trust, exclude=fields["signers"])
    return fields


def _further_measurers(
    statements: Iterable[StatementPair | None], *, trust: Trust, exclude: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the IDs of the measurers' keys that signed any of the statements, except `exclude`.

    Expired keys are included, revoked keys are not."""
    signed = (each for pair in statements if pair for each in (pair.evidence, pair.decision))
    ids = (key.key_id for each in signed for key in each.signers(trust.measurers))
    return tuple(each for each in dict.fromkeys(ids) if each not in (*exclude, *trust.revoked))


def _decision_of(
    path: Path, *, trust: Trust, now: datetime
) -> tuple[StatementPair, VerificationSummary, tuple[PublicKey, ...]]:
    statements = load_statements(path)
    if statements is None:
        raise Untrusted(f"the file has no signed statements. {_REMEDY}")
    signed, label = statements.decision, "the statement on the decision"
    summary = summary_in(signed)
    timestamp = summary.time_verified
    signers = trust.signers(signed, role="measurers", timestamp=timestamp, now=now, label=label)
    return statements, summary, signers


def _verify(
    evaluated: EvaluatedFile, *, files: Mapping[str, Digest], trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    statements = evaluated.statements
    if statements is None:
        raise Untrusted(f"the file has no signed statements. {_REMEDY}")
    signers = statements.verify(evaluated.evidence, evaluated.decision, trust=trust, now=now)
    for signed in (statements.evidence, statements.decision):
        if not _has_subject(signed, evaluated):
            raise Untrusted(
                f"a statement does not name the file {evaluated.evidence.subject.sha256} among its "
                f"subjects. {_REMEDY}"
            )
    verify_files(statements.decision, files)
    return signers


def _has_subject(signed: SignedStatement, evaluated: EvaluatedFile, *, below: str = "") -> bool:
    """Return whether the file is among the subjects of a statement.

    A file is found by its digest, because a registry may rename it. With external data all files
    must be subjects by their names, and the digest of the manifest must match.
    """
    subject, statement = evaluated.evidence.subject, signed.statement
    if not subject.external_data:
        return statement.names(subject.sha256)
    names = (evaluated.onnx_path.name, *subject.external_data)
    named = {name: statement.digest_of(f"{below}{name}") for name in names}
    return Digest.from_json(named) == subject.sha256


def _evidence_of(summary: VerificationSummary) -> Digest:
    if len(summary.input_attestations) != 1:
        raise Untrusted(
            "the statement on the decision names "
            f"{len(summary.input_attestations)} evidence records, expected one. {_REMEDY}"
        )
    return _digest(summary.input_attestations[0], label="evidence")


def _subject(signed: SignedStatement, name: str) -> Digest | None:
    subjects = [each for each in signed.statement.subject if each.name == name]
    return _digest(subjects[0], label=name) if subjects else None


def _digest(resource: Resource, *, label: str) -> Digest:
    try:
        return Digest(resource.sha256 or "")
    except ValueError as error:
        raise Untrusted(
            f"the statement on the decision has no SHA-256 digest of the {label}: {error}. "
            f"{_REMEDY}"
        ) from error


# Statements are verified first, because they contain the expected digests of the release.
_TOKEN = object()


@dataclass(frozen=True)
class VerifiedRelease:
    """A release that `verify_release` has verified. No caller needs to verify it again."""

    release: Release
    """The release with the recomputed decision."""
    policy: Policy
    signers: tuple[PublicKey, ...]
    """Keys that signed the verdict; empty if no signature was required."""
    trust: Trust | None
    """Trust by which the release was verified; None if no statements were required."""
    _token: object = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._token is not _TOKEN:
            raise TypeError("only verify_release() makes a VerifiedRelease")

    @property
    def refusal(self) -> str | None:
        """Return why the release must not be promoted, regardless of its age, or None."""
        if self.policy.precision == "quantized":
            return (
                "a quantized file can't be promoted alone, only as the twin of its exact file: "
                "submit the exact file with a policy whose section 'twin' is this policy"
            )
        return self.release.refusal

    def age_problem(self, at: datetime) -> str | None:
        """Return why evidence or statements are too old at a time, or from its future; or None."""
        problem = self.release.age_problem(self.policy, at=at)
        if problem is not None or self.trust is None:
            return problem
        try:
            for each in self.release.evaluated_files:
                if each.statements is not None:
                    with twin_errors() if each is self.release.twin else nullcontext():
                        each.statements.check_age(self.trust, at=at)
        except Untrusted as error:
            return str(error)
        return None

    def described(
        self, *, run_id: str, description: str, trend: Trend | None = None
    ) -> VerifiedRelease:
        """Return a copy with the MLflow run, description and trend of the version to create."""
        trend = trend or self.release.trend
        release = replace(self.release, run_id=run_id, description=description, trend=trend)
        return replace(self, release=release)


def verify_release(
    release: Release,
    *,
    policy: Policy,
    trust: Trust | None = None,
    registries: frozenset[str] = frozenset(),
    rules: VerificationRules | None = None,
) -> VerifiedRelease:
    """Verify signatures once, hash and parse the file in one pass, and decide again.

    trust: the keys whose statements are required; None: no statements are required. registries: all
    addresses of the registry for which the verdict must be made. Without a ledger entry in `rules`
    the verdict must name exactly the files of the release.

    Raises Untrusted if trusted keys did not sign all of the release; the exceptions of
    `Release.verified`; StorageError.
    """
    signers: tuple[PublicKey, ...] = ()
    rules = rules or VerificationRules()
    if trust is not None:
        statements = release.statements
        now = rules.at or (datetime.now(UTC) if statements is None else statements.decided_at)
        files = companion_digests(rules.entry or release)
        signers = verify_statements(
            release, files=files, trust=trust, registries=registries, now=now
        )
        if rules.entry is None:
            _verify_names(release, subjects_of_release(release))
            if release.twin is not None:
                with twin_errors():
                    _verify_names(release.twin, subjects_of(release.twin))
        ids = tuple(key.key_id for key in signers)
        pairs = [each.statements for each in release.evaluated_files]
        further_measurers = _further_measurers(pairs, trust=trust, exclude=ids)
        release = replace(release, signers=ids, measured_by=further_measurers)
    return VerifiedRelease(release.verified(policy, rules), policy, signers, trust, _TOKEN)


def subjects_of_release(release: Release) -> dict[str, Digest]:
    """Return the subjects of a verdict on a release: its files and those of its twin.

    The golden vectors of both are included. Raises the exceptions of `subjects_of`.
    """
    subjects = subjects_of(release)
    if release.twin is not None:
        subjects |= {f"{_TWIN}{name}": sha256 for name, sha256 in subjects_of(release.twin).items()}
    return subjects


@contextlib.contextmanager
def twin_errors() -> Iterator[None]:
    """Add the twin to the message of Untrusted."""
    try:
        yield
    except Untrusted as error:
        raise Untrusted(f"the quantized twin: {error}") from error


def _verify_names(evaluated: EvaluatedFile, subjects: Mapping[str, Digest]) -> None:
    assert evaluated.statements is not None  # checked by verify_statements
    signed = evaluated.statements.decision
    verify_files(signed, subjects)
    missing = sorted({each.name or "" for each in signed.statement.subject} - {*subjects})
    if missing:
        raise Untrusted(
            f"the statement on the decision names {', '.join(missing)}, which was not submitted. "
            "Submit all evaluated files, or sign the verdict again."
        )


def subjects_of(evaluated: EvaluatedFile) -> dict[str, Digest]:
    """Return the subjects of a verdict on one file.

    Raises the exceptions of `statement_subjects`.
    """
    return statement_subjects(
        evaluated.onnx_path,
        evaluated.evidence,
        golden=evaluated.golden_sha256,
        preprocessing=evaluated.preprocessing is not None,
    )


ReadTrust = Callable[[], Trust | None]
"""Function that returns the current trust, or None if no statements are required. Raises
PolicyError if the trust can't be read."""


def no_trust() -> None:
    """Return None: no statements are required."""


@dataclass(frozen=True)
class Terms:
    """The policy, time and trust by which the deciding host judges a version."""

    policy: Policy
    at: datetime
    """Time of the promotion, at which evidence and statements must not be too old."""
    trust: Trust | None = None
    approved: Digest | None = None
    """Digest of the decision that reviewers approved by signature; None if not determined."""

    @classmethod
    def now(
        cls, policy: Policy, trust: ReadTrust = no_trust, *, approved: Digest | None = None
    ) -> Terms:
        """Create the terms of a promotion at this moment. Raises the exceptions of `ReadTrust`."""
        return cls(policy, datetime.now(UTC), trust(), approved)

    @classmethod
    def from_history(
        cls, policy: Policy, history: ModelHistory, version: str, *, trust: ReadTrust = no_trust
    ) -> Terms | None:
        """Return the terms of a version that was promoted according to the ledger.

        None if it was deployed: the service judged it then, and neither its age nor a new policy or
        trust takes it out of service. Raises the exceptions of `ReadTrust`, which is called only
        for a version that was not deployed.
        """
        if history.was_deployed(version):
            return None
        now, entry = datetime.now(UTC), history.promotion_of(version)
        promoted = parse_time(entry.at) if entry is not None else None
        return cls(policy, now if promoted is None else min(promoted, now), trust())


def judge_version(
    path: Path, model: RegisteredModel, *, entry: LedgerEntry, terms: Terms | None
) -> str | None:
    """Return why a verified file must not serve under these terms according to its evidence, or
    None.

    A decision by another policy is computed again. terms: None for a version that was deployed.
    Raises DigestMismatch and EvidenceError if file and records do not belong together or can't be
    read; LimitExceeded; StorageError for failures of this machine.
    """
    if terms is None:
        return None
    try:
        with as_mismatch(f"version {entry.version} of {model.name} in the registry"):
            return _judge(path, model, entry=entry, terms=terms)
    except Untrusted as error:
        raise EvidenceError(str(error)) from error


def _judge(path: Path, model: RegisteredModel, *, entry: LedgerEntry, terms: Terms) -> str | None:
    records = load_records(path, evidence=entry.evidence_sha256)
    assert entry.sha256 is not None
    records.evidence.subject.sha256.verify(entry.sha256, label="the file that passed")
    verify_comparison(records.decision, entry.compared_with)
    if terms.approved is not None:
        terms.approved.verify(records.decision.digest(), label="the decision that was approved")
    release = release_from_version(records, name=model.name, twin=entry.twin)
    policy, passed_by = terms.policy, release.decision.policy_sha256
    if release.twin is not None and policy.twin is not None and passed_by != policy.digest():
        # The golden vectors have the tolerances of the old policy, so they are not compared with
        # the new one. The ledger has their digest.
        release = replace(release, twin=replace(release.twin, golden=None))
    is_signed = terms.trust is not None and not _may_be_unsigned(model, entry, terms.trust)
    verified = verify_release(
        release,
        policy=policy,
        trust=terms.trust if is_signed else None,
        registries=model.identities() if is_signed else frozenset(),
        rules=VerificationRules(model.reading.limits, entry, terms.at),
    )
    release = verified.release
    if policy.incumbent is not None and release.decision.incumbent is None:
        return (
            "it was not compared with the champion at its promotion, but the current policy "
            "requires that (incumbent). Submit or promote the file again."
        )
    if release.refusal is not None and entry.incumbent is not None:
        return f"after the comparison with the champion its decision is {release.refusal}"
    if release.refusal is not None and passed_by != policy.digest():
        return (
            f"it was judged by another policy ({passed_by.short}) than the current one "
            f"({policy.digest().short}), by which its decision is {release.refusal} "
            "Promote a file that passes the current policy."
        )
    if release.refusal is not None:
        return f"its decision is {release.refusal}"
    return release.age_problem(policy, at=terms.at)


def _may_be_unsigned(model: RegisteredModel, entry: LedgerEntry, trust: Trust) -> bool:
    """Return whether a version was promoted before signatures were required and the trust accepts
    such versions."""
    return (
        trust.unsigned == "accept_existing"
        and entry.action != "passed"
        and entry.version is not None
        and model.history().passed_before_signing(entry.version)
    )


def release_from_version(records: EvaluatedFile, *, name: str, twin: TwinDigests | None) -> Release:
    """Create the release of a downloaded version, without the exact file's golden vectors.

    Raises the exceptions of `twin_in`.
    """
    folder = records.onnx_path.parent / QUANTIZED
    return Release(
        model_name=name,
        onnx_path=records.onnx_path,
        evidence=records.evidence,
        decision=records.decision,
        statements=records.statements,
        # A twin without a digest in the ledger was added afterwards and must not be read.
        twin=twin_in(folder, twin) if twin is not None and folder.is_dir() else None,
    )


def twin_in(folder: Path, digests: TwinDigests) -> EvaluatedFile:
    """Return the twin that `write_twin` wrote into a folder.

    Raises EvidenceError if the twin is incomplete, DigestMismatch if evidence or golden vectors
    differ; StorageError.
    """
    twin = load_records(twin_file(folder), evidence=digests.evidence_sha256)
    golden = folder / GOLDEN_FOLDER
    if not (golden / GOLDEN_JSON).exists():
        return twin
    return replace(twin, golden=GoldenFolder.open(golden, sha256=digests.golden_sha256))
