"""`release.yaml`: the parts and the chain of a multi-file release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field

from gate.errors import EvidenceError, OnnxFileError, StorageError
from gate.onnx_file.tested_file import TestedFile
from gate.records.evidence import Subject, SubjectPart, TensorSpec
from gate.storage.digest import Digest
from gate.storage.files import is_inside, open_plain, wrong_name
from gate.storage.record import Record
from gate.storage.untrusted_files import detect_pointer_file, parse_plain_yaml
from gate.storage.yaml_section import load_section

if TYPE_CHECKING:
    import onnx

_SUFFIXES = (".yaml", ".yml")

_MAX_BYTES = 1 << 16
"""Maximum size of a release file in bytes, which is enough for about a thousand parts."""

PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class PartEntry(Record):
    """One part of a release."""

    file: Annotated[str, Field(min_length=1)]
    """Path of the ONNX file, relative to the release file's folder and inside of it."""
    reference: str | None = None
    """Path of the reference module in the whole model. None: the part's name."""
    inputs: str | None = None
    """Samples of this part, in the format of `--inputs`. None: the inputs that the chain passes."""


class ReleaseFile(Record):
    """The file `release.yaml`, which lists the ONNX files that are promoted together."""

    chain: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`package.module:function(parts, batch)`, which runs the parts in order."""
    parts: Annotated[dict[PartName, PartEntry], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read and check a release file.

        Raises PolicyError for a wrong field; OnnxFileError for invalid YAML and for a part that is
        missing, a pointer file or outside of the folder; StorageError."""
        _check_plain(path)
        release = load_section(cls, path, None)
        for name, part in release.parts.items():
            if wrong_name(part.file) or not _is_inside(path.parent, Path(part.file).parent):
                raise OnnxFileError(
                    f"{path}: the part {name} is the file {part.file!r}, expected a file in the "
                    "folder of the release file. Move it there."
                )
            pointer = detect_pointer_file(path.parent / part.file)
            if pointer is not None:
                raise OnnxFileError(f"{path}: the part {name}: {pointer}")
            if not (path.parent / part.file).is_file():
                raise OnnxFileError(
                    f"{path}: the part {name} is missing: {path.parent / part.file} does not "
                    "exist. Export it, or correct the name."
                )
        return release

    @property
    def references(self) -> dict[str, str]:
        """Return the path of the reference module in the whole model, by part."""
        return {name: part.reference or name for name, part in self.parts.items()}


def release_text(chain: str, parts: Mapping[str, PartEntry]) -> str:
    """Return the deterministic text of a release file."""
    lines = [f"chain: {_quote(chain)}", "parts:"]
    for name, part in parts.items():
        fields = part.model_dump(exclude_none=True)
        entries = ", ".join(f"{field}: {_quote(value)}" for field, value in fields.items())
        lines.append(f"  {name}: {{{entries}}}")
    return "\n".join([*lines, ""])


def _is_inside(folder: Path, path: Path) -> bool:
    try:
        return is_inside(folder, str(path))
    except (OSError, RuntimeError):  # a cycle of links
        return False


def _check_plain(path: Path) -> None:
    """Verify that an untrusted release file is a regular, small file of YAML without aliases.

    Raises OnnxFileError, StorageError."""
    pointer = detect_pointer_file(path)
    if pointer is not None:
        raise OnnxFileError(pointer)
    try:
        with open_plain(path) as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise StorageError(
            f"cannot read the release file {path}: {error.strerror or error}. Check the path."
        ) from error
    if len(data) > _MAX_BYTES:
        raise OnnxFileError(
            f"{path} has more than {_MAX_BYTES} bytes, expected a release file, which lists the "
            "parts."
        )
    try:
        parse_plain_yaml(data, label=str(path))
    except EvidenceError as error:
        raise OnnxFileError(f"not a release file: {error}") from error


def is_release_file(path: Path) -> bool:
    """Return whether the name is that of a release file instead of an ONNX file."""
    return path.suffix.lower() in _SUFFIXES


def onnx_files(path: Path) -> dict[str, Path]:
    """Return the ONNX files of a release by part; for an ONNX file, return it under the name "".

    Raises the exceptions of `ReleaseFile.load`."""
    if not is_release_file(path):
        return {"": path}
    return {name: path.parent / part.file for name, part in ReleaseFile.load(path).parts.items()}


def load_graphs(path: Path) -> Iterator[onnx.ModelProto]:
    """Yield the models of `onnx_files`, without external data. Raises its exceptions, and those of
    onnx."""
    from gate.onnx_file.reading import load_graph

    for file in onnx_files(path).values():
        yield load_graph(str(file))


def _quote(text: str) -> str:
    """Return a text as a single-quoted YAML scalar."""
    doubled = text.replace("'", "''")
    return f"'{doubled}'"


@dataclass(frozen=True)
class ReleaseFiles:
    """A release file with the ONNX file of each part."""

    path: Path
    """Path of the release file."""
    file: ReleaseFile
    parts: Mapping[str, TestedFile]
    """Parts by name, in the order of the release file."""

    def subject(
        self, *, inputs: tuple[TensorSpec, ...] = (), outputs: tuple[TensorSpec, ...] = ()
    ) -> Subject:
        """Return the subject of all files together.

        Its digest is that of the manifest over the release file, the ONNX files and their external
        data. inputs, outputs: of the chain, known after a run of it. Raises StorageError."""
        folder = self.path.parent
        files = sorted(
            {
                str((part.path.parent / name).relative_to(folder))
                for part in self.parts.values()
                for name in (part.path.name, *part.subject.external_data)
            }
        )
        subjects = [part.subject for part in self.parts.values()]
        return Subject(
            sha256=Digest.from_manifest(folder, (self.path.name, *files)),
            size_bytes=sum((folder / name).stat().st_size for name in (self.path.name, *files)),
            opset=max(subject.opset for subject in subjects),
            producer=", ".join(sorted({subject.producer for subject in subjects})),
            inputs=inputs,
            outputs=outputs,
            external_data=tuple(files),
            parts={
                name: SubjectPart(
                    file=str(part.path.relative_to(folder)), sha256=part.subject.sha256
                )
                for name, part in self.parts.items()
            },
        )
