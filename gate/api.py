"""Evaluate one file against one model: measure, decide, explain."""

from __future__ import annotations

import difflib
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import nn

from gate.decision.champion import Champion
from gate.decision.check_result import CheckResult
from gate.decision.decide import Decision, decide
from gate.errors import DataError, GateError, PolicyError
from gate.installation import require_module
from gate.measure.champion import ComparisonJob, measure_incumbent
from gate.measure.concurrency import ConcurrencyInstrument
from gate.measure.context import Instrument
from gate.measure.job import EvaluationData, MeasurementJob, Reference
from gate.measure.run import MeasurementRun
from gate.measure.stability import StabilityInstrument
from gate.model.source_code import verify_unchanged
from gate.multi_file.release import MultiFileRelease
from gate.onnx_file.reading import read_subject
from gate.onnx_file.release_file import is_release_file
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.policy.sections import PreprocessingPolicy
from gate.preprocess.spec import PreprocessSpec
from gate.probes.instrument import ProbeInstrument
from gate.records.evidence import Evidence, ModelCode, Subject
from gate.records.localization import Explanation
from gate.records.preprocessing import PreprocessingParity
from gate.reference.torch_reference import as_reference
from gate.runtimes.recorded import with_recordings
from gate.statistics.sample_table import SampleTable
from gate.summary.champion_changes import compare_with_champion, no_comparison
from gate.summary.render import render_check
from gate.summary.summarize import SummaryInputs
from gate.summary.summary import Change, Summary
from gate.weights.instrument import WeightInstrument

if TYPE_CHECKING:
    from pandas import DataFrame

    from gate.measure.job import Progress


_steps = logging.getLogger("gate.steps")

INSTRUMENTS: tuple[type[Instrument], ...] = (
    WeightInstrument,
    ProbeInstrument,
    StabilityInstrument,
    ConcurrencyInstrument,
)


