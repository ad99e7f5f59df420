"""Shared options, including those of `gate check`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import click

from gate.commands.click_types import (
    CHECKPOINT_FILE,
    LABELS_FILE,
    NEW_FOLDER,
    ONNX_FILE,
    PICTURES,
    POLICY_FILE,
    RECORD_FILE,
    SETTINGS,
    SPEC_FILE,
    ConsumerTensors,
    ExistingPath,
    Factory,
    ModelName,
    NamedAxis,
    NamedPart,
    NamedRecording,
    NamedRole,
    SampleLocationType,
)
from gate.errors import PolicyError

if TYPE_CHECKING:
    from gate.policy.policy import Precision, Task
    from gate.policy.sections import Role
    from gate.storage.digest import Digest


AGAINST = click.option(
    "--against", type=ModelName(), metavar="NAME",
    help="The registered model whose champion the file is compared with, on the same samples: "
    "what changes, and the policy's bounds in incumbent:. Needs --tracking-uri, and to prove the "
    "champion --state, or statements on it that --trust believes.",
)  # fmt: skip


_ENGINES = ("processes", "ray")

_OF_CLUSTER = {"address": None, "workers": None, "cpus_per_worker": 1, "gpus_per_worker": 0.0}
"""Options that say something about a cluster, with their defaults."""


CLUSTER: tuple[Callable[..., Any], ...] = (
    click.option(
        "--engine",
        type=click.Choice(_ENGINES),
        default="processes",
        show_default=True,
        help="ray: actors of a Ray cluster measure, with the same numbers (docs/scale.md).",
    ),
    click.option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster: auto is the one on this machine. Default: RAY_ADDRESS, or else one "
        "that ends with the check.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Actors. Default: as many as the cluster has processors for.",
    ),
    click.option(
        "--cpus-per-worker",
        type=click.IntRange(min=1),
        default=_OF_CLUSTER["cpus_per_worker"],
        show_default=True,
        help="Processors and threads of an actor.",
    ),
    click.option(
        "--gpus-per-worker",
        type=click.FloatRange(min=0.0),
        default=_OF_CLUSTER["gpus_per_worker"],
        show_default=True,
        help="GPUs of an actor; the machine of the command needs the same ones.",
    ),
)
"""As `--help` lists them."""


FILE = click.Path(path_type=Path)

_IN_FILE, _IN_VARIABLE = "@", "env:"

KEPT_ELSEWHERE = "With a password in it: @FILE (mode 0600) or env:NAME, where it is kept."

STRATEGIES = ("traced", "direct", "scripted", "dynamo")

MODEL = click.argument("model", type=ONNX_FILE)

FACTORY = click.argument("factory", type=Factory(), metavar="PKG.MODULE:FACTORY")

REFERENCE = click.option(
    "--reference", type=Factory(), required=True, metavar="PKG.MODULE:FACTORY",
    help="A callable without arguments that returns the nn.Module; found from this folder too.",
)  # fmt: skip

CHECKPOINT = click.option(
    "--checkpoint", type=CHECKPOINT_FILE, help="Weights for it: .pt (tensors only) or .safetensors."
)

WEIGHTS = click.option(
    "--checkpoint", type=CHECKPOINT_FILE, help="Weights: .pt (tensors only) or .safetensors."
)

INPUTS = click.option(
    "--inputs", type=SampleLocationType(), required=True, metavar="SOURCE",
    help="Samples: FILE.npy; FILE.npz with one array per input; Parquet or Arrow, one column per "
    "input; a WebDataset .tar; a folder of shards; the URL of any of them (s3://bucket/shards); or "
    "PKG.MODULE:FACTORY of a torch Dataset or an iterable. Fields by name: "
    "data.parquet#inputs=image&label=digit (docs/data.md).",
)  # fmt: skip

BATCH_AXIS = click.option(
    "--batch-axis", "batch_axes", type=NamedAxis(), multiple=True, metavar="NAME=AXIS|none",
    help="The batch axis of an input or output of the file, or none if it has no batch axis. "
    "Default: by the file's symbolic dimensions (docs/inputs.md). Repeatable.",
)  # fmt: skip

PICTURE_SPEC = click.option(
    "--preprocessing", type=SPEC_FILE, metavar="SPEC",
    help="How pictures of the source become inputs (gate preprocess).",
)  # fmt: skip

PRECISIONS = click.Choice(("exact", "reduced", "quantized"))

PRECISION = click.option(
    "--precision", type=PRECISIONS,
    help="Which built-in policy judges. exact: float32 on both sides; reduced: the file is float16 "
    "or computes in TF32 on purpose, and may be off by what that rounds; quantized: a classifier "
    "in 8 bits, judged by its answers. Default: exact. A --policy says it itself.",
)  # fmt: skip

OVERWRITE = click.option(
    "--overwrite", is_flag=True, help="Replace the report that --report DIR holds already."
)

STORE = click.option("--store", type=FILE, required=True, metavar="DIR", help="The store.")

KEEP = click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True,
    help="How many earlier releases stay, to go back to.",
)  # fmt: skip

TRACKING_URI = click.option(
    "--tracking-uri",
    help="The MLflow registry. Default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here. "
    f"{KEPT_ELSEWHERE}",
)  # fmt: skip

EXPERIMENT = click.option(
    "--experiment", envvar="MLFLOW_EXPERIMENT_NAME", show_envvar=True, metavar="NAME",
    help="The MLflow experiment of the run. Default: parity-gate.",
)  # fmt: skip

TRUST = click.option(
    "--trust", type=FILE, metavar="FILE", envvar="GATE_TRUST", show_envvar=True,
    help="Whose statements and lines of the ledger count; read anew at each look. "
    "Default: the section trust: of the policy's file; else nobody's statements, and the lines as "
    ".gate/trust.yaml says, where that is.",
)  # fmt: skip

SERVICE_KEY = click.option(
    "--key", metavar="URI", envvar="GATE_SIGNING_KEY", show_envvar=True,
    help="By which it signs the ledger's lines: a file, awskms:…, gcpkms:…, azurekms:…, hsm:…. "
    "Default: the key of this folder, .gate/keys/local.pem, where there is one.",
)  # fmt: skip

SECRET_FILE = click.option(
    "--secret-file", type=FILE, envvar="GATE_SECRET_FILE", show_envvar=True,
    help="One secret in a line, the newest first, mode 0600. "
    "Default: those in GATE_WEBHOOK_SECRETS.",
)  # fmt: skip


def tracking_uri(given: str | None) -> str:
    """The address of the registry: as given, else of the environment, else a database here.

    Raises StorageError, BadParameter."""
    here = f"sqlite:///{(Path.cwd() / 'mlflow.db').as_posix()}"
    return address(given) or os.environ.get("MLFLOW_TRACKING_URI") or here


def address(given: str | None) -> str | None:
    """An address that an option names: itself, or where it is kept because it holds a password.

    `@FILE`: the first line of a file of mode 0600; `env:NAME`: a variable of the environment.
    Raises StorageError, BadParameter.
    """
    from gate.storage.files import read_private

    if given is None or not given.startswith((_IN_FILE, _IN_VARIABLE)):
        return given
    if given.startswith(_IN_VARIABLE):
        text = os.environ.get(given.removeprefix(_IN_VARIABLE), "")
    else:
        file = Path(given.removeprefix(_IN_FILE))
        text = read_private(file, what="file of the address", missing="Write the address into it.")
    kept = text.strip().partition("\n")[0].strip()
    if not kept:
        raise click.BadParameter(f"'{given}' holds no address. Expected: one in the first line.")
    return kept


def warn_of_passwords(arguments: Sequence[str]) -> None:
    """Say on stderr that everybody can read a password that was given in the command line."""
    from gate.storage.safe_text import passwords

    if any(passwords(argument) for argument in arguments if "://" in argument):
        click.echo(
            "warning: the command line holds a password, and every user of this machine can read "
            "it (ps). Keep the address in a file of mode 0600 and name it as @FILE, or in the "
            "environment: env:NAME. Exchange the password if others use this machine.",
            err=True,
        )


def given_digest(text: str | None) -> Digest | None:
    """The digest that an option names. Raises BadParameter."""
    from gate.storage.digest import Digest

    if text is None:
        return None
    try:
        return Digest.parse(text.strip().lower())
    except ValueError as error:
        raise click.BadParameter(f"{error}; 64 hex digits are expected.") from error


KEY = click.option(
    "--key", metavar="URI",
    help="The key that signs: a file (PEM, mode 0600), awskms:…, gcpkms:…, azurekms:…, hsm:…. "
    "Default: GATE_SIGNING_KEY, else the key of this folder, .gate/keys/local.pem, made on first "
    "use.",
)  # fmt: skip

SIGNING_TRUST = click.option(
    "--trust", type=ExistingPath(PolicyError, "YAML with a 'trust:' section, or the trust itself"),
    metavar="FILE",
    help="Whose signatures count. Default: GATE_TRUST, else .gate/trust.yaml, which trusts the key "
    "of this folder.",
)  # fmt: skip


_Command = TypeVar("_Command", bound=Callable[..., Any])

_GONE = {"--ledger": "GATE_LEDGER", "--inbox": "GATE_INBOX"}

_INSTEAD = (
    "ledger and inbox lie in one database now. Name it with --state or GATE_STATE (sqlite:///FILE, "
    "postgresql://HOST/NAME; default: sqlite:///.gate/state.db)."
)


def with_state(command: _Command) -> _Command:
    """Give a command `--state`, and an answer to whoever says what was said before it."""
    for name in _GONE:
        command = click.option(
            name, hidden=True, expose_value=False, callback=_refuse_option, metavar="…"
        )(command)
    return click.option(
        "--state", metavar="URL", default="sqlite:///.gate/state.db", show_default=True,
        envvar="GATE_STATE", show_envvar=True,
        help="The database of ledger and inbox: sqlite:///FILE, a FILE, or "
        f"postgresql://USER@HOST/NAME for several hosts. {KEPT_ELSEWHERE}",
    )(command)  # fmt: skip


def _refuse_environment() -> None:
    """What the environment named before must not be left out without a word."""
    for variable in _GONE.values():
        if os.environ.get(variable):
            raise click.UsageError(
                f"the environment has {variable}, and nothing reads it any more: {_INSTEAD} Then "
                f"take {variable} out of the environment."
            )


def _refuse_option(_context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(f"there is no {option.opts[0]} any more: {_INSTEAD}")


_TASKS = ("auto", "classification", "tensors")

_ROLES = ("logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor")


class CheckRequest(TypedDict):
    """The options, as parsed."""

    model: Path
    """Of a release its own file, which `--part` writes."""
    parts: tuple[tuple[str, Path], ...]
    chain: str | None
    reference: str
    checkpoint: Path | None
    inputs: str
    batch_axes: tuple[tuple[str, int | None], ...]
    decode_workers: int | None
    labels: Path | None
    policy: Path | None
    precision: Precision | None
    task: Task | None
    roles: tuple[tuple[str, Role], ...]
    settings: tuple[tuple[str, str], ...]
    runtimes: tuple[str, ...]
    recorded: tuple[tuple[str, Path], ...]
    report: Path | None
    overwrite: bool
    key: str | None
    name: str | None
    batch_size: int
    jobs: int | None
    engine: Literal["processes", "ray"]
    address: str | None
    workers: int | None
    cpus_per_worker: int
    gpus_per_worker: float
    preprocessing: Path | None
    pictures: tuple[Path, ...]
    tensors: tuple[str, ...]
    export_record: Path | None
    verbose: bool
    against: str | None
    trust: Path | None
    state: str
    track: bool
    tracking_uri: str | None
    experiment: str | None


_MEASURING = (
    REFERENCE,
    CHECKPOINT,
    INPUTS,
    BATCH_AXIS,
    click.option(
        "--decode-workers",
        type=click.IntRange(min=0),
        metavar="N",
        help="Processes that read data sets, pictures and columns ahead while the model computes. "
        "Default: one less than cores, at most 4, where reading takes longer than starting them.",
    ),
    click.option(
        "--labels",
        type=LABELS_FILE,
        help="FILE.npy with one class index per sample. Default: those of the source, if it has "
        "any.",
    ),
    click.option(
        "--policy",
        type=POLICY_FILE,
        help="YAML with a 'gate:' section, or the policy itself. Default: exact float32, CPU "
        "always, CUDA when present.",
    ),
    PRECISION,
    click.option(
        "--task",
        type=click.Choice(_TASKS),
        help="classification: an output of classes must be there, and is judged as one; tensors: "
        "numbers only; auto: agreement where the samples prove it. Default: the policy's, or auto.",
    ),
    click.option(
        "--role",
        "roles",
        type=NamedRole(_ROLES),
        multiple=True,
        metavar="NAME=ROLE",
        help=f"What the output NAME is: {', '.join(_ROLES)} (docs/roles.md). Goes before the "
        "policy's outputs:. Repeatable.",
    ),
    SETTINGS,
    click.option(
        "--runtime",
        "runtimes",
        multiple=True,
        metavar="NAME",
        help="Measure this one too, always, within the built-in bounds that fit it (gate runtimes "
        "lists them), where the policy does not name it. Repeatable.",
    ),
    click.option(
        "--preprocessing",
        type=SPEC_FILE,
        metavar="SPEC",
        help="How pictures become the samples (gate preprocess): its digest goes into the "
        "evidence, and pictures of --inputs are made inputs by it.",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Samples that are computed at once, at most.",
    ),
)

_OPTIONS = (
    click.argument("model", type=ONNX_FILE, required=False),
    click.option(
        "--part",
        "parts",
        type=NamedPart(),
        multiple=True,
        metavar="NAME=FILE.onnx",
        help="In the place of MODEL: a part of a release of several files, of the module that the "
        "reference has as NAME. With --chain; release.yaml is written beside them. Repeatable.",
    ),
    click.option(
        "--chain",
        metavar="PKG.MODULE:FUNCTION",
        help="FUNCTION(parts, batch), which runs the parts in order (docs/releases.md).",
    ),
    *_MEASURING,
    click.option(
        "--recorded",
        type=NamedRecording(),
        multiple=True,
        metavar="NAME=FOLDER",
        help="Judge what another machine computed on these samples (gate record pack), by the "
        "policy's runtime NAME or by built-in bounds. Repeatable.",
    ),
    click.option(
        "--report",
        type=NEW_FOLDER,
        metavar="DIR",
        help="Write records, page, figures and samples.csv here, signed.",
    ),
    OVERWRITE,
    KEY,
    click.option(
        "--name",
        type=ModelName(),
        help="The registered model that the verdict is for, in the registry of "
        "--tracking-uri. Default: none; gate promote signs it again for one.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Measure in so many processes of one thread each; the numbers are those of one such "
        "process. Default: one for each physical core where a short trial says that it pays.",
    ),
    *CLUSTER,
    click.option(
        "--pictures",
        type=PICTURES,
        multiple=True,
        help="Files or folders for the parity of preprocessing, if the policy demands it. "
        "Repeatable.",
    ),
    click.option(
        "--tensors",
        type=ConsumerTensors(),
        multiple=True,
        metavar="NAME=FILE.npy",
        help="What a consumer of your own in that policy made of the pictures, on axis 0, in their "
        "order (folders: by name). Repeatable.",
    ),
    click.option(
        "--export-record",
        type=RECORD_FILE,
        metavar="MODEL.onnx.export.json",
        help="What gate export wrote beside the file: what the lint found then, and the exporter's "
        "warnings, for export_findings of the policy.",
    ),
    click.option("-v", "--verbose", is_flag=True, help="Print every check, and what it asks."),
    AGAINST,
    SIGNING_TRUST,
    with_state,
    click.option("--track", is_flag=True, help="Write the whole record on a run of MLflow."),
    TRACKING_URI,
    EXPERIMENT,
)
"""As `--help` lists them."""


def with_question(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a `CheckRequest`."""
    return _with(_OPTIONS, command)


def with_measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command those of them that say what is measured, on what, and by which policy."""
    return _with((MODEL, *_MEASURING), command)


def _with(options: Sequence[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
