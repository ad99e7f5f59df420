"""The champion as the registry gives it: its bytes and its evidence proven by the ledger.

Looking writes nothing: a wrong download is weather here, and condemns nobody.
"""

from __future__ import annotations

from pathlib import Path

from gate.decision.champion import Champion
from gate.decision.decision import Decision
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    GateError,
    MismatchUnconfirmed,
)
from gate.registry.comparison.compared import standard
from gate.registry.download import Download
from gate.registry.ledger import LedgerEntry
from gate.registry.port import CHAMPION
from gate.registry.proof import ExpectedFiles
from gate.registry.records import decision_beside, evidence_beside, trend_beside
from gate.registry.registered_model import RegisteredModel
from gate.storage.quota import MAX_EXTENT


def champion_of(model: RegisteredModel, *, into: Path) -> Champion:
    """The version that a new one has to be compared with (`standard`), downloaded below `into`.

    Raises MismatchUnconfirmed where what came is not what the ledger says, the other
    RegistryErrors, EvidenceError where the ledger's chain is broken, StorageError.
    """
    history = model.history()
    number = standard(model.alias(CHAMPION), history)
    if number is None:
        return Champion(state="first", absent=f"no version of {model.name} serves yet")
    vouched = history.vouching_for(number)
    if vouched is None or vouched.sha256 is None:
        return Champion(
            state="unvouched",
            version=number,
            absent=f"no line of the ledger {model.ledger.path} says that the gate passed it, so "
            "nothing says which bytes it should hold",
        )
    expected = ExpectedFiles(
        sha256=vouched.sha256,
        evidence=vouched.evidence_sha256,
        extent=vouched.extent or MAX_EXTENT,
    )
    download = Download.into(into, model.registry, of=(model.name, number, expected))
    try:
        return _read(download.proven(), vouched)
    except DigestMismatch as error:
        raise MismatchUnconfirmed(
            f"{download.what} did not come as the ledger says: nothing is compared with it, and "
            f"nothing is condemned. {error} Repeat in a while."
        ) from error


def champion_if_any(model: RegisteredModel, *, into: Path) -> Champion:
    """The same for whoever only shows it: what goes wrong is said, and never raised."""
    try:
        return champion_of(model, into=into)
    except GateError as error:
        return Champion.unavailable(f"{type(error).__name__}: {error}")


def _read(path: Path, vouched: LedgerEntry) -> Champion:
    """Raises DigestMismatch for evidence that the ledger does not name, StorageError."""
    pinned = vouched.evidence_sha256
    try:
        evidence = None if pinned is None else evidence_beside(path, sha256=pinned)
        reason = "the ledger names no evidence on it"
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
