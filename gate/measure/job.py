"""The inputs of a measurement: reference, file, data, policy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gate.data.array_files import open_labels
from gate.data.batch_axes import arrange, bind_samples
from gate.data.input_binding import InputBinding
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.errors import DataError, InputMismatch, ModelError
from gate.installation import package_versions
from gate.measure.work_units import MAX_UNITS, UnitWorkers
from gate.metrics.slices import Annotations
from gate.model.checkpoint import load_checkpoint
from gate.model.factory import is_onnx_file, parse_registered
from gate.model.loading import build_model, collect_code, require_same_weights
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import ExportNote, TestedFile
from gate.policy.metrics import MetricPolicy
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import ExportRecord, ModelCode, Source
from gate.records.runtime import RuntimeName
from gate.reference.reference import ReferenceModel
from gate.reference.torch_reference import as_reference
from gate.runtimes.runtime import Conditions, Session
from gate.runtimes.selection import SelectedRuntime
from gate.storage.arrays import Batch
from gate.storage.digest import Digest

_INTERPRETER = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "torchvision")
"""The packages that compute an ONNX reference."""

Progress = Callable[[int, int], None]
"""Called with the number of finished samples and the total."""


@dataclass(frozen=True)
class Reference:
    """The model that the file must match, with its origin."""

    model: nn.Module | ReferenceModel
    """An nn.Module or an implementation of `ReferenceModel`."""
    source: Source
    export: ExportRecord | None = None
    """The settings of the export, if known."""
    spec: PreprocessSpec | None = None
    """The preprocessing of the samples, if known."""
    note: ExportNote | None = None
    """Like `export`, but bound to the digest of the file; takes precedence."""
    checkpoint: Path | None = None
    loaded: bool = False
    """True if it was loaded by name, so that other processes can load it again."""
    is_reproducible: bool = True
    """False if it is unknown whether the factory always returns the same weights: the model is too
    large to build twice, or its factory works only once."""

    @property
    def module(self) -> nn.Module:
        """The PyTorch module; for an ONNX file, the module of its graph."""
        return as_reference(self.model).module

    @classmethod
    def from_factory(
        cls,
        factory: str,
        *,
        checkpoint: Path | None = None,
        preprocessing: Path | None = None,
        export_record: Path | None = None,
        untrained: bool = False,
    ) -> Reference:
        """Call `package.module:factory` and load a checkpoint; or read an ONNX file (`from_file`).

        `preprocessing`: the spec of the samples; its digest becomes part of the evidence.
        `export_record`: the record that gate export wrote. `untrained`: allow weights that differ
        on each call of the factory, which otherwise raise ModelError. Raises ModelError,
        CheckpointError, PolicyError, EvidenceError.
        """
        if is_onnx_file(factory):
            if checkpoint is not None or export_record is not None:
                raise ModelError(
                    f"{factory} is an ONNX file, which has weights: remove --checkpoint and "
                    "--export-record."
                )
            return cls.from_file(Path(factory), preprocessing=preprocessing)
        if parse_registered(factory) is not None:
            raise ModelError(
                f"{factory} is a registered model, which only gate check and gate locate can load. "
                "Name its ONNX file instead."
            )
        note = ExportNote.load(export_record) if export_record else None
        model = build_model(factory)
        code = collect_code(model, factory=factory)
        sha256 = load_checkpoint(model, checkpoint) if checkpoint else None
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ModelError(
                f"{factory} returned a model on the device 'meta', where tensors have no values. "
                "Build it on the CPU and load its weights."
            )
        same = untrained or sha256 is not None or require_same_weights(factory, model)
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing else None
        digest = spec.digest() if spec else None
        source = Source(
            factory=factory, checkpoint_sha256=sha256, preprocess_sha256=digest, code=code
        )
        return cls(
            model,
            source,
            spec=spec,
            note=note,
            checkpoint=checkpoint,
            loaded=True,
            is_reproducible=same,
        )

    @classmethod
    def from_file(cls, path: Path, *, preprocessing: Path | None = None) -> Reference:
        """Read an ONNX file; its nodes become PyTorch modules.

        `preprocessing`: as in `from_factory`. Raises ModelError, OnnxFileError and PolicyError.
        """
        from gate.reference.onnx_file_reference import OnnxFileReference

        file = TestedFile(path, read_subject(path))
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing else None
        source = Source(
            factory=str(path),
            preprocess_sha256=spec.digest() if spec else None,
            code=ModelCode(files={}, packages=package_versions(_INTERPRETER)),
            onnx_sha256=file.subject.sha256,
        )
        return cls(OnnxFileReference.from_file(file), source, spec=spec, loaded=True)

    def named(self, name: str) -> Reference:
        """Return a copy with another name for the records."""
        return replace(self, source=self.source.model_copy(update={"factory": name}))

    @property
    def address(self) -> str:
        """The name by which other processes load it: the factory, or the path of the ONNX file."""
        file = self.model.file if isinstance(self.model, ReferenceModel) else None
        return self.source.factory if file is None else str(file)

    @classmethod
    def from_model(cls, model: Reference | ReferenceModel | nn.Module | Path | str) -> Reference:
        """Return the reference for a model, `package.module:factory` or an ONNX file.

        Raises ModelError.
        """
        if isinstance(model, cls):
            return model
        if isinstance(model, str | Path):
            return cls.from_factory(str(model))
        if not isinstance(model, nn.Module | ReferenceModel):
            raise ModelError(
                f"the reference is {model!r}. Expected an nn.Module, 'package.module:factory' or a "
                "gate.Reference."
            )
        kind = type(model)
        return cls(model, Source(factory=f"{kind.__module__}:{kind.__qualname__}"))


_SPLIT_FROM = 16
"""Minimum number of samples for which a single batch is split into two."""


class NamedRun(Protocol):
    """A session with the interface of ONNX Runtime's `run`."""

    def run(self, outputs: Sequence[str], feed: Batch) -> list[NDArray[Any]]:
        """Return the outputs with these names. Raises any exception."""


