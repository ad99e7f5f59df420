"""The weights of recurrent layers as ONNX has them: directions stacked, gates in another order.

ONNX: W (directions, gates * hidden, inputs), R (directions, gates * hidden, hidden),
B (directions, 2 * gates * hidden) = [of W, of R]. Gates of LSTM: input, output, forget, cell;
of GRU: update, reset, hidden (operators LSTM and GRU of the ONNX specification). PyTorch: input,
forget, cell, output; reset, update, new.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from gate.parity.graph.pool import Stored, Values, of_tensor
from gate.records.localisation import listed

_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}

_NAMES = 4
"""Tensors in a sentence."""


def packed(model: nn.Module) -> Iterator[Stored]:
    """W, R and B of every layer of every recurrent module, scripted ones too."""
    for path, module in model.named_modules():
        order = _ORDERS.get(str(getattr(module, "mode", "")))
        if order is not None and hasattr(module, "weight_ih_l0"):
            for layer in range(int(getattr(module, "num_layers", 1))):
                yield from _layer(module, f"{path}." if path else "", layer, order)


def misplaced(module: nn.Module, arrays: Iterable[Values]) -> str | None:
    """What of a recurrent module's weights the constants of a file have at another place, in words:
    no element is another, and what they are used for is. None if nothing is, or for another
    module."""
    constants = list(arrays)
    turned: list[str] = []
    moved: list[str] = []
    for stored in packed(module):
        want = stored.values
        alike = [got for got in constants if got.shape == want.shape and _same_elements(got, want)]
        if not alike or any(np.array_equal(got, want) for got in alike):
            continue
        if any(np.array_equal(got, want[::-1]) for got in alike):
            turned += stored.names
        else:
            moved += [
                name
                for region, name in stored.parts
                if not np.array_equal(alike[0][region], want[region])
            ]
    texts = []
    if turned:
        texts.append(f"the two directions are exchanged in {_listed(turned)}")
    if moved:
        texts.append(f"the gates are in another order in {_listed(moved)}")
    return " and ".join(texts) or None


def _same_elements(one: Values, other: Values) -> bool:
    return bool(np.array_equal(np.sort(one, axis=None), np.sort(other, axis=None)))


def _listed(names: list[str]) -> str:
    return listed([f"`{name}`" for name in dict.fromkeys(names)], most=_NAMES)


def _layer(module: Any, prefix: str, layer: int, order: tuple[int, ...]) -> Iterator[Stored]:
    suffixes = [f"_l{layer}", *([f"_l{layer}_reverse"] if module.bidirectional else [])]
    for kind in ("weight_ih", "weight_hh"):
        names = [f"{kind}{suffix}" for suffix in suffixes]
        parts = tuple(((slice(at, at + 1),), f"{prefix}{name}") for at, name in enumerate(names))
        rows = [_reordered(getattr(module, name), order) for name in names]
        yield _stored(rows, parts)
    if not module.bias:
        return
    biases, regions = [], []
    for at, suffix in enumerate(suffixes):
        pair = [_reordered(getattr(module, f"bias_{kind}{suffix}"), order) for kind in ("ih", "hh")]
        half = len(pair[0])
        for region, kind in ((slice(0, half), "ih"), (slice(half, None), "hh")):
            regions.append(((slice(at, at + 1), region), f"{prefix}bias_{kind}{suffix}"))
        biases.append(np.concatenate(pair))
    yield _stored(biases, tuple(regions))


def _stored(rows: list[Values], parts: tuple[tuple[tuple[slice, ...], str], ...]) -> Stored:
    values = np.stack(rows)
    names = tuple(dict.fromkeys(name for _, name in parts))
    return Stored(names, lambda: values, values.shape, parts=parts)


def _reordered(tensor: torch.Tensor, order: tuple[int, ...]) -> Values:
    values = of_tensor(("",), tensor).values
    gates = values.reshape(len(order), -1, *values.shape[1:])
    arranged: Values = gates[list(order)].reshape(values.shape)
    return arranged
