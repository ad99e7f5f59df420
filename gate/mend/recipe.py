"""recipe.yaml: the steps that made a file that passed, for `gate export --recipe`."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gate.data.batch_axes import arrange, bind_samples
from gate.data.samples import SampleSet
from gate.errors import DataError, ExportError, PolicyError
from gate.export.export import export_model
from gate.export.quantize import QuantizeSettings, quantize
from gate.measure.job import EvaluationData, Reference
from gate.mend.mixed_precision import Float16Conversion, save_model
from gate.mend.rewrites import FUNCTIONS, REWRITES, GraphEdit, edit, replaced_functions
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import ExportNote, load_note, note_path
from gate.records.evidence import ExportRecord
from gate.records.export import ExportSettings
from gate.storage import files
from gate.storage.digest import Digest
from gate.storage.record import Count, Measured, Record, Sha256, added_field
from gate.storage.yaml_section import load_section

Stage = Literal["export", "optimizers", "rewrite", "mixed_precision", "quantization"]

RECIPE = "recipe.yaml"

MODEL = "model.onnx"

_EDITED = ("edit_", "replaced_functions")
"""Prefixes of settings in an export record that list changes of the model's graph."""


Feed = Mapping[str, NDArray[Any]]
"""Arrays by the names of the file's inputs, shape (batch, ...)."""


class Float16Settings(Record):
    """Settings of a conversion to float16."""

    float32_nodes: tuple[str, ...] = ()
    """Names of nodes that stay in float32."""


class Float32Layers(Record):
    """The float32 layers of a float16 or int8 file."""

    count: Count
    share: float
    """Share of the nodes that compute in float32 in the original file; for an int8 file, share of
    the layers that can be quantized."""
    sensitivity: dict[str, Measured] = Field(default={})
    """Error of the output if only this layer is quantized, in units of the bound; empty: not
    measured."""

    @classmethod
    def from_layers(
        cls, kept: Sequence[str], layers: Sequence[str], sensitivity: Mapping[str, float]
    ) -> Float32Layers:
        """Create the record of `kept` among `layers`."""
        share = round(len(kept) / len(layers), 4)
        return cls(count=len(kept), share=share, sensitivity=dict(sensitivity))


class Steps(Record):
    """The steps from the model to the file, in this order."""

    export: ExportSettings | None = None
    """None: `Inputs.file` is used instead of an export."""
    functions: tuple[str, ...] = ()
    """Functions of torch that are replaced during the export."""
    edits: tuple[GraphEdit, ...] = ()
    """Edits of the graph."""
    float16: Float16Settings | None = added_field(None)
    """None: no conversion."""
    quantize: QuantizeSettings | None = added_field(None)
    """None: no quantization. Calibrated on every fourth sample of the inputs, starting with the
    first (`calibration_of`)."""

    @property
    def text(self) -> str:
        """The steps in one line, for tables."""
        if self.export is None:
            parts = ["the file as it is"]
        else:
            folding = "" if self.export.do_constant_folding else ", not folded"
            names = "" if self.export.output_names is None else ", names of the file"
            parts = [f"{self.export.strategy}, opset {self.export.opset}{folding}{names}"]
        parts += [f"{name} by other functions" for name in self.functions]
        parts += [f"{edit.rewrite} at {len(edit.at)} places" for edit in self.edits]
        if self.float16 is not None:
            parts.append(f"float16, {len(self.float16.float32_nodes)} nodes named for float32")
        if self.quantize is not None:
            kinds = f"{'channel' if self.quantize.per_channel else 'tensor'}"
            kinds += ", symmetric" if self.quantize.symmetric_activations else ""
            parts.append(f"int8 per {kinds}, {len(self.quantize.exclude)} layers excluded")
        return "; ".join(parts)


class Inputs(Record):
    """The inputs of a recipe, with digests."""

    factory: str
    checkpoint: str | None = None
    checkpoint_sha256: Sha256 | None = None
    preprocessing: str | None = None
    samples: str
    """The argument of `--inputs`."""
    samples_sha256: Sha256
    batch_axes: dict[str, int | None] = Field(default={})
    file: str | None = None
    """The ONNX file passed to `--file`."""
    file_sha256: Sha256 | None = None


class Verification(Record):
    """The verification of the file."""

    samples: Count
    """Number of samples, which the search did not use."""
    policy_sha256: Sha256
    runtimes: tuple[str, ...]
    """The measured runtimes. In others the file is not verified."""
    worst_ratio: Measured | None = None
    rounded_ratio: Measured | None = added_field(None)
    """For a float16 file: the worst ratio of a copy that rounds each float16 value on the CPU, like
    a device. None: not a float16 file."""
    not_measured: tuple[str, ...] = added_field(())
    """Runtimes of the policy that this machine lacks. The file is not verified in them."""