class Opener(Protocol):
    """Opens the files of a release as a consumer does."""

    def open_release(self, file: TestedFile) -> NamedRun:
        """Open this or another release with the same parts. Raises any exception."""


class Chained(Opener, Protocol):
    """Several files that are run as one model."""

    def session(
        self, chosen: SelectedRuntime, policy: Policy, *, conditions: Conditions
    ) -> Session:
        """Open all files in this runtime as one session. Raises any exception."""

    def jobs(self, release: MeasurementJob) -> Mapping[str, MeasurementJob]:
        """Return a job for each file and its submodule, by the name of the part."""


@dataclass(frozen=True)
class MeasurementJob:
    """The model, file, samples and policy of a measurement. Immutable."""

    model: nn.Module | ReferenceModel
    """The model as passed by the caller; `reference` is used for computing."""
    candidate: TestedFile
    samples: SampleSet
    policy: Policy
    batch_size: int = 32
    """Maximum batch size, see `bind`. A fixed batch axis of the file takes precedence."""
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""
    recordings: Mapping[RuntimeName, Path] = field(default_factory=dict)
    """Recorded outputs of other machines, by runtime name: a folder or a zip."""
    source_labels: bool = False
    """Read labels from the samples range by range, for workers that measure only a few units."""
    annotations: Annotations = field(default_factory=Annotations)
    """Labels and columns for the metrics of the policy."""
    chained: Chained | None = None
    """The files of a release, with `model` as their chain; None for a single ONNX file."""
    units: int = MAX_UNITS
    """Maximum number of units, in addition to the lead (`gate.measure.work_units`)."""
    source: Source | None = None
    """The origin of the model; None: only its class is recorded."""
    export: ExportRecord | None = None
    """The recorded settings of the export, if any."""

    def __post_init__(self) -> None:
        if self.annotations.labels is None and self.labels is not None:
            annotations = replace(self.annotations, labels=self.labels)
            object.__setattr__(self, "annotations", annotations)
        # `bind` reports samples that do not fit.
        with contextlib.suppress(InputMismatch, DataError):
            object.__setattr__(self, "samples", self._arranged())

    @cached_property
    def reference(self) -> ReferenceModel:
        """The model that the file must match."""
        return as_reference(self.model)

    def _arranged(self) -> SampleSet:
        subject = self.candidate.subject
        return arrange(
            self.samples, subject.inputs, subject.outputs, parameters=self.reference.parameters()
        )

    @classmethod
    def from_files(
        cls,
        onnx: Path,
        *,
        model: nn.Module | ReferenceModel,
        data: EvaluationData,
        policy: Policy,
    ) -> MeasurementJob:
        """Read one ONNX file. Raises OnnxFileError; ModelError if the reference is the same file,
        or shares only some of its names."""
        file = TestedFile(onnx, read_subject(onnx))
        return cls(
            as_reference(model).for_file(file),
            file,
            data.samples,
            policy,
            data.batch_size,
            data.labels,
            data.recordings,
            annotations=data.annotations,
            units=data.units,
        )

    @property
    def inputs(self) -> SampleSet:
        """The samples; NaN is allowed if the policy allows it."""
        return self.samples.allow_nan() if self.policy.nonfinite == "same_places" else self.samples

    def bind(self, *, batch_size: int | None = None) -> InputBinding:
        """Bind samples to the inputs of the file and of the model.

        `batch_size`: None for the measurement, which splits 16 or more samples into at least two
        batches: the first one warms up and can't be used for timing. Raises InputMismatch and
        DataError for samples that don't fit.
        """
        subject, samples = self.candidate.subject, self._arranged()
        count = len(samples)
        if batch_size is None:
            is_split = _SPLIT_FROM <= count <= self.batch_size
            batch_size = math.ceil(count / 2) if is_split else self.batch_size
        binding = bind_samples(
            subject.inputs,
            samples,
            batch_size=batch_size,
            parameters=self.reference.parameters(),
            reduced=self.policy.precision == "reduced",
        )
        return replace(binding, double=self.reference.keeps_double(self.candidate))


