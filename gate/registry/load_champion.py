"""Load the champion's verified files and records."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from gate.decision.champion import Champion
from gate.decision.decide import Decision
from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    EvidenceError,
    GateError,
    MismatchUnconfirmed,
    ResourceGone,
    Untrusted,
)
from gate.ledger.entry import LedgerEntry
from gate.records.champion_comparison import ChampionAnswers, ChampionComparison
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.layout import EVIDENCE, MAX_EXTENT, RECORDS
from gate.records.runtime import RuntimeName
from gate.registry.comparison import version_to_compare
from gate.registry.interface import CHAMPION
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import (
    claimed_entry,
    companion_digests,
    release_from_version,
    verify_statements,
)
from gate.registry.version_files import (
    ExpectedDigests,
    SignedExpectation,
    download_version,
    load_decision,
    load_evidence,
    load_records,
    load_trend,
    make_download_folder,
    version_label,
)
from gate.signing.trust import Trust
from gate.storage.files import temporary_folder
from gate.storage.untrusted_files import RECORD_LIMIT

# If both files were measured on the same samples and labels, the drop in accuracy follows from the
# two evidence records. Disagreements and relative speed can only be measured by running both files.
# They stay unmeasured here, and a policy bound on them is an ERROR.
_COMPARED_ON: tuple[RuntimeName, ...] = ("ort-cpu-optimized", "ort-cpu")
"""Runtimes in the order of preference: consumers load a file with optimizations."""


def compare_records(champion: Champion, evidence: Evidence) -> ChampionComparison:
    """Compare the champion's evidence with new evidence, or record why they can't be compared."""
    fields, old = champion.record_fields(evidence), champion.evidence
    if old is None:
        return ChampionComparison(state=champion.incomparable, absent=champion.absent, **fields)
    problem = _difference(old, evidence)
    if problem is not None:
        return ChampionComparison(state="incomparable", absent=problem, **fields)
    return ChampionComparison(
        state="compared",
        samples=evidence.dataset.samples,
        outputs=tuple(_compare_accuracies(old, evidence)),
        **fields,
    )


def _difference(old: Evidence, new: Evidence) -> str | None:
    """Return why two evidence records can't be compared; None if they can, or are about one
    file."""
    if old.subject.sha256 == new.subject.sha256:
        return None
    for name, old_digest, new_digest in (
        ("samples", old.dataset.sha256, new.dataset.sha256),
        ("labels", old.source.labels_sha256, new.source.labels_sha256),
        ("preprocessing", old.source.preprocess_sha256, new.source.preprocess_sha256),
    ):
        if old_digest != new_digest or (new_digest is None and name == "labels"):
            digests = [digest.short if digest else "none" for digest in (old_digest, new_digest)]
            return (
                f"it was measured with other {name} ({digests[0]}) than this file ({digests[1]}), "
                "and the service has no samples to run both files. Compare them when the new file "
                "is measured (gate check --against NAME)"
            )
    return None


def _compare_accuracies(old: Evidence, new: Evidence) -> list[ChampionAnswers]:
    """Return the accuracies of both files on the first runtime on which both were measured."""
    for name in _COMPARED_ON:
        old_runtime, new_runtime = old.runtime(name), new.runtime(name)
        if old_runtime and old_runtime.measured and new_runtime and new_runtime.measured:
            old_accuracies = _accuracies(old_runtime)
            return [
                ChampionAnswers(
                    name=output,
                    samples=new.dataset.samples,
                    disagreements=None,
                    champion_accuracy=old_accuracies[output],
                    accuracy=accuracy,
                )
                for output, accuracy in _accuracies(new_runtime).items()
                if output in old_accuracies
            ]
    return []


def _accuracies(runtime: RuntimeEvidence) -> dict[str, float]:
    """Return the top-1 accuracy by classification output."""
    return {
        output.name: output.classification.accuracy.candidate
        for output in runtime.outputs
        if output.classification is not None and output.classification.accuracy is not None
    }


# These functions only read: wrong bytes in a download are a transient error and flag no version.
_NO_EVIDENCE = "the ledger has no digest of its evidence"


def load_champion(model: RegisteredModel, *, into: Path, trust: Trust | None = None) -> Champion:
    """Download the `version_to_compare` below `into`.

    trust: trusted keys for its statements if no ledger entry approves it; None: no key.
    Raises MismatchUnconfirmed if the download differs from the ledger, the other RegistryErrors,
    EvidenceError if the ledger's chain is broken, StorageError.
    """
    entry = _approving_entry(model)
    if isinstance(entry, Champion):
        if entry.state != "unvouched" or trust is None or entry.version is None:
            return entry
        try:
            return _read(*_download_signed(model, entry.version, trust=trust, into=into))
        except (DigestMismatch, EvidenceError, Untrusted) as error:
            reason = f"{entry.absent}; and no trusted key{trust.by} signed it: {error}"
            return replace(entry, absent=reason)
    assert entry.version is not None
    assert entry.sha256 is not None
    expected = ExpectedDigests(
        sha256=entry.sha256,
        evidence=entry.evidence_sha256,
        extent=entry.extent or MAX_EXTENT,
    )
    folder = make_download_folder(into)
    try:
        path = download_version(model.registry, model.name, entry.version, expected, folder=folder)
        return _read(path, entry)
    except DigestMismatch as error:
        raise _unconfirmed(version_label(model.name, entry.version), error) from error


def _download_signed(
    model: RegisteredModel, number: str, *, trust: Trust, into: Path
) -> tuple[Path, LedgerEntry]:
    """Download a version below `into`; return its path and an entry of its signed digests.

    A trusted measurer must have signed all of its bytes, its evidence and its verdict for this
    model in this registry. The age of the statements is not checked, because a version may serve
    for long. Raises DigestMismatch, EvidenceError and Untrusted if anything is not signed; the
    RegistryErrors, StorageError.
    """
    passed = model.entry("passed", "its own statements", version=number)
    signed_entry = partial(claimed_entry, model=model, entry=passed, trust=trust)
    expected = SignedExpectation(lambda path: ExpectedDigests.from_entry(signed_entry(path)))
    folder = make_download_folder(into)
    path = download_version(model.registry, model.name, number, expected, folder=folder)
    entry = signed_entry(path)
    records = load_records(path, evidence=entry.evidence_sha256)
    assert records.statements is not None  # signed_entry has read them
    verify_statements(
        # The twin is left out, because the comparison does not use it.
        release_from_version(records, name=model.name, twin=None),
        files=companion_digests(entry),
        trust=trust,
        registries=model.identities(),
        now=records.statements.decided_at,
    )
    return path, entry


def champion_recorded(model: RegisteredModel) -> Champion:
    """Load only the evidence of the version that a new one must be compared with.

    Raises the exceptions of `load_champion`, and MismatchUnconfirmed if the evidence is missing.
    """
    entry = _approving_entry(model)
    if isinstance(entry, Champion):
        return entry
    assert entry.version is not None
    expected = entry.evidence_sha256
    recorded = Champion(state="proven", version=entry.version, sha256=entry.sha256)
    if expected is None:
        return replace(recorded, state="unrecorded", absent=_NO_EVIDENCE)
    label = f"the evidence of version {entry.version} of {model.name} in the registry"
    with temporary_folder() as folder:
        most_bytes = {f"{RECORDS}/{EVIDENCE}": RECORD_LIMIT}
        try:
            model.registry.fetch(model.name, entry.version, folder, most_bytes=most_bytes)
            evidence = load_evidence(folder / "model.onnx", sha256=expected)
        except (DigestMismatch, EvidenceError, ArtifactMissing) as error:
            raise _unconfirmed(label, error) from error
        except ResourceGone as error:
            raise MismatchUnconfirmed(
                f"version {entry.version} of {model.name}, which served last, was deleted from the "
                "registry, so the new version can't be compared with it. Point "
                f"'{CHAMPION}' at a version that served before, or remove 'incumbent' from the "
                "service's policy for this submission."
            ) from error
    return replace(recorded, evidence=evidence)


def _approving_entry(model: RegisteredModel) -> Champion | LedgerEntry:
    """Return the ledger entry that approves the version to compare with, or why there is none."""
    history = model.history()
    number = version_to_compare(model.alias(CHAMPION), history)
    if number is None:
        return Champion(state="first", absent=f"no version of {model.name} serves yet")
    entry = history.approving_entry(number)
    if entry is not None and entry.sha256 is not None:
        return entry
    return Champion(
        state="unvouched",
        version=number,
        absent=f"the ledger {model.ledger.location} has no entry that it passed the gate, so its "
        "expected digest is unknown",
    )


def _unconfirmed(label: str, error: GateError) -> MismatchUnconfirmed:
    return MismatchUnconfirmed(
        f"{label} does not have the digest in the ledger. It was not used for the comparison, and "
        f"the version is not flagged. {error} Retry later."
    )


def champion_if_any(model: RegisteredModel, *, into: Path, trust: Trust | None = None) -> Champion:
    """Return the champion for display only. Failures are part of the result and never raised."""
    try:
        return load_champion(model, into=into, trust=trust)
    except GateError as error:
        return Champion.unavailable(f"{type(error).__name__}: {error}")


def _read(path: Path, entry: LedgerEntry) -> Champion:
    """Read the records next to a verified file.

    Raises DigestMismatch if the evidence differs from the ledger's, StorageError.
    """
    expected = entry.evidence_sha256
    try:
        evidence = None if expected is None else load_evidence(path, sha256=expected)
        reason = _NO_EVIDENCE
    except EvidenceError as error:
        evidence, reason = None, f"its evidence can't be read: {error}"
    if evidence is not None and evidence.subject.sha256 != entry.sha256:
        evidence, reason = None, "its evidence is about another file"
    return Champion(
        state="unrecorded" if evidence is None else "proven",
        absent=reason if evidence is None else None,
        version=entry.version,
        sha256=entry.sha256,
        onnx_path=path,
        evidence=evidence,
        decision=_decision(path, entry),
        trend=load_trend(path),
    )


def _decision(path: Path, entry: LedgerEntry) -> Decision | None:
    try:
        decision = load_decision(path)
    except (DigestMismatch, EvidenceError):
        return None
    digests = (decision.subject_sha256, decision.policy_sha256, decision.evidence_sha256)
    approved = (entry.sha256, entry.policy_sha256, entry.evidence_sha256)
    return decision if digests == approved else None
