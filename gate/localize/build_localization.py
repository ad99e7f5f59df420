"""Build the localization record."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from gate.decision.catalog import OPTIMISER
from gate.localize.diagnosis import WEIGHTS, Diagnoser, DivergentValue, Fault
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
from gate.localize.layer_weights import Floats, loose_tensors
from gate.localize.model_runner import ComputedValue, ValueSurvey
from gate.localize.trial_runs import TrialRuns
from gate.localize.value_matching import ValueLayout, returned_values
from gate.records.evidence import Subject
from gate.records.localization import (
    LayerFault,
    LayerRow,
    LayerVerdict,
    Localization,
    OptimizerFault,
    listed,
)
from gate.summary.render import broken, capital, short


@dataclass(frozen=True)
class LocalizationFindings:
    """Of one file, before it is told which verdict each layer gets."""

    survey: ValueSurvey
    graph: FileGraph
    layout: ValueLayout
    measured: Measured
    folded: Mapping[int, int]
    """Values of layers to those of the BatchNorm that is folded into them."""
    constants: Callable[[], Container[int]] = frozenset
    """Finds the values that are the same for all samples."""
    trials: TrialRuns | None = None
    """Finds what depends on what; None: nothing is known of that."""

    def suspect(self, number: int) -> DivergentValue:
        """The value as a suspect."""
        layers = {norm: layer for layer, norm in self.folded.items()}
        unmatched = number in layers and layers[number] not in self.layout.matching.tensors
        return DivergentValue(
            value=self.survey.values[number],
            tensor=self.layout.names[number],
            missing=number not in self.layout.matching.tensors,
            folded=self.survey.values[layers[number]] if unmatched else None,
            alone=self.measured.layers[number].alone,
            got=self._lost(number),
            overwritten=self._overwritten(number),
        )

    def source(self, number: int) -> DivergentValue:
        """The value as a suspect that is wrong although its inputs are right."""
        suspect = self.suspect(number)
        if self.trials is None:
            return suspect
        return replace(
            suspect,
            unmatched=self._unmatched_before(number, self.trials),
            exchanged=self.trials.exchanged(number),
            depends_on=tuple(
                self.layout.names[given]
                for given in self.survey.inputs
                if given in self.layout.names and number in self.trials.dependents(given)
            ),
        )

    def _overwritten(self, number: int) -> dict[str, str]:
        """Tensors of values that were overwritten before this one was computed: whoever reads the
        tensor now reads another value than PyTorch."""
        names = self.layout.names
        return {
            names[earlier]: by.text
            for earlier, by in self.survey.overwritten.items()
            if earlier in names and by.number < number and names.get(by.number) != names[earlier]
        }

    def _lost(self, number: int) -> ComputedValue | None:
        """What code computed, and no tensor has, of what the value was computed from."""
        values = (self.survey.values[before] for before in self.survey.values[number].inputs)
        return next((v for v in values if v.functional and v.number not in self.layout.names), None)

    def is_comparable(self, value: ComputedValue) -> bool:
        """False for what needs no tensor: code between modules, inputs, what only hands on a
        value, what is folded into the next."""
        return not (
            value.functional
            or value.repeats is not None
            or value.number in self.folded
            or value.number in self.survey.inputs
        )

    def loose(self, model: nn.Module) -> Mapping[str, Floats]:
        """As `loose_tensors`, of the values that no tensor of the file has."""
        unmatched = set(range(len(self.survey.values))) - self.layout.names.keys()
        constant = self.constants()
        return loose_tensors(model, self.survey, {n for n in unmatched if n in constant})

    def _unmatched_before(self, number: int, trials: TrialRuns) -> tuple[ComputedValue, ...]:
        """Return the values of modules without a tensor that this one is computed from by way of
        no value that has one."""
        names = self.layout.names
        matched = {(v.path, v.call) for v in self.survey.values if v.number in names}
        return tuple(
            value
            for value in self.survey.values[:number]
            if value.number not in names
            and (value.path, value.call) not in matched
            and self.is_comparable(value)
            and not self._is_constant(value)
            and number in trials.dependents(value.number)
        )

    def _is_constant(self, value: ComputedValue) -> bool:
        """True for what an exporter may have computed beforehand."""
        return value.number in self.constants()


_NAMES = 5
"""Modules in a sentence."""

_FAULTS = 5
"""Faults that are reported, at most."""

_LEVELS: dict[Level, str] = {"ORT_ENABLE_ALL": "optimised", "ORT_DISABLE_ALL": "not optimised"}

_PLAIN = "Serve with optimisations on, as in ort-cpu-optimized, or update ONNX Runtime."

_GROWTH = (
    "The model amplifies rounding there: look for differences of large numbers, sharp softmax or "
    "division by small numbers; or allow more noise in the policy knowingly."
)


def build_localization(
    findings: LocalizationFindings,
    model: nn.Module,
    limits: DeviationLimits,
    subject: Subject,
    *,
    blame: OptimizerFault | None = None,
) -> Localization:
    """The record. `blame`: which optimiser it is, where it may be one."""
    measured = findings.measured
    detective = Diagnoser(
        model,
        findings.graph,
        findings.layout,
        cuda=limits.setup.cuda,
        reduced=limits.reduced,
        quantized=limits.quantized,
        loose=lambda: findings.loose(model),
    )
    causes = _causes(findings, limits, detective)
    # Quantization that the policy allows is a fault only if there is no other one.
    faults = [cause for cause in causes.values() if not (limits.quantized and cause.quantized)]
    exchanged = {} if causes else dict(_exchanged(findings, limits, detective))
    divergences = faults or list(causes.values()) or list(exchanged.values())
    rows = [*_layers(findings, limits, causes, model)]
    rows += _outputs(measured, limits, exchanged, has_source=bool(causes))
    text, remedy = _sources(divergences) if divergences else _whole(measured, limits, rows)
    # With optimisations off no optimiser is at work, whatever the file does with them on.
    optimiser = limits.level != OFF and limits.is_optimiser(measured.whole)
    if divergences and optimiser:
        text, remedy = f"{text} With optimisations off the file agrees.", OPTIMISER
    if blame is not None:
        text, remedy = f"{text} {blame.text}.", blame.remedy or remedy
    if measured.noise_unmeasured is not None:
        text += f" Units are single float32 roundings, because {measured.noise_unmeasured}."
    return Localization(
        subject_sha256=subject.sha256,
        runtime=limits.runtime,
        samples=measured.samples,
        layers=tuple(rows),
        first_divergence=divergences[0].module if divergences else None,
        whole_ratio=worst(measured.whole[limits.level]),
        cause=text,
        fault=divergences[0].text if divergences else None,
        fault_code=divergences[0].code if divergences else None,
        faults=tuple(_independent(divergences)),
        optimiser=optimiser,
        blame=blame,
        remedy=remedy,
    )


def _causes(
    findings: LocalizationFindings, limits: DeviationLimits, detective: Diagnoser
) -> dict[int, Fault]:
    """Return the faults by the number of the value, most upstream first. Exchanged inputs are one
    fault, even if several values are computed from them, and so is another output of a faulty node.
    """
    numbers = [n for n, layer in findings.measured.layers.items() if limits.is_source(layer)]
    suspects: list[DivergentValue] = []
    for number in numbers:
        suspect = findings.source(number)
        if not detective.reads_other_output(suspect, suspects):
            suspects.append(suspect)
    exchanged = {name: by for suspect in suspects for name, by in suspect.exchanged.items()}
    causes: dict[int, Fault] = {}
    for suspect in suspects:
        if suspect.exchanged:
            if not any(cause.of_inputs for cause in causes.values()):
                causes[suspect.value.number] = detective.exchanged_inputs(exchanged)
        elif (missing := detective.missing_module(suspect)) is not None:
            causes.setdefault(missing.number, detective.nowhere(missing, suspect.tensor))
        else:
            causes.setdefault(suspect.value.number, detective.cause(suspect))
    return dict(sorted(causes.items()))


def _independent(faults: Sequence[Fault]) -> Iterator[LayerFault]:
    """The first faults, each once: a module that is called twice is wrong twice, and a file that
    is quantized is so everywhere."""
    kinds = {fault.text if not fault.quantized else "quantized": fault for fault in faults[::-1]}
    first = sorted(kinds.values(), key=faults.index)[:_FAULTS]
    return (LayerFault(module=one.module, text=one.text, remedy=one.remedy) for one in first)


def _layers(
    findings: LocalizationFindings,
    limits: DeviationLimits,
    causes: Mapping[int, Fault],
    model: nn.Module,
) -> Iterator[LayerRow]:
    """One row a value that a module computed, or that code between modules did."""
    before: float | None = None
    calls = {(v.path, v.call) for v in findings.survey.values if v.number in findings.layout.names}
    for value in findings.survey.values:
        layer, cause = findings.measured.layers.get(value.number), causes.get(value.number)
        if layer is None:
            # Where other outputs of the call have a tensor, nothing uses this one.
            used = (value.path, value.call) not in calls
            if cause is not None or (used and findings.is_comparable(value)):
                yield LayerRow(
                    module=value.path,
                    call=value.call,
                    kind=value.kind,
                    verdict="unmapped" if cause is None else "source",
                    detail=None if cause is None else cause.text,
                )
            continue
        suspect = findings.suspect(value.number)
        ratio = layer.through.ratio
        module = value.path if cause is None else cause.module
        yield LayerRow(
            module=module,
            call=value.call,
            kind=_kind(findings, suspect, model, module),
            tensor=suspect.tensor,
            max_abs_diff=_number(layer.through, layer.through.largest),
            mean_abs_diff=_number(layer.through, layer.through.mean),
            noise_ratio=ratio,
            local_ratio=layer.alone.ratio,
            amplification=ratio / before if before else None,
            verdict=_verdict(limits, layer, cause),
            detail=_detail(suspect, layer, cause),
        )
        before = ratio


def _kind(
    findings: LocalizationFindings, suspect: DivergentValue, model: nn.Module, module: str
) -> str:
    """The module's type; of functional values the operators of the file."""
    if not suspect.value.functional:
        return type(model.get_submodule(module)).__name__
    places, _ = findings.graph.segment(suspect.tensor, findings.layout.cuts)
    operators = dict.fromkeys(findings.graph.nodes[place].op_type for place in places)
    return "code: " + ", ".join(name for name in operators if name != "Constant")


