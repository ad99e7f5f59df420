"""Try strategies in order; record every setting."""

from __future__ import annotations

import ast
import contextlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from torch import nn

from gate.errors import ExportError, ExportRefused, OnnxFileError, StorageError
from gate.export import strategies
from gate.export.export_warnings import Capture, captured, hazards, tracer_warnings
from gate.export.failures import ExportFailure, export_error, failure_texts
from gate.export.request import Example, ExportRequest, notices
from gate.export.strategies import ExporterOptions, StrategyFailed, Writer, export_copy, neutral
from gate.export.torchscript_settings import check_exporter_settings, registered
from gate.export.verify_export import (
    File,
    NumericalCheck,
    difference,
    foreign_in,
    operator_type_hazards,
    verify_export,
)
from gate.lint.lint import LintReport, lint_model
from gate.onnx_file.reading import data_files, externalize_weights, is_large, read_subject
from gate.onnx_file.tested_file import describe_export, stamp_file, without_paths
from gate.records import export
from gate.records.evidence import ExportRecord, ModelCode, Source, Subject
from gate.records.export import ExportSettings, LintFinding, Strategy
from gate.storage import files

_MAX_LISTED = 5


class LintGuard:
    """Reads the source of a model once for each strategy, on demand."""

    def __init__(
        self, model: nn.Module, settings: ExportSettings, replaced: Collection[str] = ()
    ) -> None:
        self._model = model
        self._settings = settings
        self._replaced = replaced
        self._reports: dict[Strategy, LintReport] = {}

    def report(self, strategy: Strategy) -> LintReport:
        """Return the findings, without those on calls of replaced functions."""
        if strategy not in self._reports:
            report = lint_model(self._model, strategy=strategy)
            findings = tuple(
                finding.model_copy(update={"suppressed": True})
                if _called_name(finding.expression) in self._replaced
                else finding
                for finding in report.findings
            )
            self._reports[strategy] = report.model_copy(update={"findings": findings})
        return self._reports[strategy]

    def objection(self, strategy: Strategy) -> str | None:
        """Return why the settings forbid this strategy, in one line, or None if they allow it."""
        bad = self._forbidden_findings(strategy)
        if not bad:
            return None
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"refused by {_format(bad[0])}{more}"

    def refusal(self) -> ExportRefused:
        """Return the error for a model that no strategy may export, in at most ten lines."""
        bad = self._forbidden_findings(self._settings.strategies[0])
        tried = ", ".join(self._settings.strategies)
        first = f"{bad[0].code} at {bad[0].location}"
        lines = [f"the model's source can't be exported faithfully ({tried}): {first}"]
        lines += [f"  {_format(finding)}: {finding.message}" for finding in bad[:_MAX_LISTED]]
        if len(bad) > _MAX_LISTED:
            lines.append(f"  and {len(bad) - _MAX_LISTED} more; gate lint lists them all.")
        lines.append(
            f"Rewrite it ({bad[0].rewrite}), silence a finding by '# noqa: {bad[0].code}' on its "
            "line, or say lint: off."
        )
        return ExportRefused("\n".join(lines))

    def _forbidden_findings(self, strategy: Strategy) -> tuple[LintFinding, ...]:
        level = self._settings.lint
        return () if level == "off" else self.report(strategy).refused(level)


def _format(finding: LintFinding) -> str:
    return f"{finding.code} at {finding.location} ({finding.expression})"


def _called_name(expression: str) -> str | None:
    """Return the name of the function or method that an expression calls, or None."""
    try:
        body = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(body, ast.Call):
        return None
    return getattr(body.func, "attr", getattr(body.func, "id", None))


STRATEGIES: dict[Strategy, Writer] = {
    "traced": strategies.write_traced,
    "direct": strategies.write_direct,
    "scripted": strategies.write_scripted,
    "dynamo": strategies.write_dynamo,
}

_steps = logging.getLogger("gate.steps")

_LOWEST = {"dynamo": 18}
"""The lowest opset that a strategy writes without a conversion."""


@dataclass(frozen=True)
class ExportedFile:
    """A file that a strategy wrote, with its settings and the doubt about it."""

    path: Path
    strategy: Strategy
    opset: int
    options: ExporterOptions
    output: Capture
    """Printed output and warnings of the exporter."""
    doubt: str | None = None


class AllStrategiesFailed(Exception):
    """Raised where no strategy wrote a usable file."""

    def __init__(self, failure: ExportFailure, attempts: tuple[str, ...]) -> None:
        super().__init__(failure.cause)
        self.failure = failure
        self.attempts = attempts
        """One line per strategy if several were tried."""


