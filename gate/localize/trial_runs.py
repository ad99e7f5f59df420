"""Find dependencies and causes by runs of the model or the file in which one thing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import combinations, islice, permutations, product
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from torch import nn

from gate.localize.file_graph import Piece, SubgraphSession
from gate.localize.layer_weights import Detail
from gate.localize.model_runner import ComputedValue, LocalizationContext, ValueSurvey, sketch
from gate.localize.node_changes import (
    Change,
    exchanged_inputs,
    other_interpolations,
    other_numbers,
    other_operators,
)
from gate.localize.node_differences import format_value
from gate.localize.value_matching import ValueLayout, difference, is_equal
from gate.onnx_file.reading import attributes
from gate.policy.runtime_options import plain_setup
from gate.records.localization import join_names
from gate.storage.arrays import OutputArray

_MAX_ALIKE = 4
"""Maximum number of inputs of one shape and dtype for which all permutations are tried."""

_MAX_TRIALS = 96
"""Maximum number of runs with another setting of the modules, other axes of nodes, or other axes of
their inputs."""

_MAX_REMAINING = 1 / 64
"""Share of a difference that may remain after the change that explains it."""

_MAX_FACTOR = 8
"""Factor by which an integer that is tried may exceed that of the model; larger ones could need
too much memory."""

_MODULE_FIELDS = frozenset(vars(nn.Module()))
"""Attributes that each module has, which are no settings."""

_MAX_RANK = 4
"""Maximum number of axes for which all orders are tried."""

_MAX_PARTS = 512
"""Maximum number of parts along an axis whose order is compared."""

_LISTED = 8
"""Number of parts that a message lists."""

_Trials = Iterator[tuple[Detail, OutputArray | None]]
"""Changes as details of a fault, and sketches of the value that results; None: it can't run."""


