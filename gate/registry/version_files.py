"""Files of a registered version: layout, download, digests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from gate.decision.decide import Decision
from gate.errors import DigestMismatch, EvidenceError, StorageError, TooLarge
from gate.golden.folder import read_golden
from gate.ledger.entry import LedgerEntry, TwinDigests
from gate.onnx_file.release_file import is_release_file
from gate.onnx_file.sandboxed_reading import digest_of_model
from gate.preprocess.spec import prove_spec, spec_beside
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
from gate.sandbox.limits import limit_folder_size
from gate.signing.verification import StatementPair
from gate.storage.digest import Digest
from gate.storage.untrusted_files import RECORD_LIMIT, as_mismatch, read_untrusted

# They say nothing by themselves, since whoever may write to the registry may write them. The ledger
# holds the digests that they must have.

_TREND_LIMIT = 1 << 16
"""Bytes of a trend at most: twenty rows take some 5 kB."""


@dataclass(frozen=True)
class Records:
    """Evidence and decision of one version."""

    evidence: Evidence
    decision: Decision
    statements: StatementPair | None = None
    """Who vouches for both; None: nobody signed."""

    def write(self, folder: Path) -> None:
        """Write them. Raises StorageError."""
        self.evidence.save(folder / EVIDENCE)
        self.decision.save(folder / DECISION)
        if self.statements is not None:
            self.statements.write(folder)

    @classmethod
    def load(cls, onnx_path: Path, *, evidence: Digest | None = None) -> Records:
        """The records beside a downloaded file; the evidence with this digest, where one is pinned.

        Raises EvidenceError where they are not whole, DigestMismatch for other evidence,
        StorageError.
        """
        folder = onnx_path.parent / RECORDS
        missing = [name for name in (EVIDENCE, DECISION) if not (folder / name).is_file()]
        if missing:
            raise EvidenceError(
                f"the version has no {' and no '.join(missing)} beside its file: it was not "
                "promoted by this version of the gate. Promote the file anew."
            )
        measured = evidence_beside(onnx_path, sha256=evidence)
        return cls(measured, decision_beside(onnx_path), statements_beside(onnx_path))


def evidence_beside(onnx_path: Path, *, sha256: Digest | None) -> Evidence:
    """The evidence beside a downloaded file. Raises as `Records.beside`."""
    data = read_untrusted(onnx_path.parent / RECORDS / EVIDENCE, limit=RECORD_LIMIT)
    return Evidence.from_untrusted(data, what="the evidence beside the version", sha256=sha256)


def decision_beside(onnx_path: Path) -> Decision:
    """The decision beside a downloaded file. Raises as `Records.beside`."""
    data = read_untrusted(onnx_path.parent / RECORDS / DECISION, limit=RECORD_LIMIT)
    return Decision.from_untrusted(data, what="the decision beside the version")


def statements_beside(onnx_path: Path) -> StatementPair | None:
    """The statements beside a downloaded file; None where there is none at all. Raises Untrusted
    where one of the two is missing or malformed, StorageError."""
    folder = onnx_path.parent / RECORDS
    if not any((folder / name).exists() for name in (EVIDENCE_STATEMENT, DECISION_STATEMENT)):
        return None
    return StatementPair.beside(folder)


def trend_beside(onnx_path: Path) -> Trend:
    """The trend beside a downloaded file. It is there to be looked at, and anybody may have written
    it: what is not there, or can't be read, is an empty one."""
    try:
        data = read_untrusted(onnx_path.parent / RECORDS / TREND, limit=_TREND_LIMIT)
        return Trend.from_untrusted(data, what="the trend beside the version")
    except (DigestMismatch, EvidenceError, StorageError):
        return Trend()


