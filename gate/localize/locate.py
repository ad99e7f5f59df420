"""Locate the first divergent layer, on request or after a failed check."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import nn

from gate.data.input_binding import InputBinding
from gate.data.reader import length
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.decision.decide import Decision
from gate.errors import EvidenceError, GateError, PolicyError, describe_failure
from gate.localize.build_localization import LocalizationFindings, build_localization
from gate.localize.file_graph import FileGraph
from gate.localize.layer_deviations import DeviationLimits, Measured, Measuring, widen_by_rounding
from gate.localize.model_runner import (
    BUDGET,
    ForwardPathChanged,
    LocalizationContext,
    ModelRunner,
    ValueSurvey,
)
from gate.localize.module_paths import EXACT, ModulePaths
from gate.localize.ort_optimizers import TrialSettings, find_optimizer_in_sandbox, reference_outputs
from gate.localize.trial_runs import TrialRuns
from gate.localize.value_matching import IterativeMatcher, ValueLayout, ValueMatcher
from gate.measure.context import MeasurementContext
from gate.measure.job import MeasurementJob
from gate.onnx_file.sessions import open_on_cpu
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.policy.runtime_options import OrtSetup, ort_setup
from gate.probes.instrument import ProbeInstrument
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import ProbeResult
from gate.records.localization import Explanation, Localization, OptimizerFault
from gate.records.runtime import RUNTIMES, RuntimeName, traits_of
from gate.reference.discretization import FakeQuantization
from gate.reference.environment import deterministic
from gate.reference.onnx_reference import OnnxReference
from gate.statistics.accumulators import distances
from gate.storage.arrays import Batch, OutputArray, text_digests, whole_batches
from gate.summary.render import with_fault_texts

MATCHED = 2
"""Number of samples on which tensors are matched and the float64 reference runs."""

_steps = logging.getLogger("gate.steps")


@dataclass(frozen=True)
class LayerComparison:
    """The comparison of a file's layers with the model's, with the record and its runs."""

    context: LocalizationContext
    findings: LocalizationFindings
    limits: DeviationLimits
    localization: Localization
    accepted_batches: tuple[int, ...] = ()
    """Batch sizes that the file accepts; empty: all."""

    def switched(self) -> AbstractContextManager[None]:
        """Set the switches under which the model runs, and restore them afterwards."""
        return _model_switches(self.context.policy)


def locate(job: MeasurementJob, *, runtime: RuntimeName, limit: int = 8) -> Localization:
    """Return the record of `compare_layers`. Raises the exceptions of `compare_layers`."""
    return compare_layers(job, runtime=runtime, limit=limit).localization


def compare_layers(
    job: MeasurementJob,
    *,
    runtime: RuntimeName,
    limit: int = 8,
    refused: Collection[RuntimeName] = (),
    beyond: SampleSet | None = None,
    batch_size: int = MATCHED,
) -> LayerComparison:
    """Compare every layer of the file in `runtime` with the modules of the model.

    limit: number of samples, rounded up to whole batches for a fixed batch axis. refused: runtimes
    that the policy refused. If `runtime` is among them, an optimizer may be at fault for deviations
    below the limits here; if the same runtime without optimizations is, no optimizer is. beyond:
    inputs of the samples' shapes to compare on; then the samples, on which both agree, only serve
    to match tensors. batch_size: of the batch on which tensors are matched. The model and all
    global switches are restored.

    Raises PolicyError for a runtime that the policy does not name; InputMismatch and DataError for
    samples that do not fit; ModelError and EvidenceError if the model or the file can't compute
    them, nothing can be matched, or the runtime does not expose tensors; DigestMismatch if the file
    is not the one that `candidate.subject` describes.
    """
    candidate, policy = job.candidate, job.policy
    setup = _exposing_setup(policy, runtime)
    binding, inputs = _whole_batches(job, batch_size=batch_size, limit=limit)
    size = binding.batch_size
    if not binding.fixed and beyond is None and length(inputs) == size + 1:
        size += 1  # avoid a last batch of one sample: a batch norm may need two rows
    with _model_switches(policy):
        graph = FileGraph(candidate)
        copy = job.reference.copy(double=binding.double)
        runner = ModelRunner(copy.module, binding, original=job.reference.module)
        first = {name: array[:size] for name, array in inputs.items()}
        fake_quantization = FakeQuantization()
        with fake_quantization:
            survey = runner.survey(first)
        later = _later_batches(inputs, survey, size=size, fixed=binding.fixed)
        context = LocalizationContext(runner, graph, [first, *later], binding, policy, BUDGET)
        matcher = _matcher(context, survey)
        try:
            layout = IterativeMatcher(context, survey, matcher).find()
            _check_matched(runner.model, survey, layout.matching.tensors, matcher.folded)
            if beyond is not None:
                context = replace(context, batches=list(beyond.batches(size)))
                survey, before = runner.survey(context.batches[0]), survey
                matcher = _matcher(context, survey)
                moved = _renumber(layout, before, survey)
                layout = IterativeMatcher(context, survey, matcher).find(moved)
            measured = _measure_layers(context, survey, layout, setup)
            limits = DeviationLimits(
                runtime,
                setup,
                float64=measured.noise_unmeasured is None,
                reduced=policy.precision == "reduced",
                bfloat16=candidate.subject.has_bfloat16,
                quantized=policy.precision == "quantized",
                fake_quantized=fake_quantization.is_used,
                plain_refused=any(_is_plain(policy, name, setup) for name in refused),
            )
            chance_matches = _equal_by_chance(context, matcher, survey, layout, measured, limits)
            if chance_matches:
                layout = layout.without(chance_matches)
                measured = _measure_layers(context, survey, layout, setup)
            measured = _widen_unless_explained(measured, context, survey, layout, limits)
            is_strict = runtime in refused or any(map(limits.is_source, measured.layers.values()))
            bound = limits.relaxed_limit(measured.unmodified, refused=is_strict)
            blame = _optimizer_fault(context, survey, limits, candidate=candidate, bound=bound)
        except GateError:
            raise
        except Exception as error:  # of ONNX Runtime, without a common base
            raise EvidenceError(
                f"{candidate.path.name} can't compute the samples layer by layer: "
                f"{describe_failure(error)}. If the whole file can, it belongs to another model: "
                f"{_how_to_name_its_source(runner.model)}"
            ) from error
    candidate.verify()
    _check_finite(measured)
    findings = LocalizationFindings(
        survey,
        graph,
        layout,
        measured,
        matcher.folded,
        matcher.constants,
        TrialRuns(context, survey, layout, partial(_model_switches, policy)),
        partial(runner.computed_constants, context.batches[0]),
    )
    record = build_localization(findings, runner.model, limits, candidate.subject, blame=blame)
    return LayerComparison(context, findings, limits, with_fault_texts(record))


def _matcher(context: LocalizationContext, survey: ValueSurvey) -> ValueMatcher:
    runner, batch = context.runner, context.batches[0]
    return ValueMatcher(
        survey,
        context.graph,
        ModulePaths(runner.model),
        inputs=context.tensor_inputs,
        constants=lambda: runner.constants(batch, survey),
    )


def _renumber(layout: ValueLayout, before: ValueSurvey, survey: ValueSurvey) -> ValueLayout:
    """Return the samples' layout for the values of another input, at the same events.

    before: the survey of the samples. Code between the modules may compute other values, for
    example in a branch. Values that repeat each other in only one of the two surveys are dropped,
    for example the input and the output of a clamp.
    Raises ForwardPathChanged if the model makes other calls on this input than on the samples.
    """
    if before.paths != survey.paths:
        raise ForwardPathChanged("the model makes other calls on this input than on the samples.")
    numbers, assigned = dict[int, int](), set[int]()
    for number, new in zip(before.event_values, survey.event_values, strict=True):
        if new not in assigned:
            numbers.setdefault(number, new)
            assigned.add(new)
    unsure = set[int | None]()
    for number, new in numbers.items():
        repeats, repeats_now = before.values[number].repeats, survey.values[new].repeats
        if repeats_now != (None if repeats is None else numbers.get(repeats)):
            unsure |= {number, repeats}
    return layout.renumbered({n: new for n, new in numbers.items() if n not in unsure})


def _exposing_setup(policy: Policy, runtime: RuntimeName) -> OrtSetup:
    """Return the setup of a runtime of ONNX Runtime.

    Raises PolicyError for an unknown runtime, EvidenceError for one without intermediate tensors.
    """
    names = {*RUNTIMES, *policy.runtimes}
    if runtime not in names:
        raise PolicyError(
            f"the policy names no runtime '{runtime}', only {', '.join(sorted(names))}. Name a "
            "policy that has it with --policy FILE."
        )
    setup = ort_setup(policy, runtime)
    if setup is None:
        raise EvidenceError(
            f"{runtime} does not expose intermediate tensors, so its layers can't be compared. "
            "Compare the file in ort-cpu instead: gate locate --runtime ort-cpu."
        )
    return setup


def _is_plain(policy: Policy, runtime: RuntimeName, setup: OrtSetup) -> bool:
    """Return whether a runtime has the providers of `setup` without optimizations."""
    ort = ort_setup(policy, runtime)
    return ort is not None and ort == ort.plain and ort.providers == setup.providers


def _measure_layers(
    context: LocalizationContext, survey: ValueSurvey, layout: ValueLayout, setup: OrtSetup
) -> Measured:
    """Measure all samples in the runtime.

    If its optimizations fail on the parts of the file, measure without them; if other batch sizes
    do not fit the tensors, measure only the first batch."""
    setups = [setup] if setup.plain == setup else [setup, setup.plain]
    contexts = [context]
    if len(context.batches) > 1:
        contexts.append(replace(context, batches=context.batches[:1]))
    attempts = [
        Measuring(context, survey, layout, layer_setup, optimized=setup.optimized)
        for context, layer_setup in itertools.product(contexts, setups)
    ]
    for attempt in attempts[:-1]:
        try:
            return attempt.run()
        except GateError:
            raise
        except Exception:  # of ONNX Runtime, without a common base
            _steps.debug("comparing layers again, with fewer optimizations or samples")
    return attempts[-1].run()


def _equal_by_chance(
    context: LocalizationContext,
    matcher: ValueMatcher,
    survey: ValueSurvey,
    layout: ValueLayout,
    measured: Measured,
    limits: DeviationLimits,
) -> set[int]:
    """Return the values that equal their tensors on the first batch only, and may be others.

    They are integers and bools of code between modules, or that a module passes on, and tensors
    that no node reads. Few samples can't tell which tensor a value is: a product with zero equals
    what is zero there, and a permutation that changes nothing equals every other.
    """
    graph, chance = context.graph, set()
    for number in layout.matching.equal & measured.layers.keys():
        value, layer = survey.values[number], measured.layers[number]
        tensor = layout.matching.tensors[number]
        is_passed_on = value.repeats is not None and matcher.name(value, tensor) < EXACT
        is_unread = not graph.readers.get(tensor.name) and tensor.name not in graph.outputs
        if value.sketch.dtype.kind != "f" and (value.functional or is_passed_on):
            differs = not layer.alone.equal
        else:
            differs = is_unread and limits.is_source(layer)
        if differs:
            chance.add(number)
    return chance


def _widen_unless_explained(
    measured: Measured,
    context: LocalizationContext,
    survey: ValueSurvey,
    layout: ValueLayout,
    limits: DeviationLimits,
) -> Measured:
    """Return the deviations of `widen_by_rounding` if a layer is still wrong by them.

    Otherwise the model's own error is the better unit: no layer explains the difference then.
    """
    if not any(map(limits.is_source, measured.layers.values())):
        return measured
    try:
        widened = widen_by_rounding(measured, context, survey, layout)
    except GateError:  # by which random rounding or float64 is no unit
        return measured
    return widened if any(map(limits.is_source, widened.layers.values())) else measured


def _optimizer_fault(
    context: LocalizationContext,
    survey: ValueSurvey,
    limits: DeviationLimits,
    *,
    candidate: TestedFile,
    bound: float | None,
) -> OptimizerFault | None:
    """Return the optimizer at fault; None without a bound, which means no suspicion."""
    if bound is None:
        return None
    try:
        references = reference_outputs(context, survey)
    except Exception as error:
        params = {"failure": describe_failure(error)}
        return OptimizerFault(reason_code="stopped", reason_params=params)
    settings = TrialSettings(
        candidate=replace(candidate, path=candidate.path.resolve()),
        limits=limits,
        bound=bound,
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return find_optimizer_in_sandbox(settings, references)


@contextmanager
def _model_switches(policy: Policy) -> Iterator[None]:
    """Apply the policy's switches, disable inference mode, and disable fused attention.

    Inference mode has no tensor versions, which identify in-place operations. Fused attention calls
    no modules.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    with deterministic(policy.determinism), torch.inference_mode(False), torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


