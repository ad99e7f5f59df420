"""Traced references, recorded branches of a forward, and runs with perturbed rounding."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import ModelError
from gate.probes.branches import BranchRecorder, TracedReference, disagree
from tests.modules import Function
from tests.probes import benches


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


X = {"x": benches.vectors()}


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def trace_model(model, arrays=None):
    arrays = arrays or X
    context = benches.create_context(model, arrays)
    return context, TracedReference(context, arrays)


def test_trace_keeps_the_branch_of_its_example(capfd):
    context, module = trace_model(Branch())
    assert module.has_warnings
    negative = {"x": -X["x"]}
    assert not disagree(context.reference.run(X), module.run(X))
    assert disagree(context.reference.run(negative), module.run(negative))
    assert capfd.readouterr() == ("", "")


class Deep(nn.Module):
    """A module that writes to its buffer and shares one parameter between two layers."""

    def __init__(self, first):
        super().__init__()
        self.layers = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 6))
        self.layers[2].weight = self.layers[0].weight
        self.register_buffer("step", torch.ones(1))

    def forward(self, x):
        self.step.mul_(1.0)
        return self.layers(x) * self.step


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_submodule_is_traced():
    context, module = trace_model(Deep(torch.jit.script(nn.Linear(6, 6))))
    assert not disagree(context.reference.run(X), module.run(X))


class BakedState(nn.Module):
    """A state as large as the batch, which tracing bakes in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x):
        state = torch.zeros(1, len(x), 8)
        return self.layer(x, (state, state))[0]


def test_trace_with_the_state_of_another_batch_raises():
    """oneDNN would write beyond the state, which ends the process."""
    arrays = {"x": np.ones((2, 5, 6), np.float32)}
    context, module = trace_model(BakedState(), arrays)
    assert not disagree(context.reference.run(arrays), module.run(arrays))
    with pytest.raises(RuntimeError):
        module.run({"x": np.ones((40, 5, 6), np.float32)})
    assert torch.backends.mkldnn.enabled


class Anchored(Branch):
    """A buffer that is also a parameter of another layer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchor", self.layer.weight)


class HookedWeight(Branch):
    """A hook that replaces a parameter by a plain tensor, as code for weight dropping does."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(self.layer.weight.detach().clone())
        self.layer.register_forward_pre_hook(self.drop)

    def drop(self, layer, _inputs):
        layer._parameters["weight"] = self.raw * 0.5


class Quantized(Branch):
    """Weights in an object of PyTorch that is not a tensor."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = torch.ao.nn.quantized.dynamic.Linear(6, 2)
        weight = torch.linspace(-1, 1, 12).reshape(2, 6)  # otherwise uninitialized memory
        self.layer.set_weight_bias(torch.quantize_per_tensor(weight, 0.01, 0, torch.qint8), None)


@pytest.mark.parametrize("kind", [Anchored, HookedWeight, Quantized])
def test_trace_of_unusual_weights_keeps_the_branch(kind):
    context, module = trace_model(kind())
    negative = {"x": -X["x"]}
    assert not disagree(context.reference.run(X), module.run(X))
    assert disagree(context.reference.run(negative), module.run(negative))


def test_untraceable_model_has_a_reason():
    with pytest.raises(ModelError, match=r"can't be traced: .*returned str"):
        trace_model(Function(lambda x: "text" if torch.jit.is_tracing() else x))


def test_disagreement_of_integers_and_dtypes():
    first = [np.array([3])]
    assert not disagree(first, [np.array([3])])
    assert disagree(first, [np.array([4])])
    assert disagree(first, [np.array([3.0])])


MATRIX = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def branch_reads(function):
    with BranchRecorder() as watch:
        function(MATRIX)
    return [(read.branch, read.margin) for read in watch.reads]


@pytest.mark.parametrize(("function", "branch", "margin"), [
    (lambda x: bool(x.sum() > 7), True, 3.0),
    (lambda x: bool(x.sum() > 12), False, -2.0),
    (lambda x: bool(x.sum() >= 10), True, 0.0),
    (lambda x: bool(x.sum() < 7), False, -3.0),
    (lambda x: bool(torch.lt(torch.tensor(7), x.sum())), True, 3.0),
    (lambda x: bool(x.max() <= x.sum()), True, 6.0),
    (lambda x: bool(torch.gt(x.max(), 3)), True, 1.0),
    (lambda x: bool((x > 3.5).any()), True, 0.5),
    (lambda x: bool((x > 3.5).all()), False, -2.5),
    (lambda x: bool((x > 5).any()), False, -1.0),
    (lambda x: bool(~(x.sum() > 7)), False, -3.0),
    (lambda x: bool((x.sum() > 7) & (x.max() > 1)), True, 3.0),
    (lambda x: bool((x.sum() > 7) | (x.max() > 9)), True, 3.0),
    (lambda x: bool(x.sum() == 9), False, -1.0),
    (lambda x: bool(x.sum() != 9), True, 1.0),
    (lambda x: bool(x[0, 0]), True, None),
    (lambda x: bool((x > 3.5).any(dim=1)[0]), False, None),
    (lambda x: (x.sum() > 7).item(), True, 3.0),
    (lambda x: 2.0 in x, True, None),
    (lambda x: torch.equal(x, x), True, None),
    (lambda x: torch.allclose(x, x + 1), False, None),
    (lambda x: bool((x > 0).isnan().any()), False, None),
])  # fmt: skip
def test_branch_and_margin_of_a_read(function, branch, margin):
    assert branch_reads(function) == [(branch, margin)]


def test_shape_access_is_not_recorded():
    assert (
        branch_reads(lambda x: (len(x), x.shape[0], x.sum() > 3, x.dim(), torch.where(x > 1, x, 0)))
        == []
    )
