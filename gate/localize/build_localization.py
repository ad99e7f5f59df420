"""Build the localization record."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from gate.localize.diagnosis import Diagnoser, DivergentValue
from gate.localize.file_graph import FileGraph
from gate.localize.layer_deviations import (
    OFF,
    Deviation,
    DeviationLimits,
    LayerDeviations,
    Level,
    Measured,
    worst,
)
from gate.localize.layer_weights import Detail, Floats, loose_tensors
from gate.localize.model_runner import ComputedValue, ValueSurvey, class_name
from gate.localize.trial_runs import TrialRuns
from gate.localize.value_matching import ValueLayout, returned_values
from gate.records.evidence import Subject
from gate.records.localization import (
    LayerFault,
    LayerRow,
    LayerVerdict,
    Localization,
    OptimizerFault,
)


@dataclass(frozen=True)
class LocalizationFindings:
    """The measurements of one file from which the verdict of each layer is derived."""

    survey: ValueSurvey
    graph: FileGraph
    layout: ValueLayout
    measured: Measured
    folded: Mapping[int, int]
    """Values of layers, mapped to those of the BatchNorm that is folded into them."""
    constants: Callable[[], Container[int]]
    """Returns the numbers of the values that are equal for all samples."""
    trials: TrialRuns
    """Finds dependencies between values."""
    computed: Callable[[], Iterable[Floats]] = tuple
    """Returns what forward computes from the model's tensors alone."""

    def suspect(self, number: int) -> DivergentValue:
        """Return a value as a possible cause, without dependencies."""
        layers = {norm: layer for layer, norm in self.folded.items()}
        unmatched = number in layers and layers[number] not in self.layout.matching.tensors
        return DivergentValue(
            value=self.survey.values[number],
            tensor=self.layout.names[number],
            missing=number not in self.layout.matching.tensors,
            folded=self.survey.values[layers[number]] if unmatched else None,
            alone=self.measured.layers[number].alone,
            got=self._find_unmatched_source(number),
            overwritten=self._find_overwritten(number),
        )

    def source(self, number: int) -> DivergentValue:
        """Return a value that is wrong although its inputs are right, with its dependencies."""
        return replace(
            self.suspect(number),
            unmatched=self._unmatched_before(number),
            exchanged=self.trials.exchanged(number),
            depends_on=self._depends_on(number),
        )

    def _depends_on(self, number: int) -> tuple[str, ...]:
        """Return the input tensors from which the model computes a value, without others in
        between.

        Empty if an unmatched value may be between them, or if the file computes the value from an
        output that the model's code returns, because a trial replaces such an output only at the
        end of the forward pass.
        """
        names, survey = self.layout.names, self.survey
        returned = {names.get(n) for n in survey.outputs if survey.values[n].functional}
        _, cuts = self.graph.segment(names[number], self.layout.cuts)
        unmatched = set(range(number)) - {*names, *survey.inputs}
        is_indirect = any(
            number in self.trials.dependents(value)
            for value in unmatched
            if value not in self.constants()
        )
        if is_indirect or not returned.isdisjoint(cuts):
            return ()
        return tuple(
            names[input_number]
            for input_number in survey.inputs
            if input_number in names and number in self.trials.dependents(input_number)
        )

    def _find_overwritten(self, number: int) -> dict[str, str]:
        """Return the tensors of values that PyTorch overwrote before it computed this value.

        A node that reads such a tensor reads another value than PyTorch did."""
        names = self.layout.names
        return {
            names[earlier]: by.text
            for earlier, by in self.survey.overwritten.items()
            if earlier in names and by.number < number and names.get(by.number) != names[earlier]
        }

    def _find_unmatched_source(self, number: int) -> ComputedValue | None:
        """Return an unmatched value of functional code that this value was computed from, or None.

        Such a value was computed by code between two calls, and no tensor of the file has it.
        """
        layers = {norm: layer for layer, norm in self.folded.items()}
        first = layers.get(number, number)
        values = (self.survey.values[before] for before in self.survey.values[first].inputs)
        return next((v for v in values if v.functional and v.number not in self.layout.names), None)

    def is_comparable(self, value: ComputedValue) -> bool:
        """Return False for values that need no tensor: of code between modules, inputs, repeated
        values, and values folded into the next layer."""
        return not (
            value.functional
            or value.repeats is not None
            or value.number in self.folded
            or value.number in self.survey.inputs
        )

    def returned_early(self, name: str, expected: int | None) -> ComputedValue | None:
        """Return the layer's value that output `name` has in place of what code computes from it.

        expected: the value that the model returns as this output.
        """
        number = self.layout.value_at_cut.get(name)
        if expected is None or number is None or expected in self.layout.names:
            return None
        return self.survey.values[number] if self.survey.values[expected].functional else None

    def loose_tensors(self, model: nn.Module) -> Mapping[str, Floats]:
        """Return `loose_tensors` for the values that no tensor of the file has."""
        unmatched = set(range(len(self.survey.values))) - self.layout.names.keys()
        constant = self.constants()
        return loose_tensors(model, self.survey, {n for n in unmatched if n in constant})

    def _unmatched_before(self, number: int) -> tuple[ComputedValue, ...]:
        """Return the values of modules without a tensor on which this value directly depends, with
        no matched value in between."""
        names = self.layout.names
        matched = {(v.path, v.call) for v in self.survey.values if v.number in names}
        return tuple(
            value
            for value in self.survey.values[:number]
            if value.number not in names
            and (value.path, value.call) not in matched
            and self.is_comparable(value)
            and value.number not in self.constants()  # an exporter may have computed it beforehand
            and number in self.trials.dependents(value.number)
        )


