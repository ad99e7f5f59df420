"""Measuring a file of the pipeline against the trained model, as it is now."""

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
from pipelines.model import trained
from pipelines.params import ModelParams, ParityParams
from pipelines.shares import shared_out


def measured(
    onnx: Path, policy: Policy, *, source: Source, title: str
) -> tuple[Evidence, MeasurementJob, SampleTable]:
    """The evidence on `onnx` over the evaluation samples, with a progress bar, what it was measured
    on, and one row a sample. How the file was made is not in it yet: `with_records`.

    `source` gets the digest of the checkpoint and of the code that were used. Raises GateError
    where nothing can be measured.
    """
    params = ModelParams.load()
    model, checkpoint = trained(params)
    code = collect_code(model, factory=params.name)
    used = source.model_copy(update={"checkpoint_sha256": checkpoint, "code": code})
    samples = SampleSet.open(paths.EVAL_IMAGES)
    origin = SamplesOrigin(str(paths.EVAL_IMAGES))
    workload = EvaluationData(samples, batch_size=ParityParams.load().batch_size, origin=origin)
    if policy.task != "tensors" or policy.metrics:
        workload = workload.with_labels(paths.EVAL_LABELS, metrics=policy.metrics)
        workload = replace(workload, labels_sha256=source.labels_sha256)
    with shared_out(onnx, workload, policy) as shared, progress_bar(title) as progress:
        return measure_files(
            onnx,
            reference=Reference(model, used),
            data=shared,
            policy=policy,
            progress=progress,
        )[:3]


def with_records(
    evidence: Evidence, record: ExportRecord | None, parts: Mapping[str, ExportRecord]
) -> Evidence:
    """The evidence with how the file was made; `parts`: the same of each part of a release."""
    own = {
        name: measured.model_copy(update={"export": parts.get(name)})
        for name, measured in evidence.parts.items()
    }
    return evidence.model_copy(update={"export": record, "parts": own})


def preprocessing_of(policy: Policy, onnx: Path) -> PreprocessingParity | None:
    """Parity of preprocessing on the pictures that `prepare` kept, as the policy asks for it.

    None where it asks for none, and where it can't be measured, which is said aloud: the decision
    takes what is lacking for an ERROR.
    """
    asked = policy.preprocessing
    if asked is None:
        return None
    try:
        spec = PreprocessSpec.load(paths.PREPROCESSING)
        return parity_of_preprocessing(onnx, spec, [paths.PICTURES], policy=asked)
    except GateError as error:
        print(f"parity of preprocessing was not measured: {error}")
        return None


def write_samples(case: MeasurementJob, evidence: Evidence, table: SampleTable) -> None:
    """Every sample as a row, and the worst ones as pictures; the reason alone where there are none,
    because DVC brings back no empty folder."""
    table.save(paths.SAMPLES)
    spec = PreprocessSpec.load(paths.PREPROCESSING)
    pictures = artifacts.thumbnails(case.samples, evidence, spec)
    artifacts.save(paths.WORST_PICTURES, pictures)
    none = paths.WORST_PICTURES / "none.txt"
    if pictures:
        none.unlink(missing_ok=True)
    else:
        files.write_text(none, "no sample differs, or the input of the model is no picture\n")


def write_golden(folder: Path, case: MeasurementJob, evidence: Evidence) -> Digest | None:
    """What a consumer of the file will compare with; gives the digest of golden.json, from memory.
    The reason alone where there can be none.

    Taken from the samples whose pictures `prepare` kept, so that a consumer can start from those.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unmade = folder / "unmade.txt"
    pictures = sorted(paths.PICTURES.glob("*.png"))
    places = [int(path.stem) for path in pictures]
    kept = len(places) >= SAMPLES
    try:
        golden = write_golden_of(
            folder,
            replace(case, samples=case.samples.take(places)) if kept else case,
            evidence=evidence,
        )
        if kept:
            spec, sha256 = PreprocessSpec.load(paths.PREPROCESSING), _digest(golden)
            golden = add_pictures(folder, spec, pictures, sha256=sha256)
    except EvidenceError as error:  # such as a reference that gives NaN: to be refused, not lost
        (folder / GOLDEN_JSON).unlink(missing_ok=True)
        files.write_text(unmade, f"{error}\n")
        print(f"no golden vectors: {error}")
        return None
    unmade.unlink(missing_ok=True)
    return _digest(golden)


def _digest(golden: GoldenManifest) -> Digest:
    return Digest.from_bytes(golden.file_bytes())
