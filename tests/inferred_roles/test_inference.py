"""Inferred roles add checks but never cause an ERROR."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import nn

import gate
from gate import Verdict
from gate.errors import DataError
from gate.measure.artifacts import write_golden_of
from gate.summary.render import render_check
from tests.exhaustive import exhaustive
from tests.inferred_roles import nets
from tests.inferred_roles.nets import (
    FEATURES,
    HEADS,
    Net,
    check_file,
    export,
    export_with_torch,
    make_policy,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models and their files, exported once."""
    folder = tmp_path_factory.mktemp("guesses")
    return {
        head.__name__: (net, export(net, folder / f"{head.__name__}.onnx"))
        for head in HEADS
        for net in [Net(head)]
    }


def checks_named(result, name, output=None):
    return [
        check
        for check in result.decision.checks
        if check.name == name and (output is None or check.output == output)
    ]


@pytest.mark.rows(3)
@pytest.mark.parametrize("samples", [16, 48])
@pytest.mark.parametrize("head", [head.__name__ for head in HEADS])
def test_correct_file_passes_with_any_outputs(files, head, samples):
    policy = None if samples == 48 and head != "states" else make_policy()
    result = check_file(*files[head], samples, policy)
    assert result.decision.verdict is Verdict.PASS, result.decision.problems
    assert result.policy.task == "auto"


@pytest.mark.parametrize("head", ["coordinates", "embedding", "sorted_scores"])
def test_unclaimed_agreement_is_stated(files, head):
    result = check_file(*files[head], 16, make_policy())
    assert not checks_named(result, "top1_agreement")
    for check in checks_named(result, "agreement"):
        assert (check.verdict, check.code) == (Verdict.PASS, "not_claimed")
        assert "--role output=logits" in render_check(check)


def test_agreement_is_checked_when_samples_prove_it(files):
    result = check_file(*files["with_scale"], 16, make_policy())
    (check, _) = checks_named(result, "top1_agreement")
    assert (check.output, check.observed) == ("output_0", 1.0)
    assert not checks_named(result, "agreement")


def test_batch_dependent_axis_is_not_a_class_axis(files):
    """Recognize a second batch axis also if all samples are one batch."""
    result = check_file(*files["similarities"], 16, make_policy())
    (outputs, _) = (r.outputs for r in result.evidence.runtimes if r.outputs)
    assert [o.classification is None for o in outputs] == [True, True, False]


def test_constant_output_is_proven_by_equality(files):
    result = check_file(*files["with_constants"], 48, make_policy())
    observed = {c.output: c for c in checks_named(result, "reference")}
    assert observed["output_0"].code == "holds"
    for name in ("output_1", "output_2", "output_3", "output_4"):
        assert observed[name].code == "proven_constant"


def scale_constant(source: Path, target: Path, factor: float) -> Path:
    """Write a copy of the file whose only float scalar is multiplied by `factor`."""
    model = onnx.load(source)
    (scalar,) = (t for t in model.graph.initializer if not t.dims and t.data_type == 1)
    values = (numpy_helper.to_array(scalar) * factor).astype(np.float32)
    scalar.CopyFrom(numpy_helper.from_array(values, scalar.name))
    onnx.save(model, target)
    return target


@pytest.mark.rows(3)
@pytest.mark.parametrize(("task", "factor", "verdict"), [
    ("auto", 1.0, Verdict.PASS),
    ("classification", 1.0 + 2**-23, Verdict.PASS),
    ("tensors", 1.0 + 2**-23, Verdict.PASS),
    ("classification", 1.001, Verdict.FAIL),
    ("auto", 0.0, Verdict.FAIL),
    ("tensors", 0.0, Verdict.FAIL),
])  # fmt: skip
def test_unequal_constant_is_checked_by_its_bounds(tmp_path, task, factor, verdict):
    net = Net(lambda net, x: (x, net.scale.exp()))
    path = export(net, tmp_path / "right.onnx")
    file = scale_constant(path, tmp_path / "file.onnx", factor)
    # The graph report would find the changed weight, so it is disabled.
    policy = make_policy(task)
    blind = policy.instruments.model_copy(update={"graph": False})
    policy = policy.model_copy(update={"instruments": blind})
    result = check_file(net, file, 48, policy)
    assert result.decision.verdict is verdict, result.decision.problems
    (reference, _) = checks_named(result, "reference", "output_1")
    assert reference.verdict is Verdict.PASS
    assert {c.output for c in result.decision.problems} <= {"output_1"}


