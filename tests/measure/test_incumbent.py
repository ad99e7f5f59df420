"""The tested file is compared with the deployed champion on the same samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from gate import Evidence, Policy, SampleSet, TestedFile
from gate.decision.champion import Champion
from gate.decision.metric_rules import check_champion_metrics
from gate.errors import DigestMismatch
from gate.measure.champion import ComparisonJob, measure_incumbent
from gate.measure.cost_meter import Stopwatch
from gate.onnx_file.reading import read_subject
from gate.policy.metrics import MetricPolicy
from gate.records.champion_comparison import ChampionComparison
from gate.records.metrics import MetricDrop, MetricEvidence, MetricGroup, MetricSide, MetricValue
from tests import builders
from tests.registry import releases

COUNT, CLASSES = 50, 10


def inputs(count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(count, 3)).astype(np.float32)


def predict_classes(path: Path, x: np.ndarray) -> np.ndarray:
    """Compute the predicted classes from the weights, without a runtime."""
    import onnx

    (weights,) = onnx.load(path).graph.initializer
    return (x @ numpy_helper.to_array(weights)).argmax(1)


def write_linear(path, *, features=3, batch="batch", output="logits"):
    weights = np.random.default_rng(features).normal(size=(features, CLASSES)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], [output])],
        "linear",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [batch, features])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [batch, CLASSES])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def champion(path: Path, **overrides: Any) -> Champion:
    measured = releases.evidence(path)
    fields: dict[str, Any] = {
        "state": "proven",
        "version": "7",
        "sha256": measured.subject.sha256,
        "onnx_path": path,
        "evidence": measured,
    }
    return Champion(**fields | overrides)


def compare(new: Path, old: Champion, **overrides: Any) -> ChampionComparison:
    samples = SampleSet.from_arrays({"input": overrides.pop("x", inputs())})
    evidence: Evidence = overrides.pop("evidence", None) or releases.evidence(new)
    fields = {"labels": None, "batch_size": 8, "policy": Policy.default()} | overrides
    comparison = ComparisonJob(TestedFile(new, read_subject(new)), samples, **fields)
    return measure_incumbent(old, comparison=comparison, evidence=evidence)


@pytest.fixture
def old(tmp_path):
    return releases.onnx_file(tmp_path / "old.onnx", seed=1)


@pytest.fixture
def new(tmp_path):
    return releases.onnx_file(tmp_path / "new.onnx", seed=2)


def test_answers_and_accuracy_match_a_manual_computation(old, new):
    x = inputs()
    champion_classes, file_classes = predict_classes(old, x), predict_classes(new, x)
    labels = np.where(np.arange(COUNT) % 2 == 0, champion_classes, (champion_classes + 1) % CLASSES)
    result = compare(new, champion(old), labels=labels)
    (answers,) = result.outputs
    assert result.state == "compared"
    assert (answers.samples, result.samples) == (COUNT, COUNT)
    assert 0 < answers.disagreements == (champion_classes != file_classes).sum()
    assert answers.champion_accuracy == pytest.approx(0.5)
    assert answers.accuracy == pytest.approx((file_classes == labels).mean())
    assert (result.version, result.sha256) == ("7", read_subject(old).sha256)
    assert result.subject_sha256 == read_subject(new).sha256
    assert result.evidence_sha256 == releases.evidence(old).digest()
    assert (result.champion_noise_ratio, result.noise_ratio) == (1.1, 1.1)


def test_both_files_are_timed_on_equally_many_batches(old, new):
    """Time both files on the same number of batches, also when there are few samples."""
    for count in (8, COUNT):
        result = compare(new, champion(old), x=inputs(count))
        assert result.latency is not None
        assert result.champion_latency is not None
        assert result.latency.batches == result.champion_latency.batches >= 13
        assert result.latency_ratio is not None
        assert 0.0 < result.latency_ratio < np.inf


def test_files_are_timed_in_alternating_order(old, new, monkeypatch):
    """Alternate the two files, so that a slowdown of the machine affects both."""
    turns: list[Stopwatch] = []

    class Watched(Stopwatch):
        def add(self, seconds: float, *, batch_size: int) -> None:
            turns.append(self)
            super().add(seconds, batch_size=batch_size)

    monkeypatch.setattr("gate.measure.champion.Stopwatch", Watched)
    compare(new, champion(old))
    new_stopwatch, old_stopwatch = turns[:2]
    assert new_stopwatch is not old_stopwatch
    for index in range(0, len(turns), 4):
        assert turns[index : index + 4] == [
            new_stopwatch,
            old_stopwatch,
            old_stopwatch,
            new_stopwatch,
        ]


def test_no_accuracy_without_labels(old, new):
    (answers,) = compare(new, champion(old)).outputs
    assert (answers.champion_accuracy, answers.accuracy, answers.accuracy_drop) == (None,) * 3


def test_same_file_is_not_compared(old):
    result = compare(old, champion(old))
    assert result.state == "compared"
    assert result.is_same_file
    assert result.latency is None


def test_output_without_class_role_has_no_answers(old, new):
    policy = Policy.default().model_copy(update={"outputs": {"logits": "scores"}})
    assert compare(new, champion(old), policy=policy).outputs == ()


@pytest.mark.parametrize("state", ["first", "unvouched", "unrecorded"])
def test_missing_champion_has_a_reason(new, state):
    result = compare(new, Champion(state=state, absent="for a reason"))
    assert (result.state, result.absent) == (state, "for a reason")


@pytest.mark.parametrize(("make", "reason"), [
    ({"features": 4}, "doesn't fit the samples"),
    ({"output": "other"}, "the new file returns 'logits'"),
    ({"batch": 7}, "not a multiple"),
])  # fmt: skip
def test_champion_with_other_inputs_is_incomparable(new, tmp_path, make, reason):
    result = compare(new, champion(write_linear(tmp_path / "other.onnx", **make)))
    assert result.state == "incomparable"
    assert reason in str(result.absent)


def test_different_preprocessing_is_incomparable(old, new):
    """Refuse the comparison: different preprocessing would make the champion look worse."""
    evidences = []
    for path, name in ((old, "theirs"), (new, "ours")):
        measured = releases.evidence(path)
        source = measured.source.model_copy(update={"preprocess_sha256": builders.digest(name)})
        evidences.append(measured.model_copy(update={"source": source}))
    result = compare(new, champion(old, evidence=evidences[0]), evidence=evidences[1])
    assert result.state == "incomparable"
    assert "other preprocessing" in str(result.absent)


def test_replaced_champion_file_is_refused(old, new):
    old_champion = champion(old)
    releases.onnx_file(old, seed=3)
    with pytest.raises(DigestMismatch):
        compare(new, old_champion)


def with_metric(evidence: Evidence, metric: MetricPolicy, low: float, high: float) -> Evidence:
    """Return the evidence with a metric whose value is in the middle of the interval."""
    value = MetricValue(value=(low + high) / 2, low=low, high=high)
    change = MetricDrop(drop=0.0, changed=0, method="exact", bounds=(0.01,), scale=1.0)
    group = MetricGroup(
        samples=evidence.dataset.samples,
        reference=value,
        runtimes={"ort-cpu": MetricSide(**value.model_dump(), change=change)},
    )
    record = MetricEvidence(
        name=metric.name, definition_sha256=metric.definition(), higher_is_better=True,
        groups=(group,), values_sha256=evidence.dataset.sha256,
        source={"mymetrics": evidence.dataset.sha256},
    )  # fmt: skip
    return evidence.model_copy(update={"metrics": (record,)})


@pytest.mark.parametrize(
    ("aggregate", "limit", "code"),
    [("mean", 0.08, "proven"), ("mean", 0.05, "too_few"), ("mean", 0.01, "dropped"),
     ("sum", 0.08, "violated")],
)  # fmt: skip
def test_metrics_of_a_champion_that_takes_other_samples_are_not_paired(
    tmp_path: Path, new: Path, aggregate: str, limit: float, code: str
):
    metric = MetricPolicy(
        name="m", function="mymetrics:m", aggregate=aggregate, max_drop_from_champion=limit
    )
    policy = Policy.default().model_copy(update={"metrics": (metric,)})
    incompatible = champion(write_linear(tmp_path / "other.onnx", features=4))
    incompatible = replace(
        incompatible, evidence=with_metric(incompatible.evidence, metric, 0.86, 0.94)
    )
    evidence = with_metric(releases.evidence(new), metric, 0.85, 0.91)
    result = compare(new, incompatible, policy=policy, evidence=evidence)
    assert [each.paired for each in result.metrics] == [False]
    (check,) = check_champion_metrics(policy, evidence, result)
    assert check.code == code
    if aggregate == "mean":
        assert check.params["notes"] == [{"code": "metric_unpaired"}]
        assert check.params["drop"] == pytest.approx(0.02)
        assert result.metrics[0].groups[0].change.bounds == pytest.approx([0.07])
