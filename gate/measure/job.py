"""The job of a measurement: reference, file, data, policy. Immutable."""

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
from gate.measure.work_units import MOST, UnitWorkers
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

Progress = Callable[[int, int], None]
"""Called with the samples that are done and their total."""


@dataclass(frozen=True)
class Reference:
    """The model that the file must compute like, and where it comes from."""

    model: nn.Module | ReferenceModel
    """An nn.Module, or what implements the interface `ReferenceModel`."""
    source: Source
    export: ExportRecord | None = None
    """How the file was asked for, where that is known."""
    spec: PreprocessSpec | None = None
    """How the samples were made of pictures, where that is known."""
    note: ExportNote | None = None
    """The same as `export`, bound to the file: goes before it."""
    checkpoint: Path | None = None
    loaded: bool = False
    """By `load`, so that other processes can load it again."""
    is_reproducible: bool = True
    """False if it is not known whether the factory gives the same weights each time: the model is
    too large to be built twice, or its factory can be called once."""

    @property
    def module(self) -> nn.Module:
        """The module of PyTorch; of an ONNX file its graph."""
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
        """Call `package.module:factory` and load a checkpoint into its model; or read an ONNX file
        as the reference (`from_file`).

        `preprocessing`: the spec by which the samples were made, whose digest goes into the
        evidence. `export_record`: what gate export wrote beside the file. `untrained`: weights that
        the factory draws anew each time are welcome; else they are a ModelError. Raises ModelError,
        CheckpointError, PolicyError and EvidenceError.
        """
        if is_onnx_file(factory):
            if checkpoint is not None or export_record is not None:
                raise ModelError(
                    f"{factory} is an ONNX file, which has its own weights: leave --checkpoint and "
                    "--export-record out."
                )
            return cls.from_file(Path(factory), preprocessing=preprocessing)
        if parse_registered(factory) is not None:
            raise ModelError(
                f"{factory} is a registered model, which gate check and gate locate download. "
                "Here, name its ONNX file."
            )
        note = ExportNote.load(export_record) if export_record else None
        model = build_model(factory)
        code = collect_code(model, factory=factory)
        sha256 = load_checkpoint(model, checkpoint) if checkpoint else None
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
        """Read an ONNX file, whose nodes become modules of PyTorch.

        `preprocessing`: as in `from_factory`. Raises ModelError, OnnxFileError and PolicyError.
        """
        from gate.reference.onnx_file_reference import OnnxFileReference
        from gate.reference.onnx_reference import interpreter_packages

        file = TestedFile(path, read_subject(path))
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing else None
        source = Source(
            factory=str(path),
            preprocess_sha256=spec.digest() if spec else None,
            code=ModelCode(files={}, packages=interpreter_packages()),
            onnx_sha256=file.subject.sha256,
        )
        return cls(OnnxFileReference.from_file(file), source, spec=spec, loaded=True)

    def named(self, name: str) -> Reference:
        """Return the same under another name for the records."""
        return replace(self, source=self.source.model_copy(update={"factory": name}))

    @property
    def address(self) -> str:
        """The address for other processes: the factory, or the path of the ONNX file."""
        file = self.model.file if isinstance(self.model, ReferenceModel) else None
        return self.source.factory if file is None else str(file)

    @classmethod
    def of(cls, model: Reference | ReferenceModel | nn.Module | Path | str) -> Reference:
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


_CUT_FROM = 16
"""Samples that would be one batch, from which on they are two: halves are batches yet."""


class NamedRun(Protocol):
    """A session with the interface of ONNX Runtime's `run`."""

    def run(self, outputs: Sequence[str], feed: Batch) -> list[NDArray[Any]]:
        """The outputs of these names. Raises anything."""


class Opener(Protocol):
    """An opener of the files of a release, as a consumer opens them."""

    def open_release(self, file: TestedFile) -> NamedRun:
        """The files of this or another release of the same parts, by one chain. Raises anything."""


