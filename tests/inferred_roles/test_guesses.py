"""A guess may add checks, and never ends in ERROR: correct files of nets that nobody described."""

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
from gate.export.export_warnings import captured
from gate.measure.artifacts import write_golden_of
from gate.summary.render import render_check
from tests.exhaustive import exhaustive
from tests.inferred_roles import nets
from tests.inferred_roles.nets import FEATURES, HEADS, Net, exported, judged, quick


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models and their files, exported once."""
    folder = tmp_path_factory.mktemp("guesses")
    return {
        head.__name__: (net, exported(net, folder / f"{head.__name__}.onnx"))
        for head in HEADS
        for net in [Net(head)]
    }


def named(verdicted, name, output=None):
    return [
        check
        for check in verdicted.decision.checks
        if check.name == name and (output is None or check.output == output)
    ]


@pytest.mark.rows(3)
@pytest.mark.parametrize("samples", [16, 48])
@pytest.mark.parametrize("head", [head.__name__ for head in HEADS])
def test_a_correct_file_passes_whatever_its_outputs_are(files, head, samples):
    policy = None if samples == 48 and head != "states" else quick()
    verdicted = judged(*files[head], samples, policy)
    assert verdicted.decision.verdict is Verdict.PASS, verdicted.decision.problems
    assert verdicted.policy.task == "auto"


@pytest.mark.parametrize("head", ["coordinates", "embedding", "sorted_scores"])
def test_what_is_not_claimed_is_said(files, head):
    verdicted = judged(*files[head], 16, quick())
    assert not named(verdicted, "top1_agreement")
    for check in named(verdicted, "agreement"):
        assert (check.verdict, check.code) == (Verdict.PASS, "not_claimed")
        assert "--role output=logits" in render_check(check)


def test_agreement_is_claimed_where_the_samples_prove_it(files):
    verdicted = judged(*files["with_scale"], 16, quick())
    (check, _) = named(verdicted, "top1_agreement")
    assert (check.output, check.observed) == ("output_0", 1.0)
    assert not named(verdicted, "agreement")


def test_axes_that_grow_with_the_batch_are_no_classes(files):
    """Also where all samples are one batch, and nothing changes between batches."""
    verdicted = judged(*files["similarities"], 16, quick())
    (outputs, _) = (r.outputs for r in verdicted.evidence.runtimes if r.outputs)
    assert [o.classification is None for o in outputs] == [True, True, False]


def test_a_constant_is_proven_bit_for_bit(files):
    verdicted = judged(*files["with_constants"], 48, quick())
    seen = {c.output: c for c in named(verdicted, "reference")}
    assert seen["output_0"].code == "holds"
    for name in ("output_1", "output_2", "output_3", "output_4"):
        assert seen[name].code == "proven_constant"


def changed(source: Path, target: Path, factor: float) -> Path:
    """A copy whose only scalar of floats is `factor` times as large."""
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
def test_a_constant_that_is_not_equal_is_judged_by_its_numbers(tmp_path, task, factor, verdict):
    net = Net(lambda net, x: (x, net.scale.exp()))
    path = exported(net, tmp_path / "right.onnx")
    file = changed(path, tmp_path / "file.onnx", factor)
    # The graph would tell that a weight is another, whatever the outputs are.
    policy = quick(task)
    blind = policy.instruments.model_copy(update={"graph": False})
    policy = policy.model_copy(update={"instruments": blind})
    verdicted = judged(net, file, 48, policy)
    assert verdicted.decision.verdict is verdict, verdicted.decision.problems
    (reference, _) = named(verdicted, "reference", "output_1")
    assert reference.verdict is Verdict.PASS
    assert {c.output for c in verdicted.decision.problems} <= {"output_1"}


@pytest.mark.parametrize("task", ["auto", "classification", "tensors"])
def test_a_file_none_of_whose_outputs_varies_proves_nothing(tmp_path, task):
    net = Net(lambda net, x: (x * 0.0 + 1.0, net.scale.exp()))
    path = exported(net, tmp_path / "model.onnx")
    verdicted = judged(net, path, 48, quick(task))
    assert verdicted.decision.verdict is Verdict.ERROR
    assert "No output varies over the samples" in " ".join(
        render_check(check) for check in verdicted.decision.problems
    )


def test_where_the_policy_demands_classes_one_class_is_an_error_with_ways_out(files):
    verdicted = judged(*files["coordinates"], 48, quick("classification"))
    assert verdicted.decision.verdict is Verdict.ERROR
    problem = verdicted.decision.problems[0]
    assert problem.name == "reference"
    for way in ("samples of several classes", "outputs: {output: tensor}", "--role output=tensor"):
        assert way in render_check(problem)


ROLES = [
    ("coordinates", {"output": "tensor"}, Verdict.PASS, None),
    ("coordinates", {"output": "boxes"}, Verdict.PASS, None),
    ("coordinates", {"output": "logits"}, Verdict.ERROR, "one class for every sample"),
    ("embedding", {"output": "embedding"}, Verdict.PASS, "cosine_distance"),
    ("sorted_scores", {"output": "scores"}, Verdict.PASS, None),
    ("sorted_scores", {"output": "probabilities"}, Verdict.ERROR, "do not sum to 1"),
    ("with_scale", {"output_0": "logits"}, Verdict.PASS, "top1_agreement"),
    ("with_scale", {"output_0": "probabilities"}, Verdict.ERROR, "Use logits if a softmax follows"),
    ("with_scale", {"output_1": "logits"}, Verdict.ERROR, "another shape or dtype"),
    ("with_scale", {"output_1": "embedding"}, Verdict.ERROR, "no vectors"),
    ("with_scale", {"other": "tensor"}, Verdict.ERROR, "the file has the outputs"),
    ("with_constants", {"output_2": "indices", "output_3": "mask"}, Verdict.PASS, "unequal_share"),
    ("with_constants", {"output_2": "logits"}, Verdict.ERROR, "Use indices"),
    ("with_constants", {"output_2": "scores"}, Verdict.ERROR, "for floats, and it is int64"),
    ("with_constants", {"output_1": "indices"}, Verdict.ERROR, "for integers, and it is float32"),
]


@pytest.mark.rows(4)
@pytest.mark.parametrize(("head", "outputs", "verdict", "says"), ROLES)
def test_a_role_is_checked_as_what_it_is(files, head, outputs, verdict, says):
    verdicted = judged(*files[head], 48, quick(outputs=outputs))
    assert verdicted.decision.verdict is verdict, verdicted.decision.problems
    told = " ".join(f"{check.name} {render_check(check)}" for check in verdicted.decision.checks)
    assert says is None or says in told
    if verdict is Verdict.PASS:
        roles = {c.output: c.observed for c in named(verdicted, "role")}
        assert roles == outputs
        assert not {c.output for c in named(verdicted, "agreement")} & set(outputs)


def test_probabilities_are_judged_without_a_second_softmax(tmp_path):
    """A softmax over them would flatten them, and hide what moved."""

    right = Net(lambda net, x: torch.softmax(x[:, :3], dim=1))
    wrong = Net(lambda net, x: torch.softmax(x[:, :3], dim=1) * 0.98)
    path = exported(wrong, tmp_path / "model.onnx")
    policy = quick(outputs={"output": "probabilities"})
    seen = named(judged(right, path, 48, policy), "row_sum_diff")[0]
    assert seen.verdict is Verdict.FAIL
    assert seen.observed == pytest.approx(0.02, rel=1e-3)
    own = exported(right, tmp_path / "own.onnx")
    assert judged(right, own, 48, policy).decision.passed


def gaps(net: Net, x: torch.Tensor) -> torch.Tensor:
    """NaN where a logarithm has no value."""
    return torch.log(x)


def test_nan_in_the_same_places_passes_where_the_policy_says_so(tmp_path):
    net = Net(gaps)
    path = exported(net, tmp_path / "model.onnx")
    refused = judged(net, path, 48, quick())
    assert refused.decision.verdict is Verdict.FAIL
    assert "nonfinite: same_places" in render_check(named(refused, "finite")[0])
    allowed = judged(net, path, 48, quick(nonfinite="same_places"))
    assert allowed.decision.verdict is Verdict.PASS, allowed.decision.problems
    golden = tmp_path / "golden"
    samples = gate.SampleSet.from_arrays({"input": nets.inputs(48)})
    job = gate.MeasurementJob(net, allowed.job.candidate, samples, policy=allowed.policy)
    write_golden_of(golden, job, evidence=allowed.evidence)
    assert gate.verify_golden(path, golden).passed
    moved = exported(Net(lambda net, x: torch.log(x + 0.5)), tmp_path / "moved.onnx")
    assert not gate.verify_golden(moved, golden).passed
    other = Net(lambda net, x: torch.log(x + 1.0))
    assert judged(other, path, 48, quick(nonfinite="same_places")).decision.verdict is Verdict.FAIL


def warm(factor: float):
    """Answers, and a temperature that the model computes."""

    def head(net: Net, x: torch.Tensor) -> object:
        return x, torch.full((1,), 2.6592 * factor).exp()

    return head


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.0 + 1e-6, False), (1.1, False)])
def test_a_constant_is_held_to_its_own_rounding(factor, passes, tmp_path):
    file = exported(Net(warm(factor)), tmp_path / "model.onnx")
    decision = judged(Net(warm(1.0)), file, 48, quick()).decision
    assert (decision.verdict is Verdict.PASS) is passes, decision.problems
    names = {check.name for check in decision.problems}
    assert names <= {"noise_peak", "noise_ratio", "noise_diff"}


class Imputing(nn.Module):
    """Missing numbers become `value`, and are known as missing."""

    def __init__(self, value: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.value = nn.Linear(12, 3), value

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        missing = torch.isnan(input)
        filled = torch.where(missing, torch.full((), self.value), input)
        return self.fc(torch.cat([filled, missing.float()], 1))


class Ranked(nn.Module):
    """The best of scores of which many are exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 40, bias=False)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.relu(self.fc(input)).topk(5, dim=1)
        return values, places


