"""`--summary`, `--junit`, `--metrics-file`, `--sarif`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from gate.commands.click_types import NEW_FILE
from gate.commands.result import PARSED, CommandResult, ExitCode
from gate.errors import GateError, StorageError
from gate.storage import files
from gate.storage.safe_text import Redaction, make_printable

if TYPE_CHECKING:
    from rich.console import Console

    from gate.report.ci_formats import CiResult


# Whether the files can be written is checked before anything is measured. They are written whatever
# the result is, even if nothing could be judged: otherwise CI would read the file of an earlier
# build. A write that fails after the measurement is reported on stderr and in `--json`, and does
# not change the exit code.


_APPENDED = "GITHUB_STEP_SUMMARY"

_STEP_LIMIT = 1 << 20
"""GitHub's size limit for the summary of one step, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a command ended."""

    command: str
    options: Mapping[str, Any]
    outcome: CommandResult | None
    failure: str = ""
    """The error message if there is no outcome, without passwords."""


@dataclass(frozen=True)
class CiFile:
    """A CI file, defined by the option that requests it."""

    option: str
    help: str
    text: Callable[[Ending], str]

    @property
    def name(self) -> str:
        """Return the name of the parameter."""
        return self.option.removeprefix("--").replace("-", "_")


class CiFilesCommand(click.Command):
    """A command that writes CI files; its callback returns a result and does not handle them."""

    files: ClassVar[tuple[CiFile, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option([file.option], type=NEW_FILE, metavar="FILE", help=file.help)
            for file in self.files
        ]

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Create the context; also report invalid arguments in the CI files."""
        arguments = list(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except (GateError, click.ClickException) as error:
            with contextlib.suppress(GateError, click.ClickException):
                paths, options = self._parse_leniently(arguments, parent)
                _refuse_mixed(paths, options)
                self._write(paths, _failed(info_name, options, error, arguments))
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and write its outcome to the requested files."""
        ctx.meta[PARSED] = dict(ctx.params)
        paths = {
            file: path for file in self.files if (path := ctx.params.pop(file.name)) is not None
        }
        _refuse_mixed(paths, ctx.params)
        arguments = ctx.obj.arguments if ctx.obj else ()
        ready: dict[CiFile, Path] = {}
        try:
            for file, path in paths.items():
                _prepare_path(path, file)
                ready[file] = path
            outcome = super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            raise
        except BaseException as error:  # user code may raise any exception
            self._write(ready, _failed(ctx.info_name, ctx.params, error, arguments))
            raise
        if not isinstance(outcome, CommandResult) or not ready:
            return outcome  # the child process has already written the files
        ending = Ending(command=ctx.info_name or "", options=ctx.params, outcome=outcome)
        return _with_files(outcome, self._write(ready, ending))

    def _parse_leniently(
        self, args: list[str], parent: click.Context | None
    ) -> tuple[dict[CiFile, Path], dict[str, Any]]:
        """Return the CI files and the other options of invalid arguments, as far as they parse."""
        context = click.Context(self, parent=parent, resilient_parsing=True)
        context.ignore_unknown_options = True
        options, _, _ = self.make_parser(context).parse_args(args)
        requested = {file: options.pop(file.name, None) for file in self.files}
        return {file: Path(path) for file, path in requested.items() if path}, options

    def _write(self, paths: Mapping[CiFile, Path], ending: Ending) -> list[dict[str, str | None]]:
        """Write each file, even if another one fails; return the messages to show."""
        written: list[dict[str, str | None]] = []
        for file, path in paths.items():
            problem = None
            try:
                _write_file(path, file.text(ending))
            except GateError as error:
                problem = str(error)
                click.echo(f"warning: {file.option}: {error}", err=True)
            written.append({"option": file.option, "path": str(path), "error": problem})
        return written


def _failed(
    command: str | None, options: Mapping[str, Any], error: BaseException, arguments: Iterable[str]
) -> Ending:
    text = str(error)
    if isinstance(error, click.ClickException):
        text = error.format_message()
    elif not isinstance(error, GateError):
        text = f"unexpected {type(error).__name__}: {text}"
    clean = Redaction(addresses=arguments).clean
    return Ending(command=command or "", options=options, outcome=None, failure=clean(text))


def _refuse_mixed(paths: Mapping[CiFile, Path], inputs: Mapping[str, Any]) -> None:
    """Raise UsageError if two options name the same file, or one names an input of the command."""
    options: dict[Path, str] = {}
    for file, path in paths.items():
        resolved = path.resolve()
        if resolved in options:
            raise click.UsageError(
                f"{options[resolved]} and {file.option} both name {path}. Use different files."
            )
        options[resolved] = file.option
    for value in _iter_texts(inputs.values()):
        option = options.get(Path(value).resolve())
        if option is not None:
            raise click.UsageError(
                f"{option} would overwrite {value}, an argument of this command. Name another file."
            )


def _iter_texts(values: Iterable[Any]) -> Iterable[str]:
    """Yield the paths and texts in option values, which may be nested in tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _iter_texts(value)
        elif isinstance(value, (str, Path)) and "\0" not in str(value):
            yield str(value)


def _is_appended(path: Path) -> bool:
    """Return whether the path is GitHub's summary file, to which several writers append."""
    summary = os.environ.get(_APPENDED)
    return bool(summary) and path.resolve() == Path(str(summary)).resolve()


def _prepare_path(path: Path, file: CiFile) -> None:
    """Check that the file can be written, and remove an older one. Raises StorageError."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if _is_appended(path):
            with path.open("ab"):
                pass
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{file.option}: cannot write {path}: {error.strerror or error}. Nothing was judged. "
            "Name another path or fix its permissions."
        ) from error


def _write_file(path: Path, text: str) -> None:
    """Write the file, or append to GitHub's summary. Raises StorageError."""
    if not _is_appended(path):
        files.write_text(path, text)
        return
    try:
        with path.open("ab") as stream:
            data = f"\n{text}".encode()
            if stream.tell() + len(data) > _STEP_LIMIT:
                raise OSError(None, f"it has {stream.tell()} bytes, and GitHub's limit is 1 MiB")
            stream.write(data)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}.") from error


