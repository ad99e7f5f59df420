"""All that a localisation found out."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from torch import nn

from gate.localisation.cause import Suspect
from gate.localisation.graph import FileGraph
from gate.localisation.layout import Layout
from gate.localisation.measuring import Measured
from gate.localisation.tensors.counterparts import Floats
from gate.localisation.tensors.loose import loose_tensors
from gate.localisation.values import ComputedValue, Survey


@dataclass(frozen=True)
class Findings:
    """Of one file, before it is told which verdict each layer gets."""

    survey: Survey
    graph: FileGraph
    layout: Layout
    measured: Measured
    folded: Mapping[int, int]
    """Values of layers to those of the BatchNorm that is folded into them."""
    constants: Callable[[], Container[int]] = frozenset
    """Finds the values that are the same for all samples."""

    def suspect(self, number: int) -> Suspect:
        """The value as a suspect."""
        layers = {norm: layer for layer, norm in self.folded.items()}
        unmatched = number in layers and layers[number] not in self.layout.matching.tensors
        return Suspect(
            value=self.survey.values[number],
            tensor=self.layout.names[number],
            missing=number not in self.layout.matching.tensors,
            folded=self.survey.values[layers[number]] if unmatched else None,
            alone=self.measured.layers[number].alone,
            got=self._lost(number),
            overwritten=self._overwritten(number),
        )

    def _overwritten(self, number: int) -> dict[str, str]:
        """Tensors of values that were overwritten before this one was computed: whoever reads the
        tensor now reads another value than PyTorch."""
        names = self.layout.names
        return {
            names[earlier]: by.text
            for earlier, by in self.survey.overwritten.items()
            if earlier in names and by.number < number and names.get(by.number) != names[earlier]
        }

    def _lost(self, number: int) -> ComputedValue | None:
        """What code computed, and no tensor has, of what the value was computed from."""
        values = (self.survey.values[before] for before in self.survey.values[number].inputs)
        return next((v for v in values if v.functional and v.number not in self.layout.names), None)

    def is_comparable(self, value: ComputedValue) -> bool:
        """False for what needs no tensor: code between modules, inputs, what only hands on a
        value, what is folded into the next."""
        return not (
            value.functional
            or value.repeats is not None
            or value.number in self.folded
            or value.number in self.survey.inputs
        )

    def loose(self, model: nn.Module) -> Mapping[str, Floats]:
        """As `loose_tensors`, of the values that no tensor of the file has."""
        unmatched = set(range(len(self.survey.values))) - self.layout.names.keys()
        constant = self.constants()
        return loose_tensors(model, self.survey, {n for n in unmatched if n in constant})

    def unmatched_before(self, number: int) -> ComputedValue | None:
        """The first value without a tensor that this one is computed from, if there is any: a
        node would equal it, as right as its inputs are, if the file computed it."""
        value = self.survey.values[number]
        names = self.layout.names
        matched = {(v.path, v.call) for v in self.survey.values if v.number in names}
        for before in self.survey.values[:number]:
            unknown = before.number not in names and (before.path, before.call) not in matched
            parent = before.path.rpartition(".")[0]
            read = parent == value.path if value.functional else before.number in value.inputs
            if unknown and read and self.is_comparable(before) and not self._is_constant(before):
                return before
        return None

    def _is_constant(self, value: ComputedValue) -> bool:
        """True for what an exporter may have computed beforehand."""
        return value.number in self.constants()