class Chained(Opener, Protocol):
    """Several files that are run as one."""

    def session(
        self, chosen: SelectedRuntime, policy: Policy, *, conditions: Conditions
    ) -> Session:
        """Open all files in this runtime, as one session. Raises anything."""

    def cases(self, whole: MeasurementJob) -> Mapping[str, MeasurementJob]:
        """Each file with its model, by the name of the part, as the case of all of them is."""


@dataclass(frozen=True)
class MeasurementJob:
    """The model, file, samples and policy of a measurement. Immutable."""

    model: nn.Module | ReferenceModel
    """As it was named; `reference` is what computes."""
    candidate: TestedFile
    samples: SampleSet
    policy: Policy
    batch_size: int = 32
    """At most: see `bind`. A file with a fixed batch axis is computed with that one."""
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""
    recordings: Mapping[RuntimeName, Path] = field(default_factory=dict)
    """What was computed elsewhere, by the name of its runtime: a folder or a zip."""
    source_labels: bool = False
    """Labels come with the samples, range by range: for who measures a few units of many."""
    annotations: Annotations = field(default_factory=Annotations)
    """Labels and columns for the metrics of the policy."""
    chained: Chained | None = None
    """The files of a release, whose chain `model` is; None: the candidate is one ONNX file."""
    units: int = MOST
    """Units at most, in addition to the lead (`gate.measure.work_units`)."""
    source: Source | None = None
    """Where the model comes from; None: its class alone."""
    export: ExportRecord | None = None
    """How the file was exported, where that is recorded."""

    def __post_init__(self) -> None:
        if self.annotations.labels is None and self.labels is not None:
            annotations = replace(self.annotations, labels=self.labels)
            object.__setattr__(self, "annotations", annotations)
        # Samples that do not fit are reported by `bind`.
        with contextlib.suppress(InputMismatch, DataError):
            object.__setattr__(self, "samples", self._arranged())

    @cached_property
    def reference(self) -> ReferenceModel:
        """The model that the file must compute like."""
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
        """Read one ONNX file. Raises OnnxFileError; ModelError for a reference that is this very
        file, or shares only some of its names."""
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
        """The samples; NaN is a valid value where the policy allows it."""
        return self.samples.allow_nan() if self.policy.nonfinite == "same_places" else self.samples

    def bind(self, *, batch_size: int | None = None) -> InputBinding:
        """Bind samples to the inputs of the file and of the model.

        `batch_size`: for computing a few of them; None: that of the measurement, which takes two
        batches rather than one unless there is only a handful of samples. The first one warms up,
        and would have to be computed again to be timed.
        Raises InputMismatch and DataError for samples that don't fit.
        """
        subject, samples = self.candidate.subject, self._arranged()
        count = len(samples)
        if batch_size is None:
            alone = _CUT_FROM <= count <= self.batch_size
            batch_size = math.ceil(count / 2) if alone else self.batch_size
        binding = bind_samples(
            subject.inputs,
            samples,
            batch_size=batch_size,
            parameters=self.reference.parameters(),
            reduced=self.policy.precision == "reduced",
        )
        return replace(binding, double=self.reference.keeps_double(subject))


@dataclass(frozen=True)
class SamplesOrigin:
    """The arguments of `EvaluationData.open`."""

    inputs: str
    """A path as text, because it may be a URL or a data set by name."""
    labels: Path | None = None
    preprocessing: Path | None = None
    slices: Path | None = None


def open_annotations(
    origin: SamplesOrigin,
    metrics: Sequence[MetricPolicy],
    samples: int | None,
    *,
    own: NDArray[np.int64] | None = None,
) -> Annotations:
    """Read what the metrics need beside the samples; nothing without metrics. `own`: class indices
    that the source of the samples has, where no file of labels is named. Raises DataError."""
    if not metrics:
        return Annotations()
    names = list(dict.fromkeys(name for metric in metrics for name in metric.slices))
    read = Annotations.open(
        labels=origin.labels, slices=origin.slices, names=names, samples=samples
    )
    return replace(read, labels=own) if origin.labels is None else read


