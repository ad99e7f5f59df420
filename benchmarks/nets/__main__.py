"""Judge random small nets and print how many correct ones were refused.

Exit code 0 if at most 1 in 1 000 correct nets was refused; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.nets.judge import Outcome, judge
from benchmarks.nets.run import judge_seeds
from gate.storage import files

MAX_REFUSED_SHARE = 1e-3
"""Highest allowed share of refused correct nets."""


def main(
    arguments: list[str] | None = None, *, judge_seed: Callable[[int], Outcome] = judge
) -> int:
    """Judge the nets, print the refused ones and the rates, and return the exit code."""
    options = _parser().parse_args(arguments)
    finished = []
    for outcome in judge_seeds(options.seeds, jobs=options.jobs, judge_seed=judge_seed):
        finished.append(outcome)
        line = _line(outcome)
        if line:
            print(line, flush=True)
        if options.json:
            rows = [item.plain() for item in finished]
            files.write_text(options.json, json.dumps(rows, indent=1) + "\n")
    print(format_rates(finished))
    return 0 if holds(finished) else 1


def holds(results: Iterable[Outcome]) -> bool:
    """Return True if at least one net was judged and few enough were refused."""
    judged = [outcome for outcome in results if outcome.ruling is not None and not outcome.shaky]
    blocked = sum(outcome.blocked for outcome in judged)
    return bool(judged) and blocked <= max(1, int(MAX_REFUSED_SHARE * len(judged)))


def format_rates(results: Iterable[Outcome]) -> str:
    """Return the rates in one line."""
    all_results = list(results)
    judged = [outcome for outcome in all_results if outcome.ruling is not None]
    shaky = [outcome for outcome in judged if outcome.shaky]
    firm = [outcome for outcome in judged if not outcome.shaky]
    inapplicable = f"{len(all_results) - len(judged)} of {len(all_results)} seeds not applicable"
    blocked = sum(outcome.blocked for outcome in firm)
    blocked_shaky = sum(outcome.blocked for outcome in shaky)
    return (
        f"{blocked} of {len(firm)} correct nets refused; of {len(shaky)} that float32 itself does "
        f"not answer, {blocked_shaky}; {inapplicable}."
    )


def _line(outcome: Outcome) -> str:
    """Return a line for a net that was refused or not applicable, else an empty string."""
    description = f"{outcome.seed} {outcome.summary}"
    if outcome.inapplicable:
        return f"n/a     {description} | {outcome.inapplicable}"
    if outcome.blocked and outcome.ruling is not None:
        word = "shaky  " if outcome.shaky else "REFUSED"
        return f"{word} {description} | " + "; ".join(outcome.ruling.reasons[:8])
    return ""


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last)) if last else range(int(first), int(first) + 1)


def _parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m benchmarks.nets", description=description)
    parser.add_argument("--seeds", type=_seeds, default=range(1000), metavar="FIRST:END")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome")
    return parser


if __name__ == "__main__":
    sys.exit(main())
