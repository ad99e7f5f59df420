"""A guess may add checks, and never ends in ERROR: correct files of nets that nobody described."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from gate.api import EvaluationResult
from gate.data.samples import SampleSet
from gate.decision.check_result import CheckResult, Verdict
from gate.golden.verify import verify_golden
from gate.measure.artifacts import write_golden_of
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.policy.sections import Instruments
from gate.summary.render import render_check
from tests.inferred_roles import nets
from tests.inferred_roles.nets import HEADS, Net, exported, judged

QUICK = Instruments(probes=False, search_inputs=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, Path]]:
    """Models and their files, exported once."""
    folder = tmp_path_factory.mktemp("guesses")
    return {
        head.__name__: (net, exported(net, folder / f"{head.__name__}.onnx"))
        for head in HEADS
        for net in [Net(head)]
    }


def quick(**fields: object) -> Policy:
    """The built-in policy without probes."""
    return Policy.default().model_copy(update={"instruments": QUICK, **fields})


def named(verdicted: EvaluationResult, name: str, output: str | None = None) -> list[CheckResult]:
    return [
        check
        for check in verdicted.decision.checks
        if check.name == name and (output is None or check.output == output)
    ]


@pytest.mark.rows(3)
@pytest.mark.parametrize("samples", [16, 32, 48])
@pytest.mark.parametrize("head", [head.__name__ for head in HEADS])
def test_a_correct_file_passes_whatever_its_outputs_are(files, head: str, samples: int) -> None:
    policy = None if samples == 48 and head != "states" else quick()
    verdicted = judged(*files[head], samples, policy)
    assert verdicted.decision.verdict is Verdict.PASS, verdicted.decision.problems
    assert verdicted.policy.task == "auto"


@pytest.mark.parametrize("head", ["coordinates", "embedding", "sorted_scores"])
def test_what_is_not_claimed_is_said(files, head: str) -> None:
    verdicted = judged(*files[head], 16, quick())
    assert not named(verdicted, "top1_agreement")
    for check in named(verdicted, "agreement"):
        assert (check.verdict, check.code) == (Verdict.PASS, "not_claimed")
        assert "--role output=logits" in render_check(check)


def test_agreement_is_claimed_where_the_samples_prove_it(files) -> None:
    verdicted = judged(*files["with_scale"], 16, quick())
    (check, _) = named(verdicted, "top1_agreement")
    assert (check.output, check.observed) == ("output_0", 1.0)
    assert not named(verdicted, "agreement")


def test_axes_that_grow_with_the_batch_are_no_classes(files) -> None:
    """Also where all samples are one batch, and nothing changes between batches."""
    verdicted = judged(*files["similarities"], 16, quick())
    (outputs, _) = (r.outputs for r in verdicted.evidence.runtimes if r.outputs)
    assert [o.classification is None for o in outputs] == [True, True, False]


def test_a_constant_is_proven_bit_for_bit(files) -> None:
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
@pytest.mark.parametrize("task", ["auto", "classification", "tensors"])
@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, Verdict.PASS), (1.0 + 2**-23, Verdict.PASS), (1.001, Verdict.FAIL), (0.0, Verdict.FAIL)],
)
def test_a_constant_that_is_not_equal_is_judged_by_its_numbers(
    tmp_path: Path, task, factor: float, verdict: Verdict
) -> None:
    net = Net(lambda net, x: (x, net.scale.exp()))
    path = exported(net, tmp_path / "right.onnx")
    file = changed(path, tmp_path / "file.onnx", factor)
    # The graph would tell that a weight is another, whatever the outputs are.
    blind = QUICK.model_copy(update={"graph": False})
    policy = Policy.default(task=task).model_copy(update={"instruments": blind})
    verdicted = judged(net, file, 48, policy)
    assert verdicted.decision.verdict is verdict, verdicted.decision.problems
    (reference, _) = named(verdicted, "reference", "output_1")
    assert reference.verdict is Verdict.PASS
    assert {c.output for c in verdicted.decision.problems} <= {"output_1"}


@pytest.mark.parametrize("task", ["auto", "classification", "tensors"])
def test_a_file_none_of_whose_outputs_varies_proves_nothing(tmp_path: Path, task) -> None:
    net = Net(lambda net, x: (x * 0.0 + 1.0, net.scale.exp()))
    path = exported(net, tmp_path / "model.onnx")
    policy = Policy.default(task=task).model_copy(update={"instruments": QUICK})
    verdicted = judged(net, path, 48, policy)
    assert verdicted.decision.verdict is Verdict.ERROR
    assert "No output varies over the samples" in " ".join(
        render_check(check) for check in verdicted.decision.problems
    )


def test_where_the_policy_demands_classes_one_class_is_an_error_with_ways_out(files) -> None:
    policy = Policy.default(task="classification").model_copy(update={"instruments": QUICK})
    verdicted = judged(*files["coordinates"], 48, policy)
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
def test_a_role_is_checked_as_what_it_is(files, head, outputs, verdict: Verdict, says) -> None:
    verdicted = judged(*files[head], 48, quick(outputs=outputs))
    assert verdicted.decision.verdict is verdict, verdicted.decision.problems
    told = " ".join(f"{check.name} {render_check(check)}" for check in verdicted.decision.checks)
    assert says is None or says in told
    if verdict is Verdict.PASS:
        roles = {c.output: c.observed for c in named(verdicted, "role")}
        assert roles == outputs
        assert not {c.output for c in named(verdicted, "agreement")} & set(outputs)


def test_probabilities_are_judged_without_a_second_softmax(tmp_path: Path) -> None:
    """A softmax over them would flatten them, and hide what moved."""

    class Classifier(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(nets.FEATURES, 3)
            self.shift = shift

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.body(input), dim=1) * (1.0 - self.shift)

    right, wrong = Classifier(0.0), Classifier(0.02)
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


def test_nan_in_the_same_places_passes_where_the_policy_says_so(tmp_path: Path) -> None:
    net = Net(gaps)
    path = exported(net, tmp_path / "model.onnx")
    refused = judged(net, path, 48, quick())
    assert refused.decision.verdict is Verdict.FAIL
    assert "nonfinite: same_places" in render_check(named(refused, "finite")[0])
    allowed = judged(net, path, 48, quick(nonfinite="same_places"))
    assert allowed.decision.verdict is Verdict.PASS, allowed.decision.problems
    golden = tmp_path / "golden"
    samples, candidate = (
        SampleSet.from_arrays({"input": nets.inputs(48)}),
        TestedFile(path, read_subject(path)),
    )
    write_golden_of(golden, MeasurementJob(net, candidate, samples, policy=allowed.policy), evidence=allowed.evidence)  # fmt: skip
    assert verify_golden(path, golden).passed
    moved = exported(Net(lambda net, x: torch.log(x + 0.5)), tmp_path / "moved.onnx")
    assert not verify_golden(moved, golden).passed
    other = Net(lambda net, x: torch.log(x + 1.0))
    assert judged(other, path, 48, quick(nonfinite="same_places")).decision.verdict is Verdict.FAIL
