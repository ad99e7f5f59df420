"""What is judged: a file, the model that it must compute like, and the samples for both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gate.model.call import parameters
from gate.onnxfile.candidate import Candidate
from gate.parity.arrays.binding import Binding, bind
from gate.parity.arrays.samples import Samples
from gate.parity.float64.precision import keeps_double
from gate.policy.policy import Policy


@dataclass(frozen=True)
class Case:
    """Nothing of it is ever changed."""

    model: nn.Module
    candidate: Candidate
    samples: Samples
    policy: Policy
    batch_size: int = 32
    """A file with a fixed batch axis is computed with that one."""
    labels: NDArray[np.int64] | None = None
    """Class indices, shape (samples,)."""

    @property
    def inputs(self) -> Samples:
        """The samples, of which NaN is a value where the policy says so."""
        return self.samples.with_gaps() if self.policy.nonfinite == "same_places" else self.samples

    def bind(self, *, batch_size: int | None = None) -> Binding:
        """Which samples go to which input of the file and of the model.

        Raises InputMismatch and DataError for samples that don't fit.
        """
        subject = self.candidate.subject
        binding = bind(
            subject.inputs,
            self.samples.specs,
            count=len(self.samples),
            batch_size=self.batch_size if batch_size is None else batch_size,
            parameters=parameters(self.model),
        )
        return replace(binding, double=keeps_double(self.model, subject))