def _verdict(limits: DeviationLimits, layer: LayerDeviations, cause: Fault | None) -> LayerVerdict:
    if cause is not None:
        return "source"
    return "propagated" if limits.is_off(layer) else "ok"


def _detail(suspect: DivergentValue, layer: LayerDeviations, cause: Fault | None) -> str | None:
    if cause is not None:
        return cause.text
    if layer.through.mismatch is not None:
        return layer.through.mismatch
    if layer.through.equal and not layer.through.finite:
        return "no finite number in the file, nor in PyTorch"
    return f"with {suspect.folded.path} folded in" if suspect.folded else None


def _outputs(
    measured: Measured, limits: DeviationLimits, exchanged: Container[str], *, has_source: bool
) -> Iterator[LayerRow]:
    """The outputs of the file as it is, which marking could have changed. `exchanged`: those that
    are other tensors than the right ones."""
    for level, outputs in measured.whole.items():
        for name, output in outputs.items():
            agrees = limits.agrees({name: output})
            inside_right = name in exchanged or limits.agrees({name: measured.marked[name]})
            alone = inside_right and not has_source
            yield LayerRow(
                module="",
                kind=f"output of the whole file, {_LEVELS[level]}",
                tensor=name,
                max_abs_diff=_number(output, output.largest),
                mean_abs_diff=_number(output, output.mean),
                noise_ratio=output.ratio,
                verdict="ok" if agrees else "source" if alone else "propagated",
                detail=output.mismatch,
            )


