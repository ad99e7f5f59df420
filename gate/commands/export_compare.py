"""`gate export compare`: compare exporters on one model."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.click_types import SAMPLES, SETTINGS_FILE
from gate.commands.options import FACTORY, STRATEGIES, WEIGHTS, report_option
from gate.commands.result import CommandResult, ExitCode, machine_options
from gate.errors import ExportError, GateError, first_line
from gate.storage import files
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from gate.decision.decide import Decision
    from gate.export.export import Exported
    from gate.measure.job import EvaluationData, Reference
    from gate.policy.policy import Policy
    from gate.records.evidence import RuntimeEvidence
    from gate.records.export import (
        ExportSettings,
        ExportTrialRecord,
        TrialParity,
        Trials,
        TrialVerdict,
    )

    Arrays = Mapping[str, NDArray[Any]]


_MAX_SAMPLES = 16
"""Largest number of samples: more show nothing new about an exporter."""


@click.command("compare", short_help="Compare exporters on one model.")
@FACTORY
@click.option(
    "--example-input", type=SAMPLES, required=True,
    help="Samples on axis 0: X.npy, or X.npz with one array per input, for export and comparison. "
    "Fewer than 8 are filled up with noise around them.",
)  # fmt: skip
@WEIGHTS
@click.option(
    "--strategy", type=click.Choice(STRATEGIES), multiple=True, default=STRATEGIES,
    help="Export strategy. Repeatable. Default: all four.",
)  # fmt: skip
@click.option(
    "--opset", type=int, multiple=True, default=(13, 18), show_default=True,
    help="Opset. Repeatable.",
)  # fmt: skip
@click.option(
    "--folding", type=click.Choice(["both", "on", "off"]), default="both", show_default=True,
    help="Constant folding of the exporter.",
)  # fmt: skip
@click.option(
    "--settings", type=SETTINGS_FILE,
    help="YAML with an export: section: names, axes, batch size.",
)  # fmt: skip
@report_option("Write trials.json and trials.md here.")
@machine_options
def command(
    factory: str,
    example_input: Path,
    checkpoint: Path | None,
    strategy: tuple[str, ...],
    opset: tuple[int, ...],
    folding: str,
    settings: Path | None,
    report: Path | None,
) -> CommandResult:
    """Export a model with every strategy and opset, and measure each file on every runtime.

    The table shows which files match the model. Exit code 0: all do; 1: at least one does not;
    2: not measured.

    \b
    Examples:
      gate export compare mypackage.models:build --example-input x.npy
      gate export compare mypackage.models:build --example-input x.npy --opset 13 --opset 17 \\
          --strategy traced --strategy dynamo --report report
      gate export compare mypackage.models:build --example-input x.npz --json
    """
    from gate.commands.progress import progress_bar
    from gate.data.samples import SampleSet
    from gate.measure.job import Reference
    from gate.records.export import ExportSettings
    from gate.report.comparisons import markdown, print_trials
    from gate.storage.yaml_section import load_section

    foldings = {"both": (True, False), "on": (True,), "off": (False,)}[folding]
    stated = load_section(ExportSettings, settings, "export") if settings else None
    reference = Reference.from_factory(factory, checkpoint=checkpoint, untrained=True)
    samples = SampleSet.open(example_input)
    example = next(samples.batches(min(len(samples), _MAX_SAMPLES)))
    exports = list(itertools.product(dict.fromkeys(strategy), dict.fromkeys(opset), foldings))
    with progress_bar("exporting") as progress:
        trials = compare_exports(
            reference, example, exports, settings=stated or ExportSettings(), progress=progress
        )
    if report is not None:
        trials.save(report / "trials.json")
        files.write_text(report / "trials.md", markdown(trials))

    def show(console: Console) -> None:
        print_trials(trials, console)
        if report is not None:
            console.print(f"report  {report / 'trials.md'}")

    bad = any(trial.verdict in ("FAIL", "ERROR") for trial in trials.trials)
    return CommandResult(ExitCode.REJECTED if bad else ExitCode.DONE, trials.to_plain(), show)


_MIN_SAMPLES = 8

_NOISE = 0.1
"""Standard deviation of the noise in generated samples, relative to that of the example."""

_BOUND = 1.5


def compare_exports(
    reference: Reference,
    example: Arrays,
    exports: Sequence[tuple[str, int, bool]],
    *,
    settings: ExportSettings,
    progress: Callable[[int, int], object] = lambda _completed, _total: None,
) -> Trials:
    """Export the model with each combination of settings, and measure each file on the example.

    `exports`: strategy, opset and constant folding of each trial; `settings` has the rest. An
    example with fewer than 8 samples is extended with noisy copies. `progress` gets the number of
    finished trials and the total. A failed export or measurement is recorded in its trial. Raises
    GateError if the model can't be run, ExportError if all trials fail.
    """
    from gate.data.samples import SampleSet
    from gate.measure.job import EvaluationData
    from gate.records.export import Trials

    samples = SampleSet.from_arrays(_extend_samples(example))
    workload = EvaluationData(samples, batch_size=min(_MIN_SAMPLES, len(samples)))
    comparison = _StrategyComparison(reference, example, workload, settings)
    trials: list[ExportTrialRecord] = []
    for number, (strategy, opset, folding) in enumerate(exports):
        progress(number, len(exports))
        trials.append(comparison.trial(strategy, opset, folding=folding))
    if all(trial.failure is not None for trial in trials):
        raise ExportError(
            f"all {len(trials)} exports of {reference.source.factory} failed. "
            f"{trials[0].title}: {trials[0].failure}. Try gate lint, and gate export for the log."
        )
    progress(len(exports), len(exports))
    return Trials(
        factory=reference.source.factory,
        samples=len(samples),
        batch_size=workload.batch_size,
        bound=_BOUND,
        trials=tuple(trials),
    )


@dataclass(frozen=True)
class _StrategyComparison:
    """Trials of one model on the same samples; caches the results by graph."""

    reference: Reference
    example: Arrays
    workload: EvaluationData
    settings: ExportSettings
    measured: dict[Digest, ExportTrialRecord] = field(default_factory=dict)

    def trial(self, strategy: str, opset: int, *, folding: bool) -> ExportTrialRecord:
        from gate.records.export import ExportTrialRecord

        trial = ExportTrialRecord(
            strategy=strategy, opset_asked=opset, constant_folding=folding, seconds=math.nan
        )
        with temporary_folder() as folder:
            begun, exported, failure = time.perf_counter(), None, None
            try:
                exported = self._export(trial, Path(folder, "model.onnx"))
            except (GateError, ValueError) as error:  # ValueError: invalid settings
                failure = _brief(error)
            seconds = time.perf_counter() - begun
            trial = trial.model_copy(update={"seconds": seconds, "failure": failure})
            return trial if exported is None else self._with_parities(trial, exported)

    def _export(self, trial: ExportTrialRecord, path: Path) -> Exported:
        from gate.export.export import export_model
        from gate.records.export import ExportSettings

        choice = {
            "strategy": trial.strategy,
            "opset": trial.opset_asked,
            "do_constant_folding": trial.constant_folding,
            "lint": "off",  # the trial shows what an export despite lint findings computes
        }
        settings = ExportSettings(**{**dict(self.settings), **choice})
        with warnings.catch_warnings():
            # Deprecated exporters are used on purpose.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            return export_model(self.reference.module, self.example, settings=settings, output=path)

    def _with_parities(self, trial: ExportTrialRecord, exported: Exported) -> ExportTrialRecord:
        import onnx

        from gate.records.export import TrialParity

        proto = onnx.load(str(exported.path), load_external_data=False)
        del proto.metadata_props[:]
        graph = Digest.from_bytes(proto.SerializeToString(deterministic=True))
        subject, record = exported.subject, exported.record
        trial = trial.model_copy(
            update={
                "sha256": subject.sha256,
                "opset": subject.opset,
                "nodes": len(proto.graph.node),
                "size_bytes": subject.size_bytes,
                "warnings": (*record.tracer_warnings, *record.hazards),
            }
        )
        before = self.measured.get(graph)
        if before is not None:
            return trial.model_copy(update={"same_as": before.title, "parities": before.parities})
        try:
            parities = self._parities(exported)
        except GateError as error:
            parities = tuple(
                TrialParity(runtime=name, verdict="ERROR", failure=str(error))
                for name in ("ort-cpu", "ort-cpu-optimized")
            )
        trial = trial.model_copy(update={"parities": parities})
        self.measured[graph] = trial
        return trial

    def _parities(self, exported: Exported) -> tuple[TrialParity, ...]:
        from gate.api import measure_job
        from gate.decision.decide import decide
        from gate.measure.job import MeasurementJob
        from gate.onnx_file.tested_file import TestedFile

        policy = _policy(samples=len(self.workload.samples))
        evidence = measure_job(
            MeasurementJob(
                self.reference.model,
                TestedFile(exported.path, exported.subject),
                self.workload.samples,
                policy=policy,
                batch_size=self.workload.batch_size,
                source=self.reference.source,
            )
        )
        decision = decide(policy, evidence, decided_at=evidence.measured_at)
        return tuple(
            _parity(runtime, decision)
            for runtime in evidence.runtimes
            if runtime.absent_reason is None
        )


def _extend_samples(example: Arrays) -> dict[str, NDArray[Any]]:
    """Return the example, extended with noisy copies to the minimum number of samples."""
    import numpy as np

    count = min(len(array) for array in example.values())
    if count >= _MIN_SAMPLES:
        return dict(example)
    generator = np.random.default_rng(0)
    chosen = np.arange(_MIN_SAMPLES) % count
    filled = {}
    for name, array in example.items():
        more = np.array(array[chosen])
        if array.dtype.kind == "f":
            size = _NOISE * float(array.std() or 1.0)
            more[count:] += generator.normal(0, size, more[count:].shape).astype(array.dtype)
        filled[name] = more
    return filled


def _policy(*, samples: int) -> Policy:
    """Return a policy with numeric bounds and without the instruments that need many passes.

    There is no bound on top-1 agreement: noisy copies of one example may all have near ties.
    """
    from gate.policy.policy import Policy
    from gate.policy.sections import Bounds, Instruments, RuntimePolicy
    from gate.records.runtime import RUNTIMES

    bounds = Bounds(scaled_diff=2e-2, noise_ratio=_BOUND)
    instruments = Instruments(
        noise_samples=min(samples, _MIN_SAMPLES), stability_samples=0, probes=False,
        search_inputs=0, graph=False,
    )  # fmt: skip
    runtimes = {
        name: RuntimePolicy(required="when_present" if traits.cuda else "always", bounds=bounds)
        for name, traits in RUNTIMES.items()
        if traits.engine == "onnxruntime"
    }
    return Policy(task="tensors", instruments=instruments, runtimes=runtimes)


def _parity(runtime: RuntimeEvidence, decision: Decision) -> TrialParity:
    from gate.decision.check_result import Verdict
    from gate.records.export import TrialParity
    from gate.records.outputs import largest

    checks = [c for c in decision.checks if c.runtime in (runtime.runtime, None)]
    verdicts = {check.verdict for check in checks}
    verdict: TrialVerdict = "ERROR" if Verdict.ERROR in verdicts else "PASS"
    verdict = "FAIL" if Verdict.FAIL in verdicts else verdict
    outputs = runtime.outputs
    logits = [o.classification for o in outputs if o.classification is not None]
    return TrialParity(
        runtime=runtime.runtime,
        verdict=verdict,
        max_abs_diff=largest(output.max_abs_diff for output in outputs),
        l2_logits=largest(output.l2_max for output in outputs),
        l2_probabilities=largest(c.l2_probabilities_max for c in logits),
        noise_ratio=largest(o.noise.ratio for o in outputs if o.noise is not None),
        top1_agreement=min((c.top1_agreement for c in logits), default=None),
        latency_ms=runtime.latency.median_ms if runtime.latency else None,
        failure=runtime.failure,
    )


def _brief(error: Exception) -> str:
    """Return the first nonempty line of the message."""
    from pydantic import ValidationError

    from gate.storage.yaml_section import first_problem

    if isinstance(error, ValidationError):
        return first_problem(error)
    return first_line(error, empty=type(error).__name__)
