"""The only verification of a release."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate.decision.decide import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.golden.folder import read_record
from gate.golden.manifest import GoldenManifest
from gate.ledger.entry import ComparedWith, LedgerEntry, TwinDigests
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.records.champion_comparison import ChampionComparison
from gate.records.layout import QUANTIZED
from gate.registry.quantized_twin import twin_in
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import EvaluatedFile, Release, moment
from gate.registry.version_files import Records, statements_beside
from gate.signing.keys import PublicKey
from gate.signing.predicates import VerificationSummary
from gate.signing.statement import Resource, SignedStatement
from gate.signing.subjects import GOLDEN, PREPROCESSING, file_resource, statement_subjects
from gate.signing.trust import Trust
from gate.signing.verification import (
    Signatory,
    StatementPair,
    summary_in,
    verify_files,
    verify_measurement,
    verify_resource,
)
from gate.storage.digest import Digest
from gate.storage.untrusted_files import as_mismatch

# The decision holds the comparison, and lies where anybody may write who may write to the registry:
# the ledger has its digest.


def verify_comparison(decision: Decision, expected: ComparedWith | None) -> None:
    """Prove that the comparison in a decision that lay in the registry is the one that the ledger
    noted. Raises DigestMismatch."""
    found = ComparedWith.of(decision)
    if found != expected:
        raise DigestMismatch(
            "the decision beside the version tells of a comparison with version "
            f"{_named(found)}, the ledger notes one with version {_named(expected)}. It was "
            "edited: promote the file anew."
        )


def comparison_in(line: LedgerEntry | None) -> ComparedWith | None:
    """What the version of a line was compared with, by whoever decided, or by the service."""
    if line is None:
        return None
    return line.compared_with if line.incumbent is None else ComparedWith.of_record(line.incumbent)


def standard(champion: str | None, history: ModelHistory) -> str | None:
    """The version that a new one is compared with: the one at which `champion` points; where it
    points at none, the one that served last and would be served again. None: there is none.

    Whoever takes the alias away does not take the comparison away with it.
    """
    if champion is not None:
        return champion
    sound = history.sound
    return next((v for v in history.served if v in sound and history.rollback_of(v) is None), None)


def outdated(
    compared: ComparedWith | None, champion: str | None, history: ModelHistory
) -> str | None:
    """Why a comparison is not one with what serves at this moment, where `champion` points at that
    version; None where it is."""
    current = standard(champion, history)
    vouched = None if current is None else history.vouching_for(current)
    sha256 = None if vouched is None else vouched.sha256
    if compared is not None and (compared.version, compared.sha256) == (current, sha256):
        return None
    return (
        f"champion is version {current or 'none'} now, this was compared with version "
        f"{_named(compared)}: decide again (make repro, or gate check --against NAME --report)"
    )


def _named(compared: ComparedWith | None) -> str:
    if compared is None or compared.version is None:
        return "none"
    digest = "" if compared.sha256 is None else f" ({compared.sha256.short})"
    return f"{compared.version}{digest}"


_TWIN = f"{QUANTIZED}/"

_REMEDY = "Measure and sign anew (gate check --report --key), and hand that in."


def verify_statements(
    release: Release,
    *,
    files: Mapping[str, Digest],
    trust: Trust,
    registries: frozenset[str],
    now: datetime,
) -> tuple[PublicKey, ...]:
    """Prove that trusted keys vouch for all of a release, the twin included, and for this model in
    the registry of these addresses; gives who signed the decision. `files`: what else goes with it
    and has to be named, by its name in the statement (`named_beside`).

    Raises Untrusted.
    """
    signers = _verify(release, files=files, trust=trust, now=now)
    assert release.statements is not None
    signed = release.statements.decision
    verify_resource(summary_in(signed), registries=registries, model=release.model_name)
    twin = release.twin
    if twin is None:
        return signers
    vectors = {} if twin.golden_sha256 is None else {GOLDEN: twin.golden_sha256}
    try:
        _verify(twin, files=vectors, trust=trust, now=now)
        assert twin.statements is not None
        summary = summary_in(twin.statements.decision)
        if summary.resource_uri != file_resource(twin.decision.subject_sha256):
            verify_resource(summary, registries=registries, model=release.model_name)
    except Untrusted as error:
        raise Untrusted(f"the quantized twin: {error}") from error
    if not _names(signed, twin, below=_TWIN):
        raise Untrusted(
            "the statement on the decision names no quantized twin "
            f"{twin.decision.subject_sha256}. The twin was exchanged. {_REMEDY}"
        )
    # Another statement of a trusted key on the same twin may name other vectors.
    verify_files(signed, {f"{_TWIN}{name}": digest for name, digest in vectors.items()})
    return signers


def named_beside(which: LedgerEntry | Release) -> dict[str, Digest]:
    """What a statement has to name beside the file: of a release, or of the version that a line
    vouches for."""
    named = {GOLDEN: which.golden_sha256, PREPROCESSING: which.preprocess_sha256}
    return {name: digest for name, digest in named.items() if digest is not None}


def additional_signers(
    judged: Iterable[EvaluatedFile | None], *, trust: Trust, but: tuple[str, ...]
) -> tuple[str, ...]:
    """Ids of the measurers' keys that signed any statement of these, other than some; of a key that
    is not valid now, too, but of none that was revoked."""
    there = (each.statements for each in judged if each is not None)
    return _others((each for each in there if each is not None), trust=trust, but=but)


def stated(
    path: Path, *, model: str, trust: Trust, registries: frozenset[str], now: datetime
) -> dict[str, Any]:
    """What the statements beside a downloaded file, in which nothing else was read yet, promise of
    it and of what is beside it: fields of a line of the ledger. They are proven to be of trusted
    keys, and on this model in the registry of these addresses; what they promise is not.

    Raises Untrusted, StorageError.
    """
    statements, summary, signers = _decision_of(path, trust=trust, now=now)
    signed, signed_all = statements.decision, [statements]
    verify_resource(summary, registries=registries, model=model)
    fields: dict[str, Any] = {
        "sha256": summary.model,
        "policy_sha256": _digest(summary.policy, what="policy"),
        "evidence_sha256": _evidence_of(summary),
        "golden_sha256": _subject(signed, GOLDEN),
        "preprocess_sha256": _subject(signed, PREPROCESSING),
        "compared_with": _compared_with(summary),
        "signers": tuple(key.key_id for key in signers),
    }
    if any((each.name or "").startswith(_TWIN) for each in signed.statement.subject):
        beside = path.parent / QUANTIZED / path.name
        try:
            twins, about, _ = _decision_of(beside, trust=trust, now=now)
        except Untrusted as error:
            raise Untrusted(f"the quantized twin: {error}") from error
        fields["twin"] = TwinDigests(
            sha256=about.model,
            evidence_sha256=_evidence_of(about),
            golden_sha256=_subject(signed, f"{_TWIN}{GOLDEN}"),
        )
        signed_all.append(twins)
    fields["measured_by"] = _others(signed_all, trust=trust, but=fields["signers"])
    return fields


def _others(
    statements: Iterable[StatementPair], *, trust: Trust, but: tuple[str, ...]
) -> tuple[str, ...]:
    signed = (one for each in statements for one in (each.evidence, each.decision))
    found = (key.key_id for each in signed for key in each.signers(trust.measurers))
    return tuple(one for one in dict.fromkeys(found) if one not in (*but, *trust.revoked))


def _decision_of(
    path: Path, *, trust: Trust, now: datetime
) -> tuple[StatementPair, VerificationSummary, tuple[PublicKey, ...]]:
    statements = statements_beside(path)
    if statements is None:
        raise Untrusted(f"there are no statements beside the file. {_REMEDY}")
    signed, what = statements.decision, "the statement on the decision"
    summary = summary_in(signed)
    made = summary.time_verified
    signers = trust.signers(signed, role="measurers", made_at=made, now=now, what=what)
    return statements, summary, signers


def _verify(
    judged: EvaluatedFile, *, files: Mapping[str, Digest], trust: Trust, now: datetime
) -> tuple[PublicKey, ...]:
    statements = judged.statements
    if statements is None:
        raise Untrusted(f"there are no statements beside the file. {_REMEDY}")
    signers = statements.verify(judged.evidence, judged.decision, trust=trust, now=now)
    for signed in (statements.evidence, statements.decision):
        if not _names(signed, judged):
            raise Untrusted(
                f"a statement does not name the file {judged.evidence.subject.sha256} among its "
                f"subjects. {_REMEDY}"
            )
    verify_files(statements.decision, files)
    return signers


def _names(signed: SignedStatement, judged: EvaluatedFile, *, below: str = "") -> bool:
    """Whether the file is among the subjects, by its digest: a registry may give it another name.
    With external data all files are, by their names, as the manifest has them."""
    subject, statement = judged.evidence.subject, signed.statement
    if not subject.external_data:
        return statement.names(subject.sha256)
    names = (judged.onnx_path.name, *subject.external_data)
    named = {name: statement.digest_of(f"{below}{name}") for name in names}
    return Digest.of_json(named) == subject.sha256


def _evidence_of(summary: VerificationSummary) -> Digest:
    if len(summary.input_attestations) != 1:
        raise Untrusted(
            "the statement on the decision names "
            f"{len(summary.input_attestations)} pieces of evidence, expected one. {_REMEDY}"
        )
    return _digest(summary.input_attestations[0], what="evidence")


def _compared_with(summary: VerificationSummary) -> ComparedWith | None:
    record = summary.incumbent
    if record is None:
        return None
    return ComparedWith(record_sha256=record.digest(), version=record.version, sha256=record.sha256)


def _subject(signed: SignedStatement, name: str) -> Digest | None:
    found = [each for each in signed.statement.subject if each.name == name]
    return _digest(found[0], what=name) if found else None


def _digest(resource: Resource, *, what: str) -> Digest:
    try:
        return Digest(resource.sha256 or "")
    except ValueError as error:
        raise Untrusted(
            f"the statement on the decision has no SHA-256 digest of the {what}: {error}. {_REMEDY}"
        ) from error


# Statements are looked at before anything else of a release: they say which digests it must have.


def verify_signatures(
    release: Release, *, trust: Trust, registries: frozenset[str], now: datetime | None = None
) -> tuple[PublicKey, ...]:
    """Prove, as `verify_statements` does, that trusted keys vouch for all of a release, and that
    its verdict names what goes with it, by name, and nothing else. Gives who signed the verdict.
    `now`: None for when it was made, whatever its age.

    Raises Untrusted where they don't; DigestMismatch, EvidenceError and StorageError where the
    files are not those of the evidence.
    """
    statements = release.statements
    signers = verify_statements(
        release,
        files=named_beside(release),
        trust=trust,
        registries=registries,
        now=now or (datetime.now(UTC) if statements is None else statements.made_at),
    )
    _verify_names(release, subjects_of_release(release))
    if release.twin is not None:
        with _about_the_twin():
            _verify_names(release.twin, _subjects(release.twin))
    return signers


def subjects_of_release(release: Release) -> dict[str, Digest]:
    """What a verdict on a release names: its files, and those of its twin, with the golden vectors
    of both. Raises as `subjects_of`."""
    subjects = _subjects(release)
    if release.twin is not None:
        twin = release.twin
        golden = twin.golden_sha256
        named = statement_subjects(
            twin.onnx_path, twin.evidence, golden=golden, preprocessing=False
        )
        subjects |= {f"{QUANTIZED}/{name}": digest for name, digest in named.items()}
    return subjects


@dataclass(frozen=True)
class MeasuredFile:
    """What was signed when a file was measured, and the folder of the golden vectors that were
    written then."""

    statement: SignedStatement
    vectors: Path


@dataclass(frozen=True)
class VerdictSigning:
    """Signing verdicts for one resource, on what this trust vouches for."""

    signatory: Signatory
    trust: Trust
    resource: str

    @property
    def is_trusted(self) -> bool:
        """Whether the key may say what was decided, now."""
        keys = self.trust.keys("measurers", at=datetime.now(UTC))
        return self.signatory.key.public.key_id in {key.key_id for key in keys}

    def sign(
        self,
        release: Release,
        policy: Policy,
        *,
        measured: MeasuredFile,
        twin: MeasuredFile | None = None,
    ) -> Release:
        """The release with statements, and its twin with its own. `measured`, `twin`: what was
        signed when the file and its twin were measured.

        Raises Untrusted, and signs nothing, where that does not vouch for what is decided on;
        KeyUnusable; otherwise as `subjects_of`.
        """
        self._prove(release, measured)
        if release.twin is not None and policy.twin is not None:
            with _about_the_twin():
                signed = self._signed_twin(release.twin, policy.twin, measured=twin)
            release = replace(release, twin=signed)
        subjects = subjects_of_release(release)
        statements = self._signed(release, subjects, measured, precision=policy.precision)
        return replace(release, statements=statements)

    def _signed_twin(
        self, twin: EvaluatedFile, policy: Policy, *, measured: MeasuredFile | None
    ) -> EvaluatedFile:
        if measured is None:
            raise Untrusted("nobody signed its evidence. Measure it: gate check --report.")
        self._prove(twin, measured)
        subjects = _subjects(twin)
        statements = self._signed(twin, subjects, measured, precision=policy.precision)
        return replace(twin, statements=statements)

    def _prove(self, judged: EvaluatedFile, measured: MeasuredFile) -> None:
        """That what is decided on is what was measured."""
        now = datetime.now(UTC)
        verify_measurement(measured.statement, judged.evidence, trust=self.trust, now=now)
        if judged.golden is not None:
            _verify_vectors(judged.golden.golden, measured)
        elif judged.decision.passed and measured.statement.statement.digest_of(GOLDEN) is not None:
            raise Untrusted(
                f"golden vectors were signed when {judged.onnx_path} was measured, and are not "
                f"handed in with it. They belong into {measured.vectors}: bring them back."
            )

    def _signed(
        self,
        judged: EvaluatedFile,
        subjects: Mapping[str, Digest],
        measured: MeasuredFile,
        *,
        precision: str,
    ) -> StatementPair:
        decided = self.signatory.decided(
            judged.decision, subjects, precision=precision, resource=self.resource
        )
        return StatementPair(measured.statement, decided)


@contextlib.contextmanager
def _about_the_twin() -> Iterator[None]:
    try:
        yield
    except Untrusted as error:
        raise Untrusted(f"the quantized twin: {error}") from error


def _verify_names(judged: EvaluatedFile, subjects: Mapping[str, Digest]) -> None:
    assert judged.statements is not None  # by verify_statements
    signed = judged.statements.decision
    verify_files(signed, subjects)
    beyond = sorted({each.name or "" for each in signed.statement.subject} - {*subjects})
    if beyond:
        raise Untrusted(
            f"the statement on the decision names {', '.join(beyond)}, which was not handed in. "
            "Hand in all that was judged, or sign the verdict anew."
        )


def _subjects(judged: EvaluatedFile) -> dict[str, Digest]:
    return statement_subjects(
        judged.onnx_path,
        judged.evidence,
        golden=judged.golden_sha256,
        preprocessing=judged.preprocessing is not None,
    )


def _verify_vectors(golden: GoldenManifest, measured: MeasuredFile) -> None:
    """Golden vectors that go with the file have the arrays and pictures of those that were
    measured; the tolerances are the policy's."""
    named = measured.statement.statement.digest_of(GOLDEN)
    if named is None:
        raise Untrusted(
            "golden vectors go with the file, and none were signed when it was measured. Leave "
            "them out, or measure anew."
        )
    try:
        then, _ = read_record(measured.vectors, sha256=Digest(named))
    except (DigestMismatch, EvidenceError) as error:
        raise Untrusted(
            f"the golden vectors in {measured.vectors} are not those that were signed when the "
            f"file was measured: {error}"
        ) from error
    if _contents(golden) != _contents(then):
        raise Untrusted(
            "the golden vectors that go with the file have other arrays than those that were "
            f"signed when it was measured, in {measured.vectors}. They were exchanged: measure it "
            "anew."
        )


