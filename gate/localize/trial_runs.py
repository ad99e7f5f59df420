"""Find dependencies: run the model with a changed value, or the file with exchanged inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, cached_property
from itertools import permutations

import numpy as np

from gate.localize.file_graph import SubgraphSession
from gate.localize.model_runner import LocalizationContext, ValueSurvey
from gate.localize.value_matching import ValueLayout, is_equal
from gate.policy.runtime_options import plain_setup
from gate.storage.arrays import OutputArray

_MAX_ALIKE = 4
"""Maximum number of inputs of one shape and dtype for which all permutations are tried."""


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
        context, layout, tensor = self._context, self._layout, self._layout.names[number]
        piece = context.graph.cut([tensor], layout.cuts)
        values = self._references
        references = layout.references(piece.cuts, values)
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

    def _run_disturbed(self, value: int | None) -> Mapping[int, OutputArray]:
        context, references = self._context, self._references
        with self._switched():
            return context.runner.disturbed(context.batches[0], self._survey, references, value)
