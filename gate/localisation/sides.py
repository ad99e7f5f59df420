"""The model's side of a localisation: its forwards with somebody listening, in float64 too."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from gate.errors import ModelError, first_line
from gate.localisation.listeners import Exchanges, Keeps
from gate.localisation.tape import Hears, listening
from gate.localisation.values import Survey
from gate.parity.arrays.binding import Binding
from gate.parity.float64.reference import double_copy, in_double
from gate.parity.runners.torch_runner import TorchRunner
from gate.parity.stand import ReferencePass
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch


@dataclass(frozen=True)
class Truths:
    """What the float64 reference computed, as sketches by the numbers of values."""

    through: Mapping[int, Array]
    """In one forward."""
    alone: Mapping[int, Array]
    """Every value from the model's own float32 values before it."""


class ModelSide:
    """Our own copy of the model. Call it outside of inference mode, without gradients."""

    def __init__(self, model: nn.Module, binding: Binding) -> None:
        self.model = model
        self._binding = binding
        self._reference = ReferencePass(model, binding)

    def survey(self, batch: Batch) -> Survey:
        """The values of a forward. Raises EvidenceError."""
        survey = Survey()
        self._run(batch, survey.hear)
        return survey

    def values(self, batch: Batch, survey: Survey, wanted: Container[int]) -> dict[int, Array]:
        """Values of a forward, whole. Raises AnotherWay, EvidenceError."""
        keeps = Keeps(survey, wanted, whole=True)
        self._run(batch, keeps.hear)
        return keeps.kept

    def constants(self, batch: Batch, survey: Survey) -> frozenset[int]:
        """Values that are the same whatever the samples: masks of windows, tables of positions.

        Found by the samples in another order; of equal samples none is told. Raises what `values`
        raises.
        """
        turned = Keeps(survey, range(len(survey.values)), whole=False)
        self._run({name: array[::-1].copy() for name, array in batch.items()}, turned.hear)
        same = {
            value.number
            for value in survey.values
            if np.array_equal(turned.kept.get(value.number, ()), value.sketch, equal_nan=True)
        }
        given = set(survey.inputs)
        return frozenset() if given <= same else frozenset(same - given)

    def truths(self, batch: Batch, survey: Survey, references: Mapping[int, Array]) -> Truths:
        """What the float64 reference computes for the values of `references`.

        Raises ModelError where the model can't run in float64.
        """
        in_float64 = double_copy(self.model)
        runner = TorchRunner(in_float64, self._binding, device="cpu", dtype=torch.float64)
        through = Keeps(survey, references, whole=False)
        apart = Exchanges(survey, references)
        try:
            with in_double():
                for hears in (through.hear, apart.hear):
                    with listening(in_float64, hears):
                        runner.run(batch)
        except Exception as error:
            raise ModelError(
                f"the model can't run in float64: {type(error).__name__}: {first_line(error)}"
            ) from error
        return Truths(through.kept, apart.kept)

    def _run(self, batch: Batch, hears: Hears) -> None:
        with listening(self.model, hears):
            self._reference.run(batch)