def test_constant_outputs_alone_are_an_error(tmp_path):
    net = Net(lambda net, x: (x * 0.0 + 1.0, net.scale.exp()))
    result = check_file(net, export(net, tmp_path / "model.onnx"), 48, make_policy())
    assert result.decision.verdict is Verdict.ERROR


ROLES = [
    ("coordinates", {"output": "tensor"}, Verdict.PASS, "role"),
    ("coordinates", {"output": "boxes"}, Verdict.PASS, "role"),
    ("coordinates", {"output": "logits"}, Verdict.ERROR, "reference"),
    ("embedding", {"output": "embedding"}, Verdict.PASS, "cosine_distance"),
    ("sorted_scores", {"output": "scores"}, Verdict.PASS, "role"),
    ("sorted_scores", {"output": "probabilities"}, Verdict.ERROR, "role"),
    ("with_scale", {"output_0": "logits"}, Verdict.PASS, "top1_agreement"),
    ("with_scale", {"output_1": "embedding"}, Verdict.ERROR, "role"),
    ("with_constants", {"output_2": "indices", "output_3": "mask"}, Verdict.PASS, "unequal_share"),
    ("with_constants", {"output_1": "indices"}, Verdict.ERROR, "role"),
]


@pytest.mark.rows(4)
@pytest.mark.parametrize(("head", "outputs", "verdict", "name"), ROLES)
def test_stated_role_is_checked(files, head, outputs, verdict, name):
    result = check_file(*files[head], 48, make_policy(outputs=outputs))
    assert result.decision.verdict is verdict, result.decision.problems
    assert verdict in {check.verdict for check in checks_named(result, name)}
    if verdict is Verdict.PASS:
        roles = {c.output: c.observed for c in checks_named(result, "role")}
        assert roles == outputs
        assert not {c.output for c in checks_named(result, "agreement")} & set(outputs)


def test_probabilities_are_checked_without_softmax(tmp_path):
    """Check the probabilities themselves: a softmax would flatten them and hide the difference."""

    correct = Net(lambda net, x: torch.softmax(x[:, :3], dim=1))
    wrong = Net(lambda net, x: torch.softmax(x[:, :3], dim=1) * 0.98)
    path = export(wrong, tmp_path / "model.onnx")
    policy = make_policy(outputs={"output": "probabilities"})
    observed = checks_named(check_file(correct, path, 48, policy), "row_sum_diff")[0]
    assert observed.verdict is Verdict.FAIL
    assert observed.observed == pytest.approx(0.02, rel=1e-3)
    correct_file = export(correct, tmp_path / "own.onnx")
    assert check_file(correct, correct_file, 48, policy).decision.passed


def log_with_nan(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Return a logarithm, which is NaN for negative numbers."""
    return torch.log(x)


@pytest.mark.further
def test_nan_in_same_places_passes_when_policy_allows(tmp_path):
    net = Net(log_with_nan)
    path = export(net, tmp_path / "model.onnx")
    refused = check_file(net, path, 48, make_policy())
    assert refused.decision.verdict is Verdict.FAIL
    assert "nonfinite: same_places" in render_check(checks_named(refused, "finite")[0])
    allowed = check_file(net, path, 48, make_policy(nonfinite="same_places"))
    assert allowed.decision.verdict is Verdict.PASS, allowed.decision.problems
    golden = tmp_path / "golden"
    samples = gate.SampleSet.from_arrays({"input": nets.inputs(48)})
    job = gate.MeasurementJob(net, allowed.job.candidate, samples, policy=allowed.policy)
    write_golden_of(golden, job, evidence=allowed.evidence)
    assert gate.verify_golden(path, golden).passed
    shifted = export(Net(lambda net, x: torch.log(x + 0.5)), tmp_path / "moved.onnx")
    assert not gate.verify_golden(shifted, golden).passed
    other_model = Net(lambda net, x: torch.log(x + 1.0))
    assert (
        check_file(other_model, path, 48, make_policy(nonfinite="same_places")).decision.verdict
        is Verdict.FAIL
    )


def with_temperature(factor: float):
    """Return a head whose second output is a constant that the model computes."""

    def head(net: Net, x: torch.Tensor) -> object:
        return x, torch.full((1,), 2.6592 * factor).exp()

    return head


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.0 + 1e-6, False), (1.1, False)])
def test_constant_is_checked_by_its_own_rounding(factor, passes, tmp_path):
    file = export(Net(with_temperature(factor)), tmp_path / "model.onnx")
    decision = check_file(Net(with_temperature(1.0)), file, 48, make_policy()).decision
    assert (decision.verdict is Verdict.PASS) is passes, decision.problems
    names = {check.name for check in decision.problems}
    assert names <= {"noise_peak", "noise_ratio", "noise_diff"}


class Imputing(nn.Module):
    """A model that replaces NaN by `value` and marks the replaced elements."""

    def __init__(self, value: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.value = nn.Linear(12, 3), value

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        missing = torch.isnan(input)
        filled = torch.where(missing, torch.full((), self.value), input)
        return self.fc(torch.cat([filled, missing.float()], 1))


class Ranked(nn.Module):
    """The top scores, many of which are exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 40, bias=False)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.relu(self.fc(input)).topk(5, dim=1)
        return values, indices


