"""The float64 reference computes the model in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.data.input_binding import bind_inputs
from gate.errors import ModelError
from gate.policy.sections import DeterminismPolicy
from gate.records.evidence import TensorSpec
from gate.reference.environment import deterministic
from gate.reference.float64 import Float64Reference, double_copy, in_double
from tests.measure import tiny
from tests.modules import Layers

SPECS = (TensorSpec(name="x", dtype="float32", shape=("batch", 4)),)
BINDING = bind_inputs(SPECS, SPECS, count=6, batch_size=6)
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def make_wrapped(function) -> nn.Module:
    """Return a linear layer followed by `function`."""
    return Layers(lambda m, x: function(m.linear(x)), linear=lambda: nn.Linear(4, 3))


def compute_truth(function) -> np.ndarray:
    """Compute the linear layer with numpy in float64 from float32 weights and inputs."""
    linear = make_wrapped(function).linear
    weight, bias = (p.detach().double().numpy() for p in (linear.weight, linear.bias))
    return X.astype(np.float64) @ weight.T + bias


def run_in_float64(function) -> np.ndarray:
    with deterministic(DeterminismPolicy()):
        return Float64Reference(make_wrapped(function), BINDING).run({"x": X})[0]


@pytest.mark.parametrize("function", [
    lambda y: y,
    lambda y: y.float(),
    lambda y: y.to(torch.float32),
    lambda y: y.to(dtype=torch.float32).type(torch.float32),
    lambda y: y + torch.zeros(3),
    lambda y: y + torch.zeros(3, dtype=torch.float32),
    lambda y: y @ torch.eye(3, dtype=torch.float32),
    lambda y: torch.stack([y, y], -1).sum(-1, dtype=torch.float32) / 2,
    lambda y: y + torch.arange(3, dtype=torch.float32) - torch.arange(3),
    lambda y: torch.full_like(y, 0.0, dtype=torch.float32) + y,
    lambda y: y @ torch.from_numpy(np.eye(3, dtype=np.float32)),  # a constant that is not a buffer
    lambda y: torch.zeros_like(y).addmm_(y, torch.from_numpy(np.eye(3, dtype=np.float32))),
], ids=range(12))  # fmt: skip
def test_casts_to_float32_stay_float64(function):
    observed = run_in_float64(function)
    assert observed.dtype == np.float64
    np.testing.assert_allclose(observed, compute_truth(function), rtol=1e-14, atol=1e-14)


def test_default_dtype_and_model_are_restored():
    model = tiny.net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with deterministic(DeterminismPolicy()):
        double_copy(model)
    assert torch.get_default_dtype() == torch.float32
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_complex_weights_are_computed_in_float64():
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[1 + 1e-9j]], dtype=torch.complex128).cfloat())
            self.phase = torch.tensor([0.1j])

        def forward(self, x):
            return (torch.complex(x, x) @ self.weight * self.phase).real

    model = double_copy(Rotation())
    assert model.weight.dtype == torch.complex128
    with in_double():
        assert model(torch.ones(1, 1, dtype=torch.float64)).dtype == torch.float64


def test_integer_outputs_stay_integers():
    with deterministic(DeterminismPolicy()):
        outputs = Float64Reference(make_wrapped(lambda y: (y.argmax(1), y)), BINDING).run({"x": X})
    assert [o.dtype.name for o in outputs] == ["int64", "float64"]


@pytest.mark.parametrize(("function", "words"), [
    (lambda y: y.half(), "returns float16 even"),
    (lambda y: torch.from_numpy(y.numpy().astype(np.float32)), "returns float32 even"),
    (
        lambda y: torch.from_numpy(np.zeros((6, 3), np.float32)).addmm_(y, torch.eye(3)),
        "can't run in float64",
    ),
])  # fmt: skip
def test_model_that_cannot_run_in_float64_has_a_reason(function, words):
    with pytest.raises(ModelError, match=words) as raised:
        run_in_float64(function)
    assert "waive noise_ratio" in str(raised.value)
    assert torch.get_default_dtype() == torch.float32
