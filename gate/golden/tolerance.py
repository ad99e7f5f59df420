"""Tolerance of the serving runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gate.errors import EvidenceError
from gate.golden.folder import (
    ExpectedOutput,
    FileVectors,
    PartVectors,
    Vectors,
    add_pictures,
    read_golden,
    write_golden,
)
from gate.golden.manifest import GoldenManifest
from gate.policy.output_roles import class_metrics_for
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, NonFinite
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import EPSILON
from gate.records.outputs import OutputParity
from gate.records.runtime import RuntimeName, traits_of

_SERVED: tuple[RuntimeName, ...] = ("ort-cpu-optimized", "ort-cpu")

_MEASURED_FACTOR = 2.0
"""Without any bound: factor on the largest difference that was measured in the served runtime."""


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of one output; fields as in `gate.golden.manifest.GoldenOutput`."""

    max_abs_diff: float
    top1_agreement: float | None = None
    nonfinite: NonFinite = "refuse"


def tolerances_for(policy: Policy, evidence: Evidence) -> dict[str, Tolerance]:
    """Return the tolerance of each output of the file, by name.

    It is the first of these that the policy sets for the served runtime (`ort-cpu-optimized`, else
    `ort-cpu`):

        max_abs_diff,
        noise_diff · floor,     floor = `NoiseParity.floor_peak`; for records without it
                                measured max_abs_diff / noise_diff (floor_rms if both are 0)
        scaled_diff · std(r32)

    Without any of them it is twice the largest measured difference, or one rounding error of the
    largest reference value, 2^-24 · max|r32|, if that is larger. Outputs that are not floats use
    only max_abs_diff and scaled_diff, otherwise they must be equal. Without a measurement the
    rounding error replaces the floor, so that an unmeasured output gets a small tolerance.

    The top-1 agreement is the policy's bound, for outputs that are classes.
    """
    runtime = _served(evidence)
    served = runtime.runtime if runtime else _to_be_served(policy)
    measured = {output.name: output for output in runtime.outputs} if runtime else {}
    return {
        spec.name: _tolerance(policy, policy.bounds_for(served, spec.name), measured.get(spec.name))
        for spec in evidence.subject.outputs
    }


def tolerances_of_part(policy: Policy, evidence: Evidence, part: str) -> dict[str, Tolerance]:
    """Return the tolerances of a part of a release. Raises EvidenceError if it was not measured."""
    measured = evidence.parts.get(part)
    if measured is None:
        raise EvidenceError(f"the evidence has no part {part}. Measure the release again.")
    part_policy = policy.for_part([spec.name for spec in measured.subject.outputs])
    return tolerances_for(part_policy, measured)


def widen_tolerances(golden: GoldenManifest, policy: Policy, server: RuntimeName) -> GoldenManifest:
    """Return the vectors with the tolerances of a server: those of the served runtime, scaled by
    the ratio of the policy's bounds."""
    outputs = []
    for output in golden.outputs:
        served_bounds = policy.bounds_for(_to_be_served(policy), output.name)
        server_bounds = policy.bounds_for(server, output.name)
        pairs = (
            (getattr(server_bounds, name), getattr(served_bounds, name))
            for name in ("max_abs_diff", "noise_diff", "scaled_diff", "noise_ratio")
        )
        factor = next((server / served for server, served in pairs if server and served), 1.0)
        allowed = max(1.0, factor) * output.max_abs_diff
        update: dict[str, float] = {"max_abs_diff": max(allowed, server_bounds.max_abs_diff or 0.0)}
        if output.top1_agreement is not None and server_bounds.top1_agreement is not None:
            update["top1_agreement"] = min(output.top1_agreement, server_bounds.top1_agreement)
        outputs.append(output.model_copy(update=update))
    return golden.model_copy(update={"outputs": tuple(outputs)})


def refit(source: Path, target: Path, *, policy: Policy, evidence: Evidence) -> GoldenManifest:
    """Write the vectors of `source` into `target` with the tolerances of this policy.

    Raises DigestMismatch if the vectors do not belong to the evidence's file, and the exceptions of
    `read_golden` and `write_golden`.
    """
    vectors = read_golden(source)
    old = vectors.golden
    evidence.subject.sha256.verify(old.model.sha256, label=f"the file of the vectors in {source}")
    parts = {
        name: _with_tolerances(part, tolerances_of_part(policy, evidence, name))
        for name, part in vectors.parts.items()
    }
    golden = write_golden(
        target,
        _with_tolerances(vectors, tolerances_for(policy, evidence)),
        parts=parts,
        origin=old.origin.model_copy(update={"policy_sha256": policy.digest()}),
    )
    if old.pictures is None:
        return golden
    section = policy.preprocessing
    return add_pictures(
        target,
        old.pictures.spec,
        [source / picture.file for picture in old.pictures.files],
        max_diff=section.max_diff if section is not None else old.pictures.max_diff,
    )


def _with_tolerances(
    vectors: Vectors | PartVectors, allowed: Mapping[str, Tolerance]
) -> FileVectors:
    outputs = {
        name: ExpectedOutput(values, **vars(allowed[name]))
        for name, values in vectors.outputs.items()
    }
    golden = vectors.golden
    return FileVectors(golden.model, vectors.inputs, outputs, golden.batch_axes)


def _served(evidence: Evidence) -> RuntimeEvidence | None:
    runtimes = (evidence.runtime(name) for name in _SERVED)
    return next((runtime for runtime in runtimes if runtime and runtime.outputs), None)


def _to_be_served(policy: Policy) -> RuntimeName:
    """Return the required runtime that would serve the file."""
    required = [
        name
        for name in (*_SERVED, *policy.runtimes)
        if name in policy.runtimes
        and policy.runtimes[name].required != "never"
        and traits_of(name).engine != "torch"
    ]
    return required[0]


def _tolerance(policy: Policy, bounds: Bounds, output: OutputParity | None) -> Tolerance:
    agreement = bounds.top1_agreement if output and class_metrics_for(policy, output) else None
    return Tolerance(_finite(_max_abs_diff(bounds, output)), agreement, policy.nonfinite)


def _max_abs_diff(bounds: Bounds, output: OutputParity | None) -> float:
    if bounds.max_abs_diff is not None:
        return bounds.max_abs_diff
    if output is None:
        return 0.0
    if not output.dtype.startswith("float"):
        return bounds.scaled_diff or 0.0
    rounding = _finite(EPSILON * output.reference_abs_max)
    if bounds.noise_diff is not None and output.noise is not None:
        return bounds.noise_diff * (_finite(_floor(output)) or rounding)
    if bounds.scaled_diff is not None:
        return bounds.scaled_diff * _finite(output.reference_std)
    return max(_MEASURED_FACTOR * _finite(output.max_abs_diff), rounding)


def _floor(output: OutputParity) -> float:
    noise = output.noise
    assert noise is not None
    if not noise.elements:
        return 0.0
    if noise.floor_peak is not None:
        return noise.floor_peak
    if noise.diff > 0.0:
        return output.max_abs_diff / noise.diff
    return noise.floor_rms


def _finite(number: float) -> float:
    """Return the number, or 0, which allows no difference, if it is not finite or negative."""
    return number if math.isfinite(number) and number >= 0.0 else 0.0
