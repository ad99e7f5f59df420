"""Why a file was refused: localisation, by itself, of the first runtime whose numbers failed, or
that can't run the file with optimisations on.

It comes after the verdict and never changes it; what breaks in it is told, not raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.errors import describe_failure
from gate.localisation.locate import locate
from gate.parity.case import Case
from gate.policy.runtimes import ort_setup
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.localisation import Explanation, Localisation
from gate.records.runtime import RuntimeName, traits_of

SAMPLES = 8
"""Samples on which the layers are compared."""


def explain(case: Case, evidence: Evidence, decision: Decision) -> Explanation:
    """Localise where a comparison of outputs failed, or where optimisations break the file; an
    empty explanation elsewhere.

    Computed on the worst sample and the first ones. The caller's model stays as it is.
    """
    if decision.verdict is not Verdict.FAIL:
        return Explanation()
    failed = _failed(decision)
    runtime = _shown(case, evidence, failed)
    if runtime is None:
        return _of_broken(case, evidence)
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
