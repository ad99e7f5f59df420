"""Measure a file against its model: one reference pass, every runtime of the policy beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gate.evidence import Dataset, Environment, Latency, RuntimeEvidence, Subject
from gate.parity.samples import Samples
from gate.policy import Policy


@dataclass(frozen=True)
class Candidate:
    """The file that is measured, and what was read from it."""

    path: Path
    subject: Subject


@dataclass(frozen=True)
class Measurement:
    """What `measure` saw; the caller adds source, export and time to make an `Evidence`."""

    runtimes: tuple[RuntimeEvidence, ...]
    environment: Environment
    dataset: Dataset
    reference_latency: Latency


def measure(  # noqa: PLR0913
    model: nn.Module,
    candidate: Candidate,
    samples: Samples,
    *,
    policy: Policy,
    batch_size: int = 32,
    labels: NDArray[np.int64] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Compare the file with the model on all samples."""
    raise NotImplementedError