@dataclass(frozen=True)
class EvaluationResult:
    """The evidence, the decision, the evaluated job, and an explanation of a rejection."""

    evidence: Evidence
    decision: Decision
    job: MeasurementJob
    explanation: Explanation
    samples: SampleTable = field(default_factory=SampleTable)
    """One row per sample, for the report."""
    metric_values: bytes = b""
    """Per-sample values of the metrics as safetensors; empty without metrics."""
    change: Change = field(default_factory=no_comparison)
    """The changes since the serving version."""
    is_named: bool = True
    """False if the reference is an object of the caller, which commands can't name."""

    @property
    def policy(self) -> Policy:
        """The policy that was applied."""
        return self.job.policy

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that are FAIL or ERROR; empty for a file that passes."""
        return self.decision.problems

    @property
    def summary_inputs(self) -> SummaryInputs:
        """The records that the summary is built from."""
        return SummaryInputs(
            decision=self.decision,
            evidence=self.evidence,
            policy=self.policy,
            explanation=self.explanation,
            change=self.change,
        )

    @cached_property
    def summary(self) -> Summary:
        """Headline, findings, runtimes and next steps, as shown in every report format."""
        names = {"MODEL.onnx": str(self.job.candidate.path)}
        if not self.is_named:
            names[shlex.quote(self.evidence.source.factory)] = "PKG.MODULE:FACTORY"
        return self.summary_inputs.summary.with_files(names)

    def to_frame(self) -> DataFrame:
        """Return one row per check, with the columns part, runtime, output, check, observed,
        relation, bound, verdict and text. Raises PackageMissing without pandas."""
        require_module("pandas")
        import pandas

        rows = [
            {
                "part": check.part,
                "runtime": check.runtime,
                "output": check.output,
                "check": check.label,
                "observed": check.observed,
                "relation": check.relation,
                "bound": check.bound,
                "verdict": check.verdict.value,
                "text": render_check(check),
            }
            for check in self.decision.checks
        ]
        return pandas.DataFrame(rows)

    def _repr_html_(self) -> str:
        """Return the first screen of the report, for notebooks."""
        from gate.report.html_page import Report, render_screen

        return render_screen(Report(self.summary, self.evidence, self.decision, self.explanation))

    def write_report(self, folder: Path) -> None:
        """Write the records, the page and its charts into a folder. Raises StorageError."""
        from gate.report.folder import write_report

        write_report(
            folder,
            self.decision,
            self.evidence,
            summary=self.summary,
            explanation=self.explanation,
        )


def check(
    onnx: Path | str,
    reference: Reference | nn.Module | Path | str,
    data: Any,
    policy: Policy | Path | str | None = None,
    *,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Measure the file `onnx` against the reference and decide.

    `reference`: an nn.Module, `"package.module:factory"`, the path of another ONNX file, or a
    `Reference`. `data`: a path, an array, a dict of arrays by input name, a torch DataLoader or
    Dataset, or `EvaluationData`. `policy`: a file or a `Policy`; None: the built-in policy, which
    infers the role of each output. The model is not changed. A bad file gives a decision, not an
    exception. Raises GateError if nothing can be measured, DigestMismatch if the file changes
    during the check or the export record is about another file, EvidenceError if the model's source
    files change. On Linux, the peak memory of this process (`VmHWM`, `ru_maxrss`) is reset.
    """
    onnx, reference = Path(onnx), Reference.from_model(reference)
    data, policy = EvaluationData.from_data(data), _policy(policy)
    if data.recordings:
        policy = with_recordings(policy, data.recordings)
    measured = measure_files(onnx, reference=reference, data=data, policy=policy, progress=progress)
    _steps.debug("decide")
    job, preprocessing = measured.job, _preprocessing(policy, reference, data, onnx)
    evidence = measured.evidence.model_copy(update={"preprocessing": preprocessing})
    champion = _measure_champion(job, evidence, data.against)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    compared = champion.compared_by(job.policy) if champion else None
    decision = decide(policy, evidence, incumbent=compared, decided_at=now)
    return EvaluationResult(
        evidence,
        decision,
        job,
        explain_failure(job, evidence, decision),
        measured.samples,
        measured.metric_values,
        compare_with_champion(decision, evidence, champion),
        is_named=reference.loaded,
    )


def measure_job(job: MeasurementJob, *, progress: Progress | None = None) -> Evidence:
    """Measure a job with all instruments. Raises the exceptions of `MeasurementRun`."""
    with MeasurementRun.open(job) as run:
        return run.run(INSTRUMENTS, progress=progress)


def explain_failure(job: MeasurementJob, evidence: Evidence, decision: Decision) -> Explanation:
    """Explain why a file was rejected; return an empty explanation for a file that passes."""
    if decision.passed:
        return Explanation()
    from gate.localize.locate import locate_failure

    _steps.debug("look for the layer that diverges first")
    if not isinstance(job.chained, MultiFileRelease):
        return locate_failure(job, evidence, decision)
    for part in job.chained.parts:  # the first failing part affects the inputs of the others
        part_evidence = evidence.parts[part.name]
        refused = decide(part.policy(job.policy), part_evidence, decided_at=decision.decided_at)
        if not refused.passed:
            part_job = part.job(job.policy, job.batch_size)
            explanation = locate_failure(part_job, part_evidence, refused)
            located = explanation.localisation
            if located is not None:
                located = located.model_copy(update={"part": part.name})
            return explanation.model_copy(update={"localisation": located})
    from gate.localize.locate_part import blamed_on_chain

    numbers = [c for c in decision.problems if c.output and c.runtime and not c.part]
    if not numbers:
        return Explanation()
    runtime = str(numbers[0].runtime)  # only the chain differs
    return Explanation(localisation=blamed_on_chain(job, job.chained, runtime=runtime))


