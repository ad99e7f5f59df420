"""What `gate check` is asked: its options, and their values as parsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import click

from gate.commands.against import AGAINST
from gate.commands.cluster import CLUSTER
from gate.commands.given import (
    LABELS_FILE,
    NEW_FOLDER,
    ONNX_FILE,
    PICTURES,
    POLICY_FILE,
    RECORD_FILE,
    SPEC_FILE,
    ConsumerTensors,
    NamedPart,
    NamedRecording,
    NamedRole,
)
from gate.commands.options import (
    CHECKPOINT,
    EXPERIMENT,
    INPUTS,
    MODEL,
    PRECISION,
    REFERENCE,
    TRACKING_URI,
)
from gate.commands.settings import SETTINGS
from gate.commands.signing import KEY, TRUST
from gate.commands.state import with_state

if TYPE_CHECKING:
    from gate.policy.policy import Role, Task
    from gate.policy.scope import Precision

_TASKS = ("auto", "classification", "tensors")
_ROLES = ("logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor")


class CheckQuestion(TypedDict):
    """The options, as parsed."""

    model: Path
    """Of a release its own file, which `--part` writes."""
    parts: tuple[tuple[str, Path], ...]
    chain: str | None
    reference: str
    checkpoint: Path | None
    inputs: str
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
    KEY,
    click.option(
        "--name",
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
    TRUST,
    with_state,
    click.option("--track", is_flag=True, help="Write the whole record on a run of MLflow."),
    TRACKING_URI,
    EXPERIMENT,
)
"""As `--help` lists them."""


def with_question(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a `CheckQuestion`."""
    return _with(_OPTIONS, command)


def with_measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command those of them that say what is measured, on what, and by which policy."""
    return _with((MODEL, *_MEASURING), command)


def _with(options: Sequence[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
