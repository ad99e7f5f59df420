"""Proof that a version's files are the expected ones, after they were downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError
from gate.golden.folder import read_golden
from gate.ledger.entry import LedgerEntry, TwinDigests
from gate.onnxfile.description import digest_of_model
from gate.preprocess.beside import prove_spec, spec_beside
from gate.registry.port import GOLDEN
from gate.registry.records import evidence_beside
from gate.registry.twin import QUANTIZED, twin_file
from gate.storage.digest import Digest
from gate.storage.foreign import mismatch_of
from gate.storage.quota import MAX_EXTENT, Extent


@dataclass(frozen=True, kw_only=True)
class ExpectedFiles:
    """What a version's file is to be, and what is to be beside it."""

    sha256: Digest
    """Of the ONNX file, as evidence counts it."""
    golden: str | None = None
    """Digest of the golden vectors, in hexadecimal."""
    twin: TwinDigests | None = None
    preprocessing: Digest | None = None
    """Digest of the preprocessing spec."""
    evidence: Digest | None = None
    """Of the evidence, which names the file's external data; nothing else of it is needed."""
    extent: Extent = MAX_EXTENT
    """How much all of it is."""

    @classmethod
    def of(cls, line: LedgerEntry) -> ExpectedFiles:
        """What a line of the ledger says that vouches for a version."""
        return replace(cls.needed(line), golden=_hex(line.golden_sha256))

    @classmethod
    def needed(cls, line: LedgerEntry) -> ExpectedFiles:
        """What a version can't serve without; golden vectors prove, and nothing needs them."""
        assert line.sha256 is not None
        return cls(
            sha256=line.sha256,
            twin=line.twin,
            preprocessing=line.preprocess_sha256,
            evidence=line.evidence_sha256,
            extent=line.extent or MAX_EXTENT,
        )


def prove(path: Path, expected: ExpectedFiles, *, what: str) -> None:
    """Hash the file and what is to be beside it; nothing is parsed that is not the expected bytes.

    Raises DigestMismatch, whatever goes wrong in reading what came; StorageError.
    """
    with mismatch_of(what):
        names = external_data_of(path, expected.evidence)
        expected.sha256.verify(digest_of_model(path, external_data=names), what=what)
        if expected.golden is not None:
            _prove_golden(path.parent / GOLDEN, expected.golden, what=what)
        if expected.twin is not None:
            prove_twin(path.parent / QUANTIZED, expected.twin, what=what)
        if expected.preprocessing is not None:
            prove_spec(spec_beside(path), expected.preprocessing, what=what)


def prove_twin(folder: Path, expected: TwinDigests, *, what: str) -> None:
    """The same for the twin in `folder`, beside its exact file."""
    try:
        path = twin_file(folder)
    except EvidenceError as error:
        raise DigestMismatch(f"the twin of {what} is not whole: {error}") from error
    files = ExpectedFiles(
        sha256=expected.sha256,
        golden=_hex(expected.golden_sha256),
        evidence=expected.evidence_sha256,
    )
    prove(path, files, what=f"the twin of {what}")


def _hex(digest: Digest | None) -> str | None:
    return None if digest is None else digest.hex


def external_data_of(path: Path, evidence: Digest | None) -> tuple[str, ...]:
    """Names of the data files, as the very evidence tells that was recorded; none where it is not
    there any more: then the file alone has to be the expected one."""
    if evidence is None:
        return ()
    try:
        return evidence_beside(path, sha256=evidence).subject.external_data
    except (EvidenceError, DigestMismatch):
        return ()


def _prove_golden(folder: Path, expected: str, *, what: str) -> None:
    try:
        read_golden(folder, sha256=Digest.parse(expected))
    except EvidenceError as error:
        raise DigestMismatch(f"{what} has no whole golden vectors: {error}") from error
    except DigestMismatch as error:
        raise DigestMismatch(f"{what} has other golden vectors: {error}") from error
