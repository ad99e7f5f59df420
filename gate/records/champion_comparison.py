"""The incumbent: the version that serves now, beside the file that would take its place.

Both files compute on the same samples in one process, or their evidence tells what each computed on
them; `champion_…` is of the version that serves, what has no such name is of the new file.
"""

from __future__ import annotations

import math
from typing import Literal

from gate.records.cost import Latency
from gate.storage.record import Count, Measured, Record, Sha256

IncumbentState = Literal["compared", "first", "unvouched", "unrecorded", "incomparable"]
"""`first`: no version serves; `unvouched`: no line of the ledger says that the gate passed what
serves; `unrecorded`: it has no evidence; `incomparable`: it can't be run on these samples."""


class AnswersBeside(Record):
    """One output of classes, of both files."""

    name: str
    samples: Count
    """Those without NaN in the same places on both sides."""
    disagreements: Count | None
    """Samples that the two put into different classes. None: nobody ran both."""
    champion_accuracy: Measured | None = None
    """Top-1 on labels. None: there are none."""
    accuracy: Measured | None = None

    @property
    def agreement(self) -> float | None:
        """Share of samples with the same answer; NaN without samples; None: nobody ran both."""
        if self.disagreements is None:
            return None
        return 1.0 - self.disagreements / self.samples if self.samples else math.nan

    @property
    def accuracy_drop(self) -> float | None:
        """`champion_accuracy` - `accuracy`; None without labels, NaN for what is no share."""
        if self.champion_accuracy is None or self.accuracy is None:
            return None
        both = (self.champion_accuracy, self.accuracy)
        if not all(0.0 <= share <= 1.0 for share in both):
            return math.nan
        return self.champion_accuracy - self.accuracy


class Incumbent(Record):
    """What was found of the version that serves, and what the two files say of the same samples."""

    state: IncumbentState
    absent: str | None = None
    """Why nothing was compared; None: it was."""
    version: str | None = None
    """Its number in the registry."""
    sha256: Sha256 | None = None
    """Of its file, by the ledger."""
    evidence_sha256: Sha256 | None = None
    """Of its evidence, by the ledger."""
    subject_sha256: Sha256
    """Of the new file."""
    data_sha256: Sha256
    """Of the samples."""
    samples: Count = 0
    outputs: tuple[AnswersBeside, ...] = ()
    champion_latency: Latency | None = None
    """Batches of the two in turns, on the CPU, optimised as they are served."""
    latency: Latency | None = None
    champion_noise_ratio: Measured | None = None
    """By its own evidence, on its own data."""
    noise_ratio: Measured | None = None

    @property
    def is_same_file(self) -> bool:
        """Whether the new file is what serves."""
        return self.sha256 == self.subject_sha256

    @property
    def latency_ratio(self) -> float | None:
        """Median time of a batch, new by old; None: not timed, NaN for what is no time."""
        if self.latency is None or self.champion_latency is None:
            return None
        new, old = self.latency.median_ms, self.champion_latency.median_ms
        return new / old if new > 0.0 and 0.0 < old < math.inf else math.nan

    def answers(self, output: str) -> AnswersBeside | None:
        """Those of an output, by its name."""
        return next((answers for answers in self.outputs if answers.name == output), None)
