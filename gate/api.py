"""One file against one model: measure, then decide. The front door of the library.

reference = Reference.load("mypackage.models:build", checkpoint=Path("model.safetensors"))
verdicted = check(Path("model.onnx"), reference=reference,
                  workload=Workload.open(Path("samples.npy")))
assert verdicted.decision.passed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate.decision.champion import Champion
from gate.decision.decision import Decision, decide
from gate.errors import DataError, GateError, PolicyError
from gate.model.code import code_of
from gate.model.loading import build_model, load_checkpoint
from gate.model.modules import verify_unchanged
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.export_note import ExportNote
from gate.onnxfile.release_file import is_release
from gate.onnxfile.subject import read_subject
from gate.parity.case import Case
from gate.parity.incumbent import Compared, measure_incumbent
from gate.parity.measure import measure
from gate.parity.statistics.table import SampleTable
from gate.parity.workload import Workload
from gate.parts.release import OpenRelease
from gate.policy.policy import Policy, PreprocessingPolicy
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import Evidence, ExportRecord, Source
from gate.records.localisation import Explanation
from gate.records.model_code import ModelCode
from gate.records.preprocessing import PreprocessingParity
from gate.runtimes.recorded import with_recordings
from gate.story.change import change_of, unasked
from gate.story.story import Change

_steps = logging.getLogger("gate.steps")
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

    @classmethod
    def load(
        cls,
        factory: str,
        *,
        checkpoint: Path | None = None,
        preprocessing: Path | None = None,
        export_record: Path | None = None,
    ) -> Reference:
        """Call `package.module:factory` and load a checkpoint into its model.

        `preprocessing`: the spec by which the samples were made, whose digest goes into the
        evidence. `export_record`: what gate export wrote beside the file. Raises ModelError,
        CheckpointError, PolicyError and EvidenceError.
        """
        note = ExportNote.load(export_record) if export_record else None
        model = build_model(factory)
        code = code_of(model, factory=factory)
        sha256 = load_checkpoint(model, checkpoint) if checkpoint else None
        spec = PreprocessSpec.of_file(preprocessing) if preprocessing else None
        digest = spec.digest() if spec else None
        source = Source(
            factory=factory, checkpoint_sha256=sha256, preprocess_sha256=digest, code=code
        )
        return cls(model, source, spec=spec, note=note, checkpoint=checkpoint, loaded=True)


@dataclass(frozen=True)
class Verdicted:
    """The evidence, the decision on it, what was judged, and after a rejection which layer diverges
    first."""

    evidence: Evidence
    decision: Decision
    case: Case
    explanation: Explanation
    samples: SampleTable = field(default_factory=SampleTable)
    """One row a sample, for a file beside the report."""
    change: Change = field(default_factory=unasked)
    """Against the version that serves now."""

    @property
    def policy(self) -> Policy:
        """The policy that was applied."""
        return self.case.policy


def check(
    onnx: Path,
    *,
    reference: Reference,
    workload: Workload,
    policy: Policy | None = None,
    progress: Progress | None = None,
) -> Verdicted:
    """Measure the file `onnx` against the reference and decide.

    Without a policy the built-in one applies: each output is judged as what it is seen to be. The
    model is not changed. Raises GateError where nothing can be measured, DigestMismatch if the file
    changed meanwhile, or the record of the export is about another, EvidenceError if the model's
    source files changed meanwhile; a bad file is a returned decision. On Linux the peak of this
    process (`VmHWM`, `ru_maxrss`) is counted anew.
    """
    policy = policy or Policy.default()
    if workload.recordings:
        policy = with_recordings(policy, workload.recordings)
    evidence, case, samples = evidence_on(
        onnx, reference=reference, workload=workload, policy=policy, progress=progress
    )
    _steps.debug("decide")
    preprocessing = _preprocessing(policy, reference, workload, onnx)
    evidence = evidence.model_copy(update={"preprocessing": preprocessing})
    champion = _beside(case, evidence, workload.against)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    compared = champion.compared_by(case.policy) if champion else None
    decision = decide(policy, evidence, incumbent=compared, decided_at=now)
    return Verdicted(
        evidence,
        decision,
        case,
        explained(case, evidence, decision),
        samples,
        change_of(decision, evidence, champion),
    )


def explained(case: Case, evidence: Evidence, decision: Decision) -> Explanation:
    """Why it was refused; an empty explanation of a file that passes, which imports nothing."""
    if decision.passed:
        return Explanation()
    from gate.localisation.explanation import explain

    _steps.debug("look for the layer that diverges first")
    if not isinstance(case.chained, OpenRelease):
        return explain(case, evidence, decision)
    for part in case.chained.parts:  # the first that fails makes what the others get
        own = evidence.parts[part.name]
        refused = decide(part.policy(case.policy), own, decided_at=decision.decided_at)
        if not refused.passed:
            found = explain(part.case(case.policy, case.batch_size), own, refused)
            located = found.localisation
            if located is not None:
                located = located.model_copy(update={"part": part.name})
            return found.model_copy(update={"localisation": located})
    from gate.localisation.releases.parts import blamed_on_chain

    numbers = [c for c in decision.problems if c.output and c.runtime and not c.part]
    for check in numbers[:1]:  # the numbers of the chain alone
        return Explanation(
            localisation=blamed_on_chain(case, case.chained, runtime=str(check.runtime))
        )
    return Explanation()


def _beside(case: Case, evidence: Evidence, champion: Champion | None) -> Champion | None:
    """The version that serves, with what came of running it beside the file. Where the policy does
    not ask for it, what goes wrong is said, and stops nothing."""
    if champion is None:
        return None
    compared = Compared(
        case.candidate, case.samples, case.labels, case.batch_size, case.policy, case.chained
    )
    try:
        incumbent = measure_incumbent(champion, beside=compared, evidence=evidence)
    except GateError as error:
        if case.policy.incumbent is not None:
            raise
        return Champion.unavailable(str(error))
    return replace(champion, incumbent=incumbent)


def evidence_on(
    onnx: Path,
    *,
    reference: Reference,
    workload: Workload,
    policy: Policy,
    progress: Progress | None = None,
) -> tuple[Evidence, Case, SampleTable]:
    """All that is measured on the file but parity of preprocessing, what it was measured on, and
    one row a sample.

    Raises as `check`.
    """
    case = case_of(onnx, reference=reference, workload=workload, policy=policy)
    parts = _parts_of(case, reference)
    subject = case.candidate.subject
    if reference.note is not None:
        reference.note.verify(subject, path=onnx)
    spec = _spec(reference, workload)
    code = _code(case, reference)
    measurement = measure(case, progress=progress, crew=workload.crew)
    verify_unchanged(code)
    source = reference.source.model_copy(
        update={
            "labels_sha256": workload.labels_sha256,
            "code": code,
            "preprocess_sha256": spec.digest() if spec else reference.source.preprocess_sha256,
        }
    )
    export = reference.note.record if reference.note else reference.export
    evidence = measurement.evidence(subject, source=source, export=export)
    evidence = evidence.model_copy(update={"parts": parts})
    return evidence, case, measurement.samples


def _code(case: Case, reference: Reference) -> ModelCode:
    """Of the model; of a release with that of its chain."""
    release, source = case.chained, reference.source
    if isinstance(release, OpenRelease):
        return code_of(reference.model, factory=source.factory, chain=release.chain_name)
    return source.code or code_of(reference.model)


def _parts_of(case: Case, reference: Reference) -> dict[str, Evidence]:
    """What is measured of each part of a release; nothing of one file."""
    release = case.chained
    if not isinstance(release, OpenRelease):
        return {}
    found = {}
    for part in release.parts:
        _steps.debug("measure the part %s", part.name)
        try:
            found[part.name], _, _ = evidence_on(
                part.candidate.path,
                reference=Reference(part.module, reference.source),
                workload=Workload(part.samples, batch_size=case.batch_size),
                policy=part.policy(case.policy),
            )
        except GateError as error:
            raise type(error)(f"the part {part.name}: {error}") from error
        dataset = found[part.name].dataset.model_copy(update={"left_out": part.left_out})
        found[part.name] = found[part.name].model_copy(update={"dataset": dataset})
    return found


def case_of(onnx: Path, *, reference: Reference, workload: Workload, policy: Policy) -> Case:
    """What is measured. Raises OnnxFileError, and of a release as `OpenRelease.open`."""
    if is_release(onnx):
        if workload.recordings:
            raise PolicyError(
                f"a recording is of one file, and {onnx} is a release of several. Judge the part "
                "that was recorded by itself (gate check PART.onnx), or leave the recording out."
            )
        release = OpenRelease.open(
            onnx,
            model=reference.model,
            samples=workload.samples,
            batch_size=workload.batch_size,
        )
        return Case(
            release.chain,
            Candidate(onnx, release.subject),
            workload.samples,
            policy,
            workload.batch_size,
            workload.labels,
            chained=release,
        )
    return Case(
        reference.model,
        Candidate(onnx, read_subject(onnx)),
        workload.samples,
        policy,
        workload.batch_size,
        workload.labels,
        workload.recordings,
        units=workload.units,
    )


def _spec(reference: Reference, workload: Workload) -> PreprocessSpec | None:
    """How pictures became the samples. Raises DataError where two say so differently."""
    specs = [spec for spec in (workload.spec, reference.spec) if spec is not None]
    if len({spec.digest() for spec in specs}) > 1:
        raise DataError(
            "the samples were made by another preprocessing spec than the one that the reference "
            "is given: the evidence can name only one. Give both the same file."
        )
    return specs[0] if specs else None


def _preprocessing(
    policy: Policy, reference: Reference, workload: Workload, onnx: Path
) -> PreprocessingParity | None:
    """None where the policy asks for none, and where there is nothing to measure it on: the
    decision takes what is lacking for an ERROR."""
    section, spec = policy.preprocessing, _spec(reference, workload)
    if section is None or spec is None or not workload.pictures:
        return None
    return parity_of_preprocessing(
        onnx, spec, workload.pictures, policy=section, dumped=workload.dumped
    )


def parity_of_preprocessing(
    onnx: Path,
    spec: PreprocessSpec,
    pictures: Sequence[Path],
    *,
    policy: PreprocessingPolicy,
    dumped: Mapping[str, NDArray[Any]] | None = None,
) -> PreprocessingParity:
    """As `measure_preprocessing`, on the pictures in files and folders, and where answers are
    bounded with those of the file `onnx` as it is now. Raises GateError."""
    from gate.preprocess.answers import ModelFile
    from gate.preprocess.measure import measure_preprocessing
    from gate.preprocess.pictures import pictures_in

    answers = policy.max_flips is not None
    if answers and is_release(onnx):
        raise PolicyError(
            f"preprocessing.max_flips counts the answers of one file, and {onnx} is a release. "
            "Set it to null: the tensors are compared all the same."
        )
    model = ModelFile(onnx, read_subject(onnx).sha256) if answers else None
    return measure_preprocessing(
        spec, pictures_in(pictures), policy=policy, model=model, dumped=dumped
    )
