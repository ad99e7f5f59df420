"""The float64 reference: the same weights and inputs, computed in double precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gate.errors import ModelError, first_line
from gate.parity.arrays.binding import Binding
from gate.parity.float64.convolution import Convolution
from gate.parity.rounding.dispatch import DispatchMode
from gate.parity.runners.torch_runner import TorchRunner, private_copy
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Float64Reference:
    """Computes batches in float64. The model it is made of stays as it is."""

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        """Raises ModelError if `model` can't be copied."""
        self.model = double_copy(model)
        self._runner = TorchRunner(self.model, binding, device="cpu", dtype=torch.float64)

    def run(self, batch: Batch) -> list[Array]:
        """All outputs, those of floats in float64.

        Raises ModelError, with the reason, where the model can't run in float64.
        """
        try:
            with in_double():
                outputs = self._runner.run(batch)
        except Exception as error:
            raise ModelError(
                f"the model can't run in float64: {type(error).__name__}: {first_line(error)}. "
                "Keep fixed dtypes out of forward, or waive noise_ratio in the policy by name."
            ) from error
        narrow = sorted({o.dtype.name for o in outputs if o.dtype.kind == "f"} - {"float64"})
        if narrow:
            raise ModelError(
                f"the model returns {', '.join(narrow)} even when it runs in float64. Keep fixed "
                "dtypes out of forward, or waive noise_ratio in the policy by name."
            )
        return outputs


def double_copy(model: nn.Module) -> nn.Module:
    """A deep copy on the CPU, in eval mode and float64. Raises ModelError."""
    duplicate = private_copy(model, device="cpu", double=True)
    duplicate.double()
    return duplicate


@contextmanager
def in_double() -> Iterator[None]:
    """Inside, new tensors are float64, and what `forward` casts to float32 stays float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


class _Wide(DispatchMode):  # type: ignore[no-untyped-call]
    """Asks for float64 wherever float32 is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        small = None if kwargs else Convolution.of(func, args)
        if small is not None:
            return small.run()
        narrow = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        wide = {key: _wider(value, narrow) for key, value in (kwargs or {}).items()}
        return func(*(_wider(value, narrow) for value in args), **wide)


def _wider(value: Any, narrow: torch.dtype | None) -> Any:
    """The dtype to ask for. What is `narrow` already is moved, not cast, and stays as it is."""
    if not isinstance(value, torch.dtype) or value == narrow:
        return value
    return _WIDER.get(value, value)