def _with_files(outcome: CommandResult, written: list[dict[str, str | None]]) -> CommandResult:
    """Return the outcome with the paths of the written files."""

    def show(console: Console) -> None:
        outcome.show(console)
        for file in written:
            if file["error"] is None:
                label = str(file["option"]).removeprefix("--")
                console.print(f"{label:<7} {make_printable(str(file['path']))}")

    return replace(outcome, plain={**outcome.plain, "ci_files": written}, show=show)


def _summary(ending: Ending) -> str:
    from gate.report.markdown import pull_request_comment

    return pull_request_comment(_result(ending))


def _junit(ending: Ending) -> str:
    from gate.report.ci_formats import junit_xml

    return junit_xml(_result(ending))


def _openmetrics(ending: Ending) -> str:
    from gate.report.ci_formats import openmetrics_text

    return openmetrics_text(_result(ending))


def _sarif(ending: Ending) -> str:
    from gate.report.ci_formats import check_sarif_log

    options = ending.options
    parts = [path for _, path in options["parts"]] if "chain" in options else []
    path = Path(
        next(filter(None, (options.get("model"), *parts, options.get("plan"))), "model.onnx")
    )
    if path.absolute().is_relative_to(Path.cwd()):  # code scanning shows files of the repository
        path = path.absolute().relative_to(Path.cwd())
    file = path.as_posix()
    source = None if ending.outcome is None else ending.outcome.plain.get("source")
    location = (str(source["file"]), int(source["line"])) if source else None
    return check_sarif_log(_result(ending), file=file, source=location)


class VerdictCommand(CiFilesCommand):
    """A command whose outcome is a decision: `gate check`, `gate merge`, `gate promote`."""

    files: ClassVar[tuple[CiFile, ...]] = (
        CiFile(
            "--summary",
            "Write the verdict as Markdown, for a pull request or cml comment. "
            "$GITHUB_STEP_SUMMARY is appended to (docs/ci.md).",
            _summary,
        ),
        CiFile(
            "--junit",
            "Write the checks as JUnit XML, for GitLab or Jenkins: one suite per runtime, one case "
            "per check.",
            _junit,
        ),
        CiFile(
            "--metrics-file",
            "Write the numbers in OpenMetrics format, for Prometheus.",
            _openmetrics,
        ),
        CiFile(
            "--sarif",
            "Write the findings as SARIF 2.1.0, for code scanning, at the source line of the "
            "module that diverges first.",
            _sarif,
        ),
    )


def _result(ending: Ending) -> CiResult:
    from gate.report.ci_formats import CiResult
    from gate.summary.summary import Summary

    outcome, options = ending.outcome, ending.options
    model = str(options.get("name") or options.get("reference") or "")
    command, code = ending.command, ExitCode.NOT_JUDGED
    if outcome is None:
        return CiResult(command=command, exit_code=code, model=model, sentence=ending.failure)
    run = outcome.plain.get("run") or {}
    links = {"MLflow run": run.get("address"), "Model version": outcome.plain.get("url")}
    return CiResult(
        command=command,
        exit_code=outcome.status,
        model=model,
        sentence=outcome.sentence,
        summary=outcome.record if isinstance(outcome.record, Summary) else None,
        links={label: target for label, target in links.items() if target},
    )
