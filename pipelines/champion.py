"""Compare the trained model's file with the serving version on the evaluation samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gate.data.array_files import open_labels
from gate.data.samples import SampleSet
from gate.decision.champion import Champion
from gate.decision.decide import Decision
from gate.errors import EvidenceError, GateError
from gate.ledger.entry import ComparedWith
from gate.ledger.history import ModelHistory
from gate.measure.champion import ComparisonJob, measure_incumbent
from gate.measure.job import Opener, SamplesOrigin, open_annotations
from gate.onnx_file.release_file import ReleaseFile, is_release_file
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.champion_comparison import ChampionComparison
from gate.records.evidence import Evidence
from gate.registry.load_champion import load_champion
from gate.registry.registered_model import RegisteredModel
from gate.storage.files import temporary_folder
from pipelines import paths, signing
from pipelines.params import ModelParams, ParityParams, ReleaseParams


def load_compared_champion(model: RegisteredModel, policy: Policy, evidence: Evidence) -> Champion:
    """Return the champion with the result of running it on the evaluation samples.

    If the policy does not require the comparison, errors are only printed. Otherwise raises
    GateError.
    """
    try:
        with temporary_folder() as folder:
            champion = load_champion(model, into=folder, trust=signing.local_keys().trust())
            earlier = _find_earlier_comparison(champion, evidence, model.history())
            incumbent = earlier or _measure(champion, policy, evidence)
            return replace(champion, incumbent=incumbent, onnx_path=None)
    except GateError as error:
        if policy.incumbent is not None:
            raise
        print(f"not compared with the serving version: {error}")
        return Champion.unavailable(str(error))


def _measure(champion: Champion, policy: Policy, evidence: Evidence) -> ChampionComparison:
    samples = SampleSet.open(paths.EVAL_IMAGES)
    labels = (
        open_labels(paths.EVAL_LABELS, samples=len(samples)) if policy.task != "tensors" else None
    )
    onnx, size = ReleaseParams.load().path, ParityParams.load().batch_size
    candidate = TestedFile(onnx, evidence.subject)
    opener = _create_opener(onnx, samples, size) if is_release_file(onnx) else None
    origin = SamplesOrigin(str(paths.EVAL_IMAGES), paths.EVAL_LABELS)
    annotations = open_annotations(origin, policy.metrics, len(samples))
    job = ComparisonJob(candidate, samples, labels, size, policy, opener, annotations)
    return measure_incumbent(champion, comparison=job, evidence=evidence)


def _create_opener(onnx: Path, samples: SampleSet, batch_size: int) -> Opener:
    """Return a function that opens the files of a release. It runs each module once to learn the
    module's inputs and outputs."""
    from gate.multi_file.chain_model import ChainModel
    from gate.multi_file.chain_session import Interfaces
    from pipelines.model import load_trained_model

    model, _ = load_trained_model(ModelParams.load())
    file = ReleaseFile.load(onnx)
    chain = ChainModel.from_model(
        model, chain=file.chain, references=file.references, inputs=samples.names
    )
    return Interfaces.from_batches(chain, samples.batches(batch_size))


def _find_earlier_comparison(
    champion: Champion, evidence: Evidence, history: ModelHistory
) -> ChampionComparison | None:
    """Return the comparison of the previous decision if it has the same files and samples, or None.

    Latencies differ between runs. Measuring again would change the release and create a second
    version that waits for review. Only a comparison in the ledger is reused, because the file of
    the decision may have been edited.
    """
    try:
        decision = Decision.load(paths.DECISION)
    except EvidenceError:  # no previous decision
        return None
    previous = decision.incumbent
    if previous is None or previous.state != "compared":
        return None
    if (previous.version, previous.sha256) != (champion.version, champion.sha256):
        return None
    recorded = ComparedWith.from_decision(decision)
    is_recorded = any(entry.compared_with == recorded for entry in history.entries)
    return previous if is_recorded and decision.evidence_sha256 == evidence.digest() else None