def judged_as_is(model, exported, path, rows):
    policy = gate.Policy.default().model_copy(update={"nonfinite": "same_places"})
    return gate.check(written(exported, path), model.eval(), {"input": rows}, policy)


def written(model: nn.Module, path: Path) -> Path:
    with captured():
        torch.onnx.export(
            model.eval(), (torch.randn(2, 6),), str(path), dynamo=False, input_names=["input"],
            dynamic_axes={"input": {0: "batch"}}, opset_version=17,
        )  # fmt: skip
    return path


def rows(*, gaps: bool) -> np.ndarray:
    random = np.random.default_rng(0)
    made = random.normal(size=(64, 6)).astype(np.float32)
    made[random.random(made.shape) < 0.2 * gaps] = np.nan
    return made


@pytest.mark.parametrize(("value", "verdict"), [(0.3, Verdict.PASS), (0.31, Verdict.FAIL)])
def test_a_model_may_treat_nan_where_the_policy_says_so(tmp_path, value, verdict):
    seen = judged_as_is(Imputing(), Imputing(value), tmp_path / "model.onnx", rows(gaps=True))
    assert seen.decision.verdict is verdict, seen.decision.problems


def test_without_the_policy_the_way_out_is_named(tmp_path):
    path = written(Imputing(), tmp_path / "model.onnx")
    with pytest.raises(DataError, match="nonfinite: same_places"):
        gate.check(path, Imputing().eval(), {"input": rows(gaps=True)})