class TrialRuns:
    """Runs of the first batch with a changed value or exchanged inputs."""

    def __init__(
        self,
        context: LocalizationContext,
        survey: ValueSurvey,
        layout: ValueLayout,
        switched: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """switched: context manager that sets the policy's switches while the model runs."""
        self._switched = switched
        self._context = context
        self._survey = survey
        self._layout = layout
        self._opened: tuple[Piece, SubgraphSession] | None = None
        """The piece that ran last, and its session."""
        self.dependents = cache(self._find_dependents)

    def _find_dependents(self, value: int) -> frozenset[int]:
        """Return the matched values that depend on `value` without another matched value in
        between."""
        before, after = self._references_rerun, self._run_disturbed(value)
        return frozenset(
            number
            for number in before.keys() & after.keys()
            if not np.array_equal(before[number], after[number], equal_nan=True)
        )

    def exchanged(self, number: int) -> dict[str, str]:
        """Return the exchanged inputs that make a tensor equal its value: the input that the file
        reads, mapped to the right one. Empty if no exchange does."""
        context, tensor, values = self._context, self._layout.names[number], self._references
        piece, references = self._piece(number)
        inputs = context.tensor_inputs
        fed = {name: values[n] for name, n in zip(inputs, self._survey.inputs, strict=False)}
        alike_of = {
            read: [
                name
                for name in fed
                if (fed[name].shape, fed[name].dtype) == (fed[read].shape, fed[read].dtype)
            ]
            for read in piece.cuts
            if read in fed
        }
        tried = {read: alike for read, alike in alike_of.items() if 2 <= len(alike) <= _MAX_ALIKE}
        if not tried:
            return {}
        run = SubgraphSession(piece, plain_setup("ort-cpu"))
        if is_equal(values[number], run(context.feed(context.batches[0]), references)[tensor]):
            return {}  # the error is so small that any exchange of similar inputs would fit
        for read, alike in tried.items():
            for order in permutations(alike):
                exchange = {name: by for name, by in zip(alike, order, strict=True) if name != by}
                if read not in exchange:
                    continue
                changed = {name: fed[by] for name, by in exchange.items() if name in references}
                try:
                    array = run(context.feed(context.batches[0]), {**references, **changed})[tensor]
                except Exception:  # of ONNX Runtime, for example an index out of range
                    continue
                if is_equal(values[number], array):
                    return {name: by for name, by in exchange.items() if name in references}
        return {}

    def changed_setting(
        self, number: int, paths: Iterable[str], numbers: Iterable[float]
    ) -> Detail | None:
        """Return the only attribute of the modules at `paths` that explains the value of the file.

        With another value of the attribute, the model computes what the file does. Tried are the
        `numbers`, which the nodes have, and the opposite of a bool.
        """
        piece, references = self._piece(number)
        got = self._run_piece(number, piece, references)
        trials = self._other_settings(number, paths, numbers)
        return self._only_cause(trials, got, self._run_model(number))

    def lost_input(self, number: int) -> Detail | None:
        """Return the only inputs of the value's module, after the first one, that the file replaces
        with zeros: the initial state of a recurrent module, or a mask."""
        piece, references = self._piece(number)
        got = self._run_piece(number, piece, references)
        return self._only_cause(self._without_inputs(number), got, self._run_model(number))

    def lost_value(self, number: int) -> ComputedValue | None:
        """Return the only earlier value of code without a tensor in whose place the file reads a
        matched one of its shape."""
        piece, references = self._piece(number)
        got, values = self._run_piece(number, piece, references), self._survey.values
        lost = [v for v in values[:number] if v.functional and v.number not in self._layout.names]

        def trials() -> _Trials:
            for value, array in product(reversed(lost), references.values()):
                if value.shape == array.shape and value.sketch.dtype == array.dtype:
                    detail = {"setting": value.number}
                    yield detail, self._run_model(number, {value.number: array})

        detail = self._only_cause(trials(), got, self._run_model(number))
        return None if detail is None else values[detail["setting"]]

    def changed_axes(self, number: int) -> Detail | None:
        """Return the only change by which the file computes the value of the model: of the axes of
        nodes, of the diagonal of a mask, of the outputs of a module that the nodes read, of the
        order of the value itself, or of the order of a tensor that the nodes read."""
        return self._cause_in_file(
            number,
            self._other_axes,
            self._other_diagonals,
            self._exchanged_outputs,
            self._reordered,
            self._other_orders,
        )

    def _cause_in_file(
        self,
        number: int,
        *kinds: Callable[[int, Piece, dict[str, OutputArray]], _Trials],
    ) -> Detail | None:
        """Return the only change of the first kind that has one, by which the part of the file that
        computes a value returns the model's."""
        piece, references = self._piece(number)
        want = sketch(self._references[number])
        before = self._run_piece(number, piece, references)
        for trials in kinds:
            detail = self._only_cause(trials(number, piece, references), want, before)
            if detail is not None:
                return detail
        return None

    def _only_cause(
        self, trials: _Trials, want: OutputArray | None, before: OutputArray | None
    ) -> Detail | None:
        """Return the change by which a value becomes `want`; None if several or none do.

        before: the value without a change, which differs by much more than with it.
        """
        fitting: dict[str, Detail] = {}
        if want is None or want.dtype.kind != "f":
            return None
        for detail, value in islice(trials, _MAX_TRIALS):
            if value is not None and is_equal(want, value):
                remaining = difference(want, value)
                if (
                    before is None
                    or before.shape != want.shape
                    or remaining <= _MAX_REMAINING * difference(want, before)
                ):
                    fitting.setdefault(detail["setting"], detail)
        return next(iter(fitting.values())) if len(fitting) == 1 else None

    def _other_settings(
        self, number: int, paths: Iterable[str], numbers: Iterable[float]
    ) -> _Trials:
        for path in dict.fromkeys(paths):
            module = self._context.runner.model.get_submodule(path)
            settings = vars(module)
            for name in [name for name in settings if name not in _MODULE_FIELDS]:
                want = settings[name]
                for value in _other_values(module, want, numbers):
                    settings[name] = value
                    try:
                        changed = self._run_model(number)
                    finally:
                        settings[name] = want
                    full_name = f"{path}.{name}" if path else name
                    pair = {"got": format_value(value), "want": format_value(want)}
                    yield {"code": "computed_with", "setting": full_name, **pair}, changed

    def _without_inputs(self, number: int) -> _Trials:
        """Yield the value that the model computes with zeros in place of some inputs, and in place
        of parts of the initial states of a recurrent module, such as those of one layer."""
        value, values = self._survey.values[number], self._survey.values
        module = self._context.runner.model.get_submodule(value.path)
        optional = [n for n in value.inputs[1:] if values[n].sketch.dtype.kind in "fb"]
        names = {n: f"input {value.inputs.index(n) + 1} of {value.path}" for n in optional}
        parts: list[Any] = [...]
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            states = zip(optional, ("h_0", "c_0"), strict=False)
            names = {n: f"the initial state {name}" for n, name in states}
        if isinstance(module, nn.RNNBase) and names and values[optional[0]].shape[0] > 1:
            parts += range(values[optional[0]].shape[0])
        nonzero = [n for n in names if values[n].sketch.any()]
        arrays = self._values_of(nonzero)
        for part in parts:
            for lost in [*([n] for n in nonzero), *([nonzero] if len(nonzero) > 1 else [])]:
                zeros = {n: arrays[n].copy() for n in lost}
                for array in zeros.values():
                    array[part] = 0
                shown = "" if part is ... else f"[{part}]"
                setting = join_names([f"{names[n]}{shown}" for n in lost])
                yield {"code": "lost_input", "setting": setting}, self._run_model(number, zeros)

    def _other_axes(self, number: int, piece: Piece, references: dict[str, OutputArray]) -> _Trials:
        """Yield other axes of each node, of all nodes of an operator with the same axes, and of two
        transpositions that undo each other."""
        nodes = piece.model.graph.node
        alike: dict[tuple[str, str, str], list[int]] = {}
        changes: list[tuple[str, Any, dict[int, tuple[str, Any]]]] = []
        for index, node in enumerate(nodes):
            for name, got, value in self._axes_of(node):
                title = f"{name} of {node.op_type} {node.name}".strip()
                changes.append((title, got, {index: (name, value)}))
                group = alike.setdefault((node.op_type, name, str(got)), [])
                group += [index] if index not in group else []
        for (operator, name, _), group in alike.items():
            title = f"{name} of {len(group)} nodes {operator}"
            for _, got, value in self._axes_of(nodes[group[0]]) if len(group) > 1 else ():
                changes.append((title, got, dict.fromkeys(group, (name, value))))
        perms = [index for index, node in enumerate(nodes) if node.op_type == "Transpose"]
        got = [attributes(nodes[index]).get("perm", []) for index in perms]
        if len(perms) == 2 and 0 < len(got[0]) == len(got[1]) <= _MAX_RANK:
            for order in permutations(range(len(got[0]))):
                pair = (list(order), np.argsort(order).tolist())
                both = {index: ("perm", perm) for index, perm in zip(perms, pair, strict=True)}
                changes.append(("perm of 2 nodes Transpose", got, both))
        for title, got, change in changes:
            changed = copy.deepcopy(piece.model)
            for index, (name, value) in change.items():
                _set_axes(changed.graph, index, name, value)
            values = [value for _, value in change.values()]
            want = values[0] if all(value == values[0] for value in values) else values
            detail = {"code": "right_with", "setting": title, "got": str(got), "want": str(want)}
            yield detail, self._run_piece(number, replace(piece, model=changed), references)

    def _other_diagonals(
        self, number: int, piece: Piece, references: dict[str, OutputArray]
    ) -> _Trials:
        """Yield the value with the diagonal of a triangular mask moved by one."""
        for index, node in enumerate(piece.model.graph.node):
            if node.op_type == "Trilu":
                stored = self._context.graph.constant(node.input[1]) if node.input[1:] else None
                got = 0 if stored is None else int(stored.item())
                title = f"k of Trilu {node.name}".strip()
                for want in (got - 1, got + 1):
                    changed = copy.deepcopy(piece.model)
                    del changed.graph.node[index].input[1:]
                    changed.graph.node[index].input.append("")
                    _set_axes(changed.graph, index, "k", want)
                    moved = replace(piece, model=changed)
                    pair = {"got": str(got), "want": str(want)}
                    detail = {"code": "right_with", "setting": title, **pair}
                    yield detail, self._run_piece(number, moved, references)
        for name, array in _constants(piece.model, piece.weights).items():
            if (diagonal := _diagonal(array)) is None:
                continue
            for want in (diagonal - 1, diagonal + 1):
                lower = np.tri(array.shape[-1], k=want, dtype=bool)
                mask = np.where(lower, array[..., -1:, :1], array[..., :1, -1:])
                moved = _with_constant(piece, name, mask.astype(array.dtype))
                title = f"the diagonal of {name}"
                pair = {"got": str(diagonal), "want": str(want)}
                detail = {"code": "right_with", "setting": title, **pair}
                yield detail, self._run_piece(number, moved, references)

    def _reordered(self, number: int, piece: Piece, references: dict[str, OutputArray]) -> _Trials:
        """Yield the value of the file with its axes, or what lies along one axis, in the order of
        the model."""
        want, got = self._references[number], self._run_whole(number, piece, references)
        if got is None or got.shape != want.shape or want.dtype.kind != "f":
            return
        for order in permutations(range(got.ndim)) if got.ndim <= _MAX_RANK else ():
            if np.transpose(got, order).shape == want.shape:
                detail = {"code": "transposed_values", "setting": "axes", "order": str(order)}
                yield detail, sketch(np.ascontiguousarray(got.transpose(order)))
        for axis in range(1, got.ndim):
            if (parts := _order_along(want, got, axis)) is not None:
                right = np.ascontiguousarray(np.take(got, np.argsort(parts), axis))
                shown = ", ".join(map(str, parts[:_LISTED])) + ", …" * (len(parts) > _LISTED)
                detail = {"code": "reordered_values", "setting": f"axis {axis}", "order": shown}
                yield detail, sketch(right)

    def _exchanged_outputs(
        self, number: int, piece: Piece, references: dict[str, OutputArray]
    ) -> _Trials:
        """Yield the value computed from another output of the module's call that the nodes read."""
        values, names, read = self._survey.values, self._layout.names, self._layout.value_at_cut
        for cut, array_read in references.items():
            value = values[read[cut]]
            call = [
                v.number
                for v in values
                if (v.path, v.call, v.functional) == (value.path, value.call, False)
                and v.number not in self._survey.inputs
            ]
            alike = [n for n in call if n != value.number and values[n].shape == value.shape]
            for other, array in self._values_of(alike if value.number in call else []).items():
                changed = {cut: array.astype(array_read.dtype)}
                if names.get(other) in references:
                    changed[names[other]] = array_read
                positions = {"got": call.index(value.number) + 1, "want": call.index(other) + 1}
                detail: Detail = {"code": "exchanged_outputs", "setting": value.path, **positions}
                yield detail, self._run_piece(number, piece, {**references, **changed})

    def _axes_of(self, node: onnx.NodeProto) -> Iterator[tuple[str, Any, Any]]:
        """Yield the names of the axes of a node, the axes, and other ones; nothing for a node that
        computes shapes."""
        if self._context.graph.is_constant(node.output[0]):
            return
        stated = attributes(node)
        axes = stated.get("axes")
        if node.op_type.startswith("Reduce") and len(node.input) > 1:
            array = self._context.graph.constant(node.input[1])
            axes = None if array is None else array.ravel().tolist()
        if "axis" in stated:
            yield from (("axis", stated["axis"], axis) for axis in range(_MAX_RANK))
        if axes:
            for other in combinations(range(_MAX_RANK), len(axes)):
                yield "axes", axes, list(other)
        perm = stated.get("perm", [])
        for order in permutations(sorted(perm)) if 0 < len(perm) <= _MAX_RANK else ():
            yield "perm", perm, list(order)

    def _other_orders(
        self, number: int, piece: Piece, references: dict[str, OutputArray]
    ) -> _Trials:
        for name, array in references.items():
            for order in permutations(range(array.ndim)) if array.ndim <= _MAX_RANK else ():
                turned = {**references, name: np.ascontiguousarray(array.transpose(order))}
                detail = {"code": "transposed_input", "setting": name, "order": str(order)}
                yield detail, self._run_piece(number, piece, turned)
            for axis in range(1, array.ndim):
                for how, parts in _part_orders(array.shape[axis]).items():
                    turned = {**references, name: np.take(array, parts, axis)}
                    change: Detail = {"code": "reordered_input", "how": how, "axis": axis}
                    yield {**change, "setting": name}, self._run_piece(number, piece, turned)

    def changed_input(self, number: int) -> Detail | None:
        """Return the only wrong input of the nodes. With another matched tensor in its place, or
        exchanged with it, the file computes the value of the model."""
        return self._cause_in_file(number, self._other_inputs)

    def _other_inputs(
        self, number: int, piece: Piece, references: dict[str, OutputArray]
    ) -> _Trials:
        """Yield runs with another earlier value of the same shape and dtype, the nearest first."""
        at = self._layout.value_at_cut
        values = self._layout.references(at, self._references)
        earlier = sorted((n for n in at if at[n] < number), key=at.__getitem__, reverse=True)
        for name, by in product(references, earlier):
            alike = (references[name].shape, references[name].dtype)
            if by == name or (values[by].shape, values[by].dtype) != alike:
                continue
            detail = {"code": "reads_instead", "setting": name, "want": by}
            changed = {**references, name: values[by]}
            yield detail, self._run_piece(number, piece, changed)
            if by in references and at[by] < at[name]:
                changed[by] = references[name]
                yield {**detail, "code": "exchanged"}, self._run_piece(number, piece, changed)

    def changed_node(self, number: int) -> Detail | None:
        """Return the only change of an operator, an interpolation, two inputs, a number, or the
        order of a constant by which the file computes the value of the model."""
        opset = self._context.graph.opsets.get("", 1)
        numbers = cache(lambda: self._context.runner.numbers(self._context.batches[0]))
        kinds: tuple[Callable[[Piece, dict[str, Any]], Iterator[Change]], ...] = (
            lambda piece, _: other_operators(piece.model, opset),
            lambda piece, _: other_interpolations(piece.model),
            lambda piece, constants: exchanged_inputs(piece.model, constants),
            lambda piece, constants: other_numbers(piece.model, constants, numbers()),
        )

        def run(
            kind: Any, number: int, piece: Piece, references: dict[str, OutputArray]
        ) -> _Trials:
            for detail, model in kind(piece, _constants(piece.model, piece.weights)):
                yield detail, self._run_piece(number, replace(piece, model=model), references)

        return self._cause_in_file(
            number, *(partial(run, kind) for kind in kinds), self._reordered_constants
        )

    def _reordered_constants(
        self, number: int, piece: Piece, references: dict[str, OutputArray]
    ) -> _Trials:
        """Yield the value with each constant in another order along an axis."""
        for name, array in _constants(piece.model, piece.weights).items():
            for axis in range(array.ndim if array.size > 1 and array.dtype.kind == "f" else 0):
                for how, parts in _part_orders(array.shape[axis]).items():
                    turned = _with_constant(piece, name, np.take(array, parts, axis))
                    change: Detail = {"code": "reordered_input", "how": how, "axis": axis}
                    yield {**change, "setting": name}, self._run_piece(number, turned, references)

    def _piece(self, number: int) -> tuple[Piece, dict[str, OutputArray]]:
        """Return the part of the file that computes a value from right inputs, and these inputs."""
        piece = self._context.graph.cut([self._layout.names[number]], self._layout.cuts)
        return piece, self._layout.references(piece.cuts, self._references)

    def _run_piece(
        self, number: int, piece: Piece, references: Mapping[str, OutputArray]
    ) -> OutputArray | None:
        """Return the sketch of a value that a part of the file computes; None if it can't run."""
        array = self._run_whole(number, piece, references)
        return None if array is None else sketch(array)

    def _run_whole(
        self, number: int, piece: Piece, references: Mapping[str, OutputArray]
    ) -> OutputArray | None:
        """Return a value that a part of the file computes; None if it can't run."""
        try:
            if self._opened is None or self._opened[0] is not piece:
                self._opened = piece, SubgraphSession(piece, plain_setup("ort-cpu"))
            arrays = self._opened[1](self._context.feed(self._context.batches[0]), references)
        except Exception:  # of ONNX Runtime, without a common base
            return None
        return arrays[self._layout.names[number]]

    @cached_property
    def inputs_of_model_only(self) -> list[str]:
        """The inputs that the file lacks and that change an output of the model."""
        runner, survey = self._context.runner, self._survey
        batch, outputs = self._context.batches[0], set(self._survey.outputs)
        changing = []
        for name in self._context.binding.model_only:
            turned = {**batch, name: np.ascontiguousarray(batch[name][::-1])}
            with self._switched():
                before, after = (runner.values(b, survey, outputs) for b in (batch, turned))
            if any(not np.array_equal(before[n], after[n], equal_nan=True) for n in outputs):
                changing.append(name)
        return changing

    @cached_property
    def _references(self) -> Mapping[int, OutputArray]:
        return self._values_of({*self._layout.names, *self._survey.inputs})

    def _values_of(self, numbers: Collection[int]) -> Mapping[int, OutputArray]:
        context = self._context
        with self._switched():
            return context.runner.values(context.batches[0], self._survey, numbers)

    @cached_property
    def _references_rerun(self) -> Mapping[int, OutputArray]:
        return self._run_disturbed(None)

    def _run_model(
        self, number: int, changed: Mapping[int, OutputArray] | None = None
    ) -> OutputArray | None:
        """Return the sketch of a value that the model computes from right and from `changed`
        values, except what code computes as the input of the value's module; None if it can't
        run."""
        context, values = self._context, self._survey.values
        by_code = {before for before in values[number].inputs if values[before].functional}
        references = {n: array for n, array in self._references.items() if n not in by_code}
        references |= changed or {}
        with self._switched():
            run = context.runner.disturbed(context.batches[0], self._survey, references, None)
        return run.get(number)

    def _run_disturbed(self, value: int | None) -> Mapping[int, OutputArray]:
        context, references = self._context, self._references
        with self._switched():
            return context.runner.disturbed(context.batches[0], self._survey, references, value)


def _other_values(module: nn.Module, want: Any, numbers: Iterable[float]) -> list[float]:
    """Return the values that are tried in place of a bool, an int or a float.

    PyTorch divides by some integers without a check, and its recurrent modules read as many weights
    as their sizes say.
    """
    if isinstance(want, bool):
        return [not want]
    if isinstance(want, float):
        return [float(n) for n in numbers if n != want]
    if not isinstance(want, int) or isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return []
    least = 1 if type(module).__module__.startswith("torch.") and want > 0 else -_MAX_RANK
    limit = _MAX_FACTOR * max(abs(want), _MAX_FACTOR)
    return [n for n in numbers if isinstance(n, int) and n != want and least <= n <= limit]


def _part_orders(size: int) -> dict[str, Any]:
    """Return orders of the parts along an axis by their description."""
    parts = np.arange(size)
    orders = {"reversed": parts[::-1]} if size > 1 else {}
    if size % 2 == 0 < size - 2:
        orders["with exchanged halves"] = np.roll(parts, size // 2)
    if size > 2:
        orders |= {"shifted by one": np.roll(parts, -1), "shifted back by one": np.roll(parts, 1)}
    return orders


def _set_axes(graph: onnx.GraphProto, index: int, name: str, value: Any) -> None:
    """Set the axes of a node, which are an attribute or its second input."""
    node = graph.node[index]
    for attribute in node.attribute:
        if attribute.name == name:
            attribute.CopyFrom(helper.make_attribute(name, value))
            return
    node.input[1] = f"{node.input[1]}::{index}"
    graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), node.input[1]))


