"""Error models bound operators whose float32 error is absolute, not relative."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from gate import EvaluationData, EvaluationResult, Reference, SampleSet, Verdict, check
from gate.records.evidence import Source
from gate.reference.error_models import COMPOSITES, EXACT, MODELS, PARTS, bare, error_model_for
from tests.modules import Function
from tests.probes import benches


def check_model(model, arrays, tmp_path, *, exported=None) -> EvaluationResult:
    """Check a model with the default policy against its export, or the export of `exported`."""
    arrays = {"x": arrays}
    candidate = benches.export((exported or model).eval(), tmp_path / "model.onnx", arrays)
    reference = Reference(model.eval(), Source(factory="tests:build"))
    return check(
        candidate.path,
        reference=reference,
        data=EvaluationData(SampleSet.from_arrays(arrays), batch_size=16),
    )


def list_noise(result):
    """Return the noise of the only output for each runtime that ran."""
    noise = [runtime.outputs[0].noise for runtime in result.evidence.runtimes if runtime.outputs]
    assert len(noise) >= 2
    return noise


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


class Head(nn.Module):
    """Two layers and an output function; `prior` shifts the logits."""

    def __init__(self, seed=0, *, outputs=12, prior=-4.6, function=torch.sigmoid):
        super().__init__()
        torch.manual_seed(seed)
        self.hidden, self.last = nn.Linear(16, 64), nn.Linear(64, outputs)
        self.last.bias.data += prior
        self.function = function

    def forward(self, x):
        return self.function(self.last(torch.relu(self.hidden(x))))


class Counted(nn.Module):
    """A prefix sum of scaled inputs. The scales vary, so that the outputs vary."""

    def __init__(self, function=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(4096) + 0.5)
        self.function = function

    def forward(self, x):
        return self.function(x * self.scale).cumsum(1)


class Closed(nn.Module):
    """An LSTM whose output gates are nearly closed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.lstm.bias_ih_l0.data[36:] -= 6.0

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


class Saturated(nn.Module):
    """A GRU whose state is saturated at 1 or -1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.norm = nn.GRU(16, 12, batch_first=True), nn.BatchNorm1d(12)
        for weight in self.gru.parameters():
            weight.data *= 100.0

    def forward(self, x):
        return self.gru(x)[0].mean(1)


class Spectrum(nn.Module):
    """A short-time Fourier transform whose length is not a power of two, exported with opset 17 or
    later.
    """

    def forward(self, x):
        return torch.stft(
            x,
            400,
            160,
            window=torch.hann_window(400, dtype=x.dtype),
            return_complex=False,
            center=False,
        )[..., 1:, :, :]


CORRECT = {
    "small sigmoids of a detector's head": (Head, (64, 16)),
    "fraud": (lambda: Head(outputs=1, prior=-6.0), (64, 16)),
    "a recurrent net with closed gates": (Closed, (32, 20, 16)),
    "a GRU that is saturated": (Saturated, (32, 20, 16)),
    "a spectrum": (Spectrum, (32, 1200)),
    "ELU near zero": (lambda: Function(lambda x: nn.functional.elu(1e-3 * x)), (64, 16)),
    "prefix sums": (Counted, (32, 4096)),
}


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", CORRECT)
def test_model_with_absolute_errors_passes(name, tmp_path):
    build, shape = CORRECT[name]
    result = check_model(build(), normal(*shape), tmp_path)
    assert result.decision.verdict is Verdict.PASS
    for noise in list_noise(result):
        assert noise.ratio < 1.25


def round_sigmoid_to_float16(z):
    return torch.sigmoid(z).half().float()


def change_bias(model):
    model = copy.deepcopy(model)
    model.last.bias.data[3] *= 1.001
    return model


FAULTS = {
    "sigmoids through float16": (Head(), Head(function=round_sigmoid_to_float16), 1.0),
    "logits through float16": (Head(), Head(function=lambda z: torch.sigmoid(z.half().float())), 1.0),
    "a bias that is off by a thousandth": (Head(), change_bias(Head()), 1.0),
    "log1p as a logarithm": (Function(torch.log1p), Function(lambda x: torch.log(1.0 + x)), 1e-4),
    "prefix sums of rounded numbers": (Counted(), Counted(lambda x: x.half().float()), 1.0),
}  # fmt: skip


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_with_absolute_errors_fails(name, tmp_path):
    model, wrong, scale = FAULTS[name]
    shape = (32, 4096) if isinstance(model, Counted) else (64, 16)
    x = normal(*shape) * np.float32(scale)
    result = check_model(model, np.abs(x) if scale < 1.0 else x, tmp_path, exported=wrong)
    assert result.decision.verdict is not Verdict.PASS
    for noise in list_noise(result):
        assert noise.ratio > 3.0


def log_of_sigmoid(x):
    return torch.log(torch.sigmoid(x))


@pytest.mark.parametrize("ours", [nn.functional.logsigmoid, log_of_sigmoid], ids=["log", "same"])
def test_log_of_underflowing_sigmoid_fails(ours, tmp_path):
    """Fail the file: PyTorch returns a finite value; the runtime's sigmoid is 0 and its logarithm
    -inf.
    """
    result = check_model(
        Function(ours), 12.0 * normal(64, 16), tmp_path, exported=Function(log_of_sigmoid)
    )
    assert result.decision.verdict is not Verdict.PASS
    for noise in list_noise(result):
        assert noise.ratio == math.inf
        assert math.isfinite(noise.floor_rms)


def test_error_models_are_disjoint_and_have_a_source():
    assert not EXACT & MODELS.keys()
    assert not COMPOSITES & (EXACT | MODELS.keys())
    assert {composite for composite, _ in PARTS} <= COMPOSITES
    assert all(model.source for model in (*MODELS.values(), *PARTS.values()))


def test_error_model_names_are_pytorch_operators():
    operators = {bare(schema.name) for schema in torch._C._jit_get_all_schemas()}
    assert not [name for name in (*EXACT, *MODELS, *COMPOSITES) if name not in operators]


@pytest.mark.parametrize(("name", "row"), [
    ("aten::sigmoid_", "sigmoid"),
    ("aten::relu_", None),
    ("aten::mm", "linear"),
    ("aten::t_", None),
])  # fmt: skip
def test_error_model_is_found_by_schema_name(name, row):
    assert error_model_for(bare(name)) is (None if row is None else MODELS[row])