class SearchRecord(Record):
    """The effort of the search."""

    budget: Count
    """Largest number of forward passes."""
    forwards: Count
    time_limit_s: float | None = None
    ended_by: Literal["passed", "budget", "time", "interrupt", "candidates"]


class Recipe(Record):
    """The content of recipe.yaml."""

    schema_version: Literal[1] = 1
    stage: Stage
    inputs: Inputs
    steps: Steps
    session_options: dict[str, dict[str, tuple[str, ...]]] = Field(default={})
    """By runtime, options that every session of the file needs."""
    float32: Float32Layers | None = added_field(None)
    """For a converted or quantized file."""
    sha256: Sha256
    """The digest of the file."""
    verified: Verification
    search: SearchRecord
    versions: dict[str, str] = Field(default={})

    def write(self, path: Path) -> None:
        """Write the recipe as YAML. Raises StorageError."""
        write_yaml(path, self.to_plain())

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a recipe. Raises PolicyError if it is invalid."""
        recipe = load_section(cls, path, None)
        unknown = [
            *(name for name in recipe.steps.functions if name not in FUNCTIONS),
            *(edit.rewrite for edit in recipe.steps.edits if edit.rewrite not in REWRITES),
        ]
        if unknown:
            raise PolicyError(f"{path}: '{unknown[0]}' is not a rewrite of this version of gate.")
        return recipe


def write_yaml(path: Path, plain: Mapping[str, Any]) -> None:
    """Write JSON values as YAML. Raises StorageError."""
    from ruamel.yaml import YAML

    stream = io.StringIO()
    YAML().dump(plain, stream)
    files.write_text(path, stream.getvalue())


@dataclass(frozen=True)
class Builder:
    """Builds files from steps, in a search or from a recipe."""

    reference: Reference
    example: Mapping[str, NDArray[Any]]
    file: Path | None = None
    """The file passed to `--file`."""
    calibration: EvaluationData | None = None
    """The calibration samples of int8 files; None: there are no int8 files."""

    def build(self, steps: Steps, folder: Path) -> Path:
        """Create `model.onnx` and the note of its export in an empty folder; return the model's
        path.

        Raises GateError.
        """
        return self._build(steps, folder)[0]

    def steps_with_digests(self, steps: Steps, folder: Path) -> Steps:
        """Build the file; return the steps with the digests of each edit."""
        return self._build(steps, folder)[1]

    def _build(self, steps: Steps, folder: Path) -> tuple[Path, Steps]:
        path = folder / MODEL
        record = self._write(steps, path)
        edits = edit(path, steps.edits)
        added = {f"edit_{index}": applied.text for index, applied in enumerate(edits)}
        if steps.functions:
            added["replaced_functions"] = ",".join(steps.functions)
        if steps.float16 is not None:
            nodes = steps.float16.float32_nodes
            save_model(Float16Conversion(path).convert(nodes), path)
            added |= {"precision": "float16", "float32_nodes": json.dumps(nodes)}
        settings = {} if record is None else {**record.settings, **added}
        if record is not None:
            record = record.model_copy(update={"settings": settings})
        if steps.quantize is not None:
            if self.calibration is None:
                raise ExportError("quantizing the file needs calibration samples.")
            data = replace(self.calibration, batch_size=steps.quantize.batch_size)
            feeds = iter(make_feeds(path, data))
            record = quantize(path, feeds, path, settings=steps.quantize).record
            kept = {name: text for name, text in settings.items() if name.startswith(_EDITED)}
            record = record.model_copy(update={"settings": {**record.settings, **kept}})
        subject = read_subject(path)
        if record is not None:
            ExportNote.from_record(subject, record).save(note_path(path))
        return path, steps.model_copy(update={"edits": edits})

    def _write(self, steps: Steps, path: Path) -> ExportRecord | None:
        if steps.export is None:
            if self.file is None:
                raise ExportError("the recipe has no export and names no file.")
            for name in read_subject(self.file).external_data:
                (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.file.parent / name, path.parent / name)
            shutil.copyfile(self.file, path)
            return record_of(self.file)
        with warnings.catch_warnings(), replaced_functions(steps.functions):
            warnings.simplefilter("ignore")  # of the model's code; the exporters' are recorded
            exported = export_model(
                self.reference.module,
                self.example,
                settings=steps.export,
                output=path,
                source=self.reference.source,
                replaced=steps.functions,
            )
        return exported.record


def make_feeds(exact: Path, data: EvaluationData) -> list[Feed]:
    """Return the samples in batches by the names of the file's inputs. Raises DataError."""
    subject = read_subject(exact)
    samples = arrange(data.samples, subject.inputs, subject.outputs)
    binding = bind_samples(subject.inputs, samples, batch_size=data.batch_size)
    return [binding.by_input(batch) for batch in samples.batches(binding.batch_size)]


