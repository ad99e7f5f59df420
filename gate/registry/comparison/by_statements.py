"""What serves, by its own statements: for whoever hands in, and has no ledger.

It is no word on what *should* serve, which the service alone can say: that looks again by its
ledger (`gate.registry.comparison.compared.outdated`).
"""

from __future__ import annotations

from pathlib import Path

from gate.attestation.statements import Statements
from gate.attestation.trust import Trust
from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.ledger.entry import LedgerEntry
from gate.registry.download import Download, Stated
from gate.registry.proof import ExpectedFiles
from gate.registry.records import RECORDS, Records
from gate.registry.registered_model import RegisteredModel
from gate.registry.terms import release_beside
from gate.registry.vouching import named_beside, stated, verify_statements


def vouched_by_statements(
    model: RegisteredModel, number: str, *, trust: Trust, into: Path
) -> tuple[Path, LedgerEntry] | str:
    """The file of a version, downloaded below `into`, and what a trusted measurer vouches for: all
    of its bytes, its evidence and its verdict, for this model of this registry. Else what is
    missing. What serves may grow old: its statements had to be young enough when they were made.

    Raises the RegistryErrors, StorageError.
    """

    def line_of(path: Path) -> LedgerEntry:
        try:
            made = Statements.beside(path.parent / RECORDS).made_at
            names = model.identities()
            fields = stated(path, model=model.name, trust=trust, registries=names, now=made)
        except Untrusted as error:
            raise EvidenceError(str(error)) from error
        return model.entry("passed", "its own statements", version=number).model_copy(update=fields)

    expected = Stated(lambda path: ExpectedFiles.of(line_of(path)))
    download = Download.into(into, model.registry, of=(model.name, number, expected))
    try:
        path = download.proven()
        line = line_of(path)
        records = Records.beside(path, evidence=line.evidence_sha256)
        assert records.statements is not None  # line_of has read them
        verify_statements(
            release_beside(path, records, name=model.name, twin=None),  # it is not compared
            files=named_beside(line),
            trust=trust,
            registries=model.identities(),
            now=records.statements.made_at,
        )
    except (DigestMismatch, EvidenceError, Untrusted) as error:
        return f"nobody who is trusted{trust.by} vouches for it: {error}"
    return path, line
