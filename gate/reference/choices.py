"""Rerun the model with a file's discrete choices where rounding could have caused them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from gate.onnx_file.choices import Choice
from gate.onnx_file.value_trace import overflows
from gate.records.instruments import EPSILON, UNDERFLOW, UndefinedCast
from gate.reference.discretization import STEPS, Discretization, bare_shape, find_discretization
from gate.reference.error_models import bare, named_arguments
from gate.reference.random_rounding import EXACT
from gate.reference.torch_session import DispatchMode
from gate.storage.arrays import OutputArray

# A runtime may order equal scores differently than PyTorch. It then keeps different boxes, and its
# outputs can't be compared with the model's. Therefore the model is run again with the file's
# choices (topk, sort, argmax, nms, comparisons, rounding to whole numbers, conversions of floats to
# integers) instead of the model's. Each choice must be possible within the rounding of the model's
# operands; otherwise no difference is excused. The outputs are then compared as usual.

Floats = NDArray[np.float64]

Run = Callable[[], list[OutputArray]]

_TOLERANCE = 4.0
"""Allowed error of an operand, in units of the largest error in the runs with random rounding."""

_STEP_TOLERANCE = 16.0
"""The same for a float that is rounded to a whole number or converted to an integer. Sums cancel,
and their terms round more than the result."""

_FRACTIONS = 2.0**23
"""From this value on, every float32 is a whole number."""

_LARGEST_CHANGE, _LARGEST_RELATIVE_CHANGE = 0.125, 2e-6
"""Largest change by rounding, absolute and relative, of a float that becomes a whole number. A
larger change comes from an earlier choice that is not recorded, such as that of a loop."""

_EDGE_TOLERANCE = 1e-3
"""Largest difference of two bucket edges that count as equal, relative to the largest edge."""

_MAX_BOXES = 4096
"""Largest number of boxes whose overlaps are compared in pairs."""

_ONNX = {
    "topk": "TopK",
    "sort": "TopK",
    "argmax": "ArgMax",
    "max": "ArgMax",
    "argmin": "ArgMin",
    "min": "ArgMin",
    "nms": "NonMaxSuppression",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "lt": "Less",
    "le": "LessOrEqual",
    "to": "Cast",
}

_NMS_BY_CLASS, _NMS_AT_ONCE = "_batched_nms_vanilla", "_batched_nms_coordinate_trick"
"""torchvision's functions for suppressing boxes of several classes."""

_COMPARISONS = frozenset({"gt", "ge", "lt", "le"})

_FIRST_OF_EQUAL = frozenset({"argmax", "argmin", "max", "min"})
"""Operators for which PyTorch and ONNX define which of equal elements is returned: the first."""

CONVERSIONS = frozenset({"to", "_to_copy", "type_as"})
"""ATen operators that convert a tensor to another dtype."""


@dataclass(frozen=True)
class Call:
    """One choice of the model, with the file's choice for it."""

    name: str
    """ATen operator without namespace, or `nms` of torchvision."""
    operands: tuple[Floats, ...]
    expected: NDArray[Any]
    """The model's choice in the shape of the result: indices, or bools of a comparison."""
    chosen: NDArray[Any]
    """The file's choice; `expected` if no node of the file corresponds."""
    axis: int | None = None
    """Axis of the indices; None: they index the flattened operand."""
    threshold: float = 0.0
    """Overlap threshold (`nms`)."""
    node: Choice | None = None
    """The corresponding choice of the file; None if there is none."""
    step: Discretization | None = None
    unordered: bool = False
    """True for indices of a TopK whose order PyTorch does not define (`sorted=False`)."""

    @property
    def differs(self) -> bool:
        """True if the file's choice differs."""
        return not bool(self.same.all())

    @property
    def same(self) -> NDArray[np.bool_]:
        """Mask of equal choices, shape of `expected`; all False if the shapes differ."""
        if self.expected.shape != self.chosen.shape:
            return np.zeros(max(self.expected.shape, (1,)), np.bool_)
        nan = (self.expected != self.expected) & (self.chosen != self.chosen)
        return np.asarray((self.expected == self.chosen) | nan)

    @property
    def is_integral(self) -> bool:
        """True if floats are rounded to whole numbers or converted to integers."""
        return self.name == "to" or (self.step is not None and self.step.buckets is None)

    @property
    def is_bucket(self) -> bool:
        """True if floats are assigned to buckets."""
        return self.step is not None and self.step.buckets is not None

    @property
    def operator(self) -> str:
        """ONNX operator type of the corresponding node."""
        return self.step.nodes[0] if self.step else _ONNX[self.name]


