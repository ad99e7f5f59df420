"""The ONNX file under test, bound to its digest; its metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import onnx

from gate.errors import DigestMismatch, OnnxFileError, StorageError
from gate.onnx_file.reading import WithData, inline_functions, nodes_of
from gate.onnx_file.sessions import open_session, session_options
from gate.policy.runtime_options import OrtSetup, plain_setup
from gate.records.evidence import ExportRecord, Source, Subject
from gate.storage.digest import Digest
from gate.storage.record import Record, Sha256


@dataclass(frozen=True)
class TestedFile:
    """The file that is measured, and what was read from it."""

    path: Path
    subject: Subject

    def verified(self) -> bytes | str:
        """Return what ONNX Runtime loads: the very bytes that have the digest, so that a file that
        is exchanged for a moment is detected; with external data only the path. Raises
        DigestMismatch."""
        if self.subject.external_data:
            self.verify()
            return str(self.path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {self.path} to measure it: {error}") from error
        self.subject.sha256.verify(Digest.of_bytes(data), what=self.path.name)
        return data

    def loadable(self) -> bytes | str | WithData:
        """The same, but for data behind links, as the caches of model hubs have it: ONNX Runtime
        refuses links that leave the folder, so all of it is read here. Raises DigestMismatch."""
        files = self.subject.external_data
        if not any((self.path.parent / name).is_symlink() for name in files):
            return self.verified()
        names = (self.path.name, *files)
        try:
            read = {name: (self.path.parent / name).read_bytes() for name in names}
        except (OSError, MemoryError) as error:
            raise StorageError(f"cannot read {self.path} to measure it: {error}") from error
        actual = Digest.of_json({name: Digest.of_bytes(data).hex for name, data in read.items()})
        self.subject.sha256.verify(actual, what=self.path.name)
        return WithData(read[self.path.name], {name: read[name] for name in files})

    def verify(self) -> None:
        """Hash the file (with external data: all its files) again. Raises DigestMismatch."""
        if self.subject.external_data:
            files = [self.path.name, *self.subject.external_data]
            actual = Digest.of_manifest(self.path.parent, files)
        else:
            actual = Digest.of_file(self.path)
        self.subject.sha256.verify(actual, what=self.path.name)

    def is_copy_of(self, other: TestedFile) -> bool:
        """Return True if both have the same bytes, under whatever name, and the same external
        data. Raises StorageError."""
        if self.subject.sha256 == other.subject.sha256:
            return True
        names = self.subject.external_data  # the digest of such a file is also over its name
        return (
            bool(names)
            and names == other.subject.external_data
            and Digest.of_file(self.path) == Digest.of_file(other.path)
            and all(
                Digest.of_file(self.path.parent / name) == Digest.of_file(other.path.parent / name)
                for name in names
            )
        )


_DATA_FOLDER = "session.model_external_initializers_file_folder_path"


class EditableFile:
    """The graph of a file, and sessions of edited copies of it. Raises DigestMismatch."""

    def __init__(self, candidate: TestedFile) -> None:
        self._loaded = loaded = candidate.loadable()
        if isinstance(loaded, str):
            self.model = onnx.load(loaded, load_external_data=False)
        else:
            data = loaded.model if isinstance(loaded, WithData) else loaded
            self.model = onnx.load_from_string(data)
        if self.model.functions:
            self.model = inline_functions(self.model)

    def session(
        self, edited: onnx.ModelProto, options: Any = None, setup: OrtSetup | None = None
    ) -> Any:
        """Open a session of an edited graph with the data of the file. The default is the CPU
        without optimizations. Raises what ONNX Runtime raises."""
        setup = setup or plain_setup("ort-cpu")
        options = options or session_options(setup, threads=1, deterministic=False)
        loaded, data = self._loaded, edited.SerializeToString()
        if isinstance(loaded, str):
            options.add_session_config_entry(_DATA_FOLDER, str(Path(loaded).parent))
        whole = WithData(data, loaded.data) if isinstance(loaded, WithData) else data
        return open_session(whole, options, setup)


class ExportNote(Record):
    """The record of an export and the file that it is about."""

    subject_sha256: Sha256
    """Of the file with its external data, as in `Subject`."""
    record: ExportRecord

    @classmethod
    def from_record(cls, subject: Subject, record: ExportRecord) -> Self:
        """The note on a file that was exported."""
        return cls(subject_sha256=subject.sha256, record=record)

    def verify(self, subject: Subject, *, path: Path) -> None:
        """Raise DigestMismatch unless the note is about this file, which is at `path`."""
        if subject.sha256 != self.subject_sha256:
            raise DigestMismatch(
                f"{path} has digest {subject.sha256}, the record of the export is about "
                f"{self.subject_sha256}. Give the record that was written beside this very file "
                f"({note_path(path).name}), or export again."
            )


def load_note(model: Path) -> ExportNote | None:
    """Read the note on a file, if there is one. Raises EvidenceError, StorageError."""
    path = note_path(model)
    return ExportNote.load(path) if path.is_file() else None


def note_path(model: Path) -> Path:
    """Return the path of the note on a file: `model.onnx.export.json`."""
    return model.with_name(f"{model.name}.export.json")


PREFIX = "parity_gate."

_STACK_TRACE = "pkg.torch.onnx.stack_trace"

_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][^/\\\s:'\"()]+)+[/\\]")

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def described(
    *, strategy: str, opset_asked: int | str, rungs: Iterable[str], source: Source | None
) -> dict[str, str]:
    """The metadata of a file. What is not known is left out."""
    facts = {
        "strategy": strategy,
        "opset_asked": str(opset_asked),
        "rungs": "\n".join(rungs),
        "factory": source.factory if source else None,
        "checkpoint_sha256": source.checkpoint_sha256 if source else None,
        "preprocess_sha256": source.preprocess_sha256 if source else None,
    }
    return {PREFIX + key: str(value) for key, value in facts.items() if value}


def impersonal(text: str) -> str:
    """`text` in one line, without folders and memory addresses: the same on every machine."""
    return _ADDRESS.sub("0x", _FOLDERS.sub("", " ".join(text.split())))


def stamp(model: onnx.ModelProto, metadata: dict[str, str]) -> None:
    """Give `model` the metadata, and take from it what names files of this machine."""
    kept = [(p.key, p.value) for p in model.metadata_props if not p.key.startswith(PREFIX)]
    del model.metadata_props[:]
    for key, value in (*kept, *metadata.items()):
        model.metadata_props.add(key=key, value=value)
    for node in nodes_of(model):
        node.ClearField("doc_string")
        properties = [(p.key, p.value) for p in node.metadata_props if p.key != _STACK_TRACE]
        del node.metadata_props[:]
        for key, value in properties:
            node.metadata_props.add(key=key, value=value)


def stamp_file(path: Path, metadata: dict[str, str]) -> None:
    """The same for the single file `path`, in place. Raises OSError."""
    model = onnx.ModelProto.FromString(path.read_bytes())
    stamp(model, metadata)
    path.write_bytes(model.SerializeToString(deterministic=True))


QUANTIZED_FROM = "parity_gate.quantized_from"
"""Key in the file's metadata: digest of the exact file."""


def quantized_from(path: Path) -> str | None:
    """The digest of the exact file, `sha256:…`; None where the file names none.

    Raises OnnxFileError for a file that is no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, OSError
        raise OnnxFileError(f"{path} can't be read as an ONNX model: {error}.") from error
    found = [entry.value for entry in model.metadata_props if entry.key == QUANTIZED_FROM]
    return found[0] if len(found) == 1 else None
