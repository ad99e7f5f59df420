from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from gate.data.input_binding import InputBinding
from gate.errors import ModelError
from gate.reference.torch_session import TorchSession, copy_model

ONE = InputBinding((("x", "x"),), 4, fixed=False)
X = np.arange(8, dtype=np.float32).reshape(4, 2)


class Pair(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


def run(function, arrays=None, binding=ONE):
    model = nn.Module()
    model.forward = function
    with torch.inference_mode():
        return TorchSession(model, binding, device="cpu").run(arrays or {"x": X})


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x, [(4, 2)]),
        (lambda x: (x, x[:1]), [(4, 2), (1, 2)]),
        (lambda x: [x, [x.sum(), (x[0],)]], [(4, 2), (), (2,)]),
        (lambda x: OrderedDict(b=x, a={"c": x.T}), [(4, 2), (2, 4)]),
        (lambda x: (x, None), [(4, 2)]),
        (lambda x: None, []),
    ],
)
def test_outputs_are_flattened_in_order(function, shapes):
    assert [output.shape for output in run(function)] == shapes


@pytest.mark.parametrize("value", [1.0, "text", object(), {1}])
def test_what_is_no_tensor_is_refused(value):
    with pytest.raises(ModelError, match=type(value).__name__):
        run(lambda x: (x, value))


@pytest.mark.parametrize(
    "function", [lambda x: x.bfloat16(), lambda x: x.to(torch.complex64), lambda x: x.to_sparse()]
)
def test_tensors_without_counterpart_are_refused(function):
    with pytest.raises(ModelError, match="float32"):
        run(function)


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        (np.float16, torch.float32),
        (np.float32, torch.float32),
        (np.float64, torch.float32),
        (np.int64, torch.int64),
        (np.uint8, torch.uint8),
        (np.bool_, torch.bool),
    ],
)
def test_floats_go_in_as_float32_and_the_rest_as_it_is(dtype, seen):
    def forward(x):
        assert x.dtype == seen
        return x

    run(forward, {"x": np.ones((4, 2), dtype)})


def test_inputs_go_by_keyword_where_the_names_are_parameters():
    binding = InputBinding((("a", "p"), ("b", "q")), 4, fixed=False)
    (output,) = run(lambda b, a: a - b, {"q": X, "p": X + 1}, binding)
    assert (output == 1).all()


def test_inputs_go_by_position_in_the_file_s_order_otherwise():
    binding = InputBinding((("a", "p"), ("b", "q")), 4, fixed=False)
    (output,) = run(lambda x, y: x - y, {"q": X, "p": X + 1}, binding)
    assert (output == 1).all()


def test_the_caller_s_array_is_never_written():
    array = X.copy()
    run(lambda x: x.zero_(), {"x": array})
    assert (array == X).all()


def test_a_private_copy_is_float32_in_eval_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).half().train()
    copy = copy_model(model, device="cpu")
    assert not any(module.training for module in copy.modules())
    assert copy[0].weight.dtype == torch.float32
    assert all(module.training for module in model.modules())
    assert model[0].weight.dtype == torch.float16


@pytest.mark.parametrize(
    "computed",
    [
        torch.nn.utils.weight_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_private_copy_of_a_weight_that_is_computed(computed):
    model = nn.Sequential(computed(nn.Linear(3, 2)))
    weight = model[0].weight
    x = torch.ones(1, 3)
    assert torch.equal(copy_model(model, device="cpu")(x), model(x))
    assert weight.grad_fn is not None


def test_a_private_copy_keeps_complex_numbers():
    model = nn.Module()
    model.register_buffer("turn", torch.tensor([1j]))
    assert copy_model(model, device="cpu").turn.dtype == torch.complex64


def test_a_train_that_forgets_to_return_the_model():
    class Frozen(nn.Linear):
        def train(self, mode=True):
            super().train(mode)

    assert not copy_model(Frozen(2, 2), device="cpu").training


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (lambda x: x, (None,)),
        (lambda x: (x, x), (None, None)),
        (lambda x: {"b": x, "n": None, "a": (x, {"c": x}), "d": x}, ("b", "a.0", "a.1.c", "d")),
        (lambda x: torch.return_types.max((x, x)), (None, None)),
        (lambda x: Pair(x, x), ("mean", "spread")),
    ],
)
def test_keys_are_the_names_of_the_outputs(function, keys):
    model = nn.Module()
    model.forward = function
    runner = TorchSession(model, ONE, device="cpu")
    runner.run({"x": X})
    assert runner.keys == keys
