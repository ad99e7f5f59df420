"""Custom metrics in `gate check`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch.nn.modules.module import register_module_forward_pre_hook

from gate import cli
from gate.api import EvaluationResult, check
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import decide
from gate.errors import PolicyError
from gate.measure.job import EvaluationData
from gate.metrics.process import values_digest
from gate.policy.policy import Policy
from gate.records.metrics import MetricEvidence
from gate.storage.digest import Digest
from gate.summary.render import render_check
from tests.metrics.project import Project, project

__all__ = ["project"]

NOW = "2026-01-01T00:00:00+00:00"

HIT = "name: hit, function: 'mymetrics:hit', slices: [language]"


def check_metrics(
    project: Project, *metrics: str, file: str = "model.onnx", labels: str | None = "labels.jsonl"
) -> EvaluationResult:
    policy = Policy.from_file(project.policy(*metrics))
    data = EvaluationData.open("ids.npy").with_labels(
        None if labels is None else Path(labels), metrics=policy.metrics
    )
    return check(file, "textnet:build", data, policy)


def select_checks(result: EvaluationResult, name: str) -> dict[str | None, CheckResult]:
    return {check.point: check for check in result.decision.checks if check.name == name}


@pytest.mark.further
def test_a_drop_in_one_slice_alone_refuses_the_file(project: Project):
    metric = f"{HIT}, max_drop: 0.3"
    good = check_metrics(project, metric)
    assert good.decision.passed
    worse = check_metrics(project, metric, file="worse.onnx")
    assert worse.decision.verdict is Verdict.FAIL
    drops = select_checks(worse, "metric_drop")
    assert {point: (each.verdict, each.code) for point, each in drops.items()} == {
        "hit": (Verdict.PASS, "proven"),
        "hit, language=a": (Verdict.PASS, "proven"),
        "hit, language=b": (Verdict.FAIL, "dropped"),
    }
    foreign = drops["hit, language=b"]
    assert foreign.samples == project.foreign.sum()
    assert foreign.params["drop"] == pytest.approx(1.0, abs=0.05)
    assert drops["hit"].params["drop"] == pytest.approx(project.foreign.mean(), abs=0.01)
    assert [check.title for check in worse.decision.problems] == [
        "ort-cpu / metric_drop of hit, language=b"
    ]
    assert all(render_check(each) for each in worse.decision.checks)


def test_arrays_take_labels_of_a_file(project: Project):
    policy = Policy.from_file(project.policy(f"{HIT}, max_drop: 0.3"))
    data = EvaluationData.from_data({"ids": np.load("ids.npy")})
    labelled = data.with_labels(Path("labels.jsonl"), metrics=policy.metrics)
    evidence = check("model.onnx", "textnet:build", labelled, policy).evidence
    from_file = check_metrics(project, f"{HIT}, max_drop: 0.3").evidence
    assert [m.values_sha256 for m in evidence.metrics] == [
        m.values_sha256 for m in from_file.metrics
    ]


@pytest.mark.further
def test_what_counts_is_the_bound_not_the_value(project: Project):
    few = select_checks(check_metrics(project, f"{HIT}, max_drop: 0.01"), "metric_drop")
    assert (few["hit"].verdict, few["hit"].code) == (Verdict.PASS, "proven")
    slice_ = few["hit, language=b"]
    assert (slice_.verdict, slice_.code, slice_.params["method"]) == (
        Verdict.ERROR, "too_few", "rule_of_three",
    )  # fmt: skip
    assert slice_.params["needed"] > slice_.samples
    exact = select_checks(check_metrics(project, f"{HIT}, max_drop: 0.0"), "metric_drop")
    assert {each.code for each in exact.values()} == {"no_worse"}


def test_values_per_sample_are_bound_by_digest(project: Project, tmp_path: Path):
    result = check_metrics(
        project,
        f"{HIT}, max_drop: 0.3",
        "name: m, function: 'mymetrics:margin', options: {power: 2}, min: 0.0",
    )
    path = tmp_path / "values.safetensors"
    path.write_bytes(result.metric_values)
    values = load_file(path)
    expected = (np.asarray(project.outputs).argmax(axis=1) >= 0).astype(float)
    np.testing.assert_array_equal(values["hit/rows/reference"][:, 0], expected)
    for metric in result.evidence.metrics:
        custom = {name: v for name, v in values.items() if name.startswith(f"{metric.name}/")}
        assert values_digest(custom) == metric.values_sha256
        assert list(metric.source) == ["mymetrics"]
    assert select_checks(result, "metric_limit")["m"].code == "within"


def edit_metric(metric: MetricEvidence, group: int, **changed: Any) -> MetricEvidence:
    """Return the metric with changed fields of one group, or of its drop on ort-cpu."""
    groups = list(metric.groups)
    side = groups[group].runtimes["ort-cpu"]
    change = side.change.model_copy(
        update={n: v for n, v in changed.items() if n in ("drop", "changed")}
    )
    runtimes = {"ort-cpu": side.model_copy(update={"change": change})}
    custom = {name: value for name, value in changed.items() if name == "samples"}
    groups[group] = groups[group].model_copy(update={"runtimes": runtimes, **custom})
    return metric.model_copy(update={"groups": tuple(groups)})


@pytest.mark.parametrize(
    ("group", "changed", "code"),
    [
        (0, {"samples": 5}, "metric_samples"),
        (1, {"samples": 5}, "metric_samples"),
        (2, {"drop": 0.0}, "metric_numbers"),
        (2, {"drop": float("nan")}, "metric_numbers"),
        (1, {"changed": 100_000}, "metric_numbers"),
    ],
)
def test_numbers_that_contradict_each_other_prove_nothing(
    project: Project, group: int, changed: dict[str, Any], code: str
):
    policy = Policy.from_file(project.policy(f"{HIT}, max_drop: 1.5"))
    evidence = check_metrics(project, f"{HIT}, max_drop: 1.5", file="worse.onnx").evidence
    assert decide(policy, evidence, decided_at=NOW).passed
    (metric,) = evidence.metrics
    wrong = evidence.model_copy(update={"metrics": (edit_metric(metric, group, **changed),)})
    decision = decide(policy, wrong, decided_at=NOW)
    assert decision.verdict is Verdict.ERROR
    (problem,) = [each for each in decision.checks if each.verdict is Verdict.ERROR]
    assert code in json.dumps(problem.to_plain())


def test_rounding_is_not_worse(project: Project):
    evidence = check_metrics(project, f"{HIT}, max_drop: 0.0").evidence
    policy = Policy.from_file(Path("policy.yaml"))
    for change, verdict in (
        ({"drop": 5e-10, "changed": 0}, Verdict.PASS),
        ({"drop": 5e-10, "changed": 1}, Verdict.FAIL),
    ):
        (metric,) = evidence.metrics
        rounded = evidence.model_copy(update={"metrics": (edit_metric(metric, 0, **change),)})
        assert decide(policy, rounded, decided_at=NOW).verdict is verdict


@pytest.mark.further
def test_the_decision_is_bound_to_the_files_of_labels_and_slices(project: Project):
    rows = Path("labels.jsonl").read_text()
    Path("slices.jsonl").write_text(rows)
    policy = Policy.from_file(project.policy(f"{HIT}, max_drop: 0.3"))
    samples = EvaluationData.open("ids.npy")

    def bound() -> EvaluationResult:
        labels, slices = Path("labels.jsonl"), Path("slices.jsonl")
        data = samples.with_labels(labels, slices=slices, metrics=policy.metrics)
        result = check("model.onnx", "textnet:build", data, policy)
        source = result.evidence.source
        assert source.labels_sha256 == Digest.from_file(labels)
        assert source.slices_sha256 == Digest.from_file(slices)
        return result

    before = bound()
    first, *rest = rows.splitlines(keepends=True)
    Path("slices.jsonl").write_text("".join([*rest, first]))
    after = bound()
    assert before.decision.evidence_sha256 != after.decision.evidence_sha256
    custom = check_metrics(project, f"{HIT}, max_drop: 0.3").evidence.source
    assert custom.slices_sha256 == custom.labels_sha256


def test_one_broken_metric_does_not_spoil_another(project: Project):
    result = check_metrics(
        project,
        "name: nan, function: 'mymetrics:is_nan', max_drop: 0.3",
        "name: hit, function: 'mymetrics:hit', max_drop: 0.3",
    )
    assert select_checks(result, "metric_drop")["hit"].verdict is Verdict.PASS
    assert [problem.point for problem in result.decision.problems] == ["nan"]


def test_metric_that_cannot_be_imported_stops_before_the_first_forward(project: Project):
    calls: list[Any] = []
    hook = register_module_forward_pre_hook(lambda *call: calls.append(call))
    with pytest.raises(PolicyError):
        check_metrics(project, "name: missing, function: 'mymetrics:missing', max_drop: 0.3")
    hook.remove()
    assert calls == []


def test_no_labels_is_not_measured(project: Project):
    result = check_metrics(project, "name: top1, function: accuracy, max_drop: 0.3", labels=None)
    assert [p.params["problems"][0]["code"] for p in result.decision.problems] == ["metric_failed"]


@pytest.mark.parametrize("bound", ["max_drop: 0.3", "min: 0.5"])
def test_labels_that_no_output_equals_prove_nothing(project: Project, bound: str):
    text = Path("labels.jsonl").read_text().replace('"label":', '"answer":')
    Path("renamed.jsonl").write_text(text)
    for labels in (None, "renamed.jsonl"):
        result = check_metrics(
            project, f"name: hit, function: 'mymetrics:hit', {bound}", labels=labels
        )
        assert result.decision.verdict is Verdict.ERROR
        problems = [check.params["problems"][0]["code"] for check in result.decision.problems]
        assert problems == ["metric_failed"]


def test_installed_function_is_refused_before_the_check(project: Project):
    with pytest.raises(PolicyError, match="numpy:equal has no source file"):
        check_metrics(project, "name: equal, function: 'numpy:equal', min: 0.1")


def test_labels_of_the_data_serve_metrics_too(project: Project):
    rows = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
    np.save("labels.npy", np.array([row["label"] for row in rows]))
    policy = Policy.from_file(project.policy("name: top1, function: accuracy, min: 0.9"))
    data = EvaluationData.open("ids.npy", labels=Path("labels.npy"))
    result = check("model.onnx", "textnet:build", data, policy)
    assert select_checks(result, "metric_limit")["top1"].code == "within"


def test_a_loss_that_rises_needs_a_direction(project: Project):
    miss = "name: miss, function: 'mymetrics:miss', max_drop: 0.01"
    verdicts = {}
    for direction in ("", ", higher_is_better: true", ", higher_is_better: false"):
        result = check_metrics(project, f"{miss}{direction}", file="worse.onnx")
        drop = select_checks(result, "metric_drop")["miss"]
        verdicts[drop.code] = drop.verdict
        assert abs(drop.params["drop"]) == pytest.approx(project.foreign.mean(), abs=0.01)
    assert verdicts == {
        "no_direction": Verdict.ERROR, "proven": Verdict.PASS, "dropped": Verdict.FAIL
    }  # fmt: skip


@pytest.mark.further
def test_data_set_metrics(project: Project):
    pytest.importorskip("torchmetrics")
    (project.folder / "tm.py").write_text(
        "import torch\nfrom torchmetrics.classification import BinaryF1Score\n"
        "class F1(BinaryF1Score):\n"
        "    def update(self, preds, target):\n"
        "        super().update(preds.argmax(dim=1), target)\n"
        "def make():\n    return F1()\n"
    )
    rows = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
    np.save("labels.npy", np.array([row["label"] for row in rows]))
    metrics = [
        "name: builtin, function: f1, options: {average: binary}, max_drop: 0.5",
        "name: counts, function: 'mymetrics:Counts', aggregate: dataset, max_drop: 0.5",
        "name: torch, function: 'tm:F1', aggregate: dataset, max_drop: 0.5",
        "name: made, function: 'tm:make', aggregate: dataset, max_drop: 0.5",
    ]
    result = check_metrics(project, *metrics, file="worse.onnx", labels="labels.npy")
    groups = [metric.groups[0] for metric in result.evidence.metrics]
    assert [metric.failure for metric in result.evidence.metrics] == [None] * 4
    changes = [group.runtimes["ort-cpu"].change for group in groups]
    for change in changes:
        assert change.drop == pytest.approx(changes[0].drop)
        assert change.bounds[0] == pytest.approx(changes[0].bounds[0], rel=0.1)
        assert change.method == "bca"
        assert change.drop < change.bounds[0] < 0.5
    with pytest.raises(PolicyError, match="aggregate: dataset"):
        check_metrics(project, "name: torch, function: 'tm:F1', min: 0.1", labels="labels.npy")


def decide_on_edited(result: EvaluationResult, **update: Any) -> Verdict:
    (metric, *rest) = result.evidence.metrics
    evidence = result.evidence.model_copy(
        update={"metrics": (metric.model_copy(update=update), *rest)}
    )
    return decide(result.policy, evidence, decided_at=NOW).verdict


def test_evidence_that_does_not_fit_the_policy_never_passes(project: Project):
    result = check_metrics(project, f"{HIT}, max_drop: 0.3")
    (metric,) = result.evidence.metrics
    assert decide_on_edited(result) is Verdict.PASS
    complete, *slices = metric.groups
    side = complete.runtimes["ort-cpu"]
    for drop in (float("nan"), float("inf"), 0.4):
        change = side.change.model_copy(update={"drop": drop})
        sides = {"ort-cpu": side.model_copy(update={"change": change})}
        assert (
            decide_on_edited(
                result, groups=(complete.model_copy(update={"runtimes": sides}), *slices)
            )
            is not Verdict.PASS
        )
    unbound = result.evidence.source.model_copy(update={"slices_sha256": None})
    evidence = result.evidence.model_copy(update={"source": unbound})
    assert decide(result.policy, evidence, decided_at=NOW).verdict is Verdict.ERROR
    for update in (
        {"name": "other"},
        {"definition_sha256": metric.values_sha256},
        {"failure": "it broke"},
        {"groups": ()},
        {"groups": (complete,)},
        {"groups": tuple(slices)},
        {"groups": (complete, slices[0], slices[0])},
        {"groups": (complete.model_copy(update={"runtimes": {}}), *slices)},
        {"groups": (complete.model_copy(update={"samples": 0}), *slices)},
        {"values_sha256": None},
        {"source": {}},
    ):
        assert decide_on_edited(result, **update) is not Verdict.PASS, update
    none = result.evidence.model_copy(update={"metrics": ()})
    assert decide(result.policy, none, decided_at=NOW).verdict is Verdict.ERROR


@pytest.mark.slow
@pytest.mark.proof
def test_a_plan_measures_metrics_with_labels_and_slices_of_files(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    rows = [json.loads(line) for line in Path("labels.jsonl").read_text().splitlines()]
    Path("slices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("labels.jsonl").write_text("".join(f"{row['label']}\n" for row in rows))
    policy = project.policy(f"{HIT}, max_drop: 0.3")

    def gate(*arguments: str) -> dict[str, Any]:
        cli.main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    gate(
        "plan", "worse.onnx", "--reference", "textnet:build", "--inputs", "ids.npy", "--labels",
        "labels.jsonl", "--slices", "slices.jsonl", "--policy", str(policy), "--batch-size", "8",
        "--units", "2", "-o", "plan.json",
    )  # fmt: skip
    assert gate("measure", "plan.json", "--unit", "0", "-o", "0.json")["measured"] is True
    with Path("slices.jsonl").open("a") as stream:
        stream.write("\n")
    assert gate("merge", "plan.json", "0.json")["error"]["type"] == "DigestMismatch"