class StrategyRunner:
    """Tries the strategies of the settings in order, below a folder.

    A single strategy succeeds if its file is valid and matches the request. In a ladder the file
    must also compute what the model computes (`gate.export.verify_export`). A file that differs on
    generated data only is kept, and used if no later strategy does better.
    """

    def __init__(
        self, request: ExportRequest, folder: Path, *, name: str, lint_guard: LintGuard
    ) -> None:
        """`name`: the name of the file."""
        self._request = request
        self._folder = folder
        self._name = name
        self._lint = lint_guard
        self._check = NumericalCheck(request)
        self._failures: list[StrategyFailed] = []
        self._notes: dict[str, str] = {}
        self.log = ""
        """The output of all exporters."""

    @property
    def attempts(self) -> tuple[str, ...]:
        """Return one line per strategy that was tried and failed."""
        return tuple(f"{strategy}: {without_paths(why)}" for strategy, why in self._notes.items())

    def run(self) -> ExportedFile:
        """Return the first export that works, else the first with nothing but a doubt.

        Raises ExportRefused if the model's source forbids all strategies, ExportError if none
        works or the custom symbolic functions can't be registered, and OSError if a file can't be
        written.
        """
        doubtful: ExportedFile | None = None
        for strategy in self._request.settings.strategies:
            unsafe = self._lint.objection(strategy)
            if unsafe is not None:
                self._notes[strategy] = unsafe
                continue
            _steps.debug("by strategy %s", strategy)
            try:
                written = self._export_lowest(strategy)
            except StrategyFailed as failed:
                self._failures.append(failed)
                self._notes[strategy] = failed.failure.cause
                continue
            if written.doubt is None:
                return written
            self._notes[strategy] = failure_texts("wrong_file", reason=written.doubt)[0]
            doubtful = doubtful or written
        if doubtful is None:
            raise self._all_failed() if self._failures else self._lint.refusal()
        del self._notes[doubtful.strategy]
        return doubtful

    def _all_failed(self) -> AllStrategiesFailed:
        """Return the error for the failure that a higher opset fixes, else for the first one whose
        cause is known."""
        failed = min(self._failures, key=lambda f: (f.since is None, f.failure.code == "unread"))
        failure = failed.failure
        if failed.explain is not None:
            with self._capture_log():
                failure = failed.explain()
        if len(self._notes) == 1:
            return AllStrategiesFailed(failure, ())
        cause, _ = failure_texts("no_strategy")
        tried = self._request.settings.strategies
        return AllStrategiesFailed(failure.for_all(tried, cause=cause), self.attempts)

    def _export_lowest(self, strategy: Strategy) -> ExportedFile:
        """Export with the requested opset, or with the lowest one that works."""
        opsets = self._opsets(strategy)
        while True:
            opset = opsets.pop(0)
            try:
                return self._attempt(strategy, opset)
            except StrategyFailed as failed:
                # If the failure does not name an opset that works, a higher one rarely does.
                opsets = [o for o in opsets if failed.since and o >= failed.since]
                if not opsets:
                    raise

    def _opsets(self, strategy: Strategy) -> list[int]:
        requested = self._request.settings.opset
        if requested != "auto":
            return [requested]
        lowest = _LOWEST.get(strategy, export.LOWEST_AUTO)
        if self._request.settings.export_modules_as_functions:
            lowest = max(lowest, export.LOWEST_WITH_FUNCTIONS)
        return list(range(lowest, export.HIGHEST_OPSET[strategy] + 1))

    def _attempt(self, strategy: Strategy, opset: int) -> ExportedFile:
        folder = self._folder / f"{strategy}-{opset}"
        folder.mkdir()
        try:
            written = self._write_and_verify(strategy, opset, folder / self._name)
            settings = self._request.settings
            if settings.strategy != "ladder" or not settings.export_params:
                return written
            return self._compare(written)
        except StrategyFailed as failed:
            shutil.rmtree(folder, ignore_errors=True)  # it may have several gigabytes
            if failed.explain is not None:
                symbolics_spec = self._request.settings.custom_symbolics
                failed.explain = partial(_explain, failed.explain, symbolics_spec, opset)
            raise

    def _write_and_verify(self, strategy: Strategy, opset: int, path: Path) -> ExportedFile:
        """Return the file if it is valid and matches the request."""
        symbolics_spec = self._request.settings.custom_symbolics
        with (
            self._request.state.restored(),
            self._capture_log() as output,
            registered(symbolics_spec, opset=opset) as symbolics,
        ):
            options = STRATEGIES[strategy](self._request, path, symbolics=symbolics)
        if path.is_file() and is_large(path):
            externalize_weights(path, name=self._name)
        verify_export(path, self._request, opset=opset)
        return ExportedFile(
            path, strategy, opset, options, output, self._changed_parameters_text(strategy)
        )

    def _changed_parameters_text(self, strategy: Strategy) -> str | None:
        """Return the parameters that forward changes: TorchScript exports them changed."""
        parameters = dict(self._request.model.named_parameters())
        changed = [name for name in self._request.state.changed if name in parameters]
        if strategy == "dynamo" or not changed:
            return None
        return failure_texts("changed_parameters", names=", ".join(changed[:_MAX_LISTED]))[0]

    def _compare(self, written: ExportedFile) -> ExportedFile:
        """Return the export, with its doubt if there is one.

        Raises StrategyFailed if the file is wrong.
        """
        with self._capture_log():
            objection = self._check.objection(written.path)
        if objection is None:
            return written
        if objection.kind != "doubt":
            # In lower opsets some operators are exported wrongly: repeated indices at 13.
            since = written.opset + 1 if objection.kind == "differs" else None
            raise StrategyFailed.because("wrong_file", reason=objection.cause, since=since)
        return replace(written, doubt=objection.cause)

    @contextlib.contextmanager
    def _capture_log(self) -> Iterator[Capture]:
        output = Capture()
        try:
            with captured() as output:
                yield output
        finally:
            self.log += output.text


