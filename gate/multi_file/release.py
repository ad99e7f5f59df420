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
from gate.multi_file.chain_model import CallRecorder, ChainModel, bound
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
    """One file with the module that it must compute like."""

    name: str
    candidate: TestedFile
    module: nn.Module
    samples: SampleSet
    """What the chain gives it, or samples of its own."""
    left_out: int = 0
    """Calls of the chain that are no samples: with inputs of other sizes than the first one."""

    def policy(self, policy: Policy) -> Policy:
        """Return the policy of a part, derived from that of the whole."""
        return policy.of_part([spec.name for spec in self.candidate.subject.outputs])

    def case(self, policy: Policy, batch_size: int) -> MeasurementJob:
        """The same, to look into."""
        return MeasurementJob(
            self.module, self.candidate, self.samples, self.policy(policy), batch_size
        )


@dataclass(frozen=True)
class MultiFileRelease:
    """All parts. Nothing of it is ever changed."""

    parts: tuple[Part, ...]
    chain: ChainModel
    calls: CallRecorder
    subject: Subject
    chain_name: str
    """`package.module:function`."""
    samples: SampleSet
    """Of the chain, with the samples on axis 0 of every array."""

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
        """Open the parts that the file `path` names, and run the chain once over all samples with
        the modules, which gives each part's samples. Files with a fixed batch axis make that of
        the whole. `most`: samples that are used; None: all.

        Raises PolicyError, OnnxFileError, ModelError, InputMismatch, DataError.
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
            calls.of(name)  # which says so where the chain never calls it
        fixed = _fixed_batch(files, calls)
        if fixed is not None:
            calls, outputs = _recorded(chain, files, samples, batch_size=fixed)
        parts = tuple(
            Part(
                name,
                candidate,
                chain.parts[name],
                _samples(files.file, calls, candidate, name=name),
                calls.of(name).left_out if files.file.parts[name].inputs is None else 0,
            )
            for name, candidate in files.parts.items()
        )
        subject = files.subject(inputs=_inputs(samples, fixed or _BATCH), outputs=outputs)
        return cls(parts, chain, calls, subject, files.file.chain, samples)

    def part_inputs(self, part: Part) -> SampleSet:
        """Return what the chain passes to a part, whether it has samples of its own or not.

        Raises EvidenceError for another number of tensors than its file takes.
        """
        return _part_inputs(self.calls, part.candidate, name=part.name)

    def cases(self, whole: MeasurementJob) -> dict[str, MeasurementJob]:
        """Each part, to look into."""
        return {part.name: part.case(whole.policy, whole.batch_size) for part in self.parts}

    def open_release(self, file: TestedFile) -> ConsumerChain:
        """Return the `Interfaces.open_release` of this chain."""
        by_part = {part.name: self.calls.of(part.name).interface for part in self.parts}
        return Interfaces(self.chain.function, by_part).open_release(file)

    def session(
        self, chosen: SelectedRuntime, policy: Policy, *, conditions: Conditions
    ) -> Session:
        """Open every part in a runtime of its own, and run the chain with them. Raises
        InputMismatch with the name of a part that does not take what the chain gives it, and
        whatever the runtime raises."""
        with ExitStack() as held, ExitStack() as unfinished:
            opened = []
            for part in self.parts:
                own = SelectedRuntime(chosen.name, policy.runtimes[chosen.name])
                held.callback(own.close)
                reason = own.absent_reason()
                if reason is not None:
                    raise EvidenceError(reason)
                calls = self.calls.of(part.name)
                wanted = part.candidate.subject.inputs
                given = calls.taken([spec.name for spec in wanted])
                check_seam(wanted, given, part=part.name)
                session = own.open(
                    RunnableFile(part.candidate),
                    conditions=conditions,
                    example={s.name: array for s, array in zip(wanted, given, strict=True)},
                )
                unfinished.callback(session.close)
                opened.append(OpenPart(part.name, session, part.candidate.subject, calls.interface))
            unfinished.pop_all()  # the chain's session ends them
            ended: Callable[[], None] = held.pop_all().close
        return ChainSession(self.chain.function, opened, self.subject.outputs, ended=ended)


def _arranged(chain: ChainModel, files: ReleaseFiles, samples: SampleSet) -> SampleSet:
    """Return the samples with the samples on axis 0 of every array, and the layout of the chain's
    calls.

    No file has the inputs of the chain. Axis 0 is the samples where all lengths agree and the chain
    takes them so. Else an input that is named as one of a part has the axes of that. The axis of an
    output is the one that grows with the samples, unless the user states it. Raises InputMismatch.
    """
    even = samples.count is not None
    if even and not samples.stated:
        try:
            CallRecorder().record(chain, samples.at(_few(samples, 3)))
            return samples
        except ModelError as error:
            broken = error
    subjects = [candidate.subject for candidate in files.parts.values()]
    of_parts = {spec.name: spec for subject in reversed(subjects) for spec in subject.inputs}
    shapes = samples.shapes
    inputs = [
        of_parts.get(name)
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
        found = arrange(samples.with_batch_axes(stated), inputs, output_specs)
    except InputMismatch:
        if even and not samples.stated:
            raise broken from None
        raise
    axes = found.layout
    if axes is None:
        return samples
    outputs = _output_axes(chain, found, axes)
    outputs |= {name: axis for name, axis in samples.stated.items() if name in outputs}
    whole = axes.model_copy(update={"outputs": outputs})
    return found.rearranged(dict.fromkeys(samples.names, 0), whole)


def _few(samples: SampleSet, count: int) -> list[int]:
    return [place % len(samples) for place in range(count)]


def _output_axes(chain: ChainModel, samples: SampleSet, axes: BatchAxes) -> dict[str, int | None]:
    """Return the axes of the outputs by running the chain on two and on three samples."""
    sizes = (1,) if axes.is_unbatched else (2, 3)
    few, *more = (
        CallRecorder().record(chain, _call(axes, samples.at(_few(samples, size)))) for size in sizes
    )
    return {
        leaf.name: _growing(leaf.tensor.shape, *(found[place].tensor.shape for found in more))
        for place, leaf in enumerate(few)
    }


def _growing(few: Sequence[int], more: Sequence[int] = ()) -> int | None:
    """Return the axis that is two long for two samples and three for three."""
    pairs = enumerate(zip(few, more, strict=False))
    return next((axis for axis, lengths in pairs if lengths == (2, 3)), None)


def _call(layout: BatchAxes | None, batch: Batch) -> Batch:
    """Return a batch as the chain takes it."""
    pairs = tuple((name, name) for name in batch)
    return InputBinding(pairs, length(batch), False, layout=layout).to_call(batch)


def _inputs(samples: SampleSet, size: int | str) -> tuple[TensorSpec, ...]:
    """Return the inputs of the chain, as it takes them."""
    layout, specs = samples.layout, []
    for spec in samples.specs:
        axis, rest = (0 if layout is None else layout.inputs[spec.name]), spec.shape[1:]
        shape = rest if axis is None else (*rest[:axis], size, *rest[axis:])
        specs.append(spec.model_copy(update={"shape": shape}))
    return tuple(specs)


def _recorded(
    chain: ChainModel, files: ReleaseFiles, samples: SampleSet, *, batch_size: int
) -> tuple[CallRecorder, tuple[TensorSpec, ...]]:
    """Return the inputs of each part, and the result of the chain."""
    calls = CallRecorder({name: candidate.subject for name, candidate in files.parts.items()})
    outputs, layout = None, samples.layout
    alone = layout is not None and layout.is_unbatched
    for batch in samples.with_least(1 if alone else 2).batches(1 if alone else batch_size):
        found = calls.record(chain, _call(layout, batch))
        outputs = outputs or _specs(found, layout)
    return calls, outputs or ()


def _fixed_batch(files: ReleaseFiles, calls: CallRecorder) -> int | None:
    """The batch axis that files have, where the chain gives their parts another one; None: they
    take what they are given, or have several, which running them reports."""
    wanted = set()
    for name, candidate in files.parts.items():
        inputs, of_part = candidate.subject.inputs, calls.of(name)
        given = of_part.taken([spec.name for spec in inputs])
        for spec, array in zip(inputs, given, strict=False):
            axis = 0 if of_part.axes is None else of_part.axes.inputs[spec.name]
            if axis is None or axis >= min(len(spec.shape), array.ndim):
                continue
            size = spec.shape[axis]
            if isinstance(size, int) and array.shape[axis] != size:
                wanted.add(size)
    return wanted.pop() if len(wanted) == 1 else None


def _samples(
    file: ReleaseFile, calls: CallRecorder, candidate: TestedFile, *, name: str
) -> SampleSet:
    own = file.parts[name].inputs
    if own is not None:
        return SampleSet.open(own)
    return _part_inputs(calls, candidate, name=name)


def _part_inputs(calls: CallRecorder, candidate: TestedFile, *, name: str) -> SampleSet:
    """Return the inputs by the names of the arguments, which say how the module is called; if they
    contradict the file's, by those of its inputs, in order."""
    found = calls.of(name)
    wanted = tuple(spec.name for spec in candidate.subject.inputs)
    if len(bound(found.names, wanted)) != len(wanted):
        raise EvidenceError(
            f"the chain gives the part {name} {len(found.example)} tensors, its file takes "
            f"{len(wanted)}: {', '.join(wanted)}. Export the part as the chain calls it."
        )
    shared = set(wanted) & set(found.names)
    return found.samples(found.names if shared in (set(), set(wanted)) else wanted, part=name)


def _specs(found: Sequence[Leaf], layout: BatchAxes | None) -> tuple[TensorSpec, ...]:
    specs = []
    for leaf in found:
        shape: list[int | str] = list(leaf.tensor.shape)
        if layout is None:
            shape = [_BATCH, *shape[1:]]
        elif (axis := layout.outputs.get(leaf.name)) is not None and axis < len(shape):
            shape[axis] = _BATCH
        dtype = str(leaf.tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=leaf.name, dtype=dtype, shape=tuple(shape)))
    return tuple(specs)