def _whole_batches(
    job: MeasurementJob, *, batch_size: int, limit: int
) -> tuple[InputBinding, Batch]:
    """Return the binding and `limit` samples, rounded up to whole batches for a fixed batch axis of
    the file or of a reference file."""
    binding = job.bind(batch_size=batch_size)
    module = job.reference.module
    rows = module.rows if isinstance(module, OnnxReference) else None
    if rows is not None:
        binding = replace(binding, batch_size=rows, fixed=True)
    size = binding.batch_size if binding.fixed else 1
    needed = -(-limit // size) * size
    inputs = next(job.inputs.batches(min(needed, len(job.inputs))))
    indices = whole_batches(length(inputs), size).ravel()
    return binding, {name: array[indices] for name, array in inputs.items()}


def _later_batches(inputs: Batch, survey: ValueSurvey, *, size: int, fixed: bool) -> list[Batch]:
    """Return the samples after the first `size` in batches whose values of model and file fit the
    budget. Only a `fixed` batch may have one sample. `survey`: of the first `size` samples."""
    bytes_per_sample = sum(value.nbytes for value in survey.values) / size
    step = size if fixed else max(size, int(BUDGET // max(1.0, 2 * bytes_per_sample)))
    starts = range(size, length(inputs) - (0 if fixed else 1), step)
    return [
        {name: array[start:stop] for name, array in inputs.items()}
        for start, stop in itertools.pairwise([*starts, length(inputs)])
    ]


def _check_finite(measured: Measured) -> None:
    """Raise EvidenceError if the model returns no finite number for an output."""
    for name, output in measured.marked.items():
        if not output.finite:
            raise EvidenceError(
                f"the model returns no finite number for output '{name}' on {measured.samples} "
                "samples, so nothing can be compared. Use samples with finite outputs."
            )


def _how_to_name_its_source(model: nn.Module) -> str:
    if isinstance(model, OnnxReference):
        return "use the file from which it was made as the reference."
    return "use the factory and the checkpoint of the model from which it was exported."


def _check_matched(
    model: nn.Module, survey: ValueSurvey, tensors: Mapping[int, object], folded: Mapping[int, int]
) -> None:
    """Raise EvidenceError if no call of a module has a tensor in the file."""
    calls = [
        value.number
        for value in survey.values
        if not value.functional
        and value.repeats is None
        and value.number not in (*survey.inputs, *folded)
    ]
    if calls and not any(number in tensors for number in calls):
        kinds = sorted({survey.values[number].kind for number in calls})
        raise EvidenceError(
            f"mapped 0 of {len(calls)} module calls ({', '.join(kinds[:5])}): no tensor of the "
            "file has the shape and the name, operator or values of any of them. If the file "
            f"belongs to another model, {_how_to_name_its_source(model)}"
        )


SAMPLES = 8
"""Number of samples on which the layers are compared."""


def locate_failure(job: MeasurementJob, evidence: Evidence, decision: Decision) -> Explanation:
    """Return the localization of `compare_failure`, or the reason why there is none.

    It runs after the verdict and never changes it."""
    try:
        comparison = compare_failure(job, evidence, decision)
    except Exception as error:
        return Explanation(failure=describe_failure(error))
    return Explanation(localisation=None if comparison is None else comparison.localization)


def compare_failure(
    job: MeasurementJob, evidence: Evidence, decision: Decision
) -> LayerComparison | None:
    """Compare layers if outputs differ in values or shape, optimizations break the file, or only a
    value probe fails; else return None.

    The layers are compared on the worst and the first samples, or on the worst sample of the probe.
    The caller's model does not change. Raises the exceptions of `compare_layers`.
    """
    if decision.verdict is not Verdict.FAIL:
        return None
    failed = _failed_runtimes(decision)
    runtime = _runtime_to_compare(job, evidence, failed)
    if runtime is not None:
        return _compare_runtime(job, runtime, refused=failed)
    return _compare_broken_runtime(job, evidence) or _compare_probe(job, evidence, decision)


def compare_rejected(
    job: MeasurementJob, evidence: Evidence, decision: Decision
) -> LayerComparison | None:
    """Return `compare_failure`, or compare the layers of a file whose outputs have another order,
    number or shape, or that refuses some batch sizes; else return None.

    Raises the exceptions of `compare_layers`."""
    compared = compare_failure(job, evidence, decision)
    if compared is not None or decision.verdict is not Verdict.FAIL:
        return compared
    for runtime in evidence.runtimes:
        if ort_setup(job.policy, runtime.runtime) is None:
            continue
        if runtime.failure_code == "wrong_outputs":
            return _compare_runtime(job, runtime, refused=())
        if sizes := _accepted_batches(job, runtime, decision):
            rows = [row % len(job.samples) for row in range(sizes[0])]
            compared = compare_layers(
                replace(job, samples=job.samples.take(rows)),
                runtime=runtime.runtime,
                limit=sizes[0],
                batch_size=sizes[0],
            )
            return replace(compared, accepted_batches=sizes)
    return None


def _accepted_batches(
    job: MeasurementJob, runtime: RuntimeEvidence, decision: Decision
) -> tuple[int, ...]:
    """Return the only batch sizes of a file that should accept all; empty if it does."""
    if runtime.failure_code == "only_batches":
        return tuple(cast("list[int]", runtime.failure_params["batch_sizes"]))
    is_fixed = any(check.name == "graph_fixed_batch" for check in decision.problems)
    return (job.bind().batch_size,) if is_fixed and runtime.failure is None else ()


def _compare_broken_runtime(job: MeasurementJob, evidence: Evidence) -> LayerComparison | None:
    """Compare layers in the first runtime that returns another shape, or that fails only with
    optimizations.

    Return None if neither a layer nor an optimization is the cause, because then the error of the
    runtime is more informative.
    """
    runtime = next((r for r in evidence.runtimes if _shows_cause(job, evidence, r)), None)
    if runtime is None:
        return None
    try:
        compared = _compare_runtime(job, runtime, refused=[runtime.runtime])
    except Exception:
        return None
    localization = compared.localization
    reshaped = runtime.failure_code == "wrong_outputs" and localization.first_divergence is not None
    return compared if reshaped or localization.optimiser else None


def _shows_cause(job: MeasurementJob, evidence: Evidence, runtime: RuntimeEvidence) -> bool:
    """Return whether comparing layers may explain why a runtime fails."""
    if ort_setup(job.policy, runtime.runtime) is None:
        return False
    reshaped = runtime.failure_params.get("mismatch") in ("shape", "first_axis")
    return reshaped or _breaks_optimized(job, evidence, runtime)


def _compare_probe(
    job: MeasurementJob, evidence: Evidence, decision: Decision
) -> LayerComparison | None:
    """Compare layers on the failed value probe that deviates most; None if no layer diverges."""
    failed = [
        (runtime, probe)
        for check in decision.problems
        for runtime in evidence.runtimes
        for probe in runtime.probes
        if check.verdict is Verdict.FAIL
        and (check.runtime, check.name) == (runtime.runtime, f"probe_{probe.name}")
        and (probe.kind, probe.failure) == ("value", None)
        and ort_setup(job.policy, runtime.runtime) is not None
    ]
    if not failed:
        return None
    first = failed[0][0].runtime
    probe = max((p for r, p in failed if r.runtime == first), key=_deviation)
    refused = [r.runtime for r, p in failed if p.name == probe.name]
    try:
        worst_inputs = _worst_sample_of_probe(job, probe.name)
        compared = compare_layers(
            job, runtime=first, limit=len(worst_inputs), refused=refused, beyond=worst_inputs
        )
    except Exception:
        return None
    localization = compared.localization
    if localization.first_divergence is None:
        return None
    return replace(compared, localization=localization.model_copy(update={"probe": probe.name}))


def _deviation(probe: ProbeResult) -> float:
    """Return the deviation of a runtime on a probe; infinite for NaN."""
    number = probe.noise_ratio if probe.noise_ratio is not None else probe.relative_diff
    return math.inf if number is None or math.isnan(number) else number


def _worst_sample_of_probe(job: MeasurementJob, name: str) -> SampleSet:
    """Return the worst sample of a probe, repeated `MATCHED` times; the whole probe for a file with
    a fixed batch. Raises anything."""
    with deterministic(job.policy.determinism):
        context = MeasurementContext.bare(job)
        probe = ProbeInstrument(context).find(name)
        if probe is None:
            raise EvidenceError(f"there is no probe {name}. Measure the file again.")
        batch = probe.batch
        if not context.binding.fixed:
            session = open_on_cpu(job.candidate.path)
            returned = session.run(None, context.binding.by_input(batch))
            outputs = context.binding.from_call([text_digests(output) for output in returned])
            worst = _worst_sample(context.answers.reference(batch), outputs, size=probe.size)
            times = min(MATCHED, len(job.samples))
            batch = {name: np.stack([array[worst]] * times) for name, array in batch.items()}
    return job.samples.like(batch).allow_nan()


def _worst_sample(
    reference: Sequence[OutputArray], outputs: Sequence[OutputArray], *, size: int
) -> int:
    """Return the sample with the largest difference relative to its scale."""
    ratios = np.zeros(size)
    for r, c in zip(reference, outputs, strict=True):
        if r.shape == c.shape and r.ndim and len(r) == size and r.size:
            with np.errstate(all="ignore"):
                error = distances(r, c).reshape(size, -1)
                scale = np.nan_to_num(np.abs(r.astype(np.float64))).reshape(size, -1).max(axis=1)
                ratio = error.max(axis=1) / np.where(scale > 0.0, scale, 1.0)
            mismatched = (np.isfinite(r) != np.isfinite(c)).reshape(size, -1).any(axis=1)
            ratios = np.fmax(ratios, np.where(mismatched, math.inf, ratio))
    return int(ratios.argmax())


def _breaks_optimized(job: MeasurementJob, evidence: Evidence, runtime: RuntimeEvidence) -> bool:
    """Return whether a runtime fails, and no runtime without optimizations fails."""
    setup = ort_setup(job.policy, runtime.runtime)
    if setup is None or setup == setup.plain or not runtime.failure:
        return False
    failed = (ort_setup(job.policy, r.runtime) for r in evidence.runtimes if r.failure)
    return not any(setup and setup == setup.plain for setup in failed)


def _compare_runtime(
    job: MeasurementJob, runtime: RuntimeEvidence, *, refused: Sequence[RuntimeName]
) -> LayerComparison:
    indices = _sample_indices(job, runtime)
    samples = job.samples.take(indices)
    return compare_layers(
        replace(job, samples=samples), runtime=runtime.runtime, limit=len(indices), refused=refused
    )


def _failed_runtimes(decision: Decision) -> list[RuntimeName]:
    """Return the runtimes with a number of an output beyond its bound."""
    return [
        check.runtime
        for check in decision.problems
        if check.verdict is Verdict.FAIL
        and check.output is not None
        and check.runtime
        and traits_of(check.runtime).engine != "torch"
    ]


def _runtime_to_compare(
    job: MeasurementJob, evidence: Evidence, failed: Sequence[RuntimeName]
) -> RuntimeEvidence | None:
    """Return the first failed runtime of ONNX Runtime, which exposes its tensors, or else the first
    failed one."""
    ort_names = [name for name in failed if ort_setup(job.policy, name) is not None]
    name = next(iter(ort_names or failed), None)
    return None if name is None else evidence.runtime(name)


def _sample_indices(job: MeasurementJob, runtime: RuntimeEvidence) -> list[int]:
    """Return the worst and the first samples; for a fixed batch, the batch of the worst sample."""
    total = len(job.samples)
    worst = next((o.max_abs_diff_sample for o in runtime.outputs if o.max_abs_diff_sample), 0)
    binding = job.bind()
    if binding.fixed:
        size = binding.batch_size
        start = min(worst, total - 1) // size * size
        return list(range(start, min(start + size, total)))
    return list(dict.fromkeys([worst, *range(min(SAMPLES, total))]))[:SAMPLES]
