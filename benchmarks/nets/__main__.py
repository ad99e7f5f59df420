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
from benchmarks.nets.run import outcomes
from gate.storage import files

ALLOWED = 1e-3
"""Share of correct nets that may be refused."""


def main(arguments: list[str] | None = None, *, judged: Callable[[int], Outcome] = judge) -> int:
    """Judge, print, and return the exit code."""
    asked = _parser().parse_args(arguments)
    found = []
    for one in outcomes(asked.seeds, jobs=asked.jobs, judged=judged):
        found.append(one)
        line = _line(one)
        if line:
            print(line, flush=True)
        if asked.json:
            told = [each.plain() for each in found]
            files.write_text(asked.json, json.dumps(told, indent=1) + "\n")
    print(sentence(found))
    return 0 if holds(found) else 1


def holds(found: Iterable[Outcome]) -> bool:
    """True if nets were judged, and few enough refused."""
    judged = [one for one in found if one.ruling is not None and not one.shaky]
    blocked = sum(one.blocked for one in judged)
    return bool(judged) and blocked <= max(1, int(ALLOWED * len(judged)))


def sentence(found: Iterable[Outcome]) -> str:
    """The rates in one line."""
    seen = list(found)
    judged = [one for one in seen if one.ruling is not None]
    shaky = [one for one in judged if one.shaky]
    firm = [one for one in judged if not one.shaky]
    rest = f"{len(seen) - len(judged)} of {len(seen)} seeds not applicable"
    blocked = sum(one.blocked for one in firm)
    also = sum(one.blocked for one in shaky)
    return (
        f"{blocked} of {len(firm)} correct nets refused; of {len(shaky)} that float32 itself does "
        f"not answer, {also}; {rest}."
    )


def _line(one: Outcome) -> str:
    """Of what was judged wrongly, or not at all."""
    place = f"{one.seed} {one.summary}"
    if one.inapplicable:
        return f"n/a     {place} | {one.inapplicable}"
    if one.blocked and one.ruling is not None:
        word = "shaky  " if one.shaky else "REFUSED"
        return f"{word} {place} | " + "; ".join(one.ruling.reasons[:8])
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
