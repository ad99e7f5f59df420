"""Convolutions in float64, of all samples at once where PyTorch would take one after the other.

PyTorch has no fast one on the CPU: it unfolds each sample and multiplies it by the weights, which
are read anew for each. Of a small picture that costs more than the arithmetic: resnet18 on 32
samples of 64 x 64 took twice the CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_MOST_PLACES = 4096
"""Of a larger output a sample alone is work enough for one product."""
_MOST_ELEMENTS = 2**20
"""Of what is unfolded at a time: 8 MiB, as much as caches hold."""
_DEFAULTS = (None, 1, 0, 1, 1)
"""Of `conv2d`: bias, stride, padding, dilation, groups."""

Pair = tuple[int, int]
"""Along the rows and along the columns."""


@dataclass(frozen=True)
class Convolution:
    """One call, of several pictures, without groups and not transposed."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Pair
    padding: Pair
    dilation: Pair

    @classmethod
    def of(cls, func: Any, args: Sequence[Any]) -> Convolution | None:
        """The call of an ATen operator, if it is one of several small pictures in float64."""
        aten = torch.ops.aten
        if func is aten.convolution.default:
            *call, transposed, _output_padding, groups = args
            call.append(groups)
        elif func is aten.conv2d.default:
            call, transposed = [*args, *_DEFAULTS[len(args) - 2 :]], False
        else:
            return None
        x, weight, bias, *steps, groups = call
        wide = x.dtype == weight.dtype == torch.float64
        if transposed or groups != 1 or not wide or x.dim() != 4 or len(x) < 2:
            return None
        if not (_is_plain(x) and _is_plain(weight)):
            return None
        found = cls(x, weight, bias, *map(_pair, steps))
        return found if 0 < found.sizes[0] * found.sizes[1] <= _MOST_PLACES else None

    @property
    def sizes(self) -> Pair:
        """Rows and columns of the output."""
        rows, columns = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, dilation in zip(
                self.x.shape[2:],
                self.weight.shape[2:],
                self.stride,
                self.padding,
                self.dilation,
                strict=True,
            )
        )
        return rows, columns

    def run(self) -> torch.Tensor:
        """What PyTorch returns, but for the order of the sums: shape (samples, channels, rows,
        columns), float64."""
        (above, left), channels = self.padding, len(self.weight)
        padded = functional.pad(self.x, (left, left, above, above)) if above or left else self.x
        flat = self.weight.reshape(channels, -1)
        sample = flat.shape[1] * self.sizes[0] * self.sizes[1]
        made = []
        for part in torch.split(padded, max(1, _MOST_ELEMENTS // sample)):
            product = flat @ self._unfolded(part).reshape(flat.shape[1], -1)
            made.append(product.view(channels, len(part), *self.sizes).transpose(0, 1))
        whole = torch.cat(made)
        return whole if self.bias is None else whole + self.bias.view(1, -1, 1, 1)

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        """What each element of the kernel meets: a view of shape (channels, kernel's rows,
        kernel's columns, samples, rows, columns)."""
        sample, channel, row, column = x.stride()
        strides = (
            channel, row * self.dilation[0], column * self.dilation[1],
            sample, row * self.stride[0], column * self.stride[1],
        )  # fmt: skip
        shape = (*self.weight.shape[1:], len(x), *self.sizes)
        return x.as_strided(shape, strides, x.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Stored row by row: of others (channels_last) PyTorch returns others, and views tell them
    apart. `is_contiguous` takes a lone channel for either."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _pair(value: int | Sequence[int]) -> Pair:
    rows, columns = (value, value) if isinstance(value, int) else (value[0], value[-1])
    return rows, columns
