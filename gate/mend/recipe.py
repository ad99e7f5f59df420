"""recipe.yaml: how a file that passed was made, so that `gate export --recipe` makes it again."""

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
"""How settings of an export's record begin that list changes of the model's graph."""


Feed = Mapping[str, NDArray[Any]]
"""Arrays by the names of the file's inputs, shape (batch, ...)."""


class Float16Settings(Record):
    """How a file is converted to float16."""

    float32_nodes: tuple[str, ...] = ()
    """Names of nodes that stay in float32."""


class Float32Layers(Record):
    """What of a float16 or int8 file computes in float32."""

    count: Count
    share: float
    """Of all nodes that compute in float32 in the file before; of an int8 file, of the layers that
    the quantizer can quantize."""
    sensitivity: dict[str, Measured] = Field(default={})
    """By layer the error of the output if it alone is quantized, in units of the bound; empty:
    it was not measured."""

    @classmethod
    def from_layers(
        cls, kept: Sequence[str], layers: Sequence[str], sensitivity: Mapping[str, float]
    ) -> Float32Layers:
        """Count the layers that are kept in float32, of these."""
        share = round(len(kept) / len(layers), 4)
        return cls(count=len(kept), share=share, sensitivity=dict(sensitivity))


class Steps(Record):
    """What is done to get from the model to the file, in this order."""

    export: ExportSettings | None = None
    """None: the file of `Inputs.file` is taken as it is."""
    functions: tuple[str, ...] = ()
    """Functions of torch that are computed in another form while exporting."""
    edits: tuple[GraphEdit, ...] = ()
    """Edits of the graph."""
    float16: Float16Settings | None = added_field(None)
    """None: it is not converted."""
    quantize: QuantizeSettings | None = added_field(None)
    """None: it is not quantized. Else it is calibrated on every fourth of the samples of the
    inputs, from the first on (`calibration_of`)."""

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
        parts += [f"{one.rewrite} at {len(one.at)} places" for one in self.edits]
        if self.float16 is not None:
            parts.append(f"float16, {len(self.float16.float32_nodes)} nodes named for float32")
        if self.quantize is not None:
            kinds = f"{'channel' if self.quantize.per_channel else 'tensor'}"
            kinds += ", symmetric" if self.quantize.symmetric_activations else ""
            parts.append(f"int8 per {kinds}, {len(self.quantize.exclude)} layers excluded")
        return "; ".join(parts)


class Inputs(Record):
    """From what the file is made: what a recipe names, with digests."""

    factory: str
    checkpoint: str | None = None
    checkpoint_sha256: Sha256 | None = None
    preprocessing: str | None = None
    samples: str
    """What `--inputs` named."""
    samples_sha256: Sha256
    batch_axes: dict[str, int | None] = Field(default={})
    file: str | None = None
    """The ONNX file that `--file` named."""
    file_sha256: Sha256 | None = None


class Verification(Record):
    """By what the file was proven."""

    samples: Count
    """Those that the search did not use."""
    policy_sha256: Sha256
    runtimes: tuple[str, ...]
    """The runtimes that were measured. In another one the file is not proven."""
    worst_ratio: Measured | None = None
    rounded_ratio: Measured | None = added_field(None)
    """The worst ratio of a copy of a float16 file on the CPU that rounds each float16 value, as a
    device does; None: it is no such file."""
    not_measured: tuple[str, ...] = added_field(())
    """The runtimes of the policy that this machine does not have: the file is not verified in
    them."""


class SearchRecord(Record):
    """How long was searched."""

    budget: Count
    """Forward passes at most."""
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
    """By runtime, options with which every session of the file must be opened."""
    float32: Float32Layers | None = added_field(None)
    """Of a file that was converted or quantized."""
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
        """Read a recipe. Raises PolicyError where it is none."""
        recipe = load_section(cls, path, None)
        strange = [
            *(name for name in recipe.steps.functions if name not in FUNCTIONS),
            *(one.rewrite for one in recipe.steps.edits if one.rewrite not in REWRITES),
        ]
        if strange:
            raise PolicyError(f"{path}: '{strange[0]}' is no rewrite of this version of gate.")
        return recipe


def write_yaml(path: Path, plain: Mapping[str, Any]) -> None:
    """Write values of JSON as YAML. Raises StorageError."""
    from ruamel.yaml import YAML

    stream = io.StringIO()
    YAML().dump(plain, stream)
    files.write_text(path, stream.getvalue())


