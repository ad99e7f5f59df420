"""One consumer while the pictures pass: an implementation, or tensors dumped by the user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import first_line
from gate.preprocess.answers import Answers, Classifier, Probabilities
from gate.preprocess.causes import diagnose, wrong_shape
from gate.preprocess.difference import Range, TensorDifference
from gate.preprocess.implementation import Implementation
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels, Tensor
from gate.records.preprocessing import ConsumerParity

_SHOWN = 100


@dataclass(frozen=True)
class PictureCase:
    """One picture with the reference's tensor and answer (None: no model)."""

    name: str
    place: int
    """Of the picture among all, from 0."""
    pixels: Pixels
    reference: Tensor
    wanted: Probabilities | None


@dataclass(frozen=True)
class Exhibit:
    """The picture with the largest mean difference, and both tensors of it."""

    picture: str
    pixels: Pixels
    reference: Tensor
    tensor: Tensor


class Consumer:
    """Takes in one picture after the other; `compute` gives the record.

    What breaks while it runs is its failure, and never ends the comparison of the others.
    """

    def __init__(self, name: str, spec: PreprocessSpec) -> None:
        self.name = name
        self.version: str | None = None
        self.exhibit: Exhibit | None = None
        self._spec = spec
        self._make: Callable[[PictureCase], Tensor] | None = None
        self._unavailable: str | None = None
        self._incapable: str | None = None
        self._failure: str | None = None
        self._shape: tuple[int, ...] = ()
        self._mismatched: list[str] = []
        self._images = 0
        self._worst = -1.0
        self._range, self._difference, self._answers = Range(), TensorDifference(spec), Answers()

    def take(self, tensors: NDArray[Any]) -> None:
        """Be the consumer that made these tensors, axis 0: the pictures."""
        self._make = lambda case: tensors[case.place]

    def open(self, implementation: Implementation, stack: ExitStack) -> None:
        """Be this implementation until `stack` closes, or say why not."""
        self._incapable = implementation.incapable(self._spec)
        if self._incapable is not None:
            return
        self._unavailable = implementation.missing()
        if self._unavailable is not None:
            return
        try:
            preprocess = stack.enter_context(implementation.opened(self._spec))
            self.version = implementation.version()
        except Exception as error:
            self._failure = _brief(error)
            return
        self._make = lambda case: preprocess(case.pixels)

    def update(self, case: PictureCase, classifier: Classifier | None) -> None:
        """Compare its tensor of one picture with the reference's."""
        if self._make is None or self._failure is not None:
            return
        try:
            self._compare(np.asarray(self._make(case)), case, classifier)
        except Exception as error:
            self._failure = f"{case.name}: {_brief(error)}"

    def compute(self) -> ConsumerParity:
        """The record of all pictures so far."""
        record = ConsumerParity(
            consumer=self.name,
            images=self._images,
            mismatched=tuple(self._mismatched[:_SHOWN]),
            shape=self._shape,
            unavailable=self._unavailable,
            failure=self._failure,
            incapable=self._incapable,
        )
        difference, exhibit = self._difference, self.exhibit
        if not self._images or exhibit is None:
            return record
        diagnosis = diagnose(
            exhibit.pixels, exhibit.tensor, self._spec, reference=exhibit.reference
        )
        largest, mean = difference.output
        return record.model_copy(
            update={
                "nonfinite": difference.nonfinite,
                "values": self._range.compute(),
                "max_diff": difference.max,
                "mean_diff": difference.mean,
                "over_one_step": difference.over_one_step,
                "max_diff_output": largest,
                "mean_diff_output": mean,
                "channels": difference.channels,
                "worst": exhibit.picture,
                "causes": diagnosis.causes,
                "explained": diagnosis.explained,
                "decisions": self._answers.compute(),
            }
        )

    def _compare(self, tensor: Tensor, case: PictureCase, classifier: Classifier | None) -> None:
        self._shape = self._shape or tensor.shape
        problem = wrong_shape(tensor, self._spec, case.reference)
        if problem is not None:
            self._mismatched.append(f"{case.name}: {problem}")
            return
        off = self._difference.update(tensor, case.reference)
        self._range.update(tensor)
        self._images += 1
        if off > self._worst:
            self._worst = off
            self.exhibit = Exhibit(case.name, case.pixels, case.reference, tensor)
        if classifier is not None and case.wanted is not None:
            self._answers.update(case.name, classifier(tensor), case.wanted)


def _brief(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {first_line(error, empty=kind)}"
