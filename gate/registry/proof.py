"""Proof that a version's files are the expected ones, after they were downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, GateError
from gate.golden.folder import read_golden
from gate.preprocess.beside import prove_spec, spec_beside
from gate.registry.judged import digest_of_model
from gate.registry.ledger import LedgerEntry
from gate.registry.port import GOLDEN
from gate.registry.twin import QUANTIZED, TwinDigests, twin_file
from gate.storage.digest import Digest


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

    @classmethod
    def of(cls, line: LedgerEntry) -> ExpectedFiles:
        """What a line of the ledger says that vouches for a version."""
        return replace(cls.needed(line), golden=_hex(line.golden_sha256))

    @classmethod
    def needed(cls, line: LedgerEntry) -> ExpectedFiles:
        """What a version can't serve without; golden vectors prove, and nothing needs them."""
        assert line.sha256 is not None
        return cls(sha256=line.sha256, twin=line.twin, preprocessing=line.preprocess_sha256)


def prove(path: Path, expected: ExpectedFiles, *, what: str) -> None:
    """Hash the file and what is to be beside it. Raises DigestMismatch, StorageError."""
    expected.sha256.verify(_digest(path, expected.sha256, what=what), what=what)
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
    files = ExpectedFiles(sha256=expected.sha256, golden=_hex(expected.golden_sha256))
    prove(path, files, what=f"the twin of {what}")


def _hex(digest: Digest | None) -> str | None:
    return None if digest is None else digest.hex


def _digest(path: Path, expected: Digest, *, what: str) -> Digest:
    """Whatever goes wrong in reading bytes that came whole: they are not the expected ones."""
    try:
        return digest_of_model(path, expected=expected)
    except GateError:
        raise
    except Exception as error:
        raise DigestMismatch(
            f"{what} can't be read as a model ({type(error).__name__}: {error}), expected "
            f"{expected}. It was exchanged: promote the file anew."
        ) from error


def _prove_golden(folder: Path, expected: str, *, what: str) -> None:
    try:
        digest = read_golden(folder).sha256
    except EvidenceError as error:
        raise DigestMismatch(f"{what} has no whole golden vectors: {error}") from error
    if digest.hex != expected:
        raise DigestMismatch(
            f"{what} has golden vectors with digest {digest}, expected {expected}. "
            "They were exchanged: promote the file anew."
        )
