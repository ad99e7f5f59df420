"""The worked example of docs/custom-operators.md: what is there is here, line by line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.library.custom_op("example::shifted_swish", mutates_args=())
def shifted_swish(x: torch.Tensor, shift: float) -> torch.Tensor:
    return x * torch.clamp(x + shift, 0, 6) / 6


@shifted_swish.register_fake
def _(x: torch.Tensor, shift: float) -> torch.Tensor:
    return torch.empty_like(x)


class ShiftedSwish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.example.shifted_swish(x, 2.5)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), ShiftedSwish(), nn.Linear(16, 3))


def symbolic(g: Any, x: Any, shift: Any) -> Any:
    """For the strategies traced, direct and scripted: `g.op` writes one ONNX operator."""
    zero, six = (g.op("Constant", value_t=torch.tensor(value)) for value in (0.0, 6.0))
    gate = g.op("Clip", g.op("Add", x, shift), zero, six)
    return g.op("Div", g.op("Mul", x, gate), six).setType(x.type())


def translation(x: Any, shift: float) -> Any:
    """For the strategy dynamo: written with onnxscript."""
    from onnxscript import opset18 as op

    zero, six, offset = (op.Constant(value_float=value) for value in (0.0, 6.0, shift))
    gate = op.Clip(op.Add(x, offset), zero, six)
    return op.Div(op.Mul(x, gate), six)


def register(symbolics: Any) -> None:
    symbolics.legacy("example::shifted_swish", symbolic)
    symbolics.dynamo(torch.ops.example.shifted_swish.default, translation)