_MAX_FAULTS = 5
"""Maximum number of reported faults."""

_LEVELS: dict[Level, str] = {"ORT_ENABLE_ALL": "optimized", "ORT_DISABLE_ALL": "not optimized"}


def build_localization(
    findings: LocalizationFindings,
    model: nn.Module,
    limits: DeviationLimits,
    subject: Subject,
    *,
    blame: OptimizerFault | None = None,
) -> Localization:
    """Build the record. blame: the optimizer at fault, if one is suspected."""
    measured = findings.measured
    diagnoser = Diagnoser(
        model,
        findings.graph,
        findings.layout,
        cuda=limits.setup.cuda,
        reduced=limits.reduced,
        quantized=limits.quantized,
        fake_quantized=limits.fake_quantized,
        loose=lambda: findings.loose_tensors(model),
        computed=findings.computed,
        trials=findings.trials,
    )
    causes = _faults_by_value(findings, limits, diagnoser)
    # Quantization that the policy allows is a fault only if there is no other fault.
    faults = [fault for fault in causes.values() if not (limits.quantized and _is_rounded(fault))]
    exchanged = {} if causes else dict(_exchanged_outputs(findings, limits, diagnoser))
    divergences = faults or list(causes.values()) or list(exchanged.values())
    rows = [*_layer_rows(findings, limits, causes, model)]
    rows += _output_rows(measured, limits, exchanged, has_source=bool(causes))
    details = _fault_details(divergences) if divergences else _file_details(measured, limits, rows)
    outcome = list(details)
    # Without optimizations no optimizer can be at fault.
    optimiser = limits.level != OFF and limits.is_optimizer(measured.unmodified)
    if divergences and optimiser:
        outcome.append({"code": "unoptimized_agrees"})
    if measured.noise_unmeasured is not None:
        outcome.append({"code": "unit", "reason": measured.noise_unmeasured})
    first = divergences[0] if divergences else None
    return Localization(
        subject_sha256=subject.sha256,
        runtime=limits.runtime,
        samples=measured.samples,
        layers=tuple(rows),
        first_divergence=first.module if first else None,
        whole_ratio=worst(measured.unmodified[limits.level]),
        outcome=tuple(outcome),
        fault_code=first.code if first else None,
        fault_params=first.params if first else {},
        faults=tuple(_drop_duplicates(divergences)),
        optimiser=optimiser,
        blame=blame,
    )


def _is_rounded(fault: LayerFault) -> bool:
    """Return whether a fault is only the rounding of quantization."""
    return fault.code == "int8" and fault.params.get("variant") != "lossy"


def _faults_by_value(
    findings: LocalizationFindings, limits: DeviationLimits, diagnoser: Diagnoser
) -> dict[int, LayerFault]:
    """Return the faults by the number of the value, most upstream first.

    Exchanged inputs are one fault, even if several values depend on them. So are several outputs of
    one faulty node."""
    numbers = [n for n, layer in findings.measured.layers.items() if limits.is_source(layer)]
    suspects: list[DivergentValue] = []
    for number in numbers:
        suspect = findings.source(number)
        if not diagnoser.reads_other_output(suspect, suspects):
            suspects.append(suspect)
    exchanged = {name: by for suspect in suspects for name, by in suspect.exchanged.items()}
    causes: dict[int, LayerFault] = {}
    for suspect in suspects:
        if suspect.exchanged:
            if not any(cause.code == "input_order" for cause in causes.values()):
                causes[suspect.value.number] = diagnoser.exchanged_inputs(exchanged)
        elif (missing := diagnoser.missing_module(suspect)) is not None:
            causes.setdefault(missing.number, diagnoser.unmatched_fault(missing, suspect.tensor))
        else:
            causes.setdefault(suspect.value.number, diagnoser.cause(suspect))
    return {n: _with_call(causes, n, findings) for n in sorted(causes)}