def _exchanged(
    findings: LocalizationFindings, limits: DeviationLimits, detective: Diagnoser
) -> Iterator[tuple[str, Fault]]:
    """Outputs that are other tensors than the right ones, where all layers are right."""
    names, outputs = findings.layout.names, findings.graph.outputs
    returned = returned_values(outputs, findings.survey, names)
    wanted = findings.survey.outputs
    if len(outputs) < len(wanted):
        left = [str(at) for at, n in enumerate(wanted, start=1) if n not in returned.values()]
        yield "", detective.left_out(left if len(returned) == len(outputs) else [])
        return
    for name, number in returned.items():
        right = findings.layout.names.get(number, name)
        if right != name and not limits.agrees({name: findings.measured.marked[name]}):
            yield name, detective.output(name, right)


def _sources(causes: list[Fault]) -> tuple[str, str]:
    first = causes[0]
    titles = dict.fromkeys(cause.module or "(model)" for cause in causes)
    others = [title for title in titles if title != (first.module or "(model)")]
    name = first.module or "The model itself"
    text = f"{name} is wrong although its inputs are right: {first.text}."
    if first.of_inputs:
        text = f"{capital(first.text)}."
    if len(others) > 2 and all(cause.remedy == WEIGHTS for cause in causes):
        text += f" So are {len(others)} more: the file is of another checkpoint."
    elif others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        text += (
            f" So are {', '.join(others[:5])}{more}." if len(others) > 1 else f" So is {others[0]}."
        )
    return text, first.remedy