def record_of(file: Path) -> ExportRecord | None:
    """Return a file's export record; None if its note belongs to another file."""
    note = load_note(file)
    if note is None or note.subject_sha256 != read_subject(file).sha256:
        return None
    return note.record


def example_of(samples: SampleSet, settings: ExportSettings) -> dict[str, NDArray[Any]]:
    """Return the samples for the export: those of the searching half.

    No sample that verifies the file is used.
    """
    count = samples.count
    if count is None:
        return dict(samples.whole())
    count_needed = 2 * settings.batch_size + 2
    return dict(samples.at(range(0, count, 2)[:count_needed]))


def halves(data: EvaluationData, *, min_samples: int = 1) -> tuple[EvaluationData, EvaluationData]:
    """Return every other sample from the first on, for searching, and the others, for verifying.

    Both are held in memory. Raises DataError for fewer than two samples, or if the second half is
    smaller than `min_samples`.
    """
    count = data.samples.count
    if count is None:
        raise DataError(
            "gate mend cuts the samples in two halves, and one call is one sample here. Name the "
            "axis of the samples: --batch-axis NAME=AXIS."
        )
    if count < 2:
        raise DataError(
            f"--inputs has {count} sample. gate mend needs at least 2: one half of the samples "
            "finds the export, the other half verifies it. Add samples."
        )
    if count // 2 < min_samples:
        raise DataError(
            f"--inputs has {count} samples, and gate mend verifies the file on {count // 2} of "
            f"them; the policy's gate.min_samples is {min_samples}. Give at least "
            f"{2 * min_samples} samples."
        )
    return _select_samples(data, range(0, count, 2)), _select_samples(data, range(1, count, 2))


def calibration_of(searched: EvaluationData) -> EvaluationData:
    """Return every other sample of the searching half, for calibrating int8 files.

    The search also measures the other samples, so values beyond the calibrated ranges count.
    """
    count = len(searched.samples)
    return _select_samples(searched, range(0, count, 2)) if count > 1 else searched


def _select_samples(data: EvaluationData, indices: Sequence[int]) -> EvaluationData:
    annotations, rows = data.annotations, list(indices)
    labels = annotations.labels
    if isinstance(labels, np.ndarray):
        labels = labels[rows]
    elif labels is not None:
        labels = [labels[row] for row in rows]
    columns = {
        name: tuple(texts[row] for row in rows) for name, texts in annotations.columns.items()
    }
    return replace(
        data,
        samples=data.samples.take(rows),
        labels=None if data.labels is None else data.labels[rows],
        annotations=replace(annotations, labels=labels, columns=columns),
        origin=None,
    )


def rebuild(recipe: Recipe, output: Path) -> ExportNote | None:
    """Build the file of a recipe again as `output`; return the note of its export.

    Raises GateError; DigestMismatch if an input or the file differs from the recipe.
    """
    inputs = recipe.inputs
    checkpoint = Path(inputs.checkpoint) if inputs.checkpoint else None
    spec = Path(inputs.preprocessing) if inputs.preprocessing else None
    if checkpoint is not None and inputs.checkpoint_sha256 is not None:
        inputs.checkpoint_sha256.verify(Digest.from_file(checkpoint), label=str(checkpoint))
    if inputs.file is not None and inputs.file_sha256 is not None:
        sha256 = read_subject(Path(inputs.file)).sha256
        inputs.file_sha256.verify(sha256, label=inputs.file)
    reference = Reference.from_factory(
        inputs.factory, checkpoint=checkpoint, preprocessing=spec, untrained=True
    )
    samples = SampleSet.open(inputs.samples, preprocessing=reference.spec)
    samples = samples.with_batch_axes(inputs.batch_axes)
    inputs.samples_sha256.verify(samples.digest(), label=inputs.samples)
    settings = recipe.steps.export or ExportSettings()
    builder = Builder(
        reference,
        example_of(samples, settings),
        Path(inputs.file) if inputs.file else None,
        calibration_of(halves(EvaluationData.from_data(samples))[0])
        if recipe.steps.quantize is not None
        else None,
    )
    with files.scratch(output) as folder:
        path = builder.build(recipe.steps, folder)
        subject = read_subject(path)
        recipe.sha256.verify(subject.sha256, label=f"the file of {RECIPE}")
        note = load_note(path)
        copy_file(path, output)
    return note


def copy_file(path: Path, output: Path) -> None:
    """Copy a file with its external data and its note to `output`. Raises StorageError."""
    for name in read_subject(path).external_data:
        files.write_bytes(output.parent / name, (path.parent / name).read_bytes())
    if note_path(path).is_file():
        files.write_bytes(note_path(output), note_path(path).read_bytes())
    files.write_bytes(output, path.read_bytes())
