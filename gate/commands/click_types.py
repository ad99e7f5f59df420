"""click parameter types."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
from click.shell_completion import CompletionItem

from gate import errors
from gate.storage.untrusted_files import detect_pointer_file
from gate.storage.workspace import DEFAULT, ModelKey, current_workspace, working_in

# A wrong path is the most common mistake. It is reported during parsing, with the exception that
# opening the file would raise later.


Kind = Literal["file", "folder", "either"]

ROLES = ("logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor")


class _Path(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    name = "path"
    error: type[errors.GateError]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Raises `self.error` if the path is not usable."""
        path = Path(value)
        problem = None if ctx is not None and ctx.resilient_parsing else self.problem(path)
        if problem is not None:
            raise self.error(f"{_label(param)}{problem}")
        return path

    def problem(self, path: Path) -> str | None:
        """Return the problem with the path, what was expected, and the fix; None if it is valid."""
        raise NotImplementedError

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's interface
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Return the completion of paths, which the shell itself performs."""
        return [CompletionItem(incomplete, type="file")]


def _label(param: click.Parameter | None) -> str:
    """Return the beginning of a message, which names the option."""
    return f"{param.opts[0]}: " if isinstance(param, click.Option) else ""


class ExistingPath(_Path):
    """A file or folder that must exist."""

    def __init__(
        self, error: type[errors.GateError], expected: str, *, kind: Kind = "file"
    ) -> None:
        """`error`: the class that opening the path would raise. `expected`: for the message."""
        self.error, self._expected, self._kind = error, expected, kind

    def problem(self, path: Path) -> str | None:
        """Return the problem if the path is missing, a pointer file, of the wrong kind, or not
        readable."""
        return detect_pointer_file(path) or self._wrong_kind(path)

    def _wrong_kind(self, path: Path) -> str | None:
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError:
            return f"{path} does not exist. Expected {self._expected}. {_missing_path_hint(path)}"
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return f"cannot read {path}: {reason}. Expected {self._expected}. Check the path."
        if is_folder and self._kind == "file":
            return f"{path} is a folder. Expected {self._expected}. Name the file in it."
        if not is_folder and self._kind == "folder":
            return f"{path} is not a folder. Expected {self._expected}. Name the folder."
        if not os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK):
            return f"cannot read {path}: permission denied. Check permissions."
        return None


class OutputPath(_Path):
    """A file or folder that will be written; checked before the work starts."""

    def __init__(self, kind: Literal["file", "folder"]) -> None:
        self.error, self._kind = errors.StorageError, kind

    def problem(self, path: Path) -> str | None:
        """Return the problem if the path is of the wrong kind, or its folder is not writable."""
        if self._kind == "file" and path.is_dir():
            return f"cannot write {path}: it is a folder. Name a file."
        above = [path, *path.parents] if self._kind == "folder" else list(path.parents)
        nearest = next((parent for parent in above if os.path.lexists(parent)), None)
        if nearest is not None and not nearest.is_dir():
            return f"cannot write {path}: {nearest} is a file, expected a folder. Use another path."
        if nearest is not None and not os.access(nearest, os.W_OK | os.X_OK):
            folder = "the current folder" if nearest == Path() else nearest
            return f"cannot write {path}: no permission to write into {folder}. Use another path."
        return None


def _missing_path_hint(path: Path) -> str:
    """Return a hint: a file of a similar name, or the folder that was searched."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"The folder {path.parent} does not exist: check the path and the current folder."
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return f"Did you mean {path.with_name(near[0])}?"
    return "Check the spelling and the current folder."


class Factory(click.ParamType):  # type: ignore[type-arg]
    """`package.module:callable` of an installed package; the package is not imported."""

    name, alternative = "factory", ""

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002 - click's interface
        ctx: click.Context | None,  # noqa: ARG002
    ) -> str:
        """Return the text. Raises ModelError."""
        from gate.model.factory import require_package

        require_package(str(value), alternative=self.alternative)
        return str(value)


class ReferenceType(Factory):
    """`package.module:callable`, an existing ONNX file, or a registered model."""

    name, alternative = "reference", ", or a path that ends in .onnx"
    _FILE = ExistingPath(
        errors.ModelError, "an ONNX file as the reference, or package.module:factory"
    )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text. Raises ModelError."""
        from gate.model.factory import is_onnx_file, parse_registered

        if parse_registered(str(value)) is not None:
            return str(value)
        if is_onnx_file(str(value)):
            self._FILE.convert(value, param, ctx)
            return str(value)
        return super().convert(value, param, ctx)


class SampleLocationType(click.ParamType):  # type: ignore[type-arg]
    """A file, folder or URL of samples, or `package.module:factory` of a data set."""

    name = "samples"
    _EXISTING_PATH = ExistingPath(
        errors.DataError,
        "samples: .npy, .npz, .parquet, .arrow or .tar, a folder of one kind, a URL, or "
        "package.module:factory",
        kind="either",
    )

    shell_complete = _EXISTING_PATH.shell_complete

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text. Raises DataError if the path does not exist; URLs are not checked."""
        from gate.data.location import SampleLocation

        named = SampleLocation.parse(str(value))
        if named.is_factory:
            from gate.model.factory import require_package

            try:
                require_package(named.source)
            except errors.ModelError as error:
                raise errors.DataError(f"{_label(param)}{error}") from error
        elif not named.is_url:
            self._EXISTING_PATH.convert(named.source, param, ctx)
        return str(value)