def _whole(
    measured: Measured, limits: DeviationLimits, rows: list[LayerRow]
) -> tuple[str, str | None]:
    """Where no layer alone is wrong."""
    optimised, plain = measured.whole["ORT_ENABLE_ALL"], measured.whole["ORT_DISABLE_ALL"]
    if not limits.agrees(measured.marked):
        if not math.isfinite(worst(measured.marked)):
            names = [row.title for row in rows if row.verdict == "unmapped"]
            missing = f" No tensor was found for {listed(names, most=_NAMES)}." if names else ""
            return (
                "Cause not found: the outputs differ, and every layer that was compared is right "
                f"when its inputs are.{missing}",
                None,
            )
        grown = [row for row in rows if row.amplification is not None]
        most = max(grown, key=lambda row: row.amplification or 0.0, default=None)
        where = f", most at {most.title} (by {most.amplification:.3g})" if most else ""
        ratio = worst(measured.marked)
        return (
            f"No layer alone is off by more than rounding; errors grow on the way{where}, up to a "
            f"noise ratio of {ratio:.4g} in the outputs.",
            _GROWTH,
        )
    failure = next((output.failure for output in optimised.values() if output.failure), None)
    if failure is not None:
        also = "it agrees" if limits.agrees(plain) else "it does not agree either"
        text = (
            f"ONNX Runtime can't compute the file with optimisations on: {short(broken(failure))}"
        )
        return f"{text}. With optimisations off {also}.", OPTIMISER
    if not limits.agrees(optimised):
        also = "" if limits.agrees(plain) else ", and also with optimisations off"
        return (
            "Every layer agrees while its tensor is an output; the file as it is does not (noise "
            f"ratio {worst(optimised):.4g}){also}: the optimiser fuses nodes into something "
            "else.",
            OPTIMISER,
        )
    if not limits.agrees(plain):
        return (
            "Every layer agrees; the file as it is does not with optimisations off (noise ratio "
            f"{worst(plain):.4g}).",
            _PLAIN,
        )
    return f"No layer diverges on {measured.samples} samples.", None


def _number(deviation: Deviation, value: float) -> float | None:
    """None where the shapes differ: there is nothing to subtract."""
    return None if deviation.mismatch is not None else value
