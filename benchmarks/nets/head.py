"""A head of a random net: a linear layer on the features, and the processing of its scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.nets.trunks import Features
from gate.policy.sections import Role

Tensors = tuple[torch.Tensor, ...]
Function = Callable[[torch.Tensor, torch.Tensor], Tensors]
"""A function of the scores and a table of constants that returns the outputs."""


@dataclass(frozen=True)
class Design:
    """The definition of a head: a linear layer with `width` scores, followed by `function`."""

    width: int
    function: Function
    gain: float = 1.0
    """Standard deviation of the scores over the samples."""
    bias: float = 0.0
    table: list[float] = field(default_factory=lambda: [1.0])
    classes: bool = False
    """True if the argmax along axis 1 of the first output is the predicted class."""
    roles: tuple[Role, ...] = ()
    """Roles of the first outputs in a policy. Further outputs get a role that fits any output."""
    source: str = "vector"
    """The field of the features that the head reads: `vector`, `spread` or `state`."""


class Head(nn.Module):
    """A head that applies one design to the features of a trunk."""

    def __init__(self, design: Design, channels: int, *, spatial: bool) -> None:
        super().__init__()
        self.source, self.function, self.spatial = design.source, design.function, spatial
        self.linear = nn.Linear(channels, design.width)
        self.register_buffer("table", torch.tensor(design.table))
        with torch.no_grad():
            self.linear.weight.normal_(0.0, design.gain / channels**0.5)
            self.linear.bias.normal_(design.bias, 0.3 * design.gain)

    def forward(self, features: Features) -> Tensors:
        values = getattr(features, self.source)
        if self.spatial:
            scores = self.linear(values.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            scores = self.linear(values)
        return self.function(scores, self.table)