def _explain(
    explain: Callable[[], ExportFailure], symbolics_spec: str | None, opset: int
) -> ExportFailure:
    """Explain a failure. Operators with a custom symbolic function do not count as missing."""
    with registered(symbolics_spec, opset=opset):
        return explain()


@dataclass(frozen=True)
class Exported:
    """A file that was exported and verified. `log`: the output of the exporters."""

    path: Path
    subject: Subject
    record: ExportRecord
    log: str
    settings: ExportSettings


def export_model(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    *,
    settings: ExportSettings,
    output: Path,
    source: Source | None = None,
    replaced: Collection[str] = (),
) -> Exported:
    """Export `model` to `output`, atomically; the model itself is not touched.

    `example` maps names to arrays of shape (samples, ...). Names other than those of the inputs are
    ignored, and the arrays are taken by position. Exports a deep copy on the CPU in eval mode. The
    same model, settings and `source` give the same bytes. The file's metadata holds the strategy,
    the requested opset, why earlier strategies failed, and from `source` the factory and the
    digests of the checkpoint and the preprocessing. Weights of more than 2 GB go into one external
    data file in the same folder, whose name holds its digest.

    `replaced`: names of torch functions that the caller currently computes in another form. Lint
    findings on calls of these are ignored.

    Raises ExportRefused if the model's source forbids every strategy (`settings.lint`), ExportError
    if the model can't be copied or run, or if no strategy writes the requested file (names, opset,
    dynamic axes), and StorageError if the file can't be written. An existing `output` then stays
    unchanged. The output of the exporters is kept in `<output>.export.log` after an ExportError,
    and with `settings.verbose` after a success.
    """
    with staged(
        model, example, settings=settings, output=output, source=source, replaced=replaced
    ) as exported:
        pass
    return replace(exported, path=output)


@contextlib.contextmanager
def staged(
    model: nn.Module,
    example: Mapping[str, NDArray[Any]],
    *,
    settings: ExportSettings,
    output: Path,
    source: Source | None = None,
    replaced: Collection[str] = (),
) -> Iterator[Exported]:
    """Export like `export_model`, but let the caller inspect the file before it becomes `output`.

    Yields the export with the path of the finished file in a temporary folder. The file moves to
    `output` when the `with` block ends without an exception; else an existing `output` stays.
    """
    bound = Example.bind(example, settings.input_names, settings)
    copied = export_copy(model)
    check_exporter_settings(settings, copied)
    with files.replacing(output) as temporary, files.scratch(output) as folder:
        log_path = log_of(output)
        with neutral(copied):
            with captured():  # output of the model itself does not belong to the export
                request = ExportRequest.from_example(copied, bound, settings, original=model)
            lint_guard = LintGuard(model, settings, replaced)
            runner = StrategyRunner(request, folder, name=output.name, lint_guard=lint_guard)
            try:
                written = runner.run()
            except AllStrategiesFailed as failed:
                raise _with_log(failed, log_path, runner.log) from failed.__cause__
        metadata = describe_export(
            strategy=written.strategy, opset=settings.opset, attempts=runner.attempts, source=source
        )
        stamp_file(written.path, metadata)
        try:
            subject = read_subject(written.path)
        except OnnxFileError as error:
            raise ExportError(f"the exporter wrote a file that is not valid: {error}") from error
        record = _record(
            request,
            written,
            runner.attempts,
            lint=lint_guard.report(written.strategy),
            subject=subject,
            code=source.code if source else None,
        )
        yield Exported(written.path, subject, record, runner.log, settings)
        # The weights come first, so that a model never exists without them.
        for name in subject.external_data:
            files.sync(written.path.with_name(name))
            written.path.with_name(name).replace(output.with_name(name))
        written.path.replace(temporary)
    if settings.verbose:
        files.write_text(log_path, runner.log)
    else:
        log_path.unlink(missing_ok=True)
    for old_file in data_files(output):
        if old_file.name not in subject.external_data:
            old_file.unlink(missing_ok=True)


