"""The noise floor within a whole measurement."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.api import measure_job
from gate.data.samples import SampleSet
from gate.measure.job import MeasurementJob
from gate.policy.sections import Instruments
from tests.measure import tiny

NOISE_ONLY = Instruments.none().model_copy(update={"noise_samples": 8})


@pytest.fixture(scope="module")
def model():
    return tiny.net()


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    return tiny.export(model, tmp_path_factory.mktemp("good") / "good.onnx")


def measured(model, candidate, *, instruments=NOISE_ONLY, batch_size=3, samples=None):
    policy = tiny.policy("ort-cpu", "ort-cpu-optimized", instruments=instruments)
    samples = samples or tiny.samples()
    return measure_job(
        MeasurementJob(model, candidate, samples, policy=policy, batch_size=batch_size)
    )


def test_a_correct_export_is_about_as_far_from_the_truth_as_pytorch(model, good):
    for runtime in measured(model, good).runtimes:
        noise = runtime.outputs[0].noise
        assert noise is not None
        assert 0.2 < noise.ratio < 3.0
        assert 0.2 < noise.peak < 6.0


@pytest.mark.parametrize(
    ("samples", "batch_size", "seen"), [(8, 3, 9), (1, 3, 3), (100, 3, 20), (8, 20, 10)]
)
def test_whole_batches_until_there_are_enough_samples(model, good, samples, batch_size, seen):
    instruments = NOISE_ONLY.model_copy(update={"noise_samples": samples})
    result = measured(model, good, instruments=instruments, batch_size=batch_size)
    assert [r.outputs[0].noise.samples for r in result.runtimes] == [seen, seen]
    assert result.noise_unmeasured is None


def test_a_single_weight_is_seen(model, good, tmp_path):
    def spoil(proto):
        weight = next(i for i in proto.graph.initializer if i.name == "head.weight")
        values = np.frombuffer(weight.raw_data, np.float32).copy()
        values[5] *= 1.001
        weight.raw_data = values.tobytes()

    result = measured(model, tiny.edit(good, tmp_path / "off.onnx", spoil))
    assert all(r.outputs[0].noise.ratio > 30 for r in result.runtimes)
    assert all(r.outputs[0].classification.top1_agreement == 1.0 for r in result.runtimes)


def test_no_noise_floor_is_asked_for(model, good):
    result = measured(model, good, instruments=Instruments.none())
    assert all(r.outputs[0].noise is None for r in result.runtimes)
    assert "noise_samples: 0" in result.noise_unmeasured


class Stubborn(nn.Module):
    def forward(self, x):
        return x @ torch.from_numpy(np.eye(3, dtype=np.float32))


def test_a_model_without_float64_is_measured_without_it(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    candidate = tiny.export(Stubborn(), tmp_path / "m.onnx", example={"x": x[:2]})
    result = measured(Stubborn(), candidate, samples=SampleSet.from_arrays({"x": x}))
    assert all(r.outputs and r.outputs[0].noise is None for r in result.runtimes)
    assert "can't run in float64" in result.noise_unmeasured
