"""A head: a linear layer on the features, and the processing of its scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.nets.trunks import Features
from gate.policy.sections import Role

Tensors = tuple[torch.Tensor, ...]
Function = Callable[[torch.Tensor, torch.Tensor], Tensors]
"""(scores, table of constants) to outputs."""


@dataclass(frozen=True)
class Design:
    """How a head computes: a linear layer of `width` scores, then `function`."""

    width: int
    function: Function
    gain: float = 1.0
    """Spread of the scores over the samples."""
    bias: float = 0.0
    table: list[float] = field(default_factory=lambda: [1.0])
    classes: bool = False
    """Whether the largest of axis 1 of the first output is an answer."""
    roles: tuple[Role, ...] = ()
    """What the first outputs are, as a policy would say; of those beyond, what any may be."""
    source: str = "vector"
    """`vector`, `spread` or `state` of the features."""


class Head(nn.Module):
    """One design on the features of a trunk."""

    def __init__(self, design: Design, channels: int, *, spatial: bool) -> None:
        super().__init__()
        self.source, self.function, self.map = design.source, design.function, spatial
        self.linear = nn.Linear(channels, design.width)
        self.register_buffer("table", torch.tensor(design.table))
        with torch.no_grad():
            self.linear.weight.normal_(0.0, design.gain / channels**0.5)
            self.linear.bias.normal_(design.bias, 0.3 * design.gain)

    def forward(self, features: Features) -> Tensors:
        read = getattr(features, self.source)
        if self.map:
            scores = self.linear(read.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            scores = self.linear(read)
        return self.function(scores, self.table)
