"""Check, promote, review and revert files with a real MLflow server, and take screenshots.

The screenshots are written to build/screens/, with index.html, which shows them side by side.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.screens import scene
from benchmarks.screens.camera import LAPTOP, SCREEN, TELEPHONE, Camera, open_camera
from benchmarks.screens.scene import MODEL, GateCommands, ResultPages
from benchmarks.screens.sheet import write_docs_images, write_sheet
from benchmarks.screens.workbench import write_files
from gate.commands.result import ExitCode
from gate.errors import GateError
from gate.mlflow_client.connection import quiet_process
from tests.registry.servers import run_mlflow_server

_DARK = ("passed", "rejected by layer")


def main() -> int:
    """Take all screenshots. Returns exit code 2 if a command ended with an unexpected code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screens", description=__doc__)
    parser.add_argument("--folder", type=Path, default=scene.ROOT / "build" / "screens")
    parser.add_argument("--docs", action="store_true", help="also write those of the README")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    quiet_process()
    with tempfile.TemporaryDirectory(prefix="screens-") as scratch:
        work_folder = Path(scratch)
        (work_folder / "server").mkdir()
        (work_folder / "files").mkdir()
        _print_step("Training a small network on handwritten digits, exporting and spoiling it")
        write_files(work_folder / "files")
        _print_step("Starting MLflow")
        with (
            run_mlflow_server(work_folder / "server") as server,
            open_camera(folder) as screenshots,
        ):
            _run_scene(GateCommands(work_folder / "files", server.uri), screenshots)
    sheet = write_sheet(folder, screenshots.pictures)
    if options.docs:
        write_docs_images(folder, scene.ROOT / "docs")
    print(f"Took {len(screenshots.pictures)} pictures of reports and of MLflow's pages: {sheet}")
    return ExitCode.DONE


def _run_scene(commands: GateCommands, screenshots: Camera) -> None:
    """Run the scene, and take screenshots of each state of the model."""
    pages_by_check: dict[str, ResultPages] = {}
    _check(commands, scene.FIRST, pages_by_check)
    _print_step("Promoting the first release")
    commands.promote(scene.FIRST)
    _check(commands, scene.SECOND, pages_by_check)
    _print_step("Promoting the second, which waits for review")
    version = commands.promote(scene.SECOND)
    _shoot_version(
        commands,
        screenshots,
        "version that waits",
        version,
        awaited_text="Status: waits for review",
    )
    _print_step("Approving it")
    commands.approve(version)
    commands.reconcile()
    _shoot_version(
        commands, screenshots, "version approved", version, awaited_text="Status: champion since"
    )
    for check in scene.REJECTED:
        _check(commands, check, pages_by_check)
    _print_step("Putting a rejected file into service by hand; the guard takes it out")
    version = commands.set_alias_manually(pages_by_check["rejected by layer"])
    commands.reconcile()
    _shoot_version(commands, screenshots, "version after a revert", version, awaited_text="Status:")
    del pages_by_check[scene.FIRST.name]
    _shoot_reports(screenshots, pages_by_check)
    _shoot_runs(commands, screenshots, pages_by_check)


def _check(
    commands: GateCommands, check: scene.CheckedFile, pages_by_check: dict[str, ResultPages]
) -> None:
    _print_step(f"gate check: {check.name}")
    pages_by_check[check.name] = commands.judge(check)


def _shoot_version(
    commands: GateCommands, screenshots: Camera, name: str, version: str, *, awaited_text: str
) -> None:
    address = f"{commands.uri}/#/models/{MODEL}/versions/{version}"
    for size in (LAPTOP, SCREEN):
        screenshots.server(name, address, awaited_text=awaited_text, size=size)


def _shoot_reports(screenshots: Camera, pages_by_check: Mapping[str, ResultPages]) -> None:
    for name, pages in pages_by_check.items():
        for size in (TELEPHONE, LAPTOP, SCREEN):
            screenshots.report(name, pages.report, size=size)
        for size in (TELEPHONE, LAPTOP):
            screenshots.report(name, pages.report, size=size, full_page=True)
    for name in _DARK:
        screenshots.report(name, pages_by_check[name].report, size=TELEPHONE, scheme="dark")
        screenshots.report(
            name, pages_by_check[name].report, size=LAPTOP, scheme="dark", full_page=True
        )
    screenshots.print("rejected by layer", pages_by_check["rejected by layer"].report)


def _shoot_runs(
    commands: GateCommands, screenshots: Camera, pages_by_check: Mapping[str, ResultPages]
) -> None:
    run = pages_by_check["rejected by layer"].run
    experiment = run.split("/experiments/")[1].split("/")[0]
    runs_address = f"{commands.uri}/#/experiments/{experiment}/runs"
    screenshots.server("plain list of runs", runs_address, awaited_text="gate FAIL", size=LAPTOP)
    for size in (LAPTOP, SCREEN):
        screenshots.server("run page", run, awaited_text="gate FAIL", size=size)
    report_address = f"{run}/artifacts/report.html"
    screenshots.server("report in MLflow", report_address, awaited_text="report.html", size=SCREEN)


def _print_step(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.NOT_JUDGED)
