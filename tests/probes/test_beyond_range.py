"""Files that fail only for values far beyond the range of the samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from gate import Verdict, decide
from gate.policy.sections import Instruments
from gate.records.instruments import BeyondRange
from tests import builders
from tests.measure import tiny
from tests.modules import Function, Layers
from tests.probes import benches

X = {"x": np.random.default_rng(0).uniform(-4, 4, (12, 6)).astype(np.float32)}


def make_linear_after(function, *, scale: float = 1.0) -> nn.Module:
    """Apply a function, then a linear layer."""
    return Layers(lambda m, x: m.last(function(x * scale)), last=lambda: nn.Linear(6, 3))


def naive_softplus(x):
    return torch.log(1.0 + torch.exp(x))


def overflow_above(limit):
    """Return the identity with infinity above a limit."""
    return lambda x: torch.where(x.abs() > limit, x * torch.inf, x)


def overflow_and_clamp(x):
    """Overflow in three columns and clamp the others."""
    y = naive_softplus(x)
    return torch.cat([y[:, :3], y[:, 3:].clamp(max=6.0)], 1)


def check_model(model, file_model, tmp_path, arrays=X, **instruments):
    torch.manual_seed(0)
    file_model.load_state_dict(model.state_dict())
    candidate = benches.export(file_model.eval(), tmp_path / "m.onnx", arrays)
    quiet = {"noise_samples": 8, "search_inputs": 16, **instruments}
    observed = benches.measured(model.eval(), candidate, arrays, **quiet)
    return decide(benches.policy(**quiet), tiny.stored(observed), decided_at="now")


def failed_checks(decision):
    return {check.name for check in decision.checks if check.verdict is Verdict.FAIL}


SOFTPLUS = torch.nn.functional.softplus


@pytest.mark.parametrize(("build", "function", "of_file"), [
    (make_linear_after, SOFTPLUS, naive_softplus),
    (make_linear_after, lambda x: x, overflow_above(4.0 * 9.9)),
    (Function, lambda x: x, overflow_above(4.0 * 50)),
], ids=["softplus", "9.9", "50 by column"])  # fmt: skip
def test_overflow_far_beyond_the_samples_is_a_warning(tmp_path, build, function, of_file):
    decision = check_model(build(function), build(of_file), tmp_path)
    assert decision.verdict is Verdict.PASS, failed_checks(decision)
    warned = {c.name for c in decision.waived if c.code == "beyond_range"}
    assert "probe_magnitudes" in warned
    assert '"beyond_range"' in json.dumps(decision.to_plain())


def test_policy_can_fail_an_overflow_beyond_the_samples(tmp_path):
    decision = check_model(
        make_linear_after(SOFTPLUS),
        make_linear_after(naive_softplus),
        tmp_path,
        probe_beyond_range="fail",
    )
    assert decision.verdict is Verdict.FAIL
    refused = [c for c in decision.checks if c.verdict is Verdict.FAIL]
    assert {c.code for c in refused} == {"beyond_range"}


@pytest.mark.parametrize(("function", "of_file"), [
    (nn.functional.relu6, nn.functional.relu),
    (lambda x: x, lambda x: torch.where(x.abs() > 200.0, x * 0.0, x)),
    (lambda x: x, overflow_above(3.0)),
    (lambda x: x, overflow_above(30.0)),
    (SOFTPLUS, overflow_and_clamp),
    (lambda x: x / (x.abs() < 50.0).float() * 1.0, lambda x: x * 1.0),
], ids=["relu6", "finite at 100", "samples", "8", "mixed", "reference not finite"])  # fmt: skip
def test_difference_not_explained_by_overflow_fails(tmp_path, function, of_file):
    decision = check_model(Function(function), Function(of_file), tmp_path)
    assert decision.verdict is Verdict.FAIL


def log_of_sigmoid(x):
    """Return values that are finite in float64, and -inf in float32 if the exponential
    overflows."""
    return torch.log(torch.sigmoid(x.clamp(-300.0, 300.0)))


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASS), (1.01, Verdict.FAIL)])
def test_float64_value_is_used_when_float32_overflows(tmp_path, factor, verdict):
    def of_file(x):
        exact = -SOFTPLUS(-x.clamp(-300.0, 300.0))
        return torch.where(x < -90.0, exact * factor, exact)

    decision = check_model(Function(log_of_sigmoid), Function(of_file), tmp_path)
    assert decision.verdict is verdict, failed_checks(decision)


def test_correct_file_has_no_range_warning(tmp_path):
    decision = check_model(make_linear_after(SOFTPLUS), make_linear_after(SOFTPLUS), tmp_path)
    assert decision.verdict is Verdict.PASS
    assert "beyond_range" not in {check.code for check in decision.checks}


def _check(breaks, **probe):
    fields = {"noise_ratio": np.inf, "relative_diff": np.inf, **probe}
    about = builders.probe_parity("far", **fields, beyond_range=breaks)
    runtime = builders.runtime_evidence("ort-cpu")
    runtime = runtime.model_copy(update={"probes": (*runtime.probes, about)})
    evidence = builders.evidence()
    runtimes = tuple(runtime if r.runtime == "ort-cpu" else r for r in evidence.runtimes)
    evidence = evidence.model_copy(update={"runtimes": runtimes})
    decision = decide(builders.policy(), evidence, decided_at="now")
    named = f"probe_{about.name}"
    return next(c for c in decision.checks if (c.name, c.runtime) == (named, "ort-cpu"))


@pytest.mark.parametrize(("rest", "probe", "verdict"), [
    ({"noise_ratio": 1.0, "relative_diff": 0.0}, {}, Verdict.WAIVED),
    ({"noise_ratio": None, "relative_diff": 0.0}, {}, Verdict.WAIVED),
    ({"noise_ratio": 33.0, "relative_diff": 0.0}, {}, Verdict.FAIL),
    ({"noise_ratio": np.nan, "relative_diff": 0.0}, {}, Verdict.FAIL),
    ({"noise_ratio": None, "relative_diff": 0.1}, {}, Verdict.FAIL),
    ({}, {}, Verdict.FAIL),
    ({"relative_diff": 0.0, "failure": "breaks"}, {}, Verdict.FAIL),
    ({"kind": "no_rows"}, {"failure": "x"}, Verdict.WAIVED),
    ({"kind": "no_rows", "failure": "y"}, {"failure": "x"}, Verdict.FAIL),
    ({"kind": "no_rows", "relative_diff": 1.0}, {"failure": "x"}, Verdict.FAIL),
])  # fmt: skip
def test_range_warning_needs_all_other_elements_within_bounds(rest, probe, verdict):
    about = {"kind": "overflow", "factor": 30.0, "elements": 2, **rest}
    numbers = {"noise_ratio": None, "relative_diff": None} if probe else {}
    assert _check(BeyondRange(**about), **numbers, **probe).verdict is verdict


def test_default_probe_beyond_range_is_not_serialized():
    assert "probe_beyond_range" not in Instruments().to_json()
    assert '"fail"' in Instruments(probe_beyond_range="fail").to_json()


class Detector(nn.Module):
    """Select the boxes below a limit, then score them: a detector in two stages."""

    def __init__(self, limit: float, *, reshaped: bool) -> None:
        super().__init__()
        self.limit, self.reshaped = limit, reshaped
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        selected = x[0][x[0].amax(1) < self.limit].reshape(-1, 2, 1)
        rows = selected.reshape(selected.shape[0], -1) if self.reshaped else selected.flatten(1)
        return self.last(rows)


BOXES = {"x": np.random.default_rng(1).uniform(1, 2, (6, 5, 2)).astype(np.float32)}


def check_detector(tmp_path, limit, **instruments):
    model, file_model = Detector(limit, reshaped=False), Detector(limit, reshaped=True)
    file_model.load_state_dict(model.state_dict())
    path = tmp_path / "m.onnx"
    first = {"x": BOXES["x"][:1]}
    candidate = benches.export(
        file_model.eval(), path, first, batch=1, axes={"output": {0: "boxes"}}
    )
    quiet = {"noise_samples": 6, "stability_samples": 0, "search_inputs": 16, **instruments}
    observed = benches.measured(model.eval(), candidate, BOXES, size=1, **quiet)
    return decide(benches.policy(**quiet), tiny.stored(observed), decided_at="now")


def test_failure_without_boxes_far_beyond_the_samples_is_a_warning(tmp_path):
    decision = check_detector(tmp_path, 15.0)
    assert decision.verdict is Verdict.PASS, failed_checks(decision)
    assert {"beyond_range"} == {c.code for c in decision.waived}
    assert check_detector(tmp_path, 15.0, probe_beyond_range="fail").verdict is Verdict.FAIL


@pytest.mark.parametrize("limit", [4.0, 1.45], ids=["three times", "the samples"])
def test_failure_without_boxes_near_the_samples_fails(tmp_path, limit):
    decision = check_detector(tmp_path, limit)
    assert decision.verdict in (Verdict.FAIL, Verdict.ERROR)
    assert not decision.passed
