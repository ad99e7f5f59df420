"""An opened multi-file release: parts, modules, measurement jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gate.data.batch_axes import arrange
from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.data.samples import SampleSet
from gate.errors import EvidenceError, InputMismatch, ModelError
from gate.measure.job import MeasurementJob
from gate.model.forward_signature import Leaf
from gate.multi_file.chain_model import CallRecorder, ChainModel, match_inputs
from gate.multi_file.chain_session import (
    ChainSession,
    ConsumerChain,
    Interfaces,
    OpenPart,
    check_seam,
)
from gate.onnx_file.release_file import ReleaseFile, ReleaseFiles
from gate.onnx_file.sandboxed_reading import release_within
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.evidence import BatchAxes, Subject, TensorSpec
from gate.runtimes.runtime import Conditions, RunnableFile, Session
from gate.runtimes.selection import SelectedRuntime
from gate.storage.arrays import Batch

_BATCH = "batch"


@dataclass(frozen=True)
class Part:
    """One ONNX file with the module that is its reference."""

    name: str
    candidate: TestedFile
    module: nn.Module
    samples: SampleSet
    """The tensors that the chain passes to it, or samples from the release file."""
    left_out: int = 0
    """Number of the chain's calls that are not measured (`PartCalls.left_out`)."""

    def policy(self, policy: Policy) -> Policy:
        """Return the policy of the part, derived from the policy of the release."""
        return policy.for_part([spec.name for spec in self.candidate.subject.outputs])

    def job(self, policy: Policy, batch_size: int) -> MeasurementJob:
        """Return the measurement job of the part."""
        return MeasurementJob(
            self.module, self.candidate, self.samples, self.policy(policy), batch_size
        )


@dataclass(frozen=True)
class MultiFileRelease:
    """All parts of an opened release. Immutable."""

    parts: tuple[Part, ...]
    chain: ChainModel
    calls: CallRecorder
    subject: Subject
    chain_name: str
    """`package.module:function`."""
    samples: SampleSet
    """Samples of the chain, with the batch axis on axis 0 of every array."""

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        model: nn.Module,
        samples: SampleSet,
        batch_size: int,
        most: int | None = None,
    ) -> MultiFileRelease:
        """Open the parts of a release file; run the chain with the modules to record their samples.

        A fixed batch size of the files becomes the batch size of the chain. `most`: maximum number
        of samples, None for all. Raises PolicyError, OnnxFileError, ModelError, InputMismatch,
        DataError.
        """
        files = release_within(path, None)
        chain = ChainModel.from_model(
            model,
            chain=files.file.chain,
            references=files.file.references,
            inputs=samples.names,
        )
        samples = _arranged(chain, files, samples)
        if most is not None:
            samples = samples.slice(0, min(len(samples), most))
        calls, outputs = _recorded(chain, files, samples, batch_size=batch_size)
        for name in files.parts:
            calls.for_part(name)  # Raises if the chain never called the part.
        fixed = _fixed_batch(files, calls)
        if fixed is not None:
            calls, outputs = _recorded(chain, files, samples, batch_size=fixed)
        parts = tuple(
            Part(
                name,
                candidate,
                chain.parts[name],
                _samples(files.file, calls, candidate, name=name),
                calls.for_part(name).left_out if files.file.parts[name].inputs is None else 0,
            )
            for name, candidate in files.parts.items()
        )
        subject = files.subject(inputs=_inputs(samples, fixed or _BATCH), outputs=outputs)
        return cls(parts, chain, calls, subject, files.file.chain, samples)

    def part_inputs(self, part: Part) -> SampleSet:
        """Return the tensors that the chain passes to a part.

        Raises EvidenceError if their number differs from the file's number of inputs.
        """
        return _part_inputs(self.calls, part.candidate, name=part.name)

    def jobs(self, job: MeasurementJob) -> dict[str, MeasurementJob]:
        """Return the measurement job of each part."""
        return {part.name: part.job(job.policy, job.batch_size) for part in self.parts}

    def open_release(self, file: TestedFile) -> ConsumerChain:
        """Open a release of the same parts as `Interfaces.open_release` does."""
        by_part = {part.name: self.calls.for_part(part.name).interface for part in self.parts}
        return Interfaces(self.chain.function, by_part).open_release(file)

    def session(
        self, selected: SelectedRuntime, policy: Policy, *, conditions: Conditions
    ) -> Session:
        """Open every part in a separate runtime, and return a session that runs the chain.

        Raises InputMismatch if the chain's tensors do not fit a part, EvidenceError if the runtime
        is not available, and the exceptions of the runtime.
        """
        with ExitStack() as runtimes, ExitStack() as sessions:
            opened = []
            for part in self.parts:
                runtime = SelectedRuntime(selected.name, policy.runtimes[selected.name])
                runtimes.callback(runtime.close)
                reason = runtime.absent_reason()
                if reason is not None:
                    raise EvidenceError(reason)
                calls = self.calls.for_part(part.name)
                specs = part.candidate.subject.inputs
                example = calls.example_for([spec.name for spec in specs])
                check_seam(specs, example, part=part.name)
                session = runtime.open(
                    RunnableFile(part.candidate),
                    conditions=conditions,
                    example={s.name: array for s, array in zip(specs, example, strict=True)},
                )
                sessions.callback(session.close)
                opened.append(OpenPart(part.name, session, part.candidate.subject, calls.interface))
            sessions.pop_all()  # ChainSession.close closes them.
            ended: Callable[[], None] = runtimes.pop_all().close
        return ChainSession(self.chain.function, opened, self.subject.outputs, ended=ended)