def _contents(golden: GoldenManifest) -> tuple[object, ...]:
    """All of the vectors but what a policy says of them."""
    arrays = tuple((each.name, each.dtype, each.shape, each.sha256) for each in golden.arrays)
    parts = tuple((name, part.model, part.samples) for name, part in golden.parts.items())
    pictures = golden.pictures
    shown = pictures and (pictures.input, pictures.spec, tuple(f.sha256 for f in pictures.files))
    return (golden.model, golden.samples, parts, arrays, shown, golden.origin.code_sha256)


ReadTrust = Callable[[], Trust | None]
"""Whose word counts at this moment; None: no statements are asked for. Raises PolicyError where
nobody can say now."""


def nobody() -> None:
    """No statements are asked for."""


@dataclass(frozen=True)
class Terms:
    """Whoever decides what serves judges by these: its own policy, its own trust, and the moment of
    the promotion, at which evidence and statements had to be young enough."""

    policy: Policy
    at: datetime
    trust: Trust | None = None
    approved: Digest | None = None
    """The decision whose approval reviewers have signed, as whoever judges has found; None: he has
    not looked."""

    @classmethod
    def now(
        cls, policy: Policy, trust: ReadTrust = nobody, *, approved: Digest | None = None
    ) -> Terms:
        """Of a promotion at this moment. Raises as `ReadTrust`."""
        return cls(policy, datetime.now(UTC), trust(), approved)

    @classmethod
    def of(
        cls, policy: Policy, history: ModelHistory, version: str, *, trust: ReadTrust = nobody
    ) -> Terms | None:
        """Of a version that the ledger says was promoted. None: the service judged and deployed it
        then, and neither age nor another policy or trust takes it out of service. Raises as
        `ReadTrust`, which is asked for no other version."""
        line, present = history.promotion_of(version), datetime.now(UTC)
        if history.was_deployed(version):
            return None
        promoted = moment(line.at) if line is not None else None
        return cls(policy, present if promoted is None else min(promoted, present), trust())