def log_of(output: Path) -> Path:
    """Return the path of the exporters' output, which is kept after a failure or with `verbose`."""
    return output.with_name(f"{output.name}.export.log")


def _record(
    request: ExportRequest,
    written: ExportedFile,
    attempts: tuple[str, ...],
    *,
    lint: LintReport,
    subject: Subject,
    code: ModelCode | None,
) -> ExportRecord:
    settings = request.settings
    doubts = () if written.doubt is None else (f"the file {written.doubt}",)
    batch_axes = [
        f"{name}={'none' if axis is None else axis}" for name, axis in settings.batch_axes.items()
    ]
    return ExportRecord(
        strategy=written.strategy,
        settings={
            "strategy_asked": settings.strategy,
            "ladder": ",".join(settings.strategies),
            "opset_asked": settings.opset,
            "dynamic_batch": settings.dynamic_batch,
            "batch_size": settings.batch_size,
            **({"batch_axes": ";".join(batch_axes)} if batch_axes else {}),
            "custom_symbolics": settings.custom_symbolics,
            "lint": settings.lint,
            **written.options,
        },
        tracer_warnings=tracer_warnings(written.output.warnings),
        hazards=(
            *request.hazards,
            *doubts,
            *operator_type_hazards(written.path, settings),
            *hazards(written.output.warnings),
        ),
        rungs=attempts,
        lint=lint.findings,
        lint_unread=tuple(f"{code.name}: {code.reason}" for code in lint.unread),
        code=code,
        notices=(
            *notices(subject, request.axes, settings),
            *request.example.notices(settings),
        ),
    )


def _with_log(failed: AllStrategiesFailed, path: Path, text: str) -> ExportError:
    """Write the log to the folder of the output. A full disk must not hide the error."""
    log: Path | None = None
    if text.strip():
        with contextlib.suppress(StorageError):
            files.write_text(path, text)
            log = path
    return ExportError(failed.failure.text(notes=failed.attempts, log=log))


def self_check(
    model: nn.Module, exported: Exported, example: Mapping[str, NDArray[Any]]
) -> dict[str, float]:
    """Return the largest absolute difference between a copy of `model` in eval mode and the file.

    Computed on the CPU. This catches files that can't be right; `gate check` measures parity.

    Returns `max_abs_diff_export_batch` and, for each dynamic axis, `max_abs_diff_other_<label>`
    (`batch`: an odd number of samples, unlike the export batch), over all outputs, in float64.
    Raises ExportError if the file does not run, returns other shapes or values that are not
    finite, or differs by more than a hundredth of the largest value of an output. Empty for a file
    with operators outside of ONNX that the settings allow, because no runtime runs it.
    """
    settings = exported.settings
    if not settings.export_params:
        raise ExportError(
            f"{exported.path} was exported without weights, so nothing can be checked. "
            "Set export.export_params: true."
        )
    if settings.operator_export_type != "ONNX" and foreign_in(exported.path):
        return {}
    file = File(exported.path)
    names = tuple(spec.name for spec in exported.subject.inputs)
    outputs = tuple(spec.name for spec in exported.subject.outputs)
    copied = export_copy(model)
    named = settings.model_copy(update={"input_names": names, "output_names": outputs})
    with neutral(copied):
        bound = Example.bind(example, names, settings)
        request = ExportRequest.from_example(copied, bound, named, original=model)
        batches = {"export_batch": request.batch}
        batches |= {f"other_{label}": size for label, size in request.resized_by_label.items()}
        differences = {
            f"max_abs_diff_{name}": max(
                error for error, _ in difference(file, batch, request.answers(batch)).values()
            )
            for name, batch in batches.items()
        }
        problem = NumericalCheck(request).difference(file)
        if problem is not None:
            raise export_error("wrong_export", reason=problem)
        return differences
