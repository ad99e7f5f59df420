"""The reference as `torch.jit.trace` sees it: every Python branch as the example took it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gate.errors import ModelError, describe_failure
from gate.model.call import leaves
from gate.parity.arrays.binding import Binding
from gate.parity.probes.watch import Watch
from gate.parity.runners.torch_runner import call_of
from gate.parity.stand import Stand
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_TORCH = Path(torch.__file__).parent
_TELLING = ("Converting a tensor to a Python", "Converting a tensor to a NumPy")
_DIFFERS = 1e-6
"""Relative difference that is no rounding: trace and model run the same operators."""


class Traced:
    """The traced module; it shares its weights with the reference."""

    def __init__(self, stand: Stand, batch: Batch) -> None:
        """Trace `batch`. Raises ModelError, with the reason, where that is impossible."""
        self._names = stand.binding.arguments
        with _quiet() as caught:
            try:
                self._net: nn.Module = _Flat(stand.model, stand.binding)
                self._module = self._trace(batch)
            except Exception:  # as of scripted parts, which only modules can call
                self._net = _Whole(stand.model, stand.binding)
                self._module = self._trace_or_say_why(batch)
        self.warned = any(map(_tells, caught))
        """True if the tracer warned that the model's own code takes values out of tensors."""

    def watched(self, batch: Batch) -> tuple[Watch, bool]:
        """What the model itself reads from its tensors, and whether it computes the batch."""
        tensors = self._tensors(batch)
        with _quiet(), Watch() as watch:
            try:
                self._net(*tensors)
            except Exception:  # what the model refuses is no input of it
                return watch, False
        return watch, True

    def sizes_watched(self, batch: Batch) -> Watch | None:
        """What the model reads while it is traced anew: sizes are tensors then, and what is
        compared with them is seen too. None where the batch can't be traced."""
        watch = Watch()
        with _quiet(), watch:
            try:
                self._trace(batch)
            except Exception:  # it is refused as it would be without a trace
                return None
        return watch

    def run(self, batch: Batch) -> list[Array]:
        """All outputs. May raise anything."""
        with _quiet(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            outputs = self._module(*self._tensors(batch))
        return [output.detach().numpy() for output in outputs]

    def _trace_or_say_why(self, batch: Batch) -> Any:
        try:
            return self._trace(batch)
        except Exception as error:
            raise ModelError(
                f"the model can't be traced: {describe_failure(error)} "
                "Export it by another strategy."
            ) from error

    def _trace(self, batch: Batch) -> Any:
        return torch.jit.trace(  # type: ignore[no-untyped-call]
            self._net, self._tensors(batch), check_trace=False, strict=False
        )

    def _tensors(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        tensors = (torch.from_numpy(batch[name].copy()) for name in self._names)
        return tuple(t.float() if t.is_floating_point() else t for t in tensors)


class _Whole(nn.Module):
    """Takes tensors by position, returns a tuple of tensors, whatever the model does."""

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        super().__init__()
        self.model = model
        self._call = call_of(model, binding)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(leaf.tensor for leaf in leaves(self._call(self.model, tensors)))


class _Flat(nn.Module):
    """The same with the model's tensors as its own: the tracer builds every module below anew,
    which takes longer than to run them."""

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        super().__init__()
        whole = _Whole(model, binding)
        self._answer = whole.forward  # no module of this one
        own: set[int] = set()
        for kept, parts in (("_parameters", self._parameters), ("_buffers", self._buffers)):
            for part in model.modules():
                for tensor in vars(part)[kept].values():
                    if tensor is not None and id(tensor) not in own:
                        own.add(id(tensor))
                        parts[f"tensor_{len(own)}"] = tensor

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._answer(*tensors)


def disagree(eager: list[Array], traced: list[Array]) -> bool:
    """True if the outputs differ in number, shape, dtype, NaN or infinities, or by more than
    rounding."""
    if len(eager) != len(traced):
        return True
    return any(_differs(one, other) for one, other in zip(eager, traced, strict=True))


def _differs(eager: Array, traced: Array) -> bool:
    if eager.shape != traced.shape or eager.dtype != traced.dtype:
        return True
    if eager.dtype.kind != "f":
        return not np.array_equal(eager, traced)
    finite = np.isfinite(eager)
    if not np.array_equal(eager[~finite], traced[~finite], equal_nan=True):
        return True
    one, other = eager[finite].astype(np.float64), traced[finite].astype(np.float64)
    scale = float(np.abs(one).max(initial=0.0))
    return not float(np.abs(other - one).max(initial=0.0)) <= _DIFFERS * scale


def _tells(warning: warnings.WarningMessage) -> bool:
    """torch's own library says the same of itself: it is written to be traced."""
    return (
        issubclass(warning.category, torch.jit.TracerWarning)  # type: ignore[attr-defined]
        and str(warning.message).startswith(_TELLING)
        and not Path(warning.filename).is_relative_to(_TORCH)
    )


@contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