class ChoiceReplay(DispatchMode):
    """A dispatch mode in which operators return the file's choices instead of their results.

    from_model: the choices are the model's, from a run without rounding. A choice is made again if
    its operand changes by more than rounding.
    """

    def __init__(self, choices: Sequence[Choice], *, from_model: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_from_model = from_model
        self._unused = {
            operator: [c for c in choices if c.operator == operator]
            for operator in {c.operator for c in choices}
        }
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = bare(func._schema.name).removeprefix("torchvision::")
        name = "to" if name in CONVERSIONS else name
        if name in STEPS:
            return self._dispatch_step(func, name, args, kwargs or {})
        returned = func(*args, **(kwargs or {}))
        if name not in _ONNX or not isinstance(args[0], torch.Tensor):
            return returned
        result = returned[-1] if isinstance(returned, tuple) else returned
        of_two = name in ("max", "min") and not isinstance(returned, tuple)  # or over all elements
        if of_two or (name == "to" and not _are_integers_of_floats(args[0], returned)):
            return returned
        stated = named_arguments(func, args, kwargs or {})
        expected = result.detach().cpu().numpy()
        call = self._make_call(name, stated, expected)
        self.calls.append(call)
        if not call.differs:
            return returned
        chosen = torch.from_numpy(call.chosen.copy()).to(result.device)
        if not isinstance(returned, tuple):
            return chosen
        at = chosen if chosen.ndim == args[0].ndim else chosen.unsqueeze(stated["dim"])
        values = args[0].gather(stated.get("dim", -1), at).reshape(returned[0].shape)
        return (values, chosen)

    def _dispatch_step(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        # Before the call, which may overwrite its operand.
        step = find_discretization(name, named_arguments(func, args, kwargs))
        returned = func(*args, **kwargs)
        if step is None or "out" in kwargs or returned.shape != step.operand.shape:
            return returned
        result = returned.detach().cpu().to(torch.float64).numpy()
        expected = np.round(step.to_integers(result))
        chosen, node = expected, None
        for operator in step.nodes:
            chosen, node = self._counterpart(step, operator, expected)
            if node is not None:
                break
        if node is None and step.edges is not None:
            chosen, node = self._from_binary_search(step, step.edges, expected)
        chosen = self._unless_moved(chosen, expected, step.operand, node)
        call = Call(name, (step.operand,), expected, chosen, node=node, step=step)
        self.calls.append(call)
        if not call.differs:
            return returned
        values = np.where(call.same, result, step.from_integers(chosen))
        replaced = torch.from_numpy(values).to(returned.device, returned.dtype)
        return returned.copy_(replaced)  # in place, because an outer mode may track the tensor

    def _counterpart(
        self, step: Discretization, operator: str, expected: NDArray[Any]
    ) -> tuple[NDArray[Any], Choice | None]:
        """Take the next recorded choice that can correspond to a step."""
        pending = self._unused.get(operator, [])
        for index, choice in enumerate(pending):
            chosen = step.chosen_by(operator, choice.chosen)
            if chosen is not None and _can_be_counterpart(step, choice, expected):
                del pending[index]
                return chosen.astype(expected.dtype), choice
        return expected, None

    def _from_binary_search(
        self, step: Discretization, edges: Floats, expected: NDArray[Any]
    ) -> tuple[NDArray[Any], Choice | None]:
        """Take the comparisons of a binary search, to which the dynamo exporter converts bucketize.

        They are converted to comparisons with all edges.
        """
        count = len(edges).bit_length()
        for operator in ("GreaterOrEqual", "Greater"):
            pending = self._unused.get(operator, [])
            candidates = [
                c for c in pending if c.operand is not None and c.operand.shape == expected.shape
            ]
            for start in range(len(candidates) - count + 1):
                steps = candidates[start : start + count]
                if (comparisons := _bisected(step.operand, edges, steps)) is not None:
                    self._unused[operator] = [c for c in pending if not any(c is s for s in steps)]
                    below = np.count_nonzero(comparisons.chosen, axis=0)
                    return below.astype(expected.dtype), comparisons
        return expected, None

    def _make_call(self, name: str, stated: dict[str, Any], expected: NDArray[Any]) -> Call:
        operands = tuple(
            np.asarray(v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else v, np.float64)
            for key, v in stated.items()
            if isinstance(v, torch.Tensor) or (name in _COMPARISONS and key == "other")
        )
        axis = stated.get("dim", None if name in ("argmax", "argmin") else -1)
        chosen, of_node = self._next_choice(
            name, expected, boxes=len(operands[0]) if name == "nms" else 0
        )
        limit = float(stated.get("iou_threshold", 0.0))
        operands = operands[:1] if name == "to" else operands
        chosen = self._unless_moved(
            chosen, expected, operands[0], of_node if name == "to" else None
        )
        unordered = name == "topk" and not stated.get("sorted", True)
        return Call(name, operands, expected, chosen, axis, limit, of_node, unordered=unordered)

    def _unless_moved(
        self, chosen: NDArray[Any], expected: NDArray[Any], operand: Floats, node: Choice | None
    ) -> NDArray[Any]:
        """Return the recorded choices, or this run's where an operand changed by more than
        rounding."""
        if not self._is_from_model or node is None or node.operand is None:
            return chosen
        with np.errstate(invalid="ignore"):
            change = np.abs(operand - node.operand.reshape(operand.shape))
            limit = np.maximum(_LARGEST_CHANGE, _LARGEST_RELATIVE_CHANGE * np.abs(operand))
            jumped = change > limit
        return np.where(jumped, expected, chosen) if jumped.any() else chosen

    def _next_choice(
        self, name: str, expected: NDArray[Any], *, boxes: int
    ) -> tuple[NDArray[Any], Choice | None]:
        """Return the next recorded choice that can correspond, and its node; else
        `expected` and None."""
        pending = self._unused.get(_ONNX[name], [])
        for index, choice in enumerate(pending):
            array = choice.chosen
            if name == "nms":
                file_array = array.ndim == 2 and array.shape[1] == 3 and not array[:, :2].any()
                candidate = array[:, 2] if file_array else array
                fits = candidate.ndim == 1 and bool((candidate < boxes).all())
            else:
                fits = bare_shape(array.shape) == bare_shape(expected.shape)
                fits = fits and (name != "to" or array.dtype == expected.dtype)
                candidate = array.reshape(expected.shape) if fits else array
            if fits:
                del pending[: index + 1]
                return candidate.astype(expected.dtype, order="C"), choice  # also of no dimension
        return expected, None


def _bisected(x: Floats, edges: Floats, steps: Sequence[Choice]) -> Choice | None:
    """Return which edges are below `x` by the file's binary search; None if it is not one."""
    low, high = np.zeros(x.shape, np.int64), np.full(x.shape, len(edges))
    margins = np.full((len(edges), *x.shape), np.inf)
    for choice in steps:
        margin = np.asarray(choice.operand, np.float64)
        compared = margin + x
        nearest = np.abs(np.subtract.outer(edges, compared)).argmin(axis=0)
        is_left = low < high
        off = np.abs(edges[nearest] - compared)[is_left].max(initial=0.0)
        if not off <= _EDGE_TOLERANCE * np.abs(edges).max():
            return None
        high = np.where(is_left & choice.chosen, nearest, high)
        low = np.where(is_left & ~choice.chosen, nearest + 1, low)
        before = np.take_along_axis(margins, nearest[None], 0)
        np.put_along_axis(margins, nearest[None], np.where(is_left, -margin, before), 0)
    if (low != high).any():
        return None
    return Choice("Greater", np.less.outer(np.arange(len(edges)), low), margins)


def _can_be_counterpart(step: Discretization, choice: Choice, expected: NDArray[Any]) -> bool:
    """Return True if a node's choice may correspond to a step of the model."""
    if step.buckets is not None:
        return True
    if choice.operand is not None:
        return step.is_near(choice.operand)
    near = np.abs(choice.chosen.reshape(expected.shape) - expected) <= 1.0
    return step.is_quantized and bool(near.all())


def _are_integers_of_floats(operand: torch.Tensor, result: torch.Tensor) -> bool:
    to = result.dtype
    integers = not (to.is_floating_point or to.is_complex or to == torch.bool)
    return operand.is_floating_point() and integers


def model_choices(run: Run) -> list[Choice]:
    """Return the model's choices in a run, in the order of its calls.

    Conversions are skipped if all floats are too large to have a fraction.
    """
    mode = ChoiceReplay(())
    with mode:
        run()
    return [choice for call in mode.calls if (choice := _choice_of(call)) is not None]


def _choice_of(call: Call) -> Choice | None:
    x = call.operands[0]
    if call.name == "to" and not (np.abs(x) < _FRACTIONS).any():
        return None
    if call.step is None or call.step.buckets is None:
        return Choice(call.operator, call.expected, x if call.is_integral else None)
    edges = np.arange(call.step.buckets).reshape(-1, *[1] * x.ndim)
    return Choice(call.operator, call.expected > edges)


@dataclass(frozen=True)
class ReplayedReference:
    """Results of the model with the choices of a file."""

    outputs: list[OutputArray]
    draws: list[list[OutputArray]]
    """The outputs in each run with random rounding."""
    truth: list[OutputArray] | None = None
    """The outputs in float64; None if the model can't run in float64."""
    undefined: tuple[UndefinedCast, ...] = ()
    """Conversions without a defined result in which file and model differ."""


def replay(
    run: Run,
    choices: Sequence[Choice],
    rounded: Callable[[Run, int], list[OutputArray]],
    truth: Callable[[DispatchMode], list[OutputArray] | None],
    *,
    draws: int,
) -> ReplayedReference | None:
    """Return the model's results with the choices of a file.

    None if the choices do not differ, or if rounding does not explain one of them.

    run: the model's forward pass. rounded: runs `run` with random rounding, seeded by a number.
    truth: runs the model in float64 inside a dispatch mode.
    """
    for context, replayed in _attempts(choices):
        with context:
            mode = ChoiceReplay(replayed)
            outputs = _inside(mode, run)
            if not any(call.differs for call in mode.calls):
                continue
            errors = [[_rounding(call, x) for x in call.operands] for call in mode.calls]
            differing = [
                (call, error)
                for call, error in zip(mode.calls, errors, strict=True)
                if call.differs
            ]
            runs: list[list[OutputArray]] = []
            for draw in range(draws):
                moved = ChoiceReplay(replayed)
                runs.append(rounded(partial(_inside, moved, run), draw))
                for call, rerun, widest in zip(mode.calls, moved.calls, errors, strict=False):
                    _widen(call, rerun, widest)
            if all(is_open(call, error) for call, error in differing):
                double = truth(ChoiceReplay(replayed))
                return ReplayedReference(
                    outputs, runs, double, tuple(_undefined(mode.calls, errors))
                )
    return None


def _attempts(
    choices: Sequence[Choice],
) -> Iterator[tuple[AbstractContextManager[object], Sequence[Choice]]]:
    """Yield contexts with the choices to replay: all, then all except conversions."""
    yield from ((context, choices) for context in _suppressions(choices))
    without_casts = [choice for choice in choices if choice.operator != "Cast"]
    if without_casts and len(without_casts) < len(choices):
        yield from ((context, without_casts) for context in _suppressions(without_casts))


def _suppressions(choices: Sequence[Choice]) -> Iterator[AbstractContextManager[object]]:
    """Yield contexts for torchvision's box suppression: all classes at once, then unchanged.

    For many boxes, `batched_nms` calls `nms` once per class. It is exported as one node that
    suppresses all classes at once, with the boxes of each class moved apart.
    """
    boxes = sys.modules.get("torchvision.ops.boxes")
    suppresses = any(choice.operator == "NonMaxSuppression" for choice in choices)
    if suppresses and hasattr(boxes, _NMS_BY_CLASS) and hasattr(boxes, _NMS_AT_ONCE):
        yield patch.object(boxes, _NMS_BY_CLASS, getattr(boxes, _NMS_AT_ONCE))
    yield nullcontext()


def _inside(mode: ChoiceReplay, run: Run) -> list[OutputArray]:
    with mode:
        return run()


def _rounding(call: Call, operand: Floats) -> Floats:
    """Return the rounding error of each element; 0 for whole numbers, which may be counts."""
    return np.where(
        _are_integers(call, operand), 0.0, np.maximum(2.0 * EPSILON * np.abs(operand), UNDERFLOW)
    )


def _are_integers(call: Call, operand: Floats) -> NDArray[np.bool_]:
    """Return which elements count as exact whole numbers.

    These are all elements if all are whole. For a conversion, only elements that could have a
    fraction in float32 are considered.
    """
    small = np.abs(operand) < _FRACTIONS if call.is_integral else np.ones(operand.shape, np.bool_)
    are_integers = bool((operand == np.round(operand))[small].all())
    return small & are_integers


def _have_fractions(operand: Floats) -> bool:
    """Return True if rounding produces fractions from whole numbers: a product like k / 255 *
    255."""
    small = np.abs(operand) < EXACT
    return bool((operand != np.round(operand))[small].any())


def _widen(call: Call, rounded: Call, widest: list[Floats]) -> None:
    leeway = _STEP_TOLERANCE if call.is_integral else _TOLERANCE
    for index, (x, y) in enumerate(zip(call.operands, rounded.operands, strict=False)):
        if call.name != rounded.name or x.shape != y.shape:
            continue
        with np.errstate(all="ignore"):
            error = np.abs(x - y)
            error = np.where(np.isfinite(error), error, 0.0)
            are_integers = _are_integers(call, x)
            if are_integers.any() and _have_fractions(y):
                are_integers = np.zeros_like(are_integers)
                error = np.where(error < 0.5, error, 0.0)
                widest[index] = np.fmax(widest[index], 2.0 * EPSILON * np.abs(x))
            typical = _typical_of_rows(x, error) if call.is_integral else _typical(call, x, error)
            # A change of one element in a step (round, floor, ceil) says nothing about others.
            steps = call.is_integral and are_integers
            widest[index] = np.fmax(
                widest[index], np.where(steps, error, leeway * np.fmax(error, typical))
            )


def _typical_of_rows(x: Floats, error: Floats) -> Floats:
    """Return the RMS error of each position over the rows, scaled by the largest value of each row.

    With few draws, some of many elements change little by chance.
    """
    if x.ndim < 2:
        return np.zeros_like(error)
    sizes = np.abs(x).max(axis=tuple(range(1, x.ndim)), initial=0.0, keepdims=True)
    return np.asarray(sizes * _rms(error / sizes, 0))


def _typical(call: Call, x: Floats, error: Floats) -> Floats:
    """Return a typical error over the compared elements.

    It is the smaller of the RMS error and the RMS relative error times the value.
    """
    if not x.ndim:
        return np.zeros_like(error)
    index = call.axis is not None and call.name not in _COMPARISONS and call.name != "nms"
    axis = call.axis if index else 0
    return np.asarray(np.fmin(_rms(error, axis), np.abs(x) * _rms(error / np.abs(x), axis)))


def _rms(error: Floats, axis: int | None) -> Floats:
    squares = np.where(np.isfinite(error), np.square(error), 0.0)
    return np.asarray(np.sqrt(squares.mean(axis=axis, keepdims=True)))


def is_open(call: Call, errors: Sequence[Floats]) -> bool:
    """Return True if rounding of the operands makes the file's choice possible.

    errors: for each operand, the error of each element by rounding.
    """
    if call.name == "nms":
        return len(call.operands[1]) <= _MAX_BOXES and _may_suppress(call, errors)
    if call.name == "to":
        return bool((_is_possible(call, errors[0]) | _has_no_result(call, errors[0])).all())
    if call.step is not None:
        return bool(_is_possible(call, errors[0]).all())
    if call.name in _COMPARISONS:
        left, right = call.operands
        with np.errstate(all="ignore"):
            error = errors[0] + errors[1]
            # Whole numbers, also as floats, have no rounding, so equal ones are not a near-tie.
            near = (np.abs(left - right) <= error) & (error > 0.0)
            near &= _is_tie_of_file(call, error)
        return bool((near | (call.expected == call.chosen)).all())
    return _may_select(call, errors[0])


def _is_tie_of_file(call: Call, error: Floats) -> NDArray[np.bool_]:
    """Return where the sides of the file's own comparison are within rounding of each other.

    All True if the file does not record them.
    """
    margin = None if call.node is None else call.node.operand
    if margin is None:
        return np.ones(call.expected.shape, np.bool_)
    if call.step is None:
        return np.asarray(np.abs(margin.reshape(call.expected.shape)) <= error)
    # the edges between the model's bucket and the file's
    first, last = np.minimum(call.expected, call.chosen), np.maximum(call.expected, call.chosen)
    edges = np.arange(len(margin)).reshape(-1, *[1] * call.expected.ndim)
    between = (first <= edges) & (edges < last)
    return np.asarray(((np.abs(margin) <= error) | ~between).all(axis=0))


def _is_possible(call: Call, error: Floats) -> NDArray[np.bool_]:
    """Return where the file's integer is a possible conversion of the model's float within
    rounding."""
    file_array = _floats_of_file(call)
    is_shown = file_array is not None or (call.step is not None and call.step.is_quantized)
    if not (call.is_bucket or is_shown):
        return call.same
    (x, *_), chosen = call.operands, call.chosen.astype(np.float64)
    decide = np.trunc if call.step is None else call.step.decide
    with np.errstate(all="ignore"):
        near = (chosen >= decide(x - error)) & (chosen <= decide(x + error))
        if call.is_bucket:
            near &= _is_tie_of_file(call, error)
        elif file_array is not None:
            near &= np.abs(file_array - x) <= error
    return np.asarray(near | call.same)


def _floats_of_file(call: Call) -> Floats | None:
    """Return the floats that the file converts; None if they are not recorded."""
    if call.is_bucket or call.node is None or call.node.operand is None:
        return None
    file_array = np.asarray(call.node.operand, np.float64).reshape(call.expected.shape)
    # Sign(x) * Floor(Abs(x))
    is_trunc = call.step is not None and call.step.decide is np.trunc
    return np.copysign(file_array, call.operands[0]) if is_trunc else file_array


def _has_no_result(call: Call, error: Floats) -> NDArray[np.bool_]:
    """Return where neither the model's nor the file's float fits the type, within rounding.

    ONNX and PyTorch define no result there.
    """
    file_array = _floats_of_file(call)
    if file_array is None:
        return np.zeros(call.expected.shape, np.bool_)
    dtype, ends = call.expected.dtype, []
    for x in (call.operands[0], file_array):
        with np.errstate(all="ignore"):
            ends.append(overflows(x - error, dtype) | overflows(x + error, dtype))
    return np.asarray(ends[0] & ends[1])


def _undefined(calls: Sequence[Call], errors: Sequence[list[Floats]]) -> Iterator[UndefinedCast]:
    for call, error in zip(calls, errors, strict=True):
        if call.name != "to" or call.node is None:
            continue
        if count := int((~_is_possible(call, error[0])).sum()):
            yield UndefinedCast(
                tensor=call.node.tensor, dtype=call.expected.dtype.name, elements=count
            )


def _may_select(call: Call, error: Floats) -> bool:
    """Return whether the value at each index equals the model's within rounding."""
    (x, *_), axis = call.operands, call.axis
    expected, chosen = call.expected, call.chosen
    if axis is None:
        x, error, axis = x.ravel(), error.ravel(), 0
        expected, chosen = expected.reshape(1), chosen.reshape(1)
    elif expected.ndim < x.ndim:
        expected, chosen = np.expand_dims(expected, axis), np.expand_dims(chosen, axis)
    if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < x.shape[axis]:
        return False
    ordered = np.sort(chosen, axis=axis)
    if (np.diff(ordered, axis=axis) == 0).any():
        return False
    if call.unordered:
        expected, chosen = (_by_value(x, indices, axis) for indices in (expected, chosen))
    left, right = np.take_along_axis(x, expected, axis), np.take_along_axis(x, chosen, axis)
    room = np.take_along_axis(error, expected, axis) + np.take_along_axis(error, chosen, axis)
    with np.errstate(all="ignore"):
        near = (left == right) | (np.abs(left - right) <= room)
    if call.name in _FIRST_OF_EQUAL:
        near &= room > 0.0  # equal whole numbers have no rounding, so they are not a near-tie
    return bool((near | (expected == chosen)).all())


def _by_value(x: Floats, indices: NDArray[Any], axis: int) -> NDArray[Any]:
    order = np.argsort(np.take_along_axis(x, indices, axis), axis=axis, kind="stable")
    return np.take_along_axis(indices, order, axis)


def _may_suppress(call: Call, errors: Sequence[Floats]) -> bool:
    """Return whether greedy suppression may keep these boxes in this order, within rounding.

    No kept box has a better one behind it or overlaps another kept one. Each dropped box overlaps a
    kept one with at least its score.
    """
    boxes, scores = call.operands[:2]
    kept = call.chosen
    limit = None if call.node is None else call.node.operand
    if limit is not None and np.abs(limit - call.threshold).max() > EPSILON:
        return False
    if kept.size and not 0 <= int(kept.min()) <= int(kept.max()) < len(boxes):
        return False
    if len(np.unique(kept)) != len(kept):
        return False
    error = errors[1]
    low, high = scores - error, scores + error
    if (high[kept][:-1] < low[kept][1:]).any():
        return False
    overlap = _overlaps(boxes, boxes[kept])
    room = _overlap_error(boxes, errors[0], kept)
    among = overlap[kept] > call.threshold + room[kept]
    np.fill_diagonal(among, val=False)
    if among.any():
        return False
    left = np.setdiff1d(np.arange(len(boxes)), kept)
    suppresses = (overlap[left] > call.threshold - room[left]) & (high[kept] >= low[left, None])
    return bool(suppresses.any(axis=1).all())


def _overlaps(boxes: Floats, kept: Floats) -> Floats:
    """Return the intersection over union of each pair, shape (boxes, others)."""
    sides = []
    for low, high in ((0, 2), (1, 3)):  # by axis, because arrays whose last axis is 2 are slow
        side = np.minimum.outer(boxes[:, high], kept[:, high])
        side -= np.maximum.outer(boxes[:, low], kept[:, low])
        sides.append(np.maximum(side, 0.0, out=side))
    inside = sides[0] * sides[1]
    with np.errstate(all="ignore"):
        union = _areas(boxes)[:, None] + _areas(kept)[None, :] - inside
        return np.asarray(np.where(union > 0.0, inside / union, 0.0))


def _areas(boxes: Floats) -> Floats:
    return np.asarray(np.prod(boxes[:, 2:] - boxes[:, :2], axis=1))


def _overlap_error(boxes: Floats, error: Floats, kept: NDArray[Any]) -> Floats:
    """Return how much rounding of the corners can change each overlap.

    An edge that moves by d changes intersection and union by at most d times the side.
    """
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0.0)
    moves = 2.0 * error.max(axis=1, initial=0.0)
    with np.errstate(all="ignore"):
        share = np.nan_to_num(moves / sides.min(axis=1), nan=np.inf, posinf=np.inf)
    pair_share = share[:, None] + share[None, kept]
    return np.asarray(2.0 * pair_share + 8.0 * EPSILON)
