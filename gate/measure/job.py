"""What is measured: reference, file, data, policy. Immutable."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.data.array_files import open_labels
from gate.data.batch_axes import arrange
from gate.data.input_binding import InputBinding, bind_inputs
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.errors import DataError, InputMismatch, ModelError
from gate.measure.work_units import MOST, Crew
from gate.model.checkpoint import load_checkpoint
from gate.model.forward_signature import parameters
from gate.model.loading import build_model, collect_code, require_same_weights
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import ExportNote, TestedFile
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import ExportRecord, Source, Subject
from gate.records.runtime import RuntimeName
from gate.runtimes.runtime import Conditions, Session
from gate.runtimes.selection import SelectedRuntime
from gate.storage.arrays import Batch
from gate.storage.digest import Digest

Progress = Callable[[int, int], None]
"""Called with the samples that are done and their total."""


@dataclass(frozen=True)
class Reference:
    """The PyTorch model that the file must compute like, and where it comes from."""

    model: nn.Module
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
    """False if nobody knows whether the factory gives the same weights each time: the model is too
    large to be built twice, or its factory can be called once."""

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
        """Call `package.module:factory` and load a checkpoint into its model.

        `preprocessing`: the spec by which the samples were made, whose digest goes into the
        evidence. `export_record`: what gate export wrote beside the file. `untrained`: weights that
        the factory draws anew each time are welcome; else they are a ModelError. Raises ModelError,
        CheckpointError, PolicyError and EvidenceError.
        """
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
    def of(cls, model: Reference | nn.Module | str) -> Reference:
        """Of a model, or of `package.module:factory`. Raises ModelError."""
        if isinstance(model, cls):
            return model
        if isinstance(model, str):
            return cls.from_factory(model)
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"the reference is {model!r}. Expected an nn.Module, 'package.module:factory' or a "
                "gate.Reference."
            )
        kind = type(model)
        return cls(model, Source(factory=f"{kind.__module__}:{kind.__qualname__}"))


_DOUBLE = "float64"

_CUT_FROM = 16
"""Samples that would be one batch, from which on they are two: halves are batches yet."""


class NamedRun(Protocol):
    """As a session of ONNX Runtime runs."""

    def run(self, outputs: Sequence[str], feed: Batch) -> list[NDArray[Any]]:
        """The outputs of these names. Raises anything."""


class Opener(Protocol):
    """Whoever opens the files of a release as a consumer does."""

    def beside(self, file: TestedFile) -> NamedRun:
        """The files of this or another release of the same parts, by one chain. Raises anything."""


class Chained(Opener, Protocol):
    """Several files that are run as one."""

    def session(
        self, chosen: SelectedRuntime, policy: Policy, *, conditions: Conditions
    ) -> Session:
        """All of them in this runtime, as one session. Raises anything."""

    def cases(self, whole: MeasurementJob) -> Mapping[str, MeasurementJob]:
        """Each file with its model, by the name of the part, as the case of all of them is."""


@dataclass(frozen=True)
class MeasurementJob:
    """Nothing of it is ever changed."""

    model: nn.Module
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
    chained: Chained | None = None
    """The files of a release, whose chain `model` is; None: the candidate is one ONNX file."""
    units: int = MOST
    """Units at most, beside the lead (`gate.measure.work_units`)."""

    def __post_init__(self) -> None:
        # Samples that do not fit are reported by `bind`.
        with contextlib.suppress(InputMismatch, DataError):
            object.__setattr__(self, "samples", self._arranged())

    def _arranged(self) -> SampleSet:
        subject = self.candidate.subject
        return arrange(
            self.samples, subject.inputs, subject.outputs, parameters=parameters(self.model)
        )

    @classmethod
    def from_files(
        cls, onnx: Path, *, model: nn.Module, data: EvaluationData, policy: Policy
    ) -> MeasurementJob:
        """Read one ONNX file. Raises OnnxFileError."""
        return cls(
            model,
            TestedFile(onnx, read_subject(onnx)),
            data.samples,
            policy,
            data.batch_size,
            data.labels,
            data.recordings,
            units=data.units,
        )

    @property
    def inputs(self) -> SampleSet:
        """The samples, of which NaN is a value where the policy says so."""
        return self.samples.allow_nan() if self.policy.nonfinite == "same_places" else self.samples

    def bind(self, *, batch_size: int | None = None) -> InputBinding:
        """Which samples go to which input of the file and of the model.

        `batch_size`: of whoever computes a few of them; None: of the measurement, which takes two
        batches rather than one where that is no matter of a handful of samples. The first one
        warms up, and would have to be computed again to be timed.

        Raises InputMismatch and DataError for samples that don't fit.
        """
        subject, samples = self.candidate.subject, self._arranged()
        count = len(samples)
        if batch_size is None:
            alone = _CUT_FROM <= count <= self.batch_size
            batch_size = math.ceil(count / 2) if alone else self.batch_size
        binding = bind_inputs(
            subject.inputs,
            samples.specs,
            count=count,
            batch_size=batch_size,
            parameters=parameters(self.model),
            layout=samples.layout,
            reduced=self.policy.precision == "reduced",
        )
        return replace(binding, double=keeps_double(self.model, subject))


def keeps_double(model: nn.Module, subject: Subject) -> bool:
    """True where the model itself is in float64 in parts, or the file takes or gives float64
    because the whole model is: then its weights and inputs of float64 stay what they are.

    Else they become float32, as the file has them: a model that was built in float64 and exported
    as a copy in float32, or one of float32 that casts inputs of float64.
    """
    own = {
        tensor.dtype
        for tensor in itertools.chain(model.parameters(), model.buffers())
        if tensor.is_floating_point()
    }
    if own >= {torch.float32, torch.float64}:  # a date or a coordinate is lost in float32
        return True
    floats = {spec.dtype for spec in subject.inputs if spec.dtype.startswith("float")}
    gives = any(spec.dtype == _DOUBLE for spec in subject.outputs)
    if _DOUBLE in floats:
        return gives or own != {torch.float32}
    return gives and (own != {torch.float64} or not floats)


@dataclass(frozen=True)
class SamplesOrigin:
    """What `EvaluationData.open` was given."""

    inputs: str
    labels: Path | None = None
    preprocessing: Path | None = None

    @classmethod
    def of(
        cls, inputs: Path | str, *, labels: Path | None, preprocessing: Path | None
    ) -> SamplesOrigin:
        """As text, because it may be a URL or a data set by name."""
        return cls(str(inputs), labels, preprocessing)


@dataclass(frozen=True)
class EvaluationData:
    """What both sides compute on."""

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
    crew: Crew | None = None
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
        """Open samples from a file, a folder, a URL or a data set (`Samples.open`), and labels from
        an `.npy`; else those of the source, if it has any.

        `preprocessing`: the spec by which its pictures become inputs. `decode_workers`: processes
        that read ahead; a script that asks for some needs `if __name__ == "__main__":`.
        `batch_axes`: as `SampleSet.with_batch_axes`. Raises DataError, StorageError, PolicyError.
        """
        spec = PreprocessSpec.from_file(preprocessing) if preprocessing else None
        samples = SampleSet.open(inputs, preprocessing=spec, decode_workers=decode_workers)
        samples = samples.with_batch_axes(batch_axes or {})
        origin = SamplesOrigin.of(inputs, labels=labels, preprocessing=preprocessing)
        opened = replace(cls.of(samples), batch_size=batch_size, spec=spec, origin=origin)
        if labels is None:
            return opened
        correct_classes = open_labels(labels, samples=samples.count)
        return replace(opened, labels=correct_classes, labels_sha256=Digest.of_file(labels))

    @classmethod
    def of(cls, data: Any) -> EvaluationData:
        """Samples as `SampleSet.of` takes them, with their labels, if they have any."""
        if isinstance(data, cls):
            return data
        samples = SampleSet.of(data)
        labels = samples.labels()
        if labels is None:
            return cls(samples)
        return cls(samples, labels, SampleSet.from_arrays({"label": labels}).digest())
