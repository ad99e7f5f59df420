"""Run the tools on the corpus: which faulty files pass, which correct ones are refused."""

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
from benchmarks.peers import comparator, loop, validations, verification
from benchmarks.peers.case import CannotJudge, Case, Judge

Said = Literal["passed", "refused", "unjudged"]

OURS = "gate"
PEERS: dict[str, Judge] = {
    "loop, allclose": loop.allclose,
    "loop, top-1": loop.top1,
    "Polygraphy": comparator.judge,
    "verify_onnx_program": verification.judge,
}
"""Judged with the batch of the export, as their documentation does."""

MORE_PEERS: dict[str, Judge] = {
    "onnx-diagnostic": validations.onnx_diagnostic,
    "optimum-onnx": validations.optimum,
    "pytest-torch": validations.pytest_torch,
    "olive-ai": validations.olive,
}
"""Each tool needs a separate environment (benchmarks/README.md)."""


@dataclass(frozen=True)
class Opinion:
    """What one said of one entry."""

    entry: str
    kind: str
    judge: str
    said: Said
    reason: str = ""


def run(
    entries: Sequence[Entry],
    ours: Callable[[Pair], bool] | None,
    *,
    peers: Mapping[str, Judge] = PEERS,
    advance: Callable[[int, int], None] | None = None,
) -> list[Opinion]:
    """Of every entry that can be exported: first by the peers, then by the gate, because what
    happens to a file while the gate measures it would else be seen by whoever comes later.
    `ours`: None leaves the gate out. `advance` is called with (judged, all)."""
    said: list[Opinion] = []
    with tempfile.TemporaryDirectory() as kept:
        bench = Bench(Path(kept))
        for place, entry in enumerate(entries, start=1):
            with tempfile.TemporaryDirectory() as folder, suppress(ExportRefused):
                pair = entry.make(bench, Path(folder) / "model.onnx")
                said += opinions(entry, pair, ours, peers)
            if advance is not None:
                advance(place, len(entries))
    return said


def opinions(
    entry: Entry,
    pair: Pair,
    ours: Callable[[Pair], bool] | None,
    peers: Mapping[str, Judge],
) -> Iterator[Opinion]:
    """Of all judges on one pair."""
    made = entry.architecture
    case = Case(pair.model, pair.path, pair.samples, made.outputs, made.classes, EXAMPLE)
    for name, judge in peers.items():
        yield opinion(entry, name, partial(judge, case))
    if ours is not None:
        yield opinion(entry, OURS, partial(ours, pair))


def opinion(entry: Entry, judge: str, passes: Callable[[], bool]) -> Opinion:
    """An exception about the file ends the script that asked, so it is a refusal."""
    try:
        said: Said = "passed" if passes() else "refused"
        reason = ""
    except CannotJudge as error:
        said, reason = "unjudged", str(error)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        said, reason = "refused", f"{type(error).__name__}: {first[:160]}"
    return Opinion(entry.name, entry.kind, judge, said, reason)


def rates(opinions: Sequence[Opinion]) -> Table:
    """Escapes and false blocks of each, of what it could judge."""
    table = Table(title="What each says of the corpus")
    for heading in ("judge", "escaped", "of faulty", "escape rate", "blocked", "of correct",
                    "false-block rate", "not judged"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "judge" else "right")
    for name, one in told(opinions)["judges"].items():
        table.add_row(
            name,
            str(one["escaped"]),
            str(one["faulty"]),
            _percent(one["escaped"], one["faulty"]),
            str(one["blocked"]),
            str(one["correct"]),
            _percent(one["blocked"], one["correct"]),
            str(one["unjudged"]),
        )
    return table


def by_kind(opinions: Sequence[Opinion]) -> Table:
    """Escapes by class of fault, of the entries that the judge could judge."""
    table = Table(title="Escaped by class of fault")
    table.add_column("class")
    names = judges_of(opinions)
    for name in names:
        table.add_column(name, justify="right")
    for kind in dict.fromkeys(one.kind for one in opinions if one.kind != CORRECT):
        cells = []
        for name in names:
            of = [one for one in opinions if (one.kind, one.judge) == (kind, name)]
            judged = [one for one in of if one.said != "unjudged"]
            escaped = sum(one.said == "passed" for one in judged)
            cells.append(f"{escaped} / {len(judged)}" if judged else "-")
        table.add_row(kind, *cells)
    return table


def judges_of(opinions: Sequence[Opinion]) -> list[str]:
    return list(dict.fromkeys(one.judge for one in opinions))


def told(opinions: Sequence[Opinion]) -> dict[str, Any]:
    """The counts of each judge, and every opinion that is wrong or missing."""
    judges = {}
    for name in judges_of(opinions):
        own = [one for one in opinions if one.judge == name]
        judged = [one for one in own if one.said != "unjudged"]
        faulty = [one for one in judged if one.kind != CORRECT]
        correct = [one for one in judged if one.kind == CORRECT]
        judges[name] = {
            "faulty": len(faulty),
            "escaped": sum(one.said == "passed" for one in faulty),
            "correct": len(correct),
            "blocked": sum(one.said == "refused" for one in correct),
            "unjudged": len(own) - len(judged),
        }
    right = {True: "passed", False: "refused"}
    wrong = [asdict(one) for one in opinions if one.said != right[one.kind == CORRECT]]
    return {"judges": judges, "wrong": wrong}


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
