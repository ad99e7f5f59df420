"""A traced copy of the model, and a recorder of the branches that the eager model takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gate.errors import ModelError, describe_failure
from gate.measure.context import MeasurementContext
from gate.records.instruments import ULP
from gate.reference.cache import agree
from gate.reference.random_rounding import EXACT, seed
from gate.storage.arrays import Batch, OutputArray

PROBE_SCALE = 2.0
"""Unit roundoffs that a random rounding may move a probe's result: both neighboring floats
occur."""


def perturb_rounding(
    context: MeasurementContext, batch: Batch, *, draws: Iterable[int]
) -> list[list[OutputArray]]:
    """Return the reference's outputs of one run with random rounding per draw number.

    Empty if the model can't run with random rounding; then no difference is excused by rounding.
    """
    runs = []
    for draw in draws:
        random = np.random.default_rng(seed(context.policy.determinism, draw))
        perturbed = {name: _perturb_input(array, random) for name, array in batch.items()}
        try:
            runs.append(context.rounded_run(perturbed, draw=draw, scale=PROBE_SCALE, near=batch))
        except Exception:
            return []
    return runs


def _perturb_input(array: OutputArray, random: np.random.Generator) -> OutputArray:
    if array.dtype.kind != "f":
        return array
    values = array.astype(np.float64)
    exact = (values == np.round(values)) & (np.abs(values) < EXACT)
    perturbed = values * (1.0 + random.integers(-1, 2, array.shape) * ULP)
    with np.errstate(over="ignore"):
        return np.where(exact, values, perturbed).astype(array.dtype)


_READS = {
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__",
    "allclose", "equal", "is_nonzero", "item", "numpy", "tolist",
}  # fmt: skip

_GREATER = {"gt", "ge", "__gt__", "__ge__", "greater", "greater_equal"}

_LESS = {"lt", "le", "__lt__", "__le__", "less", "less_equal"}

_EQUAL = {"eq", "__eq__"}

_UNEQUAL = {"ne", "__ne__", "not_equal"}

_COMBINATIONS: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(["__and__", "logical_and", "bitwise_and"], torch.minimum),
    **dict.fromkeys(["__or__", "logical_or", "bitwise_or"], torch.maximum),
    **dict.fromkeys(["__invert__", "logical_not", "bitwise_not"], torch.neg),
    "any": torch.max,
    "all": torch.min,
}
"""How the margins of two conditions combine when the conditions do."""


@dataclass(frozen=True)
class Read:
    """One value that Python code reads from a tensor."""

    branch: bool | None
    """The value if it is a bool, which probably decides a branch. None: a number or an array."""
    margin: float | None
    """Distance of the condition from flipping: positive if true, negative if false. None:
    unknown."""


class BranchRecorder(TorchFunctionMode):
    """Records every read of a tensor's value while a model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self._margins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a comparison's result. The result is kept alive so that its id is not reused."""

    @property
    def path(self) -> tuple[bool, ...]:
        """Return the outcomes of the branches, in order."""
        return tuple(read.branch for read in self.reads if read.branch is not None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _READS:
            branch = returned if isinstance(returned, bool) else None
            self.reads.append(Read(branch, self._recorded_margin(args[0]) if args else None))
        elif isinstance(returned, torch.Tensor) and returned.dtype == torch.bool and not kwargs:
            self._record_margin(name, args, returned)
        return returned

    def _recorded_margin(self, value: Any) -> float | None:
        margin = self._margins.get(id(value))
        return float(margin[1]) if margin is not None and margin[1].numel() == 1 else None

    def _record_margin(self, name: str, args: tuple[Any, ...], returned: torch.Tensor) -> None:
        try:
            margin = self._margin(name, args)
        except (RuntimeError, TypeError):  # the operands can't be subtracted
            return
        if margin is not None:
            self._margins[id(returned)] = (returned, margin)

    def _margin(self, name: str, args: tuple[Any, ...]) -> torch.Tensor | None:
        if name in _GREATER | _LESS | _EQUAL | _UNEQUAL:
            return _comparison_margin(name, *args)
        margins = [self._margins[id(arg)][1] for arg in args if id(arg) in self._margins]
        combine = _COMBINATIONS.get(name)
        return (
            combine(*margins)
            if combine is not None and margins and len(margins) == len(args)
            else None
        )


def _comparison_margin(name: str, left: Any, right: Any) -> torch.Tensor:
    difference = torch.as_tensor(left).double() - torch.as_tensor(right).double()
    if name in _GREATER:
        return difference
    if name in _LESS:
        return -difference
    return difference.abs() if name in _UNEQUAL else -difference.abs()


_TORCH = Path(torch.__file__).parent

_VALUE_READ_WARNINGS = ("Converting a tensor to a Python", "Converting a tensor to a NumPy")

_MAX_RELATIVE = 1e-6
"""Largest relative difference that can be rounding: trace and model run the same operators."""


class TracedReference:
    """A traced copy of the reference model. It shares the reference's weights."""

    def __init__(self, context: MeasurementContext, batch: Batch) -> None:
        """Trace the model on `batch`. Raises ModelError with the reason if tracing fails."""
        self._binding = context.binding
        self._state = context.reference.session.state
        with _recorded_warnings() as caught:
            try:
                self._callable = context.model.flat(context.binding, without_submodules=True)
                self._module = self._trace(batch)
            except Exception:  # for example scripted parts, which only modules can call
                self._callable = context.model.flat(context.binding, without_submodules=False)
                self._module = self._trace_or_explain(batch)
        self._shapes = _shapes(batch)
        self._has_lstm = bool(self._module.inlined_graph.findAllNodes("aten::lstm"))
        self.has_warnings = any(map(_is_about_model_code, caught))
        """True if the tracer warned that the model's own code takes values out of tensors."""

    def record_reads(self, batch: Batch) -> tuple[BranchRecorder, bool]:
        """Return the recorded reads, and whether the model accepts the batch."""
        tensors = self._tensors(batch)
        with _recorded_warnings(), self._state.restored(), BranchRecorder() as recorder:
            try:
                self._callable(*tensors)
            except Exception:  # the model rejects this input
                return recorder, False
        return recorder, True

    def record_size_reads(self, batch: Batch) -> BranchRecorder | None:
        """Return the reads of another tracing run; None if the batch can't be traced.

        While tracing, sizes are tensors, so their comparisons are recorded too.
        """
        recorder = BranchRecorder()
        with _recorded_warnings(), recorder:
            try:
                self._trace(batch)
            except Exception:  # the model or the tracer rejects this batch
                return None
        return recorder

    def run(self, batch: Batch) -> list[OutputArray]:
        """Return all outputs of the trace. Any exception of the traced code passes through."""
        # oneDNN's LSTM reads and writes beyond a state of another batch size, which a trace bakes
        # in where forward calls len(x). Eager code checks the sizes before, and so does ATen.
        is_unsafe = self._has_lstm and _shapes(batch) != self._shapes
        with (
            _recorded_warnings(),
            self._state.restored(),
            torch.jit.optimized_execution(False),  # type: ignore[attr-defined]
            torch.backends.mkldnn.flags(enabled=False) if is_unsafe else nullcontext(),
        ):
            outputs = self._module(*self._tensors(batch))
            return self._binding.from_call([output.detach().numpy().copy() for output in outputs])

    def _trace_or_explain(self, batch: Batch) -> Any:
        try:
            return self._trace(batch)
        except Exception as error:
            raise ModelError(
                f"the model can't be traced: {describe_failure(error)} "
                "Export it by another strategy."
            ) from error

    def _trace(self, batch: Batch) -> Any:
        if any(array.dtype.kind == "U" for array in batch.values()):
            raise TypeError("it has a string input")
        with self._state.restored():
            return torch.jit.trace(  # type: ignore[no-untyped-call]
                self._callable, self._tensors(batch), check_trace=False, strict=False
            )

    def _tensors(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        inputs = self._binding.to_call(batch)
        tensors = (torch.from_numpy(inputs[name].copy()) for name in self._binding.arguments)
        return tuple(t.float() if t.is_floating_point() else t for t in tensors)


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in batch.items()}


def disagree(eager: list[OutputArray], traced: list[OutputArray]) -> bool:
    """Return True if the outputs differ by more than rounding.

    Number, shapes, dtypes, NaN and infinities must be equal.
    """
    return len(eager) != len(traced) or any(
        e.dtype != t.dtype or not agree(t, e, relative=_MAX_RELATIVE)
        for e, t in zip(eager, traced, strict=True)
    )


def _is_about_model_code(warning: warnings.WarningMessage) -> bool:
    """Return whether the tracer warns about code outside torch's own library.

    The library raises the same warnings, but is written to be traced.
    """
    return (
        issubclass(warning.category, torch.jit.TracerWarning)  # type: ignore[attr-defined]
        and str(warning.message).startswith(_VALUE_READ_WARNINGS)
        and not Path(warning.filename).is_relative_to(_TORCH)
    )


@contextmanager
def _recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
