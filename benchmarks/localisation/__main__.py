"""`python -m benchmarks.localisation [--only GLOB] [--half tune|confirm] [--json FILE]`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from benchmarks.localisation import faults, own_nets, timm_nets, transformers_nets
from benchmarks.localisation.architecture import ARCHITECTURES
from benchmarks.localisation.fault import FAULTS
from benchmarks.localisation.judging import Outcome, judge

_REGISTERED = (faults, own_nets, timm_nets, transformers_nets)
_MARKS = {True: "named", False: "MISSED", None: "-"}


def main() -> int:
    """Print a line a fault and exporter, and how many were named; 1 if any was not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.localisation")
    parser.add_argument("--only", default="*", help="glob of ARCHITECTURE/FAULT/EXPORTER")
    parser.add_argument("--half", choices=("tune", "confirm"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    outcomes = []
    for fault in FAULTS:
        architecture = ARCHITECTURES[fault.architecture]
        for exporter in architecture.exporters:
            wanted = fnmatch.fnmatch(f"{fault.name}/{exporter}", given.only)
            if wanted and given.half in (None, architecture.half):
                outcomes.append(judge(fault, exporter))
                print(_line(outcomes[-1]), flush=True)
    print(_table(outcomes))
    if given.json:
        given.json.write_text(json.dumps([one.plain() for one in outcomes], indent=1))
    return int(any(one.named is False for one in outcomes))


def _line(one: Outcome) -> str:
    start = f"{_MARKS[one.named]:6} {one.half:7} {one.name}/{one.exporter} ({one.seconds:.1f} s)"
    return (
        start if one.named else f"{start}\n       wanted {one.truth!r}: {one.first!r}: {one.cause}"
    )


def _table(outcomes: Iterable[Outcome]) -> str:
    rows = ["", "| half | exporter | architectures | faults | named |", "|---|---|---|---|---|"]
    seen = [one for one in outcomes if one.named is not None]
    for half in ("tune", "confirm"):
        for exporter in ("legacy", "dynamo"):
            some = [one for one in seen if (one.half, one.exporter) == (half, exporter)]
            if some:
                nets = {one.name.partition("/")[0] for one in some}
                named = sum(one.named is True for one in some)
                rows.append(f"| {half} | {exporter} | {len(nets)} | {len(some)} | {named} |")
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
