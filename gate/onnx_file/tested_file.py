"""The ONNX file under test, bound to its digest; its metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import onnx

from gate.errors import DigestMismatch, OnnxFileError, StorageError
from gate.onnx_file.reading import WithData, inline_functions, load_graph, nodes_of
from gate.onnx_file.sessions import open_session, session_options
from gate.policy.runtime_options import OrtSetup, plain_setup
from gate.records.evidence import ExportRecord, Source, Subject
from gate.storage.digest import Digest
from gate.storage.record import Record, Sha256


@dataclass(frozen=True)
class TestedFile:
    """The ONNX file under test, with its subject."""

    path: Path
    subject: Subject

    def verified(self) -> bytes | str:
        """Return the verified bytes for ONNX Runtime; with external data, the path.

        Loading the verified bytes detects a file that is replaced during the measurement. Raises
        DigestMismatch."""
        if self.subject.external_data:
            self.verify()
            return str(self.path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {self.path} to measure it: {error}") from error
        self.subject.sha256.verify(Digest.from_bytes(data), label=self.path.name)
        return data

    def loadable(self) -> bytes | str | WithData:
        """Return the verified bytes, the path, or model and data in memory if data files are links.

        Caches of model hubs link data files, and ONNX Runtime refuses links that leave the folder.
        Raises DigestMismatch."""
        files = self.subject.external_data
        if not any((self.path.parent / name).is_symlink() for name in files):
            return self.verified()
        names = (self.path.name, *files)
        try:
            contents = {name: (self.path.parent / name).read_bytes() for name in names}
        except (OSError, MemoryError) as error:
            raise StorageError(f"cannot read {self.path} to measure it: {error}") from error
        digests = {name: Digest.from_bytes(data).hex for name, data in contents.items()}
        self.subject.sha256.verify(Digest.from_json(digests), label=self.path.name)
        return WithData(contents[self.path.name], {name: contents[name] for name in files})

    def verify(self) -> None:
        """Hash the file and its external data again. Raises DigestMismatch."""
        if self.subject.external_data:
            files = [self.path.name, *self.subject.external_data]
            actual = Digest.from_manifest(self.path.parent, files)
        else:
            actual = Digest.from_file(self.path)
        self.subject.sha256.verify(actual, label=self.path.name)

    def is_copy_of(self, other: TestedFile) -> bool:
        """Return whether both files have the same bytes and external data; their names may differ.

        Raises StorageError."""
        if self.subject.sha256 == other.subject.sha256:
            return True
        names = self.subject.external_data  # with external data the digest includes the file name
        return (
            bool(names)
            and names == other.subject.external_data
            and Digest.from_file(self.path) == Digest.from_file(other.path)
            and all(
                Digest.from_file(self.path.parent / name)
                == Digest.from_file(other.path.parent / name)
                for name in names
            )
        )


_DATA_FOLDER = "session.model_external_initializers_file_folder_path"


class EditableFile:
    """The graph of a file, and sessions of edited copies of it. Raises DigestMismatch."""

    def __init__(self, candidate: TestedFile) -> None:
        self._loaded = loaded = candidate.loadable()
        self.model = load_graph(loaded.model if isinstance(loaded, WithData) else loaded)
        if self.model.functions:
            self.model = inline_functions(self.model)

    def session(
        self, edited: onnx.ModelProto, options: Any = None, setup: OrtSetup | None = None
    ) -> Any:
        """Open a session of an edited graph with the external data of the file.

        setup: by default the CPU without optimizations. Raises the exceptions of ONNX Runtime."""
        setup = setup or plain_setup("ort-cpu")
        options = options or session_options(setup, threads=1, deterministic=False)
        loaded, data = self._loaded, edited.SerializeToString()
        if isinstance(loaded, str):
            options.add_session_config_entry(_DATA_FOLDER, str(Path(loaded).parent))
        source = WithData(data, loaded.data) if isinstance(loaded, WithData) else data
        return open_session(source, options, setup)


class ExportNote(Record):
    """The record of an export, bound to the digest of the exported file."""

    subject_sha256: Sha256
    """Digest of the file with its external data, as in `Subject`."""
    record: ExportRecord

    @classmethod
    def from_record(cls, subject: Subject, record: ExportRecord) -> Self:
        """Create the note of an exported file."""
        return cls(subject_sha256=subject.sha256, record=record)

    def verify(self, subject: Subject, *, path: Path) -> None:
        """Raise DigestMismatch unless the note is about the file at `path`."""
        if subject.sha256 != self.subject_sha256:
            raise DigestMismatch(
                f"{path} has digest {subject.sha256}, but the export record is about "
                f"{self.subject_sha256}. Use the record that was written next to this file "
                f"({note_path(path).name}), or export again."
            )


def load_note(model: Path) -> ExportNote | None:
    """Read the export note of a file, if there is one. Raises EvidenceError, StorageError."""
    path = note_path(model)
    return ExportNote.load(path) if path.is_file() else None


def note_path(model: Path) -> Path:
    """Return the path of a file's export note: `model.onnx.export.json`."""
    return model.with_name(f"{model.name}.export.json")


PREFIX = "parity_gate."

_STACK_TRACE = "pkg.torch.onnx.stack_trace"

_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][^/\\\s:'\"()]+)+[/\\]")

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def describe_export(
    *, strategy: str, opset: int | str, attempts: Iterable[str], source: Source | None
) -> dict[str, str]:
    """Return the metadata of a file. Unknown values are omitted."""
    values = {
        "strategy": strategy,
        "opset_asked": str(opset),
        "rungs": "\n".join(attempts),
        "factory": source.factory if source else None,
        "checkpoint_sha256": source.checkpoint_sha256 if source else None,
        "preprocess_sha256": source.preprocess_sha256 if source else None,
    }
    return {PREFIX + key: str(value) for key, value in values.items() if value}


def without_paths(text: str) -> str:
    """Return a text on one line without folders and memory addresses, which vary by machine."""
    return _ADDRESS.sub("0x", _FOLDERS.sub("", " ".join(text.split())))


def stamp(model: onnx.ModelProto, metadata: dict[str, str]) -> None:
    """Set the metadata of a model, and remove strings that name files of this machine."""
    foreign = [(p.key, p.value) for p in model.metadata_props if not p.key.startswith(PREFIX)]
    del model.metadata_props[:]
    for key, value in (*foreign, *metadata.items()):
        model.metadata_props.add(key=key, value=value)
    for node in nodes_of(model):
        node.ClearField("doc_string")
        properties = [(p.key, p.value) for p in node.metadata_props if p.key != _STACK_TRACE]
        del node.metadata_props[:]
        for key, value in properties:
            node.metadata_props.add(key=key, value=value)


def stamp_file(path: Path, metadata: dict[str, str]) -> None:
    """Set the metadata of a file in place. Raises OSError."""
    model = onnx.ModelProto.FromString(path.read_bytes())
    stamp(model, metadata)
    path.write_bytes(model.SerializeToString(deterministic=True))


QUANTIZED_FROM = "parity_gate.quantized_from"
"""Metadata key with the digest of the exact file."""


def quantized_from(path: Path) -> str | None:
    """Return the digest of the exact file, `sha256:…`, or None if the metadata has none.

    Raises OnnxFileError if the file is not an ONNX model.
    """
    try:
        model = load_graph(str(path))
    except Exception as error:  # protobuf's DecodeError, OSError
        raise OnnxFileError(f"{path} can't be read as an ONNX model: {error}.") from error
    digests = [entry.value for entry in model.metadata_props if entry.key == QUANTIZED_FROM]
    return digests[0] if len(digests) == 1 else None