def _with_call(
    causes: Mapping[int, LayerFault], number: int, findings: LocalizationFindings
) -> LayerFault:
    """Return the fault of a value, with the call of its module if other calls are right."""
    values, fault = findings.survey.values, causes[number]
    value = values[number]
    calls = {v.call for v in values if v.path == value.path and not v.functional}
    wrong = {values[n].call for n in causes if causes[n].module == value.path}
    if value.functional or fault.module != value.path or wrong >= calls:
        return fault
    call = {"call": value.call + 1, "calls": len(calls)}
    return fault.model_copy(update={"params": {**fault.params, **call}})


def _drop_duplicates(faults: Sequence[LayerFault]) -> Sequence[LayerFault]:
    """Return the first faults without duplicates, such as those of a module that is called twice or
    of a quantized file."""
    distinct: list[LayerFault] = []
    for fault in faults:
        if not any(
            fault.params == earlier.params or (_is_rounded(fault) and _is_rounded(earlier))
            for earlier in distinct
            if earlier.code == fault.code
        ):
            distinct.append(fault)
    return distinct[:_MAX_FAULTS]


def _layer_rows(
    findings: LocalizationFindings,
    limits: DeviationLimits,
    causes: Mapping[int, LayerFault],
    model: nn.Module,
) -> Iterator[LayerRow]:
    """Yield one row for each value of a module or of code between modules."""
    previous_ratio: float | None = None
    calls = {(v.path, v.call) for v in findings.survey.values if v.number in findings.layout.names}
    for value in findings.survey.values:
        layer, cause = findings.measured.layers.get(value.number), causes.get(value.number)
        if layer is None:
            # If another output of the call has a tensor, this output is unused.
            used = (value.path, value.call) not in calls
            if cause is not None or (used and findings.is_comparable(value)):
                yield LayerRow(
                    module=value.path,
                    call=value.call,
                    kind=value.kind,
                    verdict="unmapped" if cause is None else "source",
                    code=cause.code if cause else None,
                    params=cause.params if cause else {},
                )
            continue
        suspect = findings.suspect(value.number)
        detail = _detail(suspect, layer, cause)
        ratio = layer.through.ratio
        module = value.path if cause is None else cause.module
        verdict: LayerVerdict = "propagated" if limits.is_off(layer) else "ok"
        yield LayerRow(
            module=module,
            call=value.call,
            kind=_kind(findings, suspect, model, module),
            tensor=suspect.tensor,
            max_abs_diff=_unless_mismatched(layer.through, layer.through.largest),
            mean_abs_diff=_unless_mismatched(layer.through, layer.through.mean),
            noise_ratio=ratio,
            local_ratio=layer.alone.ratio,
            amplification=ratio / previous_ratio if previous_ratio else None,
            verdict=verdict if cause is None else "source",
            code=detail.pop("code", None),
            params=detail,
        )
        previous_ratio = ratio


def _kind(
    findings: LocalizationFindings, suspect: DivergentValue, model: nn.Module, module: str
) -> str:
    """Return the module's type; for functional values, the operators of the file."""
    if not suspect.value.functional:
        return class_name(model.get_submodule(module))
    indices, _ = findings.graph.segment(suspect.tensor, findings.layout.cuts)
    operators = dict.fromkeys(findings.graph.nodes[index].op_type for index in indices)
    return "code: " + ", ".join(name for name in operators if name != "Constant")


def _detail(suspect: DivergentValue, layer: LayerDeviations, cause: LayerFault | None) -> Detail:
    if cause is not None:
        return {**cause.params, "code": cause.code}
    if layer.through.mismatch is not None:
        return {**layer.through.mismatch}
    if layer.through.equal and not layer.through.finite:
        return {"code": "not_finite"}
    return {"code": "with_folded", "norm": suspect.folded.path} if suspect.folded else {}