class Named(click.ParamType):  # type: ignore[type-arg]
    """`NAME=VALUE`, as a tuple (name, value)."""

    def __init__(
        self,
        name: str,
        expected: str,
        split: Callable[[str], tuple[str, Any]],
        *,
        path_type: ExistingPath | None = None,
    ) -> None:
        """`split`: returns name and value, or raises ValueError with an optional hint.
        `path_type`: the type of a value that is a path."""
        self.name, self._expected, self._split = name, expected, split
        self._path_type = path_type

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Return name and value. Raises BadParameter, and the exceptions of `path_type`."""
        if isinstance(value, tuple):  # click also converts values that are already converted
            return value
        try:
            name, text = self._split(str(value))
            return name, self._path_type.convert(text, param, ctx) if self._path_type else text
        except ValueError as error:
            self.fail(f"{value!r}: expected {self._expected}.{error}", param, ctx)


def _split_path(text: str, is_name: Callable[[str], bool]) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not is_name(name) or not path:
        raise ValueError
    return name, path


def _split_recording(text: str) -> tuple[str, str]:
    from gate.records.runtime import is_runtime_name

    return _split_path(text, is_runtime_name)


def _split_tensors(text: str) -> tuple[str, str]:
    try:
        return _split_path(text, bool)
    except ValueError:
        raise errors.DataError(f"--tensors {text}: expected NAME=FILE.npy.") from None


def _split_role(text: str) -> tuple[str, str]:
    name, _, role = text.rpartition("=")
    if not name or role not in ROLES:
        near = difflib.get_close_matches(role, ROLES, n=1)
        raise ValueError(f" Did you mean {near[0]}?" if near else "")
    return name, role


def _split_axis(text: str) -> tuple[str, int | None]:
    name, _, axis = text.rpartition("=")
    if not name or not (axis == "none" or (axis.isascii() and axis.isdecimal())):
        raise ValueError
    return name, None if axis == "none" else int(axis)


def _split_setting(text: str) -> tuple[str, str]:
    name, is_set, value = text.partition("=")
    if not is_set or not all(name.split(".")):
        raise ValueError
    return name, value


NAMED_RECORDING = Named(
    "recording",
    "NAME=FOLDER, the name of lower-case letters, digits, dashes and dots",
    _split_recording,
    path_type=ExistingPath(errors.EvidenceError, "output of gate record pack", kind="either"),
)

NAMED_PART = Named(
    "part",
    "NAME=FILE.onnx, the name of letters, digits and _",
    lambda text: _split_path(text, lambda name: name.isidentifier() and name.isascii()),
    path_type=ExistingPath(errors.OnnxFileError, "the ONNX file of a part"),
)

NAMED_TENSORS = Named(
    "tensors",
    "NAME=FILE.npy",
    _split_tensors,
    path_type=ExistingPath(errors.DataError, "an .npy file with one tensor for each picture"),
)

NAMED_ROLE = Named("role", f"NAME=ROLE, with one of {', '.join(ROLES)}", _split_role)

NAMED_AXIS = Named("axis", "NAME=AXIS with an axis counted from 0, or NAME=none", _split_axis)


class ModelName(click.ParamType):  # type: ignore[type-arg]
    """The name of a registered model, or `WORKSPACE:NAME`.

    The value is the name, and the command runs in that workspace. With `several`, the value is the
    key of the model (`gate.storage.workspace`), and the workspace is not changed.
    """

    name = "text"

    def __init__(self, *, several: bool = False) -> None:
        self._several = several

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Return the name or key. Raises StorageError for an invalid name."""
        key = ModelKey.parse(str(value), workspace=current_workspace())
        if self._several:
            return str(key)
        if ctx is not None:
            before = ctx.meta.setdefault("gate.workspace", key.workspace)
            if before != key.workspace:
                self.fail(
                    "a command can use only one workspace, but the models are in "
                    f"'{before or DEFAULT}' and '{key.workspace or DEFAULT}'.",
                    param,
                    ctx,
                )
            ctx.with_resource(working_in(key.workspace))
        return key.name


ONNX_FILE = ExistingPath(errors.OnnxFileError, "an ONNX file")

CHECKPOINT_FILE = ExistingPath(errors.CheckpointError, "a .pt or .safetensors file")

SAMPLES = ExistingPath(
    errors.DataError, "samples: a .npy or .npz file, or a folder of them", kind="either"
)

LABELS_FILE = ExistingPath(
    errors.DataError, "a .npy, .jsonl or .parquet file with one label per sample"
)

