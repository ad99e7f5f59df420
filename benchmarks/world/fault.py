"""The decorator that registers a fault of the second corpus for one or more layers.

@fault_of("one weight", ("hf-bert", "model.bert.pooler.dense"))
def one_weight_larger(layer: nn.Module, architecture: Architecture) -> None:
    \"\"\"Scale the largest weight by 1.1.\"\"\"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import Entry, ModelEdit, edit_then_export, export_then_edit, summary_of
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18, Recipe
from benchmarks.corpus.samples import Arrays
from benchmarks.world.architectures import ARCHITECTURES

FAULTS: list[Entry] = []
"""All faults, in the order in which the modules of `faults` are imported."""

FaultTarget = str | tuple[str, str] | tuple[str, str, Recipe]
"""An architecture, or a tuple of it, the path of the only faulty layer ("" for none) and a recipe.
"""
Reach = Callable[[Architecture], Arrays]


def fault_of(
    kind: str, *targets: FaultTarget, reach: Reach | None = None
) -> Callable[[ModelEdit], ModelEdit]:
    """Register a fault for each target.

    The edit gets the layer, or the model if the target names no layer, and may return a
    replacement. `reach` returns inputs on which the fault shows if no sample shows it. In that case
    no layer diverges that localization could report.
    """

    def register(edit: ModelEdit) -> ModelEdit:
        for target in targets:
            name, layer, recipe = _unpack_target(target)
            architecture = ARCHITECTURES[name]
            title = "-".join([edit.__name__, name, *([layer] if layer else [])])
            FAULTS.append(
                Entry(
                    kind,
                    title,
                    architecture,
                    recipe,
                    summary_of(edit),
                    edit_then_export(_edit_layer(layer, edit), architecture, recipe),
                    layer if layer and not reach else None,
                    partial(reach, architecture) if reach else None,
                )
            )
        return edit

    return register


def as_exported(kind: str, name: str, recipe: Recipe, summary: str) -> None:
    """Register a file that the exporter gets wrong without an edit."""
    architecture = ARCHITECTURES[name]
    make = export_then_edit(lambda *_: None, architecture, recipe)
    FAULTS.append(Entry(kind, name, architecture, recipe, summary, make))


def _unpack_target(target: FaultTarget) -> tuple[str, str, Recipe]:
    if isinstance(target, str):
        return target, "", DIRECT_17
    name, layer, *recipe = target
    return name, layer, recipe[0] if recipe else DIRECT_17


def _edit_layer(layer: str, edit: ModelEdit) -> ModelEdit:
    if not layer:
        return edit

    def edit_model(model: nn.Module, architecture: Architecture) -> None:
        replaced = edit(model.get_submodule(layer), architecture)
        if replaced is not None:
            model.set_submodule(layer, replaced.eval())

    return edit_model


class AppliedAfter(nn.Module):
    """A model followed by a function that is applied to its outputs."""

    def __init__(self, model: nn.Module, function: Callable[..., object]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *inputs: torch.Tensor) -> object:
        outputs = self.model(*inputs)
        return self._function(*outputs) if isinstance(outputs, tuple) else self._function(outputs)


class AppliedBefore(nn.Module):
    """A model preceded by a function that is applied to its inputs."""

    def __init__(self, model: nn.Module, function: Callable[..., object]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *inputs: torch.Tensor) -> object:
        function = self._function(*inputs)
        return self.model(*(function if isinstance(function, tuple) else (function,)))


__all__ = [
    "DIRECT_17",
    "DYNAMO_18",
    "FAULTS",
    "AppliedAfter",
    "AppliedBefore",
    "as_exported",
    "fault_of",
]