def _arranged(chain: ChainModel, files: ReleaseFiles, samples: SampleSet) -> SampleSet:
    """Return the samples with the batch axis on axis 0, and with the layout of the chain's calls.

    No ONNX file declares the chain's inputs. The batch axis is axis 0 if all lengths agree and the
    chain runs that way. Otherwise an input has the axes of a part's input with the same name. The
    batch axis of an output is the one that grows with the number of samples, unless the user
    states it. Raises InputMismatch.
    """
    even = samples.count is not None
    if even and not samples.stated:
        try:
            CallRecorder().record(chain, samples.at(_cyclic_indices(samples, 3)))
            return samples
        except ModelError as error:
            broken = error
    subjects = [candidate.subject for candidate in files.parts.values()]
    part_inputs = {spec.name: spec for subject in reversed(subjects) for spec in subject.inputs}
    shapes = samples.shapes
    inputs = [
        part_inputs.get(name)
        or TensorSpec(
            name=name,
            dtype=spec.dtype,
            shape=(_BATCH, *shapes[name][1:]) if even else shapes[name],
        )
        for name, spec in zip(samples.names, samples.specs, strict=True)
    ]
    stated = {name: axis for name, axis in samples.stated.items() if name in samples.names}
    output_specs = [spec for subject in subjects for spec in subject.outputs]
    try:
        arranged = arrange(samples.with_batch_axes(stated), inputs, output_specs)
    except InputMismatch:
        if even and not samples.stated:
            raise broken from None
        raise
    axes = arranged.layout
    if axes is None:
        return samples
    outputs = _output_axes(chain, arranged, axes)
    outputs |= {name: axis for name, axis in samples.stated.items() if name in outputs}
    layout = axes.model_copy(update={"outputs": outputs})
    return arranged.rearranged(dict.fromkeys(samples.names, 0), layout)


def _cyclic_indices(samples: SampleSet, count: int) -> list[int]:
    return [index % len(samples) for index in range(count)]


def _output_axes(chain: ChainModel, samples: SampleSet, axes: BatchAxes) -> dict[str, int | None]:
    """Return the batch axes of the outputs, found by running the chain on two and three samples."""
    sizes = (1,) if axes.is_unbatched else (2, 3)
    outputs, *more_outputs = (
        CallRecorder().record(chain, _call(axes, samples.at(_cyclic_indices(samples, size))))
        for size in sizes
    )
    return {
        leaf.name: _growing(leaf.tensor.shape, *(run[index].tensor.shape for run in more_outputs))
        for index, leaf in enumerate(outputs)
    }