def _measure_champion(
    job: MeasurementJob, evidence: Evidence, champion: Champion | None
) -> Champion | None:
    """Return the serving version, with the result of running it and the file on the same samples;
    an error is only recorded, unless the policy requires the comparison."""
    if champion is None:
        return None
    compared = ComparisonJob(
        job.candidate,
        job.samples,
        job.labels,
        job.batch_size,
        job.policy,
        job.chained,
        job.annotations,
    )
    try:
        incumbent = measure_incumbent(champion, comparison=compared, evidence=evidence)
    except GateError as error:
        if job.policy.incumbent is not None:
            raise
        return Champion.unavailable(str(error))
    return replace(champion, incumbent=incumbent)


def _policy(policy: Policy | Path | str | None) -> Policy:
    if isinstance(policy, str | Path):
        return Policy.from_file(Path(policy))
    if not isinstance(policy, Policy | None):
        raise PolicyError(
            f"the policy is of type {type(policy).__name__}. Expected the path of a YAML file or a "
            "gate.Policy."
        )
    return policy or Policy.default()


def collect_evidence(
    onnx: Path | str,
    reference: Reference | nn.Module | Path | str,
    data: Any,
    policy: Policy | Path | str | None = None,
    *,
    progress: Progress | None = None,
) -> Evidence:
    """Measure the file `onnx` against the reference, without a decision.

    The evidence has no preprocessing parity, which `check` adds. Arguments and exceptions are those
    of `check`.
    """
    return measure_files(
        Path(onnx),
        reference=Reference.from_model(reference),
        data=EvaluationData.from_data(data),
        policy=_policy(policy),
        progress=progress,
    ).evidence


@dataclass(frozen=True)
class MeasuredJob:
    """The evidence of a job, with the data that only a report contains."""

    evidence: Evidence
    job: MeasurementJob
    samples: SampleTable
    metric_values: bytes
    """Per-sample values of the metrics as safetensors; empty without metrics."""


def measure_files(
    onnx: Path,
    *,
    reference: Reference,
    data: EvaluationData,
    policy: Policy,
    progress: Progress | None = None,
) -> MeasuredJob:
    """Measure the file, for a release also each part. Raises the exceptions of `check`."""
    job = build_job(onnx, reference=reference, data=data, policy=policy)
    parts = _parts_of(job, reference)
    if reference.note is not None:
        reference.note.verify(job.candidate.subject, path=onnx)
    spec = _spec(reference, data)
    code = _code(job, reference)
    source = reference.source.model_copy(
        update={
            "labels_sha256": data.labels_sha256,
            "slices_sha256": data.annotations.slices_sha256,
            "code": code,
            "preprocess_sha256": spec.digest() if spec else reference.source.preprocess_sha256,
        }
    )
    export = reference.note.record if reference.note else reference.export
    job = replace(job, source=source, export=export)
    with MeasurementRun.open(job) as run:
        evidence = run.run(INSTRUMENTS, progress=progress, workers=data.workers)
        samples = run.sample_table()
    verify_unchanged(code)
    evidence = evidence.model_copy(update={"parts": parts})
    return MeasuredJob(evidence, job, samples, run.metric_values)


def _code(job: MeasurementJob, reference: Reference) -> ModelCode:
    """Return the code of the model, including the chain of a release."""
    release, source, model = job.chained, reference.source, as_reference(reference.model)
    if isinstance(release, MultiFileRelease):
        return model.collect_code(source.factory, chain=release.chain_name)
    return source.code or model.collect_code()


def _parts_of(job: MeasurementJob, reference: Reference) -> dict[str, Evidence]:
    """Return the evidence of each part of a release, by name; empty for a single file."""
    release = job.chained
    if not isinstance(release, MultiFileRelease):
        return {}
    evidence = {}
    for part in release.parts:
        _steps.debug("measure the part %s", part.name)
        try:
            evidence[part.name] = collect_evidence(
                part.candidate.path,
                reference=Reference(part.module, reference.source),
                data=EvaluationData(part.samples, batch_size=job.batch_size),
                policy=part.policy(job.policy),
            )
        except GateError as error:
            raise type(error)(f"the part {part.name}: {error}") from error
        dataset = evidence[part.name].dataset.model_copy(update={"left_out": part.left_out})
        evidence[part.name] = evidence[part.name].model_copy(update={"dataset": dataset})
    return evidence


