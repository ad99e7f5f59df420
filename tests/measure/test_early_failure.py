"""A runtime that fails on its first samples skips the outlier analysis; the verdict is the same."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gate import Digest, MeasurementJob, Policy, SampleSet, Verdict, decide
from gate.api import measure_job
from gate.decision.bound_rules import is_refused
from gate.measure.context import UNLIMITED, MeasurementContext
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.probes.probe import SampleProfile
from gate.probes.size_probes import batch_probes
from gate.records.evidence import TensorSpec
from tests import builders
from tests.modules import Layers
from tests.probes import benches

ROWS = np.random.default_rng(0).normal(size=(96, 16)).astype(np.float32)
NOW = "2026-11-28T00:00:00+00:00"


def make_policy(ratio=1.5, noise_diff=32.0, **bounds) -> Policy:
    bounded = Bounds(noise_ratio=ratio, noise_peak=4.0 * ratio, noise_diff=noise_diff, **bounds)
    runtime = RuntimePolicy(required="always", bounds=bounded)
    requested = Instruments(noise_samples=16, stability_samples=0, search_inputs=0, graph=False)
    return Policy(task="tensors", runtimes={"ort-cpu": runtime}, instruments=requested)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).eval()


@pytest.fixture
def runs(monkeypatch):
    """The batch sizes of all runs under random rounding."""
    sizes, original = [], MeasurementContext.rounding_run

    def counted(self, batch, rounding, **options):
        sizes.append(len(next(iter(batch.values()))))
        return original(self, batch, rounding, **options)

    monkeypatch.setattr(MeasurementContext, "rounding_run", counted)
    return sizes


def measure(candidate_model, tmp_path, policy):
    file = benches.export(candidate_model, tmp_path / "model.onnx", {"x": ROWS})
    job = MeasurementJob(
        net(), file, SampleSet.from_arrays({"x": ROWS}), policy=policy, batch_size=16
    )
    return measure_job(job)


def perturbed_net(size: float) -> nn.Module:
    model = copy.deepcopy(net())
    with torch.no_grad():
        model[2].weight *= 1.0 + size * torch.randn(
            model[2].weight.shape, generator=torch.Generator().manual_seed(1)
        )
    return model


def test_large_error_skips_outlier_analysis(tmp_path, runs):
    result = measure(perturbed_net(1e-2), tmp_path, make_policy())
    runtime = result.runtimes[0]
    assert runtime.unexamined > 0
    assert runtime.outputs[0].noise.rounding_draws == 3
    assert (runtime.second_looks, runtime.look_draws) == (0, 0)
    assert any(probe.unexamined for probe in runtime.probes)
    assert len(runs) <= 2 + 3  # two runs for the validity of the reference, three for the floor
    decided = decide(make_policy(), result, decided_at=NOW)
    assert decided.verdict is Verdict.FAIL
    assert "noise_ratio" in {c.name for c in decided.checks if c.verdict is Verdict.FAIL}


def test_progress_has_step_and_remaining_forwards(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, "gate.steps"):
        measure(perturbed_net(3e-6), tmp_path, make_policy())
    steps = [record.getMessage() for record in caplog.records]
    floor = [f"rounding floor: {left} of 48 forwards left" for left in (48, 32, 16)]
    second_looks = [f"second looks: {left} of 4 samples left" for left in (4, 3, 2, 1)]
    assert steps == ["samples", *floor, "samples", *second_looks, "probes"]


def test_clear_error_uses_few_rounding_runs(tmp_path, runs):
    result = measure(perturbed_net(3e-6), tmp_path, make_policy())
    runtime = result.runtimes[0]
    noise = runtime.outputs[0].noise
    assert 4.5 < noise.whole_ratio <= noise.ratio < 15.0  # 3 times and 10 times the bound
    assert (noise.rounding_draws, noise.few_draws) == (3, True)
    assert runtime.second_looks <= 4
    assert runtime.look_draws == 8 * runtime.second_looks
    drawn = [probe for probe in runtime.probes if probe.rounding_draws]
    assert 0 < len(drawn) <= 4
    assert {probe.rounding_draws for probe in drawn} == {3}
    assert decide(make_policy(), result, decided_at=NOW).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.5, Verdict.FAIL), (3.0, Verdict.ERROR), (1e3, Verdict.PASS)]
)
def test_ratio_of_few_runs_fails_only_by_the_whole_output(ratio, verdict):
    """Fail only by the ratio of the whole output, divided by three.

    A column that is 20 times off may be so by chance in few runs; an output that is 5 times off is
    not.
    """
    noise = builders.noise_parity(
        ratio=20.0, peak=1.3, candidate_rms=5e-6, scatter=1.0, few_draws=True, rounding_draws=3
    )
    runtime = builders.runtime_evidence(outputs=(builders.output_parity(noise=noise),))
    result = builders.evidence(runtimes=(runtime,))
    checks = decide(make_policy(ratio), result, decided_at=NOW).checks
    assert [check.verdict for check in checks if check.name == "noise_ratio"] == [verdict]


def make_limited(limit: float) -> nn.Module:
    """Return a linear layer with clamped outputs; another limit changes only large samples."""
    return Layers(lambda m, x: m.layer(x).clamp(-limit, limit), layer=lambda: nn.Linear(16, 8))


LARGE_LATER_SAMPLES = np.concatenate([ROWS[:16], 4.0 * ROWS[16:]])
"""Samples without float64 truth, from the 17th on, are larger."""


def measure_late(model, exported, tmp_path, policy):
    file = benches.export(exported, tmp_path / "model.onnx", {"x": LARGE_LATER_SAMPLES})
    samples = SampleSet.from_arrays({"x": LARGE_LATER_SAMPLES})
    return measure_job(MeasurementJob(model, file, samples, policy=policy, batch_size=16))


def test_error_on_late_samples_limits_outlier_analysis(tmp_path):
    result = measure_late(make_limited(9.0), make_limited(2.5), tmp_path, make_policy())
    runtime = result.runtimes[0]
    noise = runtime.outputs[0].noise
    assert noise.ratio < 1.5
    assert noise.settled > 32.0
    assert runtime.second_looks <= 4
    assert runtime.unexamined > 20
    problems = {c.name: c.verdict for c in decide(make_policy(), result, decided_at=NOW).problems}
    assert problems["noise_diff"] is Verdict.FAIL
    loose_policy = make_policy().model_copy(deep=True)
    bounds = loose_policy.runtimes["ort-cpu"].bounds.model_copy(update={"noise_diff": 1e9})
    runtimes = {"ort-cpu": loose_policy.runtimes["ort-cpu"].model_copy(update={"bounds": bounds})}
    loose_policy = loose_policy.model_copy(update={"runtimes": runtimes})
    checks = [c for c in decide(loose_policy, result, decided_at=NOW).checks if c.output]
    assert Verdict.FAIL not in {check.verdict for check in checks}


class Cancelling(nn.Module):
    """A model that loses digits on large samples in any implementation."""

    def __init__(self, *, squared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.squared = nn.Linear(16, 8), squared

    def forward(self, x):
        size = (x[:, :1].abs() - 2.5).relu()
        large = torch.exp(size).square() if self.squared else torch.exp(2.0 * size)
        return (self.layer(x) + large) - large


def test_correct_file_gets_full_outlier_analysis(tmp_path):
    result = measure_late(Cancelling(), Cancelling(squared=True), tmp_path, make_policy())
    runtime = result.runtimes[0]
    noise = runtime.outputs[0].noise
    assert runtime.second_looks > 2
    assert runtime.look_draws == 8 * runtime.second_looks
    assert runtime.unexamined == 0
    assert noise.settled < 32.0
    assert decide(make_policy(), result, decided_at=NOW).verdict is not Verdict.FAIL


def test_unexamined_samples_are_an_error(tmp_path):
    result = measure(perturbed_net(1e-2), tmp_path, make_policy())
    assert result.runtimes[0].unexamined > 0
    for diff in (32.0, 1e9):
        decided = decide(make_policy(ratio=1e9, noise_diff=diff), result, decided_at=NOW)
        codes = {check.name: (check.verdict, check.code) for check in decided.problems}
        assert codes["noise_diff"] == (Verdict.ERROR, "unexamined")
        assert any(name.startswith("probe_") for name in codes)
        assert decided.verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("ratio", "exceptions", "refused"),
    [(5.0, None, True), (5.0, {"LogSoftmax": 7.0}, False), (8.0, {"LogSoftmax": 7.0}, True)],
)
def test_operator_bounds_apply_to_early_refusal(ratio, exceptions, refused):
    custom_policy = make_policy(noise_ratio_by_operator=exceptions)
    noise = {"y": builders.noise_parity(ratio=ratio, peak=1.0)}
    assert is_refused(custom_policy, "ort-cpu", noise) is refused


@pytest.mark.parametrize(("dtype", "times"), [("float16", 1.0), ("bfloat16", 4.0)])
def test_bfloat16_file_uses_its_own_bounds(dtype, times):
    context = benches.create_context(net(), {"x": ROWS}, size=16)
    outputs = (TensorSpec(name="y", dtype=dtype, shape=("n", 8)),)
    subject = context.tested_file.subject.model_copy(update={"outputs": outputs})
    file = replace(context.tested_file, subject=subject)
    reduced = replace(context, tested_file=file, policy=Policy.reduced())
    bounds = reduced.applied_policy.runtimes["ort-cpu"].bounds
    assert bounds.noise_ratio == times * Policy.reduced().runtimes["ort-cpu"].bounds.noise_ratio


def test_correct_file_has_no_unexamined_samples(tmp_path):
    result = measure(net(), tmp_path, make_policy())
    runtime = result.runtimes[0]
    assert runtime.unexamined == 0
    assert not any(probe.unexamined for probe in runtime.probes)
    assert decide(make_policy(), result, decided_at=NOW).verdict is not Verdict.FAIL


def test_large_activations_make_smaller_batches():
    class Wide(nn.Module):
        def forward(self, x):
            return x[:, :1] + torch.ones(len(x), 2**21).sum(1, keepdim=True)  # 8 MiB per sample

    sha256 = Digest.from_bytes(b"file")
    sizes = {}
    for name, model in (("wide", Wide()), ("narrow", nn.Linear(16, 3))):
        context = benches.create_context(model, {"x": ROWS}, size=8)
        assert context.most == UNLIMITED
        with torch.inference_mode():
            context.measure_sample_bytes()
        profile = SampleProfile.from_source(context)
        sizes[name] = max(probe.size for probe in batch_probes(context, profile, sha256))
        assert context.sample_bytes == (2**23 if name == "wide" else 64)
    assert sizes["narrow"] > 40
    assert sizes["wide"] == 8 + 8