SLICES_FILE = ExistingPath(errors.DataError, "a .jsonl or .parquet file with one row per sample")

POLICY_FILE = ExistingPath(errors.PolicyError, "YAML with a 'gate:' section, or the policy itself")

SETTINGS_FILE = ExistingPath(errors.PolicyError, "YAML with an 'export:' section")

RECIPE_FILE = ExistingPath(errors.PolicyError, "recipe.yaml, as gate mend wrote it")

QUANTIZE_SETTINGS_FILE = ExistingPath(errors.PolicyError, "YAML with a 'quantize:' section")

SPEC_FILE = ExistingPath(errors.PolicyError, "a preprocessing spec, YAML or JSON")

PICTURES = ExistingPath(errors.DataError, "a picture, or a folder of them", kind="either")

RECORD_FILE = ExistingPath(errors.EvidenceError, "MODEL.onnx.export.json, as gate export wrote it")

REPORT_FOLDER = ExistingPath(
    errors.EvidenceError, "the folder that gate check --report wrote", kind="folder"
)

GOLDEN_FOLDER = ExistingPath(
    errors.EvidenceError, "the folder of the golden vectors, with golden.json", kind="folder"
)

TRUST_FILE = ExistingPath(errors.PolicyError, "YAML with a 'trust:' section, or the trust itself")

STATEMENT_FILE = ExistingPath(
    errors.Untrusted, "a signed statement: decision.dsse.json or evidence.dsse.json"
)

EVIDENCE_FILE = ExistingPath(errors.EvidenceError, "evidence.json, as gate check --report wrote it")

RECORDS = ExistingPath(
    errors.EvidenceError,
    "evidence.json, or the folder that gate check --report wrote",
    kind="either",
)

PLAN_FILE = ExistingPath(errors.EvidenceError, "a plan, as gate plan wrote it")

PART_FILE = ExistingPath(errors.EvidenceError, "output of gate measure")

SENT = ExistingPath(
    errors.DataError, "samples, or the folder that gate samples export wrote", kind="either"
)

OUTPUTS = ExistingPath(
    errors.DataError,
    "outputs: .npy, .npz, a folder of them, or one with outputs.json",
    kind="either",
)

META_FILE = ExistingPath(
    errors.EvidenceError, "JSON: runtime, version, device, precision, recorded_at"
)

NEW_FILE, NEW_FOLDER = OutputPath("file"), OutputPath("folder")

_HEAD = 400
"""Number of leading bytes that identify the kind of a record."""

_BEGIN = b'{\n  "schema_version": '
"""The first bytes of every saved record."""

_TRUNCATED = len(_BEGIN) + 40
"""Maximum size in bytes of a plan or part that was truncated before its identifying field."""


class RecordFile(OutputPath):
    """A new or empty file, or an older record of the same kind, complete or truncated."""

    def __init__(self, sign: str, kind: str) -> None:
        """`sign`: a field near the start that identifies the record. `kind`: for the message."""
        super().__init__("file")
        self._sign, self._record_kind = sign, kind

    def problem(self, path: Path) -> str | None:
        """Return the problem if the path is not writable, or a file of another kind exists."""
        problem, head = super().problem(path), head_of(path)
        if problem or f'"{self._sign}"'.encode() in head or _is_truncated(path, head):
            return problem
        return f"{path} exists and is not {self._record_kind}. Name another file, or remove it."


def head_of(path: Path) -> bytes:
    """Return the first bytes; empty if the path is not a regular file or not readable."""
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as stream:
            return stream.read(_HEAD)
    except OSError:
        return b""


def _is_truncated(path: Path, head: bytes) -> bool:
    """Return whether the file is empty or a record cut off before its identifying field.

    Trailing zero bytes are ignored: a crash may leave them.
    """
    begin = head.rstrip(b"\0")
    is_record = begin.startswith(_BEGIN) or _BEGIN.startswith(begin)
    if not is_record or len(begin) > _TRUNCATED or begin.rstrip().endswith(b"}"):
        return False
    return head == begin or not _has_more(path)


def _has_more(path: Path) -> bool:
    """Return whether a nonzero byte follows the first bytes."""
    with path.open("rb") as stream:
        stream.seek(_HEAD)
        return any(chunk.strip(b"\0") for chunk in iter(partial(stream.read, 2**20), b""))


PLAN = RecordFile("parity_gate", "a plan")

PART = RecordFile("plan_sha256", "a part of a plan")

EVIDENCE = RecordFile("subject", "evidence")

SETTINGS = click.option(
    "--set", "settings", multiple=True, metavar="PLACE=VALUE",
    type=Named(
        "setting", "PLACE=VALUE, such as runtimes.ort-cpu.bounds.noise_ratio=2", _split_setting
    ),
    help="Override a policy setting for a trial: runtimes.ort-cpu.bounds.noise_ratio=2. The "
    "decision records it and cannot be promoted. Repeatable.",
)  # fmt: skip
