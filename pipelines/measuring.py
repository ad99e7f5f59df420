"""Measure a file of the pipeline against the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gate.api import measure_files, parity_of_preprocessing
from gate.commands.progress import progress_bar
from gate.data.samples import SampleSet
from gate.errors import EvidenceError, GateError
from gate.golden.folder import GOLDEN_JSON, add_pictures
from gate.golden.manifest import GoldenManifest
from gate.measure import artifacts
from gate.measure.artifacts import SAMPLES, write_golden_of
from gate.measure.job import EvaluationData, MeasurementJob, Reference, SamplesOrigin
from gate.model.loading import collect_code
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.evidence import Evidence, ExportRecord, Source
from gate.records.preprocessing import PreprocessingParity
from gate.statistics.sample_table import SampleTable
from gate.storage import files
from gate.storage.digest import Digest
from pipelines import paths
from pipelines.model import load_trained_model
from pipelines.params import ModelParams, ParityParams
from pipelines.shares import with_workers


def measure(
    onnx: Path, policy: Policy, *, source: Source, title: str
) -> tuple[Evidence, MeasurementJob, SampleTable]:
    """Measure `onnx` on the evaluation samples with a progress bar.

    Returns the evidence, the job and one row per sample. The evidence has no export record yet:
    `with_records` adds it. `source` gets the digests of the checkpoint and the code. Raises
    GateError if nothing can be measured.
    """
    params = ModelParams.load()
    model, checkpoint = load_trained_model(params)
    code = collect_code(model, factory=params.name)
    used = source.model_copy(update={"checkpoint_sha256": checkpoint, "code": code})
    samples = SampleSet.open(paths.EVAL_IMAGES)
    origin = SamplesOrigin(str(paths.EVAL_IMAGES))
    workload = EvaluationData(samples, batch_size=ParityParams.load().batch_size, origin=origin)
    if policy.task != "tensors" or policy.metrics:
        workload = workload.with_labels(paths.EVAL_LABELS, metrics=policy.metrics)
        workload = replace(workload, labels_sha256=source.labels_sha256)
    with with_workers(onnx, workload, policy) as shared, progress_bar(title) as progress:
        measured = measure_files(
            onnx,
            reference=Reference(model, used),
            data=shared,
            policy=policy,
            progress=progress,
        )
    return measured.evidence, measured.job, measured.samples


def add_export_records(
    evidence: Evidence, record: ExportRecord | None, parts: Mapping[str, ExportRecord]
) -> Evidence:
    """Return the evidence with export records. `parts`: records of a release's parts, by name."""
    part_evidence = {
        name: part.model_copy(update={"export": parts.get(name)})
        for name, part in evidence.parts.items()
    }
    return evidence.model_copy(update={"export": record, "parts": part_evidence})


def measure_preprocessing(policy: Policy, onnx: Path) -> PreprocessingParity | None:
    """Compare preprocessing implementations on the kept images, as required by the policy.

    Returns None if the policy does not require it, or if the measurement fails: then the reason is
    printed, and the decision treats the missing result as an ERROR.
    """
    section = policy.preprocessing
    if section is None:
        return None
    try:
        spec = PreprocessSpec.load(paths.PREPROCESSING)
        return parity_of_preprocessing(onnx, spec, [paths.PICTURES], policy=section)
    except GateError as error:
        print(f"parity of preprocessing was not measured: {error}")
        return None


def write_samples(case: MeasurementJob, evidence: Evidence, table: SampleTable) -> None:
    """Write a table of all samples and images of the worst samples.

    If there are no such images, write only the reason, because DVC does not restore empty folders.
    """
    table.save(paths.SAMPLES)
    spec = PreprocessSpec.load(paths.PREPROCESSING)
    pictures = artifacts.thumbnails(case.samples, evidence, spec)
    artifacts.save(paths.WORST_PICTURES, pictures)
    none = paths.WORST_PICTURES / "none.txt"
    if pictures:
        none.unlink(missing_ok=True)
    else:
        files.write_text(none, "no sample differs, or the model's input is not an image\n")


def write_golden(folder: Path, case: MeasurementJob, evidence: Evidence) -> Digest | None:
    """Write the golden vectors for consumers of the file; return the digest of golden.json.

    Uses samples whose images `prepare` kept, so that a consumer can start from the images. If
    golden vectors can't be created, writes only the reason and returns None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reason_file = folder / "unmade.txt"
    pictures = sorted(paths.PICTURES.glob("*.png"))
    indices = [int(path.stem) for path in pictures]
    has_pictures = len(indices) >= SAMPLES
    try:
        golden = write_golden_of(
            folder,
            replace(case, samples=case.samples.take(indices)) if has_pictures else case,
            evidence=evidence,
        )
        if has_pictures:
            spec, sha256 = PreprocessSpec.load(paths.PREPROCESSING), _digest(golden)
            golden = add_pictures(folder, spec, pictures, sha256=sha256)
    except EvidenceError as error:  # for example NaN in the reference, which the verdict reports
        (folder / GOLDEN_JSON).unlink(missing_ok=True)
        files.write_text(reason_file, f"{error}\n")
        print(f"no golden vectors: {error}")
        return None
    reason_file.unlink(missing_ok=True)
    return _digest(golden)


def _digest(golden: GoldenManifest) -> Digest:
    return Digest.from_bytes(golden.file_bytes())
