"""Fourier transforms: an error that is told of the whole row, not of the element.

Every output of a transform is a sum of all inputs, and its butterflies mix their roundings: the
error has the same size in every bin, log2(n) roundings of the row's rms (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2002, section 24.1). A bin that is zero is so up to that.
"""

from __future__ import annotations

import math

import torch

from gate.parity.sums import Draw, Operation

_WIDTH = 2.5
"""Measured: ONNX Runtime's DFT of 512 is off by 3.3 times what PyTorch's is."""


def transformed(y: torch.Tensor, operation: Operation, *, unit: float, draw: Draw) -> torch.Tensor:
    """The result `y` of `_fft_r2c`, `_fft_c2c` or `_fft_c2r`, off by as much at random. `unit`: of
    one rounding."""
    if y.dtype not in (torch.complex64, torch.float32) or not y.numel():
        return y
    axes = list(operation.arguments["dim"])
    n = math.prod(max(operation.argument.shape[axis], y.shape[axis]) for axis in axes)
    rms = y.abs().square().mean(dim=axes, keepdim=True).sqrt()
    error = draw(y.shape)
    if y.is_complex():
        error = torch.complex(error, draw(y.shape)) * math.sqrt(0.5)
    return y + _WIDTH * unit * math.sqrt(max(math.log2(n), 1.0)) * rms * error
