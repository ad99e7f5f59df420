"""Shared options, including those of `gate check`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from gate.commands import click_types as types
from gate.storage.digest import Digest
from gate.storage.files import read_private
from gate.storage.safe_text import passwords, without_passwords

if TYPE_CHECKING:
    from gate.measure.job import EvaluationData
    from gate.policy.policy import Policy, Precision, Task
    from gate.policy.sections import Role


_Command = TypeVar("_Command", bound=Callable[..., Any])

AGAINST = click.option(
    "--against", type=types.ModelName(), metavar="NAME",
    help="Compare with the champion of this registered model on the same samples, by the policy's "
    "section incumbent:. To verify the champion, it needs --tracking-uri, and --state or signed "
    "statements that --trust accepts.",
)  # fmt: skip

CLUSTER: tuple[Callable[..., Any], ...] = (
    click.option(
        "--engine", type=click.Choice(("processes", "ray")), default="processes", show_default=True,
        help="ray: measure on a Ray cluster, with the same results (docs/scale.md).",
    ),
    click.option(
        "--address", metavar="HOST:PORT",
        help="The Ray cluster; auto finds the one on this machine. Default: RAY_ADDRESS, else a "
        "cluster that is stopped after the check.",
    ),
    click.option(
        "--workers", type=click.IntRange(min=1), metavar="N",
        help="Number of workers. Default: as many as fit on the cluster's CPUs.",
    ),
    click.option(
        "--cpus-per-worker", type=click.IntRange(min=1), default=1, show_default=True,
        help="CPUs and threads per worker.",
    ),
    click.option(
        "--gpus-per-worker", type=click.FloatRange(min=0.0), default=0.0, show_default=True,
        help="GPUs per worker. This machine needs the same GPU model.",
    ),
)  # fmt: skip
"""The cluster options, in the order of `--help`."""

FILE = click.Path(path_type=Path)

_IN_FILE, _IN_VARIABLE = "@", "env:"

PASSWORD_HELP = "Pass an address with a password as @FILE (mode 0600) or env:NAME."

STRATEGIES = ("traced", "direct", "scripted", "dynamo")

MODEL = click.argument("model", type=types.ONNX_FILE)

FACTORY = click.argument("factory", type=types.Factory(), metavar="PKG.MODULE:FACTORY")

REFERENCE = click.option(
    "--reference", required=True, metavar="PKG.MODULE:FACTORY|FILE.onnx",
    type=types.ReferenceType(),
    help="A callable without arguments that returns the nn.Module (the current folder is on the "
    "path), an ONNX file, or models:/NAME@ALIAS or models:/NAME/VERSION of the MLflow registry.",
)  # fmt: skip

CHECKPOINT = click.option(
    "--checkpoint", type=types.CHECKPOINT_FILE,
    help="Weights of the reference: .pt (tensors only) or .safetensors.",
)  # fmt: skip

WEIGHTS = click.option(
    "--checkpoint", type=types.CHECKPOINT_FILE, help="Weights: .pt (tensors only) or .safetensors."
)

INPUTS = click.option(
    "--inputs", type=types.SampleLocationType(), required=True, metavar="SOURCE",
    help="Samples: FILE.npy; FILE.npz with one array per input; Parquet or Arrow with one column "
    "per input; a WebDataset .tar; a folder of shards; a URL of any of these (s3://bucket/shards); "
    "or PKG.MODULE:FACTORY of a torch Dataset or an iterable. Choose fields with "
    "data.parquet#inputs=image&label=digit (docs/data.md).",
)  # fmt: skip

BATCH_AXIS = click.option(
    "--batch-axis", "batch_axes", type=types.NAMED_AXIS, multiple=True, metavar="NAME=AXIS|none",
    help="The batch axis of an input or output of the file, or none if it has no batch axis. "
    "Default: by the file's symbolic dimensions (docs/inputs.md). Repeatable.",
)  # fmt: skip

BATCH_SIZE = click.option(
    "--batch-size", type=click.IntRange(min=1), default=32, show_default=True,
    help="Maximum batch size.",
)  # fmt: skip

PRECISIONS = click.Choice(("exact", "reduced", "quantized"))

PRECISION = click.option(
    "--precision", type=PRECISIONS,
    help="Built-in policy. exact: float32 (default); reduced: float16, bfloat16 or TF32 on "
    "purpose, with bounds for their rounding; quantized: an 8-bit classifier, judged by its top-1 "
    "answers. Not together with --policy.",
)  # fmt: skip


def policy_option(text: str, **more: Any) -> Callable[[_Command], _Command]:
    """Return the option `--policy` with this help."""
    return click.option("--policy", type=types.POLICY_FILE, help=text, **more)


def golden_option(text: str, **more: Any) -> Callable[[_Command], _Command]:
    """Return the option `--golden`, the folder of the golden vectors of a file."""
    return click.option("--golden", type=types.GOLDEN_FOLDER, metavar="FOLDER", help=text, **more)


def spec_option(text: str) -> Callable[[_Command], _Command]:
    """Return the option `--preprocessing`, a preprocessing spec."""
    return click.option("--preprocessing", type=types.SPEC_FILE, metavar="SPEC", help=text)


def report_option(text: str) -> Callable[[_Command], _Command]:
    """Return the option `--report`, a new folder that the command writes into."""
    return click.option("--report", type=types.NEW_FOLDER, metavar="DIR", help=text)


PICTURE_SPEC = spec_option("Preprocessing spec that turns pictures into inputs (gate preprocess).")

VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print every check with its meaning.")

TASK = click.option(
    "--task", type=click.Choice(("auto", "classification", "tensors")),
    help="classification: at least one output has class scores; tensors: compare numbers only; "
    "auto: judge top-1 agreement if the samples are sufficient. Default: the policy's, or auto.",
)  # fmt: skip

RUNTIMES = click.option(
    "--runtime", "runtimes", multiple=True, metavar="NAME",
    help="Also measure this runtime, with built-in bounds if the policy does not name it. "
    "gate runtimes lists the runtimes. Repeatable.",
)  # fmt: skip

OVERWRITE = click.option(
    "--overwrite", is_flag=True, help="Replace an existing report in --report DIR."
)

STORE = click.option(
    "--store", type=FILE, required=True, metavar="DIR", help="Folder of the store."
)

KEEP = click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True,
    help="Number of earlier releases to keep for a rollback.",
)  # fmt: skip

TRACKING_URI = click.option(
    "--tracking-uri",
    help="MLflow registry. Default: MLFLOW_TRACKING_URI, else ./mlflow.db. "
    f"{PASSWORD_HELP}",
)  # fmt: skip

EXPERIMENT = click.option(
    "--experiment", envvar="MLFLOW_EXPERIMENT_NAME", show_envvar=True, metavar="NAME",
    help="MLflow experiment of the run. Default: parity-gate.",
)  # fmt: skip

TRUST = click.option(
    "--trust", type=FILE, metavar="FILE", envvar="GATE_TRUST", show_envvar=True,
    help="Trusted keys for statements and ledger entries; read again on every reconcile. "
    "Default: the section trust: of the policy file; else no statement is trusted, and ledger "
    "entries by .gate/trust.yaml, if it exists.",
)  # fmt: skip

SERVICE_KEY = click.option(
    "--key", metavar="URI", envvar="GATE_SIGNING_KEY", show_envvar=True,
    help="Key that signs ledger entries: a file, awskms:…, gcpkms:…, azurekms:…, hsm:…. "
    "Default: .gate/keys/local.pem, if it exists.",
)  # fmt: skip

SECRET_FILE = click.option(
    "--secret-file", type=FILE, envvar="GATE_SECRET_FILE", show_envvar=True,
    help="Webhook secrets, one per line, newest first; mode 0600. "
    "Default: GATE_WEBHOOK_SECRETS.",
)  # fmt: skip


def tracking_uri(uri: str | None) -> str:
    """Return the registry's URI: `uri`, else MLFLOW_TRACKING_URI, else ./mlflow.db.

    Raises StorageError, BadParameter."""
    default = f"sqlite:///{(Path.cwd() / 'mlflow.db').as_posix()}"
    return address(uri) or os.environ.get("MLFLOW_TRACKING_URI") or default


def address(value: str | None) -> str | None:
    """Return the address that an option names directly, by file or by environment variable.

    `@FILE`: the first line of a file of mode 0600; `env:NAME`: an environment variable. Both keep a
    password out of the command line. Raises StorageError, BadParameter.
    """
    if value is None:
        return None
    if not value.isprintable():  # a byte that is not UTF-8 can't be stored in the ledger
        raise click.BadParameter(f"{value!r} has unprintable characters. Expected an address.")
    if not value.startswith((_IN_FILE, _IN_VARIABLE)):
        return value
    if value.startswith(_IN_VARIABLE):
        text = os.environ.get(value.removeprefix(_IN_VARIABLE), "")
    else:
        file = Path(value.removeprefix(_IN_FILE))
        text = read_private(file, kind="file of the address", missing="Write the address into it.")
    line = text.strip().partition("\n")[0].strip()
    if not line:
        raise click.BadParameter(
            f"'{value}' has no address. Expected an address on the first line."
        )
    return line


def warn_of_passwords(arguments: Sequence[str]) -> None:
    """Warn on stderr that a password in the command line is visible to other users."""
    if any(passwords(argument) for argument in arguments if "://" in argument):
        click.echo(
            "warning: the command line has a password, which every user of this machine can read "
            "(ps). Store the address in a file of mode 0600 and pass @FILE, or in an environment "
            "variable and pass env:NAME. Change the password if others use this machine.",
            err=True,
        )


def parse_digest(text: str | None) -> Digest | None:
    """Return the digest that an option names. Raises BadParameter."""
    if text is None:
        return None
    try:
        return Digest.parse(text.strip().lower())
    except ValueError as error:
        raise click.BadParameter(f"{error}; expected 64 hex digits.") from error


KEY = click.option(
    "--key", metavar="URI",
    help="Signing key: a file (PEM, mode 0600), awskms:…, gcpkms:…, azurekms:…, hsm:…. "
    "Default: GATE_SIGNING_KEY, else .gate/keys/local.pem, created on first use.",
)  # fmt: skip

SIGNING_TRUST = click.option(
    "--trust", type=types.TRUST_FILE, metavar="FILE",
    help="Trusted keys. Default: GATE_TRUST, else .gate/trust.yaml, which trusts "
    ".gate/keys/local.pem.",
)  # fmt: skip

STATE_URL = click.option(
    "--state", metavar="URL", default="sqlite:///.gate/state.db", show_default=True,
    envvar="GATE_STATE", show_envvar=True,
    help="Database of the ledger: sqlite:///FILE, FILE, or postgresql://USER@HOST/NAME for several "
    f"hosts. {PASSWORD_HELP}",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuringRequest:
    """The options of every command that measures, as parsed."""

    reference: str
    inputs: str
    checkpoint: Path | None = None
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    decode_workers: int | None = None
    labels: Path | None = None
    slices: Path | None = None
    policy: Path | None = None
    precision: Precision | None = None
    task: Task | None = None
    roles: tuple[tuple[str, Role], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    runtimes: tuple[str, ...] = ()
    batch_size: int = 32
    preprocessing: Path | None = None
    server: str | None = None

    def open_data(self, policy: Policy) -> EvaluationData:
        """Open the samples with their labels and slices. Raises DataError, StorageError,
        PolicyError."""
        from gate.measure.job import EvaluationData

        data = EvaluationData.open(
            self.inputs,
            batch_size=self.batch_size,
            preprocessing=self.preprocessing,
            decode_workers=self.decode_workers,
            batch_axes=dict(self.batch_axes),
        )
        return data.with_labels(self.labels, slices=self.slices, metrics=policy.metrics)


@dataclass(frozen=True, kw_only=True)
class CheckRequest(MeasuringRequest):
    """The options of `gate check`, as parsed."""

    model: Path
    """The ONNX file, or the release file of several parts."""
    parts: tuple[tuple[str, Path], ...] = ()
    chain: str | None = None
    recorded: tuple[tuple[str, Path], ...] = ()
    report: Path | None = None
    overwrite: bool = False
    key: str | None = None
    name: str | None = None
    jobs: int | None = None
    engine: Literal["processes", "ray"] = "processes"
    address: str | None = None
    workers: int | None = None
    cpus_per_worker: int = 1
    gpus_per_worker: float = 0.0
    pictures: tuple[Path, ...] = ()
    tensors: tuple[tuple[str, Path], ...] = ()
    export_record: Path | None = None
    verbose: bool = False
    against: str | None = None
    trust: Path | None = None
    state: str = ""
    track: bool = False
    tracking_uri: str | None = None
    experiment: str | None = None


MEASURING = (
    REFERENCE,
    CHECKPOINT,
    INPUTS,
    BATCH_AXIS,
    click.option(
        "--decode-workers", type=click.IntRange(min=0), metavar="N",
        help="Processes that read data sets, pictures and columns ahead. Default: cores - 1, at "
        "most 4, if reading takes longer than starting them.",
    ),
    click.option(
        "--labels", type=types.LABELS_FILE,
        help="FILE.npy with one class index per sample. Default: the labels in --inputs, if any. "
        "Metrics of the policy can use labels of any kind: .npy, JSON lines or Parquet "
        "(docs/task-metrics.md).",
    ),
    click.option(
        "--slices", type=types.SLICES_FILE, metavar="FILE",
        help="JSON lines or Parquet with the columns that define slices for the policy's metrics. "
        "Default: the file of --labels.",
    ),
    policy_option(
        "YAML policy, or YAML with a 'gate:' section. Default: exact float32, on the CPU, and on "
        "CUDA if available."
    ),
    PRECISION,
    TASK,
    click.option(
        "--role", "roles", type=types.NAMED_ROLE, multiple=True, metavar="NAME=ROLE",
        help=f"Role of the output NAME: {', '.join(types.ROLES)} (docs/roles.md). Overrides the "
        "policy's outputs:. Repeatable.",
    ),
    types.SETTINGS,
    RUNTIMES,
    spec_option(
        "Preprocessing spec (gate preprocess). It turns pictures of --inputs into inputs; its "
        "digest becomes part of the evidence."
    ),
    BATCH_SIZE,
)  # fmt: skip

"""The options of a `MeasuringRequest`: model, samples, policy."""

CHECK_OPTIONS = (
    click.argument("model", type=types.ONNX_FILE, required=False),
    *MEASURING,
    click.option(
        "--part", "parts", type=types.NAMED_PART, multiple=True, metavar="NAME=FILE.onnx",
        help="Instead of MODEL: one file of a release of several files, exported from the "
        "submodule NAME of the reference. Requires --chain; writes release.yaml into the folder of "
        "the files. Repeatable.",
    ),
    click.option(
        "--chain", metavar="PKG.MODULE:FUNCTION",
        help="FUNCTION(parts, batch) that runs the parts in order (docs/releases.md).",
    ),
    click.option(
        "--recorded", type=types.NAMED_RECORDING, multiple=True, metavar="NAME=FOLDER",
        help="Judge outputs that another machine computed (gate record pack), with the bounds of "
        "the policy's runtime NAME or built-in bounds. Repeatable.",
    ),
    click.option(
        "--server", metavar="URL",
        help="Also measure a live model server (Open Inference Protocol): "
        "http://127.0.0.1:8000/v2/models/digits. The policy's runtime 'server' has its options.",
    ),
    report_option("Write a signed report here: records, HTML page, charts, samples.csv."),
    OVERWRITE,
    KEY,
    click.option(
        "--name", type=types.ModelName(),
        help="Registered model that the signed verdict is for, in --tracking-uri. Default: none; "
        "gate promote then signs again.",
    ),
    click.option(
        "--jobs", type=click.IntRange(min=1), metavar="N",
        help="Number of processes, with one thread each; the results do not depend on it. "
        "Default: one per physical core, if this is faster in a short trial.",
    ),
    *CLUSTER,
    click.option(
        "--pictures", type=types.PICTURES, multiple=True,
        help="Pictures (files or folders) for the preprocessing comparison, if the policy has one. "
        "Repeatable.",
    ),
    click.option(
        "--tensors", type=types.NAMED_TENSORS, multiple=True, metavar="NAME=FILE.npy",
        help="Tensors that consumer NAME of the policy made from the pictures, on axis 0, in the "
        "same order (folders: by name). Repeatable.",
    ),
    click.option(
        "--export-record", type=types.RECORD_FILE, metavar="MODEL.onnx.export.json",
        help="Record that gate export wrote: lint findings and exporter warnings, for the policy's "
        "export_findings.",
    ),
    VERBOSE,
    AGAINST,
    SIGNING_TRUST,
    STATE_URL,
    click.option("--track", is_flag=True, help="Log everything to an MLflow run."),
    TRACKING_URI,
    EXPERIMENT,
)  # fmt: skip
"""The options of a `CheckRequest`, in the order of `--help`."""


def quoted_options(values: Iterable[tuple[str, object]]) -> list[str]:
    """Return options as words of a shell command, without passwords and without those of None."""
    return [
        f"{name} {shlex.quote(without_passwords(str(value)))}"
        for name, value in values
        if value is not None
    ]


def with_unique_names(pairs: Sequence[tuple[str, Path]], option: str) -> dict[str, Path]:
    """Return the paths by name. Raises BadParameter if a name occurs twice."""
    named = dict(pairs)
    if len(named) < len(pairs):
        raise click.BadParameter(f"{option}: a name is used twice. Use a unique name for each.")
    return named


def with_options(options: Sequence[Callable[..., Any]]) -> Callable[[_Command], _Command]:
    """Add several options to a command, in this order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