def _require_outputs(policy: Policy, subject: Subject) -> None:
    """Raise PolicyError if the policy names an output that the file does not have."""
    names = [spec.name for spec in subject.outputs]
    unknown = sorted(set(policy.outputs) - set(names))
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        raise PolicyError(
            f"the policy or --role names the output {', '.join(map(repr, unknown))}, but the file "
            f"has {', '.join(map(repr, names))}."
            + (f" Did you mean {near[0]!r}?" if near else " Name an output of the file.")
        )


def build_job(
    onnx: Path, *, reference: Reference, data: EvaluationData, policy: Policy
) -> MeasurementJob:
    """Return the job of a measurement.

    Raises OnnxFileError and, for a release, the errors of `MultiFileRelease.open`.
    """
    if is_release_file(onnx):
        if data.recordings:
            raise PolicyError(
                f"a recording is about one file, but {onnx} is a release of several. Check the "
                "recorded part separately (gate check PART.onnx), or remove the recording."
            )
        release = MultiFileRelease.open(
            onnx,
            model=reference.module,
            samples=data.samples,
            batch_size=data.batch_size,
        )
        job = MeasurementJob(
            release.chain,
            TestedFile(onnx, release.subject),
            release.samples,
            policy,
            data.batch_size,
            data.labels,
            annotations=data.annotations,
            chained=release,
        )
    else:
        job = MeasurementJob.from_files(onnx, model=reference.model, data=data, policy=policy)
    _require_outputs(policy, job.candidate.subject)
    return job


def _spec(reference: Reference, data: EvaluationData) -> PreprocessSpec | None:
    """Return the spec that made the samples from pictures. Raises DataError for two specs."""
    specs = [spec for spec in (data.spec, reference.spec) if spec is not None]
    if len({spec.digest() for spec in specs}) > 1:
        raise DataError(
            "the samples and the reference have different preprocessing specs, but the evidence "
            "can name only one. Use the same file for both."
        )
    return specs[0] if specs else None


def _preprocessing(
    policy: Policy, reference: Reference, data: EvaluationData, onnx: Path
) -> PreprocessingParity | None:
    """Return the parity of preprocessing; None if not required, or without pictures.

    The decision turns missing evidence into an ERROR.
    """
    section, spec = policy.preprocessing, _spec(reference, data)
    if section is None or spec is None or not data.pictures:
        return None
    return parity_of_preprocessing(onnx, spec, data.pictures, policy=section, dumped=data.dumped)


def parity_of_preprocessing(
    onnx: Path,
    spec: PreprocessSpec,
    pictures: Sequence[Path],
    *,
    policy: PreprocessingPolicy,
    dumped: Mapping[str, NDArray[Any]] | None = None,
) -> PreprocessingParity:
    """Measure the parity of preprocessing on the pictures in files and folders. Raises GateError.

    If the policy bounds top-1 changes, they are measured with the file `onnx`.
    """
    from gate.preprocess.comparison import ModelFile, measure_preprocessing
    from gate.preprocess.pictures import pictures_in

    answers = policy.max_flips is not None
    if answers and is_release_file(onnx):
        raise PolicyError(
            f"preprocessing.max_flips needs a single file, but {onnx} is a release. Set it to "
            "null; the tensors are still compared."
        )
    model = ModelFile(onnx, read_subject(onnx).sha256) if answers else None
    return measure_preprocessing(
        spec, pictures_in(pictures), policy=policy, model=model, dumped=dumped
    )