def _output_rows(
    measured: Measured, limits: DeviationLimits, exchanged: Container[str], *, has_source: bool
) -> Iterator[LayerRow]:
    """Yield the outputs of the unmodified file, because marking may change the outputs.

    exchanged: the outputs that are the wrong tensors."""
    for level, outputs in measured.unmodified.items():
        for name, output in outputs.items():
            agrees = limits.agrees({name: output})
            inside_right = name in exchanged or limits.agrees({name: measured.marked[name]})
            alone = inside_right and not has_source
            detail = {**output.mismatch} if output.mismatch else {}
            yield LayerRow(
                module="",
                kind=f"output of the whole file, {_LEVELS[level]}",
                tensor=name,
                max_abs_diff=_unless_mismatched(output, output.largest),
                mean_abs_diff=_unless_mismatched(output, output.mean),
                noise_ratio=output.ratio,
                verdict="ok" if agrees else "source" if alone else "propagated",
                code=detail.pop("code", None),
                params=detail,
            )


def _exchanged_outputs(
    findings: LocalizationFindings, limits: DeviationLimits, diagnoser: Diagnoser
) -> Iterator[tuple[str, LayerFault]]:
    """Yield the outputs that are wrong tensors, constants, or lack an input of the model, although
    all layers are right."""
    names, outputs = findings.layout.names, findings.graph.outputs
    returned = returned_values(outputs, findings.survey, names)
    expected = findings.survey.outputs
    if len(outputs) < len(expected):
        missing = [str(i) for i, n in enumerate(expected, start=1) if n not in returned.values()]
        yield "", diagnoser.missing_outputs(missing if len(returned) == len(outputs) else [])
        return
    for name, output in findings.measured.marked.items():
        right = names.get(returned[name], name) if name in returned else name
        if limits.agrees({name: output}):
            continue
        # Every tensor of zeros equals an output of zeros.
        if right != name and len(np.unique(findings.survey.values[returned[name]].sketch)) > 1:
            yield name, diagnoser.wrong_output(name, right)
        elif (constant := diagnoser.constant_output(name)) is not None:
            yield name, constant
        elif unread := findings.trials.inputs_of_model_only:
            yield name, diagnoser.unread_inputs(unread)
        elif (earlier := findings.returned_early(name, returned.get(name))) is not None:
            yield name, diagnoser.early_output(name, earlier)


def _fault_details(causes: list[LayerFault]) -> Iterator[Detail]:
    first = causes[0]
    titles = dict.fromkeys(cause.module or "(model)" for cause in causes)
    further_titles = [title for title in titles if title != (first.module or "(model)")]
    yield {"code": "inputs" if first.code == "input_order" else "source"}
    weights = all(cause.code == "weights" and "variant" not in cause.params for cause in causes)
    if len(further_titles) > 2 and weights:
        yield {"code": "other_checkpoint", "count": len(further_titles)}
    elif further_titles:
        yield {"code": "also", "modules": further_titles}


def _file_details(
    measured: Measured, limits: DeviationLimits, rows: list[LayerRow]
) -> Iterator[Detail]:
    """Yield the details of a file in which no single layer is wrong."""
    optimized, plain = measured.unmodified["ORT_ENABLE_ALL"], measured.unmodified["ORT_DISABLE_ALL"]
    agrees = {"code": "unoptimized_agrees" if limits.agrees(plain) else "unoptimized_differs"}
    failure = next((output.failure for output in optimized.values() if output.failure), None)
    if not limits.agrees(measured.marked):
        ratio = worst(measured.marked)
        if not math.isfinite(ratio):
            yield {"code": "not_found"}
            names = [row.title for row in rows if row.verdict == "unmapped"]
            if names:
                yield {"code": "unmapped", "names": names}
            return
        yield {"code": "grown", "ratio": ratio}
        largest = max(rows, key=lambda row: row.amplification or 0.0, default=None)
        if largest is not None and (largest.amplification or 0.0) > 1.0:
            yield {"code": "grown_at", "module": largest.title, "factor": largest.amplification}
    elif failure is not None:
        yield {"code": "session_fails", "failure": failure}
        yield agrees
    elif not limits.agrees(optimized):
        yield {"code": "fused", "ratio": worst(optimized)}
        yield agrees
    elif not limits.agrees(plain):
        yield {"code": "only_unoptimized", "ratio": worst(plain)}
    else:
        yield {"code": "agrees", "samples": measured.samples}


def _unless_mismatched(deviation: Deviation, value: float) -> float | None:
    """Return a number, or None if the shapes differ."""
    return None if deviation.mismatch is not None else value
