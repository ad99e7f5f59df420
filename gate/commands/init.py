"""`gate init`."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.options import PRECISIONS
from gate.commands.result import CommandResult, ExitCode, machine_options
from gate.errors import ModelError, PolicyError
from gate.storage import files as atomic

if TYPE_CHECKING:
    from rich.console import Console


_POLICY = Path("gate.yaml")

_SCHEMA = Path("gate.schema.json")
"""The schema that editors use to complete the policy, and CI to validate it."""

_STAGE = "gate"

_IGNORE, _CACHE = Path(".dvcignore"), "__pycache__"


@dataclass(frozen=True)
class _File:
    """A file that the command writes or leaves unchanged."""

    path: Path
    before: str | None
    """None if the file does not exist."""
    after: str | None
    """None if the file is left unchanged."""
    note: str

    @property
    def diff(self) -> str:
        """Return the change as a unified diff; empty if nothing is written."""
        if self.after is None:
            return ""
        old = "/dev/null" if self.before is None else str(self.path)
        before = (self.before or "").splitlines(keepends=True)
        after = self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, old, str(self.path)))


@click.command("init", short_help="Write a commented policy and a pipeline stage.")
@click.option(
    "--precision", type=PRECISIONS, default="exact", show_default=True,
    help="Precision of the ONNX file, as gate check --precision.",
)  # fmt: skip
@click.option(
    "--pipeline", is_flag=True,
    help="Also add a stage to dvc.yaml and an entry point to MLproject.",
)  # fmt: skip
@click.option("--diff", "shows", is_flag=True, help="Print the changes as a diff; write nothing.")
@click.option(
    "--model", default="model.onnx", show_default=True, metavar="FILE",
    help="ONNX file of the stage.",
)  # fmt: skip
@click.option(
    "--reference", default="mymodel:build", show_default=True, metavar="PKG.MODULE:FACTORY",
    help="Factory of the PyTorch model. The stage also depends on its source, if it is in this "
    "project.",
)  # fmt: skip
@click.option("--checkpoint", metavar="FILE", help="Weights. Default: the factory loads them.")
@click.option(
    "--inputs", default="samples.npy", show_default=True, metavar="SOURCE",
    help="Samples, as gate check --inputs.",
)  # fmt: skip
@machine_options
def command(**options: Any) -> CommandResult:
    """Write gate.yaml: the built-in policy, with a comment for each setting.

    With --pipeline, also add a DVC stage and an MLflow entry point that run gate check with it. An
    existing gate.yaml, stage or entry point with the name gate is left unchanged.

    \b
    Examples:
      gate init
      gate init --precision reduced
      gate init --pipeline --reference mypackage.models:build --checkpoint weights.safetensors
      gate init --pipeline --diff
    """
    files = tuple(_files(options))
    for file in files:
        if file.after is not None and not options["shows"]:
            atomic.write_bytes(file.path, file.after.encode())
    plain = {
        "files": [
            {
                "path": str(file.path),
                "written": file.after is not None and not options["shows"],
                "note": file.note,
                "diff": file.diff,
            }
            for file in files
        ]
    }
    return CommandResult(
        ExitCode.DONE, plain, lambda console: _print(files, console, shows=options["shows"])
    )


def _files(options: Mapping[str, Any]) -> Iterator[_File]:
    """Yield the files. The caller must create all of them before it writes the first one."""
    from gate.commands.schema import schema_text
    from gate.policy.policy import Policy
    from gate.summary.policy_docs import policy_text

    before = _text(_POLICY)
    after = (
        policy_text(Policy.built_in(options["precision"]), name=str(_POLICY))
        if before is None
        else None
    )
    if after is not None:
        after = f"# yaml-language-server: $schema={_SCHEMA}\n{after}"
        yield _File(_SCHEMA, _text(_SCHEMA), schema_text("gate.yaml"), "the schema, for editors")
    yield _File(_POLICY, before, after, "the policy: gate policy show --policy gate.yaml")
    if options["pipeline"]:
        note = "the stage gate: dvc repro gate"
        if _source(reference := options["reference"]) is None:
            note += f" (add the source of {reference} to deps: it is not in this project)"
        yield _entry(Path("dvc.yaml"), "stages", _stage(options), note)
        if any(source.is_dir() for source in _sources(options)):
            # Python's cache is no dependency of the stage.
            text = _text(_IGNORE)
            lines = (text or "").splitlines()
            is_ignored = not {_CACHE, f"{_CACHE}/"}.isdisjoint(lines)
            ignored = None if is_ignored else "\n".join([*lines, _CACHE, ""])
            yield _File(_IGNORE, text, ignored, f"{_CACHE}, which is not source code")
        note = "the entry point gate: mlflow run . -e gate"
        yield _entry(Path("MLproject"), "entry_points", _entry_point(options), note)


def _entry(path: Path, section: str, lines: list[str], note: str) -> _File:
    from gate.storage.yaml_section import insert_entry

    before, new = _text(path), ""
    if path.name == "MLproject":
        new = f"name: {json.dumps(Path.cwd().name)}\n"
    text = new if before is None else before
    return _File(path, before, insert_entry(text, (section, _STAGE), lines, path=path), note)


def _stage(options: Mapping[str, Any]) -> list[str]:
    """Return the DVC stage. It depends on all files that the check reads, including the source of
    the model, so that a change runs the check again."""
    named = [options["model"], options["checkpoint"], options["inputs"]]
    read = [file for file in named if file and ":" not in file]
    read += [source.as_posix() for source in _sources(options)]
    deps = [f"    - {json.dumps(file)}" for file in read]
    return [
        f"{_STAGE}:  # exit code 1 if the file is rejected: dependent stages do not run",
        f"  cmd: {json.dumps(shlex.join(_command_line(options)).replace('${', chr(92) + '${'))}",
        *(["  deps:", *deps] if deps else []),
        "  params:",
        f"    - {_POLICY}: [gate]",
        "  outs:",
        "    - report: {cache: false}",
    ]


def _sources(options: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the source files of this project that the stage runs, without duplicates."""
    sources = (_source(options["reference"]), _source(options["inputs"]))
    return tuple(dict.fromkeys(source for source in sources if source is not None))


def _source(factory: str) -> Path | None:
    """Return the path of a factory's code, or None if it is not in this project or is not code."""
    from gate.model.factory import source_in_project

    try:
        return source_in_project(factory)
    except ModelError:  # a file or a URL
        return None


def _entry_point(options: Mapping[str, Any]) -> list[str]:
    command = shlex.join(_command_line({**options, "model": "\0"}))
    command = command.replace("{", "{{").replace("}", "}}")
    return [
        f"{_STAGE}:",
        "  parameters:",
        f"    model: {{type: string, default: {json.dumps(options['model'])}}}",
        f"  command: {json.dumps(command.replace(shlex.quote(chr(0)), '{model}'))}",
    ]


def _command_line(options: Mapping[str, Any]) -> list[str]:
    """Return the `gate check` command line of stage and entry point."""
    words = ["gate", "check", options["model"], "--reference", options["reference"]]
    if options["checkpoint"]:
        words += ["--checkpoint", options["checkpoint"]]
    return [*words, "--inputs", options["inputs"], "--policy", str(_POLICY), "--report", "report"]


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read {path}: {error}. Expected UTF-8 text.") from error


def _print(files: tuple[_File, ...], console: Console, *, shows: bool) -> None:
    for file in files:
        if shows and file.after is not None:
            console.file.write(file.diff)
        elif file.after is None:
            console.print(f"unchanged  {file.path}, which already has it: {file.note}")
        else:
            console.print(f"written    {file.path}: {file.note}")
