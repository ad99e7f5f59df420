"""Which tensor of the file is which value of the model.

Values decide where they agree: of all tensors of its shape a value is the one that it equals, up to
rounding. Behind a fault they don't; there names, operators and the order decide, until the cut run
gives every layer right inputs and values can decide again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache

from gate.localisation.clues import EXACT, Clues
from gate.localisation.graph import FileGraph
from gate.localisation.layout import FreeTensors, Matching, Tensor, difference
from gate.localisation.names import Paths
from gate.localisation.values import ComputedValue, Survey, sketch
from gate.parity.statistics.output import Array

# All eight were set by hand on the half `tune` of the corpora (benchmarks/localisation): no
# measurement of a single one is written down.
_EQUAL = 1e-3
"""Relative difference (rms) up to which a tensor can be a value, rounding and small faults
included."""
_AS_NEAR = 16.0
"""Of two tensors the nearer one is the value only if it is nearer by this factor: blocks that
hardly change their input return nearly what they got."""
_STEPS = 12
"""Nodes that compute one module, at most."""
_READS = 3.0
"""What it is worth that a tensor is computed from what the module got."""
_LEAVES = 4.0
"""What it is worth that nodes of other modules read a tensor that is named after the module: more
than nearness, because before its last node a module is mostly near what it returns."""
_CODE_LEAVES = 1.0
"""The same for code between modules, which leaves at many places."""
_SHAPE = 4.0
"""What speaks against a tensor of another shape: only a fault makes it the value."""
_NEAR = 0.5
"""Relative difference from which nearness says nothing."""


class ValueMatcher:
    """Pairs the values of one survey with the tensors of one file."""

    def __init__(
        self,
        survey: Survey,
        graph: FileGraph,
        paths: Paths,
        *,
        inputs: Sequence[str],
        constants: Callable[[], Container[int]] = frozenset,
    ) -> None:
        """`inputs`: names of the file's inputs in the order of the model's arguments.
        `constants`: finds the values that are the same for all samples, where that is asked."""
        self._values = survey.values
        self.constants = cache(constants)
        """As given, asked once."""
        self._returned = dict(zip(survey.outputs, graph.outputs, strict=False))
        self._given = dict(zip(survey.inputs, inputs, strict=False))
        self._graph = graph
        self._scopes = [paths.scope(node) for node in graph.nodes]
        operators = [node.op_type for node in graph.nodes]
        got = {path: survey.got(path) for path in paths.norms}
        self._clues = Clues(
            survey.values,
            list(zip(operators, self._scopes, strict=True)),
            norms={path: numbers[0] for path, numbers in got.items() if numbers},
        )

    @property
    def folded(self) -> Mapping[int, int]:
        """As `Clues.folded`."""
        return self._clues.folded

    def tensors(self, arrays: Mapping[str, Array]) -> list[Tensor]:
        """What a run gave, in the order of the nodes."""
        producer = self._graph.producer
        places = {name: producer[name] for name in arrays if name in producer}
        return [
            Tensor(
                name=name,
                place=place,
                op=self._graph.nodes[place].op_type,
                scope=self._scopes[place],
                shape=arrays[name].shape,
                sketch=sketch(arrays[name]),
            )
            for name, place in sorted(places.items(), key=lambda item: item[1])
        ]

    def match(
        self,
        tensors: Sequence[Tensor],
        before: Mapping[int, str] | None = None,
        *,
        without: Container[int] = (),
    ) -> Matching:
        """`before`: an earlier matching, which stays where nothing equals the value. `without`:
        values that no tensor has, unless one equals them."""
        free = FreeTensors(tensors)
        for number, name in self._given.items():
            free.take(number, _given(self._values[number], name))
        for value in self._values:
            if value.number not in free.taken:
                free.take(value.number, self._equal(value, free))
        equal = frozenset(free.taken)
        for number, name in (before or {}).items():
            if number not in free.taken and number not in without:
                free.take(number, free.named(name))
        for value in self._values:
            number = value.number
            if number not in free.taken and number not in without and number not in self.folded:
                free.take(number, self._likely(value, free))
        return Matching(dict(sorted(free.taken.items())), equal)

    def before(self, value: ComputedValue, paired: Container[int]) -> list[int] | None:
        """The values that it was computed from, as far as others only hand them on or were
        folded into it; None if one of them is not known."""
        found = []
        for got in value.inputs:
            number: int | None = got
            while number is not None and number not in paired:
                number = self._handed_on(self._values[number])
            if number is None:
                return None
            found.append(number)
        return found

    def _handed_on(self, value: ComputedValue) -> int | None:
        """The value that this one only repeats, or is computed from before it is folded."""
        return value.inputs[0] if value.number in self.folded else value.repeats

    def _equal(self, value: ComputedValue, free: FreeTensors) -> Tensor | None:
        """The free tensor that equals the value; of several the one that names speak for."""
        earliest = self._behind(value, free)
        distances = [
            (difference(value.sketch, tensor.sketch), tensor)
            for tensor in free.like(value)
            if tensor.place > earliest
        ]
        nearest = min((distance for distance, _ in distances), default=math.inf)
        if not nearest <= _EQUAL:
            return None
        near = [tensor for distance, tensor in distances if distance <= _AS_NEAR * nearest]
        near = [tensor for tensor in near if not self._belongs_behind(value, tensor)]
        if not near:
            return None
        best = max(near, key=lambda tensor: self._preference(value, tensor))
        return None if self._is_anothers(best, value, free) else best

    def _preference(self, value: ComputedValue, tensor: Tensor) -> tuple[float, int]:
        """Of equal tensors the one that names speak for; the last one of a module, because a bias
        near zero makes nearly the same of what it is added to; else the first one."""
        name = self._clues.name(value, tensor.place, tensor.scope)
        last = name >= EXACT and not value.functional
        return name, tensor.place if last else -tensor.place

    def _behind(self, value: ComputedValue, free: FreeTensors) -> int:
        """Place of the last node that computes what the value was computed from."""
        earliest = -1
        for got in value.inputs:
            number: int | None = got
            while number is not None and number not in free.taken:
                number = self._handed_on(self._values[number])
            if number is not None:
                earliest = max(earliest, free.taken[number].place)
        return earliest

    def _is_anothers(self, tensor: Tensor, value: ComputedValue, free: FreeTensors) -> bool:
        """True if it equals another free value too, and by name is that one: behind a fault, what a
        layer gives that hardly changes its input is what the layer before should have given."""
        clues, place, scope = self._clues, tensor.place, tensor.scope
        return clues.name(value, place, scope) < EXACT and any(
            clues.name(other, place, scope) >= EXACT
            and difference(other.sketch, tensor.sketch) <= _EQUAL
            for other in self._values
            if other.shape == tensor.shape
            and other.number != value.number
            and other.number not in free.taken
            and not other.functional
        )

    def _belongs_behind(self, value: ComputedValue, tensor: Tensor) -> bool:
        """True if the tensor may as well be the BatchNorm that is folded into the value's weights:
        one that was hardly trained changes next to nothing."""
        after = self.folded.get(value.number)
        if after is None:
            return False
        folded = difference(self._values[after].sketch, tensor.sketch)
        return folded <= _AS_NEAR * difference(value.sketch, tensor.sketch)

    def _likely(self, value: ComputedValue, free: FreeTensors) -> Tensor | None:
        """The free tensor for which most speaks, if anything does."""
        best, most = None, 0.0
        after, until = free.neighbours(value)
        predecessors = self.before(value, free.taken)
        got = {free.taken[number].name for number in predecessors or ()}
        constant = value.number in self.constants()
        resized = not constant and not self._is_one_of_many(value)
        for tensor in free.like(value, any_size=resized):
            name = self._clues.name(value, tensor.place, tensor.scope)
            if (value.repeats is not None or constant) and name < EXACT:
                continue  # what only hands on a value, or is a constant, mostly has no node
            own_code = value.functional and name >= EXACT  # of which every operator may be
            score = name + (0.0 if own_code else self._clues.kind(value, tensor.op))
            if tensor.shape != value.shape:
                score -= _SHAPE
            if self._returned.get(value.number) == tensor.name:
                score += EXACT
            if got:
                reads = self._graph.sources(tensor.name, free.names, steps=_STEPS)
                score += _READS if got <= reads else -_READS
            if tensor.shape == value.shape:
                distance = difference(value.sketch, tensor.sketch)
                score += 3.0 * max(0.0, 1.0 - distance / _NEAR)
            score += 0.5 if after < tensor.place < until else -1.0
            leaves = name >= EXACT and self._leaves(tensor)
            score += (_CODE_LEAVES if value.functional else _LEAVES) if leaves else 0.0
            # Of the nodes of one module the last one gives its output.
            if score > most or (score == most and name >= EXACT):
                best, most = tensor, score
        return best

    def _is_one_of_many(self, value: ComputedValue) -> bool:
        """True if the module returned several tensors: one of them may not be in the file."""
        return any(
            (other.path, other.call) == (value.path, value.call) and not other.functional
            for other in self._values
            if other.number != value.number
        )

    def _leaves(self, tensor: Tensor) -> bool:
        """True if nodes of other modules read it, or it is an output of the file."""
        readers = self._graph.readers.get(tensor.name, ())
        elsewhere = any(self._scopes[place] != tensor.scope for place in readers)
        return elsewhere or tensor.name in self._graph.outputs


def _given(value: ComputedValue, name: str) -> Tensor:
    """An input of the file."""
    return Tensor(name, -1, "", None, value.shape, value.sketch)
