"""Judge the corpus and print which faults were detected.

Exit code 0 only if nothing escaped, nothing correct was blocked, every fault has its file, and
every layer that was named is the right one; 1 otherwise; 2 if no entry has such a name.
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
from benchmarks.corpus.registry import chosen
from benchmarks.corpus.run import REGISTRY, run
from benchmarks.corpus.table import report, sentence
from gate.commands.progress import progress_bar
from gate.storage import files

_WIDTH = 140
"""Columns where the output is no terminal."""


def main(arguments: list[str] | None = None, *, gate: Gate = parity_gate) -> int:
    """Judge, print, and return the exit code."""
    parser = parser_of("python -m benchmarks.corpus", __doc__ or "")
    parser.add_argument(
        "--runtime", action="append", metavar="NAME", help="it judges, not the policy's own"
    )
    asked = parser.parse_args(arguments)
    if asked.runtime:
        gate = functools.partial(parity_gate, runtimes=asked.runtime)
    return judged(chosen(asked.only), asked, gate=gate)


def judged(
    entries: Sequence[Entry],
    asked: argparse.Namespace,
    *,
    gate: Gate = parity_gate,
    registry: str = REGISTRY,
) -> int:
    """Judge the entries of a registry as the options say, print, and return the exit code."""
    if not entries:
        print(f"no entry matches {asked.only!r}; names look like fault/sign/*", file=sys.stderr)
        return 2
    with progress_bar("corpus") as advance:
        outcomes = run(entries, gate=gate, jobs=asked.jobs, advance=advance, registry=registry)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if asked.distribution:
        print_distribution(outcomes, console)
    report(outcomes, console)
    rates = Rates.from_outcomes(outcomes)
    if asked.json:
        told = {"sentence": sentence(rates), "outcomes": [one.plain() for one in outcomes]}
        files.write_text(asked.json, json.dumps(told, indent=1) + "\n")
    return 0 if rates.green else 1


def parser_of(program: str, documentation: str) -> argparse.ArgumentParser:
    """The options that every corpus has."""
    description = documentation.splitlines()[0]
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--only", metavar="GLOB", help="entries by name, such as 'fault/sign/*'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome with its numbers")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes that share the work (1)"
    )
    parser.add_argument(
        "--distribution", action="store_true", help="both sides of every bound, and the nearest"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
