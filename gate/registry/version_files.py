"""Files of a registered version: layout, download, digests."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from gate.decision.decide import Decision
from gate.errors import DigestMismatch, EvidenceError, StorageError, TooLarge
from gate.golden.folder import read_golden
from gate.ledger.entry import LedgerEntry, TwinDigests
from gate.onnx_file.release_file import is_release_file
from gate.onnx_file.sandboxed_reading import digest_of_model
from gate.preprocess.spec import spec_path, verify_spec
from gate.records.champion_comparison import Trend
from gate.records.evidence import Evidence
from gate.records.layout import (
    DECISION,
    DECISION_STATEMENT,
    EVIDENCE,
    EVIDENCE_STATEMENT,
    GOLDEN,
    MAX_EXTENT,
    QUANTIZED,
    RECORDS,
    TREND,
    VersionSize,
)
from gate.registry.interface import Registry
from gate.registry.release import EvaluatedFile, Release
from gate.sandbox.limits import limit_folder_size
from gate.signing.verification import StatementPair
from gate.storage.digest import Digest
from gate.storage.untrusted_files import RECORD_LIMIT, as_mismatch, read_untrusted

# The files alone prove nothing, because every writer to the registry can change them. The ledger
# contains their expected digests.
_TREND_LIMIT = 1 << 16
"""Maximum size of a trend in bytes; twenty rows take about 5 kB."""


def write_records(file: EvaluatedFile, folder: Path) -> None:
    """Write evidence, decision and statements into a folder. Raises StorageError."""
    file.evidence.save(folder / EVIDENCE)
    file.decision.save(folder / DECISION)
    if file.statements is not None:
        file.statements.write(folder)


def load_records(onnx_path: Path, *, evidence: Digest | None) -> EvaluatedFile:
    """Load evidence, decision and statements next to a downloaded file.

    evidence: the expected digest of the evidence; None: any.
    Raises EvidenceError if evidence or decision is missing, DigestMismatch, Untrusted for malformed
    statements, StorageError.
    """
    folder = onnx_path.parent / RECORDS
    missing = [name for name in (EVIDENCE, DECISION) if not (folder / name).is_file()]
    if missing:
        raise EvidenceError(
            f"the version has no {' and no '.join(missing)} next to its file: it was not "
            "promoted with this version of the gate. Promote the file again."
        )
    return EvaluatedFile(
        onnx_path=onnx_path,
        evidence=load_evidence(onnx_path, sha256=evidence),
        decision=load_decision(onnx_path),
        statements=load_statements(onnx_path),
    )


def load_evidence(onnx_path: Path, *, sha256: Digest | None) -> Evidence:
    """Load the evidence next to a downloaded file. Raises the exceptions of `load_records`."""
    data = read_untrusted(onnx_path.parent / RECORDS / EVIDENCE, limit=RECORD_LIMIT)
    return Evidence.from_untrusted(data, label="the version's evidence", sha256=sha256)


def load_decision(onnx_path: Path) -> Decision:
    """Load the decision next to a downloaded file. Raises the exceptions of `load_records`."""
    data = read_untrusted(onnx_path.parent / RECORDS / DECISION, limit=RECORD_LIMIT)
    return Decision.from_untrusted(data, label="the version's decision")


def load_statements(onnx_path: Path) -> StatementPair | None:
    """Load the statements next to a downloaded file; None if there are none.

    Raises Untrusted if one of the two is missing or malformed, StorageError.
    """
    folder = onnx_path.parent / RECORDS
    if not any((folder / name).exists() for name in (EVIDENCE_STATEMENT, DECISION_STATEMENT)):
        return None
    return StatementPair.from_folder(folder)


def load_trend(onnx_path: Path) -> Trend:
    """Load the trend next to a downloaded file; return an empty trend if it can't be read.

    The trend is not trusted and only displayed.
    """
    try:
        data = read_untrusted(onnx_path.parent / RECORDS / TREND, limit=_TREND_LIMIT)
        return Trend.from_untrusted(data, label="the version's trend")
    except (DigestMismatch, EvidenceError, StorageError):
        return Trend()


def twin_file(folder: Path) -> Path:
    """Return the only release file of the folder, or else its only ONNX file.

    The parts of a release may be next to the release file. Raises EvidenceError.
    """
    files = sorted(p for p in folder.glob("*") if p.is_file() and not p.is_symlink())
    releases = [path for path in files if is_release_file(path)]
    twins = releases or [path for path in files if path.suffix == ".onnx"]
    if len(twins) != 1:
        kind = "release" if releases else "ONNX"
        names = ", ".join(path.name for path in twins) or "none"
        raise EvidenceError(
            f"{folder} contains the {kind} files {names}, expected only the quantized twin. "
            "Create it with gate quantize, measure it with gate check --report, and put both there."
        )
    return twins[0]


@dataclass(frozen=True, kw_only=True)
class ExpectedDigests:
    """The expected digests of a version's ONNX file and of its other files."""

    sha256: Digest
    """Digest of the ONNX file and its external data, as in the evidence."""
    golden: str | None = None
    """Digest of the golden vectors, in hexadecimal."""
    twin: TwinDigests | None = None
    preprocessing: Digest | None = None
    """Digest of the preprocessing spec."""
    evidence: Digest | None = None
    """Digest of the evidence, which is read for the names of the external data."""
    extent: VersionSize = MAX_EXTENT
    """Maximum number and size of the files."""

    @classmethod
    def from_entry(cls, entry: LedgerEntry) -> ExpectedDigests:
        """Create the digests from the ledger entry that approves a version."""
        return replace(cls.needed(entry), golden=_hex(entry.golden_sha256), twin=entry.twin)

    @classmethod
    def from_release(cls, release: Release, *, golden: str | None) -> ExpectedDigests:
        """Create the digests from a release, with the golden vectors named by a version's tags."""
        return cls(
            sha256=release.decision.subject_sha256,
            golden=golden,
            twin=release.twin_digests,
            preprocessing=release.preprocess_sha256,
            evidence=release.decision.evidence_sha256,
            extent=release.extent,
        )

    @classmethod
    def needed(cls, entry: LedgerEntry) -> ExpectedDigests:
        """Create the digests without golden vectors, which serving does not need."""
        assert entry.sha256 is not None
        twin = entry.twin
        return cls(
            sha256=entry.sha256,
            twin=None if twin is None else twin.model_copy(update={"golden_sha256": None}),
            preprocessing=entry.preprocess_sha256,
            evidence=entry.evidence_sha256,
            extent=entry.extent or MAX_EXTENT,
        )


