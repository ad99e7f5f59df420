"""What came of computing golden vectors again."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from gate.storage.record import Measured, Record, Sha256, later


class OutputResult(Record):
    """One output, computed again. Either `problem`, or within its bounds."""

    name: str
    part: str | None = later(None)
    """Of a release; None: of one ONNX file."""
    tolerance: Measured
    max_abs_diff: Measured | None = None
    """None: there is nothing to compare."""
    top1_agreement: Measured | None = None
    """None: not asked for, or nothing to compare."""
    problem: str | None = None


class GoldenResult(Record):
    """What came of computing the vectors again. Only `passed` says that all is well."""

    schema_version: Literal[1] = 1
    passed: bool
    model_sha256: Sha256
    """Of the file that was looked at."""
    golden_sha256: Sha256
    """Of golden.json, which names the digests of all arrays."""
    samples: int
    onnxruntime: str
    providers: tuple[str, ...] = ()
    """Of the session, in its order; empty: none was opened."""
    outputs: tuple[OutputResult, ...] = ()
    problems: tuple[str, ...] = ()
    """Everything that is wrong, that of the outputs included."""

    @model_validator(mode="after")
    def _honest(self) -> Self:
        clean = not self.problems and all(output.problem is None for output in self.outputs)
        if self.passed and not (clean and self.outputs and self.samples and self.providers):
            raise ValueError("a result without a whole and clean comparison did not pass")
        return self
