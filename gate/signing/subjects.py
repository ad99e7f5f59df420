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
    """The address of a registered model: `<registry>#/models/<name>`, or
    `<registry>#/workspaces/<workspace>/models/<name>`. `registry`: its identity as
    `gate.ledger.entry.plain` writes it."""
    place = registry if split_identity(registry)[1] else f"{registry}#"
    return f"{place}{_MODELS}{quote(model, safe='')}"


def file_resource(sha256: Digest) -> str:
    """Return the resource URI of a file that is not registered yet."""
    return f"urn:sha256:{sha256.hex}"


def registered(resource: str) -> tuple[str, str] | None:
    """Identity of the registry and name of a registered model; None for another resource."""
    place, _, name = resource.rpartition(_MODELS)
    if place.endswith("#"):
        return place.removesuffix("#"), unquote(name)
    return (place, unquote(name)) if split_identity(place)[1] else None


GOLDEN = f"{layout.GOLDEN}/golden.json"

PREPROCESSING = "preprocessing"
"""By the digest of the spec's canonical JSON."""


def statement_subjects(
    onnx_path: Path, evidence: Evidence, *, golden: Digest | None, preprocessing: bool = True
) -> dict[str, Digest]:
    """The file with its external data, its golden vectors, and the spec of its preprocessing
    (`preprocessing`: whether that goes with it).

    Raises DigestMismatch where the files are not those of the evidence, EvidenceError where it
    names data elsewhere, StorageError.
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
    found = {}
    for name in (onnx_path.name, *subject.external_data):
        if wrong_name(name):
            raise EvidenceError(
                f"the evidence names the data file {name[:300]!r}, expected one inside of the "
                "model's folder. It was edited: measure and decide again."
            )
        if not (onnx_path.parent / name).is_file():
            raise DigestMismatch(f"{onnx_path} has no file {name}. Bring it, or measure anew.")
        found[name] = Digest.of_file(onnx_path.parent / name)
    # What was measured is the manifest of them all: none was exchanged since.
    manifest = Digest.of_json({name: digest.hex for name, digest in found.items()})
    if manifest != subject.sha256:
        verify_parts(onnx_path, evidence)
    subject.sha256.verify(manifest, what=str(onnx_path))
    return found


# A consumer may have renamed the model: it is found among the subjects by its digest, its external
# data by their names relative to it.
_BESIDE = (f"{layout.GOLDEN}/", "quantized/")
"""How the names of subjects begin that are no part of the model itself."""

_REMEDY = "The file was exchanged, or is another's: fetch it again, or promote it anew."


def model_files(signed: SignedStatement) -> tuple[str, ...]:
    """Names of the subjects that are the model: its file and its external data."""
    found = [each.name or "" for each in signed.statement.subject]
    return tuple(n for n in found if n and n != PREPROCESSING and not n.startswith(_BESIDE))


def verify_model(signed: SignedStatement, path: Path, *, model: Digest) -> tuple[str, ...]:
    """Verify that the file at `path`, with its external data, is a subject of the statement.

    It must also be `model`, the digest in the evidence. Returns the names of its subjects. Raises
    Untrusted where it is not, StorageError where it can't be read.
    """
    main = Digest.of_file(path)
    named = model_files(signed)
    found = [name for name in named if signed.statement.digest_of(name) == main.hex]
    if not found:
        raise Untrusted(
            f"{path} has digest {main}, which the statement does not name. It names "
            f"{', '.join(map(repr, named)) or 'no model'}, for the model {model}. {_REMEDY}"
        )
    if main == model:
        return (found[0],)
    others = [name for name in named if name not in found]
    hashed = {found[0]: main.hex}
    wrong = []
    for name in others:
        digest = _data_file_digest(path, name)
        hashed[name] = digest.hex if digest else ""
        if hashed[name] != signed.statement.digest_of(name):
            wrong.append(f"{name} ({digest or 'not there'})")
    if wrong:
        raise Untrusted(
            f"the external data of {path} is not what the statement names: {', '.join(wrong)}. "
            f"{_REMEDY}"
        )
    if Digest.of_json(hashed) != model:
        raise Untrusted(
            f"{path} with {', '.join(others) or 'no external data'} is not the model {model} that "
            f"the verdict is on. {_REMEDY}"
        )
    return tuple(hashed)


def verify_golden_files(signed: SignedStatement, folder: Path, *, model: Digest) -> None:
    """Prove that the golden vectors in a folder are those that the statement names, each array and
    picture included, and are of this model.

    Raises Untrusted where they are not; DigestMismatch and EvidenceError where a file of them is
    another; StorageError.
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
            f"the golden vectors in {folder} are of {golden.model.sha256}, the verdict is on "
            f"{model}. {_REMEDY}"
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
            f"the statement names the data file {name[:300]!r}, outside of the model's."
        )
    file = path.parent / name
    return Digest.of_file(file) if file.is_file() else None
