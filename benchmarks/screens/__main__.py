"""Check, promote, review and revert files with a real MLflow server, and take screenshots.

They are written to build/screens/, with index.html, which shows them side by side.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.screens import scene
from benchmarks.screens.camera import LAPTOP, SCREEN, TELEPHONE, Camera, camera
from benchmarks.screens.scene import MODEL, ExplanationInputs, Pages
from benchmarks.screens.sheet import write_sheet, write_small
from benchmarks.screens.workbench import lay_out
from gate.commands.result import ExitCode
from gate.errors import GateError
from gate.mlflow_client.connection import quiet_process
from tests.registry.servers import run_mlflow_server

_DARK = ("passed", "rejected by layer")


def main() -> int:
    """Take them all. Exit code 2 where a command did not end as it should."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screens", description=__doc__)
    parser.add_argument("--folder", type=Path, default=scene.ROOT / "build" / "screens")
    parser.add_argument("--docs", action="store_true", help="also write those of the README")
    asked = parser.parse_args()
    folder: Path = asked.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    quiet_process()
    with tempfile.TemporaryDirectory(prefix="screens-") as scratch:
        place = Path(scratch)
        (place / "server").mkdir()
        (place / "files").mkdir()
        _say("Training a small network on handwritten digits, exporting and spoiling it")
        lay_out(place / "files")
        _say("Starting MLflow")
        with run_mlflow_server(place / "server") as server, camera(folder) as taking:
            _act(ExplanationInputs(place / "files", server.uri), taking)
    sheet = write_sheet(folder, taking.taken)
    if asked.docs:
        write_small(folder, scene.ROOT / "docs")
    print(f"Took {len(taking.taken)} pictures of reports and of MLflow's pages: {sheet}")
    return ExitCode.DONE


def _act(acted: ExplanationInputs, taking: Camera) -> None:
    """The story of a model, with a picture of each of its states."""
    seen: dict[str, Pages] = {}
    _judge(acted, scene.FIRST, seen)
    _say("Promoting the first release")
    acted.promote(scene.FIRST)
    _judge(acted, scene.SECOND, seen)
    _say("Promoting the second, which waits for review")
    version = acted.promote(scene.SECOND)
    _version(acted, taking, "version that waits", version, shows="Status: waits for review")
    _say("Approving it")
    acted.approve(version)
    acted.reconcile()
    _version(acted, taking, "version approved", version, shows="Status: champion since")
    for judged in scene.REJECTED:
        _judge(acted, judged, seen)
    _say("Putting a rejected file into service by hand; the guard takes it out")
    version = acted.serve_by_hand(seen["rejected by layer"])
    acted.reconcile()
    _version(acted, taking, "version after a revert", version, shows="Status:")
    del seen[scene.FIRST.name]
    _reports(taking, seen)
    _runs(acted, taking, seen)


def _judge(acted: ExplanationInputs, judged: scene.Judged, seen: dict[str, Pages]) -> None:
    _say(f"gate check: {judged.name}")
    seen[judged.name] = acted.judge(judged)


def _version(
    acted: ExplanationInputs, taking: Camera, name: str, version: str, *, shows: str
) -> None:
    address = f"{acted.uri}/#/models/{MODEL}/versions/{version}"
    for size in (LAPTOP, SCREEN):
        taking.server(name, address, shows=shows, size=size)


def _reports(taking: Camera, seen: Mapping[str, Pages]) -> None:
    for name, pages in seen.items():
        for size in (TELEPHONE, LAPTOP, SCREEN):
            taking.report(name, pages.report, size=size)
        for size in (TELEPHONE, LAPTOP):
            taking.report(name, pages.report, size=size, whole=True)
    for name in _DARK:
        taking.report(name, seen[name].report, size=TELEPHONE, scheme="dark")
        taking.report(name, seen[name].report, size=LAPTOP, scheme="dark", whole=True)
    taking.print("rejected by layer", seen["rejected by layer"].report)


def _runs(acted: ExplanationInputs, taking: Camera, seen: Mapping[str, Pages]) -> None:
    run = seen["rejected by layer"].run
    experiment = run.split("/experiments/")[1].split("/")[0]
    plain = f"{acted.uri}/#/experiments/{experiment}/runs"
    taking.server("plain list of runs", plain, shows="gate FAIL", size=LAPTOP)
    for size in (LAPTOP, SCREEN):
        taking.server("run page", run, shows="gate FAIL", size=size)
    shown = f"{run}/artifacts/report.html"
    taking.server("report in MLflow", shown, shows="report.html", size=SCREEN)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ExitCode.NOT_JUDGED)
