"""The ordered candidates of a search, from exports to int8 files."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import onnx
from pydantic import ValidationError

from gate.api import EvaluationResult
from gate.errors import GateError, describe_failure, first_line
from gate.export.quantize import QuantizeSettings
from gate.measure.job import EvaluationData
from gate.mend.mixed_precision import is_float32, round_as_device, save_model
from gate.mend.recipe import MODEL, Builder, Float16Settings, Stage, Steps
from gate.mend.rewrites import REWRITES, Graph, GraphEdit, find_functions, forms
from gate.mend.search import BudgetSpent, Candidate, Search, Trial, with_disabled
from gate.mend.sensitivity import Smallest, evaluator, smallest_float16, smallest_int8
from gate.onnx_file.reading import read_subject
from gate.policy.policy import Precision
from gate.records.export import ExportSettings
from gate.storage.files import temporary_folder

# The plan is independent of time and machine, so that a second search tries the same candidates in
# the same order.


_OPSETS = (13, 17, 20)
"""Opsets in which operators of exporters changed: 13 (axes as inputs), 17 (LayerNormalization), 20
(Resize and ReduceMax of 18, Gelu, GridSample)."""

_DYNAMO_FROM = 18

_BASES = 2
"""Number of failing files, closest first, that are rewritten in each round."""

_CONVERTED = 2
"""Largest number of converted float32 files; the second one if the verifying half refuses the first
result."""

_ATTEMPTS = 2
"""Largest number of conversions of a float32 file; the second one with a margin."""

_MIN_TARGET, _MAX_TARGET = 0.1, 0.8
"""Limits of the target of the second search, as a share of the bound."""

Conversion = tuple[Stage, str, Float16Settings | QuantizeSettings, Smallest]

_CONVERSIONS: Mapping[Precision, Conversion] = {
    "reduced": ("mixed_precision", "float16", Float16Settings(), smallest_float16),
    "quantized": ("quantization", "quantize", QuantizeSettings(), smallest_int8),
}
"""The conversion for each precision of a policy: its stage, the field of `Steps`, the value without
float32 layers, and the search."""

_NO_SET = "no set of layers in float32 passes"

_ROUNDED = "the copy that rounds each float16 value, as a device does, differs too much"

_DIFFERS = "repeating the steps gave another file, so a recipe can't reproduce it"

_OPTIMIZED = "ort-cpu-optimized"

_CRASHING = ("MatmulTransposeFusion",)
"""Optimizers in which ONNX Runtime 1.31.1 crashes when it opens a float16 ViT."""

_ROUNDS = 3
"""Largest number of combined rewrites; a file may have several faults."""


@dataclass(frozen=True)
class Winner:
    """The candidate that passed on both halves, and its file."""

    candidate: Candidate
    path: Path
    steps: Steps
    """The steps with the digests of their edits."""
    result: EvaluationResult
    """The result on the half that verified it."""
    rounded_ratio: float | None = None
    """For a float16 file: the worst ratio of a copy that rounds each float16 value (docs/mend.md),
    on the same half."""


@dataclass(frozen=True)
class Outcome:
    """The result of a search."""

    winner: Winner | None
    ended_by: Literal["passed", "budget", "time", "interrupt", "candidates"]


@dataclass(frozen=True)
class MendPlan:
    """The candidates of the stages export, optimizers and rewrite, in order.

    If the policy's precision is not exact, each float32 file that passes is converted.
    """

    search: Search
    builder: Builder
    settings: ExportSettings
    """Settings of every export except strategy, opset and constant folding."""
    named: ExportSettings | None = None
    """The same with the names and axes of the file passed to `--file`."""

    def run(self, samples: tuple[EvaluationData, EvaluationData], folder: Path) -> Outcome:
        """Search on the first samples, verify on the second. `folder`: an empty folder for the
        file.

        Stops at the first candidate that passes on both, which is the cheapest one. Ctrl-C ends the
        search.
        """
        conversion = _CONVERSIONS.get(self.search.policy.precision)
        converted: set[str] = set()  # digests of graphs
        try:
            for candidate, trial in self._try_candidates(samples[0]):
                if not trial.passed:
                    continue
                if conversion is None or not self._is_float32(candidate):
                    winner = self._verify(candidate, samples[1], folder)
                elif len(converted) == _CONVERTED and self._starts_in_float32:
                    break  # all others are float32 files too
                elif str(trial.graph) in converted or len(converted) == _CONVERTED:
                    continue
                else:
                    converted.add(str(trial.graph))
                    winner = self._convert_and_verify(candidate, samples, folder, conversion)
                if winner is not None:
                    return Outcome(winner, self.search.cut_short or "passed")
        except BudgetSpent as spent:
            return Outcome(None, spent.by)
        except KeyboardInterrupt:
            return Outcome(None, "interrupt")
        return Outcome(None, "candidates")

    def _convert_and_verify(
        self,
        candidate: Candidate,
        samples: tuple[EvaluationData, EvaluationData],
        folder: Path,
        conversion: Conversion,
    ) -> Winner | None:
        """Convert a float32 file.

        If the verifying half refuses the result, search once more with a margin, because the first
        one passed by chance. The margin is the share of the bound that would have passed on both
        halves if their ratios are proportional.
        """
        target, previous = 1.0, None
        for _ in range(_ATTEMPTS):
            converted = self._convert(candidate, samples, conversion, target=target)
            if converted is None or converted.steps == previous:
                return None
            previous, passed = converted.steps, self.search.trials[-1].worst_ratio
            if (winner := self._verify(converted, samples[1], folder)) is not None:
                return winner
            refused = self.search.trials[-1].worst_ratio
            share = passed / refused if passed and refused and refused > 1.0 else _MAX_TARGET
            target = min(max(share, _MIN_TARGET), _MAX_TARGET)
            self.search.is_late, self.search.cut_short = False, None
        return None

    def _verify(self, candidate: Candidate, samples: EvaluationData, folder: Path) -> Winner | None:
        subfolder = folder / f"verified-{len(self.search.trials)}"
        subfolder.mkdir()
        trial = self.search.judge(candidate, samples, into=subfolder)
        result = self.search.result
        if not trial.passed or result is None:
            return None
        path, ratio = result.job.candidate.path, None
        if candidate.steps.float16 is not None:
            policy = with_disabled(self.search.policy, candidate.disabled_optimizers)
            with temporary_folder() as rounded_folder:
                rounded = round_as_device(onnx.load(str(path)))
                file = save_model(rounded, Path(rounded_folder, MODEL))
                ratio = evaluator(self.search, policy, samples)(file)
            if ratio > 1.0:
                update = {"verdict": "FAIL", "worst_ratio": ratio, "failure": _ROUNDED}
                self.search.trials[-1] = trial.model_copy(update=update)
                return None
        with temporary_folder() as rebuilt:
            steps = self.builder.steps_with_digests(candidate.steps, Path(rebuilt))
            sha256 = read_subject(Path(rebuilt, MODEL)).sha256
        if sha256 != result.evidence.subject.sha256:
            update = {"verdict": "FAIL", "failure": _DIFFERS}
            self.search.trials[-1] = trial.model_copy(update=update)
            return None
        return Winner(candidate, path, steps, result, ratio)

    @property
    def _starts_in_float32(self) -> bool:
        return self.builder.file is None or is_float32(self.builder.file)

    def _is_float32(self, candidate: Candidate) -> bool:
        with temporary_folder() as folder:
            return is_float32(self.builder.build(candidate.steps, Path(folder)))

    def _convert(
        self,
        candidate: Candidate,
        samples: tuple[EvaluationData, EvaluationData],
        conversion: Conversion,
        *,
        target: float,
    ) -> Candidate | None:
        """Return the file with the fewest layers in float32 that passes on the first samples."""
        stage, name, plain, smallest = conversion
        search, disabled = self.search, candidate.disabled_optimizers
        policy = with_disabled(search.policy, disabled)
        result, failure = None, _NO_SET
        search.reserved = len(samples[0].samples) + 2 * len(samples[1].samples)
        try:
            with temporary_folder() as folder:
                exact = self.builder.build(candidate.steps, Path(folder))
                result = smallest(exact, search, policy, samples[0], target)
        except BudgetSpent:
            raise
        except GateError as error:
            failure = first_line(error)
        except Exception as error:  # ONNX Runtime's errors have no common base
            failure = describe_failure(error)
        finally:
            search.reserved = 0
        settings, layers = result or (plain, None)
        steps = candidate.steps.model_copy(update={name: settings})
        converted = replace(self.candidate(stage, steps, disabled), float32=layers)
        if result is None:
            search.refuse(converted, samples[0], failure)
            return None
        search.is_late = True
        trial = search.judge(converted, samples[0])
        if trial.verdict == "not built" and _OPTIMIZED in policy.runtimes:
            names = tuple(dict.fromkeys((*disabled.get(_OPTIMIZED, ()), *_CRASHING)))
            without = {**disabled, _OPTIMIZED: names}
            if without != disabled:
                converted = replace(converted, disabled_optimizers=without)
                trial = search.judge(converted, samples[0])
        return converted if trial.passed else None

    def _try_candidates(self, samples: EvaluationData) -> Iterator[tuple[Candidate, Trial]]:
        failed: list[tuple[Candidate, Trial]] = []
        for candidate in self._exports():
            trial = self.search.judge(candidate, samples)
            yield candidate, trial
            failed.append((candidate, trial))
        for pair in tuple(failed):
            failed += yield from self._without_optimizers(*pair, samples)
        tried = {candidate.key() for candidate, _ in failed}
        for _ in range(_ROUNDS):
            failed.sort(key=lambda pair: pair[1].distance)
            bases, failed = failed[:_BASES], failed[_BASES:]
            for candidate in self._rewritten(bases):
                if candidate.key() in tried:
                    continue
                tried.add(candidate.key())
                trial = self.search.judge(candidate, samples)
                yield candidate, trial
                failed.append((candidate, trial))
                failed += yield from self._without_optimizers(candidate, trial, samples)

    def candidate(
        self, stage: Stage, steps: Steps, disabled: Mapping[str, tuple[str, ...]] | None = None
    ) -> Candidate:
        """Return the candidate that is built by these steps."""
        return Candidate(stage, steps, partial(self.builder.build, steps), disabled or {})

    def _exports(self) -> Iterator[Candidate]:
        if self.builder.file is not None:
            yield self.candidate("export", Steps())
        if self.search.reference.source.is_onnx:
            return  # its modules are an ONNX file's nodes, not a model to export
        planned = list(plan_exports(self.named or self.settings))
        if self.named is not None:  # the file's names may belong to other outputs
            planned += list(plan_exports(self.settings))[: len(self.settings.strategies)]
        for settings in planned:
            yield self.candidate("export", Steps(export=settings))

    def _without_optimizers(
        self, candidate: Candidate, trial: Trial, samples: EvaluationData
    ) -> Generator[tuple[Candidate, Trial], None, list[tuple[Candidate, Trial]]]:
        """Disable the optimizers that a localization blames, until it blames none. Also return the
        yielded candidates."""
        tried: list[tuple[Candidate, Trial]] = []
        while trial.optimizers and trial.runtime in self.search.policy.runtimes:
            before = candidate.disabled_optimizers
            names = before.get(trial.runtime, ())
            added = tuple(name for name in trial.optimizers if name not in names)
            if not added:
                break
            disabled = {**before, trial.runtime: (*names, *added)}
            stage: Stage = "optimizers" if candidate.stage == "export" else candidate.stage
            candidate = self.candidate(stage, candidate.steps, disabled)
            trial = self.search.judge(candidate, samples)
            yield candidate, trial
            tried.append((candidate, trial))
        return tried

    def _rewritten(self, bases: Sequence[tuple[Candidate, Trial]]) -> Iterator[Candidate]:
        for candidate, trial in bases:
            steps, disabled = candidate.steps, candidate.disabled_optimizers
            for changed in [*self._with_functions(steps, trial), *self._with_edits(steps, trial)]:
                yield self.candidate("rewrite", changed, disabled)

    def _with_functions(self, steps: Steps, trial: Trial) -> Iterator[Steps]:
        """Yield the steps with torch functions replaced, those of the layer at fault first.

        Steps that already replace functions are first tried with the dynamo exporter.
        """
        if steps.export is None or steps.edits:
            return
        try:
            functions = find_functions(self.builder.reference.module, self.builder.example)
        except Exception:  # errors of the user's code: no function is replaced
            functions = {}
        called = {name: paths for name, paths in functions.items() if name not in steps.functions}
        if steps.functions and "dynamo" in self.settings.strategies:
            lowest = _DYNAMO_FROM if self.settings.opset == "auto" else steps.export.opset
            changed = _with(steps.export, strategy="dynamo", opset=lowest, do_constant_folding=True)
            if changed is not None and changed != steps.export:
                yield steps.model_copy(update={"export": changed})
        touching = [name for name, paths in called.items() if _touches(paths, trial.layer)]
        for name in touching or called:
            yield steps.model_copy(update={"functions": (*steps.functions, name)})
        if len(called) > 1:
            yield steps.model_copy(update={"functions": (*steps.functions, *called)})

    def _with_edits(self, steps: Steps, trial: Trial) -> Iterator[Steps]:
        """Yield the steps with one more graph edit: in the layer at fault, or anywhere if
        unknown."""
        if trial.verdict == "not built":
            return
        with temporary_folder() as folder:
            try:
                graph = Graph.load(self.builder.build(steps, Path(folder)))
            except GateError:
                return
        tensors_by_rewrite = {name: [form.at for form in forms(graph, name)] for name in REWRITES}
        within = {
            name: [at for at in tensors if at in trial.region]
            for name, tensors in tensors_by_rewrite.items()
        }
        for candidates in (within, tensors_by_rewrite):
            for name, tensors in candidates.items():
                if tensors and (name != "float64" or candidates is within):
                    added = GraphEdit(rewrite=name, at=tuple(tensors))
                    kept = tuple(earlier.model_copy(update={"before": None, "after": None})
                                 for earlier in steps.edits)  # fmt: skip
                    yield steps.model_copy(update={"edits": (*kept, added)})


def _touches(paths: Sequence[str], layer: str | None) -> bool:
    """Return True if one of these modules is the layer, contains it, or is part of it."""
    if layer is None:
        return False
    return any(
        path == layer or path.startswith(f"{layer}.") or layer.startswith(f"{path}.")
        for path in paths
        if path
    )


def plan_exports(base: ExportSettings) -> Iterator[ExportSettings]:
    """Yield the exports to try, cheapest first.

    Each strategy at the lowest opset, then the first one and dynamo at higher opsets, then these
    without constant folding. Settings that `base` fixes are kept: a single strategy, an opset
    number.
    """
    opsets = _OPSETS if base.opset == "auto" else (base.opset,)
    lowest = dict.fromkeys(base.strategies, opsets[0])
    if base.opset == "auto" and "dynamo" in lowest:
        lowest["dynamo"] = _DYNAMO_FROM
    dynamo_and_first = [
        strategy for strategy in base.strategies if strategy in (base.strategies[0], "dynamo")
    ]
    choices = [(strategy, lowest[strategy], True) for strategy in base.strategies]
    choices += [
        (strategy, opset, True)
        for opset in opsets
        for strategy in dynamo_and_first
        if opset > lowest[strategy]
    ]
    choices += [(strategy, lowest[strategy], False) for strategy in dynamo_and_first]
    for strategy, opset, folding in choices:
        if base.do_constant_folding or folding:
            folds = folding and base.do_constant_folding
            settings = _with(base, strategy=strategy, opset=opset, do_constant_folding=folds)
            if settings is not None:
                yield settings


def _with(base: ExportSettings, **choice: Any) -> ExportSettings | None:
    """Return the settings with these choices; None if they contradict others."""
    try:
        return ExportSettings(**{**dict(base), **choice})
    except ValidationError:
        return None


def names_of(file: Path, base: ExportSettings) -> ExportSettings | None:
    """Return the settings with names and dynamic axes of a file; None if they do not fit."""
    subject = read_subject(file)
    axes = {
        spec.name: {
            axis: size for axis, size in enumerate(spec.shape) if axis > 0 and isinstance(size, str)
        }
        for spec in subject.inputs
    }
    return _with(
        base,
        input_names=tuple(spec.name for spec in subject.inputs),
        output_names=tuple(spec.name for spec in subject.outputs),
        dynamic_axes={name: labels for name, labels in axes.items() if labels},
    )
