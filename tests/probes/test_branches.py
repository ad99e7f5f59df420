"""Traced references, recorded branches of a forward, and runs with perturbed rounding."""

import gc
import math
import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import ModelError
from gate.probes.branches import BranchRecorder, TracedReference, disagree, perturb_rounding
from tests.probes import benches

NAN, INF = math.nan, math.inf


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


def test_recorder_sees_only_reads_of_the_model():
    _, module = trace_model(Branch())
    watch, computed = module.record_reads(X)
    assert computed
    assert watch.path == (True,)
    assert len(watch.reads) == 1


def test_inputs_refused_by_the_model_are_recorded():
    class Strict(Branch):
        def forward(self, x):
            if x.max() > 5:
                raise ValueError("too bright")
            return x

    _, module = trace_model(Strict())
    watch, computed = module.record_reads({"x": X["x"] + 10})
    assert not computed
    assert watch.path == (True,)


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


def test_traced_module_shares_the_weights():
    context, module = trace_model(Deep(nn.Linear(6, 6)))
    assert len(list(module._module.modules())) == 1
    before = module.run(X)[0]
    assert not disagree([before], context.reference.run(X))
    held = {
        tensor.data_ptr()
        for tensor in (*context.model.module.parameters(), *context.model.module.buffers())
    }
    traced_ones = (*module._module.parameters(), *module._module.buffers())
    assert {tensor.data_ptr() for tensor in traced_ones} == held


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_submodule_is_traced():
    context, module = trace_model(Deep(torch.jit.script(nn.Linear(6, 6))))
    assert not disagree(context.reference.run(X), module.run(X))


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


class Nested(nn.Module):
    def forward(self, left, right):
        return {"sum": left + right, "more": [(left > right), (None, right.long())]}


def test_nested_outputs_and_keyword_inputs_are_traced():
    arrays = {"right": benches.vectors(seed=1), "left": benches.vectors()}
    context, module = trace_model(Nested(), arrays)
    assert not module.has_warnings
    outputs = module.run(arrays)
    assert [output.dtype.name for output in outputs] == ["float32", "bool", "int64"]
    assert not disagree(context.reference.run(arrays), outputs)


def test_torch_modules_cause_no_tracer_warning():
    model = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    _, module = trace_model(model, {"src": benches.vectors(width=18).reshape(12, 3, 6)})
    assert not module.has_warnings


class Text(nn.Module):
    def forward(self, x):
        return "text" if torch.jit.is_tracing() else x


def test_untraceable_model_has_a_reason():
    with pytest.raises(ModelError, match=r"can't be traced: .*returned str"):
        trace_model(Text())


@pytest.mark.further
def test_tracing_leaves_no_references_or_state():
    context, module = trace_model(Branch())
    weight = weakref.ref(context.model.module.layer.weight)
    torch._C._set_graph_executor_optimize(True)  # the default setting
    module.run(X)
    assert torch._C._get_graph_executor_optimize()
    assert torch._C._get_tracing_state() is None
    del context, module
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(("eager", "other", "expected"), [
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
])  # fmt: skip
def test_disagreement(eager, other, expected):
    first, two = ([np.array(v, np.float32) for v in values] for values in (eager, other))
    assert disagree(first, two) is expected


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


@pytest.mark.parametrize("function", [
    lambda x: float(x.max()),
    lambda x: int(x.max()),
    lambda x: x.max().item(),
    lambda x: [0] * int(x.argmax()),
    lambda x: "abcd"[x.argmax()],
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: np.asarray(x) > 2,
    lambda x: complex(x.max()),
])  # fmt: skip
def test_values_read_from_tensors_are_recorded(function):
    assert branch_reads(function) == [(None, None)]


def test_shape_access_is_not_recorded():
    assert (
        branch_reads(lambda x: (len(x), x.shape[0], x.sum() > 3, x.dim(), torch.where(x > 1, x, 0)))
        == []
    )


def test_recorded_path():
    with BranchRecorder() as watch:
        if MATRIX.sum() > 1:
            float(MATRIX.max())
        if MATRIX.sum() > 100:
            raise AssertionError
    assert watch.path == (True, False)


def draw_rounding(model, arrays=None):
    arrays = arrays or X
    context = benches.create_context(model, arrays)
    with torch.inference_mode():
        return context.reference.run(arrays), perturb_rounding(context, arrays, draws=range(3))


class Scaled(nn.Module):
    def __init__(self, factor=3.3):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_perturbed_runs_change_the_last_bit():
    (reference,), runs = draw_rounding(Scaled())
    assert len(runs) == 3
    for (moved,) in runs:
        off = np.abs(moved / reference - 1.0)
        assert 0.0 < off.max() < 4 * 2.0**-23


def test_perturbed_runs_are_reproducible():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = draw_rounding(Scaled())[1], draw_rounding(Scaled())[1]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0][0], first[1][0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@pytest.mark.parametrize(
    "x", [np.zeros((2, 3)), np.arange(6.0).reshape(2, 3), np.full((2, 3), 2.0**20 - 1)]
)
def test_zeros_and_integers_are_not_perturbed(x):
    arrays = {"x": x.astype(np.float32)}
    (reference,), runs = draw_rounding(Scaled(1.0), arrays)
    assert all(np.array_equal(moved, reference) for (moved,) in runs)


@pytest.mark.parametrize("seed", [-1, 2**70])
def test_any_policy_seed_is_accepted(seed):
    context = benches.create_context(Scaled(), X)
    determinism = context.policy.determinism.model_copy(update={"seed": seed})
    policy = context.policy.model_copy(update={"determinism": determinism})
    with torch.inference_mode():
        assert len(perturb_rounding(replace(context, policy=policy), X, draws=range(3))) == 3


class Indices(nn.Module):
    def forward(self, x):
        grid = torch.arange(x.shape[1]).float() * 2.0 / 2.0
        return x[:, grid.long()], (x.shape[1] - 1 - grid).long()


def test_indices_computed_in_floats_are_not_perturbed():
    (_, indices), runs = draw_rounding(Indices())
    assert all(np.array_equal(moved[1], indices) for moved in runs)


class LayerNormOfConstant(nn.Module):
    """(x - mean) / deviation of a constant: the last bit decides between zero and any value."""

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[1:])


def test_ill_conditioned_output_changes_more():
    constant = {"x": np.full((4, 6), 0.7, np.float32)}
    (reference,), runs = draw_rounding(LayerNormOfConstant(), constant)
    assert max(np.abs(moved - reference).max() for (moved,) in runs) > 1e-6
    (reference,), runs = draw_rounding(LayerNormOfConstant())
    assert max(np.abs(moved - reference).max() for (moved,) in runs) < 1e-5


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = x * 1.7
        y[:, 0].relu_()
        y[:, 1:] = 0.25
        return y, y.view(-1)


def test_views_and_in_place_operations_are_preserved():
    (reference, flat), runs = draw_rounding(InPlace())
    for moved, view in runs:
        assert np.allclose(moved, reference, rtol=1e-5)
        assert np.allclose(view, flat, rtol=1e-5)
        assert (moved[:, 1:] == 0.25).all()


class RejectsRounding(nn.Module):
    def forward(self, x):
        if (x * 1.1 != x * 1.1 * 1.0).any():
            raise ValueError("not today")
        return x


def test_model_failing_under_perturbation_has_no_runs():
    assert draw_rounding(RejectsRounding())[1] == []