def _constants(model: onnx.ModelProto, weights: Mapping[str, OutputArray]) -> dict[str, Any]:
    """Return the initializers of a piece, and the tensors of its nodes Constant."""
    arrays = {tensor.name: weights[tensor.name] for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                arrays[node.output[0]] = numpy_helper.to_array(attribute.t)
    return arrays


def _with_constant(piece: Piece, name: str, array: OutputArray) -> Piece:
    """Return the piece with another value of a constant."""
    model = copy.deepcopy(piece.model)
    tensors = [tensor for tensor in model.graph.initializer if tensor.name == name]
    tensors += [a.t for node in model.graph.node if name in node.output for a in node.attribute]
    for tensor in tensors:
        if not tensor.external_data:
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return replace(piece, model=model, weights={**piece.weights, name: array})


def _diagonal(array: OutputArray) -> int | None:
    """Return up to which diagonal a mask has the value of its lower left corner, and another one
    above it; None for other arrays."""
    if array.ndim < 2 or not 1 < array.shape[-1] == array.shape[-2]:
        return None
    size, lower = array.shape[-1], array == array[..., -1:, :1]
    if not (array == np.where(lower, array[..., -1:, :1], array[..., :1, -1:])).all():
        return None
    return next((k for k in range(1 - size, size - 1) if (lower == np.tri(size, k=k)).all()), None)


def _order_along(want: OutputArray, got: OutputArray, axis: int) -> list[int] | None:
    """Return which part of `want` along an axis each part of `got` is nearest to; None unless the
    parts are in another order."""
    size = want.shape[axis]
    if not 1 < size <= _MAX_PARTS:
        return None
    wanted, parts = (
        np.moveaxis(array.astype(np.float64), axis, 0).reshape(size, -1) for array in (want, got)
    )
    with np.errstate(all="ignore"):
        distances = (wanted**2).sum(1) - 2 * parts @ wanted.T
    order: list[int] = distances.argmin(axis=1).tolist()
    return order if sorted(order) == list(range(size)) != order else None
