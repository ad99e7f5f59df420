"""Correct files pass and wrong ones fail for single samples, empty outputs, masks and extreme
values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gate
from gate import Verdict
from gate.export.export_warnings import captured
from gate.summary.render import render_check
from tests.inferred_roles.nets import make_policy

PASS, FAIL, ERROR = Verdict.PASS, Verdict.FAIL, Verdict.ERROR

Head = Callable[[torch.Tensor, torch.Tensor], object]

LOWEST = torch.finfo(torch.float32).min


class Net(nn.Module):
    """A linear layer, followed by `head` of its input x and its output y."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head = nn.Linear(6, 4), head

    def forward(self, x: torch.Tensor) -> object:
        return self.head(x, self.linear(x))


def normal(samples: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(samples, 6)).astype(np.float32)


def pictures(detected: slice, samples: int = 24) -> np.ndarray:
    """Return samples of which those in `detected` have values above 2, which a detector finds."""
    x = np.random.default_rng(0).uniform(0, 1, size=(samples, 6)).astype(np.float32)
    x[detected, 1:3] += 3
    return x


@pytest.fixture
def judge(tmp_path):
    def judge(
        reference,
        file=None,
        *,
        x=None,
        outputs=("y",),
        one_by_one=False,
        policy=None,
        batch_size=32,
    ):
        """Check a file.

        `one_by_one`: the file takes one sample, and its outputs have any number of rows.
        """
        x = normal(24) if x is None else x
        path = tmp_path / "model.onnx"
        dynamic_axes: dict[str, dict[int, str]] = {name: {0: "rows"} for name in outputs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                Net(file or reference).eval(),
                (torch.from_numpy(x[: 1 if one_by_one else 2].copy()),),
                path,
                dynamo=False,
                opset_version=17,
                input_names=["x"],
                output_names=list(outputs),
                dynamic_axes=dynamic_axes if one_by_one else dynamic_axes | {"x": {0: "batch"}},
            )
        data = gate.EvaluationData(gate.SampleSet.from_arrays({"x": x}), batch_size=batch_size)
        # Wrong files differ on the samples, so probes are not needed.
        policy = policy or (make_policy() if file else None)
        return gate.check(path, Net(reference).eval(), data, policy)

    return judge


def require_verdict(result: gate.EvaluationResult) -> Verdict:
    assert not list_nans(result.evidence.model_dump())
    return result.decision.verdict


