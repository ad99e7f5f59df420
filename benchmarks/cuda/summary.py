"""What was measured, as plain data: for JSON, and for the tables of Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cuda.cell import Cell
from benchmarks.cuda.device import Device
from benchmarks.cuda.judged import Judged
from benchmarks.cuda.proposal import Proposal, faults_passing
from benchmarks.cuda.store import Kept

Row = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """One run, with all that runs before it kept."""

    device: Device
    identity: Mapping[str, Any]
    cells: Sequence[Judged]
    left_out: Sequence[Cell]
    """For want of time."""
    tests: Kept | None
    proposal: Proposal

    @property
    def failed(self) -> list[Judged]:
        """Cells that are neither measured nor refused, for whatever reason."""
        return [one for one in self.cells if one.kept.status == "failed"]

    @property
    def complete(self) -> bool:
        """Whether everything that was planned is there."""
        tests = self.tests is None or self.tests.status == "measured"
        return tests and not self.failed and not self.left_out

    def plain(self) -> Row:
        """For JSON: every object of a dry run says that it is one."""
        proposed = "bounds" if self.proposal.stands else "not_a_proposal"
        plain = {
            "machine": dict(self.identity["device"]),
            "code": self.identity["code"],
            "complete": self.complete,
            "matrix": self.matrix(),
            "corpus": self.corpus(),
            "tests": self.tests_row(),
            "distribution": [asdict(one) for one in self.proposal.spreads],
            "proposal": {
                "stands": self.proposal.stands,
                "objections": list(self.proposal.objections),
                proposed: self.proposal.bounds,
                "faults_passing": list(self.proposal.faults_passing),
                "correct_refused": list(self.proposal.correct_refused),
                "tf32_passing": list(self.proposal.tf32_passing),
            },
            "failed": [{"cell": one.cell.name, "why": one.kept.reason} for one in self.failed],
            "left_out": [cell.name for cell in self.left_out],
        }
        if not self.proposal.stands:
            for row in plain["distribution"]:
                row["not_a_proposal"] = row.pop("bound")
        found: Row = _marked(plain, self.device.mark)
        return found

    def matrix(self) -> list[Row]:
        """A row for each cell of the matrix."""
        return [matrix_row(one, self.device) for one in self.cells if one.cell.part == "matrix"]

    def corpus(self) -> list[Row]:
        """A row for each runtime, by the built-in bounds."""
        cells = [one for one in self.cells if one.cell.part == "corpus"]
        rows = []
        for role in dict.fromkeys(one.cell.role for one in cells):
            of_role = [one for one in cells if one.cell.role == role]
            correct = [one for one in of_role if not one.faulty and (one.passes or one.refused)]
            faults = [one for one in of_role if one.faulty and (one.passes or one.refused)]
            rows.append(
                {
                    "runtime": self.device.name(role),
                    "correct": len(correct),
                    "correct_refused": [one.cell.subject for one in correct if one.refused],
                    "faults": len(faults),
                    "faults_passing": [one.cell.subject for one in faults if one.passes],
                    "not_exported": sum(one.kept.status == "not exported" for one in of_role),
                    "failed": sum(one.kept.status == "failed" for one in of_role),
                }
            )
        return rows

    def escaped(self) -> tuple[str, ...]:
        """Faults that no runtime on CUDA refuses by the built-in bounds."""
        return faults_passing(self.cells)

    def tests_row(self) -> Row | None:
        """Counts of the tests marked `gpu`; None: they were not to run."""
        if self.tests is None:
            return None
        counts = dict(self.tests.tests or {"passed": 0, "failed": 0, "skipped": 0, "reasons": {}})
        return {"status": self.tests.status, "why": self.tests.reason, **counts}


def matrix_row(one: Judged, device: Device) -> Row:
    """The numbers of one cell; None where there are none."""
    runtime = one.runtime
    outputs = runtime.outputs if runtime else ()
    classes = [output.classification for output in outputs if output.classification]
    found = one.numbers()
    return {
        "model": one.cell.subject,
        "setting": one.cell.setting,
        "runtime": device.name(one.cell.role),
        "status": one.kept.status,
        "max_abs_diff": max((output.max_abs_diff for output in outputs), default=None),
        "noise_ratio": found.get("noise_ratio"),
        "noise_peak": found.get("noise_peak"),
        "noise_diff": found.get("noise_diff"),
        "repeatability_ratio": found.get("repeatability_ratio"),
        "batch_invariance_ratio": found.get("batch_invariance_ratio"),
        "probe_noise_ratio": found.get("probe_noise_ratio"),
        "top1_agreement": min((each.top1_agreement for each in classes), default=None),
        "nodes": dict(runtime.nodes_per_provider) if runtime else {},
        "fallback_nodes": len(runtime.fallback_nodes) if runtime else None,
        "batch_size": runtime.latency.batch_size if runtime and runtime.latency else None,
        "median_ms": runtime.latency.median_ms if runtime and runtime.latency else None,
        "passes": one.passes,
        "why_not": one.why,
        "seconds": one.kept.seconds,
    }


def _marked(value: Any, mark: str) -> Any:
    """JSON has no infinities and no NaN: they are words."""
    if isinstance(value, dict):
        inner = {key: _marked(one, mark) for key, one in value.items()}
        return {"dry_run": mark, **inner} if mark else inner
    if isinstance(value, list | tuple):
        return [_marked(one, mark) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
