"""Exporters side by side on one model: the record of `gate export compare`."""

from __future__ import annotations

from typing import Literal

from gate.records.instruments import Count
from gate.records.runtime import RuntimeName
from gate.storage.record import Measured, Record, Sha256

TrialVerdict = Literal["PASS", "FAIL", "ERROR", "not exported"]


class TrialParity(Record):
    """What one runtime computed with the file of one trial; the worst over the outputs.

    Definitions: `gate.records.evidence`. None: not known (no logits, no floats, the runtime
    failed).
    """

    runtime: RuntimeName
    verdict: TrialVerdict
    max_abs_diff: Measured | None = None
    l2_logits: Measured | None = None
    l2_probabilities: Measured | None = None
    noise_ratio: Measured | None = None
    top1_agreement: Measured | None = None
    latency_ms: Measured | None = None
    """Median of one batch."""
    failure: str | None = None


class Trial(Record):
    """One export with one choice of strategy, opset and constant folding."""

    strategy: str
    opset_asked: Count
    constant_folding: bool
    seconds: Measured
    """Of the export alone, wall clock."""
    failure: str | None = None
    """Why there is no file."""
    sha256: Sha256 | None = None
    opset: Count | None = None
    """In the file."""
    nodes: Count | None = None
    size_bytes: Count | None = None
    same_as: str | None = None
    """Title of an earlier trial whose graph and weights are the same: measured there."""
    warnings: tuple[str, ...] = ()
    """Of tracer and exporter."""
    parities: tuple[TrialParity, ...] = ()

    @property
    def title(self) -> str:
        """`traced, opset 13, folded`."""
        folding = "folded" if self.constant_folding else "not folded"
        return f"{self.strategy}, opset {self.opset_asked}, {folding}"

    @property
    def verdict(self) -> TrialVerdict:
        """The worst over the runtimes."""
        order: tuple[TrialVerdict, ...] = ("not exported", "ERROR", "FAIL", "PASS")
        if self.failure is not None or not self.parities:
            return "not exported"
        return min((parity.verdict for parity in self.parities), key=order.index)


class Trials(Record):
    """All trials of one model."""

    schema_version: Literal[1] = 1
    factory: str
    samples: Count
    batch_size: Count
    bound: Measured
    """On `noise_ratio`: above it a runtime's row is a FAIL."""
    trials: tuple[Trial, ...]
