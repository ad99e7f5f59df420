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
from benchmarks.corpus.entry import Entry, ModelEdit, edit_layer, edit_then_export, summary_of
from benchmarks.corpus.exporters import DIRECT_17, Recipe
from benchmarks.corpus.samples import Arrays
from benchmarks.world import timm_models, transformers_models

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (*timm_models.ARCHITECTURES, *transformers_models.ARCHITECTURES)
}

FAULTS: list[Entry] = []
"""All faults, in the order in which the modules of `faults` are imported."""

FaultTarget = str | tuple[str, str] | tuple[str, str, Recipe]
"""An architecture, or a tuple of it, the path of the only faulty layer ("" for none) and a recipe.
"""


def fault_of(
    kind: str, *targets: FaultTarget, reach: Callable[[Architecture], Arrays] | None = None
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
                    edit_then_export(
                        edit_layer(layer, edit) if layer else edit, architecture, recipe
                    ),
                    layer if layer and not reach else None,
                    partial(reach, architecture) if reach else None,
                )
            )
        return edit

    return register


def _unpack_target(target: FaultTarget) -> tuple[str, str, Recipe]:
    if isinstance(target, str):
        return target, "", DIRECT_17
    name, layer, *recipe = target
    return name, layer, recipe[0] if recipe else DIRECT_17


class Wrapped(nn.Module):
    """A model whose inputs or outputs a function changes."""

    def __init__(
        self,
        model: nn.Module,
        *,
        inputs: Callable[..., object] | None = None,
        outputs: Callable[..., object] | None = None,
    ) -> None:
        super().__init__()
        self.model, self._inputs, self._outputs = model, inputs, outputs

    def forward(self, *tensors: torch.Tensor) -> object:
        changed = self._inputs(*tensors) if self._inputs else tensors
        result = self.model(*(changed if isinstance(changed, tuple) else (changed,)))
        if self._outputs is None:
            return result
        return self._outputs(*result) if isinstance(result, tuple) else self._outputs(result)