def twin_file(folder: Path) -> Path:
    """The one release file of the folder, beside which its parts may lie; without any the one ONNX
    file. Raises EvidenceError."""
    there = sorted(p for p in folder.glob("*") if p.is_file() and not p.is_symlink())
    releases = [path for path in there if is_release_file(path)]
    found = releases or [path for path in there if path.suffix == ".onnx"]
    if len(found) != 1:
        kind = "release" if releases else "ONNX"
        names = ", ".join(path.name for path in found) or "none"
        raise EvidenceError(
            f"{folder} holds the {kind} files {names}, expected exactly one: the quantized twin. "
            "Make it with gate quantize, judge it with gate check --report, and put both there."
        )
    return found[0]


@dataclass(frozen=True, kw_only=True)
class ExpectedDigests:
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
    extent: VersionSize = MAX_EXTENT
    """How much all of it is."""

    @classmethod
    def from_entry(cls, line: LedgerEntry) -> ExpectedDigests:
        """What a line of the ledger says that vouches for a version."""
        return replace(cls.needed(line), golden=_hex(line.golden_sha256), twin=line.twin)

    @classmethod
    def needed(cls, line: LedgerEntry) -> ExpectedDigests:
        """What a version can't serve without; golden vectors prove, and nothing needs them."""
        assert line.sha256 is not None
        twin = line.twin
        return cls(
            sha256=line.sha256,
            twin=None if twin is None else twin.model_copy(update={"golden_sha256": None}),
            preprocessing=line.preprocess_sha256,
            evidence=line.evidence_sha256,
            extent=line.extent or MAX_EXTENT,
        )


def prove(path: Path, expected: ExpectedDigests, *, what: str) -> None:
    """Hash the file and what is to be beside it; nothing is parsed that is not the expected bytes.

    Raises DigestMismatch, whatever goes wrong in reading what came; StorageError.
    """
    with as_mismatch(what):
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
    files = ExpectedDigests(
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


@dataclass(frozen=True)
class Stated:
    """Of a version for which no line vouches: what is expected of it, its own statements say.
    All are alike, so that two downloads of one version are compared."""

    read: Callable[[Path], ExpectedDigests] = field(compare=False)
    """From the place of the file, beside which nothing else may be read yet. Raises EvidenceError
    where nobody who is trusted says it."""


Expected = ExpectedDigests | Stated


@dataclass
class Download:
    """A version that comes into a folder of its own."""

    registry: Registry
    name: str
    number: str
    expected: Expected
    folder: Path
    is_proven: bool = field(default=False, init=False)
    """Its bytes are the expected ones; what people read of them may be no good all the same."""
    is_too_large: bool = field(default=False, init=False)

    @classmethod
    def into(cls, parent: Path, registry: Registry, *, of: tuple[str, str, Expected]) -> Download:
        """`of`: model, version, and what is expected. Raises StorageError."""
        try:
            folder = Path(tempfile.mkdtemp(prefix="version-", dir=parent))
        except OSError as error:
            raise StorageError(
                f"cannot make a folder in {parent}: {error.strerror or error}. Free space or fix "
                "permissions there."
            ) from error
        return cls(registry, *of, folder)

    @property
    def what(self) -> str:
        """For messages."""
        return f"version {self.number} of {self.name} in the registry"

    def proven(self) -> Path:
        """The file, with all that is to be beside it. Raises DigestMismatch, whatever is wrong with
        what came; EvidenceError where nobody states what it should be; the RegistryErrors,
        StorageError."""
        extent = MAX_EXTENT if isinstance(self.expected, Stated) else self.expected.extent
        try:
            with limit_folder_size(self.folder, extent.most_bytes):
                path = self.registry.download(self.name, self.number, self.folder, extent=extent)
        except TooLarge as error:
            self.is_too_large = True
            raise DigestMismatch(
                f"{self.what}: {error}. It was exchanged: promote it anew."
            ) from error
        if isinstance(self.expected, Stated):
            self.expected = self.expected.read(path)
        prove(path, self.expected, what=self.what)
        self.is_proven = True
        return path