def test_the_order_of_what_is_equal_is_nobodys_promise(tmp_path):
    """On zeros all scores are zero, and a runtime may list others of them first."""
    seen = judged_as_is(Ranked(), Ranked(), tmp_path / "model.onnx", rows(gaps=False))
    assert seen.decision.verdict is Verdict.PASS, seen.decision.problems


COUNTS = (48, 300, 1500)
RANK = {Verdict.PASS: 0, Verdict.ERROR: 1, Verdict.FAIL: 2}


def heavy_tail(net: Net, x: torch.Tensor) -> object:
    return torch.exp(3.0 * x)


def rare_events(net: Net, x: torch.Tensor) -> object:
    return torch.sigmoid(x - 5.0)


def running(net: Net, x: torch.Tensor) -> object:
    return x.repeat(1, 50).cumsum(1)


def nearest(net: Net, x: torch.Tensor) -> object:
    """Integers of which rounding decides some, the scores of which it decides none."""
    return (x @ net.body[2].weight[:, :8]).argmax(1), torch.round(x * 4000.0).to(torch.int32)


def word_scores(net: Net, x: torch.Tensor) -> object:
    return torch.log_softmax(6.0 * x, dim=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("more")
    heads: list[Callable[[Net, torch.Tensor], object]] = [
        heavy_tail, rare_events, running, nearest, word_scores,
    ]  # fmt: skip
    nets = [(head.__name__, Net(head, seed=3)) for head in heads]
    return [(net, exported(net, folder / f"{name}.onnx")) for name, net in nets]


@exhaustive
@given(net=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, derandomize=True)
@pytest.mark.proof
def test_no_verdict_gets_worse(made, net, seed):
    model, onnx = made[net]
    rows = np.random.default_rng(seed).normal(size=(COUNTS[-1], FEATURES)).astype(np.float32)
    data = [gate.EvaluationData(gate.SampleSet.from_arrays({"input": rows[:count]}), batch_size=50)
            for count in COUNTS]  # fmt: skip
    verdicts = [gate.check(onnx, model, each, quick()).decision.verdict for each in data]
    ranks = [RANK[verdict] for verdict in verdicts]
    assert ranks == sorted(ranks, reverse=True), verdicts
    assert verdicts[-1] is Verdict.PASS
