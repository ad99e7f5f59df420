"""Whose word a release is on: its statements against its records, its files, and this registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gate.attestation.envelope import SignedStatement
from gate.attestation.keys import PublicKey
from gate.attestation.resource import file_resource
from gate.attestation.statement import Resource
from gate.attestation.statements import Statements, summary_in, verify_files, verify_resource
from gate.attestation.subjects import GOLDEN, PREPROCESSING
from gate.attestation.summary import Summary
from gate.attestation.trust import Trust
from gate.errors import Untrusted
from gate.ledger.entry import ComparedWith, LedgerEntry, TwinDigests
from gate.registry.judged import Judged
from gate.registry.records import statements_beside
from gate.registry.release import Release
from gate.registry.twin import QUANTIZED
from gate.storage.digest import Digest

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


def others_signing(
    judged: Iterable[Judged | None], *, trust: Trust, but: tuple[str, ...]
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
    statements: Iterable[Statements], *, trust: Trust, but: tuple[str, ...]
) -> tuple[str, ...]:
    signed = (one for each in statements for one in (each.evidence, each.decision))
    found = (key.key_id for each in signed for key in each.signers(trust.measurers))
    return tuple(one for one in dict.fromkeys(found) if one not in (*but, *trust.revoked))


def _decision_of(
    path: Path, *, trust: Trust, now: datetime
) -> tuple[Statements, Summary, tuple[PublicKey, ...]]:
    statements = statements_beside(path)
    if statements is None:
        raise Untrusted(f"there are no statements beside the file. {_REMEDY}")
    signed, what = statements.decision, "the statement on the decision"
    summary = summary_in(signed)
    made = summary.time_verified
    signers = trust.signers(signed, role="measurers", made_at=made, now=now, what=what)
    return statements, summary, signers


def _verify(
    judged: Judged, *, files: Mapping[str, Digest], trust: Trust, now: datetime
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


def _names(signed: SignedStatement, judged: Judged, *, below: str = "") -> bool:
    """Whether the file is among the subjects, by its digest: a registry may give it another name.
    With external data all files are, by their names, as the manifest has them."""
    subject, statement = judged.evidence.subject, signed.statement
    if not subject.external_data:
        return statement.names(subject.sha256)
    names = (judged.onnx_path.name, *subject.external_data)
    named = {name: statement.digest_of(f"{below}{name}") for name in names}
    return Digest.of_json(named) == subject.sha256


def _evidence_of(summary: Summary) -> Digest:
    if len(summary.input_attestations) != 1:
        raise Untrusted(
            "the statement on the decision names "
            f"{len(summary.input_attestations)} pieces of evidence, expected one. {_REMEDY}"
        )
    return _digest(summary.input_attestations[0], what="evidence")


def _compared_with(summary: Summary) -> ComparedWith | None:
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
