"""`gate deploy`: let a file serve under a name, or the one that served before it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from gate.bounded.limits import FILE_S, ChildLimits
from gate.commands.child import limit_options
from gate.commands.given import GOLDEN_FOLDER, ONNX_FILE, SPEC_FILE
from gate.commands.options import KEEP, STORE, given_digest
from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status

if TYPE_CHECKING:
    from rich.console import Console

    from gate.deploy.deploy import Deployment
    from gate.deploy.store import Store


class _Request(TypedDict):
    """The options, as parsed."""

    name: str
    store: Path
    file: Path | None
    golden: Path | None
    preprocessing: Path | None
    sha256: str | None
    twin: Path | None
    twin_golden: Path | None
    back: bool
    keep: int
    limits: ChildLimits


@click.command("deploy", short_help="Let a file serve under a name, or roll back.")
@click.argument("name")
@STORE
@click.option("--file", type=ONNX_FILE, metavar="MODEL.onnx", help="The file to deploy.")
@click.option(
    "--golden", type=GOLDEN_FOLDER, metavar="FOLDER",
    help="Its golden vectors. Without them the file is only loaded.",
)  # fmt: skip
@click.option(
    "--preprocessing", type=SPEC_FILE, metavar="SPEC",
    help="How pictures become its input, for the manifest.",
)  # fmt: skip
@click.option("--sha256", metavar="HEX", help="The digest that the file must have.")
@click.option(
    "--twin", type=ONNX_FILE, metavar="MODEL.onnx",
    help="Its quantized twin, which is replaced together with it.",
)  # fmt: skip
@click.option(
    "--twin-golden", type=GOLDEN_FOLDER, metavar="FOLDER", help="The twin's golden vectors."
)
@click.option("--rollback", "back", is_flag=True, help="Let the release before serve again.")
@KEEP
@machine_options
@limit_options(FILE_S)
def command(**request: Unpack[_Request]) -> Outcome:
    """Let a file serve as NAME from a store, after hashing, loading and computing it.

    The name changes from one moment to the next, and back with --rollback. Exit code 0: deployed,
    or unchanged because it serves already; 1: refused; 2: could not be done or judged, the old one
    serves. A child process reads and computes the files, within the limits.

    \b
    Examples:
      gate deploy digits --store /srv/models --file model.onnx --golden golden
      gate deploy digits --store /srv/models --file model.onnx --sha256 9f86d0...
      gate deploy digits --store /srv/models --rollback
    """
    if request["back"] == (request["file"] is not None):
        raise click.UsageError("say either --file MODEL.onnx or --rollback.")
    with_file = ("golden", "preprocessing", "sha256", "twin", "twin_golden")
    if request["back"] and any(request[name] for name in with_file):  # type: ignore[literal-required]
        raise click.UsageError("--golden, --preprocessing, --sha256 and --twin go with --file.")
    if request["twin_golden"] and not request["twin"]:
        raise click.UsageError("--twin-golden goes with --twin.")

    from gate.deploy.deploy import deploy, rollback
    from gate.deploy.manifest import EXACT, QUANTIZED
    from gate.deploy.source import SlotSource
    from gate.deploy.store import Store

    store, name = Store(request["store"], request["keep"]), request["name"]
    limits = request["limits"]
    file = request["file"]
    if file is None:
        with spinner("rolling back"):
            return _outcome(store, rollback(store, name, limits=limits))
    digest = given_digest(request["sha256"])
    source = SlotSource.local(
        file,
        golden=request["golden"],
        sha256=digest,
        preprocessing=request["preprocessing"],
        limits=limits,
    )
    slots = {EXACT: source}
    if request["twin"] is not None:
        twin, golden = request["twin"], request["twin_golden"]
        slots[QUANTIZED] = SlotSource.local(twin, golden=golden, limits=limits)
    with spinner("deploying"):
        return _outcome(store, deploy(store, name, slots))


def _outcome(store: Store, deployment: Deployment) -> Outcome:
    status = Status.of_promotion(deployment.outcome, None if deployment.judged else "ERROR")
    manifest = deployment.manifest
    plain = {
        "outcome": deployment.outcome,
        "name": deployment.name,
        "reason": deployment.reason,
        "manifest": manifest.to_plain() if manifest else None,
        "path": str(store.live_link(deployment.name)) if manifest else None,
    }
    return Outcome(status, plain, lambda console: _show(deployment, console))


def _show(deployment: Deployment, console: Console) -> None:
    from rich.text import Text

    from gate.story.wording import printable

    style = "bold red" if deployment.outcome == "refused" else "green"
    headline = f"{deployment.outcome.replace('_', ' ')}: {printable(deployment.reason)}"
    console.print(Text(headline, style=style))
