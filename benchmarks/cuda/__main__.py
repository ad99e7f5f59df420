"""Measure everything that only a CUDA device can show, and propose the bounds on CUDA.

    .venv/bin/python -m benchmarks.cuda                 # on a machine with a device
    .venv/bin/python -m benchmarks.cuda --dry-run       # the same way, the CPU in its place

What is measured is kept, so that a run that was broken off goes on. Exit code 0 only if all that
was planned is measured and the tests passed; 1 if something failed or was left out; 2 without a
device. docs/cuda.md has the rest.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

from benchmarks.cuda.cell import Job
from benchmarks.cuda.crew import Crew
from benchmarks.cuda.device import Device
from benchmarks.cuda.gpu_tests import run_gpu_tests
from benchmarks.cuda.identity import ROOT, identity_of
from benchmarks.cuda.judged import judged
from benchmarks.cuda.markdown import markdown
from benchmarks.cuda.plan import Phase, Plan
from benchmarks.cuda.proposal import propose
from benchmarks.cuda.store import Kept, Store
from benchmarks.cuda.summary import Summary
from gate.commands.progress import Bar, progress_bar
from gate.storage import files

_TESTS_S = 300.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, and return the exit code."""
    asked = _parsed(arguments)
    device = Device(dry=asked.dry_run)
    reason = device.absent_reason()
    if reason is not None:
        print(
            f"{reason} Nothing was measured. Run this on a machine with a CUDA device, or walk the "
            "same way on the CPU: python -m benchmarks.cuda --dry-run",
            file=sys.stderr,
        )
        return 2
    plan = Plan.from_names(asked.only, quick=asked.quick)
    if not plan.cells and not plan.tests:
        print(f"no cell matches {asked.only}; names look like matrix/digits/tf32/ort-cuda",
              file=sys.stderr)  # fmt: skip
        return 2
    device.prepare()
    folder = asked.output or Path("build") / ("cuda-dry-run" if device.dry else "cuda")
    summary = Run(device, plan, folder, limit_s=asked.limit_minutes * 60).run(asked.jobs)
    files.write_text(folder / "cuda.json", json.dumps(summary.plain(), indent=1) + "\n")
    files.write_text(folder / "cuda.md", markdown(summary))
    for line in _last_words(summary, folder):
        say(line, device)
    return 0 if summary.complete else 1


class Run:
    """A plan, measured as far as time allows."""

    def __init__(self, device: Device, plan: Plan, folder: Path, *, limit_s: float) -> None:
        self._device, self._plan = device, plan
        self._deadline = time.monotonic() + limit_s
        self._store = Store(folder, identity_of(device), mark=device.mark)
        self._done = len(self._store.done(plan.cells))

    def run(self, jobs: int) -> Summary:
        """Phase after phase, then the summary of all that is kept."""
        tests = self._tests() if self._plan.tests else None
        total = len(self._plan.cells)
        with (
            progress_bar(_titled("cuda", self._device), total=total) as shown,
            Crew(
                self._device,
                self._store,
                deadline=self._deadline,
                each=functools.partial(self._each, shown),
            ) as crew,
        ):
            shown(self._done, total)
            for phase in self._plan.phases:
                self._phase(phase, crew, jobs=jobs)
        kept = {cell: one for cell in self._plan.cells if (one := self._store.get(cell))}
        left_out = [cell for cell in self._plan.cells if cell not in kept]
        cells = judged(kept, self._device)
        proposal = propose(cells, self._device)
        return Summary(self._device, self._store.identity, cells, left_out, tests, proposal)

    def _tests(self) -> Kept:
        """First of all: if these fail, the rest says little."""
        kept = self._store.get()
        if kept is None or kept.status == "failed":
            kept = run_gpu_tests(ROOT, limit_s=min(_TESTS_S, self._left_s))
            self._store.keep(kept)
        say(f"tests marked gpu: {kept.status} {kept.reason} {dict(kept.tests or {})}", self._device)
        return kept

    def _phase(self, phase: Phase, crew: Crew, *, jobs: int) -> None:
        done = self._store.done(phase.cells)
        left = [piece for job in phase.jobs for piece in job.without(done)]
        say(
            f"{phase.title}: {len(done)} cells are kept, {len(phase.cells) - len(done)} to "
            f"measure, {max(0.0, self._left_s / 60):.1f} minutes left",
            self._device,
        )
        crew.run(left, workers=jobs if phase.together else 1)

    def _each(self, shown: Bar, job: Job, subject: str) -> None:
        kept = {cell: one for cell in job.cells(subject) if (one := self._store.get(cell))}
        for found in judged(kept, self._device):
            self._done += 1
            noise = found.numbers().get("noise_ratio")
            number = "" if noise is None else f" noise_ratio {noise:.3g}"
            why = f" {found.why}" if found.why else ""
            count = f"{self._done}/{len(self._plan.cells)}"
            say(f"{count} {found.cell.name}: {found.kept.status}{number}{why}", self._device)
        shown(self._done, len(self._plan.cells))

    @property
    def _left_s(self) -> float:
        return self._deadline - time.monotonic()


def say(line: str, device: Device) -> None:
    """A line of the output: of a dry run it says so."""
    print(f"[{device.mark}] {line}" if device.mark else line, flush=True)


def _titled(title: str, device: Device) -> str:
    return f"{title}, {device.mark}" if device.mark else title


def _last_words(summary: Summary, folder: Path) -> list[str]:
    measured = len(summary.cells) - len(summary.failed)
    proposal = summary.proposal
    bounds = ", ".join(f"{name} {bound:g}" for name, bound in proposal.bounds.items())
    return [
        f"{measured} cells are measured, {len(summary.failed)} failed, "
        f"{len(summary.left_out)} left out for want of time",
        *(f"failed: {one.cell.name}: {one.kept.reason}" for one in summary.failed),
        f"proposed bounds: {bounds}"
        if proposal.stands
        else f"not a proposal: {'; '.join(proposal.objections)}",
        f"with these, {len(proposal.faults_passing)} faults pass on CUDA alone, "
        f"{len(proposal.correct_refused)} correct cells are refused, "
        f"{len(proposal.tf32_passing)} cells with TF32 pass",
        f"written: {folder / 'cuda.json'} and {folder / 'cuda.md'}",
    ]


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cuda", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--dry-run", action="store_true", help="the CPU in the device's place")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB",
        help="cells by name, such as 'matrix/*/tf32/*' or 'corpus/*'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one model, a few files of the corpus")
    parser.add_argument(
        "--limit-minutes", type=float, default=20.0, metavar="N",
        help="what is least important is left out then (20)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), metavar="N",
        help="processes that share the corpus (half of the cores)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="build/cuda[-dry-run]")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
