"""Wrap models that return an object with named fields, because exporters need plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.samples import Arrays
from benchmarks.world.initial_weights import settle


class NamedFields(nn.Module):
    """Calls `model` with named inputs and returns selected fields in order."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], fields: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._inputs, self._fields = model, inputs, fields

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = self.model(**dict(zip(self._inputs, inputs, strict=True)))
        fields = tuple(outputs[field] for field in self._fields)
        return fields[0] if len(fields) == 1 else fields


Make = Callable[[], nn.Module]
Draw = Callable[[int, int], Arrays]


def hf_architecture(
    name: str,
    make: Make,
    draw: Draw,
    *,
    fields: tuple[str, ...] = ("logits",),
    head: str = "",
    axes: dict[str, dict[int, str]] | None = None,
) -> Architecture:
    """Return the architecture of a transformers model.

    The inputs are those that `draw` returns. `head` is the path of the layer that computes class
    scores.
    """
    inputs = tuple(draw(1, 0))
    return Architecture(
        f"hf-{name}",
        lambda: NamedFields(make(), inputs, fields),
        draw,
        outputs=fields,
        classes=bool(head),
        head=head,
        axes=axes or {},
        settle=settle,
        count=32,
    )


def per_token(architecture: Architecture) -> Architecture:
    """Return the architecture with a head that classifies every token or frame along axis 1."""
    return replace(architecture, classes=False)
