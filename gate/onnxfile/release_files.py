"""The files of a release, each with what it says of itself: one subject, one digest over all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gate.onnxfile.candidate import Candidate
from gate.onnxfile.release_file import ReleaseFile
from gate.records.evidence import Subject, SubjectPart, TensorSpec
from gate.storage.digest import Digest


@dataclass(frozen=True)
class ReleaseFiles:
    """The release file, and the ONNX file of each part."""

    path: Path
    """Of the release file."""
    file: ReleaseFile
    parts: Mapping[str, Candidate]
    """By name, in the order of the release file."""

    def subject(
        self, *, inputs: tuple[TensorSpec, ...] = (), outputs: tuple[TensorSpec, ...] = ()
    ) -> Subject:
        """Of all files together: the digest is that of the manifest over the release file, the
        ONNX files and their external data. `inputs`, `outputs`: of the chain, which only running it
        tells. Raises StorageError.
        """
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
            sha256=Digest.of_manifest(folder, (self.path.name, *files)),
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
