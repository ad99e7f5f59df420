import json
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from gate.errors import EvidenceError, PolicyError
from gate.policy.metrics import BUILTIN, MetricPolicy
from gate.policy.policy import Policy
from gate.policy.sections import ChampionPolicy
from gate.summary.policy_docs import fields_named, policy_fields


def metric_policy(**fields: Any) -> MetricPolicy:
    arguments = {"name": "top1", "function": "accuracy", "max_drop": 0.01} | fields
    return MetricPolicy.model_validate_json(json.dumps(arguments))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a b"}, "name"),
        ({"function": "acuracy"}, "expected package.module:function, or one of accuracy"),
        ({"function": "mymetrics"}, "expected package.module:function"),
        ({"max_drop": None}, "no bound is set"),
        ({"max_drop": -0.1}, "greater than or equal to 0"),
        ({"max_drop": "NaN"}, "max_drop"),
        ({"confidence": 0.5}, "greater than 0.5"),
        ({"confidence": 1.0}, "less than 1"),
        ({"options": {"top": 5}}, "accuracy has no option 'top'. Its options: k"),
        ({"function": "mse", "min": 0.1}, "set max instead"),
        ({"max": 0.9}, "set min instead "),
        ({"function": "pkg.mod:loss", "max": 0.9}, "min instead, or higher_is_better: false"),
        ({"higher_is_better": False}, "leave higher_is_better out"),
        ({"aggregate": "dataset"}, "accuracy always uses 'mean'"),
        ({"slices": ["camera", "camera"]}, "name each column once"),
        ({"time_limit_s": 0}, "greater than 0"),
        ({"bound": 1}, "Extra inputs"),
    ],
)
def test_invalid_metric_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        metric_policy(**fields)


def test_valid_metrics_are_accepted():
    custom = metric_policy(
        function="pkg.mod:Own.value", max_drop=0.0, aggregate="sum", options={"k": [1]}
    )
    assert (custom.is_builtin, custom.aggregation, custom.is_higher_better) == (False, "sum", True)
    for name, traits in BUILTIN.items():
        builtin = metric_policy(name=name, function=name)
        assert builtin.aggregation == traits.aggregate
        assert builtin.is_higher_better == traits.higher_is_better
    assert metric_policy(function="mse", max=2.0, max_drop=None).max == 2.0


def test_definition_excludes_only_bounds_name_and_time_limit():
    base = metric_policy()
    for same in ({"max_drop": 0.5}, {"min": 0.1}, {"name": "x"}, {"time_limit_s": 1.0}):
        assert metric_policy(**same).definition() == base.definition()
    for second in ({"function": "m:f"}, {"options": {"k": 2}}, {"output": "y"}, {"slices": ["a"]},
                  {"confidence": 0.9}):  # fmt: skip
        assert metric_policy(**second).definition() != base.definition()


def test_metrics_are_read_from_a_policy_file(tmp_path):
    text = """
task: tensors
metrics:
  - name: map50
    function: mymetrics:map50
    max_drop: 0.002
    max_drop_from_champion: 0.0
    slices: [camera]
"""
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(PolicyError, match="set incumbent: {first_release: allow}"):
        Policy.from_file(path)
    path.write_text(text + "incumbent: {first_release: allow}\n")
    policy = Policy.from_file(path)
    assert [each.name for each in policy.metrics] == ["map50"]
    assert Policy.from_json(policy.to_json()) == policy
    path.write_text(text.replace("max_drop: 0.002", "max_dorp: 0.002"))
    with pytest.raises(PolicyError, match=r"policy.yaml:6: metrics.*Did you mean max_drop"):
        Policy.from_file(path)


def test_duplicate_metric_name_is_refused():
    with pytest.raises(ValidationError, match="'top1' is used twice"):
        Policy(
            metrics=(metric_policy(), metric_policy(max_drop=0.1)),
            runtimes=Policy.default().runtimes,
        )


def test_policy_without_metrics_keeps_its_digest():
    assert "metrics" not in Policy.default().to_plain()
    with pytest.raises(ValidationError, match="incumbent: no bound is set"):
        Policy(incumbent=ChampionPolicy(), runtimes=Policy.default().runtimes)


def test_each_metric_field_is_documented():
    (result,) = fields_named("max_drop", policy_fields())
    assert result.path == "metrics[].max_drop"
    fields = [each for each in policy_fields() if each.path.startswith("metrics[].")]
    assert len(fields) == len(MetricPolicy.model_fields)
    assert all(each.text or each.path == "metrics[].function" for each in fields)


@pytest.mark.parametrize(
    ("precision", "task", "metrics", "expected"),
    [
        ("quantized", "tensors", [{"name": "map50", "function": "map", "min": 0.5}], True),
        ("quantized", "tensors", [], False),
        ("exact", "tensors", [{"name": "map50", "function": "map", "min": 0.5}], False),
        ("reduced", "tensors", [{"name": "map50", "function": "map", "min": 0.5}], False),
        ("quantized", "classification", [{"name": "top", "function": "accuracy", "min": 0}], False),
    ],
)
def test_only_a_quantized_file_without_classes_is_bounded_by_metrics_alone(
    precision: str, task: str, metrics: list[dict[str, Any]], expected: bool
):
    plain = {
        "precision": precision,
        "task": task,
        "metrics": metrics,
        "runtimes": {"ort-cpu": {"required": "always"}},
    }
    refusal = pytest.raises(EvidenceError, match="no bound is set on outputs")
    with nullcontext() if expected else refusal:
        Policy.from_json(json.dumps(plain))