def verify_release(
    path: Path, model: RegisteredModel, *, vouched: LedgerEntry, terms: Terms
) -> str | None:
    """Why the evidence beside a proven file does not allow it under these terms, or None. What was
    decided by another policy is decided anew.

    Raises DigestMismatch and EvidenceError where file and records do not belong together, or can't
    be read; LimitExceeded where reading takes too much; StorageError where this machine can't.
    """
    try:
        with as_mismatch(f"version {vouched.version} of {model.name} in the registry"):
            return _judge(path, model, vouched=vouched, terms=terms)
    except Untrusted as error:
        raise EvidenceError(str(error)) from error


def _judge(path: Path, model: RegisteredModel, *, vouched: LedgerEntry, terms: Terms) -> str | None:
    records = Records.load(path, evidence=vouched.evidence_sha256)
    assert vouched.sha256 is not None
    records.evidence.subject.sha256.verify(vouched.sha256, what="the file that passed")
    verify_comparison(records.decision, vouched.compared_with)
    if terms.approved is not None:
        terms.approved.verify(records.decision.digest(), what="the decision that was approved")
    release = release_from_version(path, records, name=model.name, twin=vouched.twin)
    if terms.trust is not None:
        _verify_word(release, model, vouched=vouched, trust=terms.trust, at=terms.at)
    policy, passed_by = terms.policy, release.decision.policy_sha256
    compared = release.decision.incumbent or vouched.incumbent
    if policy.incumbent is not None and compared is None:
        return (
            "nobody compared it with the version that served when it was promoted, and the policy "
            "in force asks for that (incumbent). Hand it in again, or promote it anew."
        )
    if passed_by != policy.digest() or release.decision.incumbent != compared:
        release = _decided_anew(release, policy, compared)
    release.verify(policy, limits=model.reading.limits)
    if release.refusal is not None and vouched.incumbent is not None:
        return f"compared by the service with what serves, its decision is {release.refusal}"
    if release.refusal is not None and passed_by != policy.digest():
        return (
            f"it was judged by another policy ({passed_by.short}) than the one in force "
            f"({policy.digest().short}), by which its decision is {release.refusal} "
            "Promote what passes by the policy in force."
        )
    if release.refusal is not None:
        return f"its decision is {release.refusal}"
    return release.untimely(policy, at=terms.at)