def list_nans(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [each for key, item in value.items() for each in list_nans(item, f"{path}.{key}")]
    if isinstance(value, tuple | list):
        return [each for item in value for each in list_nans(item, path)]
    return [path] if isinstance(value, float) and np.isnan(value) else []


def problems(result: gate.EvaluationResult) -> set[tuple[str, Verdict]]:
    """Return name and verdict of all problems except those of probes."""
    matches = {(each.name, each.verdict) for each in result.decision.problems}
    return {each for each in matches if not each[0].startswith("probe_")}


def check_named(result: gate.EvaluationResult, name: str) -> gate.CheckResult:
    return next(each for each in result.decision.checks if each.name == name)


def return_linear(x: torch.Tensor, y: torch.Tensor) -> object:
    return y


def make_scaled_head(share: float) -> Head:
    return lambda x, y: y * (1 + share)


def test_one_sample_passes_with_probes(judge):
    result = judge(return_linear, x=normal(1))
    assert require_verdict(result) is PASS
    stability = result.evidence.runtime("ort-cpu").outputs[0].stability
    assert stability.batch_invariance is stability.batch_invariance_ratio is None
    assert check_named(result, "batch_invariance_ratio").code == "left_to_probes"


def test_one_wrong_sample_fails(judge):
    result = judge(return_linear, make_scaled_head(1e-3), x=normal(1))
    assert require_verdict(result) is FAIL
    assert ("noise_ratio", FAIL) in problems(result)


def test_one_sample_without_probes_is_an_error(judge):
    result = judge(return_linear, x=normal(1), policy=make_policy())
    assert require_verdict(result) is ERROR
    assert problems(result) == {("samples", ERROR)}
    assert "probes" in render_check(check_named(result, "samples"))


def make_detector(limit: float) -> Head:
    return lambda x, y: torch.stack([x[0], x[0] * 2 + 1], 1)[x[0] > limit]


@pytest.mark.parametrize(
    ("found", "samples"),
    [
        (slice(8, None), 24),  # no rows in the samples for stability
        (slice(0, -1), 24),
        (slice(40, None), 80),  # no rows in the samples for the noise floor
    ],
)
def test_detector_without_rows_in_some_samples_passes(judge, found, samples):
    result = judge(make_detector(2.0), x=pictures(found, samples), one_by_one=True)
    assert require_verdict(result) is PASS
    (output,) = result.evidence.runtime("ort-cpu").outputs
    assert output.elements == 4 * len(range(samples)[found])
    assert output.noise.elements > 0


def test_detector_wrong_in_its_only_row_fails(judge):
    def scaled(x: torch.Tensor, y: torch.Tensor) -> object:
        return make_detector(2.0)(x, y) * 1.001

    result = judge(make_detector(2.0), scaled, x=pictures(slice(50, 51), 80), one_by_one=True)
    assert require_verdict(result) is FAIL
    assert {("noise_ratio", FAIL), ("noise_peak", FAIL)} <= problems(result)


@pytest.mark.parametrize(("model", "file", "found"), [
    (2.0, 9.0, slice(0, None)),

    (9.0, 2.0, slice(23, None)),
])  # fmt: skip
def test_rows_on_only_one_side_fail(judge, model, file, found):
    result = judge(make_detector(model), make_detector(file), x=pictures(found), one_by_one=True)
    assert require_verdict(result) is FAIL
    assert ("runtime", FAIL) in problems(result)


def test_detector_without_any_row_is_an_error(judge):
    result = judge(make_detector(2.0), x=pictures(slice(0, 0)), one_by_one=True)
    assert require_verdict(result) is ERROR
    assert problems(result) == {("empty", ERROR)}


def add_output(head: Head) -> Head:
    return lambda x, y: (y, head(x, y))


@pytest.mark.parametrize("head", [
    lambda x, y: x * 0 / 0,
    lambda x, y: x / 0,
], ids=["nan", "infinite by sign"])  # fmt: skip
@pytest.mark.parametrize("waived", [False, True])
def test_output_without_finite_elements(judge, head, waived):
    policy = gate.Policy.default()
    if waived:
        policy = policy.model_copy(update={"waive": {"z": ("nonfinite",)}})
    result = judge(add_output(head), outputs=("y", "z"), policy=policy)
    assert require_verdict(result) is (PASS if waived else ERROR)
    assert problems(result) == (set() if waived else {("nonfinite", ERROR)})


@pytest.mark.further
def test_finite_instead_of_infinite_values_fail_when_waived(judge):
    policy = gate.Policy.default().model_copy(update={"waive": {"z": ("nonfinite",)}})
    result = judge(
        add_output(lambda x, y: x.abs() / 0),
        add_output(lambda x, y: x.abs() * 1e30),
        outputs=("y", "z"),
        policy=policy,
    )
    assert require_verdict(result) is FAIL
    assert problems(result) == {("nonfinite", ERROR), ("finite", FAIL)}


def make_masked_head(fill: float | None, share: float = 0.0) -> Head:
    """Return a head that masks some logits of each sample and scales others by 1 + `share`.

    The mask is `fill`, or the lowest number of the model's dtype if `fill` is None.
    """

    def head(x: torch.Tensor, y: torch.Tensor) -> object:
        logits = torch.cat([y[:, :2], y[:, 2:] * (1 + share)], 1)
        lowest = torch.finfo(y.dtype).min if fill is None else fill
        return torch.where(x[:, :4] > 0.3, torch.full_like(logits, lowest), logits)

    return head


def make_column_masked_head(fill: float | None, share: float = 0.0) -> Head:
    def head(x: torch.Tensor, y: torch.Tensor) -> object:
        lowest = torch.finfo(y.dtype).min if fill is None else fill
        return torch.cat([y[:, :2] * (1 + share), torch.full_like(y[:, :1], lowest)], 1)

    return head


@pytest.mark.further
@pytest.mark.rows(3)
@pytest.mark.parametrize(("mask", "fill"), [
    *((make_masked_head, fill) for fill in (LOWEST, None, -np.inf, np.inf, LOWEST / 3, -1e30)),
    *((make_column_masked_head, fill) for fill in (None, -np.inf)),
])  # fmt: skip
def test_masked_logits(judge, mask, fill):
    assert require_verdict(judge(mask(fill))) is PASS
    wrong = judge(mask(fill), mask(fill, 1e-3))
    assert require_verdict(wrong) is FAIL
    assert ("noise_ratio", FAIL) in problems(wrong)
    assert {"finite", "repeatability_ratio", "batch_invariance_ratio"}.isdisjoint(
        {name for name, _ in problems(wrong)}
    )


@pytest.mark.further
@pytest.mark.parametrize(
    ("model", "file"), [(-np.inf, LOWEST), (LOWEST, -np.inf), (np.inf, -np.inf)]
)
def test_different_infinite_mask_fails(judge, model, file):
    result = judge(make_masked_head(model), make_masked_head(file))
    assert require_verdict(result) is FAIL
    assert ("finite", FAIL) in problems(result)


@pytest.mark.parametrize(
    ("mask", "model"), [(make_masked_head, LOWEST), (make_column_masked_head, None)]
)
def test_different_finite_mask_fails(judge, mask, model):
    """Fail a different mask, although the lowest number of float64 differs from both."""
    result = judge(mask(model), mask(-1e30))
    assert require_verdict(result) is FAIL
    assert ("noise_ratio", FAIL) in problems(result)


@pytest.mark.parametrize(
    ("task", "fill"), [("auto", np.inf), ("classification", -np.inf), ("classification", np.inf)]
)
def test_infinite_logits_are_classified(judge, task, fill):
    result = judge(make_column_masked_head(fill), policy=gate.Policy.default(task=task))
    classes = result.evidence.runtime("ort-cpu").outputs[0].classification
    assert classes.top1_agreement == 1.0
    assert classes.confidence.max < 1e-6
    assert require_verdict(result) is (ERROR if fill > 0 and task == "classification" else PASS)


@pytest.mark.rows(2)
@pytest.mark.parametrize("scale", [1e20, 1e37, 1e-30])
def test_values_of_any_size(judge, scale):
    assert require_verdict(judge(lambda x, y: y * scale)) is PASS
    wrong = judge(lambda x, y: y * scale, lambda x, y: y * scale * 1.001)
    assert require_verdict(wrong) is FAIL
    assert ("noise_ratio", FAIL) in problems(wrong)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_output(judge, value):
    def head(add: float) -> Head:
        return add_output(lambda x, y: x * 0 + value + add)

    assert require_verdict(judge(head(0.0), outputs=("y", "z"))) is PASS
    wrong = judge(head(0.0), head(1e-3), outputs=("y", "z"))
    assert require_verdict(wrong) is FAIL
    assert ("noise_ratio", FAIL) in problems(wrong)


def test_output_zero_in_the_first_samples_has_a_noise_floor(judge):
    x = normal(400)
    x[:40, 0] = -9.0

    def head(x: torch.Tensor, y: torch.Tensor) -> object:
        return y, (torch.tanh(y) @ y.T.tanh().sum(1, keepdim=True) * 0 + x[:, :1]).relu() * y.exp()

    result = judge(head, x=x, outputs=("y", "z"))
    assert result.evidence.runtime("ort-cpu").outputs[1].noise.elements > 0
    assert require_verdict(result) is PASS


LENGTH = 16


class Attention(nn.Module):
    """An attention with a padding mask, optionally causal."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mixed, self.out = (
            nn.Embedding(100, 16),
            nn.Linear(16, 48),
            nn.Linear(16, 5),
        )
        self.causal = causal

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        heads = self.mixed(self.table(ids)).view(batch, length, 3, 2, 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        observed = mask.bool()[:, None, None].expand(batch, 1, length, length)
        if self.causal:
            indices = torch.arange(length)
            observed = observed & (indices[None] <= indices[:, None])
        result = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=observed)
        return self.out(result.transpose(1, 2).reshape(batch, length, 16))[:, 0]


@pytest.mark.rows(2)
@pytest.mark.proof
@pytest.mark.parametrize("causal", [True, False])
def test_padded_text_passes(tmp_path, causal):
    model, path = Attention(causal=causal).eval(), tmp_path / "model.onnx"
    random = np.random.default_rng(0)
    words = random.integers(2, 9, (48, 1))
    mask = (np.arange(LENGTH)[None] < words).astype(np.int64)
    arrays = {"ids": random.integers(1, 100, mask.shape) * mask, "mask": mask}
    dynamic = torch.export.Dim
    with captured():
        torch.onnx.export(
            model, tuple(torch.from_numpy(array[:2]) for array in arrays.values()), str(path),
            dynamo=True, input_names=list(arrays), output_names=["out"], external_data=False,
            dynamic_shapes=({0: dynamic.AUTO, 1: dynamic.DYNAMIC},) * 2, verbose=False,
        )  # fmt: skip
    observed = gate.check(path, model, arrays)
    assert observed.decision.verdict is Verdict.PASS, observed.decision.problems
    sizes = [p for r in observed.evidence.runtimes for p in r.probes if p.kind == "size"]
    assert any(probe.inapplicable is None for probe in sizes)