@dataclass(frozen=True)
class SamplesOrigin:
    """The arguments of `EvaluationData.open`."""

    inputs: str
    """A path, URL or the name of a data set."""
    labels: Path | None = None
    preprocessing: Path | None = None
    slices: Path | None = None


def open_annotations(
    origin: SamplesOrigin,
    metrics: Sequence[MetricPolicy],
    samples: int | None,
    *,
    source_labels: NDArray[np.int64] | None = None,
) -> Annotations:
    """Read labels and slices for the metrics; empty without metrics.

    `source_labels`: class indices of the sample source, used if no label file is named. Raises
    DataError.
    """
    if not metrics:
        return Annotations()
    names = list(dict.fromkeys(name for metric in metrics for name in metric.slices))
    read = Annotations.open(
        labels=origin.labels, slices=origin.slices, names=names, samples=samples
    )
    return replace(read, labels=source_labels) if origin.labels is None else read


def class_labels(
    path: Path, *, samples: int | None, annotations: Annotations
) -> NDArray[np.int64] | None:
    """Return the labels of a file as class indices; None for labels of other kinds, which only
    metrics use. Raises DataError."""
    labels = annotations.labels
    is_classes = labels is None or (
        path.suffix == ".npy"
        and isinstance(labels, np.ndarray)
        and labels.ndim == 1
        and labels.dtype.kind in "iu"
    )
    return open_labels(path, samples=samples) if is_classes else None


@dataclass(frozen=True)
class EvaluationData:
    """The data on which the model and the file are run."""

    samples: SampleSet
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""
    labels_sha256: Digest | None = None
    batch_size: int = 32
    pictures: tuple[Path, ...] = ()
    """Files or folders for the preprocessing comparison, if the policy requires one."""
    dumped: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Tensors that other consumers made from the pictures, by consumer; pictures on axis 0."""
    recordings: Mapping[RuntimeName, Path] = field(default_factory=dict)
    """Recorded outputs of other machines (`gate record pack`), by runtime name."""
    against: Champion | None = None
    """The serving version, which is run on the same samples."""
    spec: PreprocessSpec | None = None
    """The preprocessing of the samples, if known."""
    origin: SamplesOrigin | None = None
    """The arguments with which other processes open the samples."""
    units: int = MAX_UNITS
    """Maximum number of units (`gate.measure.work_units`)."""
    annotations: Annotations = field(default_factory=Annotations)
    """Labels of any kind and columns, for the metrics of the policy."""
    workers: UnitWorkers | None = None
    """Workers that measure most samples in other processes, with the same results."""

    @classmethod
    def open(
        cls,
        inputs: Path | str,
        *,
        labels: Path | None = None,
        batch_size: int = 32,
        preprocessing: Path | None = None,
        decode_workers: int | None = 0,
        batch_axes: Mapping[str, int | None] | None = None,
    ) -> EvaluationData:
        """Open samples from a file, folder, URL or data set (`SampleSet.open`).

        `labels`: an `.npy`; None: the labels of the source, if any. `preprocessing`: the spec that
        turns pictures into inputs. `decode_workers`: processes that read ahead; they require `if
        __name__ == "__main__":` in a script. `batch_axes`: as in `SampleSet.with_batch_axes`.
        Raises DataError, StorageError, PolicyError.
        """
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing else None
        samples = SampleSet.open(inputs, preprocessing=spec, decode_workers=decode_workers)
        samples = samples.with_batch_axes(batch_axes or {})
        origin = SamplesOrigin(str(inputs), None, preprocessing)
        opened = replace(cls.from_data(samples), batch_size=batch_size, spec=spec, origin=origin)
        return opened if labels is None else opened.with_labels(labels)

    def with_labels(
        self,
        labels: Path | None,
        *,
        slices: Path | None = None,
        metrics: Sequence[MetricPolicy] = (),
    ) -> EvaluationData:
        """Return the same samples with labels of a file; None: the labels of the source, if any.

        `metrics`: those of the policy; they accept labels of any kind, including JSON lines and
        Parquet. `slices`: the file with the columns of their slices; None: that of the labels.
        Raises DataError.
        """
        origin = replace(self.origin or SamplesOrigin(""), labels=labels, slices=slices)
        count = self.samples.count
        annotations = open_annotations(origin, metrics, count, source_labels=self.labels)
        labelled = replace(self, annotations=annotations, origin=self.origin and origin)
        if labels is None:
            return labelled
        classes = class_labels(labels, samples=count, annotations=annotations)
        return replace(labelled, labels=classes, labels_sha256=Digest.from_file(labels))

    @classmethod
    def from_data(cls, data: Any) -> EvaluationData:
        """Return the data of samples as `SampleSet.from_data` accepts them, with any labels."""
        if isinstance(data, cls):
            return data
        samples = SampleSet.from_data(data)
        labels = samples.labels()
        if labels is None:
            return cls(samples)
        return cls(samples, labels, SampleSet.from_arrays({"label": labels}).digest())
