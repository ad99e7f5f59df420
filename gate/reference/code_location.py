"""Find the line of the model's source that an operator comes from."""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gate.records.instruments import CodeLocation
from gate.reference.error_models import bare
from gate.reference.reference import ReferenceModel
from gate.reference.torch_session import DispatchMode

_TORCH, _GATE = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"

_HALF: dict[torch.dtype, Literal["float16", "bfloat16"]] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_CASTS = frozenset({"to", "_to_copy", "lift_fresh", "clone", "detach", "alias", "contiguous"})
"""Operators that may occur in the run of only one of the two dtypes."""

_SAMPLED = 1 << 12
"""Number of compared elements of a result."""

_TOLERANCE = 1e-4
"""A relative rms difference of results beyond the rounding of one operator."""

_LINE = 200
"""Longest shown line of source, in characters."""


def locate_code(operator: str, model: nn.Module) -> CodeLocation:
    """Return where the forward of `model` calls the operator that is being dispatched. For an ONNX
    file this is the node."""
    from gate.reference.onnx_reference import OnnxNode, OnnxReference  # rarely needed

    paths = {id(module): path for path, module in model.named_modules()}
    if isinstance(model, OnnxReference):
        nodes = (each.f_locals.get("self") for each in _frames())
        node = next((each for each in nodes if isinstance(each, OnnxNode)), None)
        return CodeLocation(operator=operator, module=paths.get(id(node), ""))
    module, user_frame = "", None
    for frame in _forward_frames():
        owner = frame.f_locals.get("self")
        if not module and isinstance(owner, nn.Module):
            module = paths.get(id(owner), "")
        if user_frame is None and not frame.f_code.co_filename.startswith(_TORCH):
            user_frame = frame
    if user_frame is None:
        return CodeLocation(operator=operator, module=module)
    name, line = user_frame.f_code.co_filename, user_frame.f_lineno
    source = linecache.getline(name, line).strip()[:_LINE]
    return CodeLocation(
        operator=operator, module=module, file=Path(name).name, line=line, source=source
    )


def _forward_frames() -> Iterator[FrameType]:
    """Yield the frames of the forward, innermost first: those between the gate's dispatch modes and
    the gate's call of the model."""
    inside = False
    for frame in _frames():
        name = frame.f_code.co_filename
        if not name.startswith(_GATE):
            # PyTorch's dispatch lies between two frames of the gate's modes.
            inside = inside or not name.startswith(_TORCH) or frame.f_code.co_name == "forward"
            yield frame
        elif inside:
            return


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


class HalfPrecisionFinder(DispatchMode):
    """Records the first operator that returns float16 or bfloat16."""

    def __init__(self, reference: ReferenceModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = reference.module
        self.location: CodeLocation | None = None
        self.dtype: Literal["float16", "bfloat16"] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        is_input = func is torch.ops.aten.lift_fresh.default  # cast to float32 before the forward
        for value in () if self.dtype or is_input else tree_leaves(returned):
            if isinstance(value, torch.Tensor) and value.dtype in _HALF:
                self.dtype = _HALF[value.dtype]
                self.location = locate_code(bare(func._schema.name), self._model)
                break
        return returned


@dataclass(frozen=True)
class _Step:
    operator: str
    numbers: tuple[float, ...]
    """Among the arguments."""
    result: np.ndarray[Any, np.dtype[np.float64]]
    location: CodeLocation


class _StepRecorder(DispatchMode):
    """Records the float results of each operator except for views and casts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self.steps: list[_Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        name = bare(func._schema.name)
        views = any(
            value.alias_info is not None and not value.alias_info.is_write
            for value in func._schema.returns
        )
        first = next((v for v in tree_leaves(returned) if isinstance(v, torch.Tensor)), None)
        if name in _CASTS or views or first is None or first.is_nested:
            return returned
        if first.is_floating_point() and first.layout == torch.strided:
            numbers = tuple(
                float(value) for value in tree_leaves((args, kwargs)) if isinstance(value, float)
            )
            flat = first.reshape(-1)
            kept = flat[:: max(1, len(flat) // _SAMPLED)].to(torch.float64).numpy().copy()
            self.steps.append(_Step(name, numbers, kept, locate_code(name, self._model)))
        return returned


def find_difference(
    in_float32: tuple[nn.Module, Callable[[], object]],
    in_float64: tuple[nn.Module, Callable[[DispatchMode], object]],
) -> CodeLocation | None:
    """Return the first operator of the float32 model that computes another function in float64.

    Each side is a model and a function that runs it; the float64 one enters the mode that it
    receives. None if both run the same operators with equal results up to rounding.
    """
    single, double = _StepRecorder(in_float32[0]), _StepRecorder(in_float64[0])
    with single:
        in_float32[1]()
    in_float64[1](double)
    for single_step, double_step in zip(single.steps, double.steps, strict=False):
        if single_step.operator != double_step.operator or _differ(single_step, double_step):
            return single_step.location
    return None


def _differ(left: _Step, right: _Step) -> bool:
    if len(left.numbers) != len(right.numbers) or left.result.shape != right.result.shape:
        return True
    if any(
        not math.isclose(a, b, rel_tol=1e-6)
        for a, b in zip(left.numbers, right.numbers, strict=True)
    ):
        return True
    finite = np.isfinite(left.result)
    with np.errstate(all="ignore"):
        distance = np.sqrt(np.square(left.result - right.result)[finite].sum())
        scale = np.sqrt(np.square(left.result)[finite].sum())
    return not bool(distance <= _TOLERANCE * scale)