def _verify_word(
    release: Release, model: RegisteredModel, *, vouched: LedgerEntry, trust: Trust, at: datetime
) -> None:
    """Trusted keys vouch for it, in this registry. What the ledger promoted before anybody had to
    sign may go without, where the operator says so. Raises Untrusted."""
    number, history = vouched.version, model.history()
    if (
        trust.unsigned == "accept_existing"
        and vouched.action != "passed"
        and number is not None
        and history.passed_before_signing(number)
    ):
        return
    files, registries = named_beside(vouched), model.identities()
    verify_statements(release, files=files, trust=trust, registries=registries, now=at)


def release_from_version(
    path: Path, records: Records, *, name: str, twin: TwinDigests | None
) -> Release:
    """What a downloaded version is made of, but for the golden vectors of the exact file. Raises as
    `twin_in`."""
    beside = path.parent / QUANTIZED
    return Release(
        model_name=name,
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        statements=records.statements,
        run_id="",
        description="",
        # What the ledger does not name was put there afterwards, and is not read.
        twin=twin_in(beside, twin) if twin is not None and beside.is_dir() else None,
    )


def _decided_anew(release: Release, policy: Policy, compared: ChampionComparison | None) -> Release:
    """By the policy in force, and with the comparison that counts: what the decision beside the
    version left open for the service is no other decision."""
    twin = release.twin
    if twin is not None and policy.twin is not None:
        # The golden vectors are of the policy that passed it; the ledger has their digest.
        twin = replace(twin, decision=_decision(twin, policy.twin), golden=None)
    return replace(release, decision=_decision(release, policy, compared), twin=twin)


def _decision(
    judged: EvaluatedFile, policy: Policy, compared: ChampionComparison | None = None
) -> Decision:
    at = judged.decision.decided_at
    return decide(policy, judged.evidence, incumbent=compared, decided_at=at)