@dataclass(frozen=True)
class Builder:
    """Makes files by steps: while searching, and again by a recipe."""

    reference: Reference
    example: Mapping[str, NDArray[Any]]
    file: Path | None = None
    """The file that `--file` named."""
    calibration: EvaluationData | None = None
    """The samples on which int8 files are calibrated; None: none are made."""

    def build(self, steps: Steps, folder: Path) -> Path:
        """Make `model.onnx` and the note of its export in an empty folder; return the path of the
        model. Raises GateError."""
        return self._built(steps, folder)[0]

    def steps_made(self, steps: Steps, folder: Path) -> Steps:
        """Do the same; return the steps with the digests of each edit."""
        return self._built(steps, folder)[1]

    def _built(self, steps: Steps, folder: Path) -> tuple[Path, Steps]:
        path = folder / MODEL
        record = self._write(steps, path)
        edits = edit(path, steps.edits)
        if record is not None and edits:
            listed = {f"edit_{index}": one.text for index, one in enumerate(edits)}
            record = record.model_copy(update={"settings": {**record.settings, **listed}})
        if record is not None and steps.functions:
            names = {"replaced_functions": ",".join(steps.functions)}
            record = record.model_copy(update={"settings": {**record.settings, **names}})
        if steps.float16 is not None:
            record = _convert(path, steps.float16, record)
        if steps.quantize is not None:
            record = self._quantize(path, steps.quantize, record)
        subject = read_subject(path)
        if record is not None:
            ExportNote.from_record(subject, record).save(note_path(path))
        return path, steps.model_copy(update={"edits": edits})

    def _quantize(
        self, path: Path, settings: QuantizeSettings, before: ExportRecord | None
    ) -> ExportRecord:
        """Quantize a file in its place; return the record of it, which lists earlier edits."""
        if self.calibration is None:
            raise ExportError("the file is to be quantized, and there are no calibration samples.")
        data = replace(self.calibration, batch_size=settings.batch_size)
        made = quantize(path, iter(feeds_of(path, data)), path, settings=settings)
        stated = {} if before is None else before.settings
        edits = {name: value for name, value in stated.items() if name.startswith(_EDITED)}
        return made.record.model_copy(update={"settings": {**made.record.settings, **edits}})

    def _write(self, steps: Steps, path: Path) -> ExportRecord | None:
        if steps.export is None:
            if self.file is None:
                raise ExportError("the recipe takes a file as it is, and names none.")
            for name in read_subject(self.file).external_data:
                (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.file.parent / name, path.parent / name)
            shutil.copyfile(self.file, path)
            return record_of(self.file)
        with warnings.catch_warnings(), replaced_functions(steps.functions):
            warnings.simplefilter("ignore")  # of the model's own code; the exporters' are recorded
            exported = export_model(
                self.reference.module,
                self.example,
                settings=steps.export,
                output=path,
                source=self.reference.source,
                replaced=steps.functions,
            )
        return exported.record


def _convert(
    path: Path, settings: Float16Settings, before: ExportRecord | None
) -> ExportRecord | None:
    """Convert a file to float16 in its place; return the record of its export with the nodes."""
    save_model(Float16Conversion(path).convert(settings.float32_nodes), path)
    if before is None:
        return None
    stated = {"precision": "float16", "float32_nodes": json.dumps(settings.float32_nodes)}
    return before.model_copy(update={"settings": {**before.settings, **stated}})


def feeds_of(exact: Path, data: EvaluationData) -> list[Feed]:
    """Return the samples in batches by the names of the file's inputs. Raises DataError."""
    subject = read_subject(exact)
    samples = arrange(data.samples, subject.inputs, subject.outputs)
    binding = bind_samples(subject.inputs, samples, batch_size=data.batch_size)
    return [binding.by_input(batch) for batch in samples.batches(binding.batch_size)]


def record_of(file: Path) -> ExportRecord | None:
    """Return the record of the export of a file; None where its note is about another file."""
    note = load_note(file)
    if note is None or note.subject_sha256 != read_subject(file).sha256:
        return None
    return note.record


def example_of(samples: SampleSet, settings: ExportSettings) -> dict[str, NDArray[Any]]:
    """Return the samples with which the model is exported: those of the first half of the search,
    so that no sample that verifies the file had a part in it."""
    count = samples.count
    if count is None:
        return dict(samples.whole())
    wanted = 2 * settings.batch_size + 2
    return dict(samples.at(range(0, count, 2)[:wanted]))


def halves(data: EvaluationData, *, min_samples: int = 1) -> tuple[EvaluationData, EvaluationData]:
    """Return every other sample from the first on, and the others: to search, and to verify.

    Both are held in memory. Raises DataError for fewer than two samples, and where the second half
    is smaller than `min_samples`.
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
    return _taken(data, range(0, count, 2)), _taken(data, range(1, count, 2))


def calibration_of(searched: EvaluationData) -> EvaluationData:
    """Return every other sample of the half of the search, on which int8 files are calibrated: the
    search measures the others as well, so that values beyond the calibrated ranges count."""
    count = len(searched.samples)
    return _taken(searched, range(0, count, 2)) if count > 1 else searched


def _taken(data: EvaluationData, places: Sequence[int]) -> EvaluationData:
    annotations, rows = data.annotations, list(places)
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
    """Make the file of a recipe again, as `output`; return the note of its export.

    Raises GateError; DigestMismatch where the digest of an input or of the file is not that of the
    recipe.
    """
    inputs = recipe.inputs
    checkpoint = Path(inputs.checkpoint) if inputs.checkpoint else None
    spec = Path(inputs.preprocessing) if inputs.preprocessing else None
    if checkpoint is not None and inputs.checkpoint_sha256 is not None:
        inputs.checkpoint_sha256.verify(Digest.from_file(checkpoint), what=str(checkpoint))
    if inputs.file is not None and inputs.file_sha256 is not None:
        sha256 = read_subject(Path(inputs.file)).sha256
        inputs.file_sha256.verify(sha256, what=inputs.file)
    reference = Reference.from_factory(
        inputs.factory, checkpoint=checkpoint, preprocessing=spec, untrained=True
    )
    samples = SampleSet.open(inputs.samples, preprocessing=reference.spec)
    samples = samples.with_batch_axes(inputs.batch_axes)
    inputs.samples_sha256.verify(samples.digest(), what=inputs.samples)
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
        recipe.sha256.verify(subject.sha256, what=f"the file of {RECIPE}")
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
