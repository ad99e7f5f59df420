"""What is judged: a file, the model that it must compute like, and the samples for both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.model.call import parameters
from gate.onnxfile.candidate import Candidate
from gate.parity.arrays.binding import Binding, bind
from gate.parity.arrays.samples import Samples
from gate.parity.units.unit import MOST
from gate.policy.policy import Policy
from gate.records.evidence import Subject
from gate.records.runtime import RuntimeName
from gate.runtimes.chosen import ChosenRuntime
from gate.runtimes.runtime import Batch, Conditions, Session

_DOUBLE = "float64"
_CUT_FROM = 16
"""Samples that would be one batch, from which on they are two: halves are batches yet."""


class NamedRun(Protocol):
    """As a session of ONNX Runtime runs."""

    def run(self, outputs: Sequence[str], feed: Batch) -> list[NDArray[Any]]:
        """The outputs of these names. Raises anything."""


class Opener(Protocol):
    """Whoever opens the files of a release as a consumer does."""

    def beside(self, file: Candidate) -> NamedRun:
        """The files of this or another release of the same parts, by one chain. Raises anything."""


class Chained(Opener, Protocol):
    """Several files that are run as one."""

    def session(self, chosen: ChosenRuntime, policy: Policy, *, conditions: Conditions) -> Session:
        """All of them in this runtime, as one session. Raises anything."""

    def cases(self, whole: Case) -> Mapping[str, Case]:
        """Each file with its model, by the name of the part, as the case of all of them is."""


@dataclass(frozen=True)
class Case:
    """Nothing of it is ever changed."""

    model: nn.Module
    candidate: Candidate
    samples: Samples
    policy: Policy
    batch_size: int = 32
    """At most: see `bind`. A file with a fixed batch axis is computed with that one."""
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""
    recordings: Mapping[RuntimeName, Path] = field(default_factory=dict)
    """What was computed elsewhere, by the name of its runtime: a folder or a zip."""
    source_labels: bool = False
    """Labels come with the samples, range by range: for who measures a few units of many."""
    chained: Chained | None = None
    """The files of a release, whose chain `model` is; None: the candidate is one ONNX file."""
    units: int = MOST
    """Units at most, beside the lead (`gate.parity.units.unit`)."""

    @property
    def inputs(self) -> Samples:
        """The samples, of which NaN is a value where the policy says so."""
        return self.samples.with_gaps() if self.policy.nonfinite == "same_places" else self.samples

    def bind(self, *, batch_size: int | None = None) -> Binding:
        """Which samples go to which input of the file and of the model.

        `batch_size`: of whoever computes a few of them; None: of the measurement, which takes two
        batches rather than one where that is no matter of a handful of samples. The first one
        warms up, and would have to be computed again to be timed.

        Raises InputMismatch and DataError for samples that don't fit.
        """
        subject, count = self.candidate.subject, len(self.samples)
        if batch_size is None:
            alone = _CUT_FROM <= count <= self.batch_size
            batch_size = math.ceil(count / 2) if alone else self.batch_size
        binding = bind(
            subject.inputs,
            self.samples.specs,
            count=count,
            batch_size=batch_size,
            parameters=parameters(self.model),
        )
        return replace(binding, double=keeps_double(self.model, subject))


def keeps_double(model: nn.Module, subject: Subject) -> bool:
    """True where the model itself is in float64 in parts, or the file takes or gives float64
    because the whole model is: then its weights and inputs of float64 stay what they are.

    Else they become float32, as the file has them: a model that was built in float64 and exported
    as a copy in float32, or one of float32 that casts inputs of float64.
    """
    own = {
        tensor.dtype
        for tensor in itertools.chain(model.parameters(), model.buffers())
        if tensor.is_floating_point()
    }
    if own >= {torch.float32, torch.float64}:  # a date or a coordinate is lost in float32
        return True
    floats = {spec.dtype for spec in subject.inputs if spec.dtype.startswith("float")}
    gives = any(spec.dtype == _DOUBLE for spec in subject.outputs)
    if _DOUBLE in floats:
        return gives or own != {torch.float32}
    return gives and (own != {torch.float64} or not floats)
