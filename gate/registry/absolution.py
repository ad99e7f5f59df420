"""Absolution: a violation is lifted, because the bytes are those that passed after all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, OnnxFileError, RegistryError
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Ledger
from gate.registry.alias import model_lock
from gate.registry.interface import Registry
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_files import ExpectedDigests, Records
from gate.registry.version_page import write_status
from gate.storage.files import temporary_folder


@dataclass(frozen=True)
class Absolution:
    """What came of it. `problem`: why the violation stands; None: it was lifted."""

    version: str
    problem: str | None
    reason: str


def absolve(
    registry: Registry, model_name: str, version: str, *, ledger: Ledger, reason: str
) -> Absolution:
    """Lift the violation of a version whose bytes, downloaded now, are those that the ledger
    vouched for: the file, and all that is beside it. No alias is moved, and nothing else is
    lifted: neither a rollback nor a reviewer's no.

    A `problem`: they still are others, which a second download confirmed. Raises RegistryError
    where there is no violation to lift, or no line that says which bytes passed;
    MismatchUnconfirmed, the other RegistryErrors, EvidenceError and StorageError where nothing can
    be said now.
    """
    model = RegisteredModel(registry, ledger, model_name)
    with model_lock(model):
        history = model.history()
        vouched = _vouched(model, history, version)

        def records(path: Path) -> None:
            _verify_records(path, vouched)

        try:
            with temporary_folder() as folder:
                model.read(version, ExpectedDigests.from_entry(vouched), records, into=folder)
        except (DigestMismatch, EvidenceError, OnnxFileError) as error:
            return Absolution(version, str(error), reason)
        model.write("absolved", reason, version=version, about=vouched)
        write_status(model, (version,))
    return Absolution(version, None, reason)


def _vouched(model: RegisteredModel, history: ModelHistory, version: str) -> LedgerEntry:
    """The line that says which bytes passed, of a version that a violation keeps out of service."""
    if "violation" not in history.since_passed(version):
        standing = history.standing(version)
        last = "says nothing" if standing is None else f"says last: {standing.action}"
        raise RegistryError(
            f"version {version} of {model.name} has no violation to lift: of it the ledger "
            f"{model.ledger.place} {last}. A rollback is undone by deleting its tag and promoting "
            "anew, a reviewer's rejection by nothing."
        )
    vouched = history.vouching_for(version)
    if vouched is None:
        raise RegistryError(
            f"no line of the ledger {model.ledger.place} says that version {version} of "
            f"{model.name} ever passed, so nothing says which bytes it should hold. Promote the "
            "file anew."
        )
    return vouched


def _verify_records(path: Path, vouched: LedgerEntry) -> None:
    """Evidence and decision are those that the line names."""
    records = Records.load(path, evidence=vouched.evidence_sha256)
    decision, what = records.decision, f"the decision beside version {vouched.version}"
    for pinned, actual in (
        (vouched.sha256, decision.subject_sha256),
        (vouched.policy_sha256, decision.policy_sha256),
        (vouched.evidence_sha256, decision.evidence_sha256),
    ):
        if pinned is not None:
            pinned.verify(actual, what=what)
