"""Measuring a file of the pipeline against the trained model, as it is now."""

from __future__ import annotations

from pathlib import Path

from gate import atomic
from gate.errors import EvidenceError
from gate.evidence import Evidence, ExportRecord, Source
from gate.explanation import Case
from gate.export.onnx_file import read_subject
from gate.golden.folder import GOLDEN_JSON
from gate.parity.golden import write_golden_of
from gate.parity.measure import Candidate, measure
from gate.parity.samples import Samples, open_labels
from gate.policy import Policy
from pipelines import paths
from pipelines.model import trained
from pipelines.params import ModelParams, ParityParams
from pipelines.progress import bar


def measured(
    onnx: Path, policy: Policy, *, source: Source, export: ExportRecord | None, title: str
) -> tuple[Evidence, Case]:
    """The evidence on `onnx` over the evaluation samples, with a progress bar.

    `source` gets the digest of the checkpoint that was used. Raises GateError where nothing can be
    measured.
    """
    model, checkpoint = trained(ModelParams.load())
    subject = read_subject(onnx)
    samples = Samples.open(paths.EVAL_IMAGES)
    labels = (
        open_labels(paths.EVAL_LABELS, samples=len(samples))
        if policy.task == "classification"
        else None
    )
    candidate = Candidate(onnx, subject)
    with bar(title, len(samples)) as advance:
        done = 0

        def progress(samples_done: int, _total: int) -> None:
            nonlocal done
            advance(samples_done - done, "")
            done = samples_done

        measurement = measure(
            model,
            candidate,
            samples,
            policy=policy,
            batch_size=ParityParams.load().batch_size,
            labels=labels,
            progress=progress,
        )
    evidence = measurement.evidence(
        subject,
        source=source.model_copy(update={"checkpoint_sha256": checkpoint}),
        export=export,
    )
    return evidence, Case(model, candidate, samples, policy)


def write_golden(folder: Path, case: Case, evidence: Evidence) -> None:
    """What a consumer of the file will compare with. The reason alone where there can be none."""
    folder.mkdir(parents=True, exist_ok=True)
    unmade = folder / "unmade.txt"
    try:
        write_golden_of(
            folder,
            case.model,
            case.candidate,
            case.samples,
            policy=case.policy,
            evidence=evidence,
        )
    except EvidenceError as error:  # such as a reference that gives NaN: to be refused, not lost
        (folder / GOLDEN_JSON).unlink(missing_ok=True)
        atomic.write_text(unmade, f"{error}\n")
        print(f"no golden vectors: {error}")
    else:
        unmade.unlink(missing_ok=True)
