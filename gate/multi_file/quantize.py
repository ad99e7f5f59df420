"""Write the quantized twin of a multi-file release."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gate.data.batch_axes import bind_samples
from gate.data.samples import SampleSet
from gate.errors import ExportError, NothingQuantized, StorageError
from gate.export.quantize import Batches, QuantizeSettings, quantize
from gate.multi_file.release import MultiFileRelease, Part
from gate.onnx_file.release_file import ReleaseFile, release_text
from gate.onnx_file.sandboxed_reading import release_within
from gate.records.evidence import ExportRecord, Subject
from gate.storage import files


@dataclass(frozen=True)
class QuantizedRelease:
    """A quantized release, with the settings of each quantized part."""

    path: Path
    """Path of its release file."""
    subject: Subject
    of: Subject
    """The exact release."""
    records: Mapping[str, ExportRecord]
    """By part. A part without a record is a copy of the exact file."""


@dataclass(frozen=True, kw_only=True)
class ReleaseQuantization:
    """Quantizes a release: calibrates each part on the tensors that the chain passes to it, and
    copies parts that are not quantized."""

    model: nn.Module
    """The reference of the release. The chain runs with its modules."""
    samples: SampleSet
    """Samples of the chain. The first `settings.samples` of them are used."""
    settings: QuantizeSettings
    """Settings of each part."""
    only: tuple[str, ...] = ()
    """Parts to quantize. Empty: all parts that can be quantized."""
    progress: Callable[[int, int], None] = lambda _count, _total: None
    """Called with the number of calibration rows that are done, over all parts, and their total."""

    def write(self, path: Path, output: Path) -> QuantizedRelease:
        """Write the quantized twin of the release file `path`: the release file `output` and its
        parts in the same folder. The same files, samples and settings give the same bytes.

        Raises ExportError for an unknown part, a part that can't be quantized, or if no part can
        be; StorageError, also if the exact files would be overwritten; and the exceptions of
        `MultiFileRelease.open`. An existing twin is then left unchanged.
        """
        file = ReleaseFile.load(path)
        unnamed = sorted({*self.only} - {*file.parts})
        if unnamed:
            raise ExportError(
                f"{path} has no part {', '.join(unnamed)}; its parts: {', '.join(file.parts)}. "
                "Name some of these, or omit --part to quantize all of them."
            )
        if output.parent.resolve() == path.parent.resolve():
            raise StorageError(
                f"writing {output} would overwrite the exact parts next to {path}. Choose an "
                "output in another folder, such as twin/release.yaml."
            )
        release = MultiFileRelease.open(
            path,
            model=self.model,
            samples=self.samples,
            batch_size=self.settings.batch_size,
            most=self.settings.samples,
        )
        try:
            with files.scratch(output) as folder:
                records = self._fill(folder / output.name, release, file)
                _move(folder, output)
        except OSError as error:
            raise StorageError(
                f"cannot write {output} and its parts: {error.strerror or error}. Free space or "
                "fix permissions, then retry."
            ) from error
        of = release.subject
        subject = release_within(output, None).subject(inputs=of.inputs, outputs=of.outputs)
        return QuantizedRelease(output, subject, of, records)

    def _fill(
        self, path: Path, release: MultiFileRelease, file: ReleaseFile
    ) -> dict[str, ExportRecord]:
        """Write the twin with the release file `path`; return the records of quantized parts."""
        uses = Counter(entry.file for entry in file.parts.values())
        entries, records = dict(file.parts), {}
        batches = self._batches(release)
        for part in release.parts:
            entry = file.parts[part.name]
            # Two parts that share a file are calibrated on different tensors: one file for each.
            name = f"{part.name}.quantized.onnx" if uses[entry.file] > 1 else entry.file
            record = None
            if part.name in batches:
                record = self._quantize_part(part, batches[part.name], path.parent / name)
            if record is None:
                _copy(part, path.parent / entry.file)
            else:
                entries[part.name] = entry.model_copy(update={"file": name})
                records[part.name] = record
        if not records:
            raise ExportError(
                f"nothing in {', '.join(self.only or file.parts)} could be quantized: no part has "
                "an operator that the quantizer supports (Conv, MatMul, Gemm and others). Serve "
                "the exact release."
            )
        files.write_text(path, release_text(file.chain, entries))
        return records

    def _batches(self, release: MultiFileRelease) -> dict[str, tuple[SampleSet, Batches]]:
        """Return the calibration samples of each part to quantize, also as batches for its file."""
        parts = [part for part in release.parts if not self.only or part.name in self.only]
        inputs = {part.name: release.part_inputs(part) for part in parts}
        total, before = sum(map(len, inputs.values())), 0
        batches = {}
        for part in parts:
            samples = inputs[part.name]
            batches[part.name] = samples, self._rows(part, samples, before=before, total=total)
            before += len(samples)
        return batches

    def _rows(self, part: Part, samples: SampleSet, *, before: int, total: int) -> Batches:
        size, finished = self.settings.batch_size, before
        binding = bind_samples(part.candidate.subject.inputs, samples, batch_size=size)
        for batch in samples.batches(binding.batch_size):
            finished += binding.batch_size
            self.progress(min(finished, before + len(samples)), total)
            yield binding.by_input(batch)  # Code after the last yield would never run.

    def _quantize_part(
        self, part: Part, calibration: tuple[SampleSet, Batches], output: Path
    ) -> ExportRecord | None:
        """Quantize one part; return its record, or None if nothing in it could be quantized."""
        samples, batches = calibration
        settings = self.settings.model_copy(update={"samples": len(samples)})
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            path, axes = part.candidate.path, samples.layout
            return quantize(path, batches, output, settings=settings, axes=axes).record
        except NothingQuantized:
            return None
        except ExportError as error:
            raise ExportError(
                f"the part {part.name}: {error} Or quantize only the other parts: --part NAME."
            ) from error


def _copy(part: Part, target: Path) -> None:
    """Copy the part's file and its external data."""
    candidate = part.candidate
    for name in (candidate.path.name, *candidate.subject.external_data):
        copy = target.parent / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(candidate.path.parent / name, copy)


def _move(folder: Path, output: Path) -> None:
    """Move all files from `folder` to the folder of `output`, the release file last. If this is
    interrupted, there is no release file: an older one would name parts of two twins."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    release = folder / output.name
    output.unlink(missing_ok=True)
    for path in (*(path for path in paths if path != release), release):
        target = output.parent / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
