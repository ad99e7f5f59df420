"""The champion as the registry gives it: its bytes and its evidence proven by the ledger, or by its
own statements where there is no ledger.

Looking writes nothing: a wrong download is weather here, and condemns nobody.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gate.attestation.trust import Trust
from gate.decision.champion import Champion
from gate.decision.decision import Decision
from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    EvidenceError,
    GateError,
    MismatchUnconfirmed,
    ResourceGone,
)
from gate.ledger.entry import LedgerEntry
from gate.records.names import EVIDENCE
from gate.registry.comparison.by_statements import vouched_by_statements
from gate.registry.comparison.compared import standard
from gate.registry.download import Download
from gate.registry.port import CHAMPION
from gate.registry.proof import ExpectedFiles
from gate.registry.records import RECORDS, decision_beside, evidence_beside, trend_beside
from gate.registry.registered_model import RegisteredModel
from gate.storage.foreign import RECORD_LIMIT
from gate.storage.quota import MAX_EXTENT
from gate.storage.temporary import temporary_folder

_UNNAMED = "the ledger names no evidence on it"


def champion_of(model: RegisteredModel, *, into: Path, trust: Trust | None = None) -> Champion:
    """The version that a new one has to be compared with (`standard`), downloaded below `into`.

    `trust`: whose statements on it are believed where no line of the ledger vouches for it; None:
    nobody's.

    Raises MismatchUnconfirmed where what came is not what the ledger says, the other
    RegistryErrors, EvidenceError where the ledger's chain is broken, StorageError.
    """
    found = _served(model)
    if isinstance(found, Champion):
        if found.state != "unvouched" or trust is None or found.version is None:
            return found
        by_word = vouched_by_statements(model, found.version, trust=trust, into=into)
        if isinstance(by_word, str):
            return Champion(
                state="unvouched", version=found.version, absent=f"{found.absent}; and {by_word}"
            )
        return _read(*by_word)
    assert found.version is not None
    assert found.sha256 is not None
    expected = ExpectedFiles(
        sha256=found.sha256,
        evidence=found.evidence_sha256,
        extent=found.extent or MAX_EXTENT,
    )
    download = Download.into(into, model.registry, of=(model.name, found.version, expected))
    try:
        return _read(download.proven(), found)
    except DigestMismatch as error:
        raise _unconfirmed(download.what, error) from error


def champion_recorded(model: RegisteredModel) -> Champion:
    """The same by the evidence that the ledger names, without its file. Raises as `champion_of`;
    MismatchUnconfirmed where that evidence does not come, too."""
    found = _served(model)
    if isinstance(found, Champion):
        return found
    assert found.version is not None
    pinned = found.evidence_sha256
    recorded = Champion(state="proven", version=found.version, sha256=found.sha256)
    if pinned is None:
        return replace(recorded, state="unrecorded", absent=_UNNAMED)
    what = f"the evidence of version {found.version} of {model.name} in the registry"
    with temporary_folder() as folder:
        most_bytes = {f"{RECORDS}/{EVIDENCE}": RECORD_LIMIT}
        try:
            model.registry.fetch(model.name, found.version, folder, most_bytes=most_bytes)
            evidence = evidence_beside(folder / "model.onnx", sha256=pinned)
        except (DigestMismatch, EvidenceError, ArtifactMissing) as error:
            raise _unconfirmed(what, error) from error
        except ResourceGone as error:
            raise MismatchUnconfirmed(
                f"version {found.version} of {model.name}, which served last and is what this has "
                "to be compared with, was deleted from the registry. Point "
                f"'{CHAMPION}' at a version that served before, or leave 'incumbent' out of the "
                "service's policy for this one."
            ) from error
    return replace(recorded, evidence=evidence)


def _served(model: RegisteredModel) -> Champion | LedgerEntry:
    """The line that vouches for the standard, or why there is none."""
    history = model.history()
    number = standard(model.alias(CHAMPION), history)
    if number is None:
        return Champion(state="first", absent=f"no version of {model.name} serves yet")
    vouched = history.vouching_for(number)
    if vouched is not None and vouched.sha256 is not None:
        return vouched
    return Champion(
        state="unvouched",
        version=number,
        absent=f"no line of the ledger {model.ledger.place} says that the gate passed it, so "
        "nothing says which bytes it should hold",
    )


def _unconfirmed(what: str, error: GateError) -> MismatchUnconfirmed:
    return MismatchUnconfirmed(
        f"{what} did not come as the ledger says: nothing is compared with it, and nothing is "
        f"condemned. {error} Repeat in a while."
    )


def champion_if_any(model: RegisteredModel, *, into: Path, trust: Trust | None = None) -> Champion:
    """The same for whoever only shows it: what goes wrong is said, and never raised."""
    try:
        return champion_of(model, into=into, trust=trust)
    except GateError as error:
        return Champion.unavailable(f"{type(error).__name__}: {error}")


def _read(path: Path, vouched: LedgerEntry) -> Champion:
    """Raises DigestMismatch for evidence that the ledger does not name, StorageError."""
    pinned = vouched.evidence_sha256
    try:
        evidence = None if pinned is None else evidence_beside(path, sha256=pinned)
        reason = _UNNAMED
    except EvidenceError as error:
        evidence, reason = None, f"it has no evidence beside its file: {error}"
    if evidence is not None and evidence.subject.sha256 != vouched.sha256:
        evidence, reason = None, "its evidence is on another file"
    return Champion(
        state="unrecorded" if evidence is None else "proven",
        absent=reason if evidence is None else None,
        version=vouched.version,
        sha256=vouched.sha256,
        onnx_path=path,
        evidence=evidence,
        decision=_decision(path, vouched),
        trend=trend_beside(path),
    )


def _decision(path: Path, vouched: LedgerEntry) -> Decision | None:
    try:
        found = decision_beside(path)
    except (DigestMismatch, EvidenceError):
        return None
    digests = (found.subject_sha256, found.policy_sha256, found.evidence_sha256)
    ours = (vouched.sha256, vouched.policy_sha256, vouched.evidence_sha256)
    return found if digests == ours else None