def class_labels(
    path: Path, *, samples: int | None, annotations: Annotations
) -> NDArray[np.int64] | None:
    """Return the labels of a file as class indices; None where they are of another kind, which
    only metrics take. Raises DataError."""
    labels = annotations.labels
    other = labels is not None and not (
        isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
    )
    return None if other else open_labels(path, samples=samples)


@dataclass(frozen=True)
class EvaluationData:
    """The data on which both sides compute."""

    samples: SampleSet
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""
    labels_sha256: Digest | None = None
    batch_size: int = 32
    pictures: tuple[Path, ...] = ()
    """Files or folders on which parity of preprocessing is measured, if the policy demands it."""
    dumped: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """By consumer of one's own, what it made of these pictures: one tensor each, on axis 0."""
    recordings: Mapping[RuntimeName, Path] = field(default_factory=dict)
    """What was computed elsewhere on these samples, by the name of its runtime: what `gate record
    pack` made."""
    against: Champion | None = None
    """The version that serves now, which computes on the same samples, too."""
    spec: PreprocessSpec | None = None
    """How pictures became the samples, where that was given with them."""
    origin: SamplesOrigin | None = None
    """From where other processes can open the samples again."""
    units: int = MOST
    """Into how many it is cut at most (`gate.measure.work_units`)."""
    annotations: Annotations = field(default_factory=Annotations)
    """Labels of any kind and columns, for the metrics of the policy."""
    crew: UnitWorkers | None = None
    """Who measures most of the samples, in other processes; the numbers are the same without."""

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
        """Open samples from a file, a folder, a URL or a data set (`SampleSet.open`), and labels
        from an `.npy`; else those of the source, if it has any.

        `preprocessing`: the spec by which its pictures become inputs. `decode_workers`: processes
        that read ahead; a script that asks for some needs `if __name__ == "__main__":`.
        `batch_axes`: as `SampleSet.with_batch_axes`. Raises DataError, StorageError, PolicyError.
        """
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing else None
        samples = SampleSet.open(inputs, preprocessing=spec, decode_workers=decode_workers)
        samples = samples.with_batch_axes(batch_axes or {})
        origin = SamplesOrigin(str(inputs), None, preprocessing)
        opened = replace(cls.of(samples), batch_size=batch_size, spec=spec, origin=origin)
        return opened if labels is None else opened.with_labels(labels)

    def with_labels(
        self,
        labels: Path | None,
        *,
        slices: Path | None = None,
        metrics: Sequence[MetricPolicy] = (),
    ) -> EvaluationData:
        """Return the same samples with labels of a file; None: those of the source, if it has any.

        `metrics`: of the policy. For them labels may be of any kind, also JSON lines or Parquet,
        and their slices are columns of the file `slices`, else of that of the labels. Raises
        DataError.
        """
        assert self.origin is not None
        origin, count = replace(self.origin, labels=labels, slices=slices), self.samples.count
        annotations = open_annotations(origin, metrics, count, own=self.labels)
        labelled = replace(self, annotations=annotations, origin=origin)
        if labels is None:
            return labelled
        classes = class_labels(labels, samples=count, annotations=annotations)
        return replace(labelled, labels=classes, labels_sha256=Digest.of_file(labels))

    @classmethod
    def of(cls, data: Any) -> EvaluationData:
        """Samples as `SampleSet.of` takes them, with their labels, if they have any."""
        if isinstance(data, cls):
            return data
        samples = SampleSet.from_data(data)
        labels = samples.labels()
        if labels is None:
            return cls(samples)
        return cls(samples, labels, SampleSet.from_arrays({"label": labels}).digest())