def _growing(few: Sequence[int], more: Sequence[int] = ()) -> int | None:
    """Return the axis with length two for two samples and length three for three."""
    pairs = enumerate(zip(few, more, strict=False))
    return next((axis for axis, lengths in pairs if lengths == (2, 3)), None)


def _call(layout: BatchAxes | None, batch: Batch) -> Batch:
    """Return a batch in the layout of the chain's calls."""
    pairs = tuple((name, name) for name in batch)
    return InputBinding(pairs, length(batch), False, layout=layout).to_call(batch)


def _inputs(samples: SampleSet, size: int | str) -> tuple[TensorSpec, ...]:
    """Return the specs of the chain's inputs."""
    layout, specs = samples.layout, []
    for spec in samples.specs:
        axis, rest = (0 if layout is None else layout.inputs[spec.name]), spec.shape[1:]
        shape = rest if axis is None else (*rest[:axis], size, *rest[axis:])
        specs.append(spec.model_copy(update={"shape": shape}))
    return tuple(specs)


def _recorded(
    chain: ChainModel, files: ReleaseFiles, samples: SampleSet, *, batch_size: int
) -> tuple[CallRecorder, tuple[TensorSpec, ...]]:
    """Run the chain on all samples; return the calls of its parts and the specs of its outputs."""
    calls = CallRecorder({name: candidate.subject for name, candidate in files.parts.items()})
    outputs, layout = None, samples.layout
    unbatched = layout is not None and layout.is_unbatched
    for batch in samples.with_least(1 if unbatched else 2).batches(1 if unbatched else batch_size):
        returned = calls.record(chain, _call(layout, batch))
        outputs = outputs or _specs(returned, layout)
    return calls, outputs or ()


def _fixed_batch(files: ReleaseFiles, calls: CallRecorder) -> int | None:
    """Return the fixed batch size of the files if the recorded calls do not have it. None if they
    fit, or if the files have different batch sizes: then running them reports the mismatch."""
    sizes = set()
    for name, candidate in files.parts.items():
        inputs, part_calls = candidate.subject.inputs, calls.for_part(name)
        arrays = part_calls.example_for([spec.name for spec in inputs])
        for spec, array in zip(inputs, arrays, strict=False):
            axis = 0 if part_calls.axes is None else part_calls.axes.inputs[spec.name]
            if axis is None or axis >= min(len(spec.shape), array.ndim):
                continue
            size = spec.shape[axis]
            if isinstance(size, int) and array.shape[axis] != size:
                sizes.add(size)
    return sizes.pop() if len(sizes) == 1 else None


def _samples(
    file: ReleaseFile, calls: CallRecorder, candidate: TestedFile, *, name: str
) -> SampleSet:
    location = file.parts[name].inputs
    if location is not None:
        return SampleSet.open(location)
    return _part_inputs(calls, candidate, name=name)


def _part_inputs(calls: CallRecorder, candidate: TestedFile, *, name: str) -> SampleSet:
    """Return the recorded inputs of a part under the names of forward's arguments, or under the
    file's input names if only some of these are names of arguments."""
    part_calls = calls.for_part(name)
    input_names = tuple(spec.name for spec in candidate.subject.inputs)
    if len(match_inputs(part_calls.names, input_names)) != len(input_names):
        raise EvidenceError(
            f"the chain passes {len(part_calls.example)} tensors to the part {name}, its file has "
            f"{len(input_names)} inputs: {', '.join(input_names)}. Export the part with the "
            "arguments that the chain passes."
        )
    shared = set(input_names) & set(part_calls.names)
    names = part_calls.names if shared in (set(), set(input_names)) else input_names
    return part_calls.samples(names, part=name)


def _specs(outputs: Sequence[Leaf], layout: BatchAxes | None) -> tuple[TensorSpec, ...]:
    specs = []
    for leaf in outputs:
        shape: list[int | str] = list(leaf.tensor.shape)
        if layout is None:
            shape = [_BATCH, *shape[1:]]
        elif (axis := layout.outputs.get(leaf.name)) is not None and axis < len(shape):
            shape[axis] = _BATCH
        dtype = str(leaf.tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=leaf.name, dtype=dtype, shape=tuple(shape)))
    return tuple(specs)
