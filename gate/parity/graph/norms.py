"""BatchNorms as what folding takes of them, in the arithmetic in which an exporter folds.

Folded, output channel k of a weight is `weight[k] * scale[k]` and its bias
`(bias[k] - mean[k]) * scale[k] + beta[k]`, with `scale = gamma / sqrt(var + eps)` (Ioffe and
Szegedy 2015, section 3.1). Of a model that was made half before its export each of these steps
rounds to 16 bits, in this order: both exporters of PyTorch give these weights to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.parity.graph.formats import FORMATS
from gate.parity.graph.pool import Values, is_plain

Floats = NDArray[np.float64]


def rounding(arithmetic: str | None) -> Callable[[Values], Values]:
    """What becomes of the result of a step, of float32, in the arithmetic of a format; None: it
    stays, because float32 rounds so little that it counts as exact."""
    return (lambda values: values) if arithmetic is None else FORMATS[arithmetic]


@dataclass(frozen=True, eq=False)
class Norm:
    """A BatchNorm in eval mode, by channels."""

    path: str
    scale: Floats
    mean: Floats
    beta: Floats
    way: str = "folded"
    arithmetic: str | None = None
    """The format in which it is folded; None: exactly."""

    @property
    def parameters(self) -> str:
        """All of them by one name; none for the scale of an attention."""
        return f"{self.path}.*" if self.way == "folded" else ""

    @property
    def size(self) -> Floats:
        """Of the terms beside the layer's bias, for the error that folding may make."""
        size: Floats = np.abs(self.beta) + np.abs(self.mean * self.scale)
        return size

    def folded(self, rows: Values) -> Values:
        """The channels of a weight with the norm in it, float32. `rows`: rounded as it is."""
        with np.errstate(all="ignore"):
            product: Values = rows * self.scale.astype(np.float32)[:, None]
        return rounding(self.arithmetic)(product)

    def offset(self, bias: Floats) -> Floats:
        """The bias of a layer, of one axis, with the norm in it."""
        step, (mean, scale, beta, bias) = _stepwise(
            self.arithmetic, self.mean, self.scale, self.beta, bias
        )
        with np.errstate(all="ignore"):
            offset: Floats = step(step(step(bias - mean) * scale) + beta).astype(np.float64)
        return offset


def norms(model: nn.Module, arithmetic: str | None = None) -> Iterator[Norm]:
    """All modules that normalise by running statistics, subclasses and others with the names of
    nn.BatchNorm included."""
    for path, module in model.named_modules():
        mean, variance = (_numbers(module, name) for name in ("running_mean", "running_var"))
        if mean is None or variance is None:
            continue
        gamma, beta = (_numbers(module, name) for name in ("weight", "bias"))
        gamma = np.ones_like(mean) if gamma is None else gamma
        beta = np.zeros_like(mean) if beta is None else beta
        step, (mean, variance, gamma, beta) = _stepwise(arithmetic, mean, variance, gamma, beta)
        with np.errstate(all="ignore"):
            root = step(np.sqrt(step(variance + variance.dtype.type(getattr(module, "eps", 0.0)))))
            scale = step(gamma / root)
        if scale.shape == mean.shape and scale.ndim == 1:
            scale, mean, beta = (each.astype(np.float64) for each in (scale, mean, beta))
            yield Norm(path, scale, mean, beta, arithmetic=arithmetic)


def _stepwise(
    arithmetic: str | None, *numbers: Floats
) -> tuple[Callable[[Any], Any], Iterator[NDArray[Any]]]:
    """How a step rounds, and numbers to begin with."""
    step, kind = rounding(arithmetic), np.float64 if arithmetic is None else np.float32
    return step, (step(each.astype(kind)) for each in numbers)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """A plain tensor of floats among the attributes of a module; None: there is none."""
    try:
        value = getattr(module, name, None)
    except Exception:  # a parametrization that can't be computed
        return None
    usable = isinstance(value, torch.Tensor) and value.is_floating_point() and is_plain(value)
    return value if usable else None


def doubles(tensor: torch.Tensor) -> Floats:
    """Its numbers in float64."""
    numbers: Floats = tensor.detach().to("cpu", torch.float64).numpy()
    return numbers


def _numbers(module: nn.Module, name: str) -> Floats | None:
    tensor = tensor_of(module, name)
    return None if tensor is None else doubles(tensor)
