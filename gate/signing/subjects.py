"""The files that a statement names, hashed again where they lie now.

A consumer may have given the model another name: it is found among the subjects by its digest, its
external data by their names beside it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from gate.attestation.envelope import SignedStatement
from gate.attestation.subjects import GOLDEN, PREPROCESSING
from gate.errors import Untrusted
from gate.records import names
from gate.storage.digest import Digest
from gate.storage.files import is_inside, wrong_name
from gate.storage.foreign import read_foreign

_BESIDE = (f"{names.GOLDEN}/", "quantized/")
"""How the names of subjects begin that are no part of the model itself."""
_REMEDY = "The file was exchanged, or is another's: fetch it again, or promote it anew."


def model_files(signed: SignedStatement) -> tuple[str, ...]:
    """Names of the subjects that are the model: its file and its external data."""
    found = [each.name or "" for each in signed.statement.subject]
    return tuple(n for n in found if n and n != PREPROCESSING and not n.startswith(_BESIDE))


def verify_model(signed: SignedStatement, path: Path, *, model: Digest) -> tuple[str, ...]:
    """Prove that the file at `path`, with its external data beside it, is what the statement names,
    and is `model`, as evidence counts it. Gives the names of the subjects that it is.

    Raises Untrusted where it is not, StorageError where it can't be read.
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
        digest = _data_beside(path, name)
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
    sizes = {tensor.file: tensor.size_bytes for tensor in golden.arrays}
    sizes |= {
        file.file: file.size_bytes for file in (golden.pictures and golden.pictures.files) or ()
    }
    for name, digest in golden.files.items():
        read_foreign(folder / name, limit=sizes[name], sha256=digest)


def _data_beside(path: Path, name: str) -> Digest | None:
    """Of a data file; None: it is not there. A data file may be a link, the folder it is in must
    not lead elsewhere."""
    problem = wrong_name(name)
    if problem is not None or not is_inside(path.parent, PurePosixPath(name).parent.as_posix()):
        raise Untrusted(
            f"the statement names the data file {name[:300]!r}, outside of the model's."
        )
    file = path.parent / name
    return Digest.of_file(file) if file.is_file() else None
