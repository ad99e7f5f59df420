"""Find dependencies and causes by runs of the model or the file in which one thing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, cached_property
from itertools import combinations, islice, permutations
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from torch import nn

from gate.localize.file_graph import Piece, SubgraphSession
from gate.localize.layer_weights import Detail
from gate.localize.model_runner import LocalizationContext, ValueSurvey, sketch
from gate.localize.node_differences import format_value
from gate.localize.value_matching import ValueLayout, difference, is_equal
from gate.onnx_file.reading import attributes
from gate.policy.runtime_options import plain_setup
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

    def changed_axes(self, number: int) -> Detail | None:
        """Return the only change of a node's axes, else of the axes of a tensor that the nodes
        read, by which the file computes the value of the model."""
        piece, references = self._piece(number)
        want = sketch(self._references[number])
        before = self._run_piece(number, piece, references)
        in_nodes = self._only_cause(self._other_axes(number), want, before)
        return in_nodes or self._only_cause(self._other_orders(number), want, before)

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

    def _other_axes(self, number: int) -> _Trials:
        piece, references = self._piece(number)
        for index, node in enumerate(piece.model.graph.node):
            for name, got, value in self._axes_of(node):
                changed = copy.deepcopy(piece.model)
                _set_axes(changed.graph, index, name, value)
                title = f"{name} of {node.op_type} {node.name}".strip()
                pair = {"got": str(got), "want": str(value)}
                detail = {"code": "right_with", "setting": title, **pair}
                yield detail, self._run_piece(number, replace(piece, model=changed), references)

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

    def _other_orders(self, number: int) -> _Trials:
        piece, references = self._piece(number)
        for name, array in references.items():
            for order in permutations(range(array.ndim)) if array.ndim <= _MAX_RANK else ():
                turned = {**references, name: np.ascontiguousarray(array.transpose(order))}
                detail = {"code": "transposed_input", "setting": name, "order": str(order)}
                yield detail, self._run_piece(number, piece, turned)

    def _piece(self, number: int) -> tuple[Piece, dict[str, OutputArray]]:
        """Return the part of the file that computes a value from right inputs, and these inputs."""
        piece = self._context.graph.cut([self._layout.names[number]], self._layout.cuts)
        return piece, self._layout.references(piece.cuts, self._references)

    def _run_piece(
        self, number: int, piece: Piece, references: Mapping[str, OutputArray]
    ) -> OutputArray | None:
        """Return the sketch of a value that a part of the file computes; None if it can't run."""
        try:
            run = SubgraphSession(piece, plain_setup("ort-cpu"))
            arrays = run(self._context.feed(self._context.batches[0]), references)
        except Exception:  # of ONNX Runtime, without a common base
            return None
        return sketch(arrays[self._layout.names[number]])

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
        context = self._context
        with self._switched():
            numbers = {*self._layout.names, *self._survey.inputs}
            return context.runner.values(context.batches[0], self._survey, numbers)

    @cached_property
    def _references_rerun(self) -> Mapping[int, OutputArray]:
        return self._run_disturbed(None)

    def _run_model(self, number: int) -> OutputArray | None:
        """Return the sketch of a value that the model computes from right values, except what code
        computes as the input of the value's module; None if it can't run."""
        context, values = self._context, self._survey.values
        by_code = {before for before in values[number].inputs if values[before].functional}
        references = {n: array for n, array in self._references.items() if n not in by_code}
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


def _set_axes(graph: onnx.GraphProto, index: int, name: str, value: Any) -> None:
    """Set the axes of a node, which are an attribute or its second input."""
    node = graph.node[index]
    for attribute in node.attribute:
        if attribute.name == name:
            attribute.CopyFrom(helper.make_attribute(name, value))
            return
    node.input[1] = f"{node.input[1]}::other"
    graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), node.input[1]))
