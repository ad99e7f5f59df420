"""The weights of recurrent layers as ONNX has them: directions stacked, gates in another order.

ONNX: W (directions, gates * hidden, inputs), R (directions, gates * hidden, hidden),
B (directions, 2 * gates * hidden) = [of W, of R]. Gates of LSTM: input, output, forget, cell;
of GRU: update, reset, hidden (operators LSTM and GRU of the ONNX specification). PyTorch: input,
forget, cell, output; reset, update, new.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from gate.parity.graph.pool import Stored, Values, of_tensor

_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}


def packed(model: nn.Module) -> Iterator[Stored]:
    """W, R and B of every layer of every recurrent module, scripted ones too."""
    for path, module in model.named_modules():
        order = _ORDERS.get(str(getattr(module, "mode", "")))
        if order is not None and hasattr(module, "weight_ih_l0"):
            for layer in range(int(getattr(module, "num_layers", 1))):
                yield from _layer(module, f"{path}." if path else "", layer, order)


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
