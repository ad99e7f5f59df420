"""What hears a forward beside the survey: it keeps values, or puts others in their place."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
import torch

from gate.errors import EvidenceError
from gate.localisation.tape import Moment
from gate.localisation.values import Survey, sketch_of
from gate.parity.statistics.output import Array


class Keeps:
    """Keeps copies of some values whole, or only sketches of them.

    Copies, because an in-place operation may overwrite the tensor later.
    """

    def __init__(self, survey: Survey, wanted: Container[int], *, whole: bool) -> None:
        self.kept: dict[int, Array] = {}
        self._survey = survey
        self._wanted = wanted
        self._whole = whole

    def hear(self, moment: Moment, tensor: torch.Tensor) -> None:
        """Keep the value if it is wanted and new. Raises EvidenceError."""
        number = number_at(self._survey, moment, tensor)
        if number in self._wanted and number not in self.kept:
            self.kept[number] = tensor.numpy().copy() if self._whole else sketch_of(tensor)


class Exchanges:
    """Puts `references` in the place of the values, so that nothing travels on from one module to
    the next; keeps sketches of what was computed from them."""

    def __init__(self, survey: Survey, references: Mapping[int, Array]) -> None:
        self.kept: dict[int, Array] = {}
        self._survey = survey
        self._references = references
        taken = {by.number for by in survey.overwritten.values()}
        self._in_place = survey.overwritten.keys() | taken

    def hear(self, moment: Moment, tensor: torch.Tensor) -> torch.Tensor | None:
        """Keep the sketch, return the reference. Raises EvidenceError."""
        number = number_at(self._survey, moment, tensor)
        if number not in self._references:
            return None
        if number not in self.kept:
            self.kept[number] = sketch_of(tensor)
        reference = torch.from_numpy(np.array(self._references[number])).to(tensor.dtype)
        if number in self._in_place:
            tensor.copy_(reference)  # who else holds it sees what is done to it in place
            return None
        return reference


class AnotherWay(EvidenceError):
    """The forward made other calls than the one that was surveyed."""


def number_at(survey: Survey, moment: Moment, tensor: torch.Tensor) -> int:
    """Number of the value that the survey heard at this moment. Raises AnotherWay."""
    if moment.number < len(survey.at):
        number = survey.at[moment.number]
        value = survey.values[number]
        if survey.paths[moment.number] == moment.path and len(value.shape) == tensor.dim():
            return number
    raise AnotherWay(
        f"the forward of these samples leaves the way of the first ones at module "
        f"'{moment.path}'. Give samples that take the same branches."
    )
