"""Judge the corpus and print which faults were detected.

Exit code 0 only if no fault passed, no correct file was refused, every faulty file was written, and
every located layer is the right one; 1 otherwise; 2 if no entry matches the name.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.corpus.distribution import print_distribution
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.judge import Gate, parity_gate
from benchmarks.corpus.outcome import Rates
from benchmarks.corpus.registry import select_entries
from benchmarks.corpus.run import REGISTRY, run
from benchmarks.corpus.table import format_rates, print_report
from gate.commands.progress import progress_bar
from gate.storage import files

_WIDTH = 140
"""Width of the output in columns if it is not a terminal."""


def main(arguments: list[str] | None = None, *, gate: Gate = parity_gate) -> int:
    """Judge the selected entries, print the results, and return the exit code."""
    options = build_parser("python -m benchmarks.corpus", __doc__ or "").parse_args(arguments)
    return judge_entries(select_entries(options.only), options, gate=gate)


def judge_entries(
    entries: Sequence[Entry],
    options: argparse.Namespace,
    *,
    gate: Gate = parity_gate,
    registry: str = REGISTRY,
) -> int:
    """Judge the entries of a registry with the given options, print, and return the exit code."""
    if options.runtime:
        gate = functools.partial(parity_gate, runtimes=options.runtime)
    if not entries:
        print(f"no entry matches {options.only!r}; names look like fault/sign/*", file=sys.stderr)
        return 2
    with progress_bar("corpus") as advance:
        outcomes = run(entries, gate=gate, jobs=options.jobs, advance=advance, registry=registry)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if options.distribution:
        print_distribution(outcomes, console)
    print_report(outcomes, console)
    rates = Rates.from_outcomes(outcomes)
    if options.json:
        document = {
            "sentence": format_rates(rates),
            "outcomes": [outcome.plain() for outcome in outcomes],
        }
        files.write_text(options.json, json.dumps(document, indent=1) + "\n")
    return 0 if rates.green else 1


def build_parser(program: str, documentation: str) -> argparse.ArgumentParser:
    """Build a parser with the options of every corpus."""
    description = documentation.splitlines()[0]
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--only", metavar="GLOB", help="entries by name, such as 'fault/sign/*'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome with its numbers")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that share the work (1)"
    )
    parser.add_argument(
        "--runtime", action="append", metavar="NAME", help="it judges, not the policy's own"
    )
    parser.add_argument(
        "--distribution", action="store_true", help="both sides of every bound, and the nearest"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
