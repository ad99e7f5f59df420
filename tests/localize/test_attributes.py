"""Tensors that code keeps as plain attributes, neither parameters nor buffers, are compared too."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from gate.localize.layer_weights import comparison
from tests.localize import nets


class Table(nn.Module):
    """A module of its own that adds a table."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(6, 8)

    def forward(self, x):
        return x + self.table


class Placed(nn.Module):
    """Vectors (n, 6) to (n, 6, 3): a table of positions in code, and one in a module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.positions = torch.randn(6, 8)
        self.inner = Table()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(torch.tanh(self.embed(x[..., None]) + self.positions)))


@pytest.mark.rows(4)
@pytest.mark.parametrize("by", ["direct", "dynamo"])
@pytest.mark.parametrize(("owner", "name"), [("", "positions"), ("inner", "table")])
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (lambda t: t.half().float(), "is rounded to float16 in the file"),
        (lambda t: t + 0.01 * (t > 1.0), "differs from the model's"),
    ],
    ids=["rounded", "another"],
)
def test_the_table_is_named(tmp_path, by, owner, name, how, cause):
    model = nets.made(Placed)
    wrong = copy.deepcopy(model)
    holder = wrong.get_submodule(owner)
    setattr(holder, name, how(getattr(holder, name)))
    candidate = nets.export(wrong, tmp_path / "model.onnx", nets.VECTORS, by=by)
    told = nets.found(model, candidate, nets.VECTORS)
    assert told.first_divergence == owner
    assert f"{f'{owner}.{name}'.lstrip('.')} {cause}" in told.cause


def test_what_is_left_over_from_a_call_is_no_weight():
    """An array of the weights' shape that has nothing of the constant is not compared with it."""
    module = nn.Linear(4, 3)
    module.last_input = torch.randn(3, 4)
    weight = module.weight.detach().numpy()
    changed = comparison(module, "head", {"w": weight * np.float32(3.0)})
    assert [one.detail["name"] for one in changed.differences] == ["head.weight"]
    same = comparison(module, "head", {"w": weight, "b": module.bias.detach().numpy()})
    assert same.differences == ()
    assert same.same == ("head.weight", "head.bias")
    assert same.unfound == ()
