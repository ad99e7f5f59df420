"""An opened multi-file release: parts, modules, measurement jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gate.data.samples import SampleSet
from gate.errors import EvidenceError
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
from gate.records.evidence import Subject, TensorSpec
from gate.runtimes.runtime import Conditions, RunnableFile, Session
from gate.runtimes.selection import SelectedRuntime

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
        """By which it is judged, where the whole is by this one."""
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

    @classmethod
    def open(
        cls, path: Path, *, model: nn.Module, samples: SampleSet, batch_size: int
    ) -> MultiFileRelease:
        """Open the parts that the file `path` names, and run the chain once over all samples with
        the modules, which gives each part's samples. Files with a fixed batch axis make that of
        the whole.

        Raises PolicyError, OnnxFileError, ModelError, DataError.
        """
        files = release_within(path, None)
        chain = ChainModel.of(
            model,
            chain=files.file.chain,
            references=files.file.references,
            inputs=samples.names,
        )
        calls, outputs = _recorded(chain, samples, batch_size=batch_size)
        for name in files.parts:
            calls.of(name)  # which says so where the chain never calls it
        fixed = _fixed_batch(files, calls)
        if fixed is not None:
            calls, outputs = _recorded(chain, samples, batch_size=fixed)
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
        inputs = tuple(
            spec.model_copy(update={"shape": (fixed or _BATCH, *spec.shape[1:])})
            for spec in samples.specs
        )
        subject = files.subject(inputs=inputs, outputs=outputs)
        return cls(parts, chain, calls, subject, files.file.chain)

    def given(self, part: Part) -> SampleSet:
        """What the chain gives a part, whether it has samples of its own or not. Raises
        EvidenceError for another number of tensors than its file takes."""
        return _given(self.calls, part.candidate, name=part.name)

    def cases(self, whole: MeasurementJob) -> dict[str, MeasurementJob]:
        """Each part, to look into."""
        return {part.name: part.case(whole.policy, whole.batch_size) for part in self.parts}

    def beside(self, file: TestedFile) -> ConsumerChain:
        """As `Interfaces.beside`, by this chain."""
        by_part = {part.name: self.calls.of(part.name).interface for part in self.parts}
        return Interfaces(self.chain.function, by_part).beside(file)

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


def _recorded(
    chain: ChainModel, samples: SampleSet, *, batch_size: int
) -> tuple[CallRecorder, tuple[TensorSpec, ...]]:
    """What each part was given, and what the chain returned."""
    calls, outputs = CallRecorder(), None
    for batch in samples.with_least(2).batches(batch_size):
        found = calls.record(chain, batch)
        outputs = outputs or _specs(found)
    return calls, outputs or ()


def _fixed_batch(files: ReleaseFiles, calls: CallRecorder) -> int | None:
    """The batch axis that files have, where the chain gives their parts another one; None: they
    take what they are given, or have several, and whoever runs them says so."""
    wanted = set()
    for name, candidate in files.parts.items():
        inputs = candidate.subject.inputs
        given = calls.of(name).taken([spec.name for spec in inputs])
        for spec, array in zip(inputs, given, strict=False):
            size = spec.shape[0] if spec.shape else None
            if isinstance(size, int) and array.shape[:1] not in ((), (size,)):
                wanted.add(size)
    return wanted.pop() if len(wanted) == 1 else None


def _samples(
    file: ReleaseFile, calls: CallRecorder, candidate: TestedFile, *, name: str
) -> SampleSet:
    own = file.parts[name].inputs
    if own is not None:
        return SampleSet.open(own)
    return _given(calls, candidate, name=name)


def _given(calls: CallRecorder, candidate: TestedFile, *, name: str) -> SampleSet:
    """By the names of the arguments, which say how the module is called; where they contradict the
    file's, by those of its inputs, one after the other."""
    found = calls.of(name)
    wanted = tuple(spec.name for spec in candidate.subject.inputs)
    if len(bound(found.names, wanted)) != len(wanted):
        raise EvidenceError(
            f"the chain gives the part {name} {len(found.example)} tensors, its file takes "
            f"{len(wanted)}: {', '.join(wanted)}. Export the part as the chain calls it."
        )
    shared = set(wanted) & set(found.names)
    return found.samples(found.names if shared in (set(), set(wanted)) else wanted, part=name)


def _specs(found: Sequence[Leaf]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            name=leaf.name,
            dtype=str(leaf.tensor.dtype).removeprefix("torch."),
            shape=(_BATCH, *leaf.tensor.shape[1:]),
        )
        for leaf in found
    )
