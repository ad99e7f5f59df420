"""Definition of faults in the second corpus: a function that modifies a copy of the model, and the
layers to which it applies.

@fault_of("one weight", ("hf-bert", "model.bert.pooler.dense"))
def one_weight_larger(layer: nn.Module, architecture: Architecture) -> None:
    \"\"\"The largest weight is 10 % larger.\"\"\"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import Entry, ModelEdit, exported_with, file_of, story_of
from benchmarks.corpus.exporters import DIRECT_17, DYNAMO_18, Recipe
from benchmarks.corpus.samples import Arrays
from benchmarks.world.architectures import ARCHITECTURES

FAULTS: list[Entry] = []
"""All faults, in the order in which the modules of `faults` are read."""

FaultTarget = str | tuple[str, str] | tuple[str, str, Recipe]
"""An architecture; with the path of its only layer that is wrong, "" for none; and by which
exporter."""
Reach = Callable[[Architecture], Arrays]


def fault_of(
    kind: str, *targets: FaultTarget, reach: Reach | None = None
) -> Callable[[ModelEdit], ModelEdit]:
    """Register a fault for each target. The edit gets the layer, or the model where none is named,
    and may return what takes its place. `reach`: inputs on which it shows, where no sample does;
    no layer diverges then that localisation could name."""

    def register(edit: ModelEdit) -> ModelEdit:
        for target in targets:
            name, layer, recipe = _unpacked(target)
            architecture = ARCHITECTURES[name]
            title = "-".join([edit.__name__, name, *([layer] if layer else [])])
            FAULTS.append(
                Entry(
                    kind,
                    title,
                    architecture,
                    recipe,
                    story_of(edit),
                    exported_with(_at(layer, edit), architecture, recipe),
                    layer if layer and not reach else None,
                    partial(reach, architecture) if reach else None,
                )
            )
        return edit

    return register


def as_exported(kind: str, name: str, recipe: Recipe, summary: str) -> None:
    """What an exporter gets wrong by itself."""
    architecture = ARCHITECTURES[name]
    make = file_of(lambda *_: None, architecture, recipe)
    FAULTS.append(Entry(kind, name, architecture, recipe, summary, make))


def _unpacked(target: FaultTarget) -> tuple[str, str, Recipe]:
    if isinstance(target, str):
        return target, "", DIRECT_17
    name, layer, *recipe = target
    return name, layer, recipe[0] if recipe else DIRECT_17


def _at(layer: str, edit: ModelEdit) -> ModelEdit:
    if not layer:
        return edit

    def whole(model: nn.Module, architecture: Architecture) -> None:
        replaced = edit(model.get_submodule(layer), architecture)
        if replaced is not None:
            model.set_submodule(layer, replaced.eval())

    return whole


class AppliedAfter(nn.Module):
    """A model, and something that is done to what it returns."""

    def __init__(self, model: nn.Module, changed: Callable[..., object]) -> None:
        super().__init__()
        self.model, self._changed = model, changed

    def forward(self, *given: torch.Tensor) -> object:
        returned = self.model(*given)
        return self._changed(*returned) if isinstance(returned, tuple) else self._changed(returned)


class AppliedBefore(nn.Module):
    """A model, and something that is done to what it is given."""

    def __init__(self, model: nn.Module, changed: Callable[..., object]) -> None:
        super().__init__()
        self.model, self._changed = model, changed

    def forward(self, *given: torch.Tensor) -> object:
        changed = self._changed(*given)
        return self.model(*(changed if isinstance(changed, tuple) else (changed,)))


__all__ = [
    "DIRECT_17",
    "DYNAMO_18",
    "FAULTS",
    "AppliedAfter",
    "AppliedBefore",
    "as_exported",
    "fault_of",
]
