"""The files that a statement names, and the resource it applies to."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from gate.errors import DigestMismatch, EvidenceError, Untrusted
from gate.records import layout
from gate.records.evidence import Evidence
from gate.signing.statement import SignedStatement
from gate.storage.digest import Digest
from gate.storage.files import is_inside, wrong_name
from gate.storage.untrusted_files import read_untrusted
from gate.storage.workspace import split_identity

_MODELS = "/models/"


def resource_uri(registry: str, model: str) -> str:
    """Return the URI of a registered model: `<registry>#/models/<name>`, or
    `<registry>#/workspaces/<workspace>/models/<name>`. `registry`: its identity as
    `gate.ledger.entry.plain` writes it."""
    prefix = registry if split_identity(registry)[1] else f"{registry}#"
    return f"{prefix}{_MODELS}{quote(model, safe='')}"


def file_resource(sha256: Digest) -> str:
    """Return the resource URI of a file that is not registered yet."""
    return f"urn:sha256:{sha256.hex}"


def parse_resource_uri(resource: str) -> tuple[str, str] | None:
    """Split the URI of a registered model into the registry's identity and the model's name.

    None for another resource.
    """
    registry, _, name = resource.rpartition(_MODELS)
    if registry.endswith("#"):
        return registry.removesuffix("#"), unquote(name)
    return (registry, unquote(name)) if split_identity(registry)[1] else None


GOLDEN = f"{layout.GOLDEN}/golden.json"

PREPROCESSING = "preprocessing"
"""Name of the subject whose digest is that of the preprocessing spec's canonical JSON."""


def statement_subjects(
    onnx_path: Path, evidence: Evidence, *, golden: Digest | None, preprocessing: bool = True
) -> dict[str, Digest]:
    """Return the subjects: the file, its external data, golden vectors and preprocessing spec.

    golden: digest of `golden.json`. preprocessing: whether to include the spec of the evidence.
    Raises DigestMismatch if the files differ from those of the evidence, EvidenceError if it names
    data outside the model's folder, StorageError.
    """
    subjects = _files(onnx_path, evidence)
    if golden is not None:
        subjects[GOLDEN] = golden
    if preprocessing and evidence.source.preprocess_sha256 is not None:
        subjects[PREPROCESSING] = evidence.source.preprocess_sha256
    return subjects


def _files(onnx_path: Path, evidence: Evidence) -> dict[str, Digest]:
    from gate.onnx_file.sandboxed_reading import verify_parts

    subject = evidence.subject
    if not subject.external_data:
        return {onnx_path.name: subject.sha256}
    digests = {}
    for name in (onnx_path.name, *subject.external_data):
        if wrong_name(name):
            raise EvidenceError(
                f"the evidence names the data file {name[:300]!r}, expected one inside of the "
                "model's folder. It was edited: measure and decide again."
            )
        if not (onnx_path.parent / name).is_file():
            raise DigestMismatch(
                f"{onnx_path} needs the data file {name}, which does not exist. Copy it there, or "
                "measure again."
            )
        digests[name] = Digest.from_file(onnx_path.parent / name)
    # The evidence has the digest of the manifest: it covers every file.
    manifest = Digest.from_json({name: digest.hex for name, digest in digests.items()})
    if manifest != subject.sha256:
        verify_parts(onnx_path, evidence)
    subject.sha256.verify(manifest, label=str(onnx_path))
    return digests


_NOT_MODEL = (f"{layout.GOLDEN}/", f"{layout.QUANTIZED}/")
"""Prefixes of the subjects that do not belong to the model itself."""

_REMEDY = "The file was replaced, or belongs to another model: fetch it again, or promote it again."


def model_files(signed: SignedStatement) -> tuple[str, ...]:
    """Return the names of the subjects that are the model: its file and its external data."""
    names = [each.name or "" for each in signed.statement.subject]
    return tuple(n for n in names if n and n != PREPROCESSING and not n.startswith(_NOT_MODEL))


def verify_model(signed: SignedStatement, path: Path, *, model: Digest) -> tuple[str, ...]:
    """Verify that the file at `path`, with its external data, is a subject of the statement.

    The file may have been renamed: its subject is found by the digest, and its external data by
    their relative names. model: the digest in the evidence, which must match, too. Returns the
    names of the subjects. Raises Untrusted; StorageError if a file can't be read.
    """
    main = Digest.from_file(path)
    model_names = model_files(signed)
    matching = [name for name in model_names if signed.statement.digest_of(name) == main.hex]
    if not matching:
        raise Untrusted(
            f"{path} has digest {main}, which the statement does not name. It names "
            f"{', '.join(map(repr, model_names)) or 'no model'}, for the model {model}. {_REMEDY}"
        )
    if main == model:
        return (matching[0],)
    data_files = [name for name in model_names if name not in matching]
    digests = {matching[0]: main.hex}
    mismatches = []
    for name in data_files:
        digest = _data_file_digest(path, name)
        digests[name] = digest.hex if digest else ""
        if digests[name] != signed.statement.digest_of(name):
            mismatches.append(f"{name} ({digest or 'missing'})")
    if mismatches:
        raise Untrusted(
            f"the external data of {path} differs from the statement: {', '.join(mismatches)}. "
            f"{_REMEDY}"
        )
    if Digest.from_json(digests) != model:
        raise Untrusted(
            f"{path} with {', '.join(data_files) or 'no external data'} is not the model of the "
            f"verdict, which has digest {model}. {_REMEDY}"
        )
    return tuple(digests)


def verify_golden_files(signed: SignedStatement, folder: Path, *, model: Digest) -> None:
    """Verify that the statement names the golden vectors in a folder, and that they belong to the
    model. Verifies every array and picture.

    Raises Untrusted if they differ, DigestMismatch and EvidenceError if one of their files does,
    StorageError.
    """
    from gate.golden.folder import read_record, record_digest

    named, actual = signed.statement.digest_of(GOLDEN), record_digest(folder)
    if named != actual.hex:
        raise Untrusted(
            f"the golden vectors in {folder} have digest {actual}, the statement names "
            f"{named or 'none'}. {_REMEDY}"
        )
    golden, _ = read_record(folder, sha256=actual)
    if golden.model.sha256 != model:
        raise Untrusted(
            f"the golden vectors in {folder} belong to the model {golden.model.sha256}, the "
            f"verdict to {model}. {_REMEDY}"
        )
    for name, digest in golden.files.items():
        read_untrusted(folder / name, limit=golden.sizes[name], sha256=digest)


def _data_file_digest(path: Path, name: str) -> Digest | None:
    """Return the digest of a data file next to `path`, or None if it does not exist.

    A data file may be a link, but its folder must not lead out of the model's folder.
    """
    problem = wrong_name(name)
    if problem is not None or not is_inside(path.parent, PurePosixPath(name).parent.as_posix()):
        raise Untrusted(
            f"the statement names the data file {name[:300]!r} outside the model's folder."
        )
    file = path.parent / name
    return Digest.from_file(file) if file.is_file() else None
