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
    """A release that was quantized, and how."""

    path: Path
    """Of its release file."""
    subject: Subject
    of: Subject
    """The exact release."""
    records: Mapping[str, ExportRecord]
    """By part; one without a record is the exact file."""


@dataclass(frozen=True, kw_only=True)
class ReleaseQuantization:
    """How a release becomes a quantized one: each part is calibrated on what the chain gives it,
    and parts that are not quantized are copied."""

    model: nn.Module
    """Whose modules the parts compute like: the chain runs with them."""
    samples: SampleSet
    """For the chain; the first `settings.samples` of them are used."""
    settings: QuantizeSettings
    """For each part; it is calibrated on all that the chain gives it for those samples."""
    only: tuple[str, ...] = ()
    """Parts to quantize; none: all that can be."""
    progress: Callable[[int, int], None] = lambda _done, _total: None
    """Called with the rows that are calibrated on, of all parts, and their total."""

    def write(self, path: Path, output: Path) -> QuantizedRelease:
        """Write the twin of the release file `path`: the release file `output`, and the parts
        beside it. The same files, samples and settings give the same bytes.

        Raises ExportError with the name of a part that can't be quantized, or is none, and where
        nothing in any can be; what opening the release and running its chain raises; StorageError,
        also where the exact files would be overwritten. An older twin stays then.
        """
        file = ReleaseFile.load(path)
        unnamed = sorted({*self.only} - {*file.parts})
        if unnamed:
            raise ExportError(
                f"{path} has no part {', '.join(unnamed)}: it has {', '.join(file.parts)}. Name "
                "some of them, or none for all."
            )
        if output.parent.resolve() == path.parent.resolve():
            raise StorageError(
                f"{output} would put the quantized parts over the exact ones beside {path}. Name a "
                "folder of its own, such as twin/release.yaml."
            )
        release = MultiFileRelease.open(
            path,
            model=self.model,
            samples=self.samples,
            batch_size=self.settings.batch_size,
            most=self.settings.samples,
        )
        try:
            with files.scratch(output) as room:
                records = self._fill(room / output.name, release, file)
                _move(room, output)
        except OSError as error:
            raise StorageError(
                f"cannot write {output} and its parts: {error.strerror or error}. Free space or "
                "fix permissions, then repeat."
            ) from error
        of = release.subject
        made = release_within(output, None).subject(inputs=of.inputs, outputs=of.outputs)
        return QuantizedRelease(output, made, of, records)

    def _fill(
        self, path: Path, release: MultiFileRelease, file: ReleaseFile
    ) -> dict[str, ExportRecord]:
        """Write the twin whose release file is `path`; gives how its parts were quantized."""
        uses = Counter(entry.file for entry in file.parts.values())
        entries, records = dict(file.parts), {}
        batches = self._batches(release)
        for part in release.parts:
            entry = file.parts[part.name]
            # Two parts of one file are given other things, and get a file each.
            own = f"{part.name}.quantized.onnx" if uses[entry.file] > 1 else entry.file
            record = None
            if part.name in batches:
                record = self._quantized(part, batches[part.name], path.parent / own)
            if record is None:
                _copy(part, path.parent / entry.file)
            else:
                entries[part.name] = entry.model_copy(update={"file": own})
                records[part.name] = record
        if not records:
            raise ExportError(
                f"nothing in {', '.join(self.only or file.parts)} could be quantized: no part has "
                "an operator that the quantizer knows (Conv, MatMul, Gemm and others). Serve the "
                "exact release."
            )
        files.write_text(path, release_text(file.chain, entries))
        return records

    def _batches(self, release: MultiFileRelease) -> dict[str, tuple[SampleSet, Batches]]:
        """Yield what the chain passes to each part that is to be quantized, also in batches for its
        file."""
        wanted = [part for part in release.parts if not self.only or part.name in self.only]
        given = {part.name: release.part_inputs(part) for part in wanted}
        total, before = sum(map(len, given.values())), 0
        found = {}
        for part in wanted:
            samples = given[part.name]
            found[part.name] = samples, self._rows(part, samples, before=before, total=total)
            before += len(samples)
        return found

    def _rows(self, part: Part, samples: SampleSet, *, before: int, total: int) -> Batches:
        size, done = self.settings.batch_size, before
        binding = bind_samples(part.candidate.subject.inputs, samples, batch_size=size)
        for batch in samples.batches(binding.batch_size):
            done += binding.batch_size
            self.progress(min(done, before + len(samples)), total)
            yield binding.by_input(batch)  # after the last one none is read

    def _quantized(
        self, part: Part, rows: tuple[SampleSet, Batches], output: Path
    ) -> ExportRecord | None:
        """How it was quantized; None where nothing in it could be."""
        samples, batches = rows
        settings = self.settings.model_copy(update={"samples": len(samples)})
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            path, axes = part.candidate.path, samples.layout
            return quantize(path, batches, output, settings=settings, axes=axes).record
        except NothingQuantized:
            return None
        except ExportError as error:
            raise ExportError(
                f"the part {part.name}: {error} Or name the others alone: --part NAME."
            ) from error


def _copy(part: Part, target: Path) -> None:
    """Byte by byte, with its external data."""
    candidate = part.candidate
    for name in (candidate.path.name, *candidate.subject.external_data):
        own = target.parent / name
        own.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(candidate.path.parent / name, own)


def _move(room: Path, output: Path) -> None:
    """Each file into its place, the one that names the others last. Whoever ends in between leaves
    no release file: an older one would name parts of two twins."""
    parts = [path for path in sorted(room.rglob("*")) if path.is_file()]
    release = room / output.name
    output.unlink(missing_ok=True)
    for made in (*(path for path in parts if path != release), release):
        target = output.parent / made.relative_to(room)
        target.parent.mkdir(parents=True, exist_ok=True)
        made.replace(target)
