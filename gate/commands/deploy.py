"""`gate deploy`, `gate deployed`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gate.commands.click_types import GOLDEN_FOLDER, ONNX_FILE, ExistingPath
from gate.commands.options import KEEP, STORE, golden_option, parse_digest, spec_option
from gate.commands.progress import spinner
from gate.commands.result import (
    CommandResult,
    ExitCode,
    limit_options,
    machine_options,
    print_lines,
    text_result,
)
from gate.errors import StorageError
from gate.sandbox.limits import FILE_S, SandboxLimits

if TYPE_CHECKING:
    from rich.console import Console

    from gate.deploy.deploy import Deployment
    from gate.deploy.store import Manifest, ModelStore


@click.command("deploy", short_help="Deploy a file under a name, or roll back.")
@click.argument("name")
@STORE
@click.option("--file", type=ONNX_FILE, metavar="MODEL.onnx", help="The file to deploy.")
@golden_option("Golden vectors of the file. Without them the file is only loaded.")
@spec_option("Preprocessing spec of the file; stored in the manifest.")
@click.option("--sha256", metavar="HEX", help="The digest that the file must have.")
@click.option(
    "--twin", type=ONNX_FILE, metavar="MODEL.onnx",
    help="The quantized twin; it is replaced together with the file.",
)  # fmt: skip
@click.option(
    "--twin-golden", type=GOLDEN_FOLDER, metavar="FOLDER", help="Golden vectors of the twin."
)
@click.option("--rollback", "back", is_flag=True, help="Restore the previous release.")
@KEEP
@machine_options
@limit_options(FILE_S)
def command(
    name: str,
    store: Path,
    file: Path | None,
    golden: Path | None,
    preprocessing: Path | None,
    sha256: str | None,
    twin: Path | None,
    twin_golden: Path | None,
    back: bool,
    keep: int,
    limits: SandboxLimits,
) -> CommandResult:
    """Deploy a file as NAME in a store, after hashing, loading and running it.

    The switch is atomic; --rollback reverts it. Exit code 0: deployed, or already deployed;
    1: refused; 2: not deployed or not judged, and the previous release stays. A child process
    reads and runs the files, within the limits.

    \b
    Examples:
      gate deploy digits --store /srv/models --file model.onnx --golden golden
      gate deploy digits --store /srv/models --file model.onnx --sha256 9f86d0...
      gate deploy digits --store /srv/models --rollback
    """
    if back == (file is not None):
        raise click.UsageError("use either --file MODEL.onnx or --rollback.")
    if back and (golden or preprocessing or sha256 or twin or twin_golden):
        raise click.UsageError("--golden, --preprocessing, --sha256 and --twin go with --file.")
    if twin_golden and not twin:
        raise click.UsageError("--twin-golden goes with --twin.")

    from gate.deploy.deploy import SlotSource, deploy, rollback_deployment
    from gate.deploy.store import EXACT, QUANTIZED, ModelStore

    models = ModelStore(store, keep)
    if file is None:
        with spinner("rolling back"):
            return _outcome(models, rollback_deployment(models, name, limits=limits))
    source = SlotSource.local(
        file,
        golden=golden,
        sha256=parse_digest(sha256),
        preprocessing=preprocessing,
        limits=limits,
    )
    slots = {EXACT: source}
    if twin is not None:
        slots[QUANTIZED] = SlotSource.local(twin, golden=twin_golden, limits=limits)
    with spinner("deploying"):
        return _outcome(models, deploy(models, name, slots))


def _outcome(store: ModelStore, deployment: Deployment) -> CommandResult:
    status = ExitCode.from_promotion(deployment.outcome, None if deployment.judged else "ERROR")
    manifest = deployment.manifest
    plain = {
        "outcome": deployment.outcome,
        "name": deployment.name,
        "reason": deployment.reason,
        "manifest": manifest.to_plain() if manifest else None,
        "path": str(store.live_link(deployment.name)) if manifest else None,
    }
    style = "bold red" if deployment.outcome == "refused" else "green"
    headline = f"{deployment.outcome.replace('_', ' ')}: {deployment.reason}"
    return text_result(plain, headline, status=status, style=style)


@click.command("deployed", short_help="Show the deployed releases.")
@click.argument("name", required=False)
@click.option(
    "--store", required=True, metavar="DIR", help="Folder of the store.",
    type=ExistingPath(StorageError, "the store of gate deploy or gate serve", kind="folder"),
)  # fmt: skip
@machine_options
def deployed_command(name: str | None, store: Path) -> CommandResult:
    """Show the deployed releases of a store, and those that a rollback would restore.

    Every file is hashed again. Exit code 0: all files are unchanged; 1: at least one differs from
    what was deployed; 2: nothing is deployed as NAME.

    \b
    Examples:
      gate deployed --store /srv/models
      gate deployed digits --store /srv/models --json
    """
    from gate.deploy.deploy import verify_slot
    from gate.deploy.store import ModelStore

    models = ModelStore(store)
    names = models.names() if name is None else (name,)
    manifests: list[Manifest] = []
    problems: dict[str, str] = {}
    for each in names:
        live = models.live(each)
        if live is None:
            raise StorageError(
                f"nothing is deployed as '{each}' in {store}. "
                f"It has {', '.join(models.names()) or 'no model'}. "
                "Deploy the model first: gate deploy."
            )
        manifests.append(live)
        for label, slot in live.slots.items():
            problem = verify_slot(models, slot)
            if problem is not None:
                problems[f"{each}/{label}"] = problem
    return CommandResult(
        ExitCode.REJECTED if problems else ExitCode.DONE,
        {"deployed": [live.to_plain() for live in manifests], "problems": problems},
        lambda console: _show_deployed(manifests, problems, console),
    )


def _show_deployed(manifests: list[Manifest], problems: dict[str, str], console: Console) -> None:
    from gate.report.terminal import add_row, build_table

    if not manifests:
        console.print("Nothing is deployed.")
        return
    table = build_table(("name", "release", "slot", "sha256", "bytes", "golden", "since", "before"))
    for live in manifests:
        for label, slot in live.slots.items():
            cells = (
                live.name,
                str(live.release),
                label,
                slot.sha256.short,
                str(slot.size_bytes),
                slot.golden.sha256.short if slot.golden else "none",
                live.deployed_at,
                ", ".join(str(earlier.release) for earlier in live.previous),
            )
            add_row(table, cells)
    console.print(table)
    print_lines(console, *(f"{slot}: {text}" for slot, text in problems.items()), style="red")
