"""Records of earlier versions remain readable, with the same content and digest."""

import json
from pathlib import Path

import pytest

from gate.decision.decide import Decision
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.summary.render import with_texts
from tests import builders

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("kind", "name", "digest"),
    [
        (
            Evidence,
            "evidence-v1.json",
            "7b3d772ae0c4b2573764b32a674b0f1f194eb0ecfbf48ffc1bba8394db29d854",
        ),
        (
            Evidence,
            "evidence-v1-instruments.json",
            "65ef4c8261c9faacab861cd093c9d2ce644b971e792d883e112fd5ef6988b926",
        ),
        (
            Evidence,
            "evidence-v1-weights.json",
            "de6d3e8f4421c69b5524e74c26779ffb6523735247ae38d415e5cd034ffaa8a4",
        ),
        (
            Evidence,
            "evidence-v1-samples.json",
            "4e758d488ad6eccfaed830af24e0ed970eac87c6a728aadb713e588701eb9919",
        ),
        (
            Policy,
            "policy-v1.json",
            "6fc97bc90532d1de5722d8c93deb110bd1504d2cb91fabd7c31c6d9be875ca04",
        ),
        (
            Decision,
            "decision-v1.json",
            "0b872529d413b33ab9d75b9462b9e76fe6a9e4b31d4926d592445deba79c8ade",
        ),
    ],
)
def test_old_records_are_readable(kind, name, digest):
    text = (GOLDEN / name).read_bytes()
    record = kind.from_json(text)
    assert record.digest().hex == digest
    assert record.to_plain() == json.loads(text)


def test_stored_evidence_equals_the_builders_evidence():
    current = remove_detail_codes(builders.evidence())
    assert Evidence.load(GOLDEN / "evidence-v1-samples.json") == builders.add_sample_details(
        current
    )
    assert Evidence.load(GOLDEN / "evidence-v1-weights.json") == remove_drawn_probes(current)
    without_weights = remove_detail_codes(
        builders.evidence(graph=builders.graph_report(weights=None))
    )
    assert Evidence.load(GOLDEN / "evidence-v1-instruments.json") == remove_drawn_probes(
        without_weights
    )


def remove_detail_codes(evidence: Evidence) -> Evidence:
    """Return the evidence in the old format, in which graph findings have texts instead of
    codes."""
    plain = with_texts(evidence)
    for finding in plain["graph"]["findings"]:
        del finding["detail_code"]
        finding.pop("detail_params", None)
    return Evidence.from_json(json.dumps(plain))


def remove_drawn_probes(evidence: Evidence) -> Evidence:
    """Return the evidence without probes of batch sizes drawn from the file's digest."""
    usual = builders.policy().instruments.probe_batch_sizes
    runtimes = tuple(
        runtime.model_copy(
            update={
                "probes": tuple(
                    probe
                    for probe in runtime.probes
                    if probe.kind != "batch" or probe.batch_size in usual
                )
            }
        )
        for runtime in evidence.runtimes
    )
    return evidence.model_copy(update={"runtimes": runtimes})
