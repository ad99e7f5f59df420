"""Options that several commands share, and their defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.given import CHECKPOINT_FILE, ONNX_FILE, SPEC_FILE, Factory, SampleSource
from gate.service.keyring import SECRETS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gate.storage.digest import Digest

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
    "--inputs", type=SampleSource(), required=True, metavar="SOURCE",
    help="Samples: FILE.npy; FILE.npz with one array per input; Parquet or Arrow, one column per "
    "input; a WebDataset .tar; a folder of shards; the URL of any of them (s3://bucket/shards); or "
    "PKG.MODULE:FACTORY of a torch Dataset or an iterable. Fields by name: "
    "data.parquet#inputs=image&label=digit (docs/data.md).",
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
    f"Default: those in {SECRETS_VARIABLE}.",
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
    from gate.storage.private import read_private

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
    from gate.storage.redaction import passwords

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
