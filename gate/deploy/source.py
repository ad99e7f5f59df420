"""Where a slot's files come from, and how many bytes may come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gate.bounded.limits import ChildLimits
from gate.errors import StorageError
from gate.golden.folder import files_of, read_golden
from gate.onnxfile.foreign import subject_within
from gate.preprocess.beside import spec_beside
from gate.preprocess.spec import PreprocessSpec
from gate.storage.digest import Digest
from gate.storage.quota import MAX_BYTES, TooLarge, limited

GOLDEN = "golden"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class SlotSource:
    """One slot of a release: which bytes are expected, and how to get them."""

    sha256: Digest
    """As evidence counts it."""
    fetch: Callable[[Path], Path]
    """Writes into an empty folder the model, its external data beside it, and its golden vectors
    in `golden/` beside it; gives the path of the ONNX file, or of the file of a release."""
    golden_sha256: Digest | None = None
    """Of golden.json; None: whichever vectors come."""
    golden_required: bool = True
    """False: a model without golden vectors is only loaded."""
    max_bytes: int = MAX_BYTES
    """Of all files together."""
    preprocess_sha256: Digest | None = None
    """Of the spec in `preprocessing/` beside the model; None: it needs none."""
    limits: ChildLimits | None = None
    """Within which a child process reads and runs the files; None: they are our own, and are read
    and run in this process."""

    @classmethod
    def local(
        cls,
        path: Path,
        *,
        golden: Path | None = None,
        sha256: Digest | None = None,
        preprocessing: Path | None = None,
        max_bytes: int = MAX_BYTES,
        limits: ChildLimits | None = None,
    ) -> SlotSource:
        """A file of this machine, with the folder of its golden vectors, if it has any, and its
        preprocessing spec.

        Without `sha256` the bytes are taken as they are now. Raises OnnxFileError,
        EvidenceError, DigestMismatch, LimitExceeded, PolicyError for a spec that is none.
        """
        spec = PreprocessSpec.of_file(preprocessing) if preprocessing is not None else None
        subject = subject_within(path, limits)
        vectors = read_golden(golden) if golden is not None else None

        def fetch(folder: Path) -> Path:
            room = max_bytes
            for name in (path.name, *subject.external_data):
                room -= copy_at_most(room, source=path.parent / name, target=folder / name)
            if vectors is not None and golden is not None:
                for name in files_of(vectors.golden):
                    target = folder / GOLDEN / name
                    room -= copy_at_most(room, source=golden / name, target=target)
            if spec is not None:
                spec.save(spec_beside(folder / path.name))
            return folder / path.name

        return cls(
            sha256=sha256 or subject.sha256,
            fetch=fetch,
            golden_sha256=vectors.sha256 if vectors else None,
            golden_required=vectors is not None,
            max_bytes=max_bytes,
            preprocess_sha256=spec.digest() if spec is not None else None,
            limits=limits,
        )


def copy_at_most(limit: int, *, source: Path, target: Path) -> int:
    """Copy a file of at most `limit` bytes; gives its size. Raises TooLarge, StorageError."""
    size = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as reader, target.open("wb") as writer:
            while chunk := reader.read(_CHUNK):
                size += len(chunk)
                if size > limit:
                    raise TooLarge(f"{source} has more than the {limit} bytes that are allowed")
                writer.write(chunk)
    except OSError as error:
        raise StorageError(
            f"cannot copy {source} to {target}: {error.strerror or error}. "
            "Free space or fix permissions, then repeat."
        ) from error
    return size


def fetched(source: SlotSource, folder: Path) -> Path:
    """Fetch into `folder`, which is made; gives the path of the ONNX file.

    Raises TooLarge, and whatever fetching raises.
    """
    folder.mkdir()
    with limited(folder, source.max_bytes):
        return source.fetch(folder)
