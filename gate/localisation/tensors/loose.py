"""Tensors of the model that code may use anywhere: class tokens, tables of positions, masks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container

import numpy as np
from torch import nn

from gate.localisation.tensors.counterparts import Floats
from gate.localisation.tensors.weights import plain_attributes, tensors_of
from gate.localisation.values import Survey


def loose_tensors(model: nn.Module, survey: Survey, constant: Container[int]) -> dict[str, Floats]:
    """Parameters, buffers and plain attributes of modules that were not called, or of which every
    value is one of `constant`: the numbers of values that are the same for all samples, which an
    exporter may have computed beforehand.
    """
    values: dict[str, list[int]] = {}
    for value in survey.values:
        if not value.functional:
            values.setdefault(value.path, []).append(value.number)
    found: dict[str, Floats] = {}
    for path, module in model.named_modules():
        called = values.get(path, [])
        if path not in survey.paths or (called and all(number in constant for number in called)):
            found.update(tensors_of(module, path))
    return {**found, **_returned(survey, constant)}


def tensors_around(model: nn.Module, path: str) -> dict[str, Floats]:
    """Those of the modules that the one at `path` is in: blocks hand masks and tables down."""
    found: dict[str, Floats] = {}
    while path:
        path = path.rpartition(".")[0]
        found.update(tensors_of(model.get_submodule(path), path))
    return found


def _returned(survey: Survey, constant: Container[int]) -> dict[str, Floats]:
    """The constant values themselves, as far as their sketches are whole, by the name of what
    returned them."""
    found: dict[str, Floats] = {}
    counts: Counter[str] = Counter()
    for value in survey.values:
        whole = value.sketch.size == math.prod(value.shape)
        if value.number in constant and whole and value.sketch.dtype.kind == "f":
            name = f"{value.path}.forward()" if value.path else "forward()"
            place = f"[{counts[name]}]" if counts[name] else ""
            counts[name] += 1
            found[f"{name}{place}"] = value.sketch.reshape(value.shape).astype(np.float64)
    return found


def tensor_names(model: nn.Module) -> frozenset[str]:
    """All names of the model's parameters, buffers and plain attributes, those of shared ones
    too."""
    named = (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
        plain_attributes(model, recurse=True),
    )
    return frozenset(name for pairs in named for name, _ in pairs)
