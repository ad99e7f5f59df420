"""Why a file was refused: localisation, by itself, of the first runtime whose numbers failed, that
can't run the file with optimisations on, or that is off on a probe where the samples agree.

It comes after the verdict and never changes it; what breaks in it is told, not raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.errors import EvidenceError, describe_failure
from gate.localisation.locate import MATCHED, locate
from gate.onnxfile.session import open_on_cpu
from gate.parity.arrays.samples import Samples
from gate.parity.case import Case
from gate.parity.probes.prober import Prober
from gate.parity.runners.determinism import deterministic
from gate.parity.stand import Stand
from gate.parity.statistics.output import Array
from gate.policy.runtimes import ort_setup
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import ProbeParity
from gate.records.localisation import Explanation, Localisation
from gate.records.runtime import RuntimeName, traits_of

SAMPLES = 8
"""Samples on which the layers are compared."""


def explain(case: Case, evidence: Evidence, decision: Decision) -> Explanation:
    """Localise where a comparison of outputs failed, where optimisations break the file, or where
    only a probe of other values fails; an empty explanation elsewhere.

    Computed on the worst sample and the first ones, or on the worst sample of the probe. The
    caller's model stays as it is.
    """
    if decision.verdict is not Verdict.FAIL:
        return Explanation()
    failed = _failed(decision)
    runtime = _shown(case, evidence, failed)
    if runtime is None:
        broken = _of_broken(case, evidence)
        return broken if broken.localisation else _of_probe(case, evidence, decision)
    try:
        return Explanation(localisation=_located(case, runtime, refused=failed))
    except Exception as error:
        return Explanation(failure=describe_failure(error))


def _of_broken(case: Case, evidence: Evidence) -> Explanation:
    """Of the first runtime that breaks with optimisations on: empty where they are not to blame,
    because then what it raised says more."""
    runtime = next((r for r in evidence.runtimes if _breaks_optimised(case, evidence, r)), None)
    if runtime is None:
        return Explanation()
    try:
        found = _located(case, runtime, refused=[runtime.runtime])
    except Exception:
        return Explanation()
    return Explanation(localisation=found if found.optimiser else None)


def _of_probe(case: Case, evidence: Evidence, decision: Decision) -> Explanation:
    """Of the probe of other values that is farthest off: empty where no layer shows it."""
    failed = [
        (runtime, probe)
        for check in decision.problems
        for runtime in evidence.runtimes
        for probe in runtime.probes
        if check.verdict is Verdict.FAIL
        and (check.runtime, check.name) == (runtime.runtime, f"probe_{probe.name}")
        and (probe.kind, probe.failure) == ("value", None)
        and ort_setup(case.policy, runtime.runtime) is not None
    ]
    if not failed:
        return Explanation()
    first = failed[0][0].runtime
    probe = max((p for r, p in failed if r.runtime == first), key=_farness)
    refused = [r.runtime for r, p in failed if p.name == probe.name]
    try:
        beyond = _worst_of(case, probe.name)
        found = locate(case, runtime=first, limit=len(beyond), refused=refused, beyond=beyond)
    except Exception:
        return Explanation()
    if found.first_divergence is None:
        return Explanation()
    return Explanation(localisation=found.model_copy(update={"probe": probe.name}))


def _farness(probe: ProbeParity) -> float:
    """How far a runtime is off; NaN is farthest."""
    number = probe.noise_ratio if probe.noise_ratio is not None else probe.relative_diff
    return math.inf if number is None or math.isnan(number) else number


def _worst_of(case: Case, name: str) -> Samples:
    """The sample of the probe that is farthest off, as often as samples are matched on; of a file
    with a fixed batch the whole probe. Raises anything."""
    with deterministic(case.policy.determinism):
        stand, subject = Stand.bare(case), case.candidate.subject
        probe = Prober(stand, subject.inputs, sha256=subject.sha256).named(name)
        if probe is None:
            raise EvidenceError(f"there is no probe {name}. Judge the file again.")
        batch = probe.batch
        if not stand.binding.fixed:
            session = open_on_cpu(case.candidate.path)
            outputs = session.run(None, stand.binding.by_input(batch))
            worst = _worst_sample(stand.answers.reference(batch), outputs, size=probe.size)
            times = min(MATCHED, len(case.samples))
            batch = {name: np.stack([array[worst]] * times) for name, array in batch.items()}
    return Samples.of(batch).with_gaps()


def _worst_sample(reference: Sequence[Array], outputs: Sequence[Array], *, size: int) -> int:
    """The sample that is farthest off in its own scale."""
    apart = np.zeros(size)
    for r, c in zip(reference, outputs, strict=True):
        if r.shape == c.shape and r.ndim and len(r) == size and r.size:
            with np.errstate(all="ignore"):
                off = np.abs(c.astype(np.float64) - r.astype(np.float64)).reshape(size, -1)
                scale = np.nan_to_num(np.abs(r.astype(np.float64))).reshape(size, -1).max(axis=1)
                ratio = off.max(axis=1) / np.where(scale > 0.0, scale, 1.0)
            torn = (np.isfinite(r) != np.isfinite(c)).reshape(size, -1).any(axis=1)
            apart = np.fmax(apart, np.where(torn, math.inf, ratio))
    return int(apart.argmax())


def _breaks_optimised(case: Case, evidence: Evidence, runtime: RuntimeEvidence) -> bool:
    """Whether ONNX Runtime fails there with optimisations on, and nowhere with them off."""
    setup = ort_setup(case.policy, runtime.runtime)
    if setup is None or setup == setup.plain or not runtime.failure:
        return False
    others = ((ort_setup(case.policy, other.runtime), other) for other in evidence.runtimes)
    return not any(other and other == other.plain and off.failure for other, off in others)


def _located(
    case: Case, runtime: RuntimeEvidence, *, refused: Sequence[RuntimeName]
) -> Localisation:
    places = _places(case, runtime)
    samples = case.samples.pick(places)
    return locate(
        replace(case, samples=samples), runtime=runtime.runtime, limit=len(places), refused=refused
    )


def _failed(decision: Decision) -> list[RuntimeName]:
    """The runtimes of which a number of an output is beyond its bound."""
    return [
        check.runtime
        for check in decision.problems
        if _is_comparison(check) and check.runtime and traits_of(check.runtime).engine != "torch"
    ]


def _shown(case: Case, evidence: Evidence, failed: Sequence[RuntimeName]) -> RuntimeEvidence | None:
    """The first of them: one of ONNX Runtime, which shows its tensors, where there is one."""
    shown = [name for name in failed if ort_setup(case.policy, name) is not None]
    name = next(iter(shown or failed), None)
    return None if name is None else evidence.runtime(name)


def _is_comparison(check: CheckResult) -> bool:
    return check.verdict is Verdict.FAIL and check.output is not None


def _places(case: Case, runtime: RuntimeEvidence) -> list[int]:
    """The worst sample and the first ones; of a file with a fixed batch, the worst one's batch."""
    total = len(case.samples)
    worst = next((o.max_abs_diff_sample for o in runtime.outputs if o.max_abs_diff_sample), 0)
    fixed = [spec.shape[0] for spec in case.candidate.subject.inputs if spec.shape]
    size = next((axis for axis in fixed if isinstance(axis, int)), None)
    if size:
        start = min(worst, total - 1) // size * size
        return list(range(start, min(start + size, total)))
    return list(dict.fromkeys([worst, *range(min(SAMPLES, total))]))[:SAMPLES]
