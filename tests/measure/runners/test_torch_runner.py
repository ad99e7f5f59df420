from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

from gate.data.input_binding import InputBinding
from gate.errors import ModelError
from gate.policy.sections import DeterminismPolicy
from gate.reference.environment import deterministic
from gate.reference.float64 import Float64Reference
from gate.reference.random_rounding import RandomRounding
from gate.reference.torch_reference import as_reference
from gate.reference.torch_session import DispatchMode, TorchSession, copy_model

ONE_INPUT = InputBinding((("x", "x"),), 4, fixed=False)
X = np.arange(8, dtype=np.float32).reshape(4, 2)


class Pair(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


def run(function, arrays=None, binding=ONE_INPUT):
    model = nn.Module()
    model.forward = function
    with torch.inference_mode():
        return TorchSession(model, binding, device="cpu").run(arrays or {"x": X})


@pytest.mark.parametrize(("function", "shapes"), [
    (lambda x: x, [(4, 2)]),
    (lambda x: (x, x[:1]), [(4, 2), (1, 2)]),
    (lambda x: [x, [x.sum(), (x[0],)]], [(4, 2), (), (2,)]),
    (lambda x: OrderedDict(b=x, a={"c": x.T}), [(4, 2), (2, 4)]),
    (lambda x: (x, None), [(4, 2)]),
    (lambda x: None, []),
])  # fmt: skip
def test_outputs_are_flattened_in_order(function, shapes):
    assert [output.shape for output in run(function)] == shapes


@pytest.mark.parametrize("value", [1.0, "text", object(), {1}])
def test_output_that_is_not_a_tensor_is_refused(value):
    with pytest.raises(ModelError, match=type(value).__name__):
        run(lambda x: (x, value))


@pytest.mark.parametrize(
    "function", [lambda x: x.bfloat16(), lambda x: x.to(torch.complex64), lambda x: x.to_sparse()]
)
def test_unsupported_tensor_types_are_refused(function):
    with pytest.raises(ModelError, match="float32"):
        run(function)


@pytest.mark.parametrize(("dtype", "seen"), [
    (np.float16, torch.float32),
    (np.float32, torch.float32),
    (np.float64, torch.float32),
    (np.int64, torch.int64),
    (np.uint8, torch.uint8),
    (np.bool_, torch.bool),
])  # fmt: skip
def test_float_inputs_become_float32(dtype, seen):
    def forward(x):
        assert x.dtype == seen
        return x

    run(forward, {"x": np.ones((4, 2), dtype)})


def test_inputs_are_passed_by_keyword():
    binding = InputBinding((("a", "p"), ("b", "q")), 4, fixed=False)
    (output,) = run(lambda b, a: a - b, {"q": X, "p": X + 1}, binding)
    assert (output == 1).all()


def test_input_array_is_not_changed():
    array = X.copy()
    run(lambda x: x.zero_(), {"x": array})
    assert (array == X).all()


def test_copied_model_is_float32_in_eval_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).half().train()
    copy = copy_model(model, device="cpu")
    assert not any(module.training for module in copy.modules())
    assert copy[0].weight.dtype == torch.float32
    assert all(module.training for module in model.modules())
    assert model[0].weight.dtype == torch.float16


@pytest.mark.parametrize("computed", [
    torch.nn.utils.weight_norm,
    lambda layer: prune.random_unstructured(layer, "weight", 0.5),
], ids=["weight_norm", "prune"])  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_model_with_computed_weight_is_copied(computed):
    model = nn.Sequential(computed(nn.Linear(3, 2)))
    weight = model[0].weight
    x = torch.ones(1, 3)
    assert torch.equal(copy_model(model, device="cpu")(x), model(x))
    assert weight.grad_fn is not None


@pytest.mark.parametrize(("function", "keys"), [
    (lambda x: x, (None,)),
    (lambda x: (x, x), (None, None)),
    (lambda x: {"b": x, "n": None, "a": (x, {"c": x}), "d": x}, ("b", "a.0", "a.1.c", "d")),
    (lambda x: torch.return_types.max((x, x)), (None, None)),
    (lambda x: Pair(x, x), ("mean", "spread")),
])  # fmt: skip
def test_keys_are_output_names(function, keys):
    model = nn.Module()
    model.forward = function
    runner = TorchSession(model, ONE_INPUT, device="cpu")
    runner.run({"x": X})
    assert runner.keys == keys


def energy(x):
    return torch.tanh(x).sum()


def grad(x):
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        return torch.autograd.grad(energy(x), x)[0]


def switched_grad(x):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    x = x.detach().requires_grad_(True)
    gradient = torch.autograd.grad(energy(x), x, create_graph=True)[0]
    torch.set_grad_enabled(before)
    return gradient


def forward_mode_grad(x):
    with forward_ad.dual_level():
        tangent = torch.ones_like(x)
        return forward_ad.unpack_dual(torch.tanh(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize(
    "function",
    [grad, switched_grad, forward_mode_grad, torch.func.vmap(torch.func.grad(energy))],
)
@pytest.mark.parametrize("mode", ["plain", "float64", "rounded"])
# torch.func uses torch.jit.script
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_forward_can_compute_gradients(function, mode):
    model = nn.Module()
    model.forward = lambda x: function(x)  # noqa: PLW0108 - a transform has no signature
    with deterministic(DeterminismPolicy()):
        if mode == "float64":
            outputs = Float64Reference(model, ONE_INPUT).run({"x": X})
        else:
            session = TorchSession(model, ONE_INPUT, device="cpu")
            rounding = RandomRounding(1) if mode == "rounded" else nullcontext()
            with rounding:
                outputs = session.run({"x": X})
            assert not np.array_equal(session.run({"x": X})[0], outputs[0]) or mode == "plain"
    np.testing.assert_allclose(outputs[0], 1 - np.tanh(X.astype(np.float64)) ** 2, atol=1e-6)


def test_module_of_a_compiled_model_is_the_reference():
    model = nn.Linear(2, 2)
    assert as_reference(torch.compile(model)).module is model


def test_dispatch_modes_receive_composite_operators():
    observed = []

    class RecordingMode(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            observed.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with deterministic(DeterminismPolicy()):
        session = TorchSession(nn.GRU(2, 3), ONE_INPUT, device="cpu")
        with RecordingMode():
            session.run({"x": X})
    assert observed.count("aten::gru") == 1
    assert "aten::tanh" not in observed