def check_same_places(model, file_model, path, rows):
    policy = gate.Policy.default().model_copy(update={"nonfinite": "same_places"})
    return gate.check(export_rows(file_model, path), model.eval(), {"input": rows}, policy)


def export_rows(model: nn.Module, path: Path) -> Path:
    outputs = ("values", "indices") if isinstance(model, Ranked) else ("y",)
    return export_with_torch(model, path, torch.randn(2, 6), inputs=("input",), outputs=outputs)


def make_rows(*, gaps: bool) -> np.ndarray:
    random = np.random.default_rng(0)
    array = random.normal(size=(64, 6)).astype(np.float32)
    array[random.random(array.shape) < 0.2 * gaps] = np.nan
    return array


@pytest.mark.parametrize(("value", "verdict"), [(0.3, Verdict.PASS), (0.31, Verdict.FAIL)])
def test_model_replacing_nan_passes_when_policy_allows(tmp_path, value, verdict):
    observed = check_same_places(
        Imputing(), Imputing(value), tmp_path / "model.onnx", make_rows(gaps=True)
    )
    assert observed.decision.verdict is verdict, observed.decision.problems


def test_nan_samples_without_policy_name_the_setting(tmp_path):
    path = export_rows(Imputing(), tmp_path / "model.onnx")
    with pytest.raises(DataError, match="nonfinite: same_places"):
        gate.check(path, Imputing().eval(), {"input": make_rows(gaps=True)})


def test_order_of_equal_scores_may_differ(tmp_path):
    """Accept another order of scores that are all zero."""
    observed = check_same_places(Ranked(), Ranked(), tmp_path / "model.onnx", make_rows(gaps=False))
    assert observed.decision.verdict is Verdict.PASS, observed.decision.problems


COUNTS = (48, 300, 1500)
RANK = {Verdict.PASS: 0, Verdict.ERROR: 1, Verdict.FAIL: 2}


def heavy_tail(net: Net, x: torch.Tensor) -> object:
    return torch.exp(3.0 * x)


def rare_events(net: Net, x: torch.Tensor) -> object:
    return torch.sigmoid(x - 5.0)


def prefix_sums(net: Net, x: torch.Tensor) -> object:
    return x.repeat(1, 50).cumsum(1)


def nearest_integers(net: Net, x: torch.Tensor) -> object:
    """Return argmax indices and rounded integers; rounding decides some integers but no index."""
    return (x @ net.body[2].weight[:, :8]).argmax(1), torch.round(x * 4000.0).to(torch.int32)


def word_scores(net: Net, x: torch.Tensor) -> object:
    return torch.log_softmax(6.0 * x, dim=1)


@pytest.fixture(scope="module")
def other_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("more")
    heads: list[Callable[[Net, torch.Tensor], object]] = [
        heavy_tail, rare_events, prefix_sums, nearest_integers, word_scores,
    ]  # fmt: skip
    nets = [(head.__name__, Net(head, seed=3)) for head in heads]
    return [(net, export(net, folder / f"{name}.onnx")) for name, net in nets]


@exhaustive
@given(net=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, derandomize=True)
@pytest.mark.proof
def test_more_samples_never_worsen_the_verdict(other_files, net, seed):
    model, onnx = other_files[net]
    rows = np.random.default_rng(seed).normal(size=(COUNTS[-1], FEATURES)).astype(np.float32)
    data = [gate.EvaluationData(gate.SampleSet.from_arrays({"input": rows[:count]}), batch_size=50)
            for count in COUNTS]  # fmt: skip
    verdicts = [gate.check(onnx, model, each, make_policy()).decision.verdict for each in data]
    ranks = [RANK[verdict] for verdict in verdicts]
    assert ranks == sorted(ranks, reverse=True), verdicts
    assert verdicts[-1] is Verdict.PASS
