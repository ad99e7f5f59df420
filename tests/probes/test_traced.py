from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import ModelError
from gate.probes.branches import TracedReference, disagree
from tests.probes import benches

NAN, INF = np.nan, np.inf


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


def traced(model, arrays=None):
    arrays = arrays or X
    stand = benches.stand(model, arrays)
    return stand, TracedReference(stand, arrays)


def test_a_trace_keeps_the_branch_of_its_example(capfd):
    stand, module = traced(Branch())
    assert module.warned
    negative = {"x": -X["x"]}
    assert not disagree(stand.reference.run(X), module.run(X))
    assert disagree(stand.reference.run(negative), module.run(negative))
    assert capfd.readouterr() == ("", "")


def test_the_watch_sees_the_model_and_nothing_else():
    _, module = traced(Branch())
    watch, computed = module.watched(X)
    assert computed
    assert watch.path == (True,)
    assert len(watch.reads) == 1


def test_what_the_model_refuses():
    class Strict(Branch):
        def forward(self, x):
            if x.max() > 5:
                raise ValueError("too bright")
            return x

    _, module = traced(Strict())
    watch, computed = module.watched({"x": X["x"] + 10})
    assert not computed
    assert watch.path == (True,)


class Deep(nn.Module):
    """With a buffer that it writes to, and one parameter in two places."""

    def __init__(self, first):
        super().__init__()
        self.layers = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 6))
        self.layers[2].weight = self.layers[0].weight
        self.register_buffer("step", torch.ones(1))

    def forward(self, x):
        self.step.mul_(1.0)
        return self.layers(x) * self.step


def test_no_module_below_is_built_anew_and_the_weights_are_shared():
    stand, module = traced(Deep(nn.Linear(6, 6)))
    assert len(list(module._module.modules())) == 1
    before = module.run(X)[0]
    assert not disagree([before], stand.reference.run(X))
    held = {
        tensor.data_ptr()
        for tensor in (*stand.model.module.parameters(), *stand.model.module.buffers())
    }
    traced_ones = (*module._module.parameters(), *module._module.buffers())
    assert {tensor.data_ptr() for tensor in traced_ones} == held


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_part_is_traced_too():
    stand, module = traced(Deep(torch.jit.script(nn.Linear(6, 6))))
    assert not disagree(stand.reference.run(X), module.run(X))


class Anchored(Branch):
    """A buffer is a parameter of another part."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchor", self.layer.weight)


class Dropped(Branch):
    """A hook, as of code that drops weights, puts a plain tensor in the place of a parameter."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(self.layer.weight.detach().clone())
        self.layer.register_forward_pre_hook(self.drop)

    def drop(self, layer, _inputs):
        layer._parameters["weight"] = self.raw * 0.5


class Quantized(Branch):
    """Its weights are an object of PyTorch's own, which only modules hold."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.layer = torch.ao.nn.quantized.dynamic.Linear(6, 2)
        weight = torch.linspace(-1, 1, 12).reshape(2, 6)  # else it is whatever was in memory
        self.layer.set_weight_bias(torch.quantize_per_tensor(weight, 0.01, 0, torch.qint8), None)


@pytest.mark.parametrize("kind", [Anchored, Dropped, Quantized])
def test_whatever_a_model_holds_its_branch_is_kept(kind):
    stand, module = traced(kind())
    negative = {"x": -X["x"]}
    assert not disagree(stand.reference.run(X), module.run(X))
    assert disagree(stand.reference.run(negative), module.run(negative))


class Nested(nn.Module):
    def forward(self, left, right):
        return {"sum": left + right, "more": [(left > right), (None, right.long())]}


def test_outputs_of_any_nesting_and_inputs_by_keyword():
    arrays = {"right": benches.vectors(seed=1), "left": benches.vectors()}
    stand, module = traced(Nested(), arrays)
    assert not module.warned
    outputs = module.run(arrays)
    assert [output.dtype.name for output in outputs] == ["float32", "bool", "int64"]
    assert not disagree(stand.reference.run(arrays), outputs)


def test_torch_s_own_library_warns_of_nothing():
    model = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    _, module = traced(model, {"src": benches.vectors(width=18).reshape(12, 3, 6)})
    assert not module.warned


class Text(nn.Module):
    def forward(self, x):
        return "text" if torch.jit.is_tracing() else x


def test_what_can_not_be_traced_says_why():
    with pytest.raises(ModelError, match=r"can't be traced: .*returned str"):
        traced(Text())


def test_nothing_is_kept():
    stand, module = traced(Branch())
    weight = weakref.ref(stand.model.module.layer.weight)
    torch._C._set_graph_executor_optimize(True)  # as it is from the beginning
    module.run(X)
    assert torch._C._get_graph_executor_optimize()
    assert torch._C._get_tracing_state() is None
    del stand, module
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    ("eager", "other", "expected"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0 + 5e-7]], False),
        ([[1.0, 2.0]], [[1.0, 2.0001]], True),
        ([[1.0, NAN]], [[1.0, NAN]], False),
        ([[1.0, 2.0]], [[1.0, NAN]], True),
        ([[1.0, NAN]], [[1.0, 2.0]], True),
        ([[1.0, INF]], [[1.0, INF]], False),
        ([[1.0, INF]], [[1.0, -INF]], True),
        ([[1.0, 2.0]], [[1.0, INF]], True),
        ([[0.0]], [[0.0]], False),
        ([[0.0]], [[1e-9]], True),
        ([[1.0]], [[1.0, 2.0]], True),
        ([[1.0]], [[1.0], [1.0]], True),
        ([[]], [[]], False),
    ],
)
def test_disagreement(eager, other, expected):
    one, two = ([np.array(v, np.float32) for v in values] for values in (eager, other))
    assert disagree(one, two) is expected


def test_integers_and_dtypes():
    one = [np.array([3])]
    assert not disagree(one, [np.array([3])])
    assert disagree(one, [np.array([4])])
    assert disagree(one, [np.array([3.0])])
