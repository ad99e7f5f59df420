"""Run the tools on the corpus, and count faulty files that pass and correct ones refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.entry import CORRECT, Entry
from benchmarks.corpus.exporters import EXAMPLE, ExportRefused
from benchmarks.peers import comparator, loop, verification
from benchmarks.peers.case import CannotJudge, Case, Judge

Verdict = Literal["passed", "refused", "unjudged"]

OURS = "gate"
PEERS: dict[str, Judge] = {
    "loop, allclose": loop.allclose,
    "loop, top-1": loop.top1,
    "Polygraphy": comparator.judge,
    "verify_onnx_program": verification.judge,
}
"""Peers that use the batch size of the export, as their documentation does."""


@dataclass(frozen=True)
class PeerVerdict:
    """The verdict of one judge on one entry."""

    entry: str
    kind: str
    judge: str
    verdict: Verdict
    reason: str = ""


def run(
    entries: Sequence[Entry],
    ours: Callable[[Pair], bool] | None,
    *,
    peers: Mapping[str, Judge] = PEERS,
    advance: Callable[[int, int], None] | None = None,
) -> list[PeerVerdict]:
    """Return the results on every entry that can be exported.

    The gate runs last, because some faults change the file while the gate measures it. `ours`: None
    leaves the gate out. `advance` is called with the number of judged entries and their total.
    """
    collected: list[PeerVerdict] = []
    with tempfile.TemporaryDirectory() as bench_folder:
        bench = Bench(Path(bench_folder))
        for count, entry in enumerate(entries, start=1):
            with tempfile.TemporaryDirectory() as folder, suppress(ExportRefused):
                pair = entry.make(bench, Path(folder) / "model.onnx")
                collected += collect_verdicts(entry, pair, ours, peers)
            if advance is not None:
                advance(count, len(entries))
    return collected


def collect_verdicts(
    entry: Entry,
    pair: Pair,
    ours: Callable[[Pair], bool] | None,
    peers: Mapping[str, Judge],
) -> Iterator[PeerVerdict]:
    """Yield the results of all judges on one pair."""
    architecture = entry.architecture
    case = Case(
        pair.model, pair.path, pair.samples, architecture.outputs, architecture.classes, EXAMPLE
    )
    for name, judge in peers.items():
        yield judge_pair(entry, name, partial(judge, case))
    if ours is not None:
        yield judge_pair(entry, OURS, partial(ours, pair))


def judge_pair(entry: Entry, judge: str, passes: Callable[[], bool]) -> PeerVerdict:
    """Return the result of one judge. An exception about the file is a refusal."""
    try:
        verdict: Verdict = "passed" if passes() else "refused"
        reason = ""
    except CannotJudge as error:
        verdict, reason = "unjudged", str(error)
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0]
        verdict, reason = "refused", f"{type(error).__name__}: {message[:160]}"
    return PeerVerdict(entry.name, entry.kind, judge, verdict, reason)


def rates_table(results: Sequence[PeerVerdict]) -> Table:
    """Return a table of the faulty files that pass and the correct ones refused of each judge."""
    table = Table(title="What each says of the corpus")
    for heading in ("judge", "escaped", "of faulty", "escape rate", "blocked", "of correct",
                    "false-block rate", "not judged"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "judge" else "right")
    for name, counts in summarize(results)["judges"].items():
        table.add_row(
            name,
            str(counts["escaped"]),
            str(counts["faulty"]),
            _percent(counts["escaped"], counts["faulty"]),
            str(counts["blocked"]),
            str(counts["correct"]),
            _percent(counts["blocked"], counts["correct"]),
            str(counts["unjudged"]),
        )
    return table


def summarize(results: Sequence[PeerVerdict]) -> dict[str, Any]:
    """Return the counts of each judge, and every result that is wrong or missing."""
    judges = {}
    for name in dict.fromkeys(result.judge for result in results):
        judge_results = [result for result in results if result.judge == name]
        valid = [result for result in judge_results if result.verdict != "unjudged"]
        faulty = [result for result in valid if result.kind != CORRECT]
        correct = [result for result in valid if result.kind == CORRECT]
        judges[name] = {
            "faulty": len(faulty),
            "escaped": sum(result.verdict == "passed" for result in faulty),
            "correct": len(correct),
            "blocked": sum(result.verdict == "refused" for result in correct),
            "unjudged": len(judge_results) - len(valid),
        }
    correct_verdict = {True: "passed", False: "refused"}
    wrong = [
        asdict(result)
        for result in results
        if result.verdict != correct_verdict[result.kind == CORRECT]
    ]
    return {"judges": judges, "wrong": wrong}


def _percent(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"
