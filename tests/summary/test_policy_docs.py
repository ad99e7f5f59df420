"""The documentation of the policy covers all of its fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from gate import Policy
from gate.decision.catalog import row_of
from gate.policy.sections import Bounds, ReviewTag
from gate.summary.policy_docs import RUNTIME, fields_named, policy_fields, policy_text
from tests.exhaustive import for_each
from tests.test_docs import DOCS

FIELDS = policy_fields()
BOUNDS = f"runtimes.{RUNTIME}.bounds."


def models(model: type[BaseModel] = Policy) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models of a policy, without the tested code."""
    yield model
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if part is not Policy:
                yield from models(part)


def _parts(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _parts(part)


def test_policy_fields_lists_each_field_once():
    expected = [name for model in models() for name in model.model_fields]
    assert sorted(each.name for each in FIELDS) == sorted(expected)
    assert len({each.path for each in FIELDS}) == len(FIELDS)


@for_each(FIELDS)
def test_each_field_has_text_and_type(field):
    assert field.sentence.endswith((".", "?"))
    assert field.takes
    assert "'" not in field.takes
    if field.check is not None:
        assert field.check.formula


@for_each(Bounds.model_fields)
def test_each_bound_has_its_check_and_formula(name):
    (field,) = fields_named(f"{BOUNDS}{name}", FIELDS)
    rows = [row for row in (DOCS / "metrics.md").read_text().splitlines() if f"| `{name}` |" in row]
    assert len(rows) == 1
    if name != "confidence_bands":  # a section whose shares have defaults
        assert field.check is not None
        assert field.check is row_of(name)


@pytest.mark.parametrize(("name", "places"), [
    ("noise_ratio", [f"{BOUNDS}noise_ratio"]),
    ("bounds.noise_ratio", [f"{BOUNDS}noise_ratio"]),
    ("gate.runtimes.ort-cpu.bounds.noise_ratio", [f"{BOUNDS}noise_ratio"]),
    ("runtimes.ort.v2.bounds.noise_ratio", [f"{BOUNDS}noise_ratio"]),
    ("twin.runtimes.ort-cpu.required", [f"runtimes.{RUNTIME}.required"]),
    ("required", ["preprocessing.required", f"runtimes.{RUNTIME}.required"]),
    ("runtimes.ort-cpu", ["runtimes"]),
    ("task", ["task"]),
    ("ratio", []),
    ("", []),
])  # fmt: skip
def test_field_is_found_by_suffix(name, places):
    assert [each.path for each in fields_named(name, FIELDS)] == places


@pytest.mark.parametrize(("name", "takes", "default", "built_in"), [
    ("noise_ratio", "number at least 0 or null", None, {"CPU": 1.5, "CUDA": 2.0}),
    ("over_5_percent", "number at least 0 and at most 1", None, {"quantized twin": 0.05}),
    ("min_samples", "integer at least 1", 1, {}),
    ("review", "automatic | required | signed", "automatic", {}),
    ("runtimes.ort-cpu.kind", "text or null", None, {}),
    ("determinism", "section", None, {}),
])  # fmt: skip
def test_documented_values_match_the_model(name, takes, default, built_in):
    (field,) = fields_named(name, FIELDS)
    assert (field.takes, field.default, field.built_in) == (takes, default, built_in)


ROOT = Path(__file__).parents[2]
UNUSUAL_POLICY = Policy.default().model_copy(
    update={"review_tag": ReviewTag(approved="yes", rejected="null")}
)


@pytest.mark.parametrize("policy", [
    Policy.default(),
    Policy.default(task="tensors"),
    Policy.quantized(),
    Policy.load(ROOT / "params.yaml"),
    UNUSUAL_POLICY,
])  # fmt: skip
def test_rendered_policy_is_read_back_equal(tmp_path, policy):
    file = tmp_path / "gate.yaml"
    file.write_text(policy_text(policy, name="gate.yaml"))
    assert Policy.from_file(file) == policy


def test_rendered_policy_has_each_field_with_its_text():
    text = policy_text(Policy.default(), name="gate.yaml")
    words = set(text.replace(",", " ").replace(":", " ").replace(".", " ").split())
    absent = ("preprocessing.", "incumbent.", "tried", "confidence_bands.", ".kind", ".options", "metrics[].")  # fmt: skip
    for field in policy_fields():
        if not any(part in field.path for part in absent):
            assert field.name in words, field.path
    assert f"# {next(f for f in policy_fields() if f.path == 'nonfinite').text[:40]}" in text
    assert RUNTIME not in text
    assert text.count("bounds: &") == 2  # one for the CPU and one for CUDA
    assert max(len(line) for line in text.splitlines() if "graph_forbid" not in line) <= 100