def verify_version(path: Path, expected: ExpectedDigests, *, label: str) -> None:
    """Verify the digests of a version's ONNX file and of its other files.

    Only files with the expected digest are parsed. Raises DigestMismatch, also if the download is
    unreadable; StorageError.
    """
    with as_mismatch(label):
        names = external_data_of(path, expected.evidence)
        expected.sha256.verify(digest_of_model(path, external_data=names), label=label)
        if expected.golden is not None:
            _verify_golden(path.parent / GOLDEN, expected.golden, label=label)
        if expected.twin is not None:
            verify_twin(path.parent / QUANTIZED, expected.twin, label=label)
        if expected.preprocessing is not None:
            verify_spec(spec_path(path), expected.preprocessing, label=label)


def verify_twin(folder: Path, expected: TwinDigests, *, label: str) -> None:
    """Verify the digests of the quantized twin in a folder; see `verify_version`."""
    try:
        path = twin_file(folder)
    except EvidenceError as error:
        raise DigestMismatch(f"the twin of {label} is incomplete: {error}") from error
    files = ExpectedDigests(
        sha256=expected.sha256,
        golden=_hex(expected.golden_sha256),
        evidence=expected.evidence_sha256,
    )
    verify_version(path, files, label=f"the twin of {label}")


def _hex(digest: Digest | None) -> str | None:
    return None if digest is None else digest.hex


def external_data_of(path: Path, evidence: Digest | None) -> tuple[str, ...]:
    """Return the names of the external data files in the evidence with a digest.

    Empty if that evidence is missing; then the ONNX file alone must have the expected digest.
    """
    if evidence is None:
        return ()
    try:
        return load_evidence(path, sha256=evidence).subject.external_data
    except (EvidenceError, DigestMismatch):
        return ()


def _verify_golden(folder: Path, expected: str, *, label: str) -> None:
    try:
        read_golden(folder, sha256=Digest.parse(expected))
    except EvidenceError as error:
        raise DigestMismatch(f"{label} has incomplete golden vectors: {error}") from error
    except DigestMismatch as error:
        raise DigestMismatch(f"{label} has wrong golden vectors: {error}") from error


@dataclass(frozen=True)
class SignedExpectation:
    """Expected digests that come from the signed statements of a version without a ledger entry.

    All instances are equal, so that two downloads of one version are compared.
    """

    read: Callable[[Path], ExpectedDigests] = field(compare=False)
    """Function that returns the digests for the path of the ONNX file. It must read only the
    statements. Raises EvidenceError if no trusted key signed them."""


Expected = ExpectedDigests | SignedExpectation


def version_label(name: str, number: str) -> str:
    """Return the name of a version for messages."""
    return f"version {number} of {name} in the registry"


def make_download_folder(parent: Path) -> Path:
    """Create a new folder for a download. Raises StorageError.

    Its name is the same in each attempt: a message with another path would be written again.
    """
    folders = (parent / f"version-{number}" for number in count(1))
    folder = next(folder for folder in folders if not os.path.lexists(folder))
    try:
        folder.mkdir(mode=0o700)
        return folder
    except OSError as error:
        raise StorageError(
            f"cannot create a folder in {parent}: {error.strerror or error}. Free disk space "
            "or fix the permissions."
        ) from error


def download_version(
    registry: Registry, name: str, number: str, expected: Expected, *, folder: Path
) -> Path:
    """Download a version into an empty folder, verify its files, and return the ONNX file's path.

    The folder is emptied if the version is too large. Raises DigestMismatch for every fault of the
    download; EvidenceError if no trusted statement defines the expected digests; the
    RegistryErrors, StorageError.
    """
    label = version_label(name, number)
    extent = MAX_EXTENT if isinstance(expected, SignedExpectation) else expected.extent
    try:
        with limit_folder_size(folder, extent.most_bytes):
            path = registry.download(name, number, folder, extent=extent)
    except TooLarge as error:
        shutil.rmtree(folder)
        folder.mkdir()
        raise DigestMismatch(
            f"{label}: {error}. The files were replaced. Promote the file again."
        ) from error
    if isinstance(expected, SignedExpectation):
        expected = expected.read(path)
    verify_version(path, expected, label=label)
    return path


def received_digest(folder: Path) -> Digest:
    """Return the digest of names and contents of all files of a download.

    Raises StorageError if a file can't be read."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=os.fsencode):
        is_regular = path.is_file() and not path.is_symlink()
        content = Digest.from_file(path).hex if is_regular else "none"
        total.update(os.fsencode(path.relative_to(folder)) + b"\0" + content.encode() + b"\0")
    return Digest(total.hexdigest())
